"""Settings in all their spellings (V03), and recognising a folder that does not say what it is."""

import subprocess
import sys

import pytest
import torch

import octavo_awq
from octavo import CheckpointError, LinearLayer, QuantSource, TensorInfo, WeightSpec, round_to_nearest
from octavo_awq.config import AWQConfig
from octavo_awq.layouts import LAYOUTS

WHERE = "config.json: quantization_config"


def parse(**raw):
    return AWQConfig.parse(QuantSource(raw, WHERE))


def tensor(name, dtype, *shape):
    return name, TensorInfo(name, dtype, shape, "model.safetensors")


def awq_tensors(version, in_features=256, out_features=64, group=64, layer="model.layers.0.mlp.up_proj"):
    weight = round_to_nearest(torch.randn(out_features, in_features), WeightSpec("uint4", (1, group), has_zeros=True))
    stored = AWQConfig(version=version).serialise(LinearLayer(layer, in_features, out_features), weight)
    return dict(tensor(f"{layer}.{suffix}", t.dtype, *t.shape) for suffix, t in stored.items())


def gptq_tensors(g_idx=True, bits=4, layer="model.layers.0.mlp.up_proj"):
    stored = dict(
        [
            tensor(f"{layer}.qweight", torch.int32, 256 * bits // 32, 64),
            tensor(f"{layer}.qzeros", torch.int32, 4, 64 * bits // 32),
            tensor(f"{layer}.scales", torch.float16, 4, 64),
        ]
    )
    return stored | dict([tensor(f"{layer}.g_idx", torch.int32, 256)]) if g_idx else stored


# --- reading


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, (64, True, "gemm")),
        ({"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, (128, True, "gemm")),
        ({"w_bit": 4, "q_group_size": -1, "zero_point": False, "version": "GEMV"}, (-1, False, "gemv")),
        (
            {"bits": 4, "group_size": 32, "format": "gemv_fast", "checkpoint_format": "GEMV_FAST"},
            (32, True, "gemv_fast"),
        ),
        ({"bits": 4, "group_size": 32, "version": "gemv", "format": None}, (32, True, "gemv")),
        ({"bits": 4, "group_size": 128, "version": "exllama"}, (128, True, "gemm")),
        ({"bits": 4, "version": "ipex", "modules_to_not_convert": ["visual"]}, (None, True, "gemm")),
        ({"bits": 4, "group_size": 128, "version": "gemm", "backend": "llm-awq"}, (128, True, "llm-awq")),
        ({"bits": 4, "group_size": 128, "backend": "autoawq", "modules_to_not_convert": None}, (128, True, "gemm")),
        ({}, (None, True, "gemm")),
    ],
)
def test_v03_q05_q07_settings_in_every_spelling(raw, expected):
    config = parse(quant_method="awq", **raw)
    assert (config.group_size, config.zero_point, config.layout.name) == expected
    assert config.unread_keys == ()


def test_v03_unknown_key_is_reported_and_known_harmless_ones_are_not():
    assert parse(bits=4, zero_point=True, foo=1, desc_act=True).unread_keys == ("foo",)


@pytest.mark.parametrize(
    "extra",
    [
        # GPTQModel, transformers 5 (GPTQ's defaults beside AWQ's), transformers 4, auto-round
        "checkpoint_format desc_act format lm_head meta method pack_dtype",
        "tokenizer dataset damp_percent desc_act act_group_aware sym true_sequential meta backend model_seqlen batch_size "
        "block_name_to_quantize module_name_preceding_first_block pad_token_id max_input_length cache_block_outputs "
        "modules_in_block_to_quantize",
        "backend do_fuse exllama_config fuse_max_seq_len modules_to_fuse",
        "autoround_version data_type iters low_gpu_mem_usage nsamples seqlen sym to_quant_block_names",
    ],
)
def test_keys_that_writers_add_are_known(extra):
    values = {"checkpoint_format": "gemm", "format": "gemm", "method": "awq", "backend": "auto"}
    raw = {key: values.get(key) for key in extra.split()}
    assert parse(bits=4, group_size=128, zero_point=True, version="gemm", **raw).unread_keys == ()


@pytest.mark.parametrize(
    ("raw", "facts"),
    [
        ({"bits": 4, "w_bit": 8}, ["bits = 4", "w_bit = 8"]),
        ({"version": "gemm", "checkpoint_format": "gemv"}, ["version = 'gemm'", "checkpoint_format = 'gemv'"]),
        ({"group_size": 64, "q_group_size": 128}, ["group_size = 64", "q_group_size = 128"]),
        ({"bits": 8}, ["'bits'", "8"]),
        ({"w_bit": 3}, ["'w_bit'", "3"]),
        ({"group_size": 0}, ["'group_size'", "0", "-1"]),
        ({"version": "gemm2"}, ["'version'", "'gemm2'", "'gemv_fast'"]),
        ({"version": "MARLIN"}, ["'version'", "marlin", "export the model again with version gemm"]),
        ({"checkpoint_format": "marlin"}, ["'checkpoint_format'", "export the model again"]),
        ({"method": "gptq"}, ["'method'", "'awq'", "'gptq'"]),
        ({"zero_point": "perhaps"}, ["'zero_point'", "'perhaps'"]),
    ],
)
def test_settings_that_cannot_be_are_refused(raw, facts):
    with pytest.raises(CheckpointError) as caught:
        parse(**raw)
    assert all(fact in str(caught.value) for fact in [*facts, WHERE]), str(caught.value)


# --- recognising


@pytest.mark.parametrize("version", LAYOUTS)
def test_q01_q57_tensors_without_settings_are_recognised_and_settings_inferred(version):
    tensors = awq_tensors(version)
    assert AWQConfig.detect(None, tensors)
    assert AWQConfig.infer(tensors) == {"bits": 4, "version": version, "zero_point": True}
    config = AWQConfig.parse(QuantSource(AWQConfig.infer(tensors), "tensors"))
    stored = {name.rpartition(".")[2]: info for name, info in tensors.items()}
    spec = config.spec_for(LinearLayer("model.layers.0.mlp.up_proj", 256, 64), stored)
    assert spec == WeightSpec("uint4", (1, 64), has_zeros=True)


def test_symmetric_file_without_zeros_is_recognised():
    tensors = {name: info for name, info in awq_tensors("gemm").items() if not name.endswith("qzeros")}
    assert AWQConfig.detect(None, tensors)
    assert AWQConfig.infer(tensors)["zero_point"] is False


@pytest.mark.parametrize("version", LAYOUTS)
def test_square_layers_are_recognised(version):
    tensors = awq_tensors(version, 128, 128, 32)
    assert AWQConfig.infer(tensors)["version"] == version


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("g_idx", [True, False])
@pytest.mark.parametrize(
    "raw", [None, {"bits": 4, "zero_point": True}, {"w_bit": 4}, {"bits": 4, "desc_act": True, "sym": True}]
)
def test_gptq_is_never_claimed(bits, g_idx, raw):
    source = None if raw is None else QuantSource(raw, "quantize_config.json")
    assert not AWQConfig.detect(source, gptq_tensors(g_idx, bits))


def test_nothing_is_inferred_from_gptq():
    with pytest.raises(CheckpointError, match="gptq"):
        AWQConfig.infer(gptq_tensors())
    odd = awq_tensors("gemm") | dict([tensor("model.layers.0.mlp.up_proj.g_idx", torch.int32, 256)])
    assert not AWQConfig.detect(None, odd)


def test_groups_of_one_input_are_not_imagined():
    assert AWQConfig.infer(awq_tensors("gemv", 32, 64, 32))["version"] == "gemv"  # gemm with 64 inputs, g = 1, fits too


def test_a_shape_that_is_also_gptq_is_not_claimed_alone():
    tensors = awq_tensors("gemv", 256, 32, 32)  # qweight (32, 32), scales (32, 32): GPTQ with 256 inputs, too
    assert not AWQConfig.detect(None, tensors)
    with pytest.raises(CheckpointError, match="gemv, gptq"):
        AWQConfig.infer(tensors)
    both = tensors | awq_tensors("gemv", 128, 32, 32, layer="model.layers.0.mlp.down_proj")
    assert AWQConfig.detect(None, both)


@pytest.mark.parametrize(
    ("raw", "claimed"),
    [
        ({"bits": 4, "group_size": 64, "zero_point": True, "version": "GEMM"}, True),  # AutoAWQ's old side file
        ({"w_bit": 4, "q_group_size": 64}, True),
        ({"bits": 4, "group_size": 64, "version": "gemv_fast"}, True),
        ({"bits": 4, "version": "marlin"}, True),  # claimed in order to be refused by name
        ({"method": "awq", "bits": 4}, True),
        ({"method": "gptq", "bits": 4, "zero_point": True}, False),
        ({"bits": 4, "group_size": 64}, False),
        ({"desc_act": False, "sym": True, "checkpoint_format": "gptq"}, False),
        ({"config_groups": {}, "version": "0.19.0"}, False),
    ],
)
def test_settings_without_quant_method(raw, claimed):
    source = QuantSource(raw, "quantize_config.json")
    assert AWQConfig.detect(source, {}) == claimed
    assert AWQConfig.detect(source, awq_tensors("gemm"))  # the tensors are AWQ beyond doubt


def test_nothing_is_claimed_without_packed_tensors():
    assert not AWQConfig.detect(None, {})
    assert not AWQConfig.detect(None, dict([tensor("model.embed_tokens.weight", torch.float16, 512, 128)]))
    assert not AWQConfig.detect(None, dict([tensor("layer.qweight", torch.int32, 64, 8)]))


def test_layers_in_different_layouts_are_not_claimed():
    mixed = awq_tensors("gemm") | awq_tensors("gemv", layer="model.layers.0.mlp.gate_proj")
    assert not AWQConfig.detect(None, mixed)
    with pytest.raises(CheckpointError, match="no layout that all layers share"):
        AWQConfig.infer(mixed)


# --- the plugin


def test_the_hook_brings_the_format():
    assert octavo_awq.octavo_quant_configs() == [AWQConfig]
    assert octavo_awq.octavo_api == (1, 0)


def test_importing_the_plugin_imports_no_torch():
    code = "import sys, octavo_awq; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
