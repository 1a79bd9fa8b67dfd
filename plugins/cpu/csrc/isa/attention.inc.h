// Paged attention: decode and chunked prefill in one kernel. The units of work are those of attention_plan.cpp.
#include "attention_units.h"
#include "isa/kv_rows.inc.h"
#include "isa/attention_vec.inc.h"
#include "isa/attention_products.inc.h"

namespace OCTAVO_ISA {

using octavo::AttentionSplit, octavo::AttentionUnit, octavo::kChunkKeys, octavo::kMostHeadDim, octavo::kMostRows;

constexpr int64_t kFewRows = 8;  // up to so many read K and V as they are stored, more have them decoded once for all

// What one member needs for a unit.
struct Workspace {
  alignas(64) float query[kMostRows * kMostHeadDim];
  alignas(64) float scores[kMostRows * kChunkKeys];
  alignas(64) float mixed[kMostRows * kMostHeadDim];  // weighted values, merged over chunks
  alignas(64) float keys[kLanes * kMostHeadDim];      // of 16 positions, lanes are positions
  alignas(64) float values[kChunkKeys * kMostHeadDim];
  alignas(64) float part[kRowsAtOnce * kMostHeadDim];
  alignas(64) float key_scales[kChunkKeys], value_scales[kChunkKeys];
  alignas(64) float most[kMostRows], total[kMostRows], old_share[kMostRows], new_share[kMostRows];
  alignas(64) float new_most[kMostRows], new_total[kMostRows];  // of one chunk
  int64_t at[kChunkKeys];  // bytes before each position's row; where nobody looks, that of a position that is seen
  int64_t next_at[kChunkKeys];
  int32_t begin[kMostRows], end[kMostRows];  // positions of the chunk that each row sees
};

static_assert(sizeof(Workspace) <= octavo::kWorkspaceBytes);

inline const AttentionUnit* unit_of(const Batch& batch, int64_t unit) {
  return reinterpret_cast<const AttentionUnit*>(batch.units.data() + 2) + unit;
}
inline const AttentionSplit* split_of(const Batch& batch, int64_t split) {
  return reinterpret_cast<const AttentionSplit*>(unit_of(batch, batch.units[0])) + split;
}

struct Layer {  // what is alike for all units
  const Attention& attention;
  const KVBlocks& kv;
  const Batch& batch;
  int64_t group, vectors, padded;

