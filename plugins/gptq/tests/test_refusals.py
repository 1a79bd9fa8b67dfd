"""What cannot be read or written is refused, each time with the facts that help."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import ActivationSpec, CheckpointError, LinearLayer, QuantizedWeight, QuantSource, WeightSpec
from octavo.testing import random_weight
from octavo_gptq.config import GPTQConfig

LAYER = LinearLayer("model.layers.0.mlp.up_proj", 128, 64)
SPEC = WeightSpec("uint4", (1, 32), has_zeros=True)


def parse(**raw: Any) -> GPTQConfig:
    return GPTQConfig.parse(
        QuantSource({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, **raw}, "here")
    )


def weight(layer: LinearLayer = LAYER, spec: WeightSpec = SPEC) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(0)
    return random_weight(spec, layer.out_features, layer.in_features, generator, zeros="integer")


def tensors() -> dict[str, Tensor]:
    return parse().serialise(LAYER, weight())


def refusal(call: Any, *arguments: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        call(*arguments)
    return str(caught.value)


def words(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


# --- headers


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"qweight": words(128, 8)}, ["AWQ gemm", "(K, N / 8)", "set quant_method to awq"]),
        ({"qweight": words(64, 16)}, ["AWQ gemv", "version to gemv"]),
        ({"qweight": torch.zeros(16, 128, dtype=torch.int16)}, ["AWQ gemv_fast", "gemv_fast"]),
        ({"qweight": words(8, 128)}, ["Marlin tiles", "export the model again"]),
        ({"qweight": torch.zeros(64, 64, dtype=torch.int8)}, ["BitBLAS"]),
        ({"qweight": words(32, 64)}, ["bits in the settings contradict", "which is 8 bits", "set bits to 8"]),
        ({"qweight": words(17, 64)}, ["qweight does not fit 128 inputs", "(16, 64)", "(17, 64)"]),
        ({"qweight": torch.zeros(32, 64, dtype=torch.int16)}, ['"pack_dtype": "int16"']),
        ({"qweight": torch.zeros(16, 64)}, ["qweight does not fit", "torch.float32"]),
        ({"qweight": words(16)}, ["qweight does not fit"]),
        ({"scales": torch.ones(2, 64)}, ["group_size in the settings", "group_size 32", "is group_size 64", "intact"]),
        ({"qzeros": words(4, 7)}, ["qzeros is not what GPTQ implies", "(4, 8)", "(4, 7)"]),
        ({"qzeros": torch.zeros(4, 64, dtype=torch.float16)}, ["zeros are stored as real numbers", "GPTQ-for-LLaMa"]),
        ({"g_idx": torch.zeros(64, dtype=torch.int32)}, ["g_idx is not what", "(128,)", "(64,)"]),
        ({"g_idx": torch.zeros(128)}, ["g_idx is not what", "torch.float32"]),
        ({"bias": torch.zeros(63)}, ["bias is not what", "(64,)"]),
        ({"scales": torch.ones(4, 64, dtype=torch.float64)}, ["scales is not what", "torch.float64"]),
        ({"scales": torch.tensor(1.0)}, ["scales is not what"]),
        ({"zeros": torch.ones(64, 1), "qzeros": None}, ["Quant3Linear", "real numbers"]),
        ({"qweight": None}, ["qweight is missing beside qzeros"]),
        ({"scales": None}, ["scales is missing beside qweight"]),
        ({"qzeros": None}, ["qzeros is missing beside qweight"]),
    ],
)
def test_q08_tensors_that_are_not_gptq_are_refused(change: dict[str, Any], facts: list[str], headers: Any) -> None:
    stored = {name: tensor for name, tensor in {**tensors(), **change}.items() if tensor is not None}
    if change.get("scales") is not None and change["scales"].dim() == 2:
        stored["qzeros"] = words(change["scales"].shape[0], 8)
    message = refusal(parse().spec_for, LAYER, headers(stored))
    assert all(fact in message for fact in [*facts, LAYER.name, "model.safetensors"]), message


@pytest.mark.parametrize(
    ("names", "fact"),
    [
        ({"B", "s", "workspace"}, "Marlin"),
        ({"B", "s_channel", "s_group"}, "QQQ"),
        ({"trellis", "suh", "svh"}, "EXL3"),
        ({"qweight", "scales", "zeros", "bias"}, "BitBLAS"),
    ],
)
def test_q09_other_layouts_are_refused_by_the_names_of_their_tensors(names: set[str], fact: str, headers: Any) -> None:
    message = refusal(parse().spec_for, LAYER, headers({name: words(8, 8) for name in names}))
    assert fact in message
    assert LAYER.name in message


@pytest.mark.parametrize(
    ("sizes", "bits", "fact"),
    [
        ((124, 64), 4, "124 inputs of 4 bits do not fill whole words of 32 bits"),
        ((128, 12), 4, "12 outputs of 4 bits do not fill whole words"),
        ((32, 48), 3, "48 outputs of 3 bits do not fill whole words"),
    ],
)
def test_q39_layers_that_do_not_fill_words_are_refused(
    sizes: tuple[int, int], bits: int, fact: str, headers: Any
) -> None:
    layer = LinearLayer("model.layers.0.mlp.gate", *sizes)
    stored = {
        "qweight": words(sizes[0] * bits // 32, sizes[1]),
        "qzeros": words(1, -(-sizes[1] * bits // 32)),
        "scales": torch.ones(1, sizes[1]),
    }
    assert fact in refusal(parse(bits=bits, group_size=-1).spec_for, layer, headers(stored))


# --- group sizes


@pytest.mark.parametrize(
    ("inputs", "groups", "found"), [(128, 1, -1), (128, 4, 32), (192, 3, 64), (384, 4, 96), (576, 9, 64), (80, 3, 32)]
)
def test_q05_group_size_is_taken_from_the_rows_of_scales(inputs: int, groups: int, found: int, headers: Any) -> None:
    layer = LinearLayer("layer", inputs, 8)
    stored = {"qweight": words(inputs // 8, 8), "qzeros": words(groups, 1), "scales": torch.ones(groups, 8)}
    spec = parse(group_size=None).spec_for(layer, headers(stored))
    assert spec == WeightSpec("uint4", (1, found), has_zeros=True)


def test_q05_group_size_of_minus_1_over_several_groups_is_told(headers: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = parse(group_size=-1)
    for _ in range(2):
        spec = config.spec_for(LAYER, headers(tensors()))
    assert spec == replace(SPEC, act_order=True)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "group_size is -1, but scales have 4 rows" in told
    read = config.canonicalise(LAYER, tensors())
    assert torch.equal(read.dequantize(), weight().dequantize())


@pytest.mark.parametrize("stated", [None, -1])
@pytest.mark.parametrize(
    ("inputs", "groups", "true"),
    [
        (200, 3, 80),  # 67 to 99 inputs, none of the usual sizes
        (192, 2, 128),  # 96 and 96, or 128 and 64
    ],
)
def test_q05_q38_uncertain_group_size_is_asked_for(
    stated: int | None, inputs: int, groups: int, true: int, headers: Any
) -> None:
    layer = LinearLayer("layer", inputs, 8)
    stored = {"qweight": words(inputs // 8, 8), "qzeros": words(groups, 1), "scales": torch.ones(groups, 8)}
    message = refusal(parse(group_size=stated).spec_for, layer, headers(stored))
    assert f"implies no group_size, and the settings say {stated or 'none'}" in message.lower()
    assert "set group_size" in message
    assert parse(group_size=true).spec_for(layer, headers(stored)) == WeightSpec("uint4", (1, true), has_zeros=True)


def test_q38_a_short_last_group_is_read(headers: Any) -> None:
    layer = LinearLayer("layer", 192, 64)
    ragged = weight(layer, replace(SPEC, group_shape=(1, 128)))
    config = parse(group_size=128)
    stored = config.serialise(layer, ragged)
    assert stored["scales"].shape == (2, 64)
    assert config.spec_for(layer, headers(stored)) == replace(ragged.spec, act_order=True)
    assert torch.equal(config.canonicalise(layer, stored).dequantize(), ragged.dequantize())


def test_a_group_larger_than_the_layer_is_one_group(headers: Any) -> None:
    whole = weight(spec=replace(SPEC, group_shape=(1, -1)))
    config = parse(group_size=1024)
    stored = config.serialise(LAYER, whole)
    assert config.spec_for(LAYER, headers(stored)) == whole.spec


# --- weights


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"spec": replace(SPEC, code="uint5")}, "it is uint5 g32 asym"),
        ({"spec": replace(SPEC, code="uint8")}, "8 bits, the settings say 4"),
        ({"spec": replace(SPEC, has_zeros=False), "zeros": None}, "unsigned without zeros"),
        ({"spec": replace(SPEC, activation=ActivationSpec("int8"))}, "floating inputs"),
        ({"zeros": torch.full((64, 4), 7.5)}, "integers in 0..15"),
        ({"zeros": torch.full((64, 4), 16.0)}, "integers in 0..15"),
        ({"zeros": torch.full((64, 4), -1.0)}, "integers in 0..15"),
        ({"scales": torch.ones(64, 4, dtype=torch.float64)}, "torch.float64"),
        (
            {"spec": replace(SPEC, group_shape=(1, 64)), "scales": torch.ones(64, 2), "zeros": torch.ones(64, 2)},
            "say group_size 32",
        ),
    ],
)
def test_weights_that_cannot_be_held_are_refused(change: dict[str, Any], fact: str) -> None:
    message = refusal(parse().serialise, LAYER, replace(weight(), **change))
    assert fact in message
    assert LAYER.name in message


def test_q14_codes_that_overflow_a_field_are_never_packed() -> None:
    overflowing = replace(weight(), codes=weight().codes + 16)
    message = refusal(parse().serialise, LAYER, overflowing)
    assert "range of the codes" in message
    assert LAYER.name in message


def test_float_and_block_weights_are_refused() -> None:
    assert "it is float" in refusal(parse().serialise, LAYER, QuantizedWeight.from_float(torch.zeros(64, 128)))
    spec = WeightSpec("uint4", (64, 128), has_zeros=True)
    block = QuantizedWeight(spec, torch.zeros(64, 128, dtype=torch.uint8), torch.ones(1, 1), torch.ones(1, 1))
    assert "scales for each output" in refusal(parse().serialise, LAYER, block)


def test_a_slice_with_more_groups_than_its_size_implies_is_refused() -> None:
    part = weight(LinearLayer("whole", 160, 64)).slice_in(16, 144)
    assert part.scales is not None
    assert part.scales.shape[1] == 5
    assert "it has 5 groups, 4 are implied" in refusal(parse().serialise, LAYER, part)


def test_weights_that_contradict_sym_are_refused() -> None:
    assert "sym: true, its zeros go from" in refusal(parse(sym=True).serialise, LAYER, weight())
    assert "neither sym nor checkpoint_format" in refusal(parse(sym=None).serialise, LAYER, weight())


@pytest.mark.parametrize("sizes", [(124, 64), (128, 60)])
def test_q39_layers_that_do_not_fill_words_are_not_written(sizes: tuple[int, int]) -> None:
    layer = LinearLayer("layer", *sizes)
    assert "do not fill whole words" in refusal(parse().serialise, layer, weight(layer))


@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_signed_codes_are_written_as_unsigned_ones_with_the_same_numbers(bits: int, has_zeros: bool) -> None:
    signed = weight(spec=WeightSpec(f"int{bits}", (1, 32), has_zeros=has_zeros))
    config = parse(bits=bits, sym=not has_zeros)
    read = config.canonicalise(LAYER, config.serialise(LAYER, signed))
    assert read.spec.code == f"uint{bits}"
    assert torch.equal(read.dequantize(), signed.dequantize())


def test_nan_and_infinite_scales_are_refused_by_check() -> None:
    stored = tensors()
    stored["scales"][1, 2] = torch.inf
    message = refusal(parse().canonicalise(LAYER, stored).check, LAYER)
    assert "scales holds 1 value(s) that are NaN or infinite" in message
