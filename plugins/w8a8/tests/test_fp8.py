"""fp8 checkpoints: what every shape of scale means, settings of each writer, and refusals that name what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import (
    ActivationSpec,
    CheckpointError,
    LayerFacts,
    LinearLayer,
    QuantizedWeight,
    QuantSource,
    TensorInfo,
    WeightSpec,
    quantize_inputs,
    round_to_nearest,
)
from octavo.testing import random_weight
from octavo_w8a8.fp8 import PER_TOKEN, STATIC, FP8Config

LAYER = LinearLayer("model.layers.0.mlp.up_proj", 300, 200)
BLOCK = ActivationSpec("fp8_e4m3", "per_group", group_size=128)
FINITE = [code for code in range(256) if code & 0x7F != 0x7F]


def parse(**raw: Any) -> FP8Config:
    return FP8Config.parse(QuantSource(raw, "config.json: quantization_config"))


def headers(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    return {
        suffix: TensorInfo(f"{LAYER.name}.{suffix}", tensor.dtype, tuple(tensor.shape), "model.safetensors")
        for suffix, tensor in tensors.items()
    }


def codes(rows: int = 200, columns: int = 300) -> Tensor:
    """Every finite code, in an order that repeats in no row."""
    numbers = (torch.arange(rows)[:, None] * 7 + torch.arange(columns)[None]) % len(FINITE)
    return torch.tensor(FINITE, dtype=torch.uint8)[numbers].view(torch.float8_e4m3fn)


def decoded(tensor: Tensor) -> Tensor:
    """e4m3fn by its definition, bit by bit, without torch's own conversion."""
    raw = tensor.view(torch.uint8).long()
    sign, exponent, mantissa = raw >> 7, (raw >> 3) & 15, (raw & 7).double()
    value = torch.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    return value * (1 - 2 * sign)


def load(config: FP8Config, tensors: Mapping[str, Tensor], layer: LinearLayer = LAYER) -> QuantizedWeight:
    spec = config.spec_for(layer, headers(tensors))
    weight = config.canonicalise(layer, tensors)
    weight.check(layer)
    assert weight.spec == spec
    return weight


def refusal(action: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        action(*arguments)
    return str(caught.value)


# --- what the numbers mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (200, 1), (200,)])
def test_scales_per_tensor_and_per_channel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    scales = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5).to(dtype)
    weight = load(parse(activation_scheme="dynamic"), {"weight": codes(), "weight_scale": scales})
    group = (1, -1) if scales.numel() > 1 else (-1, -1)
    assert weight.spec == WeightSpec("fp8_e4m3", group, activation=PER_TOKEN)
    assert weight.scales is not None
    assert weight.scales.dtype == dtype
    expected = decoded(codes()) * (scales.double().reshape(-1, 1))
    assert torch.equal(weight.dequantize(), expected.float())


@pytest.mark.parametrize("said", [True, False])
def test_block_scales_multiply_and_the_last_blocks_are_cut(said: bool) -> None:
    config = parse(activation_scheme="dynamic", **({"weight_block_size": [128, 128]} if said else {}))
    scales = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 0.5]])
    weight = load(config, {"weight": codes(), "weight_scale_inv": scales})
    assert weight.spec == WeightSpec("fp8_e4m3", (128, 128), activation=BLOCK)
    rows, columns = torch.arange(200) // 128, torch.arange(300) // 128
    assert torch.equal(weight.dequantize(), (decoded(codes()) * scales[rows][:, columns]).float())


