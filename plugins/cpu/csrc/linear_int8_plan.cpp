#include "linear_int8_plan.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace octavo {

namespace {

constexpr int64_t kEach = 4096;       // inputs that a member quantises sooner than it waits for another's half
constexpr int64_t kPanel = 768 << 10;  // bytes of unpacked codes: they and the inputs should stay in a core's own cache

int64_t aligned(int64_t bytes) { return (bytes + 127) / 64 * 64; }

}  // namespace

Int8Plan plan_linear_int8(const Weight& w, int64_t rows, int members) {
  Int8Plan plan{};
  plan.one_each = rows == 1 || rows * w.padded_in <= kEach;
  plan.terms_at = aligned(rows * w.padded_in);
  plan.rows_at = plan.terms_at + aligned(rows * w.num_segments * sizeof(SegmentTerms));
  const int64_t inputs = plan.rows_at + aligned(rows * sizeof(RowTerms));
  const int64_t block = w.padded_in * kLanes;
  plan.panel_blocks = std::max<int64_t>(2, std::min<int64_t>(8, kPanel / block / 2 * 2));
  plan.panel_at = plan.one_each ? inputs : 0;
  plan.sums_at = plan.panel_at + (rows > 1 ? aligned(plan.panel_blocks * block) : 0);
  plan.member_at = plan.one_each ? 0 : inputs;
  plan.member_size = plan.sums_at + aligned(plan.panel_blocks * w.num_segments * kLanes * 4);
  plan.bytes = plan.member_at + members * plan.member_size;
  return plan;
}

int64_t linear_int8_scratch(const Weight& w, const Inputs& inputs, int64_t rows, int members) {
  for (int64_t s = 0; s < w.num_segments; ++s) {
    const int64_t inputs_of = w.segment_starts[s + 1] - w.segment_starts[s];
    if (inputs_of > kMaxSegment) {
      throw std::invalid_argument("a segment of " + std::to_string(inputs_of) + " inputs is longer than int32 sums hold: " +
                                  std::to_string(kMaxSegment));
    }
  }
  const bool fits = std::nearbyint(inputs.zero) == inputs.zero && std::fabs(inputs.zero) <= 255;
  if (inputs.kind == Inputs::kStatic && !inputs.symmetric && !fits) {
    throw std::invalid_argument("the zero of int8 inputs is " + std::to_string(inputs.zero) + ", not a whole number of at most 255");
  }
  // Rows that each member quantises for itself may want more than a few more do.
  int64_t bytes = plan_linear_int8(w, rows, members).bytes;
  const int64_t most_each = std::max<int64_t>(1, kEach / w.padded_in);
  if (rows > most_each) bytes = std::max(bytes, plan_linear_int8(w, most_each, members).bytes);
  return bytes;
}

}  // namespace octavo
