"""Scales: those that are computed, those that are given, and what a block takes."""

import pytest
import torch

from octavo import AttentionLayer, KVGeometry, KVScales, PlainKV
from octavo_fp8_kvcache.formats import E4M3KV, E5M2KV, E4M3PerTokenHeadKV, Int8PerTokenHeadKV

GEOMETRY = KVGeometry(2, 2, 16, 4, torch.float32)
LAYERS = [AttentionLayer(index, heads=6, kv_heads=2, head_dim=16, scale=0.25) for index in range(2)]
SLOTS = torch.tensor([9, 2, 5])


def values(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(seed))


def test_a_written_example() -> None:
    """K = 3.0 at scale 0.01: 300 lies between the codes 0x79 (288) and 0x7A (320), and 288 is read as 2.88."""
    kv_format = E4M3KV(GEOMETRY, [KVScales(torch.tensor(0.01), torch.tensor(0.01))] * 2)
    kv = kv_format.allocate(3, "cpu")
    three = torch.full((1, 2, 16), 3.0)
    kv_format.write(LAYERS[0], kv, three, three, torch.tensor([6]))
    assert int(kv.key.view(torch.uint8)[1, 0, 2, 0]) == 0x79
    assert float(kv_format.decode(LAYERS[0], kv, torch.tensor([1])).value[0, 1, 2, 5]) == pytest.approx(2.88)


@pytest.mark.parametrize("kind", [E4M3PerTokenHeadKV, Int8PerTokenHeadKV])
def test_each_token_and_head_has_the_scale_of_its_largest_number(kind: type[E4M3PerTokenHeadKV]) -> None:
    kv_format = kind(GEOMETRY)
    kv = kv_format.allocate(3, "cpu")
    key, value = values(), values(1) * 30
    key[1, 0] = 0
    kv_format.write(LAYERS[0], kv, key, value, SLOTS)
    largest = 448 if kv_format.storage.is_floating_point else 127
    assert kv.key_scale is not None
    assert kv.value_scale is not None
    for scales, given in ((kv.key_scale, key), (kv.value_scale, value)):
        assert scales.shape == (3, 2, 4)
        assert scales.dtype is torch.float32
        found = scales[SLOTS // 4, :, SLOTS % 4]
        assert torch.allclose(found, (given.abs().amax(-1) / largest).clamp(min=1e-6), rtol=1e-6)
    assert kv.key_scale[0, 0, 2] == pytest.approx(1e-6), "a head of zeros"
    codes = kv.value.float()[SLOTS // 4, :, SLOTS % 4].abs().amax(-1)
    assert (codes == largest).all(), "the largest number has the largest code"


def test_scales_are_a_layers_own_and_a_sides_own() -> None:
    scales = [
        KVScales(torch.tensor(0.5), torch.tensor(2.0)),
        KVScales(torch.tensor([0.25, 4.0]), torch.tensor([1.0, 8.0])),
    ]
    scaled, plain = E4M3KV(GEOMETRY, scales), E4M3KV(GEOMETRY)
    for layer, one in zip(LAYERS, scales, strict=True):
        kv, expected = scaled.allocate(3, "cpu"), plain.allocate(3, "cpu")
        scaled.write(layer, kv, values(), values(1), SLOTS)
        plain.write(layer, expected, values() / one.k.reshape(-1, 1), values(1) / one.v.reshape(-1, 1), SLOTS)
        assert torch.equal(kv.key.view(torch.uint8), expected.key.view(torch.uint8))
        assert torch.equal(kv.value.view(torch.uint8), expected.value.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_query_heads_fold_the_scale_of_the_kv_head_that_they_read(dtype: torch.dtype) -> None:
    scales = [
        KVScales(torch.tensor(0.5), torch.tensor(2.0)),
        KVScales(torch.tensor([0.25, 4.0]), torch.tensor([1.0, 8.0])),
    ]
    kv_format = E4M3KV(GEOMETRY, scales)
    query = torch.randn(5, 6, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    folded = kv_format.fold(LAYERS[1], query)
    assert folded.dtype is dtype
    assert torch.equal(folded[:, :3], query[:, :3] * 0.25)
    assert torch.equal(folded[:, 3:], query[:, 3:] * 4.0)
    assert torch.equal(kv_format.unfold(LAYERS[1], query)[:, 3:], query[:, 3:] * 8.0)
    assert torch.equal(kv_format.fold(LAYERS[0], query), query * 0.5)
    assert torch.equal(kv_format.unfold(LAYERS[0], query), query * 2.0)
    for plain in (E4M3KV(GEOMETRY), E5M2KV(GEOMETRY), E4M3PerTokenHeadKV(GEOMETRY)):
        assert plain.fold(LAYERS[0], query) is plain.unfold(LAYERS[0], query) is query


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tokens_held_in_the_same_bytes(head_dim: int) -> None:
    """Against 16 bits: 2.00 times; with scales per token and head 1.88 times at head_dim 64, 1.94 times at 128."""
    geometry = KVGeometry(30, 3, head_dim, 16, torch.bfloat16)
    plain = PlainKV(geometry).bytes_per_block()
    held = {kind.name: plain / kind(geometry).bytes_per_block() for kind in (E4M3KV, E5M2KV)}
    assert held == {"fp8_e4m3": 2.0, "fp8_e5m2": 2.0}
    for kind in (E4M3PerTokenHeadKV, Int8PerTokenHeadKV):
        assert plain / kind(geometry).bytes_per_block() == pytest.approx(2 * head_dim / (head_dim + 4))
