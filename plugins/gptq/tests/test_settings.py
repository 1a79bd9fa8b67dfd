"""Settings in all their spellings (V03), rules for single layers, and recognising a folder that does not say what it is."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import octavo_gptq
from octavo import CheckpointError, LinearLayer, QuantSource, TensorInfo, WeightSpec
from octavo.testing import random_weight
from octavo_gptq.config import GPTQConfig
from octavo_gptq.rules import Rule, compile_pattern

WHERE = "config.json: quantization_config"


def parse(**raw: Any) -> GPTQConfig:
    return GPTQConfig.parse(QuantSource({"quant_method": "gptq", **raw}, WHERE))


def tensors_of(layer: LinearLayer, bits: int = 4, group: int = 32, g_idx: bool = True) -> dict[str, TensorInfo]:
    spec = WeightSpec(f"uint{bits}", (1, group), has_zeros=True)
    weight = random_weight(spec, layer.out_features, layer.in_features, torch.Generator(), zeros="midpoint")
    stored = GPTQConfig(sym=True).serialise(layer, weight)
    return {
        f"{layer.name}.{suffix}": TensorInfo(f"{layer.name}.{suffix}", t.dtype, tuple(t.shape), "model.safetensors")
        for suffix, t in stored.items()
        if g_idx or suffix != "g_idx"
    }


def by_suffix(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    return {name.rpartition(".")[2]: info for name, info in tensors.items()}


def awq_tensors(layer: str = "model.layers.0.mlp.up_proj") -> dict[str, TensorInfo]:
    shapes = {"qweight": (256, 8), "qzeros": (4, 8), "scales": (4, 64)}
    types = {"scales": torch.float16}
    return {
        f"{layer}.{s}": TensorInfo(f"{layer}.{s}", types.get(s, torch.int32), shape, "f") for s, shape in shapes.items()
    }


# --- spellings


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"bits": 4, "group_size": 64, "sym": True, "desc_act": False}, (4, 64, True, False, None)),
        ({"w_bit": 3, "q_group_size": -1, "sym": False, "format": "GPTQ_V2"}, (3, -1, False, None, "gptq_v2")),
        ({"bits": 8, "group_size": 32, "zero_point": True, "checkpoint_format": "gptq"}, (8, 32, False, None, "gptq")),
        ({"bits": 2, "zero_point": False, "desc_act": None}, (2, None, True, None, None)),
        (
            {"bits": 4, "sym": True, "zero_point": False, "format": "gptq", "checkpoint_format": "gptq"},
            (4, None, True, None, "gptq"),
        ),
        ({}, (None, None, None, None, None)),
    ],
)
def test_v03_settings_in_every_spelling(raw: dict[str, Any], expected: tuple[Any, ...]) -> None:
    config = parse(**raw)
    assert (config.bits, config.group_size, config.sym, config.desc_act, config.checkpoint_format) == expected
    assert config.unread_keys == ()


def test_v03_unknown_key_is_reported_and_known_harmless_ones_are_not() -> None:
    known = "damp_percent true_sequential static_groups mse act_group_aware model_file_base_name dataset tokenizer use_exllama"
    assert parse(bits=4, foo=1, **dict.fromkeys(known.split())).unread_keys == ("foo",)
    assert parse(dynamic={"+:.*up_proj": {"bits": 8, "mse": 0.1, "foo": 1}}).unread_keys == (
        "dynamic: +:.*up_proj: foo",
    )


@pytest.mark.parametrize(
    ("raw", "facts"),
    [
        ({"bits": 4, "w_bit": 8}, ["bits = 4", "w_bit = 8"]),
        ({"group_size": 64, "q_group_size": 128}, ["group_size = 64", "q_group_size = 128"]),
        ({"format": "gptq", "checkpoint_format": "gptq_v2"}, ["format = 'gptq'", "checkpoint_format = 'gptq_v2'"]),
        ({"sym": True, "zero_point": True}, ["sym = True", "zero_point = True"]),
        ({"zero_point": 1}, ["zero_point = 1"]),
        ({"method": "awq"}, ["'method'", "'awq'"]),
        ({"bits": 5}, ["'bits'", "5"]),
        ({"group_size": 0}, ["'group_size'", "-1"]),
        ({"checkpoint_format": "gptq3"}, ["'checkpoint_format'", "'gptq3'"]),
        ({"pack_dtype": "uint4"}, ["'pack_dtype'", "'uint4'"]),
        ({"dynamic": ["a"]}, ["'dynamic'"]),
        ({"dynamic": {"+:.*": {"bits": 7}}}, ["dynamic", "+:.*", "'bits'", "7"]),
        ({"dynamic": {"+:(": {}}}, ["dynamic", "+:(", "no regular expression"]),
        ({"meta": "x"}, ["'meta'"]),
    ],
)
def test_settings_that_cannot_be_are_refused(raw: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(**raw)
    assert all(fact in str(caught.value) for fact in [*facts, WHERE]), str(caught.value)


@pytest.mark.parametrize(
    ("raw", "fact"),
    [
        ({"is_marlin_format": True}, "tiles of one GPU kernel"),
        ({"quant_method": "marlin", "bits": 4}, "tiles of one GPU kernel"),
        ({"checkpoint_format": "marlin"}, "tiles of one GPU kernel"),
        ({"format": "MARLIN"}, "tiles of one GPU kernel"),
        ({"checkpoint_format": "bitblas"}, "bitblas"),
        ({"checkpoint_format": "qqq"}, "qqq"),
        ({"checkpoint_format": "exl3"}, "exl3"),
        ({"checkpoint_format": "gptq_p"}, "bit planes"),
    ],
)
def test_q09_layouts_that_are_not_read_are_refused_by_name(raw: dict[str, Any], fact: str) -> None:
    with pytest.raises(CheckpointError, match=fact) as caught:
        parse(**raw)
    assert "checkpoint_format gptq" in str(caught.value) or "EXL3" in str(caught.value)
    assert not parse(is_marlin_format=False).is_marlin_format


def test_q03_settings_of_two_files_are_compared_by_field() -> None:
    first, second = parse(bits=4, format="gptq_v2"), parse(w_bit=4, checkpoint_format="gptq")
    assert first.bits == second.bits
    assert first.model_fields_set == second.model_fields_set
    assert first.checkpoint_format != second.checkpoint_format


def test_settings_survive_writing_them() -> None:
    config = parse(
        bits=4,
        group_size=128,
        sym=False,
        format="gptq_v2",
        pack_dtype="torch.int64",
        dynamic={"-:lm_head": None, ".*gate.*": {"bits": 8, "zero_point": False}},
        modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.down_proj"]],
        meta={"quantizer": ["gptqmodel:5.0.0"], "nested": {"a": [1, None]}},
        lm_head=True,
    )
    assert GPTQConfig.parse(QuantSource(config.settings(), WHERE)) == config
    assert config.settings()["quant_method"] == "gptq"


def test_names_of_other_kernels_mean_the_same_files() -> None:
    assert parse(quant_method="gptq_marlin", bits=4) == parse(bits=4)


# --- rules


EXAMPLE = {"+:.*\\.18\\..*gate.*": {"bits": 8, "group_size": 64}, "-:.*\\.down_proj": {}, ".*q_proj": {"bits": 3}}


@pytest.mark.parametrize(
    ("name", "bits", "group"),
    [
        ("model.layers.18.mlp.gate_proj", 8, 64),
        ("model.layers.17.mlp.gate_proj", 4, 128),
        ("model.layers.3.self_attn.q_proj", 3, 128),
        ("model.layers.18.mlp.down_proj", 4, 128),
        ("model.language_model.layers.18.mlp.gate_proj", 8, 64),
    ],
)
def test_q50_rules_match_names_as_the_checkpoint_spells_them(name: str, bits: int, group: int) -> None:
    own = parse(bits=4, group_size=128, dynamic=EXAMPLE).for_layer(name)
    assert (own.bits, own.group_size) == (bits, group)


def test_q50_rules_are_anchored_at_the_start_and_the_first_one_counts() -> None:
    config = parse(bits=4, dynamic={"layers": {"bits": 2}, "model.layers.1": {"bits": 3}, "+:model": {"bits": 8}})
    assert config.for_layer("model.layers.0.mlp.up_proj").bits == 8
    assert config.for_layer("model.layers.1.mlp.up_proj").bits == 3
    assert config.for_layer("model.layers.12.mlp.up_proj").bits == 3  # not the whole name
    assert config.for_layer("layers.1.mlp.up_proj").bits == 2
    assert config.for_layer("lm_head").bits == 4


def test_q44_q50_each_layer_is_read_by_its_own_rule() -> None:
    config = parse(bits=4, group_size=32, sym=True, lm_head=True, dynamic={"+:lm_head": {"bits": 8, "group_size": -1}})
    up, head = LinearLayer("model.layers.0.mlp.up_proj", 128, 64), LinearLayer("lm_head", 128, 64)
    assert config.spec_for(up, by_suffix(tensors_of(up))) == WeightSpec("uint4", (1, 32), True, True)
    assert config.spec_for(head, by_suffix(tensors_of(head, 8, -1))) == WeightSpec("uint8", (1, -1), True)
    with pytest.raises(CheckpointError, match="bits in the settings contradict") as caught:
        config.spec_for(up, by_suffix(tensors_of(up, 8)))
    assert "set bits to 8" in str(caught.value)
    assert "dynamic" in str(caught.value)


@pytest.mark.parametrize(
    ("lists", "topic"),
    [
        ({"dynamic": {"-:.*up_proj": {}}}, "dynamic says that it is not quantised"),
        ({"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, "does not name it"),
    ],
)
def test_lists_that_contradict_a_quantised_layer_are_told_once(
    lists: dict[str, Any], topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = parse(bits=4, sym=True, **lists)
    for index in range(3):
        layer = LinearLayer(f"model.layers.{index}.mlp.up_proj", 64, 32)
        assert config.spec_for(layer, by_suffix(tensors_of(layer))) is not None
    (told,) = [record.getMessage() for record in caplog.records]
    assert "model.layers.0.mlp.up_proj" in told
    assert topic in told


@pytest.mark.parametrize("names", [["self_attn.qkv_proj", "mlp.gate_up_proj"], ["self_attn.q_proj", "mlp.gate_proj"]])
def test_q48_fused_and_single_names_in_lists_mean_the_same(names: list[str], caplog: pytest.LogCaptureFixture) -> None:
    config = parse(bits=4, sym=True, modules_in_block_to_quantize=names)
    for name in ("self_attn.q_proj", "mlp.gate_proj"):
        layer = LinearLayer(f"model.layers.0.{name}", 64, 32)
        assert config.spec_for(layer, by_suffix(tensors_of(layer))) is not None
    fused = LinearLayer("model.layers.0.self_attn.qkv_proj", 64, 96)
    assert config.spec_for(fused, by_suffix(tensors_of(fused))) is not None
    assert not caplog.records or names[0] == "self_attn.q_proj"


def test_a_listed_layer_that_is_stored_plain_is_told_and_stays_plain(caplog: pytest.LogCaptureFixture) -> None:
    config = parse(bits=4, modules_in_block_to_quantize=["mlp.up_proj"], lm_head=True)
    for name in ("model.layers.0.mlp.up_proj", "lm_head", "model.layers.0.mlp.down_proj", "model.embed_tokens"):
        plain = {"weight": TensorInfo(f"{name}.weight", torch.float16, (32, 64), "f")}
        assert config.spec_for(LinearLayer(name, 64, 32), plain) is None
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "modules_in_block_to_quantize names it" in told[0]
    assert "lm_head is true" in told[1]


@pytest.mark.parametrize("name", ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.block_sparse_moe.gate"])
def test_q49_q52_whatever_is_stored_quantised_is_read(name: str) -> None:
    layer = LinearLayer(name, 64, 8)
    tensors = tensors_of(layer)
    assert parse(bits=4, sym=True).spec_for(layer, by_suffix(tensors)) == WeightSpec("uint4", (1, 32), True, True)


# --- patterns that nobody vouches for


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(.*)*", "(?:a|a)*b", "((a{1,2}))+", "(a?){30}", "(x*|y)+", ".*.*.*.*.*.*x", "a{1,}" * 6, "x" * 1001],
)
def test_patterns_that_could_take_for_ever_are_refused(pattern: str) -> None:
    with pytest.raises(CheckpointError, match="dynamic") as caught:
        parse(dynamic={f"+:{pattern}": {"bits": 4}})
    assert WHERE in str(caught.value)


@pytest.mark.parametrize("pattern", ["(", "[", "*", "(?P<a", "a{2,1}", "\\", "(?<=.*)x"])
def test_patterns_that_are_none_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="no regular expression"):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (".*\\.(?:18|19)\\..*(?:gate|up)_proj.*", "model.layers.18.mlp.up_proj"),
        ("model\\.layers\\.[0-9]+\\.mlp", "model.layers.4.mlp.up_proj"),
        ("(?:model\\.)?layers\\.\\d+", "layers.3.x"),
        ("lm_head", "lm_head"),
        ("[)+(]*x", "x"),
        (r"\(+x", "(x"),
        ("model.layers.(1[0-9]|2[0-4]).*", "model.layers.21.mlp"),
    ],
)
def test_patterns_that_writers_use_are_accepted(pattern: str, name: str) -> None:
    assert compile_pattern(pattern).match(name)


def test_accepted_patterns_end_on_long_names() -> None:
    for pattern in (".*a.*a.*a.*a.*ab", "(?:.*)?[a-z]*[a-z]*[a-z]*[a-z]*b", "\\w*\\w*\\w*\\w*\\w*!"):
        assert compile_pattern(pattern).match("a" * 40) is None


def test_key_for_one_layer_matches_it_alone() -> None:
    rule = Rule.of(Rule.key_for("model.layers.1.mlp.up_proj"), {})
    assert rule.pattern.match("model.layers.1.mlp.up_proj")
    assert not rule.pattern.match("model.layers.11.mlp.up_proj")
    assert not rule.pattern.match("model-layers.1.mlp.up_proj")
    assert Rule.of(Rule.key_for("x", excludes=True), {}).excludes


# --- recognising


UP, DOWN = LinearLayer("model.layers.0.mlp.up_proj", 256, 64), LinearLayer("model.layers.0.mlp.down_proj", 64, 256)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("g_idx", [True, False])
def test_q01_tensors_without_settings_are_recognised_and_bits_inferred(bits: int, g_idx: bool) -> None:
    tensors = tensors_of(UP, bits, 32, g_idx) | tensors_of(DOWN, bits, 32, g_idx)
    assert GPTQConfig.detect(None, tensors)
    assert GPTQConfig.infer(tensors) == {"bits": bits}
    config = GPTQConfig.parse(QuantSource(GPTQConfig.infer(tensors), "tensors"))
    spec = config.spec_for(UP, by_suffix(tensors_of(UP, bits, 32, g_idx)))
    assert spec == WeightSpec(f"uint{bits}", (1, 32), has_zeros=True, act_order=g_idx)


def test_q01_layers_of_different_widths_keep_their_own() -> None:
    tensors = tensors_of(UP, 4) | tensors_of(DOWN, 8)
    assert GPTQConfig.infer(tensors) == {}
    assert GPTQConfig().spec_for(DOWN, by_suffix(tensors_of(DOWN, 8))) == WeightSpec("uint8", (1, 32), True, True)


@pytest.mark.parametrize(
    ("raw", "claimed"),
    [
        ({"bits": 4, "group_size": 64, "desc_act": False, "sym": True}, True),
        ({"bits": 4, "damp_percent": 0.1}, True),
        ({"true_sequential": True}, True),
        ({"checkpoint_format": "gptq_v2"}, True),
        ({"format": "marlin"}, True),  # claimed in order to be refused by name
        ({"is_marlin_format": True}, True),
        ({"method": "gptq", "bits": 4}, True),
        ({"method": "awq", "sym": True}, False),
        ({"bits": 4, "group_size": 64, "zero_point": True, "sym": True}, False),  # AWQ's, as transformers writes it
        ({"bits": 4, "zero_point": True, "version": "gemm"}, False),
        ({"w_bit": 4, "desc_act": False}, False),
        ({"bits": 4, "group_size": 64}, False),
        ({"config_groups": {}}, False),
    ],
)
def test_settings_without_quant_method(raw: dict[str, Any], claimed: bool) -> None:
    source = QuantSource(raw, "quantize_config.json")
    assert GPTQConfig.detect(source, {}) == claimed
    assert GPTQConfig.detect(source, tensors_of(UP)) or raw.get("method") == "awq" or "config_groups" in raw
    assert not GPTQConfig.detect(source, awq_tensors())


def test_awq_is_never_claimed() -> None:
    assert not GPTQConfig.detect(None, awq_tensors())
    gemv = {"qweight": (32, 32), "qzeros": (32, 4), "scales": (32, 32)}  # 256 inputs, 32 outputs, groups of 32
    tensors = {
        s: TensorInfo(f"l.{s}", torch.float16 if s == "scales" else torch.int32, shape, "f")
        for s, shape in gemv.items()
    }
    assert not GPTQConfig.detect(None, {f"l.{s}": info for s, info in tensors.items()})
    assert not GPTQConfig.detect(None, awq_tensors("model.layers.1.mlp.up_proj") | tensors_of(UP))


def test_marlin_tensors_without_settings_are_refused_by_name() -> None:
    shapes = {"B": (16, 128), "s": (1, 64)}
    tensors = {f"l.{s}": TensorInfo(f"l.{s}", torch.int32, shape, "f") for s, shape in shapes.items()}
    assert GPTQConfig.detect(None, tensors)
    with pytest.raises(CheckpointError, match="Marlin"):
        GPTQConfig.infer(tensors)


def test_nothing_is_inferred_from_other_tensors() -> None:
    with pytest.raises(CheckpointError, match="do not say that they are GPTQ"):
        GPTQConfig.infer(awq_tensors())
    assert not GPTQConfig.detect(None, {})
    assert not GPTQConfig.detect(None, {"l.qweight": TensorInfo("l.qweight", torch.int32, (8, 8), "f")})


# --- the plugin


def test_the_hook_brings_the_format() -> None:
    assert octavo_gptq.octavo_quant_configs() == [GPTQConfig]
    assert octavo_gptq.octavo_api == (1, 0)


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, octavo_gptq; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- settings of any kind

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.floats(allow_nan=False)
    | st.sampled_from(
        ["", "gptq", "gptq_v2", "marlin", "int16", "auto_round:auto_awq", "auto_round:llm_compressor", "int"]
    ),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["bits", "dynamic", "+:.*", "-:x", "(", "a.0.b"]), inner, max_size=2)
    ),
    max_leaves=6,
)
KEYS = [
    *GPTQConfig.model_fields,
    *(alias for aliases in GPTQConfig.aliases_of.values() for alias in aliases),
    *("zero_point", "packing_format", "backend", "extra_config", "data_type", "act_bits", "act_group_size", "foo"),
    "config_groups",
]
METHODS = st.sampled_from(["gptq", "marlin", "gptq_marlin", "auto-round", "intel/auto-round", None, 5])


@given(st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=5), METHODS)
@settings(max_examples=300, deadline=None)
def test_settings_of_any_kind_are_read_or_refused_in_our_own_words(raw: dict[str, Any], method: object) -> None:
    source = QuantSource({**raw, "quant_method": method}, WHERE)
    for read in (GPTQConfig.translate, GPTQConfig.parse):
        found: object = None
        refused = ""
        try:
            found = read(source)
        except CheckpointError as error:
            refused = str(error)
        assert WHERE in refused or not refused
        if isinstance(found, GPTQConfig):
            again = GPTQConfig.parse(QuantSource(found.settings(), WHERE))
            assert again.model_dump() == found.model_dump()
