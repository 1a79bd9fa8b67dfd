// Everything of one instruction set; what is included here has no guards and lives in the namespace OCTAVO_ISA.
#define OCTAVO_ISA isa_portable
#define OCTAVO_ISA_NAME "portable"
#define OCTAVO_PORTABLE 1

#include "kernels.h"
#include "linear_float_plan.h"
#include "linear_int8_plan.h"
#include "isa/vec_portable.h"

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

const Kernels& portable_kernels() { return isa_portable::table(); }

}  // namespace octavo
