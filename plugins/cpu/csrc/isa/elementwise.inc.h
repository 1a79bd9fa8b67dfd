// Normalisation, rotary embedding, gating, rows of tables, argmax.
namespace OCTAVO_ISA {

using octavo::KVBlocks;

// Calls body(start, lanes) over `size` numbers, 16 at a time, then the rest.
template <class Body>
inline void for_lanes(int64_t size, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, kLanes);
  if (i < size) body(i, static_cast<int>(size - i));
}
inline F load_some(const float* p, int n) { return n == kLanes ? load(p) : load_n(p, n); }
inline void store_some(float* p, F a, int n) {
  if (n == kLanes) {
    store(p, a);
  } else {
    store_n(p, a, n);
  }
}

// 1 / sqrt(mean of squares + eps), both correctly rounded.
inline float inverse_rms(const float* x, int64_t size, float eps) {
  F a = zero(), b = zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    const F first = load(x + i), second = load(x + i + kLanes);
    a = fma(first, first, a), b = fma(second, second, b);
  }
  for_lanes(size - i, [&](int64_t at, int n) {
    const F v = load_some(x + i + at, n);
    a = fma(v, v, a);
  });
  return 1.0f / std::sqrt(sum(a + b) / static_cast<float>(size) + eps);
}

inline void scale_row(const float* x, int64_t size, float inverse, const float* weight, float* out) {
  for_lanes(size, [&](int64_t i, int n) {
    store_some(out + i, load_some(weight + i, n) * (load_some(x + i, n) * set1(inverse)), n);
  });
}

inline void rms_norm(Rows x, int64_t inner, int64_t size, int64_t inner_stride, const float* weight, float eps, Out out,
                     const Context& c) {
  int64_t first, last;
  c.share(c.rows * inner, 1, first, last);
  for (int64_t item = first; item < last; ++item) {
    const int64_t row = item / inner, part = item % inner;
    const float* from = x.data + row * x.stride + part * inner_stride;
    scale_row(from, size, inverse_rms(from, size, eps), weight, out.data + row * out.stride + part * size);
  }
}

inline void add_rms_norm(Rows x, Rows residual, int64_t size, const float* weight, float eps, Out out, Out total,
                         const Context& c) {
  int64_t first, last;
  c.share(c.rows, 1, first, last);
  for (int64_t row = first; row < last; ++row) {
    const float *a = x.data + row * x.stride, *b = residual.data + row * residual.stride;
    float* sums = total.data + row * total.stride;
    for_lanes(size, [&](int64_t i, int n) { store_some(sums + i, load_some(a + i, n) + load_some(b + i, n), n); });
    scale_row(sums, size, inverse_rms(sums, size, eps), weight, out.data + row * out.stride);
  }
}

// One head in half-split pairs; what lies beyond the pairs is copied. `out` may be x.
inline void rotate_head(const float* x, int64_t head_dim, int64_t half, const float* cos, const float* sin,
                        float* out) {
  for_lanes(half, [&](int64_t i, int n) {
    const F left = load_some(x + i, n), right = load_some(x + half + i, n);
    const F c = load_some(cos + i, n), s = load_some(sin + i, n);
    store_some(out + i, left * c - right * s, n);
    store_some(out + half + i, right * c + left * s, n);
  });
  for_lanes(head_dim - 2 * half,
            [&](int64_t i, int n) { store_some(out + 2 * half + i, load_some(x + 2 * half + i, n), n); });
}

inline void rotate(Rows x, int64_t heads, int64_t head_dim, int64_t half, Rows cos, Rows sin, Out out,
                   const Context& c) {
  int64_t first, last;
  c.share(c.rows * heads, 1, first, last);
  for (int64_t item = first; item < last; ++item) {
    const int64_t row = item / heads, at = item % heads * head_dim;
    rotate_head(x.data + row * x.stride + at, head_dim, half, cos.data + row * cos.stride, sin.data + row * sin.stride,
                out.data + row * out.stride + at);
  }
}

inline F sigmoid(F x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }

// The share of the normal distribution below x, within 4e-7 of itself. Chebyshev fit of erfc: Press et al., Numerical
// Recipes.
inline F normal_share(F x) {
  const F z = abs(x) * set1(0.70710678118654752f), t = set1(1.0f) / (set1(1.0f) + set1(0.5f) * z);
  F p = set1(0.17087277f);
  p = fma(p, t, set1(-0.82215223f));
  p = fma(p, t, set1(1.48851587f));
  p = fma(p, t, set1(-1.13520398f));
  p = fma(p, t, set1(0.27886807f));
  p = fma(p, t, set1(-0.18628806f));
  p = fma(p, t, set1(0.09678418f));
  p = fma(p, t, set1(0.37409196f));
  p = fma(p, t, set1(1.00002368f));
  p = fma(p, t, set1(-1.26551223f));
  const F tail = set1(0.5f) * t * exp(fnma(z, z, p));
  return select_less(zero(), x, set1(1.0f) - tail, tail);
}

inline F activate(F x, int activation) {
  if (activation == 0) return x * sigmoid(x);
  if (activation == 1) return x * normal_share(x);
  // (1 + tanh(u)) / 2 is the sigmoid of 2 u
  return x * sigmoid(set1(1.59576912160573071f) * fma(set1(0.044715f) * x * x, x, x));
}

