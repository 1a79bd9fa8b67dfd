// How linear_float cuts its work and lays out its scratch.
#pragma once

#include "kernels.h"

namespace octavo {

constexpr int64_t kChunk = 256;        // inputs whose products are summed on their own, from each segment's start on
constexpr int64_t kRowBlock = 512;     // rows computed at once: with a chunk of inputs each they fit the second cache
constexpr int64_t kPanelBlocks = 2;    // blocks of outputs in a panel, at most
constexpr int64_t kPanelInputs = 128;  // in a panel, or one chunk
constexpr int64_t kGroupBlocks = 8;    // blocks of outputs whose totals are kept while the inputs are read once

// Byte offsets into the scratch, and strides in floats. Inputs and their sums are shared by all members and belong to
// all of a block's rows, except for one row, where each member prepares its own: that takes less time than a barrier.
struct FloatPlan {
  int64_t input_stride;  // inputs as packed codes want them: permuted, padded
  int64_t sum_stride;    // each chunk's sum of inputs
  int64_t inputs_at, sums_at;
  int64_t members_at, member_bytes;  // a panel of decoded codes, then totals
  int64_t bytes;
};

FloatPlan plan_linear_float(const Weight& weight, int64_t rows, int members);

}  // namespace octavo
