// exp over 16 lanes. No include guard: once in each instruction set's translation unit.
namespace OCTAVO_ISA {

// Within 2 units of the last place of the true value; 0 below -104 (and for -inf), inf above 88.73, NaN for NaN.
inline F exp(F x) {
  const F n = round_even(x * set1(1.44269504088896341f));
  F r = fnma(n, set1(0.693359375f), x);
  r = fnma(n, set1(-2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.0f);
  // 2^n in two factors, as n may be as low as -150
  const F bounded = max(min(n, set1(130.0f)), set1(-150.0f));
  const I whole = to_int(bounded), half = to_int(bounded * set1(0.5f));
  const F first = as_float(shift_left<23>(half + set1(127))), second = as_float(shift_left<23>(whole - half + set1(127)));
  F y = p * first * second;
  y = select_less(x, set1(-104.0f), zero(), y);
  return select_less(set1(88.7228394f), x, set1(HUGE_VALF), y);
}

}  // namespace OCTAVO_ISA
