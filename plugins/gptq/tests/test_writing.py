"""Settings for new files: `octavo convert`, `--quantize-weights`, and what the family's tools are told about layers."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo import ActivationSpec, CheckpointError, LayerFacts, LinearLayer, QuantSource, WeightSpec, round_to_nearest
from octavo.testing import random_weight
from octavo_gptq.config import GPTQConfig

UP = LinearLayer("model.layers.0.mlp.up_proj", 128, 64)
GATE = LinearLayer("model.layers.0.mlp.gate_proj", 128, 64)
DOWN = LinearLayer("model.layers.0.mlp.down_proj", 64, 128)
HEAD = LinearLayer("lm_head", 64, 128)
EMBEDDING = LinearLayer("model.embed_tokens", 64, 128)
FLOAT = WeightSpec("float", (-1, -1))
SPEC = WeightSpec("uint4", (1, 32), has_zeros=True)


def facts(spec: WeightSpec = SPEC, symmetric: bool = True, dtype: torch.dtype | None = torch.float16) -> LayerFacts:
    return LayerFacts(spec, symmetric, dtype)


@pytest.mark.parametrize("target", GPTQConfig.targets)
def test_one_scheme_needs_no_rules(target: str) -> None:
    layers = {UP: facts(), GATE: facts(), DOWN: facts(), HEAD: facts(FLOAT), EMBEDDING: facts(FLOAT)}
    config = GPTQConfig.for_weights(target, layers)
    expected = (4, 32, True, False, target, False)
    assert (
        config.bits,
        config.group_size,
        config.sym,
        config.desc_act,
        config.checkpoint_format,
        config.lm_head,
    ) == expected
    assert config.dynamic == {}
    written = config.settings()
    assert written["checkpoint_format"] == target
    assert written["quant_method"] == "gptq"
    assert GPTQConfig.parse(QuantSource(written, "config.json")) == config


def test_layers_that_differ_get_rules_and_plain_ones_are_excluded() -> None:
    layers = {
        UP: facts(),
        GATE: facts(replace(SPEC, code="uint8", group_shape=(1, -1)), symmetric=False),
        DOWN: facts(FLOAT),
        LinearLayer("model.layers.1.mlp.up_proj", 128, 64): facts(),
        LinearLayer("model.layers.1.mlp.down_proj", 64, 128): facts(replace(SPEC, act_order=True)),
        HEAD: facts(replace(SPEC, code="int3"), dtype=None),
    }
    config = GPTQConfig.for_weights("gptq_v2", layers)
    assert (config.bits, config.group_size, config.sym, config.desc_act, config.lm_head) == (4, 32, True, False, True)
    assert config.dynamic == {
        r"-:^model\.layers\.0\.mlp\.down_proj$": {},
        r"+:^model\.layers\.0\.mlp\.gate_proj$": {"bits": 8, "group_size": -1, "sym": False},
        r"+:^model\.layers\.1\.mlp\.down_proj$": {"desc_act": True},
        r"+:^lm_head$": {"bits": 3},
    }
    again = GPTQConfig.parse(QuantSource(config.settings(), "config.json"))
    assert again == config
    assert again.unread_keys == ()
    assert again.for_layer(GATE.name).bits == 8


@pytest.mark.parametrize("target", GPTQConfig.targets)
def test_what_is_written_under_made_settings_is_read_back(target: str, headers: Any) -> None:
    specs = {
        UP: SPEC,
        GATE: replace(SPEC, code="uint8", group_shape=(1, 128)),
        DOWN: replace(SPEC, act_order=True),
        HEAD: replace(SPEC, code="uint2", group_shape=(1, -1)),
        LinearLayer("model.layers.1.mlp.up_proj", 128, 64): replace(SPEC, code="int4", has_zeros=False),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {
        layer: random_weight(spec, layer.out_features, layer.in_features, generator, zeros="integer")
        for layer, spec in specs.items()
    }
    made = GPTQConfig.for_weights(
        target, {y: LayerFacts(w.spec, w.is_symmetric, torch.float32) for y, w in weights.items()}
    )
    config = GPTQConfig.parse(QuantSource(made.settings(), "config.json"))
    for layer, weight in weights.items():
        stored = made.serialise(layer, weight)
        assert config.spec_for(layer, headers(stored, layer.name)) is not None
        assert torch.equal(config.canonicalise(layer, stored).dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("layer", "change", "fact"),
    [
        (UP, {"spec": replace(SPEC, code="uint5")}, "integer codes of 2, 3, 4, 8 bits"),
        (UP, {"spec": WeightSpec("fp8_e4m3", (1, -1))}, "integer codes"),
        (UP, {"spec": replace(SPEC, activation=ActivationSpec("int8"))}, "floating inputs"),
        (UP, {"spec": WeightSpec("int8", (-1, -1))}, "scales for each output"),
        (UP, {"spec": WeightSpec("float", (-1, -1), activation=ActivationSpec("int8"))}, "integer codes"),
        (UP, {"spec": replace(SPEC, has_zeros=False)}, "unsigned without zeros"),
        (UP, {"scale_dtype": torch.float64}, "torch.float64"),
        (LinearLayer("odd", 124, 64), {}, "in_features 124"),
        (LinearLayer("odd", 128, 60), {}, "out_features 60"),
        (EMBEDDING, {}, "quantised embedding"),
    ],
)
def test_layers_that_cannot_be_held_are_refused_by_name(layer: LinearLayer, change: dict[str, Any], fact: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        GPTQConfig.for_weights("gptq", {GATE: facts(), layer: replace(facts(), **change)})
    assert fact in str(caught.value)
    assert layer.name in str(caught.value)


def test_a_float_model_is_not_gptq() -> None:
    with pytest.raises(CheckpointError, match="no quantised layer"):
        GPTQConfig.for_weights("gptq", {UP: facts(FLOAT)})


@pytest.mark.parametrize(
    ("inputs", "outputs", "group"),
    [(256, 64, 128), (192, 64, 64), (96, 8, 32), (40, 8, -1), (8, 8, -1), (172, 64, None), (64, 12, None)],
)
def test_online_spec_is_symmetric_in_the_largest_group_that_fits(inputs: int, outputs: int, group: int | None) -> None:
    layer = LinearLayer("model.layers.0.mlp.up_proj", inputs, outputs)
    spec = GPTQConfig.online_spec(layer)
    if group is None:
        assert spec is None
        return
    assert spec == WeightSpec("uint4", (1, group))
    rounded = round_to_nearest(torch.randn(outputs, inputs), spec)
    assert rounded.spec == WeightSpec("uint4", (1, group), has_zeros=True)
    assert rounded.is_symmetric
    config = GPTQConfig(bits=4, group_size=group, sym=True)
    assert torch.equal(config.canonicalise(layer, config.serialise(layer, rounded)).dequantize(), rounded.dequantize())
