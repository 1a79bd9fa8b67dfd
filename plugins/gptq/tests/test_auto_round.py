"""auto-round's spelling: what it packs as GPTQ is read here, all else is put into the words of its format."""

from typing import Any

import pytest
import torch

from octavo import CheckpointError, LinearLayer, QuantSource, WeightSpec
from octavo.testing import random_weight
from octavo_gptq.config import GPTQConfig

SETTINGS: dict[str, Any] = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "data_type": "int",
    "iters": 200,
    "nsamples": 128,
    "seqlen": 2048,
    "batch_size": 8,
    "autoround_version": "0.5.1",
    "block_name_to_quantize": "model.layers",
    "low_gpu_mem_usage": True,
    "enable_quanted_input": False,
}
DOWN, UP = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"


def source(**changes: Any) -> QuantSource:
    return QuantSource({**SETTINGS, **changes}, "config.json: quantization_config")


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round", "Intel/Auto-Round"])
def test_gptq_packing_is_read_here(method: str) -> None:
    assert method.lower() in GPTQConfig.method_names
    assert GPTQConfig.translate(source(quant_method=method)) is None
    config = GPTQConfig.parse(source(quant_method=method))
    assert (config.bits, config.group_size, config.sym, config.checkpoint_format) == (4, 32, True, "gptq")
    assert config.unread_keys == ()


@pytest.mark.parametrize(
    ("packing", "version"),
    [
        ("auto_round:auto_gptq", "gptq"),
        ("auto_round:gptq", "gptq"),
        ("auto_round:gptq:exllamav2", "gptq"),
        ("auto_round:gptqmodel", "gptq_v2"),
        ("auto_round", "gptq_v2"),
        (None, "gptq"),
    ],
)
def test_packing_format_says_how_zeros_are_stored(packing: str | None, version: str) -> None:
    assert GPTQConfig.parse(source(packing_format=packing)).checkpoint_format == version
    assert GPTQConfig.parse(source(packing_format=None, backend=packing)).checkpoint_format == version


def test_layers_of_extra_config_have_their_own_settings(headers: Any) -> None:
    extra = {
        DOWN: {"bits": 8, "group_size": 128, "sym": False, "data_type": "int"},
        ".*gate_proj": {"bits": 2},
        "lm_head": {"bits": 16},
        "self_attn": {"bits": 32, "data_type": "float"},  # of a layer that stays as it is, so no type to refuse
        UP: {},
    }
    config = GPTQConfig.parse(source(extra_config=extra))
    own = config.for_layer(DOWN)
    assert (own.bits, own.group_size, own.sym) == (8, 128, False)
    assert config.for_layer("model.layers.3.mlp.gate_proj").bits == 2
    assert config.for_layer(UP).bits == 4
    assert config.for_layer("model.layers.10.mlp.down_proj").bits == 4
    assert set(config.dynamic) >= {r"-:^lm_head$", "-:.*(?:self_attn)"}
    layer = LinearLayer(DOWN, 256, 32)
    spec = WeightSpec("uint8", (1, 128), has_zeros=True)
    stored = config.serialise(layer, random_weight(spec, 32, 256, torch.Generator(), zeros="integer"))
    assert config.spec_for(layer, headers(stored, DOWN)) == WeightSpec(
        "uint8", (1, 128), has_zeros=True, act_order=True
    )


def test_exact_names_come_before_patterns() -> None:
    config = GPTQConfig.parse(source(extra_config={".*mlp.*": {"bits": 2}, DOWN: {"bits": 8}}))
    assert config.for_layer(DOWN).bits == 8
    assert config.for_layer(UP).bits == 2
    assert config.for_layer("model.layers.0.self_attn.q_proj").bits == 4


@pytest.mark.parametrize("fused", ["model.layers.3.self_attn.qkv_proj", r".*\.3\..*qkv_proj"])
def test_q48_settings_of_a_fused_module_are_those_of_its_members(fused: str) -> None:
    config = GPTQConfig.parse(source(extra_config={fused: {"bits": 8}}))
    for name, bits in (("qkv_proj", 8), ("q_proj", 8), ("k_proj", 8), ("v_proj", 8), ("o_proj", 4)):
        assert config.for_layer(f"model.layers.3.self_attn.{name}").bits == bits
        assert config.for_layer(f"model.layers.4.self_attn.{name}").bits == 4


