"""Products of 8-bit codes on both sides, int8 or fp8: inputs are quantised by one kernel and multiplied by another.

As in weights.py a tile of the result lies transposed, (outputs, rows). Sums of int8 are int32 and exact.
"""

import triton
import triton.language as tl

from octavo_linear_cuda.kernels.weights import narrow

_INTEGERS_FROM = tl.constexpr(12582912.0)  # 1.5 * 2^23: what is added to it is rounded to integers, half to even
_NINTHS_FROM = tl.constexpr(24576.0)  # to multiples of 2^-9, the smallest fp8_e4m3
_SMALLEST_NORMAL = tl.constexpr(0.015625)


@triton.jit
def nearest_e4m3(values):
    """fp32 of at most 448 -> the nearest fp8_e4m3, ties to even, still as fp32: no conversion has to round any more."""
    bits = values.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(values) < _SMALLEST_NORMAL, (values + _NINTHS_FROM) - _NINTHS_FROM, normal)


@triton.jit
def quantise_rows(
    x,
    static_scale,
    static_zero,
    codes,
    scales,
    zeros,
    inputs,
    x_stride,
    padded_inputs,
    group,
    groups,
    FP8: tl.constexpr,
    DYNAMIC: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """codes (rows, padded_inputs), scales (rows, groups) and zeros (rows,) of x (rows, inputs); a program for a row's group.

    The arithmetic is that of octavo's quantize_inputs: a scale is NaN where an input is, 1 where all are 0.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * group
    end = tl.minimum(first + group, inputs)
    x += row * x_stride
    place = tl.arange(0, BLOCK)
    low = tl.full([BLOCK], 0, tl.float32)
    high = tl.full([BLOCK], 0, tl.float32)
    broken = tl.full([BLOCK], 0, tl.int32)
    for start in range(first, end, BLOCK):
        values = tl.load(x + start + place, mask=start + place < end, other=0.0).to(tl.float32)
        broken |= (values != values).to(tl.int32)
        low = tl.minimum(low, values)
        high = tl.maximum(high, values)
    LARGEST: tl.constexpr = 448.0 if FP8 else 127.0
    least = tl.min(low, 0)
    most = tl.max(high, 0)
    zero = 0.0
    if not DYNAMIC:
        scale = tl.load(static_scale)
        if not SYMMETRIC:
            zero = tl.load(static_zero)
    elif SYMMETRIC:
        scale = tl.div_rn(tl.maximum(most, -least), LARGEST)
    else:
        scale = tl.div_rn(most - least, 255.0)
    if DYNAMIC:
        scale = tl.where(scale == 0.0, 1.0, scale)
        if not SYMMETRIC:
            zero = (-128.0 - tl.div_rn(least, scale) + _INTEGERS_FROM) - _INTEGERS_FROM
    nothing = tl.max(broken, 0) != 0
    tl.store(scales + row * groups + tl.program_id(1), tl.where(nothing, float("nan"), scale))
    if not SYMMETRIC:
        tl.store(zeros + row, zero.to(tl.int32))
    stop = end
    if tl.program_id(1) == groups - 1:
        stop = padded_inputs
    for start in range(first, stop, BLOCK):
        values = tl.load(x + start + place, mask=start + place < end, other=0.0).to(tl.float32)
        scaled = tl.div_rn(values, tl.full([BLOCK], 0, tl.float32) + scale)
        if FP8:
            rounded = nearest_e4m3(tl.minimum(tl.maximum(scaled, -448.0), 448.0))
        else:
            rounded = tl.minimum(tl.maximum(scaled + zero, -128.0), 127.0)
            rounded = (rounded + _INTEGERS_FROM) - _INTEGERS_FROM
        rounded = tl.where(start + place < end, rounded, 0.0)
        tl.store(
            codes + row * padded_inputs + start + place, rounded.to(codes.dtype.element_ty), mask=start + place < stop
        )


@triton.jit
def code_product(
    x,
    codes,
    x_scales,
    x_zeros,
    scales,
    sums,
    bias,
    out,
    rows,
    outputs,
    padded_inputs,
    padded_outputs,
    x_groups,
    blocks,
    blocks_each,
    INTEGERS: tl.constexpr,
    GROUPED: tl.constexpr,
    GROUP: tl.constexpr,
    X_GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDENED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out (rows, outputs) = codes x (rows, padded_inputs) @ codes (padded_outputs, padded_inputs)^T, scaled, + bias.

    GROUPED: each block of BLOCK_IN inputs is scaled on its own; GROUP and X_GROUP blocks share scales of weights and inputs,
    (groups, padded_outputs) and (rows, x_groups). `sums` are those of the weights' codes over a block, or over all inputs.
    With SPLIT `out` gets parts (splits, rows, outputs): scaled fp32 where GROUPED, else unscaled sums. WIDENED multiplies fp8
    as fp16, where the sums of fp8 tensor cores are too rough.
    """
    SUM: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    # Hopper's sums of fp8 have 14 bits: so many products are summed before they are added in fp32
    ROUGH: tl.constexpr = None if INTEGERS or WIDENED else BLOCK_IN
    n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first = tl.program_id(2) * blocks_each
    last = tl.minimum(first + blocks_each, blocks)
    place = tl.arange(0, BLOCK_IN)
    inside_rows = m < rows
    left_rows = codes + n.to(tl.int64)[:, None] * padded_inputs
    right_rows = x + m.to(tl.int64)[None, :] * padded_inputs
    if HAS_ZEROS:
        zero = tl.load(x_zeros + m, mask=inside_rows, other=0)
    part = tl.full([BLOCK_OUT, BLOCK_ROWS], 0, SUM)
    total = tl.full([BLOCK_OUT, BLOCK_ROWS], 0, tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        k = block * BLOCK_IN + place
        left = tl.load(left_rows + k[None, :])
        right = tl.load(right_rows + k[:, None], mask=inside_rows[None, :], other=0.0)
        if WIDENED:
            left = left.to(tl.float16)
            right = right.to(tl.float16)
        part = tl.dot(left, right, part, max_num_imprecise_acc=ROUGH, out_dtype=SUM)
        if GROUPED:
            if HAS_ZEROS:
                part -= zero[None, :] * tl.load(sums + block * padded_outputs + n)[:, None]
            scale = tl.load(scales + block // GROUP * padded_outputs + n)[:, None]
            x_scale = tl.load(x_scales + m * x_groups + block // X_GROUP, mask=inside_rows, other=0.0)
            total += part.to(tl.float32) * scale * x_scale[None, :]
            part = tl.full([BLOCK_OUT, BLOCK_ROWS], 0, SUM)
    inside = inside_rows[None, :] & (n[:, None] < outputs)
    parts = (tl.program_id(2) * rows + m[None, :]) * outputs + n[:, None]
    if not GROUPED:
        if HAS_ZEROS and first == 0:
            part -= zero[None, :] * tl.load(sums + n)[:, None]
        if SPLIT:
            tl.store(out + parts, part, mask=inside)
        else:
            x_scale = tl.load(x_scales + m, mask=inside_rows, other=0.0)
            total = part.to(tl.float32) * tl.load(scales + n)[:, None] * x_scale[None, :]
    elif SPLIT:
        tl.store(out + parts, total, mask=inside)
    if not SPLIT:
        if HAS_BIAS:
            total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
        places = m.to(tl.int64)[None, :] * outputs + n[:, None]
        tl.store(out + places, narrow(total, out.dtype.element_ty), mask=inside)


@triton.jit
def scale_parts(
    parts, x_scales, scales, bias, out, size, outputs, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """out (rows, outputs) of `size` elements = sums of the parts, in their order, scaled by row and output, + bias."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.load(parts + place, mask=inside, other=0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * size + place, mask=inside, other=0)
    x_scale = tl.load(x_scales + place // outputs, mask=inside, other=0.0)
    value = total.to(tl.float32) * tl.load(scales + place % outputs, mask=inside, other=0.0) * x_scale
    if HAS_BIAS:
        value += tl.load(bias + place % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, narrow(value, out.dtype.element_ty), mask=inside)
