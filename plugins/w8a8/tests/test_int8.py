"""SGLang's w8a8_int8: reading, recognising, refusing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import CheckpointError, LayerFacts, LinearLayer, QuantSource, TensorInfo, WeightSpec
from octavo.testing import random_weight
from octavo_w8a8.int8 import SPEC, W8A8Int8Config

LAYER = LinearLayer("model.layers.0.mlp.up_proj", 24, 16)


def parse(**raw: Any) -> W8A8Int8Config:
    return W8A8Int8Config.parse(QuantSource(raw, "config.json: quantization_config"))


def headers(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    return {
        suffix: TensorInfo(f"{LAYER.name}.{suffix}", tensor.dtype, tuple(tensor.shape), "model.safetensors")
        for suffix, tensor in tensors.items()
    }


def stored(**others: Tensor) -> dict[str, Tensor]:
    weight = (torch.arange(16 * 24) % 256 - 128).to(torch.int8).reshape(16, 24)
    return {"weight": weight, "weight_scale": (torch.arange(16) + 1.0).reshape(16, 1) / 64, **others}


def refusal(action: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        action(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("shape", [(16, 1), (16,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_for_each_output(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = stored()
    tensors["weight_scale"] = tensors["weight_scale"].reshape(shape).to(dtype)
    assert parse().spec_for(LAYER, headers(tensors)) == SPEC
    weight = parse().canonicalise(LAYER, tensors)
    expected = tensors["weight"].double() * tensors["weight_scale"].double().reshape(16, 1)
    assert torch.equal(weight.dequantize().double(), expected)


@pytest.mark.parametrize("raw", [{"is_dynamic": True}, {"is_dynamic": False}, {"activation_scheme": "dynamic"}, {}])
def test_inputs_are_dynamic_whatever_is_dynamic_says(raw: dict[str, Any]) -> None:
    config = parse(quant_method="w8a8_int8", ignore=["lm_head"], **raw)
    assert config.unread_keys == ()
    assert config.spec_for(LAYER, headers(stored())) == SPEC
    assert SPEC.activation is not None
    assert SPEC.activation.dynamic
    assert parse(**config.settings()) == config


def test_static_settings_and_scales_are_refused() -> None:
    assert "activation_scheme" in refusal(lambda: parse(activation_scheme="static"))
    message = refusal(parse().spec_for, LAYER, headers(stored(input_scale=torch.ones(1))))
    for fact in (f"{LAYER.name}.input_scale", "set quant_method to that"):
        assert fact in message


def test_q34_asymmetric_weights_are_refused_by_name() -> None:
    zeros = torch.zeros(16, 1, dtype=torch.int8)
    tensors = stored(weight_zero_point=zeros)
    assert parse().spec_for(LAYER, headers(tensors)) == SPEC
    assert parse().canonicalise(LAYER, tensors).zeros is None  # zeros that are all 0 say nothing
    zeros[7] = -3
    message = refusal(parse().canonicalise, LAYER, tensors)
    for fact in (f"{LAYER.name}: the weight is asymmetric", "weight_zero_point", "from -3 to 0"):
        assert fact in message


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_no_quantiser_writes_are_refused(value: float) -> None:
    tensors = stored()
    tensors["weight_scale"][5] = value
    assert f"{LAYER.name}.weight_scale" in refusal(parse().canonicalise, LAYER, tensors)


def test_a_row_of_zeros_may_have_a_zero_scale() -> None:
    tensors = stored()
    tensors["weight_scale"][5], tensors["weight"][5] = 0.0, 0
    assert not bool(parse().canonicalise(LAYER, tensors).dequantize()[5].any())


@pytest.mark.parametrize(
    ("tensors", "facts"),
    [
        ({"weight": stored()["weight"]}, ["weight_scale is missing beside weight"]),
        ({"weight_scale": torch.ones(16, 1)}, ["weight is missing beside weight_scale"]),
        (stored(weight=torch.zeros(16, 24)), ["expected: (16, 24) of torch.int8", "torch.float32"]),
        (stored(weight_scale=torch.ones(1)), ["expected: (16, 1) or (16,)", "found: (1,)"]),
        (stored(weight_scale=torch.ones(16, 2)), ["found: (16, 2)"]),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors: dict[str, Tensor], facts: list[str]) -> None:
    message = refusal(parse().spec_for, LAYER, headers(tensors))
    for fact in (*facts, LAYER.name, "model.safetensors"):
        assert fact in message


def test_recognising() -> None:
    named = {info.name: info for info in headers(stored()).values()}
    assert W8A8Int8Config.detect(QuantSource({"is_dynamic": True}, "here"), named)
    assert not W8A8Int8Config.detect(QuantSource({"is_dynamic": True}, "here"), {})
    assert not W8A8Int8Config.detect(QuantSource({"bits": 8}, "here"), named)
    assert W8A8Int8Config.detect(None, named)
    assert parse(**W8A8Int8Config.infer(named)) == W8A8Int8Config()
    static = {info.name: info for info in headers(stored(input_scale=torch.ones(1))).values()}
    assert not W8A8Int8Config.detect(None, static)
    raw = {"quant_method": "w8a8_int8", "config_groups": {"group_0": {}}}
    found = W8A8Int8Config.translate(QuantSource(raw, "config.json"))
    assert found is not None
    assert found.raw["quant_method"] == "compressed-tensors"
    assert W8A8Int8Config.translate(QuantSource({"is_dynamic": True}, "config.json")) is None


def test_writing() -> None:
    head = LinearLayer("lm_head", 24, 32)
    layers = {head: LayerFacts(WeightSpec("float", (-1, -1))), LAYER: LayerFacts(SPEC, True, torch.float32)}
    config = W8A8Int8Config.for_weights("w8a8_int8", layers)
    assert config.ignored_layers == ("lm_head",)
    assert parse(**config.settings()) == config
    weight = random_weight(SPEC, 16, 24, torch.Generator().manual_seed(0))
    tensors = config.serialise(LAYER, weight)
    assert {suffix: tuple(tensor.shape) for suffix, tensor in tensors.items()} == {
        "weight": (16, 24),
        "weight_scale": (16, 1),
    }
    assert config.online_spec(LAYER) == SPEC
    other = {LAYER: LayerFacts(WeightSpec("int8", (-1, -1), activation=SPEC.activation))}
    assert refusal(W8A8Int8Config.for_weights, "w8a8_int8", other).startswith(LAYER.name)
