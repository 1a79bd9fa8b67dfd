#include "program.h"

#include <chrono>
#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace octavo {

namespace {

bool overlaps(const Range& a, const Range& b) {
  const auto* a0 = static_cast<const char*>(a.begin);
  const auto* b0 = static_cast<const char*>(b.begin);
  return a0 < b0 + b.bytes && b0 < a0 + a.bytes;
}

bool overlaps(const std::vector<Range>& some, const std::vector<Range>& others) {
  for (const auto& a : some)
    for (const auto& b : others)
      if (overlaps(a, b)) return true;
  return false;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void Program::add(Operation operation) {
  // Scratch is shared: whoever uses it waits for whoever used it before.
  if (operation.scratch_bytes > 0) operation.writes.push_back({&scratch_bytes_, 1});
  if (operation.scratch_bytes > scratch_bytes_) scratch_bytes_ = operation.scratch_bytes;
  const bool waits = overlaps(operation.writes, written_) || overlaps(operation.writes, read_) ||
                     overlaps(operation.reads, written_);
  if (waits) written_.clear(), read_.clear();
  written_.insert(written_.end(), operation.writes.begin(), operation.writes.end());
  read_.insert(read_.end(), operation.reads.begin(), operation.reads.end());
  operations_.push_back({std::move(operation), waits});
}

void Engine::replay(const Program& program, const Step& step) {
  std::lock_guard lock(mutex_);
  int64_t bytes = 0;
  for (const auto& entry : program.operations_) bytes = std::max(bytes, entry.operation.scratch_bytes);
  if (step.batch) bytes = std::max(bytes, step.batch->scratch(num_threads_));
  std::byte* memory = scratch(bytes);
  Team& members = team();
  const Team::Seat seat(members);
  members.run([&](int member) {
    const Context context{members, member, members.size(), step.tokens, memory, step};
    for (const auto& entry : program.operations_) {
      if (entry.waits) members.barrier();
      entry.operation.run(context);
    }
  });
}

std::vector<std::pair<std::string, double>> Engine::profile(const Program& program, const Step& step) {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<std::string, double>> found;
  int64_t bytes = step.batch ? step.batch->scratch(num_threads_) : 0;
  for (const auto& entry : program.operations_) bytes = std::max(bytes, entry.operation.scratch_bytes);
  std::byte* memory = scratch(bytes);
  Team& members = team();
  for (const auto& entry : program.operations_) {
    const double start = now();
    members.run([&](int member) {
      entry.operation.run(Context{members, member, members.size(), step.tokens, memory, step});
    });
    found.emplace_back(entry.operation.name, now() - start);
  }
  return found;
}

Engine& Engine::get() {
  static Engine* engine = new Engine;  // never destroyed: threads may outlive static destruction
  return *engine;
}

void Engine::set_threads(int count, std::vector<int> cpus) {
  std::lock_guard lock(mutex_);
  if (count < 1) throw std::invalid_argument("the number of threads must be 1 or more");
  if (count == num_threads_ && cpus == cpus_) return;
  team_.reset();
  num_threads_ = count;
  cpus_ = std::move(cpus);
}

int Engine::threads() { return num_threads_; }

Team& Engine::team() {
#ifdef __linux__
  const int process = getpid();
#else
  const int process = 0;
#endif
  if (team_ && team_process_ != process) (void)team_.release();  // its threads are those of the parent
  if (!team_) {
    team_ = std::make_unique<Team>(num_threads_, cpus_);
    team_process_ = process;
  }
  return *team_;
}

std::byte* Engine::scratch(int64_t bytes) {
  if (bytes > scratch_bytes_) {
    std::free(scratch_);
    const int64_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    scratch_ = static_cast<std::byte*>(std::aligned_alloc(4096, size));
    scratch_bytes_ = scratch_ ? size : 0;
    if (!scratch_) throw std::bad_alloc();
  }
  return scratch_;
}

void Engine::emit(int64_t rows, Operation operation) {
  std::lock_guard lock(mutex_);
  if (rows == 0) return;
  if (recording() && rows != step_.tokens) {
    throw std::runtime_error(operation.name + " computes " + std::to_string(rows) + " rows, the step has " +
                             std::to_string(step_.tokens) + " tokens");
  }
  std::byte* memory = scratch(operation.scratch_bytes);
  Team& members = team();
  const Team::Seat seat(members);
  members.run([&](int member) {
    operation.run(Context{members, member, members.size(), rows, memory, step_});
  });
  if (recording()) program_->add(std::move(operation));
}

void Engine::begin(std::shared_ptr<Program> program, const Step& step) {
  std::lock_guard lock(mutex_);
  if (program_) throw std::runtime_error("a tape is being recorded already");
  program_ = std::move(program);
  recorder_ = std::this_thread::get_id();
  step_ = step;
}

void Engine::end() {
  std::lock_guard lock(mutex_);
  program_.reset();
  step_ = Step{};
}

Indices Engine::indices(const int64_t* data) const {
  if (recording() && data == step_.token_ids) return {nullptr, Indices::kTokenIds};
  if (recording() && data == step_.positions) return {nullptr, Indices::kPositions};
  return {data, Indices::kGiven};
}

const Batch* Engine::batch(const Batch* given) const { return recording() && given == step_.batch ? nullptr : given; }

}  // namespace octavo
