"""The bits: nibble orders (V06), round trips of every layout, and agreement with decoders written by others."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from octavo import LinearLayer, QuantizedWeight, QuantSource, WeightSpec
from octavo_awq.config import AWQConfig
from octavo_awq.layouts import (
    GEMM_ORDER,
    LAYOUTS,
    SEQUENTIAL,
    pack_interleaved,
    pack_words,
    padded_words,
    unpack_interleaved,
    unpack_words,
)

GOLDENS = AWQConfig.goldens()
GOLDEN_IDS = [
    f"{g.settings.get('version', 'llm-awq')}-{'asym' if g.settings['zero_point'] else 'sym'}" for g in GOLDENS
]


def same_bits(left, right):
    as_integers = {2: torch.int16, 4: torch.int32}[left.itemsize]
    return left.dtype == right.dtype and torch.equal(left.view(as_integers), right.view(as_integers))


def random_weight(out_features, in_features, group, *, seed=0, dtype=torch.float16, symmetric=False, bias=False):
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if group == -1 else in_features // group
    zeros = torch.randint(0, 16, (out_features, groups), generator=generator).float()
    return QuantizedWeight(
        WeightSpec("uint4", (1, group), has_zeros=True),
        torch.randint(0, 16, (out_features, in_features), generator=generator, dtype=torch.uint8),
        (torch.rand(out_features, groups, generator=generator) * 0.1 + 0.001).to(dtype),
        torch.full_like(zeros, 8) if symmetric else zeros,
        bias=torch.randn(out_features, generator=generator).to(dtype) if bias else None,
    )


def decode_with(oracle, version, tensors, group):
    arrays = {s: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for s, t in tensors.items()}
    zeros = arrays.get("qzeros", arrays.get("scaled_zeros"))
    if version in ("gemm", "gemv"):
        decode = oracle.awq_gemm if version == "gemm" else oracle.awq_gemv
        return decode(arrays["qweight"], zeros, arrays["scales"], group)
    return oracle.awq_fast(arrays["qweight"], arrays["scales"], zeros, group)


# --- V06: the order of nibbles, for weights and for zeros


@pytest.mark.parametrize("out_features", [8, 24, 72])
def test_v06_nibble_order_of_weights_and_of_zeros(out_features):
    ramp = (torch.arange(out_features) % 8).to(torch.uint8)
    weight = QuantizedWeight(
        WeightSpec("uint4", (1, 32), has_zeros=True),
        ramp[:, None].repeat(1, 64),
        torch.ones(out_features, 2, dtype=torch.float16),
        15 - ramp[:, None].float().repeat(1, 2),  # another ramp: a permutation of one alone cannot hide
    )
    layer = LinearLayer("layer", 64, out_features)
    config = AWQConfig(group_size=32)
    tensors = config.serialise(layer, weight)
    assert tensors["qweight"].shape == (64, out_features // 8)
    assert (tensors["qweight"] == 0x75316420).all()
    assert (tensors["qzeros"] == 0x8ACE9BDF - 2**32).all()  # 15 - ramp, in the same order
    back = config.canonicalise(layer, tensors)
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.zeros, weight.zeros)


@pytest.mark.parametrize("out_features", [8, 24, 72])
def test_v06_nibble_order_agrees_with_an_independent_decoder(oracle, out_features):
    layer, weight = LinearLayer("layer", 64, out_features), random_weight(out_features, 64, 32)
    tensors = AWQConfig(group_size=32).serialise(layer, weight)
    assert np.array_equal(decode_with(oracle, "gemm", tensors, 32), weight.dequantize().numpy())


def test_v06_nibble_order_of_gemv_is_sequential_along_the_inputs():
    codes = torch.arange(8, dtype=torch.uint8).repeat(8, 4)
    weight = QuantizedWeight(
        WeightSpec("uint4", (1, -1), has_zeros=True), codes, torch.ones(8, 1), torch.arange(8.0)[:, None]
    )
    tensors = AWQConfig(group_size=-1, version="gemv").serialise(LinearLayer("layer", 32, 8), weight)
    assert (tensors["qweight"] == 0x76543210).all()
    assert tensors["qzeros"].tolist() == [[n, 0, 0, 0] for n in range(8)]


@pytest.mark.parametrize("order", [GEMM_ORDER, SEQUENTIAL])
@pytest.mark.parametrize("dim", [0, 1])
def test_words_are_bit_patterns_whatever_their_sign(order, dim):
    words = torch.tensor([[-1, 0, -(2**31)], [2**31 - 1, 0x75316420, -0x01234568]], dtype=torch.int32)
    values = unpack_words(words, order, dim)
    assert values.shape == ((16, 3) if dim == 0 else (2, 24))
    assert torch.equal(pack_words(values, order, dim), words)


def test_interleaved_words_of_all_bit_patterns_survive():
    words = torch.arange(-(2**15), 2**15, dtype=torch.int16).reshape(512, 128)
    assert torch.equal(pack_interleaved(unpack_interleaved(words)), words)


def test_q16_padded_words_of_known_layers():
    known = {(512, 64): 2, (512, 32): 4, (11008, 128): 11, (512, 128): 1, (11008, 64): 22, (64, 64): 2, (4096, 4096): 1}
    assert {sizes: padded_words(*sizes) for sizes in known} == known
    assert padded_words(512, 16) is None


# --- goldens


@pytest.mark.parametrize("golden", GOLDENS, ids=GOLDEN_IDS)
def test_golden_decodes_and_encodes_to_itself(golden, headers):
    config = AWQConfig.parse(QuantSource(golden.settings, "golden"))
    layer = LinearLayer("layer", golden.weight.shape[1], golden.weight.shape[0])
    assert config.spec_for(layer, headers(golden.tensors)) is not None
    weight = config.canonicalise(layer, golden.tensors)
    weight.check(layer)
    assert torch.equal(weight.dequantize(), golden.weight)
    again = config.serialise(layer, weight)
    assert again.keys() == golden.tensors.keys()
    assert all(same_bits(again[suffix], golden.tensors[suffix]) for suffix in again)


@pytest.mark.parametrize("golden", GOLDENS, ids=GOLDEN_IDS)
def test_golden_agrees_with_an_independent_decoder(golden, oracle):
    version = golden.settings.get("version", "llm-awq")
    group = golden.weight.shape[1] if golden.settings["group_size"] == -1 else golden.settings["group_size"]
    assert np.array_equal(decode_with(oracle, version, golden.tensors, group), golden.weight.numpy())


@pytest.mark.parametrize("golden", GOLDENS, ids=GOLDEN_IDS)
def test_golden_does_not_read_the_same_backwards(golden):
    assert not torch.equal(golden.weight, golden.weight.flip(0))
    assert not torch.equal(golden.weight, golden.weight.flip(1))


# --- round trips


@settings(max_examples=150, deadline=None)
@given(
    version=st.sampled_from(sorted(LAYOUTS)),
    out_features=st.sampled_from([8, 24, 72]),
    in_features=st.sampled_from([64, 128, 192]),
    group=st.sampled_from([32, 64, 128, -1]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    symmetric=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_round_trip(headers, version, out_features, in_features, group, dtype, symmetric, bias, seed):
    whole = in_features if group == -1 else group
    assume(in_features % whole == 0)
    layer = LinearLayer("layer", in_features, out_features)
    weight = random_weight(out_features, in_features, group, seed=seed, dtype=dtype, symmetric=symmetric, bias=bias)
    config = AWQConfig(group_size=group, version=version, zero_point=not symmetric)
    tensors = config.serialise(layer, weight)
    assert config.spec_for(layer, headers(tensors)) == weight.spec
    back = config.canonicalise(layer, tensors)
    back.check(layer)
    assert torch.equal(back.codes, weight.codes)
    assert same_bits(back.scales, weight.scales)
    assert (back.bias is None) if weight.bias is None else same_bits(back.bias, weight.bias)
    if version in ("gemm", "gemv"):
        assert torch.equal(back.zeros, weight.zeros)
    else:  # stored as the product with the scale, in the scale's type
        epsilon = torch.finfo(dtype).eps
        assert ((back.zeros - weight.zeros).abs() <= epsilon * weight.zeros).all()
    again = config.serialise(layer, back)
    if version in ("gemm", "gemv") or dtype != torch.float32:
        assert all(same_bits(again[suffix], tensors[suffix]) for suffix in tensors)


@settings(max_examples=60, deadline=None)
@given(
    version=st.sampled_from(sorted(LAYOUTS)),
    out_features=st.sampled_from([8, 24, 72]),
    group=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_random_files_decode_as_the_independent_decoder_says(oracle, version, out_features, group, dtype, seed):
    layer, config = LinearLayer("layer", 128, out_features), AWQConfig(group_size=group, version=version)
    tensors = config.serialise(layer, random_weight(out_features, 128, group, seed=seed, dtype=dtype))
    found = config.canonicalise(layer, tensors).dequantize().numpy()
    expected = decode_with(oracle, version, tensors, group)
    if version in ("gemm", "gemv"):
        assert np.array_equal(found, expected)
    else:
        assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()


def test_q05_group_size_may_be_absent_where_the_scales_tell_it(headers):
    for version in LAYOUTS:
        for group in (32, 64, 128):
            layer = LinearLayer("layer", 384, 24)
            tensors = AWQConfig(version=version).serialise(layer, random_weight(24, 384, group))
            assert AWQConfig(version=version).spec_for(layer, headers(tensors)).group_shape == (1, group)
    layer = LinearLayer("layer", 384, 24)
    tensors = AWQConfig().serialise(layer, random_weight(24, 384, -1))
    assert AWQConfig().spec_for(layer, headers(tensors)).group_shape == (1, -1)


def test_gemm_takes_any_group_size_that_divides(headers):
    layer, config = LinearLayer("layer", 36, 8), AWQConfig(group_size=12)
    weight = random_weight(8, 36, 12)
    tensors = config.serialise(layer, weight)
    assert config.spec_for(layer, headers(tensors)).group_shape == (1, 12)
    assert torch.equal(config.canonicalise(layer, tensors).dequantize(), weight.dequantize())


@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_q06_symmetric_zeros_are_8_where_none_are_stored(version, headers):
    layer, config = LinearLayer("layer", 64, 8), AWQConfig(group_size=32, zero_point=False, version=version)
    weight = random_weight(8, 64, 32, symmetric=True)
    tensors = config.serialise(layer, weight)
    del tensors["qzeros"]
    assert config.spec_for(layer, headers(tensors)) == weight.spec
    assert torch.equal(config.canonicalise(layer, tensors).dequantize(), weight.dequantize())


@pytest.mark.parametrize("name", ["qzeros", "scaled_zeros"])
@pytest.mark.parametrize("version", ["gemv_fast", "llm-awq"])
def test_int16_layouts_read_zeros_by_both_names(version, name, headers):
    layer, config = LinearLayer("layer", 64, 8), AWQConfig(group_size=64, version=version)
    tensors = config.serialise(layer, random_weight(8, 64, 64))
    expected = config.canonicalise(layer, tensors).dequantize()
    tensors[name] = tensors.pop(LAYOUTS[version].zeros_names[0])
    assert config.spec_for(layer, headers(tensors)) is not None
    assert torch.equal(config.canonicalise(layer, tensors).dequantize(), expected)


def test_int16_layouts_keep_scales_of_zero_and_signs_of_zero():
    layer, config = LinearLayer("layer", 64, 8), AWQConfig(group_size=64, version="gemv_fast")
    tensors = config.serialise(layer, random_weight(8, 64, 64))
    tensors["scales"][0, :2] = 0
    tensors["qzeros"][0, :4] = torch.tensor([0.0, -0.0, 0.0, -0.0])
    weight = config.canonicalise(layer, tensors)
    weight.check(layer)
    assert (weight.dequantize()[:2] == 0).all()
    again = config.serialise(layer, weight)
    assert all(same_bits(again[suffix], tensors[suffix]) for suffix in tensors)
