"""Softmax attention over paged K and V, in tiles of query rows by positions, and the sum of parts.

A row is one query head of one token; the rows of a tile share a KV head, so that its K and V are loaded once for all of them.
Scores live in units of log2, softmax and sums in fp32.
"""

import triton
import triton.language as tl

from octavo_paged_attn_cuda.kernels.codes import INTERPRETED, decoded, narrowed

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _tiles(
    mixed,
    total,
    peak,
    query,
    position,
    first,
    last,
    begin,
    end,
    table,
    k_blocks,
    v_blocks,
    kb,
    kt,
    vb,
    vt,
    k_scales,
    v_scales,
    sb,
    st,
    factor,
    soft_cap,
    window,
    TYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    MASKED: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adds the positions first ... last - 1, in steps of COLUMNS, of which only begin ... end - 1 may be read.

    TYPE is what numbers are rounded to before they are multiplied, in the type of `query` (wider for the interpreter).
    """
    d = tl.arange(0, WIDTH)
    for start in tl.range(first, last, COLUMNS, num_stages=STAGES):
        at = start + tl.arange(0, COLUMNS)
        seen = (at >= begin) & (at < end)
        page = tl.load(table + at // PAGE, mask=seen, other=0).to(tl.int64)
        offset = at % PAGE
        live = seen[:, None] & (d < HEAD_DIM)[None, :]
        where = (page * kb + offset * kt)[:, None] + d[None, :]
        if MASKED or WIDTH != HEAD_DIM:
            codes = tl.load(k_blocks + where, mask=live, other=0)
        else:
            codes = tl.load(k_blocks + where)
        key = decoded(codes, KIND, NATIVE, TYPE).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * factor
        if k_scales is not None:
            own = tl.load(k_scales + page * sb + offset * st, mask=seen, other=0.0)
            scores *= own.to(tl.float32)[None, :]
        if CAP:
            rising = tl.exp(-2.0 * tl.abs(scores) / soft_cap)
            scores = tl.where(scores < 0, -soft_cap, soft_cap) * (1.0 - rising) / (1.0 + rising)
            scores *= _LOG2E
        if MASKED:
            open = (at[None, :] <= position[:, None]) & seen[None, :]
            if WINDOW:
                open &= position[:, None] - at[None, :] < window
            scores = tl.where(open, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shares = tl.exp2(scores - base[:, None])
        fading = tl.exp2(peak - base)
        total = total * fading + tl.sum(shares, axis=1)
        mixed *= fading[:, None]
        peak = highest
        where = (page * vb + offset * vt)[:, None] + d[None, :]
        if MASKED or WIDTH != HEAD_DIM:
            codes = tl.load(v_blocks + where, mask=live, other=0)
        else:
            codes = tl.load(v_blocks + where)
        value = decoded(codes, KIND, NATIVE, TYPE).to(query.dtype)
        if v_scales is not None:
            own = tl.load(v_scales + page * sb + offset * st, mask=seen, other=0.0)
            shares *= own.to(tl.float32)[None, :]
        mixed = tl.dot(narrowed(shares, TYPE).to(query.dtype), value, mixed, input_precision=PRECISION)
    return mixed, total, peak


@triton.jit
def attend(
    out,
    parts,
    sums,
    query,
    query_stride,
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
    items,
    tables,
    table_stride,
    scale,
    soft_cap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (items, KV heads). An item is (request or -1, first token, rows of the request, first row, position of the
    request's first token, begin, end, slot or -1): a tile of rows over the positions begin ... end - 1, whose result goes to
    `out`, or with the sums of its softmax to a slot of `parts` and `sums`.
    """
    item, head = items + 8 * tl.program_id(0), tl.program_id(1)
    request, token, rows, first_row = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    if request >= 0:
        shift, begin, end, slot = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
        row, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
        token_of, member = (first_row + row) // GROUP, (first_row + row) % GROUP
        live = (first_row + row < rows)[:, None] & (d < HEAD_DIM)[None, :]
        at = (token + token_of).to(tl.int64)[:, None]
        which = (head * GROUP + member)[:, None] * HEAD_DIM + d[None, :]
        asked = tl.load(query + at * query_stride + which, mask=live, other=0.0)
        if INTERPRETED and asked.dtype == tl.bfloat16:  # numpy cannot multiply it
            asked = asked.to(tl.float32)
        position = shift + token_of
        factor = scale
        if k_static is not None:
            factor *= tl.load(k_static + head * k_static_stride)
        if not CAP:
            factor *= _LOG2E
        table = tables + request.to(tl.int64) * table_stride
        k_head, v_head = k_blocks + head * kh, v_blocks + head * vh
        ks_head, vs_head = k_scales, v_scales
        if k_scales is not None:
            ks_head, vs_head = k_scales + head * sh, v_scales + head * sh
        mixed = tl.zeros([ROWS, WIDTH], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        middle = begin // COLUMNS * COLUMNS
        if not WINDOW:  # what all rows see whole
            open_end = tl.minimum(end, shift + first_row // GROUP + 1) // COLUMNS * COLUMNS
            open_end = tl.maximum(open_end, middle)
            mixed, total, peak = _tiles(
                *(mixed, total, peak, asked, position, middle, open_end, begin, end, table),
                *(k_head, v_head, kb, kt, vb, vt, ks_head, vs_head, sb, st, factor, soft_cap, window),
                *(
                    out.dtype.element_ty,
                    HEAD_DIM,
                    PAGE,
                    KIND,
                    NATIVE,
                    WINDOW,
                    CAP,
                    False,
                    COLUMNS,
                    WIDTH,
                    PRECISION,
                    STAGES,
                ),
            )
            middle = open_end
        mixed, total, peak = _tiles(
            *(mixed, total, peak, asked, position, middle, end, begin, end, table),
            *(k_head, v_head, kb, kt, vb, vt, ks_head, vs_head, sb, st, factor, soft_cap, window),
            *(out.dtype.element_ty, HEAD_DIM, PAGE, KIND, NATIVE, WINDOW, CAP, True, COLUMNS, WIDTH, PRECISION, STAGES),
        )
        if slot < 0:
            mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
            if v_static is not None:
                mixed *= tl.load(v_static + head * v_static_stride)
            to = at * (KV_HEADS * GROUP * HEAD_DIM) + which
            tl.store(out + to, narrowed(mixed, out.dtype.element_ty), mask=live)
        else:
            place = (slot.to(tl.int64) * KV_HEADS + head) * ROWS + row
            tl.store(parts + place[:, None] * WIDTH + d[None, :], mixed)
            tl.store(sums + place * 2, peak)
            tl.store(sums + place * 2 + 1, total)


@triton.jit
def reduce(
    out,
    parts,
    sums,
    merges,
    v_static,
    v_static_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Grid (merges, KV heads, ROWS). A merge is (first token or -1, rows of the request, first row, first slot, slots)."""
    merge, head, row = merges + 5 * tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, rows, first_row = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2)
    if (token >= 0) & (first_row + row < rows):
        first, count = tl.load(merge + 3), tl.load(merge + 4)
        d = tl.arange(0, WIDTH)
        peak, total = float("-inf"), 0.0
        mixed = tl.zeros([WIDTH], tl.float32)
        for start in range(0, count, SLOTS):
            part = start + tl.arange(0, SLOTS)
            live = part < count
            place = ((first + part).to(tl.int64) * KV_HEADS + head) * ROWS + row
            peaks = tl.load(sums + place * 2, mask=live, other=float("-inf"))
            totals = tl.load(sums + place * 2 + 1, mask=live, other=0.0)
            values = tl.load(parts + place[:, None] * WIDTH + d[None, :], mask=live[:, None], other=0.0)
            highest = tl.maximum(peak, tl.max(peaks, axis=0))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            weights, fading = tl.exp2(peaks - base), tl.exp2(peak - base)
            total = total * fading + tl.sum(totals * weights, axis=0)
            mixed = mixed * fading + tl.sum(values * weights[:, None], axis=0)
            peak = highest
        mixed = mixed / tl.where(total > 0, total, 1.0)
        if v_static is not None:
            mixed *= tl.load(v_static + head * v_static_stride)
        member, token_of = (first_row + row) % GROUP, (first_row + row) // GROUP
        to = (token + token_of).to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + (head * GROUP + member) * HEAD_DIM + d
        tl.store(out + to, narrowed(mixed, out.dtype.element_ty), mask=d < HEAD_DIM)
