// Dot products of unsigned codes and int8 inputs, four bytes to a lane, exact in int32.
namespace OCTAVO_ISA {

#if defined(OCTAVO_AVX512VNNI)

constexpr int kDotRows = 12, kDotBlocks = 2;  // rows and blocks of outputs that a tile keeps in registers

// Not the intrinsic: with it gcc 12 copies each sum of a large tile through the stack at every step.
template <bool small>
inline I dot(I total, I codes, I x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(total.v) : "v"(codes.v), "v"(x.v));
  return total;
}

inline I load_bytes(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline I times_short(I zeros, I sums) { return {_mm512_madd_epi16(zeros.v, sums.v)}; }

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

inline I load_bytes(const uint8_t* p) {
  const __m128i raw = load_128(p);
  return {_mm256_cvtepu8_epi32(raw), _mm256_cvtepu8_epi32(_mm_srli_si128(raw, 8))};
}
inline I times_short(I zeros, I sums) {
  return {_mm256_madd_epi16(zeros.lo, sums.lo), _mm256_madd_epi16(zeros.hi, sums.hi)};
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

inline I load_bytes(const uint8_t* p) {
  return lanes<I>([&](int i) { return static_cast<int32_t>(p[i]); });
}
inline I times_short(I zeros, I sums) { return zeros * sums; }

#endif

// Segments of fewer inputs have sums of 16 bits, which times_short multiplies by bytes in one step.
constexpr int64_t kShort = 256;

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
