"""What a file or a weight must not be: each refusal names the layer or tensor, what was expected and what was found."""

from dataclasses import replace

import pytest
import torch

from octavo import ActivationSpec, CheckpointError, LinearLayer, QuantizedWeight, WeightSpec
from octavo_awq.config import AWQConfig
from octavo_awq.layouts import LAYOUTS

LAYER = LinearLayer("model.layers.0.mlp.up_proj", 128, 64)
SPEC = WeightSpec("uint4", (1, 32), has_zeros=True)


def weight(layer=LAYER, group=32, zeros=None):
    groups = layer.in_features // group
    codes = torch.arange(layer.out_features * layer.in_features).reshape(layer.out_features, -1) % 16
    scales = torch.full((layer.out_features, groups), 0.25, dtype=torch.float16)
    zeros = torch.arange(groups).repeat(layer.out_features, 1).float() if zeros is None else zeros
    return QuantizedWeight(replace(SPEC, group_shape=(1, group)), codes.to(torch.uint8), scales, zeros)


def refusal(action, *arguments):
    with pytest.raises(CheckpointError) as caught:
        action(*arguments)
    return str(caught.value)


# --- files


def test_an_unquantised_layer_is_none(headers):
    assert AWQConfig().spec_for(LAYER, headers({"weight": torch.zeros(64, 128), "bias": torch.zeros(64)})) is None
    assert AWQConfig().spec_for(LAYER, {}) is None


@pytest.mark.parametrize("out_features", [64, 128])  # 128: square, so that qweight alone cannot tell
@pytest.mark.parametrize(
    ("label", "actual"),
    [(a, b) for a in LAYOUTS for b in LAYOUTS if a != b and {a, b} != {"gemv_fast", "llm-awq"}],  # these lie alike
)
def test_q08_wrong_version_is_refused_with_both_facts(label, actual, out_features, headers):
    layer = replace(LAYER, out_features=out_features)
    tensors = AWQConfig(version=actual).serialise(layer, weight(layer))
    assert AWQConfig(version=actual, group_size=32).spec_for(layer, headers(tensors)) == SPEC
    message = refusal(AWQConfig(version=label, group_size=32).spec_for, layer, headers(tensors))
    found = "gemv_fast" if actual == "llm-awq" else actual
    for fact in (layer.name, f"settings say AWQ {label}", f"lie as AWQ {found}", f'"version": "{found}"'):
        assert fact in message


def test_wrong_backend_is_refused_with_the_setting_to_remove(headers):
    message = refusal(AWQConfig(backend="llm-awq").spec_for, LAYER, headers(AWQConfig().serialise(LAYER, weight())))
    assert 'set "version": "gemm" in the quantization settings instead of "backend": "llm-awq"' in message


@pytest.mark.parametrize("g_idx", [True, False])
@pytest.mark.parametrize("label", LAYOUTS)
def test_gptq_under_an_awq_label_is_named(label, g_idx, headers):
    tensors = {
        "qweight": torch.zeros(16, 64, dtype=torch.int32),
        "qzeros": torch.zeros(4, 8, dtype=torch.int32),
        "scales": torch.ones(4, 64, dtype=torch.float16),
    }
    if g_idx:
        tensors["g_idx"] = torch.zeros(128, dtype=torch.int32)
    message = refusal(AWQConfig(version=label).spec_for, LAYER, headers(tensors))
    for fact in (f"settings say AWQ {label}", "GPTQ", "(16, 64)", "set quant_method to gptq", "up_proj.qweight"):
        assert fact in message


def test_a_g_idx_beside_awq_shapes_is_refused(headers):
    tensors = AWQConfig().serialise(LAYER, weight()) | {"g_idx": torch.zeros(128, dtype=torch.int32)}
    assert "GPTQ" in refusal(AWQConfig().spec_for, LAYER, headers(tensors))


def test_q09_marlin_tiles_are_named(headers):
    tensors = {"qweight": torch.zeros(8, 128, dtype=torch.int32), "scales": torch.ones(4, 64, dtype=torch.float16)}
    message = refusal(AWQConfig().spec_for, LAYER, headers(tensors))
    for fact in ("Marlin tiles", "(8, 128)", "export the model again with version gemm"):
        assert fact in message


@pytest.mark.parametrize("version", LAYOUTS)
def test_missing_partners_are_named(version, headers):
    config = AWQConfig(version=version)
    tensors = config.serialise(LAYER, weight())
    for suffix in tensors:
        message = refusal(config.spec_for, LAYER, headers({s: t for s, t in tensors.items() if s != suffix}))
        assert f"tensor: model.layers.0.mlp.up_proj.{suffix}\n" in f"{message}\n"
        assert "is missing" in message
    no_zeros = headers({s: tensors[s] for s in ("qweight", "scales")})
    assert ("zero_point: false" in refusal(config.spec_for, LAYER, no_zeros)) == (version in ("gemm", "gemv"))


