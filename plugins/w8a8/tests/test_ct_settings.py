"""Settings in all their spellings, which scheme a layer gets, and what is refused by name."""

import logging
import subprocess
import sys

import pytest
import torch

from octavo import ActivationSpec, CheckpointError, LinearLayer, QuantSource, TensorInfo, WeightSpec
from octavo_w8a8.compressed_tensors import CompressedTensorsConfig
from octavo_w8a8.goldens import settings

WHERE = "config.json: quantization_config"
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def parse(raw):
    return CompressedTensorsConfig.parse(QuantSource(raw, WHERE))


def parse_groups(groups, **more):
    return parse({"quant_method": "compressed-tensors", "config_groups": groups, **more})


def refusal(raw):
    with pytest.raises(CheckpointError) as caught:
        _ = parse(raw).kv_cache
    message = str(caught.value)
    assert WHERE in message or "compressed-tensors" in message
    return message


def group(targets, weights=INT8, inputs=None, **more):
    return {"targets": targets, "weights": weights, "input_activations": inputs, **more}


def scheme_of(config, name):
    """num_bits of the scheme that explains a layer."""
    return config._scheme(LinearLayer(name, 64, 64)).weights.num_bits


# --- arguments


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, (8, "int", True, "tensor", None)),
        ({"group_size": 64}, (8, "int", True, "group", 64)),
        ({"group_size": -1, "num_bits": 4}, (4, "int", True, "channel", -1)),
        ({"strategy": "CHANNEL", "type": "Float", "symmetric": True}, (8, "float", True, "channel", None)),
        ({"strategy": None, "group_size": None, "symmetric": False}, (8, "int", False, "tensor", None)),
    ],
)
def test_arguments_and_their_defaults(args, expected):
    weights = parse_groups({"group_0": group(["Linear"], args)}).config_groups["group_0"].weights
    assert (weights.num_bits, weights.type, weights.symmetric, weights.strategy, weights.group_size) == expected


@pytest.mark.parametrize(
    ("actorder", "expected"),
    [
        (None, False),
        (False, False),
        ("weight", False),
        ("static", False),
        ("group", True),
        ("dynamic", True),
        (True, True),
    ],
)
def test_q24_orders_by_all_their_names(actorder, expected):
    weights = {**INT4, "actorder": actorder}
    assert parse_groups({"group_0": group(["Linear"], weights)}).config_groups["group_0"].weights.actorder is expected


@pytest.mark.parametrize("block", [[128, 64], "128x64"])
def test_block_structure_in_both_spellings(block):
    weights = {"type": "float", "strategy": "block", "block_structure": block}
    assert parse_groups({"g": group("Linear", weights)}).config_groups["g"].weights.block_structure == (128, 64)


def test_unknown_keys_are_reported_wherever_they_stand():
    config = parse_groups(
        {"group_0": {**group(["Linear"], {**INT8, "new": 1, "observer": "mse", "zp_dtype": None}), "odd": 2}},
        kv_cache_scheme={"num_bits": 8, "type": "float", "strange": 3},
        top=4,
    )
    assert config.unread_keys == (
        "config_groups.group_0.odd",
        "config_groups.group_0.weights.new",
        "kv_cache_scheme.strange",
        "top",
    )


def test_the_extra_level_of_transformers_is_understood():
    config = parse(
        {"quant_method": "compressed-tensors", "quantization_config": {"config_groups": {"g": group(["Linear"])}}}
    )
    assert config.config_groups.keys() == {"g"}
    assert config.unread_keys == ()


# --- presets

LAYER = LinearLayer("model.layers.0.mlp.up_proj", 256, 64)


def stored(headers, packed=None, weight=None, scale=(64, 2), **more):
    tensors = {"weight_scale": torch.ones(scale, dtype=torch.bfloat16), **more}
    if packed is not None:
        tensors |= {
            "weight_packed": torch.zeros(64, packed, dtype=torch.int32),
            "weight_shape": torch.tensor([64, 256]),
        }
    if weight is not None:
        tensors["weight"] = torch.zeros(64, 256).to(weight)
    return headers(tensors)