  int64_t position(const AttentionUnit& u, int64_t row) const {
    const int64_t queries = batch.query_start_loc[u.request + 1] - batch.query_start_loc[u.request];
    return batch.seq_lens[u.request] - queries + row / group;
  }
  int64_t first_seen(int64_t position) const {
    return attention.window > 0 && position >= attention.window ? position - attention.window + 1 : 0;
  }
};

// at[i]: the row of position start + i, in rows times `size`; only blocks of positions first ... last - 1 are looked
// up.
inline void find_rows(const Layer& layer, const AttentionUnit& u, int64_t start, int64_t first, int64_t last,
                      int64_t size, int64_t* at) {
  const int64_t block_size = layer.batch.block_size;
  const int32_t* table = layer.batch.block_tables + u.request * layer.batch.table_stride;
  for (int64_t i = first; i < last;) {
    const int64_t block = i / block_size, stop = (block + 1) * block_size < last ? (block + 1) * block_size : last;
    int64_t row = ((table[block] * layer.attention.kv_heads + u.kv_head) * block_size + i - block * block_size) * size;
    for (; i < stop; ++i, row += size) at[i - start] = row;
  }
  for (int64_t i = 0; i < first - start; ++i) at[i] = at[first - start];
  for (int64_t i = last - start; i < kChunkKeys; ++i) at[i] = at[last - start - 1];
}

// The positions of one chunk that any row of a unit sees.
struct Seen {
  int64_t start, first, last;
};
inline Seen seen_of(const Layer& layer, const AttentionUnit& u, int64_t chunk) {
  const int64_t start = chunk * kChunkKeys, stop = start + kChunkKeys;
  const int64_t seen = layer.first_seen(layer.position(u, u.first_row)), known = layer.position(u, u.last_row - 1) + 1;
  return {start, seen > start ? seen : start, known < stop ? known : stop};
}

// The chunks first ... last of a unit that this layer computes.
struct Chunks {
  int64_t first, last;
};
inline Chunks chunks_of(const Layer& layer, const AttentionUnit& u) {
  const int64_t first = layer.first_seen(layer.position(u, u.first_row)) / kChunkKeys;
  const int64_t last = layer.position(u, u.last_row - 1) / kChunkKeys;
  return u.chunk < 0 ? Chunks{first, last} : Chunks{first < u.chunk ? u.chunk : first, last < u.chunk ? last : u.chunk};
}

// c * tanh(x / c)
inline F capped(F x, float cap) {
  const F y = x / set1(cap), square = y * y;
  F small = fma(set1(62.0f / 2835), square, set1(-17.0f / 315));
  small = fma(small, square, set1(2.0f / 15));
  small = fma(small, square, set1(-1.0f / 3));
  small = fma(small * square, y, y);
  const F large = set1(1.0f) - set1(2.0f) / (exp(set1(2.0f) * y) + set1(1.0f));
  return set1(cap) * select_less(abs(y), set1(0.25f), small, large);
}

// Scores to weights relative to exp(largest score), which is `most`; `total` is their sum. Values' scales go into the
// weights.
inline void softmax_row(const Layer& layer, float* scores, int32_t begin, int32_t end, float factor,
                        const float* key_scales, const float* value_scales, float& most, float& total) {
  const F lane = load(kLaneNumbers), nothing = set1(-HUGE_VALF);
  const int first = begin / kLanes * kLanes;
  F highest = nothing;
  for (int i = first; i < end; i += kLanes) {
    F x = load(scores + i) * set1(factor);
    if (key_scales) x = x * load(key_scales + i);
    if (layer.attention.soft_cap > 0) x = capped(x, layer.attention.soft_cap);
    if (i + kLanes > end) x = select_less(lane, set1(static_cast<float>(end - i)), x, nothing);
    if (i < begin) x = select_less(lane, set1(static_cast<float>(begin - i)), nothing, x);
    store(scores + i, x);
    highest = max(highest, x);
  }
  most = max_across(highest);
  const F base = set1(most == -HUGE_VALF ? 0.0f : most);
  F sums = zero();
  for (int i = first; i < end; i += kLanes) {
    F weight = exp(load(scores + i) - base);
    sums = sums + weight;
    if (value_scales) weight = weight * load(value_scales + i);
    store(scores + i, weight);
  }
  total = sum(sums);
}

// How two parts of a softmax are brought to one scale: most = the larger, and what each part's numbers are multiplied
// by.
inline void shares(F old_most, F new_most, F& most, F& old_share, F& new_share) {
  most = select_less(old_most, new_most, new_most, old_most);
  const F base = select_less(set1(-HUGE_VALF), most, most, select_less(most, set1(0.0f), zero(), most));
  old_share = exp(old_most - base);
  new_share = exp(new_most - base);
}
inline void merge(float* mixed, const float* part, float old_share, float new_share, int64_t padded) {
  for (int64_t i = 0; i < padded; i += kLanes)
    store(mixed + i, fma(load(mixed + i), set1(old_share), load(part + i) * set1(new_share)));
}

inline void write_row(const Layer& layer, const AttentionUnit& u, int64_t row, const float* mixed, float total,
                      Out out) {
  const int64_t token = layer.batch.query_start_loc[u.request] + row / layer.group;
  float* to = out.data + token * out.stride + (u.kv_head * layer.group + row % layer.group) * layer.attention.head_dim;
  const F scale =
      set1(stored_unit(layer.kv.storage) * (layer.kv.value_static ? layer.kv.value_static[u.kv_head] : 1.0f));
  for_lanes(layer.attention.head_dim, [&](int64_t i, int n) {
    store_some(to + i, load(mixed + i) / set1(total) * scale + zero(), n);  // + 0: whether -0 or 0 was added to
  });
}

// `next` is what the member computes afterwards, or null.
template <int storage>
inline void run_unit(const Layer& layer, const AttentionUnit& u, const AttentionUnit* next, Rows query, Out out,
                     float* partials, Workspace& w) {
  const Attention& a = layer.attention;
  const int64_t rows = u.last_row - u.first_row, padded = layer.padded, row_bytes = a.head_dim * stored_bytes(storage);
  const Chunks chunks = chunks_of(layer, u);
  const bool few = rows <= kFewRows && a.head_dim % kLanes == 0, scaled = layer.kv.key_scale != nullptr;
  const auto* keys = static_cast<const uint8_t*>(layer.kv.key);
  const auto* values = static_cast<const uint8_t*>(layer.kv.value);

  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = u.first_row + r, token = layer.batch.query_start_loc[u.request] + row / layer.group;
    const float* from = query.data + token * query.stride + (u.kv_head * layer.group + row % layer.group) * a.head_dim;
    for_lanes(a.head_dim, [&](int64_t i, int n) { store(w.query + r * padded + i, load_some(from + i, n)); });
    w.most[r] = -HUGE_VALF, w.total[r] = 0;
  }
  for (int64_t i = 0; i < rows * padded; i += kLanes) store(w.mixed + i, zero());
  const float factor = a.scale * stored_unit(storage) * (layer.kv.key_static ? layer.kv.key_static[u.kv_head] : 1.0f);

