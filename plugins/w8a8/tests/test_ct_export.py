"""Settings for weights that are to be written, and the format's own package reading what was."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from octavo import (
    ActivationSpec,
    CheckpointError,
    LayerFacts,
    LinearLayer,
    QuantizedWeight,
    QuantSource,
    WeightSpec,
    round_to_nearest,
)
from octavo.testing import random_weight
from octavo_w8a8.compressed_tensors import CompressedTensorsConfig

TARGET = "compressed-tensors"
FLOAT = WeightSpec("float", (-1, -1))
INT8 = WeightSpec("int8", (1, -1), activation=ActivationSpec("int8"))
INT4 = WeightSpec("uint4", (1, 32), has_zeros=True)


def layer(name, in_features=64, out_features=32):
    return LinearLayer(name, in_features, out_features)


UP, DOWN = layer("model.layers.0.mlp.up_proj"), layer("model.layers.0.mlp.down_proj")
HEAD, EMBEDDING = layer("lm_head"), layer("model.embed_tokens")


def config_for(layers):
    return CompressedTensorsConfig.for_weights(TARGET, {name: as_facts(facts) for name, facts in layers.items()})


def as_facts(facts):
    return facts if isinstance(facts, LayerFacts) else LayerFacts(facts)


def reread(config):
    written = config.settings()
    assert json.loads(json.dumps(written)) == written
    again = CompressedTensorsConfig.parse(QuantSource(written, "written"))
    assert again == config
    assert again.unread_keys == ()
    return again


# --- settings


def test_one_scheme_for_all_is_said_of_the_class():
    written = config_for({UP: INT8, DOWN: INT8, HEAD: FLOAT, EMBEDDING: FLOAT}).settings()
    assert written["quant_method"] == "compressed-tensors"
    assert written["format"] == "int-quantized"
    assert written["ignore"] == ["lm_head"]
    (group,) = written["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert (group["weights"]["num_bits"], group["weights"]["strategy"]) == (8, "channel")
    assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("token", True)


def test_a_tied_head_is_ignored_for_readers_that_have_one():
    assert config_for({UP: INT8, EMBEDDING: FLOAT}).ignore == ("lm_head",)
    assert config_for({UP: INT8, HEAD: INT8}).ignore == ()


def test_float_layers_are_listed():
    assert config_for({UP: INT8, DOWN: FLOAT, HEAD: FLOAT}).ignore == (DOWN.name, "lm_head")


def test_several_schemes_name_their_layers():
    config = config_for({UP: INT8, DOWN: INT4, HEAD: LayerFacts(INT4, symmetric=False), EMBEDDING: INT4})
    written = config.settings()
    assert written["format"] == "mixed-precision"
    assert written["ignore"] == []
    groups = list(written["config_groups"].values())
    assert [group["targets"] for group in groups] == [[UP.name], [DOWN.name, EMBEDDING.name], ["lm_head"]]
    assert [group["format"] for group in groups] == ["int-quantized", "pack-quantized", "pack-quantized"]
    assert [group["weights"]["symmetric"] for group in groups] == [True, True, False]
    reread(config)


def test_an_embedding_alone_is_named():
    (group,) = config_for({EMBEDDING: INT4}).config_groups.values()
    assert group.targets == (EMBEDDING.name,)


def test_a_float_model_has_no_groups():
    config = config_for({UP: FLOAT, HEAD: FLOAT})
    assert (config.format, dict(config.config_groups)) == ("dense", {})
    reread(config)


SPECS = [
    INT8,
    INT4,
    *(WeightSpec(f"uint{bits}", group, True) for bits in range(2, 9) for group in ((1, -1), (1, 16), (-1, -1))),
    WeightSpec("uint4", (1, 16), True, act_order=True),
    WeightSpec("uint4", (1, 16), True, activation=ActivationSpec("int8")),
    WeightSpec("int8", (1, -1)),
    WeightSpec("int8", (-1, -1), activation=ActivationSpec("int8", "per_tensor", dynamic=False, symmetric=False)),
    WeightSpec("int8", (1, -1), True, activation=ActivationSpec("int8", symmetric=False)),
    WeightSpec("int4", (1, 16), activation=ActivationSpec("int8", "per_group", group_size=32)),
    WeightSpec("fp8_e4m3", (-1, -1), activation=ActivationSpec("fp8_e4m3", "per_tensor", dynamic=False)),
    WeightSpec("fp8_e4m3", (1, -1), activation=ActivationSpec("fp8_e4m3")),
    WeightSpec("fp8_e4m3", (16, 32), activation=ActivationSpec("fp8_e4m3", "per_group", group_size=32)),
    WeightSpec("fp8_e4m3", (1, 16)),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("zeros", ["integer", "midpoint"])
def test_every_scheme_is_written_and_read_again(spec, zeros, headers, same_bits):
    weight = random_weight(spec, 32, 64, torch.Generator().manual_seed(0), zeros=zeros, scale_dtype=torch.bfloat16)
    config = reread(config_for({UP: LayerFacts(spec, weight.is_symmetric, torch.bfloat16), HEAD: FLOAT}))
    tensors = config.serialise(UP, weight)
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert config.spec_for(UP, headers(tensors)) == spec or zeros == "midpoint"
    again = config.canonicalise(UP, tensors)
    again.check(UP)
    assert torch.equal(again.dequantize(), weight.dequantize())
    for field in ("codes", "scales", "group_index", "input_scale"):
        assert (getattr(again, field) is None) is (getattr(weight, field) is None)
        assert getattr(again, field) is None or same_bits(getattr(again, field), getattr(weight, field))
    assert all(same_bits(config.serialise(UP, again)[suffix], tensor) for suffix, tensor in tensors.items())


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 8),
    rows=st.integers(1, 40),
    columns=st.integers(1, 6),
    group=st.sampled_from([1, 3, 8, 32, -1]),
    symmetric=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**16),
)
def test_round_trip_of_any_shape(headers, bits, rows, columns, group, symmetric, dtype, seed):
    inputs = columns * (7 if group == -1 else group)
    whole = layer("model.layers.0.mlp.up_proj", inputs, rows)
    zeros = "midpoint" if symmetric else "integer"
    spec = WeightSpec(f"uint{bits}", (1, group), True)
    weight = random_weight(spec, rows, inputs, torch.Generator().manual_seed(seed), zeros=zeros, scale_dtype=dtype)
    config = config_for({whole: LayerFacts(spec, symmetric)})
    try:
        tensors = config.serialise(whole, weight)
    except CheckpointError as error:
        refusal = str(error)
    else:
        refusal = ""
    assert not refusal or "both fit these words" in refusal  # a few codes may: then they are not written
    assume(not refusal)
    again = config.canonicalise(whole, tensors)
    assert config.spec_for(whole, headers(tensors)) == again.spec
    assert torch.equal(again.dequantize(), weight.dequantize())
    assert again.scales.dtype == dtype


def test_online_quantisation_makes_w8a8():
    assert CompressedTensorsConfig.online_spec(UP) == INT8
    weight = round_to_nearest(torch.randn(32, 64), INT8)
    config = config_for({UP: LayerFacts(INT8, weight.is_symmetric)})
    assert torch.equal(config.canonicalise(UP, config.serialise(UP, weight)).dequantize(), weight.dequantize())


# --- what cannot be written


@pytest.mark.parametrize(
    ("facts", "fact"),
    [
        (LayerFacts(WeightSpec("fp8_e5m2", (1, -1))), "fp8_e5m2"),
        (LayerFacts(WeightSpec("kit-unknown", (1, -1))), "kit-unknown"),
        (LayerFacts(WeightSpec("uint1", (1, -1), True)), "num_bits must be 2 to 8"),
        (LayerFacts(WeightSpec("uint4", (1, -1))), "unsigned codes need zeros"),
        (LayerFacts(WeightSpec("uint4", (16, 16), True)), "blocks"),
        (LayerFacts(WeightSpec("uint4", (1, 48), True)), "not a multiple of its group size 48"),
        (LayerFacts(WeightSpec("fp8_e4m3", (1, -1), True)), "no zero points"),
        (LayerFacts(replace(INT8, activation=ActivationSpec("uint8"))), "uint8"),
        (LayerFacts(replace(INT8, activation=ActivationSpec("int8", dynamic=False))), "static"),
        (LayerFacts(replace(FLOAT, activation=ActivationSpec("int8"))), "float"),
    ],
)
def test_schemes_that_the_format_lacks_are_refused(facts, fact):
    with pytest.raises(CheckpointError) as caught:
        config_for({HEAD: INT8, UP: facts})
    assert UP.name in str(caught.value)
    assert fact in str(caught.value)


def packed(**change):
    weight = random_weight(INT4, 32, 64, torch.Generator().manual_seed(0), zeros="integer")
    return replace(weight, **change)


@pytest.mark.parametrize(
    ("described", "weight", "fact"),
    [
        (INT4, packed(zeros=torch.full((32, 2), 7.5)), "not integers in 0..15"),
        (INT4, packed(zeros=torch.full((32, 2), 16.0)), "not integers in 0..15"),
        (LayerFacts(INT4, symmetric=True), packed(), "the settings say symmetric"),
        (INT4, packed(scales=torch.ones(32, 2, dtype=torch.float64)), "float64"),
        (INT8, packed(), "the settings say int8"),
        (replace(INT4, group_shape=(1, 16)), packed(), "the settings say groups of (1, 16)"),
        (replace(INT4, activation=ActivationSpec("int8")), packed(), "its inputs are plain"),
        (INT4, QuantizedWeight.from_float(torch.zeros(32, 64)), "it is float"),
        (INT4, packed(spec=replace(INT4, act_order=True), group_index=torch.arange(64) % 2), "actorder: group"),
    ],
)
def test_weights_that_settings_do_not_describe_are_refused(described, weight, fact):
    facts = described if isinstance(described, LayerFacts) else LayerFacts(described, symmetric=False)
    config = config_for({UP: facts})
    with pytest.raises(CheckpointError) as caught:
        config.serialise(UP, weight)
    assert UP.name in str(caught.value)
    assert fact in str(caught.value)


def test_static_inputs_need_their_scale():
    spec = replace(INT8, activation=ActivationSpec("int8", "per_tensor", dynamic=False, symmetric=False))
    weight = random_weight(spec, 32, 64, torch.Generator().manual_seed(0))
    config = config_for({UP: spec})
    for change, fact in (({"input_scale": None}, "no static scale"), ({"input_zero": torch.tensor([0.5])}, "0.5")):
        with pytest.raises(CheckpointError, match=fact):
            config.serialise(UP, replace(weight, **change))


# --- the format's own package


@pytest.fixture(scope="module")
def package():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("compressed_tensors")


REMOVED = "the package has removed the order of groups in 2026"


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.act_order], ids=str)
def test_the_package_reads_what_is_written(spec, package):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    weight = random_weight(spec, 32, 64, torch.Generator().manual_seed(0), zeros="integer")
    config = config_for({UP: LayerFacts(spec, weight.is_symmetric), HEAD: FLOAT})
    theirs = QuantizationConfig.model_validate(config.settings())
    assert theirs.ignore == ["lm_head"]
    (scheme,) = theirs.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    tensors = config.serialise(UP, weight)
    found = compressor.decompress({name: tensor for name, tensor in tensors.items() if name != "bias"}, scheme)[
        "weight"
    ]
    if spec.group_shape != (16, 32):
        assert torch.equal(found, weight.dequantize())
    else:  # it multiplies blocks in another order
        assert torch.allclose(found, weight.dequantize(), rtol=1e-6)


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_packages_own_packer_makes_the_same_words(bits, package, same_bits):
    from compressed_tensors.compressors import pack_quantized

    spec = WeightSpec(f"uint{bits}", (1, 32), True)
    weight = random_weight(spec, 40, 64, torch.Generator().manual_seed(bits), zeros="integer")
    whole = replace(UP, out_features=40)
    tensors = config_for({whole: LayerFacts(spec, symmetric=False)}).serialise(whole, weight)
    middle = 2 ** (bits - 1)
    signed = (weight.codes.int() - middle).to(torch.int8)
    points = (weight.zeros - middle).to(torch.int8)
    assert same_bits(tensors["weight_packed"], pack_quantized.pack_to_int32(signed, bits))
    assert same_bits(tensors["weight_zero_point"], pack_quantized.pack_to_int32(points, bits, packed_dim=0))


@pytest.mark.parametrize(
    "spec", [INT8, INT4, WeightSpec("fp8_e4m3", (1, -1), activation=ActivationSpec("fp8_e4m3"))], ids=str
)
def test_transformers_loads_a_folder_that_was_written(spec, package, shared, tmp_path):
    transformers = pytest.importorskip("transformers")
    source = shared / "checkpoints" / "tiny-llama-fp16"
    tensors = load_file(source / "model.safetensors")
    linears = {
        name.removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
        if name.endswith("_proj.weight") or name == "lm_head.weight"
    }
    weights, facts = {}, {LinearLayer("lm_head", 128, 512): LayerFacts(FLOAT)}
    for name, tensor in linears.items():
        if name != "lm_head":
            one, weight = LinearLayer(name, tensor.shape[1], tensor.shape[0]), round_to_nearest(tensor, spec)
            weights[one] = replace(weight, scales=weight.scales.half())
            facts[one] = LayerFacts(spec, symmetric=not spec.has_zeros)
            del tensors[f"{name}.weight"]
    config = CompressedTensorsConfig.for_weights(TARGET, facts)
    expected = {f"{one.name}.weight": weight.dequantize(torch.float16) for one, weight in weights.items()}
    for one, weight in weights.items():
        tensors |= {f"{one.name}.{suffix}": tensor for suffix, tensor in config.serialise(one, weight).items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": config.settings()}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path,
            dtype=torch.float16,
            quantization_config=transformers.CompressedTensorsConfig(run_compressed=False),
        )
    found = model.state_dict()
    assert expected
    for name, tensor in expected.items():
        assert torch.allclose(found[name].float(), tensor.float(), rtol=2e-3, atol=1e-6), name
