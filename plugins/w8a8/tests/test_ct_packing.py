"""Bits: both packings against written words and independent decoders, for every width."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import CheckpointError, LinearLayer, QuantizedWeight, QuantSource, WeightSpec
from octavo_w8a8.compressed_tensors import CompressedTensorsConfig
from octavo_w8a8.goldens import goldens, optional_zeros, words
from octavo_w8a8.goldens import settings as config_of
from octavo_w8a8.packing import fits, num_words, pack, unpack

WIDTHS = range(1, 9)


def signed(values, bits):
    return (torch.tensor([values]) + 2 ** (bits - 1)).to(torch.uint8)


@pytest.mark.parametrize(
    ("codes", "bits", "expected"),
    [
        (list(range(-8, 8)), 4, [0x76543210, 0xFEDCBA98]),
        ([-128, -1, 0, 127], 8, [0xFF807F00]),
        ([0] * 12, 4, [0x88888888, 0x00008888]),
        ([i % 8 - 4 for i in range(32)], 3, [0x88FAC688, 0xC688FAC6, 0xFAC688FA]),
    ],
)
def test_words_of_the_reference_packer(codes, bits, expected):
    assert torch.equal(pack(signed(codes, bits), bits), words([expected]))
    assert torch.equal(unpack(words([expected]), bits, len(codes)), signed(codes, bits))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_q39_a_single_column_of_any_stride(bits):
    """Few outputs and many groups: one word each, transposed, which torch calls contiguous."""
    packed = pack(torch.arange(5 * (32 // bits)).remainder(2**bits).to(torch.uint8).reshape(5, -1), bits)[:, :1]
    turned = packed.reshape(1, 5).clone().T
    assert turned.stride(-1) == 5
    assert torch.equal(unpack(turned, bits, 32 // bits), unpack(packed.clone(), bits, 32 // bits))


def test_words_of_the_old_packing():
    old = words([[0x08FAC688, 0x1A23EB1A, 0x2C688FAC, 0x0000003E]])
    codes = signed([i % 8 - 4 for i in range(32)], 3)
    assert torch.equal(unpack(old, 3, 32, dense=False), codes)
    assert torch.equal(pack(codes, 3, dense=False), old)


def test_zero_points_are_packed_along_the_outputs():
    zeros = torch.full((2, 12), 8, dtype=torch.uint8)  # (groups, outputs)
    assert pack(zeros[:, :8], 4).T.shape == (1, 2)
    assert torch.equal(pack(zeros, 4).T[:, 0], words([[0x88888888, 0x00008888]])[0])


@settings(max_examples=100, deadline=None)
@given(
    bits=st.sampled_from(WIDTHS),
    count=st.integers(1, 130),
    dense=st.booleans(),
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 5),
)
def test_packing_and_back(bits, count, dense, seed, rows):
    codes = torch.randint(0, 2**bits, (rows, count), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = pack(codes, bits, dense)
    assert packed.dtype == torch.int32
    assert packed.shape == (rows, num_words(count, bits, dense))
    assert torch.equal(unpack(packed, bits, count, dense), codes)
    assert fits(packed, bits, count, dense)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dense", [True, False])
def test_independent_decoder_agrees(bits, dense, oracle):
    for count in (1, 12, 31, 32, 40, 96):
        codes = torch.randint(0, 2**bits, (3, count), dtype=torch.uint8)
        found = oracle.ct_codes(pack(codes, bits, dense).numpy(), bits, count, dense)
        assert np.array_equal(found + 2 ** (bits - 1), codes.numpy())


# --- layers in either packing


def old_and_new(bits, in_features, out_features, group, symmetric=False):
    """A layer's tensors in the padded and in the dense packing, and its signed zero points."""
    weights = {"num_bits": bits, "symmetric": symmetric, "group_size": group}
    config = CompressedTensorsConfig.parse(QuantSource(config_of("pack-quantized", weights), "test"))
    layer = LinearLayer("model.layers.0.mlp.up_proj", in_features, out_features)
    generator = torch.Generator().manual_seed(bits)
    zeros = torch.randint(0, 2**bits, (out_features, in_features // group), generator=generator).float()
    weight = QuantizedWeight(
        WeightSpec(f"uint{bits}", (1, group), has_zeros=True),
        torch.randint(0, 2**bits, (out_features, in_features), generator=generator, dtype=torch.uint8),
        torch.rand(zeros.shape, generator=generator).half(),
        torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros,
    )
    new = config.serialise(layer, weight)
    old = {**new, "weight_packed": pack(weight.codes, bits, dense=False)}
    if not symmetric:
        old["weight_zero_point"] = pack(weight.zeros.T.to(torch.uint8), bits, dense=False).T.contiguous()
    return config, layer, weight, old, new


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("out_features", [40, 64])
def test_q17_both_packings_are_told_apart_by_columns(bits, out_features, headers, oracle):
    config, layer, weight, old, new = old_and_new(bits, 64, out_features, 32)
    for tensors in (old, new):
        assert config.spec_for(layer, headers(tensors)) == weight.spec
        back = config.canonicalise(layer, tensors)
        assert torch.equal(back.codes, weight.codes)
        assert torch.equal(back.zeros, weight.zeros)
        arrays = {s: (t if t.dtype != torch.float16 else t.float()).numpy() for s, t in tensors.items()}
        expected = oracle.ct_pack(
            arrays["weight_packed"], arrays["weight_scale"], (out_features, 64), bits, arrays["weight_zero_point"]
        )
        assert np.array_equal(back.dequantize().numpy(), expected)


def test_q17_zero_points_follow_the_packing_of_the_weights():
    """40 outputs of 3 bits take 4 rows in either packing: only the weights can tell."""
    config, layer, weight, old, new = old_and_new(3, 64, 40, 32)
    assert old["weight_zero_point"].shape == new["weight_zero_point"].shape
    assert not torch.equal(old["weight_zero_point"], new["weight_zero_point"])
    assert torch.equal(config.canonicalise(layer, old).zeros, weight.zeros)
    assert torch.equal(config.canonicalise(layer, new).zeros, weight.zeros)


def test_q17_a_mixture_of_packings_is_refused():
    config, layer, _, old, new = old_and_new(3, 64, 64, 32)
    with pytest.raises(CheckpointError, match="weight_zero_point is packed in another way") as caught:
        config.canonicalise(layer, {**new, "weight_zero_point": old["weight_zero_point"]})
    assert "expected: 6 rows of torch.int32" in str(caught.value)
    assert "found: 7 rows" in str(caught.value)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_q17_equal_columns_are_told_apart_by_unused_bits(bits):
    count = next(n for n in range(32 // bits + 1, 32) if num_words(n, bits, True) == num_words(n, bits, False))
    config, layer, weight, old, new = old_and_new(bits, count, 64, count)
    assert old["weight_packed"].shape == new["weight_packed"].shape
    for tensors in (old, new):
        assert torch.equal(config.canonicalise(layer, tensors).codes, weight.codes)


def test_q17_words_that_fit_both_packings_are_refused():
    config, layer, _, old, _ = old_and_new(3, 20, 8, 20, symmetric=True)
    ambiguous = words([[0x00000001, 0x00000002]] * 8)
    with pytest.raises(CheckpointError, match="both fit these words") as caught:
        config.canonicalise(layer, {**old, "weight_packed": ambiguous})
    assert layer.name in str(caught.value)
    with pytest.raises(CheckpointError, match="neither fits these words"):
        config.canonicalise(layer, {**old, "weight_packed": words([[0xFFFFFFFF, 0xFFFFFFFF]] * 8)})
    same = config.canonicalise(layer, {**old, "weight_packed": torch.zeros(8, 2, dtype=torch.int32)})
    assert not same.codes.any()


# --- goldens

GOLDENS = [*goldens(), *optional_zeros()]


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda g: f"{g.settings['format']}-{tuple(g.weight.shape)}")
def test_goldens_decode_and_encode_to_themselves(golden, headers, same_bits):
    config = CompressedTensorsConfig.parse(QuantSource(golden.settings, "golden"))
    layer = LinearLayer("model.layers.0.mlp.up_proj", golden.weight.shape[1], golden.weight.shape[0])
    weight = config.canonicalise(layer, golden.tensors)
    weight.check(layer)
    assert config.spec_for(layer, headers(golden.tensors)) == weight.spec
    assert torch.equal(weight.dequantize(), golden.weight)
    again = config.serialise(layer, weight)
    assert again.keys() == golden.tensors.keys()
    assert all(same_bits(again[suffix], tensor) for suffix, tensor in golden.tensors.items())


@pytest.mark.parametrize(
    "golden", [g for g in GOLDENS if "weight_packed" in g.tensors], ids=lambda g: str(tuple(g.weight.shape))
)
def test_packed_goldens_agree_with_an_independent_decoder(golden, oracle):
    (group,) = golden.settings["config_groups"].values()
    arrays = {s: (t.float() if t.is_floating_point() else t).numpy() for s, t in golden.tensors.items()}
    scale = np.broadcast_to(arrays["weight_scale"], (golden.weight.shape[0], arrays["weight_scale"].shape[-1]))
    found = oracle.ct_pack(
        arrays["weight_packed"],
        scale,
        tuple(golden.weight.shape),
        group["weights"]["num_bits"],
        arrays.get("weight_zero_point"),
        arrays.get("weight_g_idx"),
    )
    assert np.array_equal(found, golden.weight.numpy())