def test_powers_of_two_as_scales_are_read_exactly() -> None:
    scales = torch.tensor([[120, 127, 130], [121, 126, 133]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weight = load(
        parse(weight_block_size=[128, 128], scale_fmt="ue8m0"), {"weight": codes(), "weight_scale_inv": scales}
    )
    assert weight.scales is not None
    assert torch.equal(weight.scales, 2.0 ** torch.tensor([[-7.0, 0, 3], [-6, -1, 6]]))


@pytest.mark.parametrize(
    "names",
    [("weight_scale", "input_scale"), ("weight_scale_inv", "activation_scale"), ("weight_scale", "act_scale")],
)
@pytest.mark.parametrize("scheme", [{"activation_scheme": "static"}, {"activation_scheme": "STATIC"}, {}])
def test_static_scales_of_inputs(names: tuple[str, str], scheme: dict[str, str]) -> None:
    tensors = {"weight": codes(), names[0]: torch.tensor(0.5), names[1]: torch.tensor([0.25])}
    weight = load(parse(**scheme, weight_block_size=None), tensors)
    assert weight.spec == WeightSpec("fp8_e4m3", (-1, -1), activation=STATIC)
    assert weight.input_scale is not None
    assert weight.input_scale.tolist() == [0.25]


def test_dynamic_inputs_are_scaled_token_by_token() -> None:
    """As vLLM does it for scales per tensor: a scale for the whole batch would let a row change its neighbours."""
    spec = parse(activation_scheme="dynamic").spec_for(
        LAYER, headers({"weight": codes(), "weight_scale": torch.tensor(1.0)})
    )
    assert spec is not None
    assert spec.activation == ActivationSpec("fp8_e4m3", "per_token")


def test_q35_values_beyond_448_saturate() -> None:
    far = torch.tensor([[448.0, 449.0, 464.0, 465.0, 1e30, -1e30, -448.0, 3.0]])
    found, _, _ = quantize_inputs(far, STATIC, torch.tensor([1.0]))
    assert found.float().tolist() == [[448, 448, 448, 448, 448, -448, -448, 3]]
    spec = parse().online_spec(LAYER)
    assert spec is not None
    rounded = round_to_nearest(torch.tensor([[3e38, -3e38, 1.0], [7e-10, -1e-9, 3e-10]]), spec)
    assert bool(torch.isfinite(rounded.codes.float()).all())
    assert rounded.codes.float()[:, :2].abs().amax(1).tolist() == [448, 448]


def test_q36_fnuz_codes_are_read_as_fn_with_half_the_scale() -> None:
    """The same bits mean twice as much in fn; every code but the NaN and +-240 is exact."""
    raw = torch.tensor([[c for c in FINITE if c != 0x80]], dtype=torch.uint8)
    layer = LinearLayer(LAYER.name, raw.shape[1], 1)
    tensors = {"weight": raw.view(torch.float8_e4m3fnuz), "weight_scale": torch.tensor([0.75])}
    weight = load(parse(activation_scheme="dynamic"), tensors, layer)
    assert weight.codes.dtype == torch.float8_e4m3fn
    assert torch.equal(weight.dequantize(), raw.view(torch.float8_e4m3fnuz).float() * 0.75)


@pytest.mark.parametrize(("code", "fact"), [(0x80, "0x80"), (0x7F, "240"), (0xFF, "240")])
def test_q36_fnuz_codes_without_a_counterpart_are_refused(code: int, fact: str) -> None:
    raw = torch.full((200, 300), 0x38, dtype=torch.uint8)
    raw[3, 5] = code
    tensors = {"weight": raw.view(torch.float8_e4m3fnuz), "weight_scale": torch.tensor([1.0])}
    message = refusal(parse().canonicalise, LAYER, tensors)
    assert fact in message
    assert f"{LAYER.name}: weight holds 1 code(s)" in message


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_q45_fused_members_keep_a_scale_each(name: str) -> None:
    """q, k and v with a scale per tensor, stacked, are what each is alone; one scale is never stretched over all."""
    parts = [
        load(parse(), {"weight": codes(), name: torch.tensor([scale])}, LinearLayer(f"layer.{member}", 300, 200))
        for member, scale in (("q_proj", 0.5), ("k_proj", 3.0), ("v_proj", 0.01))
    ]
    assert parts[0].why_not_concat(parts[1]) is None
    fused = parts[0].concat(parts[1:])
    assert torch.equal(fused.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert fused.spec.group_shape == (1, -1)


# --- settings


@pytest.mark.parametrize(
    ("raw", "kv"),
    [
        # AutoFP8, with and without its KV scales
        ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, None),
        ({"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}, "fp8_e4m3"),
        # DeepSeek, Qwen3
        (
            {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
            None,
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0", "modules_to_not_convert": []},
            None,
        ),
        # transformers
        ({"quant_method": "fp8", "dequantize": False, "weight_block_size": None, "modules_to_convert": None}, None),
        # ModelOpt: hf_quant_config.json, config.json
        (
            {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"], "group_size": None},
            "fp8_e4m3",
        ),
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "kv_cache_quant_algo": None}, None),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "FP8",
                "config_groups": {"group_0": {"targets": ["Linear"]}},
                "ignore": ["lm_head"],
                "producer": {"name": "modelopt"},
                "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            },
            "fp8_e4m3",
        ),
    ],
)
def test_settings_of_every_writer(raw: dict[str, Any], kv: str | None) -> None:
    config = parse(**raw)
    assert config.unread_keys == ()
    assert config.kv_cache == kv
    assert parse(**config.settings()) == config
    assert FP8Config.translate(QuantSource(raw, "here")) is None


@pytest.mark.parametrize(
    ("raw", "facts"),
    [
        ({"activation_scheme": "sometimes"}, ["activation_scheme", "sometimes"]),
        ({"weight_block_size": [128]}, ["weight_block_size"]),
        ({"weight_block_size": [128, 0]}, ["weight_block_size", "0"]),
        ({"fmt": "e5m2"}, ["fmt", "e5m2"]),
        ({"quant_algo": "NVFP4"}, ["quant_algo", "nvfp4"]),
        ({"quant_algo": "FP8_PB_WO"}, ["quant_algo", "fp8_pb_wo"]),
        ({"kv_cache_quant_algo": "NVFP4"}, ["kv_cache_quant_algo", "nvfp4"]),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, ["kv_cache_scheme", "int"]),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True}}, ["kv_cache_scheme", "dynamic"]),
    ],
)
def test_settings_that_cannot_be_honoured(raw: dict[str, Any], facts: list[str]) -> None:
    message = refusal(lambda: parse(**raw))
    for fact in (*facts, "config.json: quantization_config"):
        assert fact in message


