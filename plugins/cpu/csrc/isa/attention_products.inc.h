// The two products of attention, for few rows on K and V as they are stored and for many on decoded ones, with the same bits:
// a score is 16 sums over every 16th dimension, added as sum() does; a weighted value is one sum from the first key to the last.
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

// Scores of `rows` queries with 16 keys, to scores[row * kChunkKeys ...].
template <int storage, int rows>
inline void dots(const float* query, int64_t padded, const uint8_t* const* keys, float* scores) {
  F quarters[rows][4];
  for (int i = 0; i < 4; ++i) {
    F sums[rows][4];
    for (auto& row : sums)
      for (F& s : row) s = zero();
    for (int64_t v = 0; v * kLanes < padded; ++v) {
      F q[rows];
      for (int r = 0; r < rows; ++r) q[r] = load(query + r * padded + v * kLanes);
      for (int j = 0; j < 4; ++j) {
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
inline void dot_rows(const float* query, int64_t rows, int64_t padded, const uint8_t* const* keys, float* scores) {
  for (int64_t r = 0; r < rows; r += kScoreRows) {
    with_constant<kScoreRows>(rows - r, [&](auto count) {
      dots<storage, count>(query + r * padded, padded, keys, scores + r * kChunkKeys);
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

// The part of a score that comes from dimensions lane, lane + 2 * step, lane + 4 * step, ...: with step 8 a sum, else two parts.
template <int rows, int step>
inline Scores<rows> score_part(const float* query, int64_t padded, const float* keys, int lane) {
  Scores<rows> total;
  if constexpr (step == 16) {
    for (F& s : total.of) s = zero();
    for (int64_t d = lane; d < padded; d += kLanes) {
      const F key = load(keys + d * kLanes);
      for (int r = 0; r < rows; ++r) total.of[r] = fma(set1(query[r * padded + d]), key, total.of[r]);
    }
  } else {
    total = score_part<rows, step * 2>(query, padded, keys, lane);
    const Scores<rows> other = score_part<rows, step * 2>(query, padded, keys, lane + step);
    for (int r = 0; r < rows; ++r) total.of[r] = total.of[r] + other.of[r];
  }
  return total;
}

// Scores of those rows that see any of the 16 positions from `tile` on.
inline void tile_rows(const float* query, int64_t rows, int64_t padded, const float* keys, float* scores, const int32_t* begin,
                      const int32_t* end, int32_t tile) {
  for (int64_t r = 0; r < rows; r += kTileRows) {
    const int64_t last = (rows - r < kTileRows ? rows : r + kTileRows) - 1;  // a later row begins and ends no earlier
    if (tile >= end[last] || tile + kLanes <= begin[r]) continue;
    with_constant<kTileRows>(rows - r, [&](auto count) {
      const auto made = score_part<count, 1>(query + r * padded, padded, keys, 0);
      for (int i = 0; i < count; ++i) store(scores + (r + i) * kChunkKeys, made.of[i]);
    });
  }
}

// Adds keys first ... last - 1 of weights (rows, kChunkKeys) times values to out (rows, padded), in some of the vectors.
template <int storage, int rows, int vectors>
inline void mix(const float* weights, const uint8_t* const* values, int64_t first, int64_t last, int64_t at_vector, float* out,
                int64_t padded) {
  F sums[rows][vectors];
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vectors; ++v) sums[r][v] = load(out + r * padded + (at_vector + v) * kLanes);
  for (int64_t key = first; key < last; ++key) {
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
inline void mix_keys(const float* weights, int64_t rows, const uint8_t* const* values, int64_t first, int64_t last,
                     int64_t vectors, float* out) {
  if (first >= last) return;
  with_constant<kRowsAtOnce>(rows, [&](auto count) {
    for (int64_t v = 0; v < vectors; v += kVectorsAtOnce) {
      with_constant<kVectorsAtOnce>(vectors - v, [&](auto some) {
        mix<storage, count, some>(weights, values, first, last, v, out, vectors * kLanes);
      });
    }
  });
}

// Weighted values of up to kRowsAtOnce rows to out (rows, padded). What a row does not see is not even multiplied by 0.
template <int storage>
inline void mix_rows(const float* weights, int64_t rows, const int32_t* begin, const int32_t* end, const uint8_t* const* values,
                     int64_t vectors, float* out) {
  const int64_t padded = vectors * kLanes, common_begin = begin[rows - 1], common_end = end[0];
  for (int64_t i = 0; i < rows * padded; ++i) out[i] = 0;
  if (common_begin >= common_end) {
    for (int64_t r = 0; r < rows; ++r)
      mix_keys<storage>(weights + r * kChunkKeys, 1, values, begin[r], end[r], vectors, out + r * padded);
    return;
  }
  for (int64_t r = 0; r < rows; ++r)
    mix_keys<storage>(weights + r * kChunkKeys, 1, values, begin[r], common_begin, vectors, out + r * padded);
  mix_keys<storage>(weights, rows, values, common_begin, common_end, vectors, out);
  for (int64_t r = 0; r < rows; ++r)
    mix_keys<storage>(weights + r * kChunkKeys, 1, values, common_end, end[r], vectors, out + r * padded);
}

}  // namespace OCTAVO_ISA
