"""K and V of a step into their slots. One program a token and side; all its heads at once."""

import triton
import triton.language as tl

from octavo_paged_attn_cuda.kernels.codes import FLOAT, encoded, narrowed


@triton.jit
def _store_side(
    rows,
    rows_stride,
    blocks,
    block_stride,
    head_stride,
    slot_stride,
    scales,
    scale_block_stride,
    scale_head_stride,
    scale_slot_stride,
    static,
    static_stride,
    token,
    slot,
    largest,
    bound,
    smallest,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
    CLAMPS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    head, d = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    live = (head < KV_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    at = token.to(tl.int64) * rows_stride + head[:, None] * HEAD_DIM + d[None, :]
    given = tl.load(rows + at, mask=live, other=0.0)
    numbers = given.to(tl.float32)
    block, offset = slot // PAGE, slot % PAGE
    if static is not None:
        scale = tl.load(static + head * static_stride, mask=head < KV_HEADS, other=1.0)
        numbers = tl.div_rn(numbers, tl.broadcast_to(scale[:, None], numbers.shape))
    if scales is not None:
        numbers = tl.where(numbers > bound, bound, tl.where(numbers < -bound, -bound, numbers))
        missing = tl.max((numbers != numbers).to(tl.int32), axis=1)
        peak = tl.max(tl.abs(tl.where(numbers != numbers, 0.0, numbers)), axis=1)
        scale = tl.div_rn(peak, tl.zeros_like(peak) + largest)
        scale = tl.where(missing > 0, float("nan"), tl.maximum(scale, smallest))
        where = block * scale_block_stride + head * scale_head_stride + offset * scale_slot_stride
        tl.store(scales + where, narrowed(scale, scales.dtype.element_ty), mask=head < KV_HEADS)
        numbers = tl.div_rn(numbers, tl.broadcast_to(scale[:, None], numbers.shape))
    if KIND == FLOAT and not CLAMPS and given.dtype == blocks.dtype.element_ty:
        codes = given
    else:
        codes = encoded(numbers, largest, KIND, CLAMPS, blocks.dtype.element_ty)
    where = block * block_stride + head[:, None] * head_stride + offset * slot_stride + d[None, :]
    tl.store(blocks + where, codes, mask=live)


@triton.jit
def store(
    key,
    value,
    key_stride,
    value_stride,
    k_blocks,
    v_blocks,
    kb,
    kh,
    kt,
    vb,
    vh,
    vt,
    k_scales,
    v_scales,
    sb,
    sh,
    st,
    k_static,
    v_static,
    k_static_stride,
    v_static_stride,
    slots,
    largest,
    bound,
    smallest,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
    CLAMPS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid (tokens, 2): K, then V. `bound` limits what gets a scale of its own; slots < 0 are padding."""
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if slot >= 0:
        if tl.program_id(1) == 0:
            _store_side(
                *(key, key_stride, k_blocks, kb, kh, kt, k_scales, sb, sh, st, k_static, k_static_stride, token, slot),
                *(largest, bound, smallest, KV_HEADS, HEAD_DIM, PAGE, KIND, CLAMPS, HEADS, WIDTH),
            )
        else:
            _store_side(
                *(value, value_stride, v_blocks, vb, vh, vt, v_scales, sb, sh, st, v_static, v_static_stride),
                *(token, slot, largest, bound, smallest, KV_HEADS, HEAD_DIM, PAGE, KIND, CLAMPS, HEADS, WIDTH),
            )
