// How an operation reaches the threads: at once, or onto a tape that replays a whole forward inside one region.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "team.h"

namespace octavo {

// What attention is told about a step: AttentionBatch of octavo, as pointers. int32, except slots.
struct Batch {
  int64_t requests = 0;
  int64_t tokens = 0;
  int64_t block_size = 0;
  const int32_t* query_start_loc = nullptr;  // (requests + 1,)
  const int32_t* seq_lens = nullptr;         // (requests,)
  const int32_t* block_tables = nullptr;     // (requests, table_stride)
  int64_t table_stride = 0;
  const int64_t* slot_mapping = nullptr;  // (tokens,)
  std::vector<int64_t> units;             // of work, as attention cuts it; laid out by its planner
  int64_t scratch_bytes = 0;              // that attention wants for this step: shared, ...
  int64_t member_bytes = 0;               // ... and behind it for each member

  int64_t scratch(int members) const { return scratch_bytes + members * member_bytes; }
};

// What changes from one replay of a tape to the next.
struct Step {
  int64_t tokens = 0;
  const int64_t* token_ids = nullptr;  // (tokens,)
  const int64_t* positions = nullptr;  // (tokens,)
  const Batch* batch = nullptr;
};

// What kernels of an instruction set call must not become a function that the linker shares among all of them.
#define OCTAVO_INLINE [[gnu::always_inline]] inline

// A member's view of a running operation.
struct Context {
  Team& team;
  int member;
  int members;
  int64_t rows;        // tokens of this call
  std::byte* scratch;  // shared by all members, aligned to 64 bytes, contents undefined; see emit()
  const Step& step;

  OCTAVO_INLINE void barrier() const { team.barrier(); }

  // The part [first, last) of `count` items, in multiples of `unit`, that falls to this member.
  OCTAVO_INLINE void share(int64_t count, int64_t unit, int64_t& first, int64_t& last) const {
    const int64_t units = (count + unit - 1) / unit;
    first = units * member / members * unit;
    last = units * (member + 1) / members * unit;
    if (first > count) first = count;
    if (last > count) last = count;
  }
};

// int64 indices of a step's tokens: those of the tape's step where that is what was given while recording.
struct Indices {
  const int64_t* data = nullptr;
  enum Kind { kGiven, kTokenIds, kPositions } kind = kGiven;

  OCTAVO_INLINE const int64_t* of(const Context& c) const {
    return kind == kTokenIds ? c.step.token_ids : kind == kPositions ? c.step.positions : data;
  }
};

// Memory that an operation reads or writes, so that a tape knows where threads must wait for one another.
struct Range {
  const void* begin = nullptr;
  int64_t bytes = 0;
};

struct Operation {
  std::function<void(const Context&)> run;  // on every member; starts and ends without a barrier
  std::vector<Range> reads, writes;         // of up to `max rows`; all that other operations touch too
  int64_t scratch_bytes = 0;                // for the rows given to emit(), or for the most rows of the tape being recorded
  std::string name;
};

// A recorded forward.
class Program {
 public:
  explicit Program(int64_t max_tokens) : max_tokens_(max_tokens) {}
  int64_t max_tokens() const { return max_tokens_; }
  void add(Operation operation);
  size_t size() const { return operations_.size(); }

 private:
  friend class Engine;
  struct Entry {
    Operation operation;
    bool waits;  // for what ran before it
  };
  int64_t max_tokens_;
  int64_t scratch_bytes_ = 0;
  std::vector<Entry> operations_;
  std::vector<Range> written_, read_;  // since the last wait
};

// The process's engine room: one team, one scratch, at most one tape being recorded.
class Engine {
 public:
  static Engine& get();

  // On these processors, one each, if there are as many as threads.
  void set_threads(int count, std::vector<int> cpus);
  int threads();

  // Runs an operation now, or adds it to the tape being recorded and runs it as well (so that what follows sees its result).
  // `rows` must be the step's tokens while recording. Thread-safe: callers take turns.
  void emit(int64_t rows, Operation operation);

  void begin(std::shared_ptr<Program> program, const Step& step);
  void end();
  // What the calling thread records; other threads compute meanwhile as always.
  bool recording() const { return program_ != nullptr && recorder_ == std::this_thread::get_id(); }
  int64_t max_rows(int64_t rows) const { return recording() ? program_->max_tokens() : rows; }
  Indices indices(const int64_t* data) const;
  const Batch* batch(const Batch* given) const;  // null where the tape's step brings it
  void replay(const Program& program, const Step& step);
  // Seconds of each operation of one replay, by name, in order.
  std::vector<std::pair<std::string, double>> profile(const Program& program, const Step& step);
  std::byte* scratch(int64_t bytes);

 private:
  Engine() = default;
  Team& team();

  std::recursive_mutex mutex_;
  int num_threads_ = 1;
  std::vector<int> cpus_;
  std::unique_ptr<Team> team_;
  int team_process_ = 0;  // threads do not survive a fork
  std::byte* scratch_ = nullptr;
  int64_t scratch_bytes_ = 0;
  std::shared_ptr<Program> program_;  // being recorded
  std::thread::id recorder_;
  Step step_;
};

}  // namespace octavo
