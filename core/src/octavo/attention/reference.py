"""Eager paged attention in torch: the oracle that every other backend is measured against. One request at a time, fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend, AttentionBatch, AttentionLayer, AttentionRequest, LayerKV


class ReferenceAttention(AttentionBackend):
    """Gathers each request's blocks and computes softmax(q k^T) v in fp32. Right everywhere, slow everywhere."""

    name = "reference"
    rank = 0
    loads = frozenset({torch.float32, torch.bfloat16, torch.float16})

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
            first = seq_len - length  # position of the first query
            seen = 0 if layer.sliding_window is None else max(0, first - layer.sliding_window + 1)
            first_block = seen // plan.block_size
            blocks = plan.block_tables[row, first_block : -(-seq_len // plan.block_size)].long()
            window = slice(seen - first_block * plan.block_size, seq_len - first_block * plan.block_size)
            key, value = (
                t[blocks].transpose(0, 1).flatten(1, 2)[:, window].float()  # (kv_heads, positions, head_dim)
                for t in (kv.key, kv.value)
            )
            group = layer.heads // layer.kv_heads
            q = query[start : start + length].float().reshape(length, layer.kv_heads, group, layer.head_dim)
            q = q.permute(1, 2, 0, 3).flatten(1, 2)  # (kv_heads, group * queries, head_dim)
            scores = (q @ key.transpose(1, 2) * layer.scale).view(layer.kv_heads, group, length, -1)
            if layer.soft_cap is not None:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            if length > 1:
                ahead = (
                    torch.arange(seen, seq_len, device=q.device)
                    - torch.arange(first, seq_len, device=q.device)[:, None]
                )
                hidden = ahead > 0
                if layer.sliding_window is not None:
                    hidden |= ahead <= -layer.sliding_window
                scores = scores.masked_fill(hidden, float("-inf"))
            mixed = torch.softmax(scores, dim=-1).flatten(1, 2) @ value
            mixed = mixed.view(layer.kv_heads, group, length, -1).permute(2, 0, 1, 3).flatten(1, 2)
            out[start : start + length] = mixed.to(out.dtype)
            start += length
        return out
