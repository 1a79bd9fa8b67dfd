// 16 sums across lanes at once, and a transposition: what scores are made of. Sums add halves, then quarters, ... as
// sum() does.
namespace OCTAVO_ISA {

#if defined(OCTAVO_AVX512VNNI)

// Lanes 4 * j + i: lanes i, i + 4, i + 8, i + 12 of the j-th argument, added as sum() does.
inline F quarter_sums(F a, F b, F c, F d) {
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xee));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c.v, d.v, 0x44), _mm512_shuffle_f32x4(c.v, d.v, 0xee));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd))};
}
// Lane 4 * j + i: the sum of lanes 4 * j ... 4 * j + 3 of the i-th argument.
inline F last_sums(F a, F b, F c, F d) {
  const auto pd = [](F x) { return _mm512_castps_pd(x.v); };
  const __m512 ab = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(pd(a), pd(b))),
                                  _mm512_castpd_ps(_mm512_unpackhi_pd(pd(a), pd(b))));
  const __m512 cd = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(pd(c), pd(d))),
                                  _mm512_castpd_ps(_mm512_unpackhi_pd(pd(c), pd(d))));
  return {_mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xdd))};
}

inline void transpose(F* x) {
  __m512 t[16];
  const auto pd = [](__m512 v) { return _mm512_castps_pd(v); };
  for (int i = 0; i < 16; i += 4) {
    const __m512 a = _mm512_unpacklo_ps(x[i].v, x[i + 1].v), b = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
    const __m512 c = _mm512_unpacklo_ps(x[i + 2].v, x[i + 3].v), d = _mm512_unpackhi_ps(x[i + 2].v, x[i + 3].v);
    t[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(a), pd(c)));
    t[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(a), pd(c)));
    t[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(b), pd(d)));
    t[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(b), pd(d)));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512 a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88),
                 d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
    x[i].v = _mm512_shuffle_f32x4(a, c, 0x88), x[i + 8].v = _mm512_shuffle_f32x4(a, c, 0xdd);
    x[i + 4].v = _mm512_shuffle_f32x4(b, d, 0x88), x[i + 12].v = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}

#elif defined(OCTAVO_AVX2)

inline F quarter_sums(F a, F b, F c, F d) {
  const auto half = [](F x, F y) {
    const __m256 first = _mm256_add_ps(x.lo, x.hi), second = _mm256_add_ps(y.lo, y.hi);
    return _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31));
  };
  return {half(a, b), half(c, d)};
}
inline F last_sums(F a, F b, F c, F d) {
  const auto half = [](__m256 w, __m256 x, __m256 y, __m256 z) {
    const auto pair = [](__m256 p, __m256 q) {
      const __m256d first = _mm256_castps_pd(p), second = _mm256_castps_pd(q);
      return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(first, second)),
                           _mm256_castpd_ps(_mm256_unpackhi_pd(first, second)));
    };
    const __m256 wx = pair(w, x), yz = pair(y, z);
    return _mm256_add_ps(_mm256_shuffle_ps(wx, yz, 0x88), _mm256_shuffle_ps(wx, yz, 0xdd));
  };
  return {half(a.lo, b.lo, c.lo, d.lo), half(a.hi, b.hi, c.hi, d.hi)};
}

inline void transpose_8(__m256* x) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 4) {
    const auto pd = [](__m256 v) { return _mm256_castps_pd(v); };
    const __m256 a = _mm256_unpacklo_ps(x[i], x[i + 1]), b = _mm256_unpackhi_ps(x[i], x[i + 1]);
    const __m256 c = _mm256_unpacklo_ps(x[i + 2], x[i + 3]), d = _mm256_unpackhi_ps(x[i + 2], x[i + 3]);
    t[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(pd(a), pd(c)));
    t[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(pd(a), pd(c)));
    t[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(pd(b), pd(d)));
    t[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(pd(b), pd(d)));
  }
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    x[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
}
inline void transpose(F* x) {
  __m256 quarters[2][2][8];  // (rows, columns, 8)
  for (int i = 0; i < 8; ++i) {
    quarters[0][0][i] = x[i].lo, quarters[0][1][i] = x[i].hi;
    quarters[1][0][i] = x[i + 8].lo, quarters[1][1][i] = x[i + 8].hi;
  }
  for (auto& rows : quarters)
    for (auto& quarter : rows) transpose_8(quarter);
  for (int i = 0; i < 8; ++i)
    x[i] = {quarters[0][0][i], quarters[1][0][i]}, x[i + 8] = {quarters[0][1][i], quarters[1][1][i]};
}

#else

inline F quarter_sums(F a, F b, F c, F d) {
  const F* given[4] = {&a, &b, &c, &d};
  return lanes<F>([&](int lane) {
    const float* x = given[lane / 4]->v + lane % 4;
    return (x[0] + x[8]) + (x[4] + x[12]);
  });
}
inline F last_sums(F a, F b, F c, F d) {
  const F* given[4] = {&a, &b, &c, &d};
  return lanes<F>([&](int lane) {
    const float* x = given[lane % 4]->v + lane / 4 * 4;
    return (x[0] + x[2]) + (x[1] + x[3]);
  });
}
inline void transpose(F* x) {
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < i; ++j) {
      const float kept = x[i].v[j];
      x[i].v[j] = x[j].v[i], x[j].v[i] = kept;
    }
  }
}

#endif

}  // namespace OCTAVO_ISA
