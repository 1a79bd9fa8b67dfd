"""Every block type against the gguf package's own decoder, and the blocks that a formula could get wrong."""

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from octavo import CODES, CheckpointError, LinearLayer, QuantizedWeight, TensorInfo, WeightSpec
from octavo_gguf.blocks import BLOCK_TYPES
from octavo_gguf.config import GGUFConfig

Tools = dict[str, Callable[..., Any]]
CONFIG = GGUFConfig()
EXACT = ("q4_0", "q5_0", "q8_0", "q3_k", "q6_k")  # scale * integer: the package's formula in fp32
WITH_MINIMA = ("q4_1", "q5_1", "q2_k", "q4_k", "q5_k")  # (q - zero) * scale instead of scale * q + minimum
LAYER = "model.layers.3.mlp.up_proj"


def kind_of(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name.upper()]


def read(name: str, rows: Tensor) -> QuantizedWeight:
    """A weight as a loader would make it of bytes (out, row bytes)."""
    block = BLOCK_TYPES[name]
    layer = LinearLayer(LAYER, rows.shape[1] // block.num_bytes * block.elements, rows.shape[0])
    info = TensorInfo(f"{LAYER}.{name}", torch.uint8, tuple(rows.shape), "model.gguf")
    spec = CONFIG.spec_for(layer, {name: info})
    weight = CONFIG.canonicalise(layer, {name: rows})
    weight.check(layer)
    assert weight.spec == spec
    return weight


def test_every_type_of_the_format_is_known_and_each_is_compared() -> None:
    assert set(EXACT) | set(WITH_MINIMA) == set(BLOCK_TYPES)
    for name, block in BLOCK_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[kind_of(name)] == (block.elements, block.num_bytes)
        assert name in GGUFConfig.suffixes
    with_blocks = {kind.name.lower() for kind, (elements, _) in gguf.GGML_QUANT_SIZES.items() if elements > 1}
    assert with_blocks <= set(GGUFConfig.suffixes)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("seed", range(3))
def test_types_without_minima_are_equal_bit_for_bit(name: str, seed: int, tools: Tools) -> None:
    rows = tools["random_blocks"](kind_of(name), (7, 1024), seed)
    expected = torch.from_numpy(gguf.dequantize(rows, kind_of(name)))
    assert torch.equal(read(name, torch.from_numpy(rows)).dequantize().view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("name", WITH_MINIMA)
@pytest.mark.parametrize("seed", range(3))
def test_types_with_minima_are_equal_within_two_units_of_the_larger_of_weight_and_minimum(
    name: str, seed: int, tools: Tools
) -> None:
    rows = tools["random_blocks"](kind_of(name), (7, 1024), seed)
    expected = torch.from_numpy(gguf.dequantize(rows, kind_of(name)))
    weight = read(name, torch.from_numpy(rows))
    assert weight.zeros is not None
    assert weight.scales is not None
    minima = (-weight.zeros * weight.scales.float()).repeat_interleave(BLOCK_TYPES[name].group, dim=1)
    largest = torch.maximum(expected.abs(), minima.abs())
    unit = torch.nextafter(largest, torch.tensor(torch.inf)) - largest
    assert ((weight.dequantize() - expected).abs() <= 2 * unit).all()


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_weights_of_usual_size_differ_in_no_digit_that_matters(name: str) -> None:
    data = np.random.default_rng(1).normal(0, 0.05, (24, 512)).astype(np.float32)
    rows = gguf.quantize(data, kind_of(name))
    expected = torch.from_numpy(gguf.dequantize(rows, kind_of(name)))
    torch.testing.assert_close(read(name, torch.from_numpy(rows)).dequantize(), expected, rtol=0, atol=3e-8)


@pytest.mark.parametrize(("name", "place"), [("q4_1", 0), ("q5_1", 0), ("q2_k", 80), ("q4_k", 0), ("q5_k", 0)])
def test_blocks_with_scale_0_are_their_minimum_throughout(name: str, place: int, tools: Tools) -> None:
    rows = tools["random_blocks"](kind_of(name), (4, 512), 5)
    size = BLOCK_TYPES[name].num_bytes
    for start in range(place, rows.shape[1], 2 * size):  # every second block
        rows[:, start : start + 2] = 0
    expected = torch.from_numpy(gguf.dequantize(rows, kind_of(name)))
    weight = read(name, torch.from_numpy(rows))
    assert weight.scales is not None
    assert weight.zeros is not None
    assert torch.isfinite(weight.scales).all()
    assert torch.isfinite(weight.zeros).all()
    elements = BLOCK_TYPES[name].elements
    flat = torch.arange(512) // elements % 2 == 0
    assert torch.equal(weight.dequantize()[:, flat], expected[:, flat])
    assert expected[:, flat].abs().max() > 0


@pytest.mark.parametrize("name", ["q4_1", "q4_k"])
def test_all_zero_blocks_are_zero(name: str) -> None:
    block = BLOCK_TYPES[name]
    weight = read(name, torch.zeros(2, 2 * block.num_bytes, dtype=torch.uint8))
    assert (weight.dequantize() == 0).all()


def test_extreme_numbers_of_a_block_stay_finite() -> None:
    """The smallest scale beside the largest minimum: the zero is 10^12, the weight is the minimum."""
    row = np.concatenate([np.array([2**-24, 65504], np.float16).view(np.uint8), np.full(16, 0xF0, np.uint8)])
    weight = read("q4_1", torch.from_numpy(row)[None])
    torch.testing.assert_close(weight.dequantize(), torch.full((1, 32), 65504.0), rtol=2**-22, atol=0)


def test_damaged_scales_are_refused() -> None:
    rows = torch.zeros(1, 18, dtype=torch.uint8)
    rows[0, 1] = 0x7C  # infinity
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        read("q4_0", rows)


# --- writing


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0"])
def test_what_is_read_is_written_again_byte_for_byte(name: str, tools: Tools) -> None:
    data = np.random.default_rng(2).normal(0, 0.05, (24, 256)).astype(np.float32)
    data[3] = 0.25  # constant blocks
    data[4] = 0
    for rows in (gguf.quantize(data, kind_of(name)), tools["random_blocks"](kind_of(name), (24, 256), 3)):
        rows = torch.from_numpy(rows)
        layer = LinearLayer(LAYER, 256, 24)
        written = CONFIG.serialise(layer, read(name, rows))
        assert list(written) == [name]
        assert torch.equal(written[name], rows)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0"])
def test_the_package_reads_what_is_written(name: str) -> None:
    spec, generator = BLOCK_TYPES[name].spec, torch.Generator().manual_seed(0)
    code = CODES[spec.code]
    codes = torch.randint(int(code.low), int(code.high) + 1, (8, 128), generator=generator).to(code.dtype)
    scales = torch.randint(-64, 64, (8, 4), generator=generator) * 2.0**-9
    zeros = {"q4_0": torch.full((8, 4), 8.0), "q4_1": torch.arange(32.0).reshape(8, 4) * 0.5, "q8_0": None}[name]
    weight = QuantizedWeight(spec, codes, scales, zeros)
    written = CONFIG.serialise(LinearLayer(LAYER, 128, 8), weight)[name]
    assert torch.equal(torch.from_numpy(gguf.dequantize(written.numpy(), kind_of(name))), weight.dequantize())


@pytest.mark.parametrize("name", sorted(set(BLOCK_TYPES) - {"q4_0", "q4_1", "q8_0"}))
def test_types_that_are_read_only_are_refused_by_layer_and_type(name: str, tools: Tools) -> None:
    weight = read(name, torch.from_numpy(tools["random_blocks"](kind_of(name), (4, 256), 4)))
    with pytest.raises(CheckpointError) as caught:
        CONFIG.serialise(LinearLayer(LAYER, 256, 4), weight)
    assert LAYER in str(caught.value)
    assert str(weight.spec) in str(caught.value)


def test_weights_that_cannot_be_held_exactly_are_refused() -> None:
    spec = WeightSpec("uint4", (1, 32), has_zeros=True)
    codes = torch.ones(1, 32, dtype=torch.uint8)
    layer = LinearLayer(LAYER, 32, 1)
    for scale, zero, fact in ((1 / 3, 8.0, "a scale"), (1.0, 1 / 3, "a minimum"), (60000.0, 2.0, "a minimum")):
        weight = QuantizedWeight(spec, codes, torch.tensor([[scale]]), torch.tensor([[zero]]))
        with pytest.raises(CheckpointError, match=fact) as caught:
            CONFIG.serialise(layer, weight)
        assert LAYER in str(caught.value)
    with pytest.raises(CheckpointError, match="48 inputs are no whole blocks"):
        CONFIG.serialise(
            LinearLayer(LAYER, 48, 1),
            QuantizedWeight(spec, torch.ones(1, 48, dtype=torch.uint8), torch.ones(1, 2), torch.ones(1, 2)),
        )


def test_q14_codes_beyond_a_nibble_are_refused_before_packing() -> None:
    spec = WeightSpec("uint4", (1, 32), has_zeros=True)
    codes = torch.full((1, 32), 16, dtype=torch.uint8)
    weight = QuantizedWeight(spec, codes, torch.ones(1, 1), torch.full((1, 1), 8.0))
    with pytest.raises(CheckpointError, match="range of the codes") as caught:
        CONFIG.serialise(LinearLayer(LAYER, 32, 1), weight)
    assert LAYER in str(caught.value)


def test_q29_ranges_without_0_are_kept() -> None:
    """AWQ's and GPTQ's quantisers force 0 into each group; these blocks hold 100 ... 107.5 and -107.5 ... -100."""
    nibbles = np.arange(32, dtype=np.uint8).reshape(2, 16) % 16
    packed = nibbles[0] | (nibbles[1] << 4)
    rows = [np.concatenate([np.array([0.5, m], np.float16).view(np.uint8), packed]) for m in (100, -107.5)]
    expected = torch.arange(16).repeat(2) * 0.5 + torch.tensor([[100.0], [-107.5]])
    assert torch.equal(read("q4_1", torch.from_numpy(np.stack(rows))).dequantize(), expected)


def test_q31_products_beyond_fp16_stay_finite() -> None:
    """d * scale of a block of 256 is computed in fp32: 60000 * 63 would be infinite in fp16."""
    row = torch.zeros(1, 144, dtype=torch.uint8)
    row[0, :2] = torch.tensor([60000.0], dtype=torch.float16).view(torch.uint8)
    row[0, 4:8], row[0, 16:] = 63, 0x11
    weight = read("q4_k", row)
    assert weight.dequantize().max() == torch.tensor(60000.0).half().float() * 63


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("out_features", [1, 3, 8, 48])
def test_q39_any_number_of_outputs(name: str, out_features: int, tools: Tools) -> None:
    rows = tools["random_blocks"](kind_of(name), (out_features, 256), out_features)
    expected = torch.from_numpy(gguf.dequantize(rows, kind_of(name)))
    torch.testing.assert_close(read(name, torch.from_numpy(rows)).dequantize(), expected, rtol=1e-6, atol=1e-6)


# --- headers


@pytest.mark.parametrize("name", [n for n in GGUFConfig.suffixes if n not in (*BLOCK_TYPES, "bias")])
def test_types_that_are_not_read_are_refused_by_name(name: str) -> None:
    info = TensorInfo(f"{LAYER}.{name}", torch.uint8, (4, 64), "model.gguf")
    with pytest.raises(CheckpointError) as caught:
        CONFIG.spec_for(LinearLayer(LAYER, 256, 4), {name: info})
    for fact in (LAYER, name.upper(), "model.gguf", "Q4_K"):
        assert fact in str(caught.value)


def test_a_weight_that_is_there_twice_is_refused() -> None:
    stored = {
        name: TensorInfo(f"{LAYER}.{name}", torch.uint8, (4, 64), "model.gguf") for name in ("q4_0", "q8_0", "weight")
    }
    with pytest.raises(CheckpointError, match="twice"):
        CONFIG.spec_for(LinearLayer(LAYER, 256, 4), stored)


def test_q38_inputs_that_are_no_whole_blocks_are_refused() -> None:
    info = TensorInfo(f"{LAYER}.q4_k", torch.uint8, (4, 144), "model.gguf")
    with pytest.raises(CheckpointError, match="a multiple of 256") as caught:
        CONFIG.spec_for(LinearLayer(LAYER, 288, 4), {"q4_k": info})
    assert LAYER in str(caught.value)