BYTES = {"weight": torch.int8, "scale": (64, 1)}
FLOATS = {"weight": torch.float8_e4m3fn, "scale": (64, 1)}


@pytest.mark.parametrize(
    ("preset", "tensors", "expected"),
    [
        ("W8A8", BYTES, WeightSpec("int8", (1, -1), activation=ActivationSpec("int8"))),
        ("int8", BYTES, WeightSpec("int8", (1, -1), activation=ActivationSpec("int8"))),
        ("W4A16", {"packed": 32}, WeightSpec("uint4", (1, 128), has_zeros=True)),
        ("w3a16", {"packed": 24}, WeightSpec("uint3", (1, 128), has_zeros=True)),
        ("W4A8", {"weight": torch.int8}, WeightSpec("int4", (1, 128), activation=ActivationSpec("int8"))),
        ("W4AFP8", {"packed": 32}, WeightSpec("uint4", (1, 128), True, activation=ActivationSpec("fp8_e4m3"))),
        ("FP8_DYNAMIC", FLOATS, WeightSpec("fp8_e4m3", (1, -1), activation=ActivationSpec("fp8_e4m3"))),
        (
            "FP8",
            {"weight": torch.float8_e4m3fn, "scale": (1,), "input_scale": torch.ones(1)},
            WeightSpec("fp8_e4m3", (-1, -1), activation=ActivationSpec("fp8_e4m3", "per_tensor", dynamic=False)),
        ),
        (
            "FP8_BLOCK",
            {"weight": torch.float8_e4m3fn, "scale": (1, 2)},
            WeightSpec("fp8_e4m3", (128, 128), activation=ActivationSpec("fp8_e4m3", "per_group", group_size=128)),
        ),
    ],
)
def test_presets(preset, tensors, expected, headers):
    config = parse_groups({preset: ["Linear"]})
    assert config.spec_for(LAYER, stored(headers, **tensors)) == expected
    assert parse(config.settings()) == config


@pytest.mark.parametrize(
    ("scale", "group_shape"), [((64, 1), (1, -1)), ((64, 2), (1, 128)), ((64, 8), (1, 32)), ((1,), (-1, -1))]
)
def test_q18_shapes_count_more_than_the_name_of_a_preset(scale, group_shape, headers):
    spec = parse_groups({"W8A16": ["Linear"]}).spec_for(LAYER, stored(headers, packed=64, scale=scale))
    assert spec == WeightSpec("uint8", group_shape, has_zeros=True)


def test_q18_explicit_settings_must_agree_with_shapes(headers):
    config = parse_groups({"group_0": group(["Linear"], {"num_bits": 8, "group_size": 128})})
    with pytest.raises(CheckpointError) as caught:
        config.spec_for(LAYER, stored(headers, packed=64, scale=(64, 8)))
    for fact in ("up_proj.weight_scale", "group of 128", "expected: (64, 2)", "found: (64, 8)", "group_size 32"):
        assert fact in str(caught.value)


# --- matching


def test_exact_names_beat_patterns_beat_fused_names_beat_classes():
    config = parse_groups(
        {
            "class": group(["Linear"], {"num_bits": 2, "group_size": 32}),
            "fused": group(["re:.*qkv_proj$"], {"num_bits": 3, "group_size": 32}),
            "pattern": group([r"re:.*layers\.0\..*(q|k)_proj$"], {"num_bits": 4, "group_size": 32}),
            "exact": group(["model.layers.0.self_attn.q_proj"], {"num_bits": 5, "group_size": 32}),
        }
    )
    names = ["0.self_attn.q_proj", "0.self_attn.k_proj", "0.self_attn.v_proj", "0.mlp.up_proj"]
    assert [scheme_of(config, f"model.layers.{name}") for name in names] == [5, 4, 3, 2]


def test_patterns_are_anchored_at_the_start_only():
    config = parse_groups(
        {"a": group(["re:up_proj"]), "b": group([r"re:model\.layers\.1"], INT4), "c": group(["Linear"], FP8)}
    )
    assert scheme_of(config, "model.layers.1.mlp.up_proj") == 4
    assert config._scheme(LinearLayer("model.layers.2.mlp.up_proj", 64, 64)).weights.type == "float"


