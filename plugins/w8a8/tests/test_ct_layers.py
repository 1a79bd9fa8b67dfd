"""Layers: what stored tensors mean under a scheme, and what they must not be."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo import (
    ActivationSpec,
    CheckpointError,
    LinearLayer,
    QuantizedWeight,
    QuantSource,
    WeightSpec,
    quantize_inputs,
    round_to_nearest,
)
from octavo_w8a8.compressed_tensors import CompressedTensorsConfig
from octavo_w8a8.goldens import settings

LAYER = LinearLayer("model.layers.0.mlp.up_proj", 64, 32)
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def make(weights, inputs=None, form="mixed-precision", **more):
    return CompressedTensorsConfig.parse(QuantSource({**settings(form, weights, inputs), **more}, "test"))


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int8_tensors(scale=(32, 1)):
    codes = torch.randint(-128, 128, (32, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    return {"weight": codes, "weight_scale": random(*scale).abs().to(torch.bfloat16) + 0.01}


def packed_tensors(config, act_order=False, zeros=None, layer=LAYER, group=16, bits=4):
    generator = torch.Generator().manual_seed(bits)
    shape, groups = (layer.out_features, layer.in_features), layer.in_features // group
    index = (torch.randperm(layer.in_features, generator=generator) // group).to(torch.int32) if act_order else None
    weight = QuantizedWeight(
        WeightSpec(f"uint{bits}", (1, group), True, act_order),
        torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8),
        torch.rand(layer.out_features, groups, generator=generator).half(),
        torch.full((layer.out_features, groups), 2.0 ** (bits - 1)) if zeros is None else zeros,
        index,
    )
    return weight, config.serialise(layer, weight)


def load(config, tensors, headers, layer=LAYER):
    spec = config.spec_for(layer, headers(tensors, layer.name))
    weight = config.canonicalise(layer, tensors)
    weight.check(layer)
    assert spec in (weight.spec, replace(weight.spec, act_order=True))
    return weight


def refusal(config, tensors, headers, layer=LAYER):
    """The message with which a layer is refused, by its headers or at the latest by its content."""

    def read():
        config.spec_for(layer, headers(tensors, layer.name))
        config.canonicalise(layer, tensors)

    with pytest.raises(CheckpointError) as caught:
        read()
    assert layer.name in str(caught.value)
    return str(caught.value)


# --- int8 and fp8


@pytest.mark.parametrize(
    ("weights", "shape", "group_shape"),
    [
        (INT8, (32, 1), (1, -1)),
        ({"strategy": "tensor"}, (1,), (-1, -1)),
        ({"strategy": "tensor"}, (), (-1, -1)),
        ({"group_size": 16}, (32, 4), (1, 16)),
        ({"group_size": 64}, (32, 1), (1, -1)),
        ({"group_size": 48}, (32, 2), (1, 48)),
    ],
)
@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized", "mixed-precision"])
def test_int8_in_every_granularity(weights, shape, group_shape, form, headers):
    tensors = int8_tensors()
    tensors["weight_scale"] = (random(*shape, seed=3).abs() + 0.1).half()
    weight = load(make(weights, TOKEN, form), tensors, headers)
    assert weight.spec == WeightSpec("int8", group_shape, activation=ActivationSpec("int8"))
    columns = tensors["weight_scale"].float().reshape(-1, shape[1] if len(shape) == 2 else 1)
    width = {1: 64, 2: 48, 4: 16}[columns.shape[1]]
    expected = tensors["weight"].float() * columns.repeat_interleave(width, 1)[:, :64]
    assert torch.equal(weight.dequantize(), expected)
    assert weight.scales.dtype == torch.float16


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (None, None),
        (TOKEN, ActivationSpec("int8")),
        ({**TOKEN, "symmetric": False}, ActivationSpec("int8", symmetric=False)),
        (STATIC, ActivationSpec("int8", "per_tensor", dynamic=False)),
        ({**STATIC, "symmetric": False}, ActivationSpec("int8", "per_tensor", dynamic=False, symmetric=False)),
        ({"strategy": "group", "group_size": 32, "dynamic": True}, ActivationSpec("int8", "per_group", group_size=32)),
    ],
)
def test_inputs_in_every_way(inputs, expected, headers):
    tensors = int8_tensors()
    if inputs is not None and not inputs["dynamic"]:
        tensors |= {"input_scale": torch.tensor([0.5]), "input_zero_point": torch.tensor([0], dtype=torch.int8)}
    weight = load(make(INT8, inputs), tensors, headers)
    assert weight.spec == WeightSpec("int8", (1, -1), activation=expected)
    static = expected is not None and not expected.dynamic
    assert (weight.input_scale is not None) is static
    assert (weight.input_zero is not None) is (static and not expected.symmetric)


def test_fp8_in_every_granularity(headers):
    codes = random(32, 64).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    block = {"type": "float", "strategy": "block", "block_structure": [24, 48]}
    for weights, shape, group_shape in [
        (FP8, (32, 1), (1, -1)),
        ({**FP8, "strategy": "tensor"}, (1,), (-1, -1)),
        (block, (2, 2), (24, 48)),
    ]:
        scales = random(*shape, seed=1).abs() + 0.1
        weight = load(make(weights, {**TOKEN, "type": "float"}), {"weight": codes, "weight_scale": scales}, headers)
        assert weight.spec == WeightSpec("fp8_e4m3", group_shape, activation=ActivationSpec("fp8_e4m3"))
        wide = scales.reshape(-1, shape[-1]).repeat_interleave(24, 0)[:32].repeat_interleave(48, 1)[:, :64]
        expected = codes.float() * (wide if group_shape == (24, 48) else scales)
        assert torch.equal(weight.dequantize(), expected)


def test_codes_of_4_bits_in_bytes(headers):
    """W4A8: 4-bit numbers that nobody packed."""
    tensors = int8_tensors((32, 4))
    tensors["weight"] = tensors["weight"] >> 4
    weight = load(make(INT4, TOKEN), tensors, headers)
    assert weight.spec == WeightSpec("int4", (1, 16), activation=ActivationSpec("int8"))
    tensors["weight"][0, 0] = 8
    config = make(INT4, TOKEN)
    with pytest.raises(CheckpointError, match=r"range of the codes \(-8\.\.8\)"):
        config.canonicalise(LAYER, tensors).check(LAYER)


def test_parameters_that_calibration_left_behind_are_taken_and_ignored(headers):
    tensors = {**int8_tensors(), "input_scale": torch.tensor([0.5])}
    assert "input_scale" in CompressedTensorsConfig.suffixes  # so that the loader takes it
    weight = load(make(INT8, TOKEN), tensors, headers)
    assert weight.input_scale is None


def test_numbers_of_the_worked_example():
    """formats.md 4.4: weights by /127.5, dynamic symmetric and static asymmetric inputs, with the correction of the zero."""
    weight = CompressedTensorsConfig.parse(
        QuantSource(settings("int-quantized", INT8, {**STATIC, "symmetric": False}), "test")
    ).canonicalise(
        LinearLayer("layer", 4, 2),
        {
            "weight": torch.tensor([[-127, 32, 64, 115], [64, -127, 96, 32]], dtype=torch.int8),
            "weight_scale": torch.tensor([[1.0], [0.04]]) / 127.5,
            "input_scale": torch.tensor([4 / 255]),
            "input_zero_point": torch.tensor([-64], dtype=torch.int8),
            "bias": torch.tensor([1.0, 2.0]),
        },
    )
    x = torch.tensor([[2, -1, 0.5, 3]])
    codes, scales, _ = quantize_inputs(x, ActivationSpec("int8"))
    assert codes.tolist() == [[85, -42, 21, 127]]
    assert (codes.int() @ weight.codes.int().T).tolist() == [[3810, 16854]]
    y = scales * weight.scales.T * (codes.float() @ weight.codes.float().T)
    assert torch.allclose(y, torch.tensor([[0.70588, 0.12490]]), atol=1e-5)
    codes, scales, zeros = quantize_inputs(x, weight.spec.activation, weight.input_scale, weight.input_zero)
    assert codes.tolist() == [[63, -128, -32, 127]]
    accumulated, sums = codes.int() @ weight.codes.int().T, weight.codes.int().sum(1)
    assert accumulated.tolist() == [[460, 21280]]
    assert (accumulated - zeros.int() * sums).tolist() == [[5836, 25440]]
    y = scales * weight.scales.T * (accumulated - zeros * sums)
    assert torch.allclose(y, torch.tensor([[0.71800, 0.12519]]), atol=1e-5)


def test_q33_static_asymmetric_inputs_with_a_bias(headers):
    tensors = {
        **int8_tensors(),
        "input_scale": torch.tensor([0.02], dtype=torch.bfloat16),
        "input_zero_point": torch.tensor([-20], dtype=torch.int8),
        "bias": random(32),
    }
    weight = load(make(INT8, {**STATIC, "symmetric": False}), tensors, headers)
    assert float(weight.input_zero) == -20
    assert weight.input_scale.dtype == torch.bfloat16
    codes, scales, zeros = quantize_inputs(random(3, 64), weight.spec.activation, weight.input_scale, weight.input_zero)
    integers = codes.int() @ weight.codes.int().T - zeros.int() * weight.codes.int().sum(1)
    folded = scales * weight.scales.float().T * integers + weight.bias
    plain = ((codes.float() - zeros) * scales) @ weight.dequantize().T + weight.bias
    assert torch.allclose(folded, plain, rtol=1e-5, atol=1e-4)


def test_q32_rows_of_zeros_stay_finite():
    for symmetric in (True, False):
        codes, scales, zeros = quantize_inputs(torch.zeros(2, 64), ActivationSpec("int8", symmetric=symmetric))
        values = codes.float() - (0 if zeros is None else zeros)
        assert not (values * scales).any()


def test_q34_asymmetric_int8_weights_keep_their_zero_points(headers, same_bits):
    config = make({**INT8, "symmetric": False}, TOKEN)
    points = torch.randint(-128, 128, (32, 1), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    tensors = {**int8_tensors(), "weight_zero_point": points}
    weight = load(config, tensors, headers)
    assert weight.spec == WeightSpec("int8", (1, -1), has_zeros=True, activation=ActivationSpec("int8"))
    expected = (tensors["weight"].float() - points.float()) * tensors["weight_scale"].float()
    assert torch.equal(weight.dequantize(), expected)
    again = config.serialise(LAYER, weight)
    assert all(same_bits(again[suffix], tensor) for suffix, tensor in tensors.items())


def test_q35_fp8_codes_saturate_when_made():
    weight = round_to_nearest(torch.full((2, 2), 1e6), WeightSpec("fp8_e4m3", (-1, -1)))
    assert weight.codes.float().abs().max() == 448
    codes, _, _ = quantize_inputs(
        torch.tensor([[1e6, -1e6]]), ActivationSpec("fp8_e4m3", "per_tensor", dynamic=False), torch.tensor([1.0])
    )
    assert codes.float().tolist() == [[448, -448]]


def test_q45_scales_per_tensor_of_fused_members_stay_apart(headers):
    config = make({"strategy": "tensor"}, TOKEN)
    members = []
    for number, name in enumerate(["q_proj", "k_proj", "v_proj"]):
        layer = replace(LAYER, name=f"model.layers.0.self_attn.{name}")
        tensors = {**int8_tensors(), "weight_scale": torch.tensor([0.5 + number])}
        members.append(load(config, tensors, headers, layer))
    fused = members[0].concat(members[1:])
    assert fused.spec.group_shape == (1, -1)
    assert torch.equal(fused.dequantize(), torch.cat([member.dequantize() for member in members]))


def test_q45_a_fused_layer_with_one_scale(headers):
    layer = LinearLayer("model.layers.0.self_attn.qkv_proj", 64, 32)
    groups = {
        "g": {"targets": [r"re:.*\.(q|k|v)_proj$"], "weights": {"strategy": "tensor"}, "input_activations": TOKEN}
    }
    config = CompressedTensorsConfig.parse(QuantSource({"config_groups": groups}, "test"))
    weight = load(config, {**int8_tensors(), "weight_scale": torch.tensor([0.5])}, headers, layer)
    assert weight.spec.group_shape == (-1, -1)


# --- packed


def test_q21_asymmetric_without_zero_points_means_0(headers):
    config = make({**INT4, "symmetric": False})
    weight, tensors = packed_tensors(config)
    del tensors["weight_zero_point"]
    again = load(config, tensors, headers)
    assert torch.equal(again.zeros, torch.full((32, 4), 8.0))
    assert torch.equal(again.dequantize(), weight.dequantize())
    plain = load(make({**INT8, "symmetric": False}, TOKEN), int8_tensors(), headers)
    assert plain.zeros is None


def test_q22_symmetric_files_may_carry_zero_points_of_0(headers):
    weight, tensors = packed_tensors(make({**INT4, "symmetric": False}))
    config = make(INT4)
    for points in (tensors["weight_zero_point"], torch.zeros(32, 4, dtype=torch.int8)):
        assert torch.equal(load(config, {**tensors, "weight_zero_point": points}, headers).codes, weight.codes)
    points = torch.zeros(32, 1, dtype=torch.int8)
    assert load(make(INT8, TOKEN), {**int8_tensors(), "weight_zero_point": points}, headers).zeros is None
    codes = {"weight": torch.zeros(32, 64).to(torch.float8_e4m3fn), "weight_scale": torch.ones(32, 1)}
    assert load(make(FP8), {**codes, "weight_zero_point": points.to(torch.float8_e4m3fn)}, headers).zeros is None


@pytest.mark.parametrize(
    ("weights", "points"),
    [(INT4, torch.full((32, 4), 3, dtype=torch.int8)), (INT4, torch.zeros(4, 4, dtype=torch.int32))],
)
def test_q22_other_zero_points_in_symmetric_files_are_refused(weights, points, headers):
    _, tensors = packed_tensors(make(weights))
    message = refusal(make(weights), {**tensors, "weight_zero_point": points}, headers)
    for fact in ("the settings say symmetric", "weight_zero_point", "set symmetric to false"):
        assert fact in message


@pytest.mark.parametrize("actorder", [None, "group"])
def test_q23_an_order_of_minus_one_is_none(actorder, headers):
    config = make({**INT4, "actorder": actorder})
    weight, tensors = packed_tensors(make(INT4))
    tensors["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    again = load(config, tensors, headers)
    assert not again.spec.act_order
    assert again.group_index is None
    assert torch.equal(again.dequantize(), weight.dequantize())


def test_q24_order_by_group_is_read_and_written(headers, oracle, same_bits):
    config = make({**INT4, "actorder": "group"})
    weight, tensors = packed_tensors(config, act_order=True)
    again = load(config, tensors, headers)
    assert torch.equal(again.group_index, weight.group_index)
    arrays = {s: (t.float() if t.is_floating_point() else t).numpy() for s, t in tensors.items()}
    expected = oracle.ct_pack(
        arrays["weight_packed"], arrays["weight_scale"], (32, 64), 4, None, arrays["weight_g_idx"]
    )
    assert np.array_equal(again.dequantize().numpy(), expected)
    written = config.serialise(LAYER, again)
    assert all(same_bits(written[suffix], tensor) for suffix, tensor in tensors.items())


def test_q24_a_trivial_order_is_written_again(headers, same_bits):
    config = make({**INT4, "actorder": "group"})
    _, tensors = packed_tensors(config)
    assert torch.equal(tensors["weight_g_idx"], torch.arange(64, dtype=torch.int32) // 16)
    again = load(config, tensors, headers).without_trivial_order()
    assert not again.spec.act_order
    assert all(same_bits(config.serialise(LAYER, again)[suffix], tensor) for suffix, tensor in tensors.items())


def test_q24_orders_that_only_calibration_used_leave_nothing_to_load(headers):
    for actorder in ("weight", "static"):
        _, tensors = packed_tensors(make(INT4))
        assert not load(make({**INT4, "actorder": actorder}), tensors, headers).spec.act_order
    channel = make({"num_bits": 4, "strategy": "channel", "actorder": "group"})
    _, tensors = packed_tensors(channel, group=64)
    assert "weight_g_idx" not in tensors  # one group: no order to speak of
    assert not load(channel, tensors, headers).spec.act_order


def test_q24_order_by_group_without_its_list_is_refused(headers):
    _, tensors = packed_tensors(make(INT4))
    message = refusal(make({**INT4, "actorder": "group"}), tensors, headers)
    assert "weight_g_idx is missing" in message
    assert "actorder: group" in message


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_width_in_every_granularity(bits, strategy, symmetric, headers, same_bits):
    layer = LinearLayer("model.layers.0.mlp.up_proj", 72, 20)
    config = make({"num_bits": bits, "strategy": strategy, "group_size": 24, "symmetric": symmetric})
    shape = {"tensor": (1, 1), "channel": (20, 1), "group": (20, 3)}[strategy]
    generator = torch.Generator().manual_seed(bits)
    zeros = torch.randint(0, 2**bits, shape, generator=generator).float()
    weight = QuantizedWeight(
        WeightSpec(f"uint{bits}", {"tensor": (-1, -1), "channel": (1, -1), "group": (1, 24)}[strategy], True),
        torch.randint(0, 2**bits, (20, 72), generator=generator, dtype=torch.uint8),
        torch.rand(shape, generator=generator).to(torch.bfloat16),
        torch.full(shape, 2.0 ** (bits - 1)) if symmetric else zeros,
        bias=torch.rand(20),
    )
    tensors = config.serialise(layer, weight)
    assert ("weight_zero_point" in tensors) is not symmetric
    again = load(config, tensors, headers, layer)
    assert again.spec == weight.spec
    for field in ("codes", "scales", "zeros", "bias"):
        assert same_bits(getattr(again, field), getattr(weight, field)), field


# --- quirks that other formats share


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_q30_scales_keep_their_type(dtype, headers, same_bits):
    scales = (torch.rand(32, 1) * 1e-6).to(dtype)
    weight = load(make(INT8, TOKEN), {**int8_tensors(), "weight_scale": scales}, headers)
    assert same_bits(weight.scales, scales)
    assert same_bits(make(INT8, TOKEN).serialise(LAYER, weight)["weight_scale"], scales)


def test_q36_codes_of_another_chip_are_refused(headers):
    """The same bits mean half as much in float8_e4m3fnuz, and no writer stores it under this format."""
    tensors = {"weight": torch.zeros(32, 64).to(torch.float8_e4m3fnuz), "weight_scale": torch.ones(32, 1)}
    assert "torch.float8_e4m3fnuz" in refusal(make(FP8), tensors, headers)


def test_q38_a_short_last_group_is_read_and_not_written(headers):
    config = make({"num_bits": 8, "group_size": 48}, TOKEN)
    weight = load(config, int8_tensors((32, 2)), headers)
    assert weight.spec.group_shape == (1, 48)
    with pytest.raises(CheckpointError, match="64 inputs are not a multiple of its group size 48"):
        config.serialise(LAYER, weight)


@pytest.mark.parametrize("out_features", [1, 5, 12, 48])
def test_q39_any_number_of_outputs_is_packed(out_features, headers):
    layer = replace(LAYER, out_features=out_features)
    zeros = torch.arange(out_features * 4).reshape(-1, 4).remainder(16).float()
    config = make({**INT4, "symmetric": False})
    weight, tensors = packed_tensors(config, zeros=zeros, layer=layer)
    assert tensors["weight_zero_point"].shape == (-(-out_features // 8), 4)
    assert torch.equal(load(config, tensors, headers, layer).dequantize(), weight.dequantize())


def test_q44_fused_members_of_different_schemes_stay_apart(headers):
    groups = {
        "a": {"targets": ["re:.*gate_proj"], "weights": INT4},
        "b": {"targets": ["Linear"], "weights": INT8, "input_activations": TOKEN},
    }
    config = CompressedTensorsConfig.parse(QuantSource({"config_groups": groups}, "test"))
    gate = replace(LAYER, name="model.layers.0.mlp.gate_proj")
    _, tensors = packed_tensors(config, layer=gate)
    left, right = load(config, tensors, headers, gate), load(config, int8_tensors(), headers)
    assert "specs differ" in left.why_not_concat(right)


def test_q54_a_bias_is_used_if_it_is_stored(headers):
    assert load(make(INT8, TOKEN), int8_tensors(), headers).bias is None
    bias = torch.arange(32.0)
    assert torch.equal(load(make(INT8, TOKEN), {**int8_tensors(), "bias": bias}, headers).bias, bias)


# --- which layers


def test_q47_layers_that_settings_quantise_may_be_plain(headers, caplog):
    config = make(INT8, TOKEN)
    layer = replace(LAYER, name="model.layers.7.mlp.q47_proj")
    plain = headers({"weight": torch.zeros(32, 64), "bias": torch.zeros(32)}, layer.name)
    with caplog.at_level(logging.WARNING):
        assert config.spec_for(layer, plain) is None
        assert config.spec_for(replace(layer, name=layer.name.replace("layers.7", "layers.8")), plain) is None
    (told,) = caplog.messages
    assert "model.layers.*.mlp.q47_proj is stored as plain numbers" in told
    assert make(INT8, TOKEN).spec_for(layer, plain) is None
    assert caplog.messages == [told] * 2  # another checkpoint is told of its own
    assert config.spec_for(layer, {}) is None


@pytest.mark.parametrize("ignore", ["re:.*q46_", "model.layers.7.mlp.q46_proj", "Linear"])
def test_q46_layers_that_settings_ignore_may_be_quantised(ignore, headers, caplog):
    layer = replace(LAYER, name="model.layers.7.mlp.q46_proj")
    config = make(INT8, TOKEN, ignore=[ignore])
    with caplog.at_level(logging.WARNING):
        assert config.spec_for(layer, headers(int8_tensors(), layer.name)) is not None
    assert "model.layers.*.mlp.q46_proj is stored quantised, though settings ignore it" in caplog.text


def test_q67_ignore_takes_names_of_classes(headers, caplog):
    layer = replace(LAYER, name="model.layers.7.mlp.q67_proj")
    plain = headers({"weight": torch.zeros(32, 64)}, layer.name)
    with caplog.at_level(logging.WARNING):
        assert make(INT8, TOKEN, ignore=["Linear"]).spec_for(layer, plain) is None
        assert "q67_proj" not in caplog.text  # what the settings say is what the file holds
        assert make(INT8, TOKEN, ignore=["Embedding"]).spec_for(layer, plain) is None
        assert "q67_proj" in caplog.text


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
@pytest.mark.parametrize("target", ["Linear", "re:.*(embed_tokens|lm_head)$"])
def test_q52_heads_and_embeddings_are_quantised_if_their_tensors_are(name, target, headers):
    layer = LinearLayer(name, 64, 96)
    config = CompressedTensorsConfig.parse(
        QuantSource({"config_groups": {"g": {"targets": [target], "weights": INT4}}, "ignore": ["lm_head"]}, "test")
    )
    weight, tensors = packed_tensors(config, layer=layer)
    assert torch.equal(load(config, tensors, headers, layer).dequantize(), weight.dequantize())


# --- refused


@pytest.mark.parametrize(
    ("weights", "inputs", "change", "facts"),
    [
        (FP8, None, {}, ["torch.int8", "fp8_e4m3", "type 'int'"]),
        (INT8, None, {"weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)}, ["float8_e4m3fn", "int8"]),
        (INT8, None, {"weight": torch.zeros(32, 64)}, ["torch.float32", "fakequant", "save the model compressed"]),
        (INT8, None, {"weight": torch.zeros(32, 64).to(torch.float8_e5m2)}, ["torch.float8_e5m2"]),
        (INT8, None, {"weight": torch.zeros(4, 32, 64, dtype=torch.int8)}, ["not a matrix", "experts"]),
        (INT8, None, {"weight": torch.zeros(32, 60, dtype=torch.int8)}, ["(32, 64)", "(32, 60)"]),
        (INT8, None, {"weight_scale": torch.ones(32, 2)}, ["(32, 1)", "(32, 2)", "group_size 32"]),
        (INT8, None, {"weight_scale": torch.ones(1)}, ["(32, 1)", "(1,)", "strategy tensor"]),
        (
            INT8,
            None,
            {"weight_scale": torch.ones(32, 1, dtype=torch.float8_e4m3fn)},
            ["float8_e4m3fn", "torch.bfloat16"],
        ),
        (INT8, None, {"weight_scale": None}, ["weight_scale is missing"]),
        (INT8, None, {"weight": None}, ["weight is missing", "weight_packed"]),
        (INT8, None, {"weight_packed": torch.zeros(32, 16, dtype=torch.int32)}, ["both weight and weight_packed"]),
        (INT8, None, {"weight_global_scale": torch.ones(1)}, ["weight_global_scale", "NVFP4"]),
        (INT8, None, {"meta": torch.zeros(8, dtype=torch.int16)}, ["marlin-24"]),
        (INT8, STATIC, {}, ["input_scale is missing", "static"]),
        (INT8, {**STATIC, "symmetric": False}, {"input_scale": torch.ones(1)}, ["input_zero_point is missing"]),
        (INT8, STATIC, {"input_scale": torch.ones(32)}, ["input_scale", "(1,)", "(32,)"]),
        (INT8, STATIC, {"input_scale": torch.ones(1, dtype=torch.int8)}, ["input_scale", "torch.int8"]),
        (INT8, STATIC, {"input_scale": torch.zeros(1)}, ["input_scale is no scale", "[0.0]"]),
        (INT8, STATIC, {"input_scale": -torch.ones(1)}, ["input_scale is no scale", "[-1.0]"]),
        (FP8, None, {"weight": torch.full((32, 64), torch.nan).to(torch.float8_e4m3fn)}, ["2048 code(s) that are NaN"]),
        (INT8, None, {"input_scale": torch.ones(1)}, ["inputs are not quantised", "input_activations"]),
        (
            INT8,
            STATIC,
            {"input_scale": torch.ones(1), "input_zero_point": torch.tensor([5], dtype=torch.int8)},
            ["inputs are symmetric", "input_zero_point", "5"],
        ),
    ],
)
def test_bytes_that_contradict_their_settings_are_refused(weights, inputs, change, facts, headers):
    tensors = {suffix: tensor for suffix, tensor in {**int8_tensors(), **change}.items() if tensor is not None}
    message = refusal(make(weights, inputs), tensors, headers)
    assert all(fact in message for fact in facts), message
    assert LAYER.name in message


@pytest.mark.parametrize(
    ("weights", "change", "facts"),
    [
        ({**INT4, "num_bits": 8}, {}, ["num_bits 8", "(32, 16)", "(32, 8)", "num_bits 4"]),
        ({**INT4, "group_size": 32}, {}, ["group of 32", "(32, 2)", "(32, 4)", "group_size 16"]),
        (INT4, {"weight_packed": torch.zeros(32, 8, dtype=torch.int64)}, ["torch.int32", "torch.int64"]),
        (INT4, {"weight_packed": torch.zeros(4, 32, 8, dtype=torch.int32)}, ["not a matrix", "experts"]),
        (INT4, {"weight_shape": torch.tensor([32, 60])}, ["weight_shape", "[32, 64]", "[32, 60]"]),
        (INT4, {"weight_shape": torch.tensor([32, 64, 1])}, ["weight_shape", "(2,)", "(3,)"]),
        (INT4, {"weight_g_idx": torch.zeros(60, dtype=torch.int32)}, ["weight_g_idx", "(64,)", "(60,)"]),
        (
            {**INT4, "symmetric": False},
            {"weight_zero_point": torch.zeros(32, 4, dtype=torch.int8)},
            ["weight_zero_point", "(4, 4)", "(32, 4)"],
        ),
        (FP8, {}, ["torch.int32", "fp8_e4m3"]),
    ],
)
def test_words_that_contradict_their_settings_are_refused(weights, change, facts, headers):
    _, tensors = packed_tensors(make(INT4))
    message = refusal(make(weights), {**tensors, **change}, headers)
    assert all(fact in message for fact in facts), message


def test_an_order_beyond_the_groups_is_refused():
    config = make({**INT4, "actorder": "group"})
    _, tensors = packed_tensors(config, act_order=True)
    tensors["weight_g_idx"][3] = 4
    with pytest.raises(CheckpointError, match="range of group_index"):
        config.canonicalise(LAYER, tensors).check(LAYER)
