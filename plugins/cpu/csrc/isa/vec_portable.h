// 16 lanes as an array, for every processor; compilers turn the loops into what it has. See vec_avx512.h.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace OCTAVO_ISA {

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};

template <class T, class G>
inline T lanes(G g) {
  T out;
  for (int i = 0; i < 16; ++i) out.v[i] = g(i);
  return out;
}
template <class To, class From>
inline To bits_of(From x) {
  To out;
  static_assert(sizeof(To) == sizeof(From));
  std::memcpy(&out, &x, sizeof(out));
  return out;
}

inline F set1(float x) {
  return lanes<F>([=](int) { return x; });
}
inline F zero() { return set1(0.0f); }
inline F load_n(const float* p, int n) {
  F out = zero();
  std::memcpy(out.v, p, sizeof(float) * n);
  return out;
}
inline F load(const float* p) { return load_n(p, 16); }
inline void store_n(float* p, F a, int n) { std::memcpy(p, a.v, sizeof(float) * n); }
inline void store(float* p, F a) { store_n(p, a, 16); }
inline F operator+(F a, F b) {
  return lanes<F>([&](int i) { return a.v[i] + b.v[i]; });
}
inline F operator-(F a, F b) {
  return lanes<F>([&](int i) { return a.v[i] - b.v[i]; });
}
inline F operator*(F a, F b) {
  return lanes<F>([&](int i) { return a.v[i] * b.v[i]; });
}
inline F operator/(F a, F b) {
  return lanes<F>([&](int i) { return a.v[i] / b.v[i]; });
}
inline F fma(F a, F b, F c) {  // rounded twice where the processor has no such instruction
  return lanes<F>([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline F fnma(F a, F b, F c) {
  return lanes<F>([&](int i) { return c.v[i] - a.v[i] * b.v[i]; });
}
inline F max(F a, F b) {  // b where one is NaN, as on x86
  return lanes<F>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F min(F a, F b) {
  return lanes<F>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline F abs(F a) {
  return lanes<F>([&](int i) { return std::fabs(a.v[i]); });
}
inline F sqrt(F a) {
  return lanes<F>([&](int i) { return std::sqrt(a.v[i]); });
}
inline F round_even(F a) {
  return lanes<F>([&](int i) { return std::nearbyintf(a.v[i]); });
}
inline F select_less(F a, F b, F yes, F no) {
  return lanes<F>([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
}

inline I set1(int32_t x) {
  return lanes<I>([=](int) { return x; });
}
inline I load(const int32_t* p) {
  I out;
  std::memcpy(out.v, p, sizeof(out.v));
  return out;
}
inline void store(int32_t* p, I a) { std::memcpy(p, a.v, sizeof(a.v)); }
inline int32_t wrap(uint32_t x) { return static_cast<int32_t>(x); }
inline I operator+(I a, I b) {
  return lanes<I>([&](int i) { return wrap(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i])); });
}
inline I operator-(I a, I b) {
  return lanes<I>([&](int i) { return wrap(static_cast<uint32_t>(a.v[i]) - static_cast<uint32_t>(b.v[i])); });
}
inline I operator*(I a, I b) {
  return lanes<I>([&](int i) { return wrap(static_cast<uint32_t>(a.v[i]) * static_cast<uint32_t>(b.v[i])); });
}
inline I operator&(I a, I b) {
  return lanes<I>([&](int i) { return a.v[i] & b.v[i]; });
}
template <int n>
inline I shift_left(I a) {
  return lanes<I>([&](int i) { return wrap(static_cast<uint32_t>(a.v[i]) << n); });
}
template <int n>
inline I shift_right(I a) {
  return lanes<I>([&](int i) { return wrap(static_cast<uint32_t>(a.v[i]) >> n); });
}
inline I to_int(F a) {  // what does not fit becomes the smallest number, as on x86
  return lanes<I>([&](int i) {
    const float r = std::nearbyintf(a.v[i]);
    return r >= -2147483648.0f && r < 2147483648.0f ? static_cast<int32_t>(r) : INT32_MIN;
  });
}
inline F to_float(I a) {
  return lanes<F>([&](int i) { return static_cast<float>(a.v[i]); });
}
inline F as_float(I a) { return bits_of<F>(a); }
inline I as_int(F a) { return bits_of<I>(a); }

inline float from_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
  if (exponent == 31) return bits_of<float>(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(mantissa) * 0x1p-24f;
  return bits_of<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline uint16_t to_f16(float x) {
  const uint32_t bits = bits_of<uint32_t>(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // subnormal: the addition rounds
    const float shifted = bits_of<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of<uint32_t>(shifted) - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | (((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112 << 10)));
}

inline F load_bf16(const uint16_t* p) {
  return lanes<F>([&](int i) { return bits_of<float>(static_cast<uint32_t>(p[i]) << 16); });
}
inline F load_f16(const uint16_t* p) {
  return lanes<F>([&](int i) { return from_f16(p[i]); });
}
inline F load_i8(const int8_t* p) {
  return lanes<F>([&](int i) { return static_cast<float>(p[i]); });
}
inline F load_u8(const uint8_t* p) {
  return lanes<F>([&](int i) { return static_cast<float>(p[i]); });
}
inline F load_e4m3(const uint8_t* p) {
  return lanes<F>([&](int i) {
    const int magnitude = p[i] & 0x7f, half = magnitude == 0x7f ? 0x7e00 : magnitude << 7;
    return from_f16(static_cast<uint16_t>((p[i] & 0x80) << 8 | half)) * 256.0f;
  });
}
inline F load_e5m2(const uint8_t* p) {
  return lanes<F>([&](int i) { return from_f16(static_cast<uint16_t>(p[i] << 8)); });
}
inline void store_bf16(uint16_t* p, F a) {
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = bits_of<uint32_t>(a.v[i]);
    p[i] = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}
inline void store_f16(uint16_t* p, F a) {
  for (int i = 0; i < 16; ++i) p[i] = to_f16(a.v[i]);
}

inline float sum(F a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  return a.v[0];
}
inline float max_across(F a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  return a.v[0];
}

}  // namespace OCTAVO_ISA
