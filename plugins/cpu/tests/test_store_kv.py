"""K and V into their slots: the same numbers as torch's casts, bit for bit, and nothing else touched."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

native = pytest.importorskip("octavo_cpu._native")

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
LARGEST = [math.inf, 65504.0, torch.finfo(torch.bfloat16).max, 448.0, 57344.0, 127.0]


@pytest.fixture(autouse=True, params=native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs each test on one instruction set."""
    before, threads = native.isa(), native.threads()
    native.set_isa(request.param)
    torch.manual_seed(0)
    yield request.param
    native.set_isa(before)
    native.set_threads(threads)


def hard_numbers(tokens: int, kv_heads: int, head_dim: int) -> Tensor:
    """Numbers of every size, ties, subnormals, what is beyond each type's range, infinity and NaN."""
    x = torch.randn(tokens, kv_heads, head_dim) * torch.exp2(
        torch.randint(-24, 18, (tokens, kv_heads, head_dim)).float()
    )
    kinds = torch.randint(12, x.shape)
    x = torch.where(kinds == 0, x.to(torch.float8_e4m3fn).float() * 1.0625, x)  # halfway between codes, now and then
    x = torch.where(kinds == 1, x.to(torch.float8_e5m2).float() * 1.125, x)
    x = torch.where(kinds == 2, x * 1e30, x)
    x = torch.where(kinds == 3, torch.randint(-40, 40, x.shape).float() / 2 ** torch.randint(18, x.shape), x)
    x.view(-1)[:11] = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 464.0, 480.0, 65520.0, 61440.0, 3.4e38, 1e-45]
    )
    return x


def encoded(x: Tensor, storage: int) -> Tensor:
    """As octavo's KV formats cast."""
    if storage == 0:
        return x
    limited = x.clamp(-LARGEST[storage], LARGEST[storage])
    return limited.nan_to_num().round().to(torch.int8) if storage == 5 else limited.to(TYPES[storage])


def bits(x: Tensor) -> Tensor:
    """With one pattern for all NaN."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize]
    return x.view(whole) if x.dtype == torch.int8 else torch.where(x.float().isnan(), 77, x.view(whole))


KINDS = [(storage, "none", 0) for storage in range(6)] + [(storage, "static", 0) for storage in (3, 4, 5)]
KINDS += [(storage, "head", scale_storage) for storage in (3, 4, 5) for scale_storage in (0, 1, 2)]


@pytest.mark.parametrize(("storage", "scales", "scale_storage"), KINDS)
@pytest.mark.parametrize("head_dim", [64, 19, 3])
def test_store(storage: int, head_dim: int, scales: str, scale_storage: int) -> None:
    tokens, kv_heads, size = 45, 3, 5
    sides = [hard_numbers(tokens, kv_heads, head_dim) for _ in range(2)]
    sides[1][3, 1], sides[1][4, 0, 1] = 0.0, math.nan
    static = [torch.rand(kv_heads) + 0.1 for _ in range(2)]
    slots = torch.randperm(20 * size)[:tokens]
    at = slots // size, slots % size
    rows = []
    for side in sides:  # parts of a fused q|k|v
        memory = torch.full((tokens, kv_heads * head_dim + 9), math.nan)
        memory[:, 4:-5] = side.view(tokens, -1)
        rows.append(memory)
    found = []
    for threads in (1, 2, 3):
        native.set_threads(threads)
        blocks = [torch.full((20, kv_heads, size, head_dim), 3).to(TYPES[storage]) for _ in range(2)]
        heads = [torch.full((20, kv_heads, size), 3).to(TYPES[scale_storage]) for _ in range(2)]
        kv = native.KVBlocks(
            *(storage, blocks[0].data_ptr(), blocks[1].data_ptr(), scale_storage),
            *(heads[0].data_ptr() if scales == "head" else 0, heads[1].data_ptr() if scales == "head" else 0),
            *(static[0].data_ptr() if scales == "static" else 0, static[1].data_ptr() if scales == "static" else 0),
        )
        batch = native.Batch(1, tokens, size, 0, 0, 0, 0, slots.data_ptr())
        attention = native.Attention(kv_heads, kv_heads, head_dim, 1.0, 0, 0.0)
        stride = rows[0].stride(0)
        native.store_kv(attention, kv, batch, rows[0][:, 4:].data_ptr(), stride, rows[1][:, 4:].data_ptr(), stride)
        found.append((blocks, heads))
    for side, blocks, heads, fixed in zip(sides, *found[0], static, strict=True):
        wanted = torch.full_like(heads, 3), torch.full((20, kv_heads, size, head_dim), 3).to(TYPES[storage])
        if scales == "head":
            numbers = side.clamp(-(2.0**127), 2.0**127)
            scale = (numbers.abs().amax(-1) / LARGEST[storage]).clamp(min=1e-6)
            wanted[0][at[0], :, at[1]] = encoded(scale, scale_storage)
            codes = encoded(numbers / scale[..., None], storage)
        else:
            codes = encoded(side / fixed[:, None] if scales == "static" else side, storage)
        whole = wanted[1].view(torch.uint8) if codes.itemsize == 1 else wanted[1]
        whole[at[0], :, at[1]] = codes.view(torch.uint8) if codes.itemsize == 1 else codes
        assert torch.equal(bits(blocks), bits(wanted[1]))
        assert torch.equal(bits(heads), bits(wanted[0]))
    for blocks, heads in found[1:]:
        for first, second in zip((*found[0][0], *found[0][1]), (*blocks, *heads), strict=True):
            assert torch.equal(bits(first), bits(second))
