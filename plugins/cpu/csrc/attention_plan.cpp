// How a step's attention is cut into units of work, alike on every instruction set and for any number of threads.
#include "kernels.h"

namespace octavo {

void plan_attention(const Attention&, Batch&) {}

}  // namespace octavo
