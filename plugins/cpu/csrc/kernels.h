// What every instruction set brings: one table of functions, and the layouts that they read.
//
// Numbers are promised bit for bit: a row's result depends on that row and the weights alone, whatever the number of rows,
// the row's place among them and the number of threads. So every sum has one fixed order, the same in each code path.
#pragma once

#include <cstdint>

#include "program.h"

namespace octavo {

constexpr int kLanes = 16;  // output rows side by side in packed weights, on every instruction set

enum class Code : int { u2, u4, u8, e4m3, e5m2, bf16, f16, f32, count };  // u8: int8 too, shifted by 128

// A packed weight (out, in). Inputs are permuted (act-order) and cut into segments, each with one scale (and zero) per output:
// a group of the weight, or part of one. Every segment is padded to whole units of inputs; padded inputs are 0.
//
// codes, for integer codes: for each block of 16 outputs, for each unit of 32 / bits inputs, 16 little-endian words, one an output;
// bits [8 * byte + bits * part] of the word hold the code of input unit_start + 4 * part + byte. So the low parts of all bytes are
// the first four inputs: what a 4-way dot product of bytes takes after a mask, and the next after a shift.
// codes, for others: for each block of 16 outputs, for each input, 16 numbers.
// Outputs are padded to whole blocks; padded ones have scale 0 and code 0.
struct Weight {
  Code code = Code::u4;
  int64_t in = 0, out = 0;      // as the layer has them
  int64_t padded_in = 0;        // after padding each segment
  int64_t num_segments = 0;
  const int32_t* segment_starts = nullptr;  // (num_segments + 1,) in padded inputs
  const int32_t* source = nullptr;          // (padded_in,) which input each padded one is, -1 for padding; null: the same
  const uint8_t* codes = nullptr;           // 64-byte aligned
  // weight = scale * (code - zero) - offset. Scales, zeros and offsets are (blocks of 16 outputs, num_segments, 16).
  Code scale_code = Code::f32;     // f16, bf16 or f32: whichever holds them exactly in least room
  const void* scales = nullptr;    // always present for integer codes; null for others where all are 1
  const uint8_t* zeros = nullptr;  // of integer codes, or null. At most one of these three is there
  bool has_zero = false;           // one zero for the whole weight (128 of shifted int8, 8 of symmetric int4)
  const float* offsets = nullptr;  // scale * zero, where zeros are not whole or do not fit a byte; or null
  int32_t zero = 0;
  const float* bias = nullptr;  // (padded out,) or null

  OCTAVO_INLINE int64_t blocks() const { return (out + kLanes - 1) / kLanes; }
};

// How int8 inputs come to be: octavo's quantize_inputs, bit for bit. scale = amax / 127, q = round_half_even(x / scale).
struct Inputs {
  enum Kind { kPerSegment, kPerToken, kStatic } kind = kPerSegment;  // dynamic by segment; dynamic by token; given scale
  bool symmetric = true;
  float scale = 1, zero = 0;  // kStatic
};

struct Rows {  // float32, row-major with a stride between rows, in elements
  const float* data;
  int64_t stride;
};

struct Out {
  float* data;
  int64_t stride;
};

// One layer's K and V; see octavo's LayerKV. Blocks may be any stride apart.
struct KVBlocks {
  enum Storage : int { f32, f16, bf16, e4m3, e5m2, i8 } storage = f32;
  void* key = nullptr;  // (num_blocks, kv_heads, block_size, head_dim)
  void* value = nullptr;
  void* key_scale = nullptr;  // (num_blocks, kv_heads, block_size), or null; see scale_storage
  void* value_scale = nullptr;
  Storage scale_storage = f32;
  const float* key_static = nullptr;  // (kv_heads,) stored = x / static, or null: 1
  const float* value_static = nullptr;
};

struct Attention {
  int64_t heads, kv_heads, head_dim;
  float scale;
  int64_t window;  // 0: none
  float soft_cap;  // 0: none
};

struct Kernels {
  const char* name;  // "avx512vnni", "avx2", "portable"

  // Linear layers. `out` (rows, weight.out) = x (rows, weight.in) times the weight, plus bias.
  void (*linear_float)(const Weight&, Rows x, Out out, const Context&);
  void (*linear_int8)(const Weight&, const Inputs&, Rows x, Out out, const Context&);

  // Elementwise. cos and sin are tables (positions, rotary / 2).
  void (*rms_norm)(Rows x, int64_t inner, int64_t size, int64_t inner_stride, const float* weight, float eps, Out out,
                   const Context&);
  void (*add_rms_norm)(Rows x, Rows residual, int64_t size, const float* weight, float eps, Out out, Out total, const Context&);
  void (*rotate)(Rows x, int64_t heads, int64_t head_dim, int64_t half, Rows cos, Rows sin, Out out, const Context&);
  void (*gated)(Rows gate_up, int64_t size, int activation, const float* divisor, Out out, const Context&);
  void (*gather)(const void* table, int storage, int64_t row_stride, int64_t size, const int64_t* indices, Out out,
                 const Context&);
  void (*gather_packed)(const Weight&, const int64_t* indices, Out out, const Context&);
  void (*argmax)(Rows x, int64_t size, int64_t* out, const Context&);

  // Attention: stores K and V of the step's tokens into their slots; then softmax(q k) v over the blocks.
  void (*store_kv)(const Attention&, const KVBlocks&, const Batch&, Rows key, Rows value, const Context&);
  void (*attend)(const Attention&, const KVBlocks&, const Batch&, Rows query, Out out, const Context&);
};

// Shared scratch that linear layers and attention need for so many rows; the layout is theirs.
int64_t linear_float_scratch(const Weight&, int64_t rows, int members);
int64_t linear_int8_scratch(const Weight&, const Inputs&, int64_t rows, int members);

// Cuts a step's attention into units of work (batch.units) and says what scratch they need (batch.scratch_bytes). Units do
// not depend on the number of threads.
void plan_attention(const Attention&, Batch&);

const Kernels& portable_kernels();
const Kernels* avx2_kernels();        // null where this build or processor has no such thing
const Kernels* avx512vnni_kernels();

// The best of these, or the one that set_isa() or OCTAVO_CPU_ISA names.
const Kernels& kernels();
void set_isa(const char* name);  // throws std::invalid_argument where it cannot run here

}  // namespace octavo
