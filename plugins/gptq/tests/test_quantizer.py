"""From float weights to GPTQ's files: options, groups of linears, fallbacks, and what is written."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from octavo import (
    LLM,
    CalibratedGroup,
    ConfigError,
    InputStatistics,
    LayerFacts,
    LinearLayer,
    QuantizedWeight,
    gram_loss,
    round_to_nearest,
)
from octavo.testing import tiny_model
from octavo_gptq.config import GPTQConfig
from octavo_gptq.quantizer import GPTQOptions, GPTQQuantizer

UP = LinearLayer("model.layers.0.mlp.up_proj", 64, 96)
GATE = LinearLayer("model.layers.0.mlp.gate_proj", 64, 32)


def group(*layers: LinearLayer, tokens: int = 200, seed: int = 0, share: float = 0.0) -> CalibratedGroup:
    """Layers that read inputs which hang together; `share` is how far the float model's inputs differ."""
    random = torch.Generator().manual_seed(seed)
    size = layers[0].in_features
    x = torch.randn(tokens, size, generator=random) @ torch.randn(size, size, generator=random)
    x *= torch.rand(size, generator=random).mul(2).exp()
    away = x + share * x.roll(1, 0)
    weights = tuple(torch.randn(layer.out_features, size, generator=random) for layer in layers)
    return CalibratedGroup(layers, weights, InputStatistics.of(x, away))


def made(seen: CalibratedGroup, **options: object) -> tuple[QuantizedWeight, ...]:
    return GPTQQuantizer(GPTQOptions(**options), seen.layers).quantize(seen).weights  # type: ignore[arg-type]


def loss(seen: CalibratedGroup, weight: QuantizedWeight, number: int = 0) -> float:
    gram = seen.statistics().gram
    assert gram is not None
    return float(gram_loss(weight.dequantize() - seen.weights[number], gram))


@pytest.mark.parametrize(
    ("bits", "symmetric", "desc_act", "target"),
    list(product((2, 3, 4, 8), (True, False), (True, False), ("gptq", "gptq_v2"))),
)
def test_what_is_made_is_written_and_read_back(bits: int, symmetric: bool, desc_act: bool, target: str) -> None:
    seen = group(UP)
    quantizer = GPTQQuantizer(GPTQOptions(bits=bits, symmetric=symmetric, desc_act=desc_act, group_size=32), [UP])
    (weight,) = quantizer.quantize(seen).weights
    assert weight.spec == quantizer.spec(UP)
    weight.check(UP)
    config = GPTQConfig.for_weights(target, {UP: LayerFacts(weight.spec, symmetric, torch.float16)})
    assert config.settings()["desc_act"] is desc_act
    tensors = config.serialise(UP, weight)
    back = config.canonicalise(UP, tensors)
    assert torch.equal(back.dequantize(), weight.dequantize())
    assert tensors["scales"].dtype == torch.float16
    trivial = torch.arange(64) // 32
    assert torch.equal(tensors["g_idx"].long(), trivial) is not desc_act
    if not symmetric:
        assert not weight.is_symmetric
    elif target == "gptq":
        assert {f"{word & 0xFFFFFFFF:08X}" for word in tensors["qzeros"].flatten().tolist()} == {
            2: {"55555555"},
            3: {"DB6DB6DB", "B6DB6DB6", "6DB6DB6D"},
            4: {"77777777"},
            8: {"7F7F7F7F"},
        }[bits]


def test_members_of_a_group_do_not_meddle() -> None:
    together = group(UP, GATE)
    apart = CalibratedGroup((GATE,), together.weights[1:], together.inputs)
    for options in ({}, {"desc_act": True}, {"symmetric": False, "bits": 3}):
        assert torch.equal(made(together, **options)[1].dequantize(), made(apart, **options)[0].dequantize())


def test_each_option_pays_on_the_loss_that_it_is_there_for() -> None:
    seen = group(UP)
    plain = {"group_size": 32, "group_aware": False, "search": False, "sweeps": 0}
    nearest = loss(seen, round_to_nearest(seen.weights[0], made(seen, **plain)[0].spec, torch.float16))
    losses = [
        nearest,
        loss(seen, made(seen, **plain)[0]),
        loss(seen, made(seen, **{**plain, "search": True})[0]),
        loss(seen, made(seen, **{**plain, "search": True, "group_aware": True})[0]),
        loss(seen, made(seen, **{**plain, "search": True, "group_aware": True, "sweeps": 2})[0]),
    ]
    assert losses == sorted(losses, reverse=True), losses
    assert losses[-1] < 0.5 * nearest


