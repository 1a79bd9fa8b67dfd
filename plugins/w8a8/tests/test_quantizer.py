"""SmoothQuant and the rounding of weights and inputs to int8, up to the file that holds the same codes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from octavo import (
    LLM,
    CalibratedGroup,
    ConfigError,
    InputStatistics,
    LayerFacts,
    LinearLayer,
    QuantizedGroup,
    quantize_inputs,
    round_to_nearest,
)
from octavo.testing import QuantizerSuite, tiny_model
from octavo_w8a8.compressed_tensors import CompressedTensorsConfig
from octavo_w8a8.quantizer import W8A8Options, W8A8Quantizer

UP = LinearLayer("model.layers.0.mlp.up_proj", 64, 96)
GATE = LinearLayer("model.layers.0.mlp.gate_proj", 64, 32)
NORM = torch.arange(64)


def inputs(tokens: int = 300, outliers: float = 40.0) -> Tensor:
    """Inputs that hang together, a few of whose channels are much larger than the others."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 64, generator=random) + 0.5 * torch.randn(tokens, 1, generator=random)
    x[:, ::16] *= outliers
    return x


def group(x: Tensor, *layers: LinearLayer, producers: Tensor | None = NORM) -> CalibratedGroup:
    random = torch.Generator().manual_seed(2)
    weights = tuple(torch.randn(layer.out_features, layer.in_features, generator=random) for layer in layers)
    return CalibratedGroup(layers, weights, InputStatistics.of(x), producers)


def made(seen: CalibratedGroup, **options: object) -> QuantizedGroup:
    quantizer = W8A8Quantizer(W8A8Options(**options), seen.layers)  # type: ignore[arg-type]
    result = quantizer.quantize(seen)
    for layer, weight in zip(seen.layers, result.weights, strict=True):
        assert weight.spec == quantizer.spec(layer)
        weight.check(layer)
    return result


def error(x: Tensor, seen: CalibratedGroup, result: QuantizedGroup) -> float:
    """Of the outputs as they are computed: inputs divided and rounded, times the codes."""
    total = 0.0
    smooth = x if result.divisor is None else x / result.divisor
    for before, weight in zip(seen.weights, result.weights, strict=True):
        assert weight.spec.activation is not None
        codes, scales, zeros = quantize_inputs(smooth, weight.spec.activation, weight.input_scale, weight.input_zero)
        rounded = (codes.float() if zeros is None else codes.float() - zeros) * scales
        total += float((rounded @ weight.dequantize().T - x @ before.T).square().sum())
    return total


class TestW8A8Quantizer(QuantizerSuite):
    quantizer = W8A8Quantizer


# --- smoothing


def test_published_example_of_smoothing() -> None:
    """s = largest^0.5 / widest^0.5 is [1.414, 10] there; a common factor changes nothing."""
    pair = LinearLayer("model.layers.0.mlp.up_proj", 2, 2)
    x, weight = torch.tensor([[1.0, -20.0], [0.5, 16.0]]), torch.tensor([[0.5, 0.1], [-0.25, 0.2]])
    seen = CalibratedGroup((pair,), (weight,), InputStatistics.of(x), torch.arange(2))
    divisor = made(seen, alpha=0.5).divisor
    assert divisor is not None
    assert float(divisor[1] / divisor[0]) == pytest.approx(10 / 2**0.5, rel=1e-5)


def test_smoothing_moves_outliers_into_weights_and_pays() -> None:
    x = inputs()
    seen = group(x, UP, GATE)
    plain, smooth = made(seen, smooth=False), made(seen)
    assert plain.divisor is None
    assert smooth.divisor is not None
    assert float(smooth.divisor[::16].min()) > 2 * float(smooth.divisor[1:16].max())
    assert error(x, seen, smooth) < 0.3 * error(x, seen, plain)


def test_the_search_is_about_as_good_as_the_best_fixed_exponent() -> None:
    x = inputs()
    seen = group(x, UP, GATE)
    fixed = [error(x, seen, made(seen, alpha=step / 10)) for step in range(11)]
    assert error(x, seen, made(seen)) < 1.05 * min(fixed)


