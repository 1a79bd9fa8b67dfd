// Linear layers on float inputs: weights as they are, products and sums in fp32.
namespace OCTAVO_ISA {

using octavo::Context, octavo::Out, octavo::Rows, octavo::FloatPlan, octavo::kGroupBlocks,
    octavo::kPanelBlocks, octavo::kPanelInputs, octavo::kRowBlock;

// The largest tiles that the registers hold, of decoded panels and of codes that are decoded in registers as well; the
// latter have up to kDirectSums sums and, by the kind of codes, kDirectTile rows. Up to kDirectRows rows they are
// faster, in one tile or two.
#if defined(OCTAVO_AVX512VNNI)
constexpr int kFloatRows = 12, kFloatBlocks = 2, kDirectSums = 16;
template <class Codes>
constexpr int kDirectTile = Codes::kCheap ? 8 : 4;
template <class Codes>
constexpr int kDirectRows = Codes::kCheap ? 16 : 4;
#elif defined(OCTAVO_AVX2)
constexpr int kFloatRows = 6, kFloatBlocks = 1, kDirectSums = 4;
template <class Codes>
constexpr int kDirectTile = Codes::kCheap ? 4 : 2;
template <class Codes>
constexpr int kDirectRows = kDirectTile<Codes>;
#else
constexpr int kFloatRows = 4, kFloatBlocks = 1, kDirectSums = 2;
template <class Codes>
constexpr int kDirectTile = Codes::kCheap ? 2 : 1;
template <class Codes>
constexpr int kDirectRows = kDirectTile<Codes>;
#endif
constexpr int kDirectBlocks = kDirectSums < 4 ? kDirectSums : 4;
static_assert(kFloatBlocks <= kPanelBlocks);

// Rows [first, last), counted from x's first: their inputs as the packed codes want them, and sums of each chunk.
inline void prepare(const Weight& w, Rows x, int64_t first, int64_t last, bool copies, float* inputs, float* sums,
                    const FloatPlan& plan) {
  for (int64_t row = first; row < last; ++row) {
    const float* from = x.data + row * x.stride;
    if (copies) {
      float* to = inputs + row * plan.input_stride;
      if (w.source) {
        for (int64_t k = 0; k < w.padded_in; ++k) to[k] = w.source[k] < 0 ? 0.0f : from[w.source[k]];
      } else {
        int64_t k = 0;
        for (; k + kLanes <= w.in; k += kLanes) store(to + k, load(from + k));
        for (; k < w.padded_in; ++k) to[k] = k < w.in ? from[k] : 0.0f;
      }
      from = to;
    }
    if (!w.zeros && !w.offsets) continue;
    for (Chunk chunk = first_chunk(w); chunk.segment < w.num_segments; chunk = next_chunk(w, chunk)) {
      F total = zero();
      int64_t k = chunk.begin;
      for (; k + kLanes <= chunk.end; k += kLanes) total = total + load(from + k);
      if (k < chunk.end) total = total + load_n(from + k, static_cast<int>(chunk.end - k));
      sums[row * plan.sum_stride + chunk.index] = sum(total);
    }
  }
}

// Few rows: blocks [block, last) straight from packed codes.
template <class Codes>
inline void direct(const Weight& w, const Codes& codes, const Prepared& in, int64_t rows, int64_t block, int64_t last,
                   Out out) {
  constexpr int kMost = kDirectTile<Codes>;
  const int64_t block_bytes = w.padded_in * (Codes::kUnitBytes / Codes::kUnit);
  const int64_t tiles = (rows + kMost - 1) / kMost, most = (rows + tiles - 1) / tiles;
  for (int64_t blocks = kDirectBlocks; block < last; block += blocks) {
    while (blocks > last - block || blocks * most > kDirectSums) blocks /= 2;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row = rows * tile / tiles, end = rows * (tile + 1) / tiles;
      const int64_t next = tile == 0 && block + blocks < last ? blocks * block_bytes : 0;
      alignas(64) float totals[kDirectSums * kLanes] = {};
      const FloatTile part{w.codes + block * block_bytes, block_bytes, block, first_chunk(w), w.padded_in, row,
                           totals,                        blocks * kLanes, next};
      add_tile<Codes, kMost, kDirectBlocks, kDirectSums>(w, codes, in, part, end - row, blocks);
      finish(w, totals, blocks * kLanes, end - row, block, block + blocks, out.data + row * out.stride, out.stride);
    }
  }
}

template <class Codes, int i = 0>
[[gnu::always_inline]] inline void store_unit(const Codes& codes, const typename Codes::Raw& raw, float* to) {
  if constexpr (i < Codes::kUnit) {
    store(to + i * kLanes, codes.template get<i>(raw));
    store_unit<Codes, i + 1>(codes, raw, to);
  }
}

// Decodes inputs [begin, end) of kFloatBlocks blocks, or fewer at the end, to floats: (blocks, kChunk, 16).
template <class Codes>
inline void decode_panel(const Weight& w, const Codes& codes, int64_t block, int64_t blocks, int64_t begin, int64_t end,
                         float* panel) {
  constexpr int kInputBytes = Codes::kUnitBytes / Codes::kUnit;
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* from = w.codes + ((block + b) * w.padded_in + begin) * kInputBytes;
    float* to = panel + b * kChunk * kLanes;
    int64_t k = begin;
    for (; k + Codes::kUnit <= end; k += Codes::kUnit) {
      const typename Codes::Raw raw = codes.read(from);
      store_unit(codes, raw, to);
      from += Codes::kUnitBytes;
      to += Codes::kUnit * kLanes;
    }
    for (; k < end; ++k) {
      store(to, codes.one(from));
      from += kInputBytes;
      to += kLanes;
    }
  }
}