def test_layers_of_16_bits_are_plain_and_told_where_they_are_not(
    headers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = GPTQConfig.parse(source(extra_config={UP: {"bits": 16}}))
    layer = LinearLayer(UP, 64, 32)
    assert config.spec_for(layer, headers({"weight": torch.zeros(32, 64)})) is None
    assert not caplog.records
    stored = config.serialise(
        layer, random_weight(WeightSpec("uint4", (1, 32), True), 32, 64, torch.Generator(), zeros="midpoint")
    )
    assert config.spec_for(layer, headers(stored)) is not None
    assert "dynamic says that it is not quantised" in caplog.text


def test_settings_are_written_in_the_words_of_gptq() -> None:
    config = GPTQConfig.parse(source(extra_config={DOWN: {"bits": 8}}))
    assert config.settings()["quant_method"] == "gptq"
    assert GPTQConfig.parse(QuantSource(config.settings(), "config.json")) == config


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"data_type": "mx_fp"}, ["data_type", "mx_fp"]),
        ({"act_bits": 8}, ["act_bits", "8"]),
        ({"extra_config": {UP: {"data_type": "nv_fp"}}}, ["data_type", "nv_fp"]),
        ({"packing_format": "auto_round:fp8_static"}, ["packing_format", "auto_round:fp8_static"]),
        ({"extra_config": [1]}, ["extra_config"]),
        ({"extra_config": {UP: 4}}, ["extra_config"]),
        ({"extra_config": {"(": {"bits": 8}}}, ["regular expression"]),
        ({"extra_config": {UP: {"bits": 5}}}, ["'bits'", "5", "up_proj"]),
    ],
)
def test_what_is_not_integer_weights_is_refused(changes: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        GPTQConfig.parse(source(**changes))
    assert all(fact in str(caught.value) for fact in [*facts, "config.json"]), str(caught.value)


def test_16_bit_inputs_are_no_quantised_inputs() -> None:
    assert GPTQConfig.parse(source(act_bits=16, act_data_type="float")).bits == 4


# --- other packings


def test_awq_packing_is_handed_over() -> None:
    given = source(packing_format="auto_round:auto_awq", extra_config={"lm_head": {"bits": 16}})
    translated = GPTQConfig.translate(given)
    assert translated is not None
    assert translated.where == given.where
    expected = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False, "version": "gemm"}
    assert dict(translated.raw) == expected


def test_awq_packing_with_several_group_sizes_leaves_them_to_the_tensors() -> None:
    given = source(packing_format="auto_round:awq", sym=False, extra_config={UP: {"bits": 4, "group_size": 64}})
    translated = GPTQConfig.translate(given)
    assert translated is not None
    assert "group_size" not in translated.raw
    assert translated.raw["zero_point"] is True


def test_awq_packing_with_several_widths_is_refused() -> None:
    with pytest.raises(CheckpointError, match="one width") as caught:
        GPTQConfig.translate(source(packing_format="auto_round:auto_awq", extra_config={UP: {"bits": 8}}))
    assert UP in str(caught.value)


def test_compressed_tensors_packing_is_handed_over() -> None:
    extra = {"lm_head": {"bits": 16}, ".*gate_proj": {"bits": 16}, DOWN: {"bits": 8, "group_size": -1}}
    given = source(
        packing_format="auto_round:llm_compressor", group_size=-1, act_bits=8, act_sym=True, extra_config=extra
    )
    translated = GPTQConfig.translate(given)
    assert translated is not None
    raw = translated.raw
    assert raw["quant_method"] == "compressed-tensors"
    assert raw["ignore"] == ["lm_head", "re:.*(?:.*gate_proj)"]
    assert raw["config_groups"]["group_0"] == {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
    }
    (other,) = [group for name, group in raw["config_groups"].items() if name != "group_0"]
    assert other["targets"] == [DOWN]
    assert other["weights"]["num_bits"] == 8


def test_settings_that_are_compressed_tensors_already_keep_their_groups() -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}}
    given = source(packing_format=None, config_groups=groups, format="int-quantized", ignore=["lm_head"])
    translated = GPTQConfig.translate(given)
    assert translated is not None
    expected = {
        "quant_method": "compressed-tensors",
        "config_groups": groups,
        "format": "int-quantized",
        "ignore": ["lm_head"],
    }
    assert dict(translated.raw) == expected


def test_compressed_tensors_of_other_types_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="mx_fp"):
        GPTQConfig.translate(source(packing_format="auto_round:llm_compressor", data_type="mx_fp"))


@pytest.mark.parametrize(("packing", "stated"), [("auto_round:auto_gptq", "gptq_v2"), ("auto_round", "gptq")])
def test_a_convention_that_contradicts_the_packing_is_refused(packing: str, stated: str) -> None:
    """Each of the two would move every weight by one step if the other were right."""
    with pytest.raises(CheckpointError, match="checkpoint_format contradicts packing_format") as caught:
        GPTQConfig.parse(source(packing_format=packing, checkpoint_format=stated))
    assert repr(stated) in str(caught.value)


def test_settings_of_gptq_itself_are_not_translated() -> None:
    assert GPTQConfig.translate(source(quant_method="gptq")) is None
    assert GPTQConfig.translate(QuantSource({}, "config.json")) is None
