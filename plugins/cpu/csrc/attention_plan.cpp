// How a step's attention is cut into units of work, alike on every instruction set and for any number of threads.
#include <algorithm>
#include <cstring>

#include "attention_units.h"
#include "kernels.h"

namespace octavo {

namespace {

constexpr int64_t kShares = 16;    // a unit that is more than this part of the work is split into its chunks
constexpr int64_t kDecodeRows = 8;  // reading a key and a value costs about as much as this many rows that use them

struct Piece {
  AttentionUnit unit;
  int64_t cost;
};

template <class T>
void append(std::vector<int64_t>& words, const T& item) {
  const size_t at = words.size();
  words.resize(at + sizeof(T) / sizeof(int64_t));
  std::memcpy(words.data() + at, &item, sizeof(T));
}

}  // namespace

void plan_attention(const Attention& attention, Batch& batch) {
  if (attention.head_dim > kMostHeadDim) throw std::invalid_argument("heads may have up to 256 dimensions");
  const int64_t group = attention.heads / attention.kv_heads;
  const int64_t padded = (attention.head_dim + kLanes - 1) / kLanes * kLanes;
  const auto last_position = [&](const AttentionUnit& u) {
    const int64_t queries = batch.query_start_loc[u.request + 1] - batch.query_start_loc[u.request];
    return batch.seq_lens[u.request] - queries + (u.last_row - 1) / group;
  };

  std::vector<Piece> whole, pieces;
  int64_t total = 0;
  for (int64_t request = 0; request < batch.requests; ++request) {
    const int64_t rows = (batch.query_start_loc[request + 1] - batch.query_start_loc[request]) * group;
    for (int64_t head = 0; head < attention.kv_heads; ++head) {
      for (int64_t row = 0; row < rows; row += kMostRows) {
        const AttentionUnit unit{request, head, row, std::min(row + kMostRows, rows), -1, -1};
        int64_t keys = last_position(unit) + 1;
        if (attention.window > 0) keys = std::min(keys, attention.window + (unit.last_row - row) / group);
        whole.push_back({unit, keys * (unit.last_row - row + kDecodeRows)});
        total += whole.back().cost;
      }
    }
  }

  std::vector<AttentionSplit> splits;
  int64_t floats = 0;
  for (const Piece& piece : whole) {
    const int64_t chunks = last_position(piece.unit) / kChunkKeys + 1;
    if (chunks == 1 || piece.cost <= total / kShares) {
      pieces.push_back(piece);
      continue;
    }
    AttentionUnit unit = piece.unit;
    unit.split = static_cast<int64_t>(splits.size());
    for (unit.chunk = 0; unit.chunk < chunks; ++unit.chunk) pieces.push_back({unit, piece.cost / chunks});
    splits.push_back({unit.request, unit.kv_head, unit.first_row, unit.last_row, chunks, floats});
    const int64_t rows = unit.last_row - unit.first_row;
    floats += rows * chunks * (padded + 2);
    floats = (floats + kLanes - 1) / kLanes * kLanes;
  }

  // Members take turns from the most work to the least.
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.cost > b.cost; });
  batch.units.clear();
  batch.units.push_back(static_cast<int64_t>(pieces.size()));
  batch.units.push_back(static_cast<int64_t>(splits.size()));
  for (const Piece& piece : pieces) append(batch.units, piece.unit);
  for (const AttentionSplit& split : splits) append(batch.units, split);
  batch.scratch_bytes = std::max<int64_t>(batch.scratch_bytes, floats * sizeof(float));  // whole vectors
  batch.member_bytes = kWorkspaceBytes;
}

}  // namespace octavo