  for (int64_t chunk = chunks.first; chunk <= chunks.last; ++chunk) {
    const auto [start, first, last] = seen_of(layer, u, chunk);
    find_rows(layer, u, start, first, last, row_bytes, w.at);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = layer.position(u, u.first_row + r), from = layer.first_seen(position) - start;
      w.begin[r] = static_cast<int32_t>(from < 0 ? 0 : from < kChunkKeys ? from : kChunkKeys);
      w.end[r] = static_cast<int32_t>(position < start                ? 0
                                      : position < start + kChunkKeys ? position + 1 - start
                                                                      : kChunkKeys);
      if (w.end[r] < w.begin[r]) w.end[r] = w.begin[r];
    }
    if (scaled) {
      find_rows(layer, u, start, first, last, 1, w.next_at);
      for (int64_t i = 0; i < kChunkKeys; ++i) {
        w.key_scales[i] = load_scale(layer.kv.key_scale, layer.kv.scale_storage, w.next_at[i]);
        w.value_scales[i] = load_scale(layer.kv.value_scale, layer.kv.scale_storage, w.next_at[i]);
      }
    }

    const uint8_t *value_rows[kChunkKeys], *next_rows[kChunkKeys];  // those of `next` are keys
    for (int64_t j = 0; j < kChunkKeys; ++j) value_rows[j] = values + w.at[j];
    const int64_t first_tile = (first - start) / kLanes * kLanes;
    for (int64_t i = first_tile; i < last - start; i += kLanes) {
      const uint8_t* at[kLanes];
      for (int j = 0; j < kLanes; ++j) at[j] = keys + w.at[i + j];
      if (few) {
        dot_rows<storage>(w.query, rows, padded, at, value_rows + i, w.scores + i);
        continue;
      }
      transpose_keys<storage>(at, a.head_dim, w.keys);
      tile_rows(w.query, rows, padded, w.keys, w.scores + i, w.begin, w.end, static_cast<int32_t>(i));
    }

    for (int64_t r = 0; r < rows; ++r) {
      softmax_row(layer, w.scores + r * kChunkKeys, w.begin[r], w.end[r], factor, scaled ? w.key_scales : nullptr,
                  scaled ? w.value_scales : nullptr, w.new_most[r], w.new_total[r]);
    }
    if (u.split < 0) {
      for (int64_t r = 0; r < rows; r += kLanes) {
        F most, old_share, new_share;
        shares(load(w.most + r), load(w.new_most + r), most, old_share, new_share);
        store(w.most + r, most), store(w.old_share + r, old_share), store(w.new_share + r, new_share);
        store(w.total + r, load(w.total + r) * old_share + load(w.new_total + r) * new_share);
      }
    }

    const AttentionUnit* after = few ? (chunk < chunks.last ? &u : next) : nullptr;
    if (after) {
      const Seen then = seen_of(layer, *after, chunk < chunks.last ? chunk + 1 : chunks_of(layer, *after).first);
      find_rows(layer, *after, then.start, then.first, then.last, row_bytes, w.next_at);
      for (int64_t j = 0; j < kChunkKeys; ++j) next_rows[j] = keys + w.next_at[j];
    }
    for (int64_t j = first - start; !few && j < last - start; ++j) {
      float* to = w.values + j * padded;
      for (int64_t v = 0; v < layer.vectors; ++v)
        store(to + v * kLanes, load_stored<storage>(value_rows[j], v, a.head_dim - v * kLanes));
      value_rows[j] = reinterpret_cast<const uint8_t*>(to);
    }
    for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
      const int64_t count = rows - r < kRowsAtOnce ? rows - r : kRowsAtOnce;
      const float* weights = w.scores + r * kChunkKeys;
      if (few) {
        mix_rows<storage>(weights, count, w.begin + r, w.end + r, value_rows, after ? next_rows : nullptr,
                          layer.vectors, w.part);
      } else {
        mix_rows<KVBlocks::f32>(weights, count, w.begin + r, w.end + r, value_rows, nullptr, layer.vectors, w.part);
      }
      for (int64_t i = 0; i < count; ++i) {
        const float* part = w.part + i * padded;
        if (u.split < 0) {
          merge(w.mixed + (r + i) * padded, part, w.old_share[r + i], w.new_share[r + i], padded);
          continue;
        }
        const auto* split = split_of(layer.batch, u.split);
        float* most = partials + split->offset;
        most[(r + i) * split->chunks + chunk] = w.new_most[r + i];
        most[(rows + r + i) * split->chunks + chunk] = w.new_total[r + i];
        std::memcpy(most + 2 * rows * split->chunks + (chunk * rows + r + i) * padded, part, sizeof(float) * padded);
      }
    }
  }
  if (u.split >= 0) return;
  for (int64_t r = 0; r < rows; ++r) write_row(layer, u, u.first_row + r, w.mixed + r * padded, w.total[r], out);
}

