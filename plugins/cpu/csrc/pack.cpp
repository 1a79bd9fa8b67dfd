#include "pack.h"

#include <cstring>

namespace octavo {

namespace {

template <class Number>
void pack_plain(const Number* codes, int64_t in, int64_t out, int64_t padded_in, const int32_t* source, Number* packed,
                int64_t first, int64_t last) {
  for (int64_t block = first; block < last; ++block) {
    for (int64_t k = 0; k < padded_in; ++k) {
      Number* to = packed + (block * padded_in + k) * kLanes;
      const int64_t from = source ? source[k] : k < in ? k : -1;
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t row = block * kLanes + lane;
        to[lane] = row < out && from >= 0 ? codes[row * in + from] : Number(0);
      }
    }
  }
}

void pack_integers(Code code, const uint8_t* codes, int64_t in, int64_t out, int64_t padded_in, const int32_t* source,
                   uint8_t* packed, int64_t first, int64_t last) {
  const int bits = code_bits(code), unit = unit_inputs(code);
  for (int64_t block = first; block < last; ++block) {
    for (int64_t start = 0; start < padded_in; start += unit) {
      uint8_t* to = packed + (block * padded_in + start) * kLanes * bits / 8;
      int64_t from[16];
      for (int i = 0; i < unit; ++i) from[i] = source ? source[start + i] : start + i < in ? start + i : -1;
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t row = block * kLanes + lane;
        uint32_t word = 0;
        if (row < out) {
          for (int i = 0; i < unit; ++i) {
            if (from[i] < 0) continue;
            word |= static_cast<uint32_t>(codes[row * in + from[i]]) << (8 * (i % 4) + bits * (i / 4));
          }
        }
        for (int byte = 0; byte < 4; ++byte) to[lane * 4 + byte] = static_cast<uint8_t>(word >> 8 * byte);
      }
    }
  }
}

}  // namespace

int64_t packed_bytes(Code code, int64_t padded_in, int64_t out) {
  return (out + kLanes - 1) / kLanes * kLanes * padded_in * code_bits(code) / 8;
}

void pack(Code code, const void* codes, int64_t in, int64_t out, int64_t padded_in, const int32_t* source, uint8_t* packed) {
  const int64_t blocks = (out + kLanes - 1) / kLanes;
  Operation operation;
  operation.name = "pack";
  operation.run = [=](const Context& c) {
    int64_t first, last;
    c.share(blocks, 1, first, last);
    if (is_integer(code)) {
      pack_integers(code, static_cast<const uint8_t*>(codes), in, out, padded_in, source, packed, first, last);
    } else if (code == Code::f32) {
      pack_plain(static_cast<const uint32_t*>(codes), in, out, padded_in, source, reinterpret_cast<uint32_t*>(packed), first,
                 last);
    } else if (code_bits(code) == 16) {
      pack_plain(static_cast<const uint16_t*>(codes), in, out, padded_in, source, reinterpret_cast<uint16_t*>(packed), first,
                 last);
    } else {
      pack_plain(static_cast<const uint8_t*>(codes), in, out, padded_in, source, packed, first, last);
    }
  };
  Engine::get().emit(1, std::move(operation));
}

}  // namespace octavo
