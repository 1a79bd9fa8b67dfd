// From codes as a checkpoint's canonical form has them, one element each, to the layout of kernels.h.
#pragma once

#include "kernels.h"

namespace octavo {

// Bytes of packed codes.
int64_t packed_bytes(Code code, int64_t padded_in, int64_t out);

// codes (out, in) row-major: uint8 for integer and fp8 codes (int8 already shifted by 128), else 2 or 4 bytes an element.
// Writes Weight::codes to `packed`, with Weight::source as given. Uses all threads.
void pack(Code code, const void* codes, int64_t in, int64_t out, int64_t padded_in, const int32_t* source, uint8_t* packed);

inline int code_bits(Code code) {
  switch (code) {
    case Code::u2: return 2;
    case Code::u4: return 4;
    case Code::bf16:
    case Code::f16: return 16;
    case Code::f32: return 32;
    default: return 8;
  }
}
inline bool is_integer(Code code) { return code == Code::u2 || code == Code::u4 || code == Code::u8; }

// Inputs in one unit of a weight's layout: every segment starts at a multiple of it.
inline int unit_inputs(Code code) { return is_integer(code) ? 32 / code_bits(code) : 1; }

}  // namespace octavo