def test_inputs_without_outliers_are_left_alone_where_that_is_best() -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(96, 64, generator=random)
    weight[:, 0] = weight.abs().amax(1)
    seen = CalibratedGroup((UP,), (weight,), InputStatistics.of(x), NORM)
    unsmoothed = error(x, seen, made(seen, smooth=False))
    assert error(x, seen, made(seen)) < 1.1 * unsmoothed


def test_channels_that_share_a_producer_share_the_factor() -> None:
    """o_proj under grouped heads: one row of v feeds several of its inputs."""
    producers = torch.arange(64) % 16
    divisor = made(group(inputs(), UP, producers=producers), alpha=0.5).divisor
    assert divisor is not None
    assert torch.equal(divisor[:16].repeat(4), divisor)


def test_where_nothing_can_absorb_a_factor_there_is_none() -> None:
    assert made(group(inputs(), UP, producers=None), alpha=0.5).divisor is None


def test_channels_that_are_silent_or_unread_keep_a_factor_of_one() -> None:
    x = inputs()
    x[:, 5] = 0
    seen = group(x, UP)
    seen.weights[0][:, 9] = 0
    divisor = made(seen, alpha=0.5).divisor
    assert divisor is not None
    assert divisor[[5, 9]].tolist() == [1.0, 1.0]
    assert bool(torch.isfinite(divisor).all() & (divisor > 0).all())


def test_the_factor_is_one_that_a_16_bit_norm_absorbs_exactly() -> None:
    norm = torch.rand(64, generator=torch.Generator().manual_seed(0)).add(0.5).bfloat16()
    divisor = made(replace(group(inputs(), UP), norm=norm), alpha=0.7).divisor
    assert divisor is not None
    stored = (norm.float() / divisor).bfloat16().float()
    assert torch.allclose(stored * divisor, norm.float(), rtol=1e-6, atol=0)


# --- weights


def test_rounding_for_the_inputs_beats_rounding_to_nearest() -> None:
    x = inputs()
    seen = group(x, UP, GATE)
    compensated, nearest = (made(seen, compensate=c, smooth=False) for c in (True, False))
    expected = round_to_nearest(torch.cat(seen.weights), nearest.weights[0].spec)
    assert torch.equal(torch.cat([weight.codes for weight in nearest.weights]), expected.codes)
    gram = seen.statistics().gram
    assert gram is not None
    losses = []
    for result in (compensated, nearest):
        away = torch.cat([w.dequantize() for w in result.weights]) - torch.cat(seen.weights)
        losses.append(float(((away.double() @ gram) * away).sum()))
    assert losses[0] < 0.7 * losses[1]
    assert error(x, seen, compensated) < error(x, seen, nearest)


def test_members_of_a_group_do_not_meddle() -> None:
    together = group(inputs(), UP, GATE)
    apart = CalibratedGroup((GATE,), together.weights[1:], together.inputs)
    both, alone = made(together, smooth=False), made(apart, smooth=False)
    assert torch.equal(both.weights[1].dequantize(), alone.weights[0].dequantize())


# --- static inputs


@pytest.mark.parametrize("symmetric", [True, False])
def test_static_scales_cover_what_calibration_saw(symmetric: bool) -> None:
    x = inputs().abs() if not symmetric else inputs()
    seen = group(x, UP, GATE)
    result = made(seen, activations="static", symmetric_inputs=symmetric)
    for weight in result.weights:
        assert weight.input_scale is not None
        assert (weight.input_zero is None) == symmetric
        assert float(weight.input_scale) > 0
    smooth = x if result.divisor is None else x / result.divisor
    codes, scales, zeros = quantize_inputs(
        smooth, result.weights[0].spec.activation, result.weights[0].input_scale, result.weights[0].input_zero
    )
    rounded = (codes.float() if zeros is None else codes.float() - zeros) * scales
    assert float((rounded - smooth).square().mean() / smooth.square().mean()) < 1e-3


def test_zero_points_pay_where_inputs_are_on_one_side() -> None:
    x = inputs(outliers=1.0).abs()
    seen = group(x, UP)
    errors = [
        error(x, seen, made(seen, activations="static", symmetric_inputs=symmetric, smooth=False))
        for symmetric in (False, True)
    ]
    assert errors[0] < 0.5 * errors[1]


# --- fallbacks and refusals


