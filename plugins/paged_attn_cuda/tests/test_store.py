"""K and V into their slots: the same bits as the casts of octavo's KV formats, and nothing else touched."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octavo import AttentionLayer, KVEncoding, LayerKV

pytest.importorskip("triton")

from octavo_paged_attn_cuda.attention import store_kv
from octavo_paged_attn_cuda.support import interpreted

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="kernels are not interpreted here"),
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value) encountered:RuntimeWarning"
    ),  # numpy's, of hard numbers
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0, torch.int8: 127.0}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
TOKENS, KV_HEADS, PAGE, BLOCKS = 9, 3, 5, 6


def hard_numbers(head_dim: int, dtype: torch.dtype) -> Tensor:
    """Numbers of every size, ties, subnormals, what is beyond each type's range, infinity and NaN."""
    shape = (TOKENS, KV_HEADS, head_dim)
    x = torch.randn(shape) * torch.exp2(torch.randint(-24, 18, shape).float())
    kinds = torch.randint(12, shape)
    x = torch.where(kinds == 0, x.to(E4M3).float() * 1.0625, x)  # halfway between codes, now and then
    x = torch.where(kinds == 1, x.to(E5M2).float() * 1.125, x)
    x = torch.where(kinds == 2, x * 1e30, x)
    x = torch.where(kinds == 3, torch.randint(-40, 40, shape).float() / 2 ** torch.randint(18, shape), x)
    x.view(-1)[:11] = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 464.0, 480.0, 65520.0, 61440.0, 3.4e38, 1e-45]
    )
    return x.to(dtype)


def cast(numbers: Tensor, storage: torch.dtype) -> Tensor:
    """As octavo's KV formats cast: numbers are fp32, or of the type in which they were computed."""
    largest = LARGEST.get(storage) or torch.finfo(storage).max
    if storage not in LARGEST and largest >= torch.finfo(numbers.dtype).max:
        return numbers.to(storage)
    limited = numbers.float().clamp(-largest, largest)
    return limited.nan_to_num().round().to(torch.int8) if storage == torch.int8 else limited.to(storage)


def bits(x: Tensor) -> Tensor:
    """With one pattern for all NaN."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize]
    return x.view(whole) if x.dtype == torch.int8 else torch.where(x.float().isnan(), 77, x.view(whole))


KINDS = [(storage, "none") for storage in (*FLOATS, *LARGEST)]
KINDS += [(storage, scales) for storage in LARGEST for scales in ("layer", "head", "token")]


@pytest.mark.parametrize(("storage", "scales"), KINDS, ids=lambda value: str(value).removeprefix("torch."))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_stored(storage: torch.dtype, scales: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head_dim = {torch.float32: 19, torch.float16: 64, torch.bfloat16: 16}[dtype]
    sides = [hard_numbers(head_dim, dtype) for _ in range(2)]
    sides[1][3, 1], sides[1][4, 0, 1] = 0.0, math.nan
    count = 1 if scales == "layer" else KV_HEADS
    static = [torch.rand(count) + 0.1 for _ in range(2)]
    slots = torch.randperm(BLOCKS * PAGE)[:TOKENS]
    at = slots // PAGE, slots % PAGE
    slots[-1] = -1  # padding of a captured step
    fused = torch.cat([side.flatten(1) for side in sides], dim=1)
    key, value = fused.unflatten(1, (2 * KV_HEADS, head_dim)).split(KV_HEADS, dim=1)

    blocks = [torch.full((BLOCKS, KV_HEADS, PAGE, head_dim), 3.0).to(storage) for _ in range(2)]
    own = [torch.full((BLOCKS, KV_HEADS, PAGE), 3.0) for _ in range(2)]
    by_token = scales == "token"
    kv = LayerKV(*blocks, *own) if by_token else LayerKV(*blocks)
    encoding = KVEncoding(
        storage,
        LARGEST.get(storage) or torch.finfo(storage).max,
        *(static if scales in ("layer", "head") else (None, None)),
        smallest_scale=1e-6 if by_token else None,
    )
    store_kv(AttentionLayer(0, 6, KV_HEADS, head_dim, 1.0), key, value, kv, encoding, slots)

    for side, found, scale_found, fixed in zip(sides, blocks, own, static, strict=True):
        wanted = torch.full_like(found.float(), 3.0).to(storage)
        scale_wanted = torch.full_like(scale_found, 3.0)
        if by_token:
            limit = min(torch.finfo(dtype).max, 2.0**127)
            numbers = side.float().clamp(-limit, limit)
            scale = (numbers.abs().amax(-1) / LARGEST[storage]).clamp(min=1e-6)
            scale_wanted[at[0][:-1], :, at[1][:-1]] = scale[:-1]
            codes = cast(numbers / scale[..., None], storage)
        else:
            codes = cast(side if scales == "none" else side.float() / fixed[:, None], storage)
        whole, codes = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (wanted, codes))
        whole[at[0][:-1], :, at[1][:-1]] = codes[:-1]
        assert torch.equal(bits(scale_found), bits(scale_wanted))
        assert torch.equal(bits(found), bits(wanted))