@pytest.mark.parametrize("written", ["model.language_model.layers.0.mlp.up_proj", "layers.0.mlp.up_proj"])
def test_q25_prefixes_of_wrappers_are_seen_through(written):
    config = parse_groups({"a": group([written], INT4), "b": group([rf"re:{written}x"]), "c": group(["Linear"])})
    assert scheme_of(config, "model.layers.0.mlp.up_proj") == 4
    assert scheme_of(config, "model.layers.0.mlp.up_projx") == 8


@pytest.mark.parametrize(
    ("targets", "name", "found"),
    [
        (["model.layers.0.self_attn.qkv_proj"], "model.layers.0.self_attn.k_proj", True),
        (["re:.*gate_up_proj"], "model.layers.0.mlp.up_proj", True),
        (["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "model.layers.0.self_attn.qkv_proj", True),
        ([r"re:.*\.(q|k|v)_proj"], "model.layers.0.self_attn.qkv_proj", True),
        ([r"re:.*\.(q|k)_proj"], "model.layers.0.self_attn.qkv_proj", False),
    ],
)
def test_q48_fused_names_stand_for_their_members(targets, name, found):
    config = parse_groups({"a": group(targets, INT4), "b": group(["Linear"])})
    assert (scheme_of(config, name) == 4) is found


def test_q46_one_name_inside_another_is_no_match():
    config = parse_groups({"a": group(["re:.*kv_proj$", "re:.*gate$"], INT4), "b": group(["Linear"])})
    assert scheme_of(config, "model.layers.0.mlp.gate_proj") == 8
    assert scheme_of(config, "model.layers.0.self_attn.k_proj") == 8


def test_q46_old_places_and_formats():
    raw = {
        "config_groups": {"group_0": group(["Linear"], INT8, TOKEN)},
        "format": "naive-quantized",
        "ignore": ["lm_head"],
    }
    source = QuantSource(raw, "config.json: compression_config")
    assert CompressedTensorsConfig.detect(source, {})
    assert CompressedTensorsConfig.parse(source).format == "naive-quantized"


def test_q46_sparseml_is_refused_by_name():
    assert "sparseml" in CompressedTensorsConfig.method_names
    message = refusal({"quant_method": "sparseml", "config_groups": {"group_0": group(["Linear"])}})
    for fact in ("sparseml", "export the model again", WHERE):
        assert fact in message


def test_the_only_scheme_explains_layers_that_no_target_names(caplog):
    with caplog.at_level(logging.WARNING):
        assert scheme_of(parse_groups({"a": group(["OnlyOddThing"], INT4)}), "model.layers.0.mlp.up_proj") == 4
    assert "model.layers.*.mlp.up_proj is named by no targets" in caplog.text


@pytest.mark.parametrize("groups", [{}, {"a": group(["re:.*q_proj"]), "b": group(["re:.*k_proj"], INT4)}])
def test_quantised_layers_without_a_scheme_are_refused(groups, headers):
    with pytest.raises(CheckpointError, match="no entry of config_groups says how") as caught:
        parse_groups(groups).spec_for(LAYER, stored(headers, **BYTES))
    assert LAYER.name in str(caught.value)


# --- K and V

KV = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (None, None),
        (KV, "fp8_e4m3"),
        ({**KV, "strategy": "attn_head"}, "fp8_e4m3"),
        ({**KV, "type": "int"}, "int8"),
        ({"num_bits": 8, "type": "float"}, "fp8_e4m3"),
    ],
)
def test_q19_settings_of_k_and_v_alone(scheme, expected):
    config = parse(
        {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense", "kv_cache_scheme": scheme}
    )
    assert config.kv_cache == expected
    assert parse(config.settings()) == config


@pytest.mark.parametrize("targets", [["LlamaAttention"], ["Qwen3Attention"], [r"re:.*self_attn$"]])
def test_q20_a_group_of_attention_modules_is_about_k_and_v(targets, headers):
    config = parse_groups({"kv": group(targets, None, KV), "w": group(["Linear"], INT8, TOKEN)})
    assert config.kv_cache == "fp8_e4m3"
    spec = config.spec_for(LAYER, stored(headers, **BYTES))
    assert spec == WeightSpec("int8", (1, -1), activation=ActivationSpec("int8"))
    assert parse_groups({"kv": group(targets, None, KV)}).kv_cache == "fp8_e4m3"


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"dynamic": True}, "dynamic true"),
        ({"type": "int", "symmetric": False}, "symmetric false"),
        ({"group_size": 32, "strategy": None}, "group"),
    ],
)
def test_q65_dynamic_and_asymmetric_k_and_v_are_refused(change, fact):
    message = refusal({"config_groups": {}, "kv_cache_scheme": {**KV, **change}})
    assert "kv_cache_scheme" in message
    assert fact in message


