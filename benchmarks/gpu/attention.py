"""Paged attention: right against fp32 on gathered blocks, then bytes of K and V a second, and prefill's operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from frame import Context
from torch import Tensor

from octavo import AttentionBatch, AttentionLayer, AttentionRequest, LayerKV
from octavo_paged_attn_cuda.attention import TritonAttention

PAGE = 16
LAYER = AttentionLayer(0, 32, 8, 128, 128**-0.5)
TINY = AttentionLayer(0, 4, 2, 32, 32**-0.5)


class Memory:
    """A pool of blocks with random codes, in which sequences lie scattered."""

    def __init__(self, context: Context, layer: AttentionLayer, stored: torch.dtype, tokens: int) -> None:
        self.layer, self.stored, self.device = layer, stored, context.device
        self.num_blocks = -(-tokens // PAGE) + 1
        shape = (self.num_blocks, layer.kv_heads, PAGE, layer.head_dim)
        self.kv = LayerKV(*(self._random(shape) for _ in range(2)))

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        blocks = torch.empty(shape, dtype=self.stored, device=self.device)
        for part in blocks.split(4096):  # no second copy in fp32
            part.copy_(torch.randn(part.shape, device=self.device).to(self.stored))
        return blocks

    def step(self, lens: list[int], ends: list[int]) -> AttentionBatch:
        """Requests of `lens` tokens that end at `ends`."""
        width = -(-max(ends) // PAGE)
        order = torch.randperm(self.num_blocks)
        tables = order[torch.arange(len(ends) * width) % self.num_blocks].view(len(ends), width)

        def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.as_tensor(values, dtype=dtype).to(self.device)

        starts = torch.tensor([0, *lens]).cumsum(0)
        slots = torch.zeros(sum(lens), dtype=torch.int64)
        return AttentionBatch(
            *(ints(starts), ints(ends), ints(tables), ints(slots, torch.int64), ints(ends)),
            query_lens_list=lens,
            seq_lens_list=ends,
            block_size=PAGE,
        )


def exact(layer: AttentionLayer, query: Tensor, kv: LayerKV, batch: AttentionBatch, row: int) -> Tensor:
    """Attention of one request in fp32, by gathering its blocks."""
    start, end = (int(batch.query_start_loc[i]) for i in (row, row + 1))
    length, num = batch.seq_lens_list[row], end - start
    blocks = batch.block_tables[row, : -(-length // PAGE)].long()
    key, value = (
        side.view(torch.uint8)[blocks].view(side.dtype).float().transpose(1, 2).flatten(0, 1)[:length]
        if side.itemsize == 1
        else side[blocks].float().transpose(1, 2).flatten(0, 1)[:length]
        for side in (kv.key, kv.value)
    )
    group = layer.heads // layer.kv_heads
    asked = query[start:end].float().view(num, layer.kv_heads, group, -1)
    scores = torch.einsum("qhgd,khd->hgqk", asked, key) * layer.scale
    hidden = (
        torch.arange(length, device=query.device) > torch.arange(length - num, length, device=query.device)[:, None]
    )
    shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", shares, value).reshape(num, layer.heads, -1)


def run(context: Context) -> list[dict[str, Any]]:
    layer = TINY if context.tiny else LAYER
    rows = []
    for name, stored in {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}.items():
        most = 64 if context.tiny else (2**20 if context.quick else 2**21)
        memory = Memory(context, layer, stored, most)
        request = AttentionRequest([layer], torch.bfloat16, PAGE, stored, context.platform)
        if (reason := TritonAttention.why_not(request)) is not None:
            return [{"what": f"left out: {reason}"}]
        backend = TritonAttention(request)
        for lens, ends in steps(context, most):
            rows.append(measured(context, backend, memory, lens, ends, name))
    bf16 = {row["what"]: row["us"] for row in rows if row["KV"] == "bf16"}
    for row in rows:
        if row["KV"] == "e4m3":
            row["times bf16's speed"] = bf16[row["what"]] / row["us"]
    return rows


def steps(context: Context, most: int) -> Iterator[tuple[list[int], list[int]]]:
    """query_lens and seq_lens: decode, decode of unlike lengths, prefill, a chunk of a long prompt, both mixed."""
    if context.tiny:
        yield from (([1, 1], [17, 20]), ([20], [20]), ([1, 5], [33, 20]))
        return
    batches, contexts = ((1, 16, 64), (1024, 8192)) if context.quick else ((1, 4, 16, 64, 256), (1024, 8192, 32768))
    for batch, length in product(batches, contexts):
        if batch * length <= most:
            yield [1] * batch, [length] * batch
    yield [1] * 32, [512 * (1 + i) for i in range(32)]
    yield [8192], [8192]
    yield [512], [16384]
    yield [1] * 63 + [1024], [4096] * 64


def measured(
    context: Context, backend: TritonAttention, memory: Memory, lens: list[int], ends: list[int], stored: str
) -> dict[str, Any]:
    layer = memory.layer
    batch = memory.step(lens, ends)
    query = torch.randn(sum(lens), layer.heads, layer.head_dim, device=context.device).to(torch.bfloat16)
    plan = backend.plan(batch)
    found = backend.forward(layer, query, memory.kv, plan)
    row = max(range(len(lens)), key=lambda i: lens[i])
    start = sum(lens[:row])
    near = min(lens[row], 256)  # the last queries: the whole matrix of scores would not fit
    tail = replace(batch, query_start_loc=batch.query_start_loc.clone())
    tail.query_start_loc[row] = start + lens[row] - near
    wanted = exact(layer, query, memory.kv, tail, row)
    error = float(
        (found[start + lens[row] - near : start + lens[row]].float() - wanted).abs().max() / wanted.abs().max()
    )
    seconds = context.measure(lambda: backend.forward(layer, query, memory.kv, plan))
    key_bytes = 2 * layer.kv_heads * layer.head_dim * memory.kv.key.itemsize
    operations = sum(
        4 * layer.heads * layer.head_dim * n * (end - (n - 1) / 2) for n, end in zip(lens, ends, strict=True)
    )
    kind = "decode" if max(lens) == 1 else "prefill" if len(lens) == 1 else "mixed"
    shape = f"{len(lens)} x {ends[0] if len(set(ends)) == 1 else f'{min(ends)}-{max(ends)}'}"
    result = {"what": f"{kind} {shape}", "KV": stored, "right": error < 0.02, "error": error, "us": seconds * 1e6}
    if kind == "decode":
        rate = sum(ends) * key_bytes / seconds / 1e9
        return result | {"GB/s": rate, "of copy": rate / context.ceilings.copy}
    rate = operations / seconds / 1e12
    return result | {"TFLOP/s": rate, "of matmul": rate / context.ceilings.matmul}
