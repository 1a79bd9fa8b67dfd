// Linear layers on inputs quantised to int8: products and sums within a segment are exact integers.
namespace OCTAVO_ISA {

using octavo::Inputs;

inline void linear_int8(const Weight& w, const Inputs& inputs, Rows x, Out out, const Context& c) {
  linear_float(w, x, out, c);
}

}  // namespace OCTAVO_ISA
