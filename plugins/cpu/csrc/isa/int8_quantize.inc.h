// Inputs of linear layers to int8: octavo's quantize_inputs, bit for bit, in the order in which tiles read them.
namespace OCTAVO_ISA {

using octavo::Inputs, octavo::RowTerms, octavo::SegmentTerms;

// A row in the order of a weight's padded inputs.
struct InputRow {
  const float* x;
  const int32_t* source;
  int64_t in;

  F get(int64_t k, int n) const {  // inputs k ... k + n; 0 for padding, and in lanes from n
    if (!source) {
      const int64_t left = in - k;
      if (n == 16 && left >= 16) return load(x + k);
      return left > 0 ? load_n(x + k, static_cast<int>(left < n ? left : n)) : zero();
    }
#if defined(OCTAVO_AVX512VNNI)
    const __m512i from = _mm512_mask_loadu_epi32(_mm512_set1_epi32(-1), first_lanes(n), source + k);
    const __mmask16 there = _mm512_cmpge_epi32_mask(from, _mm512_setzero_si512());
    return {_mm512_mask_i32gather_ps(_mm512_setzero_ps(), there, from, x, 4)};
#else
    float found[16] = {};
    for (int i = 0; i < n; ++i) {
      if (source[k + i] >= 0) found[i] = x[source[k + i]];
    }
    return load(found);
#endif
  }

  // Up to where all of [begin, end) can be read 16 at a time, as they are.
  int64_t plain(int64_t begin, int64_t end) const {
    if (source) return begin;
    return begin + ((end < in ? end : in) - begin) / 16 * 16;
  }

  bool real(int64_t k) const { return source ? source[k] >= 0 : k < in; }
};

// Of some inputs: the largest magnitude as bits, so that NaN is largest, and the extremes with 0 among them.
struct Extent {
  int32_t magnitude;
  float low, high;

  bool finite() const { return magnitude < 0x7f800000; }
};

inline int32_t largest(I a) {
#if defined(OCTAVO_AVX512VNNI)
  return _mm512_reduce_max_epi32(a.v);
#else
  int32_t all[16];
  store(all, a);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) all[i] = all[i] > all[i + half] ? all[i] : all[i + half];
  return all[0];
#endif
}

inline I larger(I a, I b) {
#if defined(OCTAVO_AVX512VNNI)
  return {_mm512_max_epi32(a.v, b.v)};
#elif defined(OCTAVO_AVX2)
  return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)};
#else
  return lanes<I>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
#endif
}

inline int32_t total_of(I a) {
#if defined(OCTAVO_AVX512VNNI)
  return _mm512_reduce_add_epi32(a.v);
#else
  int32_t all[16], sum = 0;
  store(all, a);
  for (int i = 0; i < 16; ++i) sum += all[i];
  return sum;
#endif
}

template <bool symmetric>
inline Extent extent(const InputRow& row, int64_t begin, int64_t end) {
  I magnitude = set1(0);
  F low = zero(), high = zero();
  const auto add = [&](F x) {
    magnitude = larger(magnitude, as_int(abs(x)));
    if constexpr (!symmetric) low = min(low, x), high = max(high, x);
  };
  int64_t k = begin;
  for (const int64_t plain = row.plain(begin, end); k < plain; k += 16) add(load(row.x + k));
  for (; k < end; k += 16) add(row.get(k, static_cast<int>(end - k < 16 ? end - k : 16)));
  if constexpr (symmetric) return {largest(magnitude), 0, 0};
  return {largest(magnitude), -max_across(zero() - low), max_across(high)};
}

// x / scale, rounded once, where no step leaves the range of normal numbers: two corrections of x * (1 / scale).
inline F quotient(F x, F scale, F inverse) {
#if defined(OCTAVO_PORTABLE)
  (void)inverse;
  return x / scale;
#else
  F found = x * inverse;
  found = fma(fnma(found, scale, x), inverse, found);
  return fma(fnma(found, scale, x), inverse, found);
#endif
}

// n numbers (a multiple of 4) as bytes; each four go `step` bytes after the last four.
inline void store_bytes(I q, int8_t* to, int64_t step, int n) {
#if defined(OCTAVO_AVX512VNNI)
  const __m128i bytes = _mm512_cvtsepi32_epi8(q.v);
  if (n == 16) {
    if (step == 4) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
    } else {
      const int64_t low = _mm_cvtsi128_si64(bytes), high = _mm_extract_epi64(bytes, 1);
      const int32_t words[4] = {static_cast<int32_t>(low), static_cast<int32_t>(low >> 32), static_cast<int32_t>(high),
                                static_cast<int32_t>(high >> 32)};
      for (int i = 0; i < 4; ++i) std::memcpy(to + i * step, &words[i], 4);
    }
    return;
  }
  int8_t all[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(all), bytes);
  for (int i = 0; i < n / 4; ++i) std::memcpy(to + i * step, all + 4 * i, 4);
#else
  int32_t all[16];
  store(all, q);
  for (int i = 0; i < n; ++i) to[i / 4 * step + i % 4] = static_cast<int8_t>(all[i]);
#endif
}

struct Quantizer {
  float scale, zero, inverse;
  bool normal;   // quotient() is exact
  bool clamped;  // inputs may be any number
};