// Many rows [row, last_row): panels of codes are decoded once for all of them.
template <class Codes>
inline void panels(const Weight& w, const Codes& codes, const Prepared& in, int64_t row, int64_t last_row,
                   int64_t block, int64_t last, std::byte* scratch, Out out) {
  constexpr bool kInPlace = Codes::kUnitBytes == 4 * kLanes * Codes::kUnit;  // floats already
  F32Codes decoded(w);
  decoded.factor = codes.factor;
  float* panel = reinterpret_cast<float*>(scratch);
  float* totals = panel + kPanelBlocks * kChunk * kLanes;
  const int64_t tiles = (last_row - row + kFloatRows - 1) / kFloatRows;
  for (; block < last; block += kGroupBlocks) {
    const int64_t group = last - block < kGroupBlocks ? last - block : kGroupBlocks;
    std::memset(totals, 0, (last_row - row) * kGroupBlocks * kLanes * sizeof(float));
    for (Chunk chunk = first_chunk(w), after; chunk.segment < w.num_segments; chunk = after) {
      after = next_chunk(w, chunk);
      while (after.segment < w.num_segments && after.end - chunk.begin <= kPanelInputs) after = next_chunk(w, after);
      const int64_t until = after.begin;
      for (int64_t b = 0; b < group; b += kFloatBlocks) {
        const int64_t blocks = group - b < kFloatBlocks ? group - b : kFloatBlocks;
        const float* from = panel;  // as if it began at input 0
        int64_t block_bytes = kChunk * kLanes * 4;
        if constexpr (kInPlace) {
          block_bytes = w.padded_in * kLanes * 4;
          from = reinterpret_cast<const float*>(w.codes + (block + b) * block_bytes);
        } else {
          decode_panel(w, codes, block + b, blocks, chunk.begin, until, panel);
        }
        const int64_t origin = kInPlace ? 0 : chunk.begin;
        for (int64_t tile = 0; tile < tiles; ++tile) {
          const int64_t first = row + (last_row - row) * tile / tiles;
          const int64_t end = row + (last_row - row) * (tile + 1) / tiles;
          float* to = totals + (first - row) * kGroupBlocks * kLanes + b * kLanes;
          const auto* at = reinterpret_cast<const uint8_t*>(from) - origin * kLanes * 4;
          const FloatTile part{at, block_bytes, block + b, chunk, until, first, to, kGroupBlocks * kLanes, 0};
          constexpr int kSums = kFloatRows * kFloatBlocks;
          add_tile<F32Codes, kFloatRows, kFloatBlocks, kSums>(w, decoded, in, part, end - first, blocks);
        }
      }
    }
    float* to = out.data + row * out.stride;
    finish(w, totals, kGroupBlocks * kLanes, last_row - row, block, block + group, to, out.stride);
  }
}

// Into how many parts rows are cut so that the busiest member has least to do; the outputs are cut for the rest.
inline int row_parts(int64_t rows, int64_t blocks, int members) {
  int best = 1;
  int64_t least = 0;
  for (int parts = 1; parts <= members; ++parts) {
    if (members % parts) continue;
    const int64_t columns = members / parts, units = (blocks + kFloatBlocks - 1) / kFloatBlocks;
    const int64_t most = ((units + columns - 1) / columns) * ((rows + parts - 1) / parts);
    if (parts == 1 || most < least) least = most, best = parts;
  }
  return best;
}

inline void linear_float(const Weight& w, Rows x, Out out, const Context& c) {
  const FloatPlan plan = octavo::plan_linear_float(w, c.rows, c.members);
  const bool copies = w.source || w.padded_in != w.in || (c.rows > 16 && x.stride % 1024 == 0);
  const bool alone = c.rows == 1;  // each member prepares the row for itself
  auto* inputs = reinterpret_cast<float*>(c.scratch + plan.inputs_at) + (alone ? c.member * plan.input_stride : 0);
  auto* sums = reinterpret_cast<float*>(c.scratch + plan.sums_at) + (alone ? c.member * plan.sum_stride : 0);
  for (int64_t start = 0; start < c.rows; start += kRowBlock) {
    const int64_t rows = c.rows - start < kRowBlock ? c.rows - start : kRowBlock;
    const Rows from{x.data + start * x.stride, x.stride};
    const Out to{out.data + start * out.stride, out.stride};
    if (copies || w.zeros || w.offsets) {
      int64_t first = 0, last = 1;
      if (start > 0) c.barrier();  // until nobody reads the rows before
      if (!alone) c.share(rows, 1, first, last);
      prepare(w, from, first, last, copies, inputs, sums, plan);
      if (!alone) c.barrier();
    }
    const Prepared in{copies ? inputs : from.data, copies ? plan.input_stride : x.stride, sums, plan.sum_stride};
    with_codes(w, [&]<class Codes>(const Codes& codes) {
      int64_t block, last;
      if (c.rows <= kDirectRows<Codes>) {
        c.share(w.blocks(), 1, block, last);
        direct(w, codes, in, rows, block, last, to);
      } else {
        const int parts = row_parts(rows, w.blocks(), c.members), columns = c.members / parts;
        const int part = c.member % parts, column = c.member / parts;
        const int64_t units = (w.blocks() + kFloatBlocks - 1) / kFloatBlocks;
        block = units * column / columns * kFloatBlocks;
        last = units * (column + 1) / columns * kFloatBlocks;
        if (last > w.blocks()) last = w.blocks();
        panels(w, codes, in, rows * part / parts, rows * (part + 1) / parts, block, last,
               c.scratch + plan.members_at + c.member * plan.member_bytes, to);
      }
    });
  }
}

}  // namespace OCTAVO_ISA
