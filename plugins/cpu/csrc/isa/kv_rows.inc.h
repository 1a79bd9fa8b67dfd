// Rows of K and V as they are stored: reading them as fp32, and storing them.
namespace OCTAVO_ISA {

using octavo::Attention, octavo::Batch;

constexpr int64_t stored_bytes(int storage) {
  return storage == KVBlocks::f32 ? 4 : storage == KVBlocks::f16 || storage == KVBlocks::bf16 ? 2 : 1;
}

// What load_stored's numbers are still to be multiplied by: a power of 2.
#if defined(OCTAVO_AVX512VNNI)
constexpr float stored_unit(int storage) { return storage == KVBlocks::e4m3 ? 256.0f : 1.0f; }

// load_e4m3 / 256. The bits of e4m3 are those of an fp16 number 256 times smaller; 0x7f and 0xff are NaN.
inline F load_e4m3_small(const uint8_t* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __mmask16 numbers = _mm_test_epi8_mask(_mm_add_epi8(raw, _mm_set1_epi8(1)), _mm_set1_epi8(0x7f));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(raw), 7), _mm256_set1_epi16(-0x4080));
  return {_mm512_mask_cvtph_ps(_mm512_set1_ps(NAN), numbers, half)};
}
inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
#else
constexpr float stored_unit(int) { return 1.0f; }
inline F load_e4m3_small(const uint8_t* p) { return load_e4m3(p); }
inline void prefetch(const uint8_t* p) { __builtin_prefetch(p); }
#endif

// Numbers 16 * v ... of a stored row, but for stored_unit.
template <int storage>
inline F load_stored(const uint8_t* row, int64_t v) {
  const uint8_t* p = row + v * kLanes * stored_bytes(storage);
  if constexpr (storage == KVBlocks::f32) return load(reinterpret_cast<const float*>(p));
  if constexpr (storage == KVBlocks::f16) return load_f16(reinterpret_cast<const uint16_t*>(p));
  if constexpr (storage == KVBlocks::bf16) return load_bf16(reinterpret_cast<const uint16_t*>(p));
  if constexpr (storage == KVBlocks::e4m3) return load_e4m3_small(p);
  if constexpr (storage == KVBlocks::e5m2) return load_e5m2(p);
  if constexpr (storage == KVBlocks::i8) return load_i8(reinterpret_cast<const int8_t*>(p));
}

// The same where only n numbers are left of the row; the rest 0.
template <int storage>
inline F load_stored(const uint8_t* row, int64_t v, int64_t n) {
  if (n >= kLanes) return load_stored<storage>(row, v);
  uint8_t copy[kLanes * stored_bytes(storage)] = {};
  std::memcpy(copy, row + v * kLanes * stored_bytes(storage), static_cast<size_t>(n * stored_bytes(storage)));
  return load_stored<storage>(copy, 0);
}

inline float load_scale(const void* scales, int storage, int64_t i) {
  if (storage == KVBlocks::f32) return static_cast<const float*>(scales)[i];
  float wide[kLanes];
  store(wide, load_half(static_cast<const uint16_t*>(scales) + i, storage == KVBlocks::bf16, 1));
  return wide[0];
}

// NaN stays NaN: it is the second argument.
inline F clamp(F x, float largest) { return min(set1(largest), max(set1(-largest), x)); }

// fp32 to 8 bits with so many of mantissa, rounded to even; x is within the type's range. NaN is 0x7f.
template <int mantissa, int bias>
inline I to_float8(F x) {
  constexpr int drop = 23 - mantissa;
  const F size = abs(x);
  const I bits = as_int(size);
  const I odd = shift_right<drop>(bits) & set1(1);
  const I normal = shift_right<drop>(bits + odd + set1((1 << (drop - 1)) - 1)) - set1((127 - bias) << mantissa);
  const F unit = as_float(set1((127 + bias - 1 + mantissa) << 23));  // 1 / smallest subnormal
  const F smallest = as_float(set1((127 - bias + 1) << 23));         // normal
  const F code = select_less(size, smallest, as_float(to_int(size * unit)), as_float(normal));
  return as_int(select_less(size, set1(HUGE_VALF), code, as_float(set1(0x7f)))) +
         (shift_right<24>(as_int(x)) & set1(0x80));
}

