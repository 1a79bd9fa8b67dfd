#include "team.h"

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

namespace octavo {

namespace {

constexpr int kSpins = 1 << 14;    // about 0.2 ms of pauses: the time between two steps
constexpr int kPolite = 1 << 11;   // then give the core to whoever else wants it, between looks

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Done>
inline void spin_until(Done done) {
  for (int i = 0; !done(); ++i) {
    if (i < kPolite) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void pin(std::thread& thread, int cpu) {
#ifdef __linux__
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  pthread_setaffinity_np(thread.native_handle(), sizeof(one), &one);  // where it is refused, the system places the thread
#else
  (void)thread, (void)cpu;
#endif
}

}  // namespace

Team::Seat::Seat(const Team& team) {
#ifdef __linux__
  if (team.cpus_.empty() || team.size_ == 1) return;
  cpu_set_t mask, one;
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return;
  CPU_ZERO(&one);
  CPU_SET(team.cpus_[0], &one);
  if (sched_setaffinity(0, sizeof(one), &one) != 0) return;
  const auto* bytes = reinterpret_cast<const unsigned char*>(&mask);
  before_.assign(bytes, bytes + sizeof(mask));
#else
  (void)team;
#endif
}

Team::Seat::~Seat() {
#ifdef __linux__
  if (!before_.empty()) sched_setaffinity(0, before_.size(), reinterpret_cast<const cpu_set_t*>(before_.data()));
#endif
}

Team::Team(int size, const std::vector<int>& cpus) : size_(size < 1 ? 1 : size) {
  if (static_cast<int>(cpus.size()) == size_) cpus_ = cpus;
  for (int member = 1; member < size_; ++member) {
    threads_.emplace_back([this, member] { work(member); });
    if (!cpus_.empty()) pin(threads_.back(), cpus_[member]);
  }
}

Team::~Team() {
  stopping_ = true;
  generation_.fetch_add(1, std::memory_order_seq_cst);
  generation_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::run(Function function, void* argument) {
  if (size_ == 1) {
    function(argument, 0);
    return;
  }
  function_ = function;
  argument_ = argument;
  finished_.store(0, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) > 0) generation_.notify_all();
  function(argument, 0);
  spin_until([this] { return finished_.load(std::memory_order_acquire) == size_ - 1; });
}

void Team::barrier() {
  if (size_ == 1) return;
  const uint64_t phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  spin_until([this, phase] { return phase_.load(std::memory_order_acquire) != phase; });
}

void Team::work(int member) {
  for (uint64_t seen = 0;;) {
    int spins = 0;
    while (generation_.load(std::memory_order_acquire) == seen) {
      if (++spins < kSpins) {
        pause();
        if (spins > kPolite && spins % 64 == 0) std::this_thread::yield();
        continue;
      }
      sleeping_.fetch_add(1, std::memory_order_seq_cst);
      generation_.wait(seen, std::memory_order_seq_cst);
      sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    }
    ++seen;
    if (stopping_) return;
    function_(argument_, member);
    finished_.fetch_add(1, std::memory_order_release);
  }
}

}  // namespace octavo
