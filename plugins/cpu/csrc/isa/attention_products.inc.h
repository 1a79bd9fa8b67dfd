// The two products of attention, for few rows on K and V as they are stored and for many on decoded ones, with the same
// bits: a score is 16 sums over every 16th dimension, added as sum() does; a weighted value is one sum from the first
// key to the last.
namespace OCTAVO_ISA {

using octavo::kChunkKeys;

alignas(64) constexpr float kLaneNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

#if defined(OCTAVO_AVX512VNNI)
constexpr int kScoreRows = 4, kTileRows = 4, kRowsAtOnce = 6, kVectorsAtOnce = 4;  // what 32 registers hold
#elif defined(OCTAVO_AVX2)
constexpr int kScoreRows = 1, kTileRows = 1, kRowsAtOnce = 3, kVectorsAtOnce = 2;
#else
constexpr int kScoreRows = 1, kTileRows = 1, kRowsAtOnce = 2, kVectorsAtOnce = 2;
#endif

// Calls body with a constant 1 ... most.
template <int most, class Body>
inline void with_constant(int64_t n, Body body) {
  if constexpr (most > 1) {
    if (n < most) return with_constant<most - 1>(n, body);
  }
  body(std::integral_constant<int, most>{});
}

// Where what is read next begins: fetched line by line between the multiplications, as bursts would wait for one
// another.
template <int storage>
inline void prefetch_part(const uint8_t* row, int64_t v) {
  const int64_t at = v * kLanes * stored_bytes(storage);
  if (at % 64 == 0) prefetch(row + at);
}

// Scores of `rows` queries with 16 keys, to scores[row * kChunkKeys ...]; `next` are 16 rows that are read later.
template <int storage, int rows>
inline void dots(const float* query, int64_t padded, const uint8_t* const* keys, const uint8_t* const* next,
                 float* scores) {
  F quarters[rows][4];
  for (int i = 0; i < 4; ++i) {
    F sums[rows][4];
    for (auto& row : sums)
      for (F& s : row) s = zero();
    for (int64_t v = 0; v * kLanes < padded; ++v) {
      F q[rows];
      for (int r = 0; r < rows; ++r) q[r] = load(query + r * padded + v * kLanes);
      for (int j = 0; j < 4; ++j) {
        prefetch_part<storage>(next[4 * j + i], v);
        const F key = load_stored<storage>(keys[4 * j + i], v);
        for (int r = 0; r < rows; ++r) sums[r][j] = fma(q[r], key, sums[r][j]);
      }
    }
    for (int r = 0; r < rows; ++r) quarters[r][i] = quarter_sums(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
  }
  for (int r = 0; r < rows; ++r)
    store(scores + r * kChunkKeys, last_sums(quarters[r][0], quarters[r][1], quarters[r][2], quarters[r][3]));
}

template <int storage>
inline void dot_rows(const float* query, int64_t rows, int64_t padded, const uint8_t* const* keys,
                     const uint8_t* const* next, float* scores) {
  for (int64_t r = 0; r < rows; r += kScoreRows) {
    with_constant<kScoreRows>(rows - r, [&](auto count) {
      dots<storage, count>(query + r * padded, padded, keys, next, scores + r * kChunkKeys);
    });
  }
}

// 16 keys as fp32, (padded head_dim, 16).
template <int storage>
inline void transpose_keys(const uint8_t* const* keys, int64_t head_dim, float* out) {
  for (int64_t v = 0; v * kLanes < head_dim; ++v) {
    F x[kLanes];
    for (int j = 0; j < kLanes; ++j) x[j] = load_stored<storage>(keys[j], v, head_dim - v * kLanes);
    transpose(x);
    for (int j = 0; j < kLanes; ++j) store(out + (v * kLanes + j) * kLanes, x[j]);
  }
}

template <int rows>
struct Scores {
  F of[rows];
};

// The part of a score that comes from dimensions lane, lane + step, lane + 2 * step, ...; `vectors` of 16 dimensions,
// 0: as many as padded has.
template <int rows, int vectors, int step>
[[gnu::always_inline]] inline Scores<rows> score_part(const float* query, int64_t padded, const float* keys, int lane) {
  Scores<rows> total, other;
  if constexpr (step == kLanes / 2) {
    for (int r = 0; r < rows; ++r) total.of[r] = other.of[r] = zero();
    for (int64_t v = 0; v < (vectors ? vectors : padded / kLanes); ++v) {
      const int64_t d = v * kLanes + lane;
      const F key = load(keys + d * kLanes), far_key = load(keys + (d + step) * kLanes);
      for (int r = 0; r < rows; ++r) {
        total.of[r] = fma(set1(query[r * padded + d]), key, total.of[r]);
        other.of[r] = fma(set1(query[r * padded + d + step]), far_key, other.of[r]);
      }
    }
  } else {
    total = score_part<rows, vectors, step * 2>(query, padded, keys, lane);
    other = score_part<rows, vectors, step * 2>(query, padded, keys, lane + step);
  }
  for (int r = 0; r < rows; ++r) total.of[r] = total.of[r] + other.of[r];
  return total;
}

template <int rows>
inline void tile_scores(const float* query, int64_t padded, const float* keys, float* scores) {
  const auto made = padded == 4 * kLanes   ? score_part<rows, 4, 1>(query, padded, keys, 0)
                    : padded == 8 * kLanes ? score_part<rows, 8, 1>(query, padded, keys, 0)
                                           : score_part<rows, 0, 1>(query, padded, keys, 0);
  for (int r = 0; r < rows; ++r) store(scores + r * kChunkKeys, made.of[r]);
}

// Scores of those rows that see any of the 16 positions from `tile` on.
inline void tile_rows(const float* query, int64_t rows, int64_t padded, const float* keys, float* scores,
                      const int32_t* begin, const int32_t* end, int32_t tile) {
  for (int64_t r = 0; r < rows; r += kTileRows) {
    const int64_t last = (rows - r < kTileRows ? rows : r + kTileRows) - 1;  // a later row begins and ends no earlier
    if (tile >= end[last] || tile + kLanes <= begin[r]) continue;
    with_constant<kTileRows>(rows - r, [&](auto count) {
      tile_scores<count>(query + r * padded, padded, keys, scores + r * kChunkKeys);
    });
  }
}

// Adds keys first ... last - 1 of weights (rows, kChunkKeys) times values to out (rows, padded), in some of the
// vectors; `next` as above, or null.
template <int storage, int rows, int vectors>
inline void mix(const float* weights, const uint8_t* const* values, const uint8_t* const* next, int64_t first,
                int64_t last, int64_t at_vector, float* out, int64_t padded) {
  F sums[rows][vectors];
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vectors; ++v) sums[r][v] = load(out + r * padded + (at_vector + v) * kLanes);
  for (int64_t key = first; key < last; ++key) {
    if (next)
      for (int v = 0; v < vectors; ++v) prefetch_part<storage>(next[key], at_vector + v);
    F value[vectors];
    for (int v = 0; v < vectors; ++v) value[v] = load_stored<storage>(values[key], at_vector + v);
    for (int r = 0; r < rows; ++r) {
      const F weight = set1(weights[r * kChunkKeys + key]);
      for (int v = 0; v < vectors; ++v) sums[r][v] = fma(weight, value[v], sums[r][v]);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vectors; ++v) store(out + r * padded + (at_vector + v) * kLanes, sums[r][v]);
}

template <int storage>
inline void mix_keys(const float* weights, int64_t rows, const uint8_t* const* values, const uint8_t* const* next,
                     int64_t first, int64_t last, int64_t vectors, float* out) {
  if (first >= last) return;
  with_constant<kRowsAtOnce>(rows, [&](auto count) {
    int64_t v = 0;
    for (; v + kVectorsAtOnce <= vectors; v += kVectorsAtOnce)
      mix<storage, count, kVectorsAtOnce>(weights, values, next, first, last, v, out, vectors * kLanes);
    for (; v < vectors; ++v) mix<storage, count, 1>(weights, values, next, first, last, v, out, vectors * kLanes);
  });
}

// The weighted values of up to kRowsAtOnce rows to out (rows, padded). What a row does not see is not even multiplied
// by 0.
template <int storage>
inline void mix_rows(const float* weights, int64_t rows, const int32_t* begin, const int32_t* end,
                     const uint8_t* const* values, const uint8_t* const* next, int64_t vectors, float* out) {
  const auto mix_some = [&](int64_t row, int64_t count, int64_t first, int64_t last) {
    mix_keys<storage>(weights + row * kChunkKeys, count, values, next, first, last, vectors,
                      out + row * vectors * kLanes);
  };
  for (int64_t i = 0; i < rows * vectors; ++i) store(out + i * kLanes, zero());
  // A later row begins and ends no earlier.
  const int64_t common_begin = begin[rows - 1], common_end = end[0];
  if (common_begin >= common_end) {
    for (int64_t r = 0; r < rows; ++r) mix_some(r, 1, begin[r], end[r]);
    return;
  }
  for (int64_t r = 0; r < rows; ++r) mix_some(r, 1, begin[r], common_begin);
  mix_some(0, rows, common_begin, common_end);
  for (int64_t r = 0; r < rows; ++r) mix_some(r, 1, common_end, end[r]);
}

}  // namespace OCTAVO_ISA
