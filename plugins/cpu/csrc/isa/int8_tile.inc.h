// Tiles: some rows times some blocks of 16 outputs, over all inputs. Every sum has the same order in each of them.
namespace OCTAVO_ISA {

struct Tile {  // of quantised rows
  const int8_t* q;  // each four inputs of all rows, then the next four
  const SegmentTerms* terms;  // (num_segments, rows)
  const RowTerms* rows;
  float* out;
  int64_t out_stride;
};

struct Panel {  // of codes
  const uint8_t* codes;
  int64_t stride;         // bytes from a block to the next
  int64_t block;          // the first
  const int32_t* sums;    // (blocks, num_segments, 16) of (code - zero), for asymmetric inputs; or null
};

constexpr int64_t kAhead = 2048;  // bytes between what is read and what is prefetched

template <int bits, bool small, int rows, int blocks, int part>
inline void add_part(I (&sums)[rows][blocks], const I (&words)[blocks], const int8_t* q) {
  I codes[blocks];
  for (int b = 0; b < blocks; ++b) codes[b] = unpack<bits, part>(words[b]);
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) {
    const I x = spread(q + (part * rows + r) * 4);
#pragma GCC unroll 4
    for (int b = 0; b < blocks; ++b) sums[r][b] = dot<small>(sums[r][b], codes[b], x);
  }
  if constexpr (part + 1 < 8 / bits) add_part<bits, small, rows, blocks, part + 1>(sums, words, q);
}

template <int bits, bool small, int rows, int blocks>
void multiply(const Weight& w, const Panel& panel, const Tile& tile) {
  constexpr int unit = 32 / bits;
  const int64_t padded_out = w.blocks() * kLanes, column = panel.block * kLanes;
  const uint8_t* codes = panel.codes;
  const int8_t* q = tile.q;
  F totals[rows][blocks];
  for (int r = 0; r < rows; ++r)
    for (int b = 0; b < blocks; ++b) totals[r][b] = zero();
  for (int64_t s = 0; s < w.num_segments; ++s) {
    const SegmentTerms* terms = tile.terms + s * rows;
    I sums[rows][blocks];
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r)
      for (int b = 0; b < blocks; ++b) sums[r][b] = set1(terms[r].start);
    for (int64_t units = (w.segment_starts[s + 1] - w.segment_starts[s]) / unit; units > 0; --units) {
      I words[blocks];
      for (int b = 0; b < blocks; ++b) {
        words[b] = load_codes(codes + b * panel.stride);
        if constexpr (rows <= kDotRows) __builtin_prefetch(codes + b * panel.stride + kAhead);
      }
      add_part<bits, small, rows, blocks, 0>(sums, words, q);
      codes += 64, q += unit * rows;
    }
    if (panel.sums) {
      for (int b = 0; b < blocks; ++b) {
        const I sum = load(panel.sums + (b * w.num_segments + s) * kLanes);
        for (int r = 0; r < rows; ++r) sums[r][b] = sums[r][b] - set1(tile.rows[r].zero) * sum;
      }
    }
    const float* scales = w.scales + s * padded_out + column;
    F scale[blocks];
    for (int b = 0; b < blocks; ++b) scale[b] = load(scales + b * kLanes);
    if (w.offsets) {
      const float* offsets = w.offsets + s * padded_out + column;
      F offset[blocks];
      for (int b = 0; b < blocks; ++b) offset[b] = load(offsets + b * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < rows; ++r) {
        for (int b = 0; b < blocks; ++b) {
          const F total = fma(to_float(sums[r][b]) * set1(terms[r].scale), scale[b], totals[r][b]);
          totals[r][b] = fnma(set1(terms[r].sum), offset[b], total);
        }
      }
    } else {
#pragma GCC unroll 12
      for (int r = 0; r < rows; ++r) {
        for (int b = 0; b < blocks; ++b)
          totals[r][b] = fma(to_float(sums[r][b]) * set1(terms[r].scale), scale[b], totals[r][b]);
      }
    }
  }
  for (int b = 0; b < blocks; ++b) {
    const int64_t at = column + b * kLanes, left = w.out - at;
    const F bias = w.bias ? load(w.bias + at) : zero();
    for (int r = 0; r < rows; ++r) {
      const F result = fma(totals[r][b], set1(tile.rows[r].scale), bias);
      float* to = tile.out + r * tile.out_stride + at;
      if (left >= kLanes) {
        store(to, result);
      } else {
        store_n(to, result, static_cast<int>(left));
      }
    }
  }
}