def test_config_groups_under_this_name_are_compressed_tensors() -> None:
    raw = {"quant_method": "w8a8_fp8", "config_groups": {"group_0": {}}, "format": "float-quantized"}
    found = FP8Config.translate(QuantSource(raw, "config.json"))
    assert found is not None
    assert found.raw == {**raw, "quant_method": "compressed-tensors"}
    assert found.where == "config.json"


def test_a_folder_without_quant_method_is_recognised() -> None:
    tensors = headers({"weight": codes(), "weight_scale_inv": torch.ones(2, 3)})
    named = {info.name: info for info in tensors.values()}
    assert FP8Config.detect(None, named)
    assert FP8Config.detect(QuantSource({"activation_scheme": "dynamic"}, "here"), named)
    assert not FP8Config.detect(QuantSource({"bits": 4}, "here"), named)
    assert FP8Config.infer(named) == {"activation_scheme": "dynamic"}
    assert not FP8Config.detect(None, {name: info for name, info in named.items() if name.endswith(".weight")})


# --- refusals


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_are_refused_by_name(code: int) -> None:
    raw = codes().view(torch.uint8).clone()
    raw[199, 299] = code
    tensors = {"weight": raw.view(torch.float8_e4m3fn), "weight_scale": torch.tensor([1.0])}
    message = refusal(parse().canonicalise, LAYER, tensors)
    assert f"{LAYER.name}: weight holds 1 code(s) that are NaN" in message
    weight = QuantizedWeight(
        WeightSpec("fp8_e4m3", (-1, -1), activation=PER_TOKEN), tensors["weight"], torch.ones(1, 1)
    )
    assert "NaN" in refusal(parse().serialise, LAYER, weight)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("suffix", "shape"), [("weight_scale", (1,)), ("weight_scale", (200, 1)), ("weight_scale_inv", (2, 3))]
)
def test_scales_that_no_quantiser_writes_are_refused(suffix: str, shape: tuple[int, ...], value: float) -> None:
    scales = torch.ones(shape)
    scales.view(-1)[-1] = value
    message = refusal(parse().canonicalise, LAYER, {"weight": codes(), suffix: scales})
    assert f"{LAYER.name}.{suffix}" in message


def test_a_zero_scale_of_a_block_of_zeros_is_read() -> None:
    """A quantiser that divides by the largest magnitude writes both for an unused block."""
    raw = codes().view(torch.uint8).clone()
    raw[128:, 256:] = 0x80  # -0
    scales = torch.ones(2, 3)
    scales[1, 2] = 0
    weight = load(parse(), {"weight": raw.view(torch.float8_e4m3fn), "weight_scale_inv": scales})
    assert not bool(weight.dequantize()[128:, 256:].any())


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf")])
def test_a_scale_of_inputs_that_is_none_is_refused(value: float) -> None:
    tensors = {"weight": codes(), "weight_scale": torch.tensor(1.0), "input_scale": torch.tensor([value])}
    assert f"tensor: {LAYER.name}.input_scale" in refusal(parse().canonicalise, LAYER, tensors)