// Codes of inputs begin ... end to `to`; returns their sum.
template <bool simple>  // symmetric, and no code can be out of range
inline int32_t quantize(const InputRow& row, int64_t begin, int64_t end, const Quantizer& how, int8_t* to, int64_t step) {
  const F scale = set1(how.scale), inverse = set1(how.inverse), limit = set1(1024.0f * how.scale);
  I sum = set1(0);
  int64_t k = begin;
  if constexpr (simple) {
    int8_t* at = to + begin * (step / 4);
    for (const int64_t plain = row.plain(begin, end); k < plain; k += 16, at += 4 * step) {
      const I q = to_int(quotient(load(row.x + k), scale, inverse));
      sum = sum + q;
      store_bytes(q, at, step, 16);
    }
  }
  for (; k < end; k += 16) {
    const int n = static_cast<int>(end - k < 16 ? end - k : 16);
    F x = row.get(k, n);
    I q;
    if constexpr (simple) {
      q = to_int(quotient(x, scale, inverse));
    } else {
      if (how.normal && how.clamped) x = max(min(x, limit), OCTAVO_ISA::zero() - limit);
      const F scaled = (how.normal ? quotient(x, scale, inverse) : x / scale) + set1(how.zero);
      q = to_int(max(min(scaled, set1(127.0f)), set1(-128.0f)));
      if (how.zero != 0 && (row.source || k + n > row.in || n < 16)) {  // padding is 0 whatever the zero
        int32_t all[16];
        store(all, q);
        for (int i = 0; i < 16; ++i) all[i] = i < n && row.real(k + i) ? all[i] : 0;
        q = load(all);
      }
    }
    sum = sum + q;
    store_bytes(q, to + k * (step / 4), step, n);
  }
  return total_of(sum);
}

inline bool is_normal(float scale) { return scale >= 0x1p-60f && scale <= 0x1p60f; }

// Scale and zero of inputs with such an extent; NaN where one of them is not finite.
inline Quantizer quantizer(const Inputs& inputs, const Extent& extent) {
  constexpr float kNan = __builtin_nanf("");
  Quantizer how{inputs.scale, inputs.symmetric ? 0 : inputs.zero, 1, false, true};
  if (inputs.kind == Inputs::kStatic) {
    if (extent.magnitude > 0x7f800000) how.scale = kNan;
  } else {
    how = {kNan, 0, 1, false, false};
    if (extent.finite()) {
      float magnitude;
      std::memcpy(&magnitude, &extent.magnitude, 4);
      how.scale = inputs.symmetric ? magnitude / 127.0f : (extent.high - extent.low) / 255.0f;
      if (how.scale == 0) how.scale = 1;
      if (!inputs.symmetric) how.zero = __builtin_nearbyintf(-128.0f - extent.low / how.scale);
    }
    if (!(how.scale <= 0x1.fffffep127f)) how.scale = kNan;  // the range of finite numbers may be infinite
  }
  how.normal = is_normal(how.scale);
  if (how.normal) how.inverse = 1.0f / how.scale;
  return how;
}

// The same for `count` segments at once, at most 16, each with symmetric inputs and a scale of its own.
inline void quantizers(const Weight& w, const InputRow& row, int64_t first, int64_t count, Quantizer* to) {
  alignas(64) int32_t magnitudes[16] = {};
  alignas(64) float scales[16], inverses[16];
  for (int64_t i = 0; i < count; ++i)
    magnitudes[i] = extent<true>(row, w.segment_starts[first + i], w.segment_starts[first + i + 1]).magnitude;
  F scale = as_float(load(magnitudes)) / set1(127.0f);
  scale = select_less(zero(), scale, scale, set1(1.0f));
  store(scales, scale), store(inverses, set1(1.0f) / scale);
  for (int64_t i = 0; i < count; ++i) {
    const bool finite = magnitudes[i] < 0x7f800000;
    to[i] = {finite ? scales[i] : __builtin_nanf(""), 0, inverses[i], finite && is_normal(scales[i]), false};
  }
}

// One row: its codes, each four inputs `step` bytes after the last, and its terms, each segment `stride` after the last.
inline void quantize_row(const Weight& w, const Inputs& inputs, const float* x, int8_t* to, int64_t step, SegmentTerms* terms,
                         int64_t stride, RowTerms& of_row) {
  const InputRow row{x, w.source, w.in}, plain{x, nullptr, w.in};
  const bool each = inputs.kind == Inputs::kPerSegment;
  const auto measure = [&](const InputRow& from, int64_t begin, int64_t end) {
    return inputs.symmetric ? extent<true>(from, begin, end) : extent<false>(from, begin, end);
  };
  Quantizer how{}, some[16];
  if (!each) how = quantizer(inputs, measure(plain, 0, w.in));
  of_row = {each ? 1.0f : how.scale, static_cast<int32_t>(how.zero)};
  for (int64_t s = 0; s < w.num_segments; ++s) {
    const int64_t begin = w.segment_starts[s], end = w.segment_starts[s + 1];
    if (each && inputs.symmetric) {
      if (s % 16 == 0) quantizers(w, row, s, w.num_segments - s < 16 ? w.num_segments - s : 16, some);
      how = some[s % 16];
    } else if (each) {
      how = quantizer(inputs, measure(row, begin, end));
    }
    int32_t sum = 0;
    if (how.scale != how.scale) {
      for (int64_t k = begin; k < end; k += 4) std::memset(to + k * (step / 4), 0, 4);
    } else if (inputs.symmetric && inputs.kind != Inputs::kStatic && how.normal) {
      sum = quantize<true>(row, begin, end, how, to, step);
    } else {
      sum = quantize<false>(row, begin, end, how, to, step);
    }
    float rest = static_cast<float>(sum);
    if (!inputs.symmetric && w.offsets) {
      int64_t count = 0;
      for (int64_t k = begin; k < end; ++k) count += row.real(k);
      rest -= how.zero * static_cast<float>(count);
    }
    SegmentTerms& of = terms[s * stride];
    of.scale = each ? how.scale : 1.0f;
    of.start = w.zeros ? -sum : w.has_zero ? -w.zero * sum : 0;
    of.sum = rest * of.scale;
  }
}

}  // namespace OCTAVO_ISA