inline void gated(Rows gate_up, int64_t size, int activation, const float* divisor, Out out, const Context& c) {
  const int64_t chunks = (size + kLanes - 1) / kLanes;
  int64_t first, last;
  c.share(c.rows * chunks, 1, first, last);
  for (int64_t item = first; item < last; ++item) {
    const int64_t row = item / chunks, i = item % chunks * kLanes;
    const int n = static_cast<int>(size - i < kLanes ? size - i : kLanes);
    const float* gate = gate_up.data + row * gate_up.stride + i;
    F y = activate(load_some(gate, n), activation) * load_some(gate + size, n);
    if (divisor) y = y / load_some(divisor + i, n);
    store_some(out.data + row * out.stride + i, y, n);
  }
}

inline F load_half(const uint16_t* p, bool bf16, int n) {
  uint16_t copy[kLanes] = {};
  if (n < kLanes) {
    std::memcpy(copy, p, sizeof(uint16_t) * n);
    p = copy;
  }
  return bf16 ? load_bf16(p) : load_f16(p);
}

inline void gather(const void* table, int storage, int64_t row_stride, int64_t size, const int64_t* indices, Out out,
                   const Context& c) {
  int64_t first, last;
  c.share(c.rows, 1, first, last);
  for (int64_t row = first; row < last; ++row) {
    const int64_t start = indices[row] * row_stride;
    float* to = out.data + row * out.stride;
    if (storage == KVBlocks::f32) {
      std::memcpy(to, static_cast<const float*>(table) + start, sizeof(float) * size);
      continue;
    }
    const auto* from = static_cast<const uint16_t*>(table) + start;
    for_lanes(size,
              [&](int64_t i, int n) { store_some(to + i, load_half(from + i, storage == KVBlocks::bf16, n), n); });
  }
}

// Row n of a packed weight, which holds the code of input k of 16 rows side by side.
inline void unpack_row(const Weight& w, int64_t n, float* out) {
  const int64_t block = n / kLanes, lane = n % kLanes;
  const int bits = w.code == Code::u2 ? 2 : w.code == Code::u4 ? 4 : 8, unit = 32 / bits;
  for (int64_t s = 0; s < w.num_segments; ++s) {
    const int64_t first = (block * w.num_segments + s) * kLanes;
    float scales[kLanes];
    store(scales, w.scales ? load_scales(w, first) : set1(1.0f));
    const float scale = scales[lane], offset = w.offsets ? w.offsets[first + lane] : 0.0f;
    const float shift = w.zeros ? w.zeros[first + lane] : w.has_zero ? w.zero : 0;
    for (int64_t k = w.segment_starts[s]; k < w.segment_starts[s + 1]; ++k) {
      const int64_t to = w.source ? w.source[k] : k < w.in ? k : -1;
      if (to < 0) continue;
      const int64_t at = (block * w.padded_in + k) * kLanes;
      float code = 0;
      if (w.code <= Code::u8) {
        const int64_t i = k % unit;
        const uint8_t* word = w.codes + (block * w.padded_in + k / unit * unit) * kLanes * bits / 8 + lane * 4;
        code = static_cast<float>(word[i % 4] >> bits * (i / 4) & ((1 << bits) - 1));
      } else if (w.code == Code::f32) {
        code = reinterpret_cast<const float*>(w.codes)[at + lane];
      } else {
        float wide[kLanes];
        store(wide, w.code == Code::e4m3   ? load_e4m3(w.codes + at)
                    : w.code == Code::e5m2 ? load_e5m2(w.codes + at)
                                           : load_half(reinterpret_cast<const uint16_t*>(w.codes) + at,
                                                       w.code == Code::bf16, kLanes));
        code = wide[lane];
      }
      out[to] = scale * (code - shift) - offset;
    }
  }
}

inline void gather_packed(const Weight& w, const int64_t* indices, Out out, const Context& c) {
  int64_t first, last;
  c.share(c.rows, 1, first, last);
  for (int64_t row = first; row < last; ++row) unpack_row(w, indices[row], out.data + row * out.stride);
}

// The first of the largest numbers; a NaN counts as the largest.
inline int64_t largest(const float* x, int64_t size) {
  const F infinity = set1(HUGE_VALF);
  F best = set1(-HUGE_VALF), where = zero(), chunk = zero(), nans = zero();
  for_lanes(size, [&](int64_t i, int n) {
    F v = load_some(x + i, n);
    if (n < kLanes) {  // what is not there must not win
      float copy[kLanes];
      store(copy, v);
      for (int lane = n; lane < kLanes; ++lane) copy[lane] = -HUGE_VALF;
      v = load(copy);
    }
    where = select_less(best, v, chunk, where);
    best = select_less(best, v, v, best);
    nans = nans + select_less(v, infinity, zero(), select_less(zero() - v, infinity, zero(), set1(1.0f)));
    chunk = chunk + set1(1.0f);
  });
  if (sum(nans) > 0.0f) {
    int64_t i = 0;
    while (x[i] == x[i]) ++i;
    return i;
  }
  float values[kLanes], chunks[kLanes];
  store(values, best), store(chunks, where);
  int64_t found = static_cast<int64_t>(chunks[0]) * kLanes;
  float most = values[0];
  for (int lane = 1; lane < kLanes && lane < size; ++lane) {
    const int64_t i = static_cast<int64_t>(chunks[lane]) * kLanes + lane;
    if (values[lane] > most || (values[lane] == most && i < found)) found = i, most = values[lane];
  }
  return found;
}

inline void argmax(Rows x, int64_t size, int64_t* out, const Context& c) {
  int64_t first, last;
  c.share(c.rows, 1, first, last);
  for (int64_t row = first; row < last; ++row) out[row] = largest(x.data + row * x.stride, size);
}

}  // namespace OCTAVO_ISA