def test_int16_layouts_need_their_zeros_even_when_symmetric(headers):
    config = AWQConfig(version="gemv_fast", zero_point=False)
    tensors = config.serialise(LAYER, weight(zeros=torch.full((64, 4), 8.0)))
    del tensors["qzeros"]
    assert "qzeros is missing" in refusal(config.spec_for, LAYER, headers(tensors))
    assert "qzeros is missing" in refusal(config.canonicalise, LAYER, tensors)


@pytest.mark.parametrize("version", LAYOUTS)
def test_group_size_that_contradicts_the_scales_is_refused_with_both(version, headers):
    tensors = AWQConfig(version=version).serialise(LAYER, weight(group=64))
    message = refusal(AWQConfig(version=version, group_size=32).spec_for, LAYER, headers(tensors))
    for fact in (LAYER.name, "expected: group_size 32", "which is group_size 64 for 128 inputs", "up_proj.scales"):
        assert fact in message


@pytest.mark.parametrize("version", ["gemv", "gemv_fast"])
@pytest.mark.parametrize(("stored", "claimed", "fact"), [(128, 1024, "smaller"), (1024, 128, "larger")])
def test_group_size_that_only_the_padding_contradicts_is_refused(version, stored, claimed, fact, headers):
    layer = LinearLayer("layer", 1024, 8)
    tensors = AWQConfig(version=version).serialise(layer, weight(layer, group=stored))
    config = AWQConfig(version=version, group_size=claimed)
    assert config.spec_for(layer, headers(tensors)) is not None  # headers cannot tell
    message = refusal(config.canonicalise, layer, tensors)
    assert f"so group_size is {fact}" in message
    assert f"with group_size {claimed}" in message


def test_q38_group_size_must_divide(headers):
    tensors = AWQConfig().serialise(LAYER, weight())
    message = refusal(AWQConfig(group_size=96).spec_for, LAYER, headers(tensors))
    assert "in_features 128 is not a multiple of group_size 96" in message
    assert LAYER.name in message


def test_group_size_that_nothing_tells_is_asked_for(headers):
    tensors = AWQConfig().serialise(LAYER, weight())
    tensors["scales"] = torch.ones(3, 64, dtype=torch.float16)
    message = refusal(AWQConfig().spec_for, LAYER, headers(tensors))
    assert "(3, 64) for 128 inputs" in message
    assert "add group_size" in message


