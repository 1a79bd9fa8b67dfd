"""What lies between the products of a decoder: norms, rotary embedding, gating, rows of tables. Sums and functions in fp32."""

import triton
import triton.language as tl

from octavo_paged_attn_cuda.kernels.codes import narrowed

SILU: tl.constexpr = tl.constexpr(0)
GELU: tl.constexpr = tl.constexpr(1)
GELU_TANH: tl.constexpr = tl.constexpr(2)


@triton.jit
def rms_norm(
    out,
    total,
    x,
    x_stride,
    residual,
    residual_stride,
    weight,
    eps,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid (tokens, INNER / ROWS): norms of ROWS of the INNER rows of SIZE that each token has. With a residual, of the sum
    with it, which goes to `total`.
    """
    token = tl.program_id(0).to(tl.int64)
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    live = (row < INNER)[:, None] & (column < SIZE)[None, :]
    at = row[:, None] * SIZE + column[None, :]
    numbers = tl.load(x + token * x_stride + at, mask=live, other=0.0)
    to = token * (INNER * SIZE) + at
    if residual is not None:
        before = tl.load(residual + token * residual_stride + at, mask=live, other=0.0)
        numbers = narrowed(numbers.to(tl.float32) + before.to(tl.float32), out.dtype.element_ty)
        tl.store(total + to, numbers, mask=live)
    wide = numbers.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    normed = narrowed(wide * inverse[:, None], out.dtype.element_ty)
    by = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(out + to, narrowed(normed.to(tl.float32) * by[None, :], out.dtype.element_ty), mask=live)


@triton.jit
def rotate(
    out,
    x,
    x_stride,
    cos,
    sin,
    angle_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
):
    """Grid (tokens, HEADS / ROWS). Elements i and HALF + i of a head are a pair; the REST is copied."""
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    live = (head < HEADS)[:, None] & (pair < HALF)[None, :]
    at = head[:, None] * HEAD_DIM + pair[None, :]
    x += token * x_stride
    out += token * (HEADS * HEAD_DIM)
    left = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    right = tl.load(x + at + HALF, mask=live, other=0.0).to(tl.float32)
    c = tl.load(cos + token * angle_stride + pair, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * angle_stride + pair, mask=pair < HALF, other=0.0)[None, :]
    tl.store(out + at, narrowed(left * c - right * s, out.dtype.element_ty), mask=live)
    tl.store(out + at + HALF, narrowed(right * c + left * s, out.dtype.element_ty), mask=live)
    if REST > 0:
        column = tl.arange(0, REST_WIDTH)
        live = (head < HEADS)[:, None] & (column < REST)[None, :]
        at = head[:, None] * HEAD_DIM + 2 * HALF + column[None, :]
        tl.store(out + at, tl.load(x + at, mask=live, other=0.0), mask=live)


@triton.jit
def gated(out, gate_up, stride, divisor, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr):
    """Grid (tokens, SIZE / WIDTH): activation(gate) * up, over the divisor if there is one."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = column < SIZE
    gate = tl.load(gate_up + token * stride + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + SIZE + column, mask=live, other=0.0).to(tl.float32)
    if ACTIVATION == SILU:
        factor = 1.0 / (1.0 + tl.exp(-gate))
    elif ACTIVATION == GELU_TANH:  # (1 + tanh(a)) / 2 = 1 / (1 + exp(-2 a))
        factor = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        factor = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    opened = narrowed(gate * factor, out.dtype.element_ty).to(tl.float32)
    result = narrowed(opened * up, out.dtype.element_ty)
    if divisor is not None:
        by = tl.load(divisor + column, mask=live, other=1.0).to(tl.float32)
        result = narrowed(result.to(tl.float32) / by, out.dtype.element_ty)
    tl.store(out + token * SIZE + column, result, mask=live)


@triton.jit
def gather(out, table, stride, indices, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Grid (rows, SIZE / WIDTH): rows of a table, by indices."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    index = tl.load(indices + row).to(tl.int64)
    values = tl.load(table + index * stride + column, mask=column < SIZE, other=0.0)
    if values.dtype == tl.float32:
        values = narrowed(values, out.dtype.element_ty)
    tl.store(out + row * SIZE + column, values.to(out.dtype.element_ty), mask=column < SIZE)
