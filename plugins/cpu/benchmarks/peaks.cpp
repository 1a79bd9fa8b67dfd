// What this machine can do: multiply-adds of floats and of int8, and reading memory. Compiled by peaks.py with -march=native.
#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

#include <chrono>
#include <cstdint>

namespace {

#ifdef __AVX512F__
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
typedef float Vector __attribute__((vector_size(kBytes), aligned(4)));
constexpr int kLanes = kBytes / 4;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

// Floating-point operations a second of one thread, over so many seconds.
extern "C" double multiply_add_rate(double seconds) {
  // Enough to hide the latency.
  Vector a = Vector{} + 1.0f, b = a, c = a, d = a, e = a, f = a, g = a, h = a, i = a, j = a;
  const Vector factor = Vector{} + 0.999f, term = Vector{} + 0.001f;
  const double start = now();
  double spent = 0;
  int64_t rounds = 0;
  for (; spent < seconds; spent = now() - start, ++rounds) {
    for (int round = 0; round < 10000; ++round) {
      a = a * factor + term, b = b * factor + term, c = c * factor + term, d = d * factor + term, e = e * factor + term;
      f = f * factor + term, g = g * factor + term, h = h * factor + term, i = i * factor + term, j = j * factor + term;
      asm volatile("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f), "+v"(g), "+v"(h), "+v"(i), "+v"(j));
    }
  }
  return rounds * 10000.0 * 10 * kLanes * 2 / spent;
}

// Multiplications and additions a second of one thread's 4-way int8 dot products; 0 where this processor has none.
extern "C" double int8_rate(double seconds) {
#ifdef __AVX512VNNI__
  __m512i sums[12] = {};
  const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
  const double start = now();
  double spent = 0;
  int64_t rounds = 0;
  for (; spent < seconds; spent = now() - start, ++rounds) {
    for (int round = 0; round < 10000; ++round) {
#pragma GCC unroll 12
      for (int chain = 0; chain < 12; ++chain) {
        sums[chain] = _mm512_dpbusd_epi32(sums[chain], a, b);
        asm volatile("" : "+v"(sums[chain]));
      }
    }
  }
  return rounds * 10000.0 * 12 * 128 / spent;
#else
  (void)seconds;
  return 0;
#endif
}

// Bytes a second of one thread that reads `bytes` bytes again and again, over so many seconds.
extern "C" double read_rate(const float* data, int64_t bytes, double seconds) {
  Vector a = {}, b = a, c = a, d = a;
  const double start = now();
  double spent = 0;
  int64_t rounds = 0;
  for (; spent < seconds; spent = now() - start, ++rounds) {
    const auto* at = reinterpret_cast<const Vector*>(data);
    for (int64_t left = bytes / (4 * kBytes); left > 0; --left, at += 4) a += at[0], b += at[1], c += at[2], d += at[3];
    asm volatile("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d));
  }
  return rounds * static_cast<double>(bytes / (4 * kBytes)) * 4 * kBytes / spent;
}
