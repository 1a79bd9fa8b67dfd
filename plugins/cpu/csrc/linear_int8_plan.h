// What linear_int8 keeps in scratch, alike on every instruction set.
#pragma once

#include "kernels.h"

namespace octavo {

// What a row's quantised inputs q contribute to a segment's sums beside the product of codes.
struct SegmentTerms {
  float scale;    // of the inputs; 1 where the row has one scale
  int32_t start;  // -zero * sum of q: from a sum of code * q to one of (code - zero) * q; -sum where zeros differ
  float sum;      // scale * sum of (q - input zero), which `offsets` multiply
};

struct RowTerms {
  float scale;   // 1 where segments have scales of their own
  int32_t zero;  // of asymmetric inputs
};

struct Int8Plan {
  bool one_each;       // every member quantises all rows for itself, so nobody waits
  int64_t member_at;   // offsets in bytes: where members' own parts begin ...
  int64_t member_size;
  int64_t codes_at;    // ... and in these, or at the start of the scratch, what is where
  int64_t terms_at;
  int64_t rows_at;
  int64_t panel_at;    // in a member's part
  int64_t sums_at;
  int64_t bytes;
  int64_t panel_blocks;  // of 16 outputs that a panel may hold
};

constexpr int64_t kMaxSegment = 1 << 15;  // inputs: sums of 255 * 255 stay in int32

Int8Plan plan_linear_int8(const Weight&, int64_t rows, int members);

}  // namespace octavo
