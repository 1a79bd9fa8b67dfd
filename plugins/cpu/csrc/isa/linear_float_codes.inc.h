// Packed codes as fp32. Each kind reads `kUnit` inputs of 16 outputs at a time, in `kUnitBytes`; get<i> is the i-th of
// them, without the weight's scale, divided by `factor`. What is left of a chunk after whole units is read one by one.
// Where a code is `kCheap` to decode, a few instructions, more rows do so in registers; see linear_float.inc.h.
namespace OCTAVO_ISA {

using octavo::Code, octavo::Weight, octavo::kLanes;

template <int kBits>
struct IntegerCodes {
  static constexpr int kUnit = 32 / kBits, kUnitBytes = 64;
  static constexpr bool kCheap = true;
  float factor = 1;
  using Raw = I;

  F zero;
  explicit IntegerCodes(const Weight& w) : zero(set1(static_cast<float>(w.has_zero ? w.zero : 0))) {}

  [[gnu::always_inline]] Raw read(const uint8_t* from) const { return load(reinterpret_cast<const int32_t*>(from)); }
  template <int i>
  [[gnu::always_inline]] F get(const Raw& raw) const {
    return to_float(shift_right<8 * (i % 4) + kBits * (i / 4)>(raw) & set1((1 << kBits) - 1)) - zero;
  }
  F one(const uint8_t*) const { return zero; }  // segments are whole units
};

#ifdef OCTAVO_AVX512VNNI
// A permute looks at the low 4 bits of each lane: one code of 4 bits, or two of 2, of which a table heeds one.
template <>
struct IntegerCodes<4> {
  static constexpr int kUnit = 8, kUnitBytes = 64;
  static constexpr bool kCheap = true;
  float factor = 1;
  using Raw = I;

  F values;
  explicit IntegerCodes(const Weight& w) {
    const __m512i codes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    values = to_float(I{codes} - set1(w.has_zero ? w.zero : 0));
  }

  [[gnu::always_inline]] Raw read(const uint8_t* from) const { return load(reinterpret_cast<const int32_t*>(from)); }
  template <int i>
  [[gnu::always_inline]] F get(const Raw& raw) const {
    return {_mm512_permutexvar_ps(shift_right<8 * (i % 4) + 4 * (i / 4)>(raw).v, values.v)};
  }
  F one(const uint8_t*) const { return values; }
};

template <>
struct IntegerCodes<2> {
  static constexpr int kUnit = 16, kUnitBytes = 64;
  static constexpr bool kCheap = true;
  float factor = 1;
  using Raw = I;

  F low, high;
  explicit IntegerCodes(const Weight& w) {
    const I offset = set1(w.has_zero ? w.zero : 0);
    low = to_float(I{_mm512_set_epi32(3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0)} - offset);
    high = to_float(I{_mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0)} - offset);
  }

  [[gnu::always_inline]] Raw read(const uint8_t* from) const { return load(reinterpret_cast<const int32_t*>(from)); }
  template <int i>
  [[gnu::always_inline]] F get(const Raw& raw) const {
    constexpr int part = i / 4;
    const __m512i index = shift_right<8 * (i % 4) + part / 2 * 4>(raw).v;
    return {_mm512_permutexvar_ps(index, part % 2 ? high.v : low.v)};
  }
  F one(const uint8_t*) const { return low; }
};

template <>
struct IntegerCodes<8> {
  static constexpr int kUnit = 4, kUnitBytes = 64;
  static constexpr bool kCheap = true;
  float factor = 1;
  using Raw = I;

  I offset;
  explicit IntegerCodes(const Weight& w) : offset(set1(w.has_zero ? w.zero : 0)) {}

  [[gnu::always_inline]] Raw read(const uint8_t* from) const { return load(reinterpret_cast<const int32_t*>(from)); }
  template <int i>
  [[gnu::always_inline]] F get(const Raw& raw) const {
    constexpr int byte = static_cast<int>(0x80808000u) + i;  // and three of zeros
    const __m512i alone = _mm512_set4_epi32(byte + 12, byte + 8, byte + 4, byte);
    // A shuffle, as shifts would compete with the conversion for a port.
    return to_float(I{_mm512_shuffle_epi8(raw.v, alone)} - offset);
  }
  F one(const uint8_t*) const { return zero(); }
};
#endif

template <class Number, F (*load_numbers)(const Number*)>
struct PlainCodes {
  static constexpr int kUnit = 4, kUnitBytes = kUnit * kLanes * sizeof(Number);
  static constexpr bool kCheap = sizeof(Number) > 1;
  float factor = 1;
  using Raw = const Number*;

  explicit PlainCodes(const Weight&) {}
  [[gnu::always_inline]] Raw read(const uint8_t* from) const { return reinterpret_cast<const Number*>(from); }
  template <int i>
  [[gnu::always_inline]] F get(const Raw& raw) const {
    return load_numbers(raw + i * kLanes);
  }
  F one(const uint8_t* from) const { return load_numbers(reinterpret_cast<const Number*>(from)); }
};

using BF16Codes = PlainCodes<uint16_t, load_bf16>;
using F16Codes = PlainCodes<uint16_t, load_f16>;
using F32Codes = PlainCodes<float, load>;
using E5M2Codes = PlainCodes<uint8_t, load_e5m2>;

#ifdef OCTAVO_AVX512VNNI
// Two inputs at a time, as fp16 numbers 256 times smaller.
struct E4M3Codes {
  static constexpr int kUnit = 2, kUnitBytes = 32;
  static constexpr bool kCheap = false;
  float factor = 256;
  struct Raw {
    F values[2];
  };

  explicit E4M3Codes(const Weight&) {}
  static __m512i halves(__m512i codes) {
    const __m512i signs_twice = _mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 1);
    const __m512i half = _mm512_and_si512(signs_twice, _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
    const __m512i all_ones = _mm512_set1_epi16(0x7f);
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(_mm512_and_si512(codes, all_ones), all_ones);
    return _mm512_mask_mov_epi16(half, nan, _mm512_set1_epi16(0x7e00));
  }
  [[gnu::always_inline]] Raw read(const uint8_t* from) const {
    const __m512i half = halves(_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
    return {{{_mm512_cvtph_ps(_mm512_castsi512_si256(half))}, {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1))}}};
  }
  template <int i>
  [[gnu::always_inline]] F get(const Raw& raw) const {
    return raw.values[i];
  }
  F one(const uint8_t* from) const { return load_e4m3(from) * set1(1 / factor); }
};
#else
using E4M3Codes = PlainCodes<uint8_t, load_e4m3>;
#endif

// Runs with the kind of a weight's codes.
template <class Do>
inline void with_codes(const Weight& w, const Do& run) {
  switch (w.code) {
    case Code::u2: return run(IntegerCodes<2>(w));
    case Code::u4: return run(IntegerCodes<4>(w));
    case Code::u8: return run(IntegerCodes<8>(w));
    case Code::e4m3: return run(E4M3Codes(w));
    case Code::e5m2: return run(E5M2Codes(w));
    case Code::bf16: return run(BF16Codes(w));
    case Code::f16: return run(F16Codes(w));
    default: return run(F32Codes(w));
  }
}

}  // namespace OCTAVO_ISA
