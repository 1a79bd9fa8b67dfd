// Everything of one instruction set; what is included here has no guards and lives in the namespace OCTAVO_ISA.
#define OCTAVO_ISA isa_avx2
#define OCTAVO_ISA_NAME "avx2"
#define OCTAVO_AVX2 1

#include "kernels.h"
#include "linear_float_plan.h"
#include "linear_int8_plan.h"
#include "isa/vec_avx2.h"

#include <cmath>
#include <cstring>

#include "isa/exp.inc.h"
#include "isa/linear_float_codes.inc.h"
#include "isa/linear_float_tiles.inc.h"
#include "isa/linear_float.inc.h"
#include "isa/int8_dot.inc.h"
#include "isa/int8_quantize.inc.h"
#include "isa/int8_tile.inc.h"
#include "isa/linear_int8.inc.h"
#include "isa/elementwise.inc.h"
#include "isa/attention.inc.h"
#include "isa/table.inc.h"

namespace octavo {

const Kernels* avx2_kernels() {
  __builtin_cpu_init();
  const bool there = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return there ? &isa_avx2::table() : nullptr;
}

}  // namespace octavo
