// Everything of one instruction set; what is included here has no guards and lives in the namespace OCTAVO_ISA.
#define OCTAVO_ISA isa_avx512vnni
#define OCTAVO_ISA_NAME "avx512vnni"
#define OCTAVO_AVX512VNNI 1

#if defined(__GNUC__) && !defined(__clang__)  // its own headers leave registers undefined on purpose, and it warns
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "kernels.h"
#include "linear_float_plan.h"
#include "linear_int8_plan.h"
#include "isa/vec_avx512.h"

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

const Kernels* avx512vnni_kernels() {
  __builtin_cpu_init();
  const bool there = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
  return there ? &isa_avx512vnni::table() : nullptr;
}

}  // namespace octavo
