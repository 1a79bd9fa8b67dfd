"""Every code by its bits, and every number that has none (V14): alike in all types, formats and lengths."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from octavo import AttentionLayer, KVFormat, KVGeometry, KVScales, LayerKV
from octavo_fp8_kvcache.codes import E4M3, E5M2, LARGEST, encode
from octavo_fp8_kvcache.formats import E4M3KV, E5M2KV, E4M3PerTokenHeadKV, Int8PerTokenHeadKV

FORMATS = [E4M3KV, E5M2KV, E4M3PerTokenHeadKV, Int8PerTokenHeadKV]
STATIC = [E4M3KV, E5M2KV]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYER = AttentionLayer(0, heads=4, kv_heads=2, head_dim=16, scale=0.25)


def decode_e4m3(code: int) -> float:
    """Sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, NaN only where all seven bits are set."""
    sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def decode_e5m2(code: int) -> float:
    """Sign, 5 bits of exponent (bias 15), 2 of mantissa; infinity and NaN as in IEEE types."""
    sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, code >> 2 & 31, code & 3
    if exponent == 31:
        return math.nan if mantissa else sign * math.inf
    return sign * (mantissa / 4 * 2.0**-14 if exponent == 0 else (1 + mantissa / 4) * 2.0 ** (exponent - 15))


def decode_int8(code: int) -> float:
    return float(code - 256 if code > 127 else code)


DECODERS: dict[torch.dtype, Callable[[int], float]] = {
    E4M3: decode_e4m3,
    E5M2: decode_e5m2,
    torch.int8: decode_int8,
}


def made(kind: type[KVFormat], dtype: torch.dtype = torch.float32, scale: float | None = None) -> KVFormat:
    """A format for blocks of 16 tokens, for one layer; `scale` is that of its K, V has twice that."""
    geometry = KVGeometry(1, 2, 16, 16, dtype)
    if scale is None:
        return kind(geometry)
    return kind(geometry, [KVScales(torch.tensor(scale), torch.tensor([2 * scale, 2 * scale]))])


def every_code(kv_format: KVFormat) -> LayerKV:
    """One block whose keys hold all 256 codes, in order, and its values all of them backwards; scales, if any, are 1."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 2, 16, 16)
    tensors = [t.contiguous().view(kv_format.storage) for t in (codes, codes.flip(2, 3))]
    return LayerKV(*tensors, *(torch.ones(1, 2, 16) for _ in range(2 if kv_format.has_scales else 0)))


def same(found: Tensor, expected: Tensor) -> bool:
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FORMATS)
def test_v14_all_256_codes_decode_as_their_bits_say(kind: type[KVFormat], dtype: torch.dtype) -> None:
    kv_format = made(kind, dtype)
    decoder = DECODERS[kv_format.storage]
    largest = torch.finfo(dtype).max  # the infinities of e5m2, which nothing writes, become numbers where they must
    expected = torch.tensor([decoder(code) for code in range(256)])
    if dtype != torch.float32:
        expected = expected.clamp(-largest, largest)
    decoded = kv_format.decode(LAYER, every_code(kv_format), torch.tensor([0]))
    for head in range(2):
        assert same(decoded.key[0, head].flatten().float(), expected)
        assert same(decoded.value[0, head].flatten().float(), expected.flip(0))
    if kv_format.storage == E4M3:
        assert decoded.key[0, 0].flatten().isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]


def test_codes_of_nan_stay_nan_times_a_scale() -> None:
    kv_format = made(E4M3KV, torch.float16, 0.5)
    decoded = kv_format.decode(LAYER, every_code(kv_format), torch.tensor([0])).key[0, 0].flatten()
    assert decoded.isnan().sum() == 2
    assert float(decoded[0x7E]) == 224.0


@pytest.mark.parametrize("storage", list(LARGEST))
def test_every_number_of_a_type_keeps_its_code(storage: torch.dtype) -> None:
    numbers = torch.tensor([DECODERS[storage](code) for code in range(256)])
    usable = numbers.isfinite() & (numbers.abs() <= LARGEST[storage])
    found = encode(numbers, storage).view(torch.uint8)
    assert torch.equal(found[usable], torch.arange(256, dtype=torch.uint8)[usable])


@pytest.mark.parametrize("storage", [E4M3, E5M2])
def test_rounding_is_to_the_nearest_ties_to_even(storage: torch.dtype) -> None:
    numbers = sorted({x for c in range(256) if math.isfinite(x := DECODERS[storage](c))})
    for low, high in pairwise(numbers):
        middle = torch.tensor((low + high) / 2)  # exact in fp32: one bit more than either
        around = torch.stack([torch.nextafter(middle, torch.tensor(x)) for x in (low, high)])
        assert encode(around, storage).float().tolist() == [low, high]
        even = next(x for x in (low, high) if not int(encode(torch.tensor(x), storage).view(torch.uint8)) & 1)
        assert float(encode(middle, storage)) == even


