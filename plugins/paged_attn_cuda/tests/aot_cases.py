"""What the plugin launches on a GPU, for compiling ahead of time: see octavo.testing.aot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from octavo import AttentionBatch, AttentionLayer, AttentionRequest, KVEncoding, LayerKV, Platform
from octavo_paged_attn_cuda.attention import TritonAttention
from octavo_paged_attn_cuda.ops import TritonOps

BF16, FP16, FP32, E4M3, E5M2, INT8 = (
    *(torch.bfloat16, torch.float16, torch.float32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.int8),
)
LAYER = AttentionLayer(0, 32, 8, 128, 128**-0.5)


def attend(
    rows: list[tuple[int, int]], layer: AttentionLayer, dtype: torch.dtype, stored: torch.dtype, platform: Platform
) -> None:
    """One step of (query_len, seq_len) rows over blocks that hold nothing in particular."""
    lens, ends = [list(numbers) for numbers in zip(*rows, strict=True)]
    tokens, page = sum(lens), 16
    batch = AttentionBatch(
        query_start_loc=torch.zeros(len(rows) + 1, dtype=torch.int32),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        block_tables=torch.zeros(len(rows), -(-max(ends) // page), dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        prompt_lens=torch.tensor(ends, dtype=torch.int32),
        query_lens_list=lens,
        seq_lens_list=ends,
        block_size=page,
    )
    blocks = (2, layer.kv_heads, page, layer.head_dim)
    codes = [torch.zeros(blocks, dtype=torch.uint8 if stored.itemsize == 1 else stored) for _ in range(2)]
    codes = [one.view(stored) for one in codes]
    scales = [torch.zeros(blocks[:3]) for _ in range(2)] if stored == INT8 else [None, None]
    largest = {E4M3: 448.0, E5M2: 57344.0, INT8: 127.0}.get(stored) or torch.finfo(stored).max
    static = torch.ones(1) if stored == E4M3 else None
    encoding = KVEncoding(stored, largest, static, static, smallest_scale=1e-6 if stored == INT8 else None)
    backend = TritonAttention(AttentionRequest([layer], dtype, page, stored, platform, stored == INT8))
    heads = torch.zeros(tokens, layer.heads + 2 * layer.kv_heads, layer.head_dim, dtype=dtype)
    query, key, value = heads.split((layer.heads, layer.kv_heads, layer.kv_heads), dim=1)
    backend.attend(layer, query, key, value, LayerKV(*codes, *scales), encoding, backend.plan(batch))


def elementwise(platform: Platform) -> None:
    """One layer's, at the sizes of a model of 7B."""
    ops, tokens = TritonOps(), 2
    assert TritonOps.why_not(platform, BF16) is None
    x, weight = torch.zeros(tokens, 4096, dtype=BF16), torch.zeros(4096, dtype=BF16)
    ops.add_rms_norm(x, x, weight, 1e-5)
    ops.rms_norm(x.view(tokens, 32, 128), weight[:128], 1e-5)
    ops.rotate(x.view(tokens, 32, 128), torch.zeros(tokens, 64), torch.zeros(tokens, 64))
    ops.gated(torch.zeros(tokens, 2 * 11008, dtype=BF16), "silu")
    ops.gated(torch.zeros(tokens, 2 * 11008, dtype=BF16), "gelu")
    ops.gather(x, torch.zeros(tokens, dtype=torch.int64))


DECODE, PREFILL = [(1, 4096)] * 4, [(512, 512)]


def cases() -> dict[str, Callable[[Platform], None]]:
    """By name: shape of the step, head size, compute and storage types."""

    def case(rows: list[tuple[int, int]], dtype: torch.dtype, stored: torch.dtype, **layer: float) -> partial[None]:
        changed = {name: getattr(LAYER, name) for name in AttentionLayer.__slots__} | layer
        return partial(attend, rows, AttentionLayer(**changed), dtype, stored)

    return {
        "decode 128 bf16": case(DECODE, BF16, BF16),
        "decode 128 fp16 e4m3": case(DECODE, FP16, E4M3),
        "decode 128 bf16 e4m3": case(DECODE, BF16, E4M3),
        "decode 128 bf16 e5m2": case(DECODE, BF16, E5M2),
        "decode 128 bf16 int8": case(DECODE, BF16, INT8),
        "decode 64 fp16": case(DECODE, FP16, FP16, heads=9, kv_heads=3, head_dim=64),
        "decode 80 bf16": case(DECODE, BF16, BF16, heads=32, kv_heads=32, head_dim=80),
        "decode 96 bf16": case(DECODE, BF16, BF16, heads=32, kv_heads=32, head_dim=96),
        "decode 256 bf16 window cap": case(DECODE, BF16, BF16, head_dim=256, sliding_window=1024, soft_cap=50.0),
        "decode 128 fp32": case(DECODE, FP32, FP32),
        "prefill 128 bf16": case(PREFILL, BF16, BF16),
        "prefill 128 fp16 e4m3": case(PREFILL, FP16, E4M3),
        "prefill 128 bf16 e4m3": case(PREFILL, BF16, E4M3),
        "prefill 128 bf16 int8": case(PREFILL, BF16, INT8),
        "prefill 64 fp16": case(PREFILL, FP16, FP16, heads=9, kv_heads=3, head_dim=64),
        "prefill 80 bf16": case(PREFILL, BF16, BF16, heads=32, kv_heads=32, head_dim=80),
        "prefill 256 bf16 window cap": case(PREFILL, BF16, BF16, head_dim=256, sliding_window=1024, soft_cap=50.0),
        "prefill 128 fp32": case(PREFILL, FP32, FP32),
        "elementwise bf16": elementwise,
    }