@pytest.mark.parametrize("out_features", [4, 12, 172])
def test_q39_outputs_must_fill_words(out_features, headers):
    layer = LinearLayer("model.layers.0.mlp.up_proj", 128, out_features)
    tensors = {
        "qweight": torch.zeros(128, -(-out_features // 8), dtype=torch.int32),
        "qzeros": torch.zeros(4, -(-out_features // 8), dtype=torch.int32),
        "scales": torch.ones(4, out_features, dtype=torch.float16),
    }
    message = refusal(AWQConfig(group_size=32).spec_for, layer, headers(tensors))
    assert f"out_features {out_features} is not a multiple of 8" in message
    assert "up_proj" in message


@pytest.mark.parametrize(
    ("suffix", "damaged"),
    [
        ("qweight", torch.zeros(64, 8, dtype=torch.int32)),
        ("qweight", torch.zeros(128, 8, dtype=torch.int64)),
        ("qzeros", torch.zeros(4, 7, dtype=torch.int32)),
        ("qzeros", torch.zeros(4, 8, dtype=torch.float16)),
        ("scales", torch.zeros(4, 64, dtype=torch.int32)),
        ("scales", torch.zeros(4, 60, dtype=torch.float16)),
        ("scales", torch.zeros(256, dtype=torch.float16)),
    ],
)
def test_damaged_tensors_are_named_with_both_shapes(suffix, damaged, headers):
    tensors = AWQConfig().serialise(LAYER, weight())
    expected = f"expected: {tuple(tensors[suffix].shape)} of {'torch.float16' if suffix == 'scales' else 'torch.int32'}"
    message = refusal(AWQConfig(group_size=32).spec_for, LAYER, headers(tensors | {suffix: damaged}))
    for fact in (
        f"up_proj.{suffix}",
        expected,
        f"found: {tuple(damaged.shape)} of {damaged.dtype}",
        "model.safetensors",
    ):
        assert fact in message


def test_a_tensor_that_the_layout_does_not_have_is_refused(headers):
    tensors = AWQConfig().serialise(LAYER, weight())
    message = refusal(AWQConfig().spec_for, LAYER, headers(tensors | {"scaled_zeros": torch.zeros(4, 64)}))
    assert "AWQ gemm has no use for scaled_zeros" in message


@pytest.mark.parametrize("version", LAYOUTS)
def test_q06_stored_zeros_of_a_symmetric_file_must_be_8(version):
    tensors = AWQConfig(version=version).serialise(LAYER, weight())
    message = refusal(AWQConfig(version=version, zero_point=False).canonicalise, LAYER, tensors)
    for fact in (LAYER.name, "zero_point: false", "8 everywhere", "zeros from 0 to 3"):
        assert fact in message


def test_zeros_count_only_where_scales_do():
    config = AWQConfig(version="gemv_fast", zero_point=False, group_size=64)
    tensors = config.serialise(LAYER, weight(group=64, zeros=torch.full((64, 2), 8.0)))
    tensors["scales"][0, 5] = tensors["qzeros"][0, 5] = 0
    assert (config.canonicalise(LAYER, tensors).dequantize()[5, :64] == 0).all()


def test_scale_of_zero_with_an_offset_is_refused():
    config = AWQConfig(version="llm-awq", group_size=64)
    tensors = config.serialise(LAYER, weight(group=64))
    tensors["scales"][1, 5] = 0
    message = refusal(config.canonicalise, LAYER, tensors)
    assert "a scale is 0 where its scaled_zeros is not" in message
    assert LAYER.name in message


# --- weights


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"spec": replace(SPEC, code="uint8")}, "uint8 g32 asym"),
        ({"spec": replace(SPEC, has_zeros=False), "zeros": None}, "uint4 g32;"),
        ({"spec": replace(SPEC, activation=ActivationSpec("int8"))}, "int8 per_token"),
        ({"spec": replace(SPEC, act_order=True), "group_index": torch.arange(128) // 32}, "act_order"),
        ({"zeros": torch.full((64, 4), 7.5)}, "integers in 0..15, 256 are not, 7.5 among them"),
        ({"zeros": torch.full((64, 4), 16.0)}, "integers in 0..15"),
        ({"zeros": torch.full((64, 4), -1.0)}, "integers in 0..15"),
        ({"scales": torch.ones(64, 4, dtype=torch.float64)}, "torch.float64"),
    ],
)
def test_weights_that_gemm_cannot_hold_are_refused(change, fact):
    message = refusal(AWQConfig().serialise, LAYER, replace(weight(), **change))
    assert fact in message
    assert LAYER.name in message


def test_float_and_block_weights_are_refused():
    assert "it is float" in refusal(AWQConfig().serialise, LAYER, QuantizedWeight.from_float(torch.zeros(64, 128)))
    spec = WeightSpec("uint4", (64, 128), has_zeros=True)
    block = QuantizedWeight(spec, torch.zeros(64, 128, dtype=torch.uint8), torch.ones(1, 1), torch.ones(1, 1))
    assert "uint4 64x128 asym" in refusal(AWQConfig().serialise, LAYER, block)


def test_weights_that_contradict_the_settings_are_refused():
    message = refusal(AWQConfig(group_size=64).serialise, LAYER, weight())
    assert "groups are of 32 inputs, the settings say group_size 64" in message
    message = refusal(AWQConfig(zero_point=False).serialise, LAYER, weight())
    assert "zero_point: false" in message
    assert "zeros from 0 to 3" in message


@pytest.mark.parametrize(
    ("version", "sizes", "group", "fact"),
    [
        ("gemm", (128, 12), 32, "out_features 12 is not a multiple of 8"),
        ("gemv", (128, 8), 16, "group_size 32, 64 and 128 or more, not 16"),
        ("gemv", (36, 8), 36, "in_features 36 is not a multiple of 8"),
        ("gemv_fast", (96, 8), 32, "in_features 96 is not a multiple of 64"),
    ],
)
def test_layers_that_a_layout_cannot_store_are_refused(version, sizes, group, fact):
    layer = LinearLayer("model.layers.0.mlp.up_proj", *sizes)
    message = refusal(AWQConfig(version=version).serialise, layer, weight(layer, group))
    assert fact in message
    assert layer.name in message


def test_a_short_last_group_is_refused():
    layer = LinearLayer("layer", 80, 8)
    codes = torch.zeros(8, 80, dtype=torch.uint8)
    short = QuantizedWeight(SPEC, codes, torch.ones(8, 3), torch.ones(8, 3))
    assert "in_features 80 is not a multiple of group_size 32" in refusal(AWQConfig().serialise, layer, short)


def test_products_beyond_the_range_of_the_type_are_refused():
    large = replace(weight(), scales=torch.full((64, 4), 60000.0, dtype=torch.float16))
    message = refusal(AWQConfig(version="gemv_fast").serialise, LAYER, large)
    assert "scale * zero exceeds the range of torch.float16" in message


def test_a_file_that_could_not_be_read_again_is_not_written():
    scales = torch.ones(64, 4)
    scales[:, 3] = 0
    for version in ("gemv", "gemv_fast"):
        message = refusal(AWQConfig(version=version).serialise, LAYER, replace(weight(), scales=scales))
        assert "scales of the last of 4 groups are all 0" in message
