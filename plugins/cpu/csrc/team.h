// The threads that compute. One region runs a function on all of them; inside it they meet at spin barriers.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace octavo {

// The calling thread is member 0; the others are pinned, one a core, spin for a moment after a region, then sleep.
class Team {
 public:
  // While it lives, the calling thread stays on the first processor, so that it does not sit on a worker's: the system
  // takes milliseconds to part two threads that spin on one core. Costs two system calls.
  class Seat {
   public:
    explicit Seat(const Team& team);
    ~Seat();
    Seat(const Seat&) = delete;

   private:
    std::vector<unsigned char> before_;  // the thread's own mask; empty where nothing was changed
  };

  explicit Team(int size, const std::vector<int>& cpus);  // member i on cpus[i], where there are as many
  ~Team();
  Team(const Team&) = delete;

  int size() const { return size_; }

  // Runs function(argument, member) on every member and returns when all are done.
  using Function = void (*)(void* argument, int member);
  void run(Function function, void* argument);

  template <class F>
  void run(F&& f) {
    run([](void* argument, int member) { (*static_cast<std::remove_reference_t<F>*>(argument))(member); }, &f);
  }

  // Waits until every member is here. What they wrote before is visible to all afterwards.
  void barrier();

 private:
  void work(int member);

  int size_;
  std::vector<int> cpus_;  // one a member, or none
  std::vector<std::thread> threads_;
  alignas(64) std::atomic<uint64_t> generation_{0};  // counts regions
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint64_t> phase_{0};  // counts barriers
  alignas(64) std::atomic<int> finished_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  Function function_ = nullptr;
  void* argument_ = nullptr;
  bool stopping_ = false;
};

}  // namespace octavo
