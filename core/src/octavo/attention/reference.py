"""Eager paged attention in torch: the oracle that every other backend is measured against. One request at a time, fp32.

Keys and values are multiplied in tiles that lie at fixed positions of the sequence and are summed in order, so a token's bits
depend neither on the chunk that it is computed in nor on how far the sequence has got.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend, AttentionBatch, AttentionLayer, AttentionRequest, LayerKV
from octavo.product import row_product

_TILE = 128  # positions; a short sequence computes as many


class ReferenceAttention(AttentionBackend):
    """Gathers each request's blocks and computes softmax(q k^T) v in fp32. Right everywhere, slow everywhere."""

    name = "reference"
    rank = 0
    loads = frozenset({torch.float32, torch.bfloat16, torch.float16})
    batch_invariant = True

    def __init__(self, request: AttentionRequest) -> None:
        pass

    @classmethod
    def why_not(cls, request: AttentionRequest) -> str | None:
        return None

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def forward(self, layer: AttentionLayer, query: Tensor, kv: LayerKV, plan: AttentionBatch) -> Tensor:
        out = torch.empty_like(query)
        start = 0
        for row, (length, seq_len) in enumerate(zip(plan.query_lens_list, plan.seq_lens_list, strict=True)):
            part = slice(start, start + length)
            out[part] = self._attend(layer, query[part].float(), kv, plan, row, seq_len).to(out.dtype)
            start += length
        return out

    def _attend(
        self, layer: AttentionLayer, query: Tensor, kv: LayerKV, plan: AttentionBatch, row: int, seq_len: int
    ) -> Tensor:
        """The queries (queries, heads, head_dim) of one request, fp32, its last at position seq_len - 1."""
        num, group = len(query), layer.heads // layer.kv_heads
        first = seq_len - num  # position of the first query
        seen = 0 if layer.sliding_window is None else max(0, first - layer.sliding_window + 1)
        begin = seen // _TILE * _TILE
        keys, values = (_tiles(stored, plan, row, seen, seq_len) for stored in (kv.key, kv.value))
        rows = query.view(num, layer.kv_heads, group, layer.head_dim).permute(1, 2, 0, 3).flatten(1, 2)
        products = [row_product(rows, key.transpose(1, 2)) for key in keys]
        scores = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        scores = scores.view(layer.kv_heads, group, num, -1) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        if num == 1:
            scores[..., : seen - begin] = float("-inf")
            scores[..., seq_len - begin :] = float("-inf")
        else:
            columns = torch.arange(begin, begin + scores.shape[-1], device=query.device)
            ahead = columns - torch.arange(first, seq_len, device=query.device)[:, None]
            hidden = ahead > 0
            if layer.sliding_window is not None:
                hidden |= ahead <= -layer.sliding_window
            scores = scores.masked_fill(hidden, float("-inf"))
        shares = scores.sub_(scores.amax(-1, keepdim=True)).exp_().view(layer.kv_heads, group * num, -1, _TILE)
        totals = shares.sum(-1)
        total, mixed = totals[..., 0], row_product(shares[:, :, 0], values[0])
        for tile in range(1, len(values)):  # a tile that is hidden from a query adds zeros
            total = total + totals[..., tile]
            mixed = mixed + row_product(shares[:, :, tile], values[tile])
        mixed = (mixed / total[..., None] + 0.0).view(layer.kv_heads, group, num, -1)  # whether -0 or 0 was added to
        return mixed.permute(2, 0, 1, 3).flatten(1, 2)


def _tiles(stored: Tensor, plan: AttentionBatch, row: int, seen: int, seq_len: int) -> tuple[Tensor, ...]:
    """The positions seen ... seq_len - 1 of a request, fp32, in tiles (kv_heads, _TILE, head_dim): zeros before and after."""
    size, first, begin = plan.block_size, seen // plan.block_size, seen // _TILE * _TILE
    blocks = stored[plan.block_tables[row, first : -(-seq_len // size)]].transpose(0, 1).flatten(1, 2)
    end = -(-seq_len // _TILE) * _TILE
    whole = stored.new_zeros(stored.shape[1], end - begin, stored.shape[3], dtype=torch.float32)
    whole[:, seen - begin : seq_len - begin] = blocks[:, seen - first * size : seq_len - first * size]
    return whole.view(len(whole), -1, _TILE, whole.shape[2]).unbind(1)
