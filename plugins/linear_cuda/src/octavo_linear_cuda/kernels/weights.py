"""The product of float inputs with weights of 2 to 8 bits: one Triton kernel, and two small ones around it.

A tile of the result lies transposed, (outputs, rows): unpacked weights are the left operand of the tensor cores, which comes
from registers, and few rows waste little. Words hold codes so that a pair of them is two shifts and masks away from two
16-bit floats (see packing.py); a word's pairs belong to different slabs of inputs, so nothing is shuffled between threads.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
E4M3 = tl.constexpr(1)
E5M2 = tl.constexpr(2)


@triton.jit
def narrow(values, dtype: tl.constexpr):
    """fp32 to dtype, to nearest even, also where the interpreter would cut bits off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        values = tl.where(values == values, bits.to(tl.float32, bitcast=True), values)
    return values.to(dtype)


@triton.jit
def unpacked(
    words, tops, IN_WORD: tl.constexpr, IN_TOP: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr, dtype: tl.constexpr
):
    """A slab of codes (outputs, 2 * words), less the middle of their range; fp8 codes as they are. IN_*: its place in words.

    A code under the leading bits of 2^10 (fp16), 2^7 (bf16) or 2^23 (fp32) is that number plus the code. The result is of type
    `dtype`, and of fp32 where the interpreter runs, which cannot compute with bf16.
    """
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    if FP8 == 0 and BITS == 8 and dtype == tl.bfloat16:
        low = (((words >> (8 * IN_WORD)) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE)
        high = (((words >> (8 * IN_WORD + 16)) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True)
        high -= 8388608.0 + MIDDLE
    else:
        if FP8 == E4M3:  # an fp16 of four bits of exponent in the place of five: 2^8 too small
            pair = (words >> (8 * IN_WORD)) & 0xFF00FF
            pair = ((pair & 0x800080) << 8) | ((pair & 0x7F007F) << 7)
        elif FP8 == E5M2:  # the upper half of an fp16
            pair = ((words >> (8 * IN_WORD)) & 0xFF00FF) << 8
        elif BITS == 3:
            pair = ((words >> (2 * IN_WORD)) & 0x30003) | (((tops >> IN_TOP) & 0x10001) << 2)
        else:
            pair = (words >> (BITS * IN_WORD)) & (((1 << BITS) - 1) * 0x10001)
        if FP8 == 0:
            pair |= 0x64006400 if dtype == tl.float16 else 0x43004300
        half: tl.constexpr = tl.float16 if FP8 != 0 else dtype
        low = pair.to(tl.int16).to(half, bitcast=True)
        high = (pair >> 16).to(tl.int16).to(half, bitcast=True)
        if INTERPRETED:
            low, high = low.to(tl.float32), high.to(tl.float32)
        if FP8 == E4M3:
            low, high = low * 256.0, high * 256.0
        elif FP8 == 0:
            first: tl.constexpr = (1024.0 if dtype == tl.float16 else 128.0) + MIDDLE
            low, high = low - first, high - first
    codes = tl.join(low, high)
    codes = tl.reshape(codes, [codes.shape[0], 2 * codes.shape[1]])
    if INTERPRETED:
        return codes
    if FP8 != 0 and dtype == tl.bfloat16:
        codes = codes.to(tl.float32)
    return codes.to(dtype)


@triton.jit
def weight_product(
    x,
    codes,
    tops,
    scales,
    zeros,
    bias,
    out,
    rows,
    outputs,
    inputs,
    x_stride,
    padded_outputs,
    blocks,
    blocks_each,
    BITS: tl.constexpr,
    FP8: tl.constexpr,
    SLAB: tl.constexpr,
    SLABS: tl.constexpr,
    SEGMENT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALED_FIRST: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out (rows, outputs) = x (rows, inputs) @ weight^T + bias; with SPLIT fp32 parts (splits, rows, outputs) without bias.

    A block is SLABS slabs of SLAB inputs. Sums of SEGMENT slabs are scaled together (0: all at the end); GROUP slabs share a
    row of `scales` and `zeros`, (groups, padded_outputs). SCALED_FIRST rounds scaled weights to x's type instead, which takes
    fewer operations where a weight serves many rows. fp32 inputs are three bf16 parts, whose sum they are.
    """
    THREE: tl.constexpr = x.dtype.element_ty == tl.float32
    dtype: tl.constexpr = tl.bfloat16 if THREE else x.dtype.element_ty
    n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first = tl.program_id(2) * blocks_each
    last = tl.minimum(first + blocks_each, blocks)
    WORDS: tl.constexpr = SLAB // 2
    word = tl.arange(0, WORDS)
    place = tl.arange(0, SLAB)
    x_rows = x + m.to(tl.int64)[None, :] * x_stride
    total = tl.full([BLOCK_OUT, BLOCK_ROWS], 0, tl.float32)
    part = tl.full([BLOCK_OUT, BLOCK_ROWS], 0, tl.float32)
    x_sum = tl.full([BLOCK_OUT, BLOCK_ROWS], 0, tl.float32)
    operand: tl.constexpr = tl.float32 if INTERPRETED else dtype
    ones = tl.full([BLOCK_OUT, SLAB], 1.0, operand)
    for block in tl.range(first, last, num_stages=STAGES):
        if BITS == 3:
            top = tl.load(tops + (block * padded_outputs + n[:, None]) * WORDS + word[None, :])
        for slab in tl.static_range(SLABS):
            if slab % (16 // (2 if BITS == 3 else BITS)) == 0:
                tile = block * (2 if BITS == 3 else 1) + slab // 8
                words = tl.load(codes + (tile * padded_outputs + n[:, None]) * WORDS + word[None, :])
            k = (block * SLABS + slab) * SLAB + place
            inside = (m[None, :] < rows) & (k[:, None] < inputs)
            right = tl.load(x_rows + k[:, None], mask=inside, other=0.0)
            left = unpacked(words, top if BITS == 3 else words, slab % 8, slab, BITS, FP8, dtype)
            group = (block * SLABS + slab) // GROUP
            if SCALED_FIRST:
                value = left.to(tl.float32)
                if HAS_ZEROS:
                    value -= tl.load(zeros + group * padded_outputs + n).to(tl.float32)[:, None]
                value *= tl.load(scales + group * padded_outputs + n).to(tl.float32)[:, None]
                total = tl.dot(narrow(value, dtype).to(operand), right.to(operand), total)
            else:
                if THREE:
                    high = (right.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
                    rest = right - high
                    middle = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
                    low = (rest - middle).to(operand)
                    middle = middle.to(operand)
                    part = tl.dot(left, low, part)
                    part = tl.dot(left, middle, part)
                    if HAS_ZEROS:
                        x_sum = tl.dot(ones, low, x_sum)
                        x_sum = tl.dot(ones, middle, x_sum)
                    right = high
                part = tl.dot(left, right.to(operand), part)
                if HAS_ZEROS:
                    x_sum = tl.dot(ones, right.to(operand), x_sum)
                if SEGMENT > 0 and (slab + 1) % SEGMENT == 0:
                    if HAS_ZEROS:
                        part -= x_sum * tl.load(zeros + group * padded_outputs + n).to(tl.float32)[:, None]
                        x_sum = tl.full([BLOCK_OUT, BLOCK_ROWS], 0, tl.float32)
                    total += part * tl.load(scales + group * padded_outputs + n).to(tl.float32)[:, None]
                    part = tl.full([BLOCK_OUT, BLOCK_ROWS], 0, tl.float32)
    if not SCALED_FIRST and SEGMENT == 0:
        if HAS_ZEROS:
            part -= x_sum * tl.load(zeros + n).to(tl.float32)[:, None]
        total = part * tl.load(scales + n).to(tl.float32)[:, None]
    inside = (m[None, :] < rows) & (n[:, None] < outputs)
    if SPLIT:
        places = (tl.program_id(2) * rows + m[None, :]) * outputs + n[:, None]
        tl.store(out + places, total, mask=inside)
    else:
        if HAS_BIAS:
            total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
        places = m.to(tl.int64)[None, :] * outputs + n[:, None]
        tl.store(out + places, narrow(total, out.dtype.element_ty), mask=inside)


@triton.jit
def sum_parts(parts, bias, out, size, outputs, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """out (rows, outputs) of `size` elements = the parts (SPLITS, rows, outputs), added in their order, + bias."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.load(parts + place, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * size + place, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + place % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, narrow(total, out.dtype.element_ty), mask=inside)


@triton.jit
def reorder_inputs(x, source, out, inputs, x_stride, BLOCK: tl.constexpr):
    """out (rows, inputs) [i, k] = x [i, source[k]], 0 where source is negative."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(source + place, mask=place < inputs, other=-1)
    values = tl.load(x + row * x_stride + column, mask=column >= 0, other=0.0)
    tl.store(out + row * inputs + place, values, mask=place < inputs)