using Multiply = void (*)(const Weight&, const Panel&, const Tile&);

template <int bits, bool small, int blocks, int rows = kDotRows>
struct Multiplies {  // by the number of rows
  static Multiply find(int64_t wanted) {
    if (wanted == rows) return multiply<bits, small, rows, blocks>;
    if constexpr (rows > 1) {
      return Multiplies<bits, small, blocks, rows - 1>::find(wanted);
    } else {
      return nullptr;
    }
  }
};

enum class Layout { u2, u4, u8, bytes };  // bytes: unpacked codes of up to 4 bits

template <int blocks>
inline Multiply find_multiply(Layout layout, int64_t rows) {
  switch (layout) {
    case Layout::u2: return Multiplies<2, true, blocks>::find(rows);
    case Layout::u4: return Multiplies<4, true, blocks>::find(rows);
#if defined(OCTAVO_AVX2)
    case Layout::bytes: return Multiplies<8, true, blocks>::find(rows);
#endif
    default: return Multiplies<8, false, blocks>::find(rows);
  }
}

// All blocks of a panel times one tile.
inline void multiply_panel(const Weight& w, Layout layout, Panel panel, int64_t blocks, const Tile& tile, int64_t rows) {
  const Multiply some = find_multiply<kDotBlocks>(layout, rows), one = find_multiply<1>(layout, rows);
  while (blocks > 0) {
    const int64_t done = blocks >= kDotBlocks ? kDotBlocks : 1;
    (done == 1 ? one : some)(w, panel, tile);
    panel.codes += done * panel.stride, panel.block += done, blocks -= done;
    if (panel.sums) panel.sums += done * w.num_segments * kLanes;
  }
}

template <int bits, int part = 0>
inline void unpack_unit(I words, uint8_t* to) {
  store(reinterpret_cast<int32_t*>(to) + part * kLanes, unpack<bits, part>(words));
  if constexpr (part + 1 < 8 / bits) unpack_unit<bits, part + 1>(words, to);
}

template <int bits>
inline void unpack_codes(const uint8_t* codes, int64_t bytes, uint8_t* to) {
  for (int64_t at = 0; at < bytes; at += 64, to += 64 * 8 / bits) unpack_unit<bits>(load_codes(codes + at), to);
}

template <int bits, bool small, int part = 0>
inline I sum_unit(I sum, I words) {
  sum = dot<small>(sum, unpack<bits, part>(words), set1(0x01010101));
  if constexpr (part + 1 < 8 / bits) return sum_unit<bits, small, part + 1>(sum, words);
  return sum;
}

// Of blocks of codes: sums of code - zero over each segment's real inputs.
template <int bits>
inline void sum_codes(const Weight& w, const uint8_t* codes, int64_t blocks, int32_t* to) {
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t s = 0; s < w.num_segments; ++s, to += kLanes) {
      const int64_t begin = w.segment_starts[s], end = w.segment_starts[s + 1];
      int64_t real = w.has_zero ? end - begin : 0;
      if (w.has_zero && w.source) {
        real = 0;
        for (int64_t k = begin; k < end; ++k) real += w.source[k] >= 0;
      } else if (w.has_zero && end > w.in) {
        real = w.in - begin;
      }
      I sum = set1(static_cast<int32_t>(-w.zero * real));
      for (int64_t k = begin; k < end; k += 32 / bits, codes += 64) sum = sum_unit<bits, bits != 8>(sum, load_codes(codes));
      store(to, sum);
    }
  }
}

}  // namespace OCTAVO_ISA
