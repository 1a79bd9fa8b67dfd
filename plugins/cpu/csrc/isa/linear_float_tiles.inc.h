// Tiles of rows times blocks of 16 outputs in registers. A lane owns an output and runs through its inputs in order, so that a
// number has the same bits in every shape of tile: products of a chunk are added to `part` one by one, then total = scale * part
// + total and, with offsets, total = total - offset * (sum of the chunk's inputs).
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
inline Chunk first_chunk(const Weight& w) { return chunk_from(w, 0, 0, 0); }
inline Chunk next_chunk(const Weight& w, const Chunk& c) { return chunk_from(w, c.index + 1, c.segment, c.end); }

// What all tiles of a call have in common.
struct Prepared {
  const float* inputs;  // (rows, padded_in)
  int64_t input_stride;
  const float* sums;  // (rows, chunks) of inputs, where the weight has offsets
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

// part[r][b] = sum of x[r][k] * code[k][b]. `codes_at` is the first block's first code, `block_bytes` apart from the next.
template <class Codes, int kRows, int kBlocks>
[[gnu::always_inline]] inline void sum_products(const Codes& codes, const uint8_t* codes_at, int64_t block_bytes, const float* x,
                                                int64_t stride, int64_t count, F (&part)[kRows][kBlocks]) {
  for (int r = 0; r < kRows; ++r)
    for (int b = 0; b < kBlocks; ++b) part[r][b] = zero();
  InputRows<kRows> inputs(x, stride);
  int64_t k = 0;
  for (; k + Codes::kUnit <= count; k += Codes::kUnit) {
    typename Codes::Raw raw[kBlocks];
    for (int b = 0; b < kBlocks; ++b) raw[b] = codes.read(codes_at + b * block_bytes);
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

// Adds the chunks from `chunk` on, up to input `until`, of kBlocks blocks from `block` on to totals (rows, blocks * 16).
// `codes_at` is the code of input 0 of the first block, or of where a panel would begin.
template <class Codes, int kRows, int kBlocks>
[[gnu::noinline]] inline void add_chunks(const Weight& w, const Codes& codes, const uint8_t* codes_at, int64_t block_bytes, int64_t block,
                       Chunk chunk, int64_t until, const Prepared& in, int64_t row, float* totals, int64_t total_stride) {
  const int64_t padded_out = w.blocks() * kLanes;
  constexpr int kInputBytes = Codes::kUnitBytes / Codes::kUnit;
  for (; chunk.begin < until; chunk = next_chunk(w, chunk)) {
    F part[kRows][kBlocks];
    sum_products<Codes, kRows, kBlocks>(codes, codes_at + chunk.begin * kInputBytes, block_bytes,
                                        in.inputs + row * in.input_stride + chunk.begin, in.input_stride,
                                        chunk.end - chunk.begin, part);
    const int64_t at = chunk.segment * padded_out + block * kLanes;
    const float* sums = in.sums + row * in.sum_stride + chunk.index;
    for (int b = 0; b < kBlocks; ++b) {
      const F factor = set1(codes.factor);
      const F scale = w.scales ? load(w.scales + at + b * kLanes) * factor : factor;
      const F offset = w.offsets ? load(w.offsets + at + b * kLanes) : zero();
      for (int r = 0; r < kRows; ++r) {
        float* to = totals + r * total_stride + b * kLanes;
        F total = fma(scale, part[r][b], load(to));
        if (w.offsets) total = fnma(offset, set1(sums[r * in.sum_stride]), total);
        store(to, total);
      }
    }
  }
}

// Writes totals of `rows` rows and blocks [block, last) to the outputs.
inline void finish(const Weight& w, const float* totals, int64_t total_stride, int64_t rows, int64_t block, int64_t last,
                   float* out, int64_t out_stride) {
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
