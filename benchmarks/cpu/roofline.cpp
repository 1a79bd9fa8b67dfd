// What this machine can do at most: reading memory, fp32 multiply-adds, int8 dot products. One JSON object a line.
//
//   roofline SECONDS THREADS[,THREADS...] MEGABYTES[,MEGABYTES...]
//
// Threads are pinned to the first CPUs of the process's affinity. Each figure is the best of many short runs that all threads
// begin together: a ceiling, so that whatever else the machine does should not lower it.

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;
constexpr int steps = 20000;  // rounds of one short run
constexpr int chains = 16;    // independent accumulators, to hide latency

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

template <typename T>
void keep(T& value) {
    asm volatile("" : "+m"(value));
}

#if defined(__AVX512F__)
const char* fp32_set = "avx512f";
constexpr int fp32_lanes = 16;
using Floats = __m512;
Floats floats(float x) { return _mm512_set1_ps(x); }
Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__FMA__)
const char* fp32_set = "avx2+fma";
constexpr int fp32_lanes = 8;
using Floats = __m256;
Floats floats(float x) { return _mm256_set1_ps(x); }
Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
#else
const char* fp32_set = "compiler's vectors";
constexpr int fp32_lanes = 4;
typedef float Floats __attribute__((vector_size(16)));
Floats floats(float x) { return Floats{x, x, x, x}; }
Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
#endif

#if defined(__AVX512VNNI__)
const char* int8_set = "avx512vnni";
constexpr int int8_products = 64;
using Ints = __m512i;
Ints ints(int x) { return _mm512_set1_epi32(x); }
Ints dot(Ints sum, Ints a, Ints b) { return _mm512_dpbusd_epi32(sum, a, b); }
#elif defined(__AVXVNNI__)
const char* int8_set = "avxvnni";
constexpr int int8_products = 32;
using Ints = __m256i;
Ints ints(int x) { return _mm256_set1_epi32(x); }
Ints dot(Ints sum, Ints a, Ints b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
#elif defined(__AVX2__)
const char* int8_set = "avx2";
constexpr int int8_products = 32;
using Ints = __m256i;
Ints ints(int x) { return _mm256_set1_epi32(x); }
Ints dot(Ints sum, Ints a, Ints b) {
    const Ints pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1));
    return _mm256_add_epi32(sum, pairs);
}
#elif defined(__ARM_FEATURE_DOTPROD)
const char* int8_set = "neon dotprod";
constexpr int int8_products = 16;
using Ints = int32x4_t;
Ints ints(int x) { return vdupq_n_s32(x); }
Ints dot(Ints sum, Ints a, Ints b) { return vdotq_s32(sum, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b)); }
#else
const char* int8_set = nullptr;
constexpr int int8_products = 1;
using Ints = int32_t;
Ints ints(int x) { return x; }
Ints dot(Ints sum, Ints a, Ints b) { return sum + a * b; }
#endif

void multiply_adds() {
    Floats sums[chains], a = floats(0.999f), b = floats(1e-9f);
    for (Floats& sum : sums) sum = floats(1.0f);
    keep(a);
    keep(b);
    for (int i = 0; i < steps; ++i) {
#pragma GCC unroll 16
        for (int j = 0; j < chains; ++j) sums[j] = multiply_add(sums[j], a, b);
    }
    for (Floats& sum : sums) keep(sum);
}

void dot_products() {
    Ints sums[chains], a = ints(0x01020304), b = ints(0x04030201);
    for (Ints& sum : sums) sum = ints(0);
    keep(a);
    keep(b);
    for (int i = 0; i < steps; ++i) {
#pragma GCC unroll 16
        for (int j = 0; j < chains; ++j) sums[j] = dot(sums[j], a, b);
    }
    for (Ints& sum : sums) keep(sum);
}

typedef uint64_t Words __attribute__((vector_size(64)));

