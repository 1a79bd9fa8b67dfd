// What this machine can do at most: bytes read and int8 products in a second, on so many threads.
#include <immintrin.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

template <class F>
double seconds(int threads, F work) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(work, t);
  work(0);
  for (auto& other : others) other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

volatile int64_t sink;

}  // namespace

extern "C" {

// Bytes a second while `memory` is read `times` times.
double read_rate(const uint8_t* memory, int64_t bytes, int times, int threads) {
  const double taken = seconds(threads, [=](int t) {
    const int64_t first = bytes * t / threads / 256 * 256, last = bytes * (t + 1) / threads / 256 * 256;
    uint64_t sums[32] = {};
    for (int i = 0; i < times; ++i) {
      for (int64_t at = first; at < last; at += 256) {
        uint64_t words[32];
        std::memcpy(words, memory + at, 256);
        for (int w = 0; w < 32; ++w) sums[w] ^= words[w];
      }
    }
    for (uint64_t sum : sums) sink = static_cast<int64_t>(sum);
  });
  return static_cast<double>(bytes) * times / taken;
}

// Multiplications and additions a second of 4-way int8 dot products; 0 where this processor has none.
double int8_rate(int threads) {
#ifdef __AVX512VNNI__
  constexpr int64_t kTimes = 200'000;
  const double taken = seconds(threads, [](int) {
    __m512i sums[12];
    for (auto& sum : sums) sum = _mm512_setzero_si512();
    const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
    for (int64_t i = 0; i < kTimes; ++i) {
#pragma GCC unroll 12
      for (int chain = 0; chain < 12; ++chain) {
        sums[chain] = _mm512_dpbusd_epi32(sums[chain], a, b);
        asm volatile("" : "+v"(sums[chain]));
      }
    }
    for (auto& sum : sums) sink = _mm512_reduce_add_epi32(sum);
  });
  return 128.0 * 12 * kTimes * threads / taken;
#else
  (void)threads;
  return 0;
#endif
}
}
