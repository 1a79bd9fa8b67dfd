"""The table of token embeddings: plain, or quantised and dequantised row by row as tokens ask for them."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.quant.weight import QuantizedWeight


class Embedding(nn.Module):
    """Token ids (tokens,) int64 -> rows (tokens, hidden_size) in `dtype`. The weight is (vocab_size, hidden_size)."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.weight = dtype, weight
        for name in ("codes", "scales", "zeros", "group_index"):  # so that their memory counts as the module's
            self.register_buffer(name, getattr(weight, name))

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.weight.spec.is_float:
            return F.embedding(token_ids, self.weight.codes).to(self.dtype)
        out_group = self.weight.spec.group_shape[0]
        groups = torch.zeros_like(token_ids) if out_group == -1 else token_ids // out_group

        def pick(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[groups]

        rows = replace(
            self.weight,
            spec=replace(self.weight.spec, group_shape=(1, self.weight.spec.group_shape[1])),
            codes=self.weight.codes[token_ids],
            scales=pick(self.weight.scales),
            zeros=pick(self.weight.zeros),
        )
        return rows.dequantize(self.dtype)