def test_gptaq_makes_up_for_inputs_that_earlier_layers_changed() -> None:
    random = torch.Generator().manual_seed(3)
    away = torch.randn(400, 64, generator=random)
    x = away + 0.3 * away.roll(1, 1)
    weight = torch.randn(96, 64, generator=random)
    seen = CalibratedGroup((UP,), (weight,), InputStatistics.of(x, away))
    errors = []
    for part in (0.0, 0.5, 1.0):
        quantizer = GPTQQuantizer(GPTQOptions(gptaq=part, group_size=32), [UP])
        assert quantizer.needs == (frozenset({"gram", "cross"}) if part else frozenset({"gram"}))
        found = quantizer.quantize(seen).weights[0].dequantize()
        errors.append(float((x @ found.T - away @ weight.T).square().sum()))
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.3 * errors[0]


def test_act_order_with_static_groups_needs_no_order_in_the_file() -> None:
    (weight,) = made(group(UP), desc_act=True, static_groups=True, group_size=32)
    assert weight.group_index is None
    assert not weight.spec.act_order


# --- refusals


def test_groups_that_do_not_divide_the_inputs_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.layers\.0\.mlp\.up_proj: group_size 48 does not divide its 64 inputs"
    ):
        GPTQQuantizer(GPTQOptions(group_size=48), [UP])


def test_q39_sizes_that_do_not_fill_words_are_refused_before_anything_is_computed() -> None:
    odd = LinearLayer("model.layers.0.mlp.gate_proj", 64, 36)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.gate_proj.*out_features 36 of 4 bits do not fill"):
        GPTQQuantizer(GPTQOptions(), [odd])


def test_options_of_other_formats_are_refused() -> None:
    for wrong in ({"bits": 5}, {"alpha": 0.5}, {"damp": -1}, {"gptaq": 2}):
        with pytest.raises(ValidationError):
            GPTQOptions(**wrong)  # type: ignore[arg-type]


# --- inputs that allow no compensation


def test_q58_a_layer_that_no_token_reached_is_rounded_to_nearest_and_says_so() -> None:
    nothing, square = torch.zeros(64), torch.zeros(64, 64, dtype=torch.float64)
    seen = replace(group(UP), inputs=InputStatistics(0, nothing, nothing, nothing, square, square))
    result = GPTQQuantizer(GPTQOptions(group_size=32), [UP]).quantize(seen)
    assert result.notes == ("rounded to nearest: no token of the calibration text reached it",)
    error = (result.weights[0].dequantize() - seen.weights[0]).abs()
    scales = result.weights[0].scales
    assert scales is not None
    assert float((error <= 0.51 * scales.float().repeat_interleave(32, 1)).float().mean()) > 0.95


def test_q59_a_singular_matrix_is_damped_more_and_says_so() -> None:
    seen = group(UP, tokens=3)
    result = GPTQQuantizer(GPTQOptions(group_size=32, damp=0), [UP]).quantize(seen)
    (note,) = result.notes
    assert "singular: damping" in note
    assert bool(torch.isfinite(result.weights[0].dequantize()).all())


def test_inputs_that_are_always_zero_keep_their_weights() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(100, 64, generator=random)
    x[:, ::2] = 0
    weight = torch.randn(96, 64, generator=random)
    seen = CalibratedGroup((UP,), (weight,), InputStatistics.of(x))
    (found,) = made(seen, bits=8)
    assert float((found.dequantize() - weight)[:, ::2].abs().max()) < 0.05


# --- a whole model

RECIPE = """
rules:
  - {layers: "*.down_proj", method: keep}
  - {layers: ["*.gate_proj", "*.o_proj"], method: gptq, bits: 8, group_size: 32}
  - {method: gptq, group_size: 32, desc_act: true}
to: gptq_v2
"""


def test_a_recipe_becomes_the_rules_of_the_file_and_is_served(tmp_path: Path) -> None:
    model, text, recipe = tiny_model(tmp_path / "model"), tmp_path / "text.txt", tmp_path / "recipe.yaml"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    recipe.write_text(RECIPE)
    command = [sys.executable, "-m", "octavo.cli", "quantize", str(model), "--recipe", str(recipe)]
    command += ["--calibration", str(text), "--num-samples", "4", "--max-length", "64", "--disable-progress"]
    run = subprocess.run([*command, "--out", str(tmp_path / "made")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    settings = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert (settings["checkpoint_format"], settings["bits"], settings["desc_act"]) == ("gptq_v2", 4, True)
    rules = settings["dynamic"]
    assert rules[r"-:^model\.layers\.0\.mlp\.down_proj$"] == {}
    assert rules[r"+:^model\.layers\.1\.mlp\.gate_proj$"] == {"bits": 8, "desc_act": False}
    llm = LLM(str(tmp_path / "made"), num_blocks_override=32, disable_progress=True)
    specs = {str(report.spec) for report in llm.engine.model_info.linears}
    assert specs >= {"uint4 g32 asym act_order", "uint8 g32 asym", "float"}
    assert llm.generate(["The quick"], use_tqdm=False)[0].outputs[0].token_ids
