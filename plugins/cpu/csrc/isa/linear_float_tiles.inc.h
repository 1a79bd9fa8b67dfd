// Tiles of rows times blocks of 16 outputs in registers. A lane owns an output and runs through its inputs in order, so
// that a number has the same bits in every shape of tile: products of a chunk are added to `part` one by one, then
// part = part - zero * sum, with zeros; total = scale * part + total; total = total - offset * sum, with offsets. `sum` is
// that of the chunk's inputs.
namespace OCTAVO_ISA {

using octavo::kChunk;

// Inputs [begin, end) of one segment, at most kChunk.
struct Chunk {
  int64_t index, segment, begin, end;
};

inline Chunk chunk_from(const Weight& w, int64_t index, int64_t segment, int64_t begin) {
  while (segment < w.num_segments && begin == w.segment_starts[segment + 1]) ++segment;
  if (segment == w.num_segments) return {index, segment, begin, begin};
  const int64_t last = w.segment_starts[segment + 1];
  return {index, segment, begin, last - begin < kChunk ? last : begin + kChunk};
}
// 16 scales from number `at` on.
[[gnu::always_inline]] inline F load_scales(const Weight& w, int64_t at) {
  if (w.scale_code == Code::f16) return load_f16(static_cast<const uint16_t*>(w.scales) + at);
  if (w.scale_code == Code::bf16) return load_bf16(static_cast<const uint16_t*>(w.scales) + at);
  return load(static_cast<const float*>(w.scales) + at);
}

inline Chunk first_chunk(const Weight& w) { return chunk_from(w, 0, 0, 0); }
inline Chunk next_chunk(const Weight& w, const Chunk& c) { return chunk_from(w, c.index + 1, c.segment, c.end); }

// What all tiles of a call have in common.
struct Prepared {
  const float* inputs;  // (rows, padded_in)
  int64_t input_stride;
  const float* sums;  // (rows, chunks) of inputs, where the weight has zeros or offsets
  int64_t sum_stride;
};

// Rows of inputs. Base, index and factor of an address reach four rows with few registers.
template <int kRows>
struct InputRows {
  const char* quad[(kRows + 3) / 4];
  int64_t step, triple;

