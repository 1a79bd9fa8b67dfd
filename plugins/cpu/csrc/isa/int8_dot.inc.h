// Dot products of unsigned codes and int8 inputs, four bytes to a lane, exact in int32.
namespace OCTAVO_ISA {

#if defined(OCTAVO_AVX512VNNI)

constexpr int kDotRows = 12, kDotBlocks = 2;  // rows and blocks of outputs that a tile keeps in registers

template <bool small>
inline I dot(I total, I codes, I x) {
  return {_mm512_dpbusd_epi32(total.v, codes.v, x.v)};
}

#elif defined(OCTAVO_AVX2)

constexpr int kDotRows = 4, kDotBlocks = 1;

// vpmaddubsw saturates at 16 bits: codes of up to 4 bits cannot reach that; others take 16-bit products, two by two.
template <bool small>
inline __m256i dot(__m256i total, __m256i codes, __m256i x) {
  if constexpr (small) {
    return _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
  } else {
    const __m256i even = _mm256_and_si256(codes, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(codes, 8);
    const __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), x_odd = _mm256_srai_epi16(x, 8);
    return _mm256_add_epi32(total, _mm256_add_epi32(_mm256_madd_epi16(even, x_even), _mm256_madd_epi16(odd, x_odd)));
  }
}
template <bool small>
inline I dot(I total, I codes, I x) {
  return {dot<small>(total.lo, codes.lo, x.lo), dot<small>(total.hi, codes.hi, x.hi)};
}

#else

constexpr int kDotRows = 4, kDotBlocks = 1;

template <bool small>
inline I dot(I total, I codes, I x) {
  uint8_t a[64];
  int8_t b[64];
  std::memcpy(a, codes.v, 64);
  std::memcpy(b, x.v, 64);
  for (int lane = 0; lane < 16; ++lane) {
    for (int byte = 0; byte < 4; ++byte) total.v[lane] += a[4 * lane + byte] * b[4 * lane + byte];
  }
  return total;
}

#endif

inline I load_codes(const uint8_t* p) { return load(reinterpret_cast<const int32_t*>(p)); }

inline I spread(const int8_t* p) {  // four inputs to all lanes
  int32_t word;
  std::memcpy(&word, p, 4);
  return set1(word);
}

// Codes 4 * part ... 4 * part + 3 of a unit, one a byte.
template <int bits, int part>
inline I unpack(I words) {
  if constexpr (bits == 8) {
    return words;
  } else {
    return shift_right<bits * part>(words) & set1(0x01010101 * ((1 << bits) - 1));
  }
}

}  // namespace OCTAVO_ISA
