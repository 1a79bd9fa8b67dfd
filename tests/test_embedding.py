"""Rows of quantised embeddings: what a lookup gives equals the rows of the whole table, dequantised."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo import QuantizedWeight, WeightSpec
from octavo.model.embedding import Embedding
from octavo.testing.weights import random_weight

IDS = torch.tensor([0, 46, 3, 3, 17])


@pytest.mark.parametrize(
    "spec",
    [
        WeightSpec("uint4", (1, 32), has_zeros=True),
        WeightSpec("uint4", (1, 32), has_zeros=True, act_order=True),
        WeightSpec("int8", (1, 32)),
        WeightSpec("int8", (1, -1)),
        WeightSpec("int8", (-1, -1)),
        WeightSpec("int6", (1, 16)),
        WeightSpec("fp8_e4m3", (16, 16)),
        WeightSpec("uint4", (3, 5), has_zeros=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q52_rows_equal_those_of_the_dequantised_table(spec: WeightSpec, dtype: torch.dtype) -> None:
    weight = random_weight(spec, 47, 80, torch.Generator().manual_seed(3))
    embedding = Embedding(weight, dtype)
    rows = embedding(IDS)
    assert rows.dtype == dtype
    assert torch.equal(rows, weight.dequantize(dtype)[IDS])
    assert embedding(IDS[:0]).shape == (0, 80)


def test_a_plain_table_and_its_memory() -> None:
    table = torch.randn(47, 80)
    embedding = Embedding(QuantizedWeight.from_float(table), torch.float32)
    assert torch.equal(embedding(IDS), table[IDS])
    assert sum(buffer.numel() for buffer in embedding.buffers()) == table.numel()
    quantised = Embedding(
        replace(random_weight(WeightSpec("int8"), 47, 80, torch.Generator()), bias=None), torch.float32
    )
    assert {name for name, _ in quantised.named_buffers()} == {"codes", "scales"}
