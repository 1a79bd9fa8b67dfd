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
  int64_t stride;       // bytes from a block to the next
  int64_t block;        // the first
  const int32_t* sums;  // (blocks, num_segments, 16) of (code - zero), for asymmetric inputs; or null
};

constexpr int64_t kAhead = 2048;  // bytes between what is read and what is prefetched

// f(0), ..., f(n - 1) with constants: arrays indexed by them stay in registers, which loops unrolled later do not
// promise.
#define OCTAVO_UNROLLED __attribute__((always_inline))
template <int i>
struct Index {
  static constexpr int value = i;
};
template <int n, int i = 0, class Function>
[[gnu::always_inline]] inline void each(const Function& f) {
  if constexpr (i < n) {
    f(Index<i>{});
    each<n, i + 1>(f);
  }
}

template <int rows, int blocks>
struct Sums {
  I of[rows][blocks];
};

// Adds the products of `units` units of codes and inputs.
template <int bits, bool small, int rows, int blocks>
[[gnu::always_inline]] inline void add_products(Sums<rows, blocks>& sums, const uint8_t* codes, int64_t stride,
                                                const int8_t* q, int64_t units) {
  for (; units > 0; --units, codes += 64, q += 32 / bits * rows) {
    I words[blocks];
    each<blocks>([&](auto b) OCTAVO_UNROLLED {
      words[b.value] = load_codes(codes + b.value * stride);
      __builtin_prefetch(codes + b.value * stride + kAhead);
    });
    each<8 / bits>([&](auto part) OCTAVO_UNROLLED {
      I some[blocks];
      each<blocks>([&](auto b) OCTAVO_UNROLLED {
        some[b.value] = unpack<bits, part.value>(words[b.value]);
      });
      each<rows>([&](auto r) OCTAVO_UNROLLED {
        const I x = spread(q + (part.value * rows + r.value) * 4);
        each<blocks>([&](auto b) OCTAVO_UNROLLED {
          I& sum = sums.of[r.value][b.value];
          sum = dot<small>(sum, some[b.value], x);
        });
      });
    });
  }
}

// `there` blocks of a panel, 1 or all; where it is one, the others are computed from it as well and not stored.
template <int bits, bool small, int rows, int blocks>
void multiply(const Weight& w, const Panel& panel, int64_t there, const Tile& tile) {
  constexpr int unit = 32 / bits;
  const int64_t column = panel.block * kLanes;
  const uint8_t* codes = panel.codes;
  const int8_t* q = tile.q;
  const int64_t stride = there > 1 ? panel.stride : 0, next = there > 1 ? w.num_segments * kLanes : 0;
  alignas(64) float memory[rows * blocks * kLanes] = {};
  float* totals = memory;
  asm("" : "+r"(totals));  // so that the compiler does not keep copies of what registers cannot hold
  for (int64_t s = 0; s < w.num_segments; ++s) {
    const SegmentTerms* terms = tile.terms + s * rows;
    const int64_t units = (w.segment_starts[s + 1] - w.segment_starts[s]) / unit;
    const int64_t at = (panel.block * w.num_segments + s) * kLanes;
    Sums<rows, blocks> sums;
    each<blocks>([&](auto b) OCTAVO_UNROLLED {
      if (w.zeros) {
        const I zeros = load_bytes(w.zeros + at + b.value * next);
        each<rows>([&](auto r) OCTAVO_UNROLLED {
          const I start = set1(terms[r.value].start);
          sums.of[r.value][b.value] = units * unit < kShort ? times_short(zeros, start) : zeros * start;
        });
      } else {
        each<rows>([&](auto r) OCTAVO_UNROLLED {
          sums.of[r.value][b.value] = set1(terms[r.value].start);
        });
      }
    });
    add_products<bits, small>(sums, codes, stride, q, units);
    codes += units * 64, q += units * unit * rows;
    if (panel.sums) {
      each<blocks>([&](auto b) OCTAVO_UNROLLED {
        const I sum = load(panel.sums + s * kLanes + b.value * next);
        each<rows>([&](auto r) OCTAVO_UNROLLED {
          sums.of[r.value][b.value] = sums.of[r.value][b.value] - set1(tile.rows[r.value].zero) * sum;
        });
      });
    }
    each<blocks>([&](auto b) OCTAVO_UNROLLED {
      const F scale = load_scales(w, at + b.value * next);
      if (w.offsets) {
        const F offset = load(w.offsets + at + b.value * next);
        each<rows>([&](auto r) OCTAVO_UNROLLED {
          float* to = totals + (r.value * blocks + b.value) * kLanes;
          const F total = fma(to_float(sums.of[r.value][b.value]) * set1(terms[r.value].scale), scale, load(to));
          store(to, fnma(set1(terms[r.value].sum), offset, total));
        });
      } else {
        each<rows>([&](auto r) OCTAVO_UNROLLED {
          float* to = totals + (r.value * blocks + b.value) * kLanes;
          store(to, fma(to_float(sums.of[r.value][b.value]) * set1(terms[r.value].scale), scale, load(to)));
        });
      }
    });
  }
  for (int b = 0; b < there; ++b) {
    const int64_t at = column + b * kLanes, left = w.out - at;
    const F bias = w.bias ? load(w.bias + at) : zero();
    for (int r = 0; r < rows; ++r) {
      const F result = fma(load(totals + (r * blocks + b) * kLanes), set1(tile.rows[r].scale), bias);
      float* to = tile.out + r * tile.out_stride + at;
      if (left >= kLanes) {
        store(to, result);
      } else {
        store_n(to, result, static_cast<int>(left));
      }
    }
  }
}

