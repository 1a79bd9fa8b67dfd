// Linear layers on float inputs: weights as they are, products and sums in fp32.
namespace OCTAVO_ISA {

using octavo::Code, octavo::Context, octavo::Out, octavo::Rows, octavo::Weight, octavo::kLanes;

inline float slow_code(const Weight& w, int64_t block, int64_t k, int lane) {
  const int bits = w.code == Code::u2 ? 2 : w.code == Code::u4 ? 4 : 8;
  if (w.code <= Code::u8) {
    const int unit = 32 / bits, i = static_cast<int>(k % unit);
    const uint8_t* at = w.codes + ((block * w.padded_in + k / unit * unit) * kLanes * bits / 8) + lane * 4 + i % 4;
    return static_cast<float>(*at >> bits * (i / 4) & ((1 << bits) - 1));
  }
  float out[16];
  const int64_t at = (block * w.padded_in + k) * kLanes;
  switch (w.code) {
    case Code::e4m3: store(out, load_e4m3(w.codes + at)); break;
    case Code::e5m2: store(out, load_e5m2(w.codes + at)); break;
    case Code::bf16: store(out, load_bf16(reinterpret_cast<const uint16_t*>(w.codes) + at)); break;
    case Code::f16: store(out, load_f16(reinterpret_cast<const uint16_t*>(w.codes) + at)); break;
    default: store(out, load(reinterpret_cast<const float*>(w.codes) + at));
  }
  return out[lane];
}

inline void linear_float(const Weight& w, Rows x, Out out, const Context& c) {
  int64_t first, last;
  c.share(w.out, kLanes, first, last);
  const int64_t padded_out = w.blocks() * kLanes;
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t n = first; n < last; ++n) {
      double total = 0;
      for (int64_t s = 0; s < w.num_segments; ++s) {
        double part = 0, inputs = 0;
        for (int64_t k = w.segment_starts[s]; k < w.segment_starts[s + 1]; ++k) {
          const int64_t from = w.source ? w.source[k] : k < w.in ? k : -1;
          if (from < 0) continue;
          const double value = x.data[row * x.stride + from];
          part += value * (slow_code(w, n / kLanes, k, static_cast<int>(n % kLanes)) - w.zero);
          inputs += value;
        }
        total += part * (w.scales ? w.scales[s * padded_out + n] : 1.0f);
        if (w.offsets) total -= inputs * w.offsets[s * padded_out + n];
      }
      out.data[row * out.stride + n] = static_cast<float>(total) + (w.bias ? w.bias[n] : 0.0f);
    }
  }
}

}  // namespace OCTAVO_ISA