@pytest.mark.parametrize(
    "targets",
    [["re:.*k_proj", "re:.*v_proj"], [r"re:.*\.(k|v|q)_proj$"], ["re:.*(k_proj|v_proj)$"], ["re:.*[kv]_proj"]],
)
def test_q66_outputs_of_k_and_v_are_about_the_cache(targets, headers):
    config = parse_groups({"kv": {"targets": targets, "output_activations": KV}, "w": group(["Linear"])})
    assert config.kv_cache == "fp8_e4m3"
    layer = LinearLayer("model.layers.0.self_attn.k_proj", 256, 64)
    assert config.spec_for(layer, stored(headers, **BYTES)) == WeightSpec("int8", (1, -1))
    assert "output_scale" not in CompressedTensorsConfig.suffixes  # core reads it as a scale of K


def test_two_opinions_about_k_and_v_are_refused():
    message = refusal(
        {"config_groups": {"a": group(["LlamaAttention"], None, KV)}, "kv_cache_scheme": {**KV, "type": "int"}}
    )
    assert "kv_cache_scheme" in message
    assert "config_groups.a" in message


# --- refused by name


@pytest.mark.parametrize(
    ("raw", "facts"),
    [
        ({"format": "marlin-24"}, ["'format'", "marlin-24", "without sparsity"]),
        ({"format": "sparse-24-bitmask"}, ["'format'", "sparse-24-bitmask"]),
        ({"format": "nvfp4-pack-quantized"}, ["'format'", "nvfp4-pack-quantized", "fp8_e4m3"]),
        ({"format": "mxfp8-quantized"}, ["mxfp8-quantized"]),
        ({"format": "zip"}, ["'zip'", "pack-quantized"]),
        ({"config_groups": {"a": group(["Linear"], format="mxfp4-pack-quantized")}}, ["mxfp4-pack-quantized"]),
        (
            {"sparsity_config": {"format": "sparse-bitmask", "sparsity_structure": "2:4"}},
            ["'sparsity_config'", "sparse-bitmask"],
        ),
        ({"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, ["'transform_config'", "Hadamard"]),
        ({"config_groups": {"NVFP4": ["Linear"]}}, ["'config_groups'", "NVFP4"]),
        ({"config_groups": {"MXFP4A16": ["Linear"]}}, ["MXFP4A16"]),
        ({"config_groups": {"W9A9": ["Linear"]}}, ["W9A9", "not known"]),
        (
            {"config_groups": {"a": group(["Linear"], {"strategy": "tensor_group", "group_size": 16})}},
            ["tensor_group", "NVFP4"],
        ),
        ({"config_groups": {"a": group(["Linear"], INT8, {**TOKEN, "dynamic": "local"})}}, ["scales of scales"]),
        ({"config_groups": {"a": group(["Linear"], {"type": "float", "num_bits": 4})}}, ["4 bits", "MXFP4"]),
        (
            {"config_groups": {"a": group(["Linear"], {**FP8, "scale_dtype": "torch.uint8"})}},
            ["powers of two", "MXFP8"],
        ),
        ({"config_groups": {"a": group(["Linear"], {"num_bits": 16})}}, ["num_bits", "16"]),
        ({"config_groups": {"a": group(["Linear"], {**FP8, "symmetric": False})}}, ["floats with zero points"]),
        ({"config_groups": {"a": group(["Linear"], {**INT8, "dynamic": True})}}, ["weights cannot be dynamic"]),
        ({"config_groups": {"a": group(["Linear"], {"strategy": "group"})}}, ["group_size"]),
        ({"config_groups": {"a": group(["Linear"], {"strategy": "block"})}}, ["block_structure"]),
        ({"config_groups": {"a": group(["Linear"], {**INT8, "actorder": "sideways"})}}, ["sideways"]),
        ({"config_groups": {"a": group(["Linear"], None, TOKEN)}}, ["unquantised weights", "Linear"]),
        ({"config_groups": {"a": group(["Linear"], INT8, {**TOKEN, "strategy": "channel"})}}, ["inputs", "channel"]),
        ({"config_groups": {"a": group(["Linear"], INT8, {**TOKEN, "dynamic": False})}}, ["token", "static"]),
        (
            {"config_groups": {"a": group(["Linear"], output_activations=KV)}},
            ["output_activations", "k_proj and v_proj"],
        ),
        ({"config_groups": {"a": group(["re:(["])}}, ["re:([", "regular expression"]),
        ({"config_groups": {"a": group(["re:(.*)*[!]"])}}, ["re:(.*)*[!]", "could take for ever"]),
        ({"ignore": [f"re:{'.*' * 9}x"]}, ["'ignore'", "more than 8 open repeats"]),
        ({"ignore": ["re:*"]}, ["'ignore'", "re:*", "regular expression"]),
        ({"config_groups": {"a": {"weights": INT8}}}, ["'config_groups'"]),
        ({"config_groups": ["Linear"]}, ["'config_groups'"]),
        ({"config_groups": {"a": 3}}, ["'config_groups'"]),
        ({"kv_cache_scheme": "fp8"}, ["'kv_cache_scheme'", "fp8"]),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(raw, facts):
    message = refusal({"config_groups": {}, **raw})
    assert WHERE in message
    assert all(fact in message for fact in facts), message


@pytest.mark.parametrize(
    "raw",
    [
        {"sparsity_config": {}},
        {"sparsity_config": None},
        {"sparsity_config": {"format": "dense", "global_sparsity": 0.1, "registry_requires_subclass": False}},
        {"transform_config": {}},
        {"transform_config": {"config_groups": {}}},
        {"config_groups": {"UNQUANTIZED": ["Linear"]}},
        {"global_compression_ratio": 1.5, "quantization_status": "frozen", "version": "0.9"},
    ],
)
def test_harmless_settings_are_understood(raw):
    assert parse({"config_groups": {}, **raw}).unread_keys == ()


# --- recognising


def test_folders_are_recognised_by_their_groups_or_words():
    packed = {"a.weight_packed": TensorInfo("a.weight_packed", torch.int32, (64, 16), "f")}
    detect = CompressedTensorsConfig.detect
    assert detect(QuantSource(settings("pack-quantized", INT4), WHERE), {})
    assert detect(None, packed)
    assert not detect(None, {"a.qweight": TensorInfo("a.qweight", torch.int32, (64, 16), "f")})
    assert not detect(QuantSource({"bits": 4}, WHERE), packed)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_headers_leave_open_is_not_guessed(bits):
    """8 bits and, in the old packing, 7 bits take equally many words; alone, a layer could have any width."""
    name = "model.layers.0.mlp.up_proj"
    tensors = {
        f"{name}.weight_packed": TensorInfo(f"{name}.weight_packed", torch.int32, (64, 128 * bits // 32), "f"),
        f"{name}.weight_scale": TensorInfo(f"{name}.weight_scale", torch.float16, (64, 4), "f"),
    }
    with pytest.raises(CheckpointError, match="put the settings into config"):
        CompressedTensorsConfig.infer(tensors)
    tensors["model.norm.weight"] = TensorInfo("model.norm.weight", torch.float16, (128,), "f")
    if bits == 8:
        with pytest.raises(CheckpointError, match=r"num_bits \[7, 8\]"):
            CompressedTensorsConfig.infer(tensors)
    else:
        (found,) = CompressedTensorsConfig.infer(tensors)["config_groups"].values()
        assert found["weights"] == {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}


def test_importing_the_plugin_imports_no_torch():
    code = "import sys, octavo_w8a8; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