@pytest.mark.parametrize(
    ("raw", "tensors", "facts"),
    [
        ({}, {"weight": codes()}, ["weight_scale is missing"]),
        ({"weight_block_size": [128, 128]}, {"weight": codes()}, ["weight_scale_inv is missing"]),
        (
            {"weight_block_size": [128, 128]},
            {"weight": codes(), "weight_scale": torch.ones(1)},
            ["weight_scale_inv is missing"],
        ),
        ({}, {"weight_scale": torch.ones(1)}, ["weight is missing beside weight_scale"]),
        (
            {"activation_scheme": "static"},
            {"weight": codes(), "weight_scale": torch.ones(1)},
            ["input_scale is missing", "set activation_scheme to dynamic"],
        ),
        (
            {"activation_scheme": "dynamic"},
            {"weight": codes(), "weight_scale": torch.ones(1), "input_scale": torch.ones(1)},
            ["input_scale is stored, but", "activation_scheme: dynamic", "set activation_scheme to static"],
        ),
        (
            {},
            {"weight": codes(), "weight_scale": torch.ones(1), "weight_scale_inv": torch.ones(1)},
            ["weight_scale is stored too"],
        ),
        ({}, {"weight": codes(), "weight_scale": torch.ones(2, 3)}, ["expected: () or (1,) or (200, 1)", "(2, 3)"]),
        (
            {"weight_block_size": [64, 64]},
            {"weight": codes(), "weight_scale_inv": torch.ones(2, 3)},
            ["expected: (4, 5)", "found: (2, 3)"],
        ),
        ({}, {"weight": codes().float(), "weight_scale": torch.ones(1)}, ["torch.float8_e4m3fn", "torch.float32"]),
        (
            {},
            {"weight": codes().float().to(torch.float8_e5m2), "weight_scale": torch.ones(1)},
            ["torch.float8_e5m2"],
        ),
    ],
)
def test_tensors_that_contradict_are_refused_with_both_facts(
    raw: dict[str, Any], tensors: dict[str, Tensor], facts: list[str]
) -> None:
    message = refusal(parse(**raw).spec_for, LAYER, headers(tensors))
    for fact in (*facts, LAYER.name, "model.safetensors"):
        assert fact in message


# --- writing


def weight_of(spec: WeightSpec, layer: LinearLayer = LAYER) -> QuantizedWeight:
    return random_weight(spec, layer.out_features, layer.in_features, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("group", [(-1, -1), (1, -1), (128, 128), (64, 32)])
@pytest.mark.parametrize("dynamic", [True, False])
def test_settings_made_for_weights_write_and_read_them(group: tuple[int, int], dynamic: bool) -> None:
    activation = STATIC if not dynamic else PER_TOKEN
    if dynamic and group[1] > 0:
        activation = ActivationSpec("fp8_e4m3", "per_group", group_size=group[1])
    spec = WeightSpec("fp8_e4m3", group, activation=activation)
    head = LinearLayer("lm_head", 300, 512)
    layers = {head: LayerFacts(WeightSpec("float", (-1, -1))), LAYER: LayerFacts(spec, True, torch.float32)}
    config = FP8Config.for_weights("fp8", layers)
    assert config.ignored_layers == ("lm_head",)
    again = parse(**config.settings())
    assert again == config
    weight = weight_of(spec)
    found = load(again, again.serialise(LAYER, weight))
    assert torch.equal(found.dequantize(), weight.dequantize())
    assert (found.input_scale is None) == dynamic


@pytest.mark.parametrize(
    "spec",
    [
        WeightSpec("fp8_e4m3", (1, -1)),
        WeightSpec("fp8_e4m3", (1, -1), activation=ActivationSpec("int8")),
        WeightSpec("fp8_e4m3", (1, -1), activation=ActivationSpec("fp8_e4m3", "per_tensor")),
        WeightSpec("fp8_e4m3", (128, 128), activation=PER_TOKEN),
        WeightSpec("fp8_e5m2", (1, -1), activation=PER_TOKEN),
        WeightSpec("int8", (1, -1), activation=PER_TOKEN),
        WeightSpec("fp8_e4m3", (-1, -1), activation=STATIC),
        WeightSpec("fp8_e4m3", (128, 128), activation=BLOCK),
    ],
)
def test_a_layer_that_does_not_fit_the_others_is_named(spec: WeightSpec) -> None:
    first = LinearLayer("model.layers.0.mlp.gate_proj", 300, 200)
    usual = LayerFacts(WeightSpec("fp8_e4m3", (1, -1), activation=PER_TOKEN), True, torch.float32)
    layers = {first: usual, LAYER: LayerFacts(spec, True, torch.float32)}
    assert refusal(FP8Config.for_weights, "fp8", layers).startswith(f"{LAYER.name}: fp8 cannot hold this weight")