inline void store_bytes(uint8_t* to, I codes, int n) {
  int32_t wide[kLanes];
  store(wide, codes);
  for (int i = 0; i < n; ++i) to[i] = static_cast<uint8_t>(wide[i]);
}

constexpr float largest_stored(int storage) {
  return storage == KVBlocks::f16    ? 65504.0f
         : storage == KVBlocks::bf16 ? 0x1.fep127f
         : storage == KVBlocks::e4m3 ? 448.0f
         : storage == KVBlocks::e5m2 ? 57344.0f
                                     : 127.0f;
}

// Stores 16 numbers or n of them; beyond the range the largest number, NaN as NaN (int8, which has none: 0).
inline void store_as(int storage, F x, void* row, int64_t i, int n) {
  if (storage == KVBlocks::f32) return store_some(static_cast<float*>(row) + i, x, n);
  x = clamp(x, largest_stored(storage));
  auto* bytes = static_cast<uint8_t*>(row) + i * stored_bytes(storage);
  if (storage == KVBlocks::f16 || storage == KVBlocks::bf16) {
    uint16_t copy[kLanes];
    if (storage == KVBlocks::f16) {
      store_f16(copy, x);
    } else {
      store_bf16(copy, x);
    }
    std::memcpy(bytes, copy, sizeof(uint16_t) * n);
  } else if (storage == KVBlocks::e4m3) {
    store_bytes(bytes, to_float8<3, 7>(x), n);
  } else if (storage == KVBlocks::e5m2) {
    store_bytes(bytes, to_float8<2, 15>(x), n);
  } else {
    store_bytes(bytes, to_int(select_less(abs(x), set1(HUGE_VALF), x, zero())), n);
  }
}

// What a token's head is divided by: its largest number to the type's largest, at least 1e-6; NaN where a number is
// NaN.
inline float scale_of(const float* x, int64_t size, int storage) {
  F most = zero();
  float nan = 0;
  for_lanes(size, [&](int64_t i, int n) {
    const F v = abs(clamp(load_some(x + i, n), 0x1p127f));
    most = max(v, most);
    nan += sum(v - v);
  });
  const float scale = max_across(most) / largest_stored(storage);
  return nan != nan ? nan : scale < 1e-6f ? 1e-6f : scale;
}

// One token's head, into its slot. `divisor`: a static scale, or null. `scales`: room for the head's own scale, or
// null.
inline void store_row(const float* x, int64_t size, int storage, void* row, const float* divisor, void* scales,
                      int scale_storage, int64_t slot) {
  if (!divisor && !scales) {
    for_lanes(size, [&](int64_t i, int n) { store_as(storage, load_some(x + i, n), row, i, n); });
    return;
  }
  const float scale = scales ? scale_of(x, size, storage) : *divisor;
  const float limit = scales ? 0x1p127f : HUGE_VALF;
  for_lanes(size, [&](int64_t i, int n) {
    store_as(storage, clamp(load_some(x + i, n), limit) / set1(scale), row, i, n);
  });
  if (scales)
    store_as(scale_storage, set1(scale), static_cast<uint8_t*>(scales) + slot * stored_bytes(scale_storage), 0, 1);
}

inline void store_kv(const Attention& a, const KVBlocks& kv, const Batch& batch, Rows key, Rows value,
                     const Context& c) {
  const int64_t bytes = a.head_dim * stored_bytes(kv.storage);
  int64_t first, last;
  c.share(batch.tokens * a.kv_heads, 1, first, last);
  for (int64_t item = first; item < last; ++item) {
    const int64_t token = item / a.kv_heads, head = item % a.kv_heads, at = head * a.head_dim;
    const int64_t slot = batch.slot_mapping[token], block = slot / batch.block_size, offset = slot % batch.block_size;
    const int64_t row = (block * a.kv_heads + head) * batch.block_size + offset;
    store_row(key.data + token * key.stride + at, a.head_dim, kv.storage, static_cast<uint8_t*>(kv.key) + row * bytes,
              kv.key_static ? kv.key_static + head : nullptr, kv.key_scale, kv.scale_storage, row);
    store_row(value.data + token * value.stride + at, a.head_dim, kv.storage,
              static_cast<uint8_t*>(kv.value) + row * bytes, kv.value_static ? kv.value_static + head : nullptr,
              kv.value_scale, kv.scale_storage, row);
  }
}

}  // namespace OCTAVO_ISA