  [[gnu::always_inline]] InputRows(const float* x, int64_t stride) : step(stride * 4), triple(stride * 12) {
    for (int q = 0; q < (kRows + 3) / 4; ++q) quad[q] = reinterpret_cast<const char*>(x) + q * 4 * step;
  }
  template <int r>
  [[gnu::always_inline]] F at(int64_t k) const {  // to all lanes
    const char* base = quad[r / 4] + k * 4 + (r % 4 == 0 ? 0 : r % 4 == 1 ? step : r % 4 == 2 ? 2 * step : triple);
    return set1(*reinterpret_cast<const float*>(base));
  }
  [[gnu::always_inline]] void advance(int64_t inputs) {
    for (int q = 0; q < (kRows + 3) / 4; ++q) quad[q] += inputs * 4;
  }
};

template <int kRows, int kBlocks, int r = 0>
[[gnu::always_inline]] inline void add_products(const InputRows<kRows>& x, int64_t k, const F (&values)[kBlocks],
                                                F (&part)[kRows][kBlocks]) {
  if constexpr (r < kRows) {
    const F input = x.template at<r>(k);
    for (int b = 0; b < kBlocks; ++b) part[r][b] = fma(input, values[b], part[r][b]);
    add_products<kRows, kBlocks, r + 1>(x, k, values, part);
  }
}

template <class Codes, int kRows, int kBlocks, int i = 0>
[[gnu::always_inline]] inline void add_unit(const Codes& codes, const typename Codes::Raw (&raw)[kBlocks],
                                            const InputRows<kRows>& x, F (&part)[kRows][kBlocks]) {
  if constexpr (i < Codes::kUnit) {
    F values[kBlocks];
    for (int b = 0; b < kBlocks; ++b) values[b] = codes.template get<i>(raw[b]);
    add_products<kRows, kBlocks>(x, i, values, part);
    add_unit<Codes, kRows, kBlocks, i + 1>(codes, raw, x, part);
  }
}

// part[r][b] = sum of x[r][k] * code[k][b]. `codes_at` is the first block's first code, `block_bytes` apart from the
// next; what lies `ahead` of a code is prefetched with it.
template <class Codes, int kRows, int kBlocks>
[[gnu::always_inline]] inline void sum_products(const Codes& codes, const uint8_t* codes_at, int64_t block_bytes,
                                                int64_t ahead, const float* x, int64_t stride, int64_t count,
                                                F (&part)[kRows][kBlocks]) {
  for (int r = 0; r < kRows; ++r)
    for (int b = 0; b < kBlocks; ++b) part[r][b] = zero();
  InputRows<kRows> inputs(x, stride);
  int64_t k = 0;
  for (; k + Codes::kUnit <= count; k += Codes::kUnit) {
    typename Codes::Raw raw[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      const uint8_t* from = codes_at + b * block_bytes;
      raw[b] = codes.read(from);
      for (int line = 0; line < Codes::kUnitBytes; line += 64) __builtin_prefetch(from + ahead + line, 0, 3);
    }
    add_unit<Codes, kRows, kBlocks>(codes, raw, inputs, part);
    codes_at += Codes::kUnitBytes;
    inputs.advance(Codes::kUnit);
  }
  for (; k < count; ++k) {
    F values[kBlocks];
    for (int b = 0; b < kBlocks; ++b) values[b] = codes.one(codes_at + b * block_bytes);
    add_products<kRows, kBlocks>(inputs, 0, values, part);
    codes_at += Codes::kUnitBytes / Codes::kUnit;
    inputs.advance(1);
  }
}

// Rows [row, ...) and blocks [block, ...) over chunks from `chunk` on, up to input `until`.
struct FloatTile {
  const uint8_t* codes_at;  // of input 0 of the first block, or of where a panel would begin
  int64_t block_bytes;      // from one block's codes to the next's
  int64_t block;
  Chunk chunk;
  int64_t until;
  int64_t row;
  float* totals;  // (rows, blocks * 16), to which the tile is added
  int64_t total_stride;
  int64_t next;  // bytes from the tile's codes to those that will be read afterwards; 0: no prefetching
};

constexpr int64_t kFloatAhead = 2048;  // bytes of prefetching in each block

template <class Codes, int kRows, int kBlocks>
[[gnu::noinline]] inline void add_chunks(const Weight& w, const Codes& codes, const Prepared& in,
                                         const FloatTile& tile) {
  constexpr int kInputBytes = Codes::kUnitBytes / Codes::kUnit;
  for (Chunk chunk = tile.chunk; chunk.begin < tile.until; chunk = next_chunk(w, chunk)) {
    F part[kRows][kBlocks];
    const int64_t offset = chunk.begin * kInputBytes;
    int64_t ahead = 0;
    if (tile.next) ahead = kFloatAhead + (offset + kFloatAhead < tile.block_bytes ? 0 : tile.next - tile.block_bytes);
    sum_products<Codes, kRows, kBlocks>(codes, tile.codes_at + offset, tile.block_bytes, ahead,
                                        in.inputs + tile.row * in.input_stride + chunk.begin, in.input_stride,
                                        chunk.end - chunk.begin, part);
    const float* sums = in.sums + tile.row * in.sum_stride + chunk.index;
    for (int b = 0; b < kBlocks; ++b) {
      const int64_t at = ((tile.block + b) * w.num_segments + chunk.segment) * kLanes;
      const F factor = set1(codes.factor);
      const F scale = w.scales ? load_scales(w, at) * factor : factor;
      const F shift = w.zeros ? load_u8(w.zeros + at) : w.offsets ? load(w.offsets + at) : zero();
      for (int r = 0; r < kRows; ++r) {
        float* to = tile.totals + r * tile.total_stride + b * kLanes;
        if (w.zeros) part[r][b] = fnma(shift, set1(sums[r * in.sum_stride]), part[r][b]);
        F total = fma(scale, part[r][b], load(to));
        if (w.offsets) total = fnma(shift, set1(sums[r * in.sum_stride]), total);
        store(to, total);
      }
    }
  }
}

// A tile of up to kRows rows and kBlocks blocks, a power of two, with at most kSums sums.
template <class Codes, int kRows, int kBlocks, int kSums>
inline void add_tile(const Weight& w, const Codes& codes, const Prepared& in, const FloatTile& tile, int64_t rows,
                     int64_t blocks) {
  if (blocks < kBlocks) {
    if constexpr (kBlocks > 1) add_tile<Codes, kRows, kBlocks / 2, kSums>(w, codes, in, tile, rows, blocks);
  } else if (rows < kRows) {
    if constexpr (kRows > 1) add_tile<Codes, kRows - 1, kBlocks, kSums>(w, codes, in, tile, rows, blocks);
  } else if constexpr (kRows * kBlocks <= kSums) {
    add_chunks<Codes, kRows, kBlocks>(w, codes, in, tile);
  }
}

// Writes totals of `rows` rows and blocks [block, last) to the outputs.
inline void finish(const Weight& w, const float* totals, int64_t total_stride, int64_t rows, int64_t block,
                   int64_t last, float* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t b = block; b < last; ++b) {
      F total = load(totals + r * total_stride + (b - block) * kLanes);
      if (w.bias) total = total + load(w.bias + b * kLanes);
      float* to = out + r * out_stride + b * kLanes;
      const int64_t left = w.out - b * kLanes;
      if (left >= kLanes) {
        store(to, total);
      } else {
        store_n(to, total, static_cast<int>(left));
      }
    }
  }
}

}  // namespace OCTAVO_ISA