@pytest.mark.parametrize("activations", ["dynamic", "static"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_q58_a_layer_that_no_token_reached_is_rounded_to_nearest_and_says_so(activations: str, symmetric: bool) -> None:
    nothing, square = torch.zeros(64), torch.zeros(64, 64, dtype=torch.float64)
    seen = replace(group(inputs(), UP), inputs=InputStatistics(0, nothing, nothing, nothing, square, None, None))
    result = made(seen, activations=activations, symmetric_inputs=symmetric)
    assert result.notes[0] == "rounded to nearest: no token of the calibration text reached it"
    assert result.divisor is None
    assert torch.equal(result.weights[0].codes, round_to_nearest(seen.weights[0], result.weights[0].spec).codes)


def test_q59_few_tokens_are_damped_more_and_say_so() -> None:
    seen = group(torch.full((2, 64), 127.0), UP)  # int8 holds these exactly, so that no noise helps
    result = made(seen, damp=0, smooth=False, activations="static")
    assert bool(torch.isfinite(result.weights[0].dequantize()).all())
    assert any("singular: damping" in note for note in result.notes)


def test_inputs_and_weights_of_zeros_stay_finite() -> None:
    seen = group(torch.zeros(20, 64), UP)
    seen.weights[0][:4] = 0
    for activations in ("dynamic", "static"):
        result = made(seen, activations=activations)
        assert bool(torch.isfinite(result.weights[0].dequantize()).all())
        assert float(result.weights[0].dequantize()[:4].abs().max()) == 0


def test_q34_asymmetric_weights_and_other_widths_are_refused() -> None:
    with pytest.raises(ConfigError, match="asymmetric int8 weights run in no kernel"):
        W8A8Quantizer(W8A8Options(symmetric=False), [UP])
    for wrong in ({"bits": 4}, {"group_size": 64}, {"alpha": 2}, {"activations": "none"}):
        with pytest.raises(ValidationError):
            W8A8Options(**wrong)  # type: ignore[arg-type]


# --- files


@pytest.mark.parametrize("activations", ["dynamic", "static"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_file_holds_the_codes_that_were_chosen(activations: str, symmetric: bool) -> None:
    seen = group(inputs(), UP)
    (weight,) = made(seen, activations=activations, symmetric_inputs=symmetric).weights
    config = CompressedTensorsConfig.for_weights(
        "compressed-tensors", {UP: LayerFacts(weight.spec, True, torch.float32)}
    )
    tensors = config.serialise(UP, weight)
    assert torch.equal(tensors["weight"], weight.codes)
    assert tensors["weight"].dtype == torch.int8
    assert set(tensors) == {"weight", "weight_scale"} | (
        set() if activations == "dynamic" else {"input_scale"} | (set() if symmetric else {"input_zero_point"})
    )
    back = config.canonicalise(UP, tensors)
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.dequantize(), weight.dequantize())


def test_the_formats_own_package_opens_it() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    for options in ({}, {"activations": "static", "symmetric_inputs": False}):
        (weight,) = made(group(inputs(), UP), **options).weights
        facts = {UP: LayerFacts(weight.spec, True, torch.float32)}
        config = CompressedTensorsConfig.for_weights("compressed-tensors", facts)
        (scheme,) = QuantizationConfig.model_validate(config.settings()).config_groups.values()
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        found = compressor.decompress(dict(config.serialise(UP, weight)), scheme)["weight"]
        assert torch.equal(found, weight.dequantize())


def test_a_whole_model_is_quantised_written_and_served(tmp_path: Path) -> None:
    model, text = tiny_model(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    command = [sys.executable, "-m", "octavo.cli", "quantize", str(model), "--method", "w8a8"]
    command += ["--calibration", str(text), "--num-samples", "4", "--max-length", "64", "--disable-progress"]
    run = subprocess.run([*command, "--out", str(tmp_path / "made")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    settings = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert (settings["quant_method"], settings["format"]) == ("compressed-tensors", "int-quantized")
    codes = load_file(tmp_path / "made" / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert codes.dtype == torch.int8
    llm = LLM(str(tmp_path / "made"), num_blocks_override=32, disable_progress=True)
    assert {str(report.spec) for report in llm.engine.model_info.linears} >= {"int8 channel x int8 per_token"}
    assert llm.generate(["The quick"], use_tqdm=False)[0].outputs[0].token_ids