using Multiply = void (*)(const Weight&, const Panel&, int64_t, const Tile&);

template <int bits, bool small, int rows = kDotRows>
struct Multiplies {  // by the number of rows
  static Multiply find(int64_t wanted) {
    if (wanted == rows) return multiply<bits, small, rows, kDotBlocks>;
    if constexpr (rows > 1) {
      return Multiplies<bits, small, rows - 1>::find(wanted);
    } else {
      return nullptr;
    }
  }
};

enum class Layout { u2, u4, u8, bytes };  // bytes: unpacked codes of up to 4 bits

inline Multiply find_multiply(Layout layout, int64_t rows) {
  switch (layout) {
    case Layout::u2: return Multiplies<2, true>::find(rows);
    case Layout::u4: return Multiplies<4, true>::find(rows);
#if defined(OCTAVO_AVX2)
    case Layout::bytes: return Multiplies<8, true>::find(rows);
#endif
    default: return Multiplies<8, false>::find(rows);
  }
}

// All blocks of a panel times one tile.
inline void multiply_panel(const Weight& w, Layout layout, Panel panel, int64_t blocks, const Tile& tile, int64_t rows) {
  const Multiply some = find_multiply(layout, rows);
  while (blocks > 0) {
    const int64_t done = blocks >= kDotBlocks ? kDotBlocks : 1;
    some(w, panel, done, tile);
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
inline void sum_codes(const Weight& w, int64_t block, int64_t blocks, int32_t* to) {
  const uint8_t* codes = w.codes + block * w.padded_in * kLanes * bits / 8;
  const int64_t segments = blocks * w.num_segments;
  for (int64_t i = 0; i < segments; ++i, to += kLanes) {
    const int64_t s = i % w.num_segments, begin = w.segment_starts[s], end = w.segment_starts[s + 1];
    I sum = set1(0);
    for (int64_t k = begin; k < end; k += 32 / bits, codes += 64) sum = sum_unit<bits, bits != 8>(sum, load_codes(codes));
    if (w.has_zero || w.zeros) {
      int64_t real = end - begin;
      if (w.source) {
        real = 0;
        for (int64_t k = begin; k < end; ++k) real += w.source[k] >= 0;
      } else if (end > w.in) {
        real = w.in - begin;
      }
      const I zeros = w.zeros ? load_bytes(w.zeros + (block * w.num_segments + i) * kLanes) : set1(w.zero);
      sum = sum - zeros * set1(static_cast<int32_t>(real));
    }
    store(to, sum);
  }
}

}  // namespace OCTAVO_ISA