void read(const Words* from, size_t count) {
    Words sums[8] = {};
    for (size_t i = 0; i + 8 <= count; i += 8) {
#pragma GCC unroll 8
        for (size_t j = 0; j < 8; ++j) sums[j] ^= from[i + j];
    }
    for (Words& sum : sums) keep(sum);
}

std::vector<int> allowed_cpus() {
    cpu_set_t set;
    std::vector<int> cpus;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
            if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
        }
    }
    return cpus;
}

// Least seconds in which all threads have run work(thread) once, over runs that together take `budget_s`.
double least_seconds(int threads, double budget_s, const std::function<void(int)>& work) {
    const std::vector<int> cpus = allowed_cpus();
    std::atomic<int> arrived{0}, running{0};
    std::atomic<bool> done{false};
    double best = 1e9;
    const auto all_here = [&](std::atomic<int>& counter, int round) {
        counter.fetch_add(1);
        while (counter.load() < round * threads) {
        }
    };
    const auto body = [&](int thread) {
        if (thread < static_cast<int>(cpus.size())) {
            cpu_set_t own;
            CPU_ZERO(&own);
            CPU_SET(cpus[thread], &own);
            sched_setaffinity(0, sizeof own, &own);
        }
        const Clock::time_point begin = Clock::now();
        for (int round = 1;; ++round) {
            all_here(arrived, round);
            if (done.load()) return;
            const Clock::time_point start = Clock::now();
            work(thread);
            all_here(running, round);
            if (thread == 0) {
                if (round > 1) best = std::min(best, since(start));  // the first warms up
                if (round > 2 && since(begin) > budget_s) done.store(true);
            }
        }
    };
    std::vector<std::thread> others;
    for (int thread = 0; thread < threads; ++thread) others.emplace_back(body, thread);
    for (std::thread& other : others) other.join();
    return best;
}

std::vector<int> numbers(const char* text) {
    std::vector<int> found;
    std::stringstream stream(text);
    for (std::string item; std::getline(stream, item, ',');) found.push_back(std::atoi(item.c_str()));
    return found;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: roofline SECONDS THREADS[,THREADS...] MEGABYTES[,MEGABYTES...]\n");
        return 2;
    }
    const double budget_s = std::atof(argv[1]);
    const std::vector<int> sizes = numbers(argv[3]);
    const size_t largest = sizes.empty() ? 0 : size_t(*std::max_element(sizes.begin(), sizes.end())) * 1000000;
    std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(4096, (largest / 4096 + 1) * 4096), std::free);
    if (!memory) {
        std::fprintf(stderr, "no memory for %zu bytes\n", largest);
        return 1;
    }
    Words* words = static_cast<Words*>(memory.get());
    for (size_t i = 0; i < largest / sizeof(Words); ++i) words[i] = Words{i};
    for (int threads : numbers(argv[2])) {
        double seconds = least_seconds(threads, budget_s, [](int) { multiply_adds(); });
        double ops = 2.0 * steps * chains * fp32_lanes * threads / seconds;
        std::printf("{\"what\": \"fp32\", \"threads\": %d, \"per_s\": %.6g, \"set\": \"%s\"}\n", threads, ops, fp32_set);
        if (int8_set != nullptr) {
            seconds = least_seconds(threads, budget_s, [](int) { dot_products(); });
            ops = 2.0 * steps * chains * int8_products * threads / seconds;
            std::printf("{\"what\": \"int8\", \"threads\": %d, \"per_s\": %.6g, \"set\": \"%s\"}\n", threads, ops, int8_set);
        }
        for (int size : sizes) {
            const size_t share = size_t(size) * 1000000 / sizeof(Words) / threads;
            seconds = least_seconds(threads, budget_s, [=](int thread) { read(words + thread * share, share); });
            const double rate = double(share) * sizeof(Words) * threads / seconds;
            std::printf("{\"what\": \"read\", \"threads\": %d, \"megabytes\": %d, \"per_s\": %.6g}\n", threads, size, rate);
        }
        std::fflush(stdout);
    }
    return 0;
}
