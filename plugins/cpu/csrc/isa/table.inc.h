// The table of one instruction set. Included last in its translation unit.
namespace OCTAVO_ISA {

inline const octavo::Kernels& table() {
  static const octavo::Kernels kernels{
      OCTAVO_ISA_NAME, linear_float, linear_int8,   rms_norm, add_rms_norm, rotate, gated, gather,
      gather_packed,   argmax,       store_kv,      attend,
  };
  return kernels;
}

}  // namespace OCTAVO_ISA