EXTREMES = [1000.0, math.inf, -math.inf, math.nan, 449.0, 464.0, 465.0, -465.0, 1e6, -1e38, 57344.0, 61440.0, 65504.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", STATIC)
@pytest.mark.parametrize("scale", [None, 0.5, 4.0])
def test_v14_numbers_out_of_range_become_the_largest(
    kind: type[KVFormat], dtype: torch.dtype, scale: float | None
) -> None:
    if scale is not None and not kind.uses_scales:
        kv_format, scale = made(kind, dtype), None
    else:
        kv_format = made(kind, dtype, scale)
    limit = LARGEST[kv_format.storage]
    for length in range(1, 66):
        values = torch.tensor((EXTREMES * 6)[:length]).to(dtype)
        stored, read = through(kv_format, values)
        numbers = ~values.isnan()
        assert bool(stored.float()[~numbers].isnan().all()), "NaN must not become a number"
        assert bool(stored.float()[numbers].isfinite().all()), "a code for NaN or infinity was written"
        expected = (values.float() / (scale or 1.0)).clamp(-limit, limit)[numbers]
        assert torch.equal(stored.float()[numbers], reference_round(expected, kv_format.storage))
        largest = torch.finfo(dtype).max
        times = (stored.float() * (scale or 1.0)).clamp(-largest, largest)
        assert same(read.float(), times.to(dtype).float())


def reference_round(values: Tensor, storage: torch.dtype) -> Tensor:
    """The nearest number of the type, by search among all of them; of two as near, the one with the even code."""
    codes = [c for c in range(256) if math.isfinite(DECODERS[storage](c))]
    numbers = torch.tensor([DECODERS[storage](c) for c in codes], dtype=torch.float64)
    distance = (values.double()[:, None] - numbers).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    rank = torch.tensor([c & 1 for c in codes]) + (~nearest) * 2
    return numbers[rank.argmin(1)].float()


def through(kv_format: KVFormat, values: Tensor) -> tuple[Tensor, Tensor]:
    """What is stored and what is read of key values, one a token, in the first component of the second head."""
    tokens = len(values)
    key = torch.zeros(tokens, 2, 16, dtype=values.dtype)
    key[:, 1, 0] = values
    kv = kv_format.allocate(6, "cpu")
    slots = torch.arange(tokens) + 7
    kv_format.write(LAYER, kv, key, key.flip(1), slots)
    block, offset = slots // 16, slots % 16
    decoded = kv_format.decode(LAYER, kv, torch.arange(6))
    return kv.key[block, 1, offset, 0], decoded.key[block, 1, offset, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [E4M3PerTokenHeadKV, Int8PerTokenHeadKV])
def test_v14_a_scale_of_its_own_keeps_extremes_finite(kind: type[KVFormat], dtype: torch.dtype) -> None:
    kv_format = made(kind, dtype)
    for length in (1, 2, 15, 16, 17, 64, 65):
        values = torch.tensor((EXTREMES * 6)[:length]).to(dtype)
        _, read = through(kv_format, values)
        assert bool(read[~values.isnan()].isfinite().all())
        ordinary = values.isfinite()
        assert torch.allclose(read[ordinary].float(), values[ordinary].float(), rtol=1e-2)
        assert bool(read[values.isnan()].isnan().all())
        assert bool((read[values.isinf()].sign() == values[values.isinf()].sign()).all())
        assert bool((read[values.isinf()].abs() > 1e4).all())


def test_one_nan_changes_nothing_else() -> None:
    for kind in FORMATS:
        kv_format = made(kind)
        generator = torch.Generator().manual_seed(0)
        key = torch.randn(3, 2, 16, generator=generator)
        broken = key.clone()
        broken[1, 0, 3] = math.nan
        blocks = []
        for values in (key, broken):
            kv = kv_format.allocate(1, "cpu")
            kv_format.write(LAYER, kv, values, values, torch.tensor([0, 1, 2]))
            blocks.append(kv_format.decode(LAYER, kv, torch.tensor([0])).key[0, :, :3].transpose(0, 1))
        assert bool(blocks[1][1, 0, 3].isnan())
        assert kv_format.has_scales == bool(blocks[1][1, 0].isnan().all()), "a scale is shared by a token's head"
        blocks[1][1, 0] = blocks[0][1, 0]
        assert torch.equal(blocks[0], blocks[1])
