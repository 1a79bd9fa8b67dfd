// What this machine can do: fused multiply-adds, and reading memory. Compiled by linear_float.py with -march=native.
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
  Vector a[10];
  for (int i = 0; i < 10; ++i) a[i] = Vector{} + (1.0f + static_cast<float>(i));
  const Vector factor = Vector{} + 0.999f, term = Vector{} + 0.001f;
  const double start = now();
  double spent = 0;
  int64_t rounds = 0;
  for (; spent < seconds; spent = now() - start, ++rounds) {
    for (int i = 0; i < 10000; ++i) {
#define STEP(j) a[j] = a[j] * factor + term; asm volatile("" : "+v"(a[j]));
      STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) STEP(8) STEP(9)
    }
  }
  return rounds * 10000.0 * 10 * kLanes * 2 / spent;
}

// Bytes a second of one thread that reads `bytes` bytes again and again, over so many seconds.
extern "C" double read_rate(const float* data, int64_t bytes, double seconds) {
  const int64_t vectors = bytes / (kBytes * 8) * 8;
  Vector a[8] = {};
  const double start = now();
  double spent = 0;
  int64_t rounds = 0;
  for (; spent < seconds; spent = now() - start, ++rounds) {
    const auto* at = reinterpret_cast<const Vector*>(data);
    for (int64_t i = 0; i < vectors; i += 8)
      for (int j = 0; j < 8; ++j) a[j] += at[i + j];
    for (int j = 0; j < 8; ++j) asm volatile("" : "+v"(a[j]));
  }
  return rounds * static_cast<double>(vectors) * kBytes / spent;
}
