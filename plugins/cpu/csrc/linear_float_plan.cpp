#include "linear_float_plan.h"

#include <algorithm>

namespace octavo {

namespace {

int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

}  // namespace

FloatPlan plan_linear_float(const Weight& weight, int64_t rows, int members) {
  FloatPlan plan{};
  // An odd multiple of a cache line between rows, so that they do not all fall into the same sets.
  plan.input_stride = round_up(weight.padded_in, 16) | 16;
  plan.sum_stride = weight.zeros || weight.offsets ? weight.num_segments + weight.padded_in / kChunk : 0;
  const int64_t prepared = std::max<int64_t>(std::min(rows, kRowBlock), members);
  plan.sums_at = plan.inputs_at + prepared * plan.input_stride * 4;
  plan.members_at = round_up(plan.sums_at + prepared * plan.sum_stride * 4, 64);
  if (rows > 1)
    plan.member_bytes = (kPanelBlocks * kChunk + std::min(rows, kRowBlock) * kGroupBlocks) * kLanes * 4;
  plan.bytes = plan.members_at + plan.member_bytes * members;
  return plan;
}

int64_t linear_float_scratch(const Weight& weight, int64_t rows, int members) {
  return plan_linear_float(weight, rows, members).bytes;
}

}  // namespace octavo
