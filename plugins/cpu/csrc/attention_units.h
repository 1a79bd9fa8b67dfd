// How a step's attention is cut: what attention_plan.cpp writes into Batch::units and the kernels read.
#pragma once

#include <cstdint>

namespace octavo {

// Keys are taken in chunks that lie at multiples of this in the sequence, each chunk's softmax and weighted values on
// their own, and chunks are merged from the first to the last. So a token's bits do not depend on who computes which
// chunk.
constexpr int64_t kChunkKeys = 128;
constexpr int64_t kMostRows =
    64;  // of a unit; a row is one head of one token, all heads of a row's unit share their KV head
constexpr int64_t kMostHeadDim = 256;
constexpr int64_t kWorkspaceBytes = 384 << 10;  // of scratch for each member

// Rows [first_row, last_row) of a request and KV head, row = token of the request * heads of the group + head, over all
// chunks that they see, or over one chunk of a split.
struct AttentionUnit {
  int64_t request, kv_head, first_row, last_row;
  int64_t chunk;  // -1: all
  int64_t split;  // whose partial results they are; -1: the unit writes the output
};

// Rows whose chunks are computed apart. At `offset` (in floats) of the scratch: maxima (rows, chunks), sums (rows,
// chunks), weighted values (chunks, rows, head_dim padded to whole vectors).
struct AttentionSplit {
  int64_t request, kv_head, first_row, last_row;
  int64_t chunks, offset;
};

// Batch::units is num_units, num_splits, the units, the splits.
constexpr int64_t kUnitWords = sizeof(AttentionUnit) / sizeof(int64_t);
constexpr int64_t kSplitWords = sizeof(AttentionSplit) / sizeof(int64_t);

}  // namespace octavo
