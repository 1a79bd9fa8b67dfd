"""What new AWQ files say of themselves: settings for given layers, and what `--quantize-weights awq` makes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo import (
    ActivationSpec,
    CheckpointError,
    LayerFacts,
    LinearLayer,
    QuantizedWeight,
    QuantSource,
    WeightSpec,
    round_to_nearest,
)
from octavo_awq.config import AWQConfig

HALF = torch.float16
FLOAT = LayerFacts(WeightSpec("float", (-1, -1)))


def facts(group: int = 64, code: str = "uint4", **changes: Any) -> LayerFacts:
    spec = replace(WeightSpec(code, (1, group), has_zeros=True), **changes)
    return LayerFacts(spec, symmetric=False, scale_dtype=HALF)


def layer(name: str = "up_proj", in_features: int = 128, out_features: int = 64) -> LinearLayer:
    return LinearLayer(f"model.layers.0.mlp.{name}", in_features, out_features)


def refusal(layers: dict[LinearLayer, LayerFacts]) -> str:
    with pytest.raises(CheckpointError) as caught:
        AWQConfig.for_weights("awq", layers)
    return str(caught.value)


def test_settings_describe_the_layers() -> None:
    head = LinearLayer("lm_head", 128, 512)
    config = AWQConfig.for_weights("awq", {layer(): facts(), layer("down_proj"): facts(), head: FLOAT})
    assert config.settings() == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }
    assert AWQConfig.parse(QuantSource(config.settings(), "config.json")) == config


def test_a_quantised_head_is_announced() -> None:
    settings = AWQConfig.for_weights("awq", {LinearLayer("lm_head", 128, 512): facts()}).settings()
    assert settings["lm_head"] is True
    assert "modules_to_not_convert" not in settings
    assert AWQConfig.parse(QuantSource(settings, "config.json")).unread_keys == ()


def test_one_group_over_all_inputs() -> None:
    down = layer("down_proj", 256, 64)
    assert AWQConfig.for_weights("awq", {layer(): facts(-1), down: facts(-1)}).group_size == -1
    mixed = AWQConfig.for_weights("awq", {layer(): facts(-1), down: facts(128)})
    assert mixed.group_size == 128, "128 inputs in one group are a group of 128"
    assert "groups of 256" in refusal({layer(): facts(128), down: facts(-1)})


def test_q06_symmetric_weights_are_written_with_zeros_of_8() -> None:
    symmetric = replace(facts(), symmetric=True)
    config = AWQConfig.for_weights("awq", {layer(): symmetric})
    assert config.zero_point is True
    weight = round_to_nearest(torch.randn(64, 128), WeightSpec("uint4", (1, 64)))
    assert weight.is_symmetric
    stored = config.serialise(layer(), weight)
    assert (stored["qzeros"] == torch.tensor(0x88888888 - 2**32, dtype=torch.int32)).all()


def test_q13_zeros_are_written_as_they_are() -> None:
    spec = WeightSpec("uint4", (1, 64), has_zeros=True)
    zeros = torch.arange(128).reshape(64, 2) % 16.0
    weight = QuantizedWeight(spec, torch.zeros(64, 128, dtype=torch.uint8), torch.ones(64, 2, dtype=HALF), zeros)
    config = AWQConfig.for_weights("awq", {layer(): facts()})
    stored = config.serialise(layer(), weight)
    again = config.canonicalise(layer(), stored)
    assert torch.equal(again.zeros, zeros)
    # outputs 0 .. 7 have the zeros 0, 2, ... 14 in group 0; a word holds outputs 0, 2, 4, 6, 1, 3, 5, 7
    assert int(stored["qzeros"][0, 0]) & 0xFFFFFFFF == 0xEA62C840


def test_q14_codes_beyond_a_nibble_are_refused_before_packing() -> None:
    codes = torch.full((64, 128), 16, dtype=torch.uint8)
    weight = QuantizedWeight(WeightSpec("uint4", (1, 64), has_zeros=True), codes, torch.ones(64, 2), torch.zeros(64, 2))
    with pytest.raises(CheckpointError, match=r"range of the codes \(16\.\.16\)"):
        AWQConfig(group_size=64).serialise(layer(), weight)


@pytest.mark.parametrize(
    ("wrong", "fact"),
    [
        (facts(code="uint8"), "uint8 g64 asym"),
        (facts(act_order=True), "act_order"),
        (facts(has_zeros=False), "uint4 g64"),
        (facts(activation=ActivationSpec("int8")), "int8 per_token"),
        (facts(group_shape=(64, 64)), "64x64"),
        (facts(48), "in_features 128 is not a multiple of group_size 48"),
        (replace(facts(), scale_dtype=torch.float64), "torch.float64"),
    ],
)
def test_what_gemm_cannot_hold_is_refused_with_what_it_takes(wrong: LayerFacts, fact: str) -> None:
    message = refusal({layer("gate_proj"): facts(), layer(): wrong})
    for part in (fact, layer().name, "uint4 with integer zeros of 0..15", "AWQ gemm"):
        assert part in message


def test_sizes_and_group_sizes_that_do_not_fit_are_refused() -> None:
    odd = layer("down_proj", 128, 12)
    assert "out_features 12 is not a multiple of 8" in refusal({layer(): facts(), odd: facts()})
    message = refusal({layer(): facts(), layer("down_proj"): facts(32)})
    for part in ("down_proj", "one group size", "groups of 64 inputs", "groups of 32"):
        assert part in message


def test_quantised_embeddings_are_refused() -> None:
    message = refusal({LinearLayer("model.embed_tokens", 128, 512): facts()})
    assert "embeddings are plain in AWQ" in message


@pytest.mark.parametrize(("in_features", "group"), [(256, 128), (576, 64), (96, 32), (172, None), (1, None)])
def test_rounding_takes_the_largest_usual_group(in_features: int, group: int | None) -> None:
    expected = None if group is None else WeightSpec("uint4", (1, group), has_zeros=True)
    assert AWQConfig.online_spec(layer("up_proj", in_features, 64)) == expected


def test_rounding_leaves_layers_that_gemm_cannot_store() -> None:
    assert AWQConfig.online_spec(layer("up_proj", 128, 12)) is None