// Merges the chunks of one row of a split, as run_unit does.
inline void merge_row(const Layer& layer, const AttentionSplit& split, int64_t r, const float* partials, Out out) {
  const AttentionUnit u{split.request, split.kv_head, split.first_row, split.last_row, -1, -1};
  const int64_t rows = u.last_row - u.first_row, padded = layer.padded;
  const float* most = partials + split.offset;
  const float *totals = most + rows * split.chunks, *parts = totals + rows * split.chunks;
  alignas(64) float mixed[kMostHeadDim] = {};
  float highest = -HUGE_VALF, total = 0;
  const int64_t last = layer.position(u, u.last_row - 1) / kChunkKeys;
  for (int64_t chunk = layer.first_seen(layer.position(u, u.first_row)) / kChunkKeys; chunk <= last;) {
    const int n = static_cast<int>(last + 1 - chunk < kLanes ? last + 1 - chunk : kLanes);
    float before[kLanes], now[kLanes], old_shares[kLanes], new_shares[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      before[i] = highest;
      now[i] = i < n ? most[r * split.chunks + chunk + i] : -HUGE_VALF;
      highest = highest < now[i] ? now[i] : highest;
    }
    F unused, old_share, new_share;
    shares(load(before), load(now), unused, old_share, new_share);
    store(old_shares, old_share), store(new_shares, new_share);
    for (int i = 0; i < n; ++i, ++chunk) {
      total = total * old_shares[i] + totals[r * split.chunks + chunk] * new_shares[i];
      merge(mixed, parts + (chunk * rows + r) * padded, old_shares[i], new_shares[i], padded);
    }
  }
  write_row(layer, u, u.first_row + r, mixed, total, out);
}

template <class Body>
inline void with_storage(KVBlocks::Storage storage, Body body) {
  switch (storage) {
    case KVBlocks::f32: return body(std::integral_constant<int, KVBlocks::f32>{});
    case KVBlocks::f16: return body(std::integral_constant<int, KVBlocks::f16>{});
    case KVBlocks::bf16: return body(std::integral_constant<int, KVBlocks::bf16>{});
    case KVBlocks::e4m3: return body(std::integral_constant<int, KVBlocks::e4m3>{});
    case KVBlocks::e5m2: return body(std::integral_constant<int, KVBlocks::e5m2>{});
    case KVBlocks::i8: return body(std::integral_constant<int, KVBlocks::i8>{});
  }
}

inline void attend(const Attention& attention, const KVBlocks& kv, const Batch& batch, Rows query, Out out,
                   const Context& c) {
  const int64_t vectors = (attention.head_dim + kLanes - 1) / kLanes;
  const Layer layer{attention, kv, batch, attention.heads / attention.kv_heads, vectors, vectors * kLanes};
  auto* partials = reinterpret_cast<float*>(c.scratch);
  const int64_t num_units = batch.units[0], num_splits = batch.units[1];
  auto& w = *reinterpret_cast<Workspace*>(c.scratch + batch.scratch_bytes + c.member * octavo::kWorkspaceBytes);
  const auto runs = [&](auto storage) {
    const AttentionUnit* found = nullptr;
    for (int64_t turn = 0; turn * c.members < num_units; ++turn) {
      const int64_t unit = turn * c.members + (turn % 2 ? c.members - 1 - c.member : c.member);
      if (unit >= num_units ||
          chunks_of(layer, *unit_of(batch, unit)).first > chunks_of(layer, *unit_of(batch, unit)).last)
        continue;
      const AttentionUnit* next = unit_of(batch, unit);
      if (found) run_unit<storage>(layer, *found, next, query, out, partials, w);
      found = next;
    }
    if (found) run_unit<storage>(layer, *found, nullptr, query, out, partials, w);
  };
  with_storage(kv.storage, runs);
  if (num_splits == 0) return;
  c.barrier();
  int64_t all = 0, done = 0, first, last;
  for (int64_t s = 0; s < num_splits; ++s) all += split_of(batch, s)->last_row - split_of(batch, s)->first_row;
  c.share(all, 1, first, last);
  for (int64_t s = 0; s < num_splits; ++s) {
    const AttentionSplit& split = *split_of(batch, s);
    for (int64_t r = 0; r < split.last_row - split.first_row; ++r, ++done)
      if (done >= first && done < last) merge_row(layer, split, r, partials, out);
  }
}

}  // namespace OCTAVO_ISA
