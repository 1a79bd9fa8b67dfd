"""What config.json would say, from the metadata: every key that changes what is computed, and refusals of all others."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from octavo import CheckpointError
from octavo_gguf.reader import GGUFReader

Convert = Callable[..., tuple[Path, Path]]
Configured = Callable[..., dict[str, Any]]
Refused = Callable[..., str]
FAMILIES = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


def refusal(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        GGUFReader(file)
    return str(caught.value)


def _converted(convert: Convert, metadata: tuple[Any, ...], architecture: str, options: dict[str, Any]) -> Path:
    """The file of a tiny model with further metadata; `options` are those of the writer, and sizes of the model."""
    writer = {name: options.pop(name) for name in ("extra", "leave_out") if name in options}
    return convert(architecture, options={"metadata": metadata, **writer}, **options)[1]


@pytest.fixture
def config(convert: Convert) -> Configured:
    """The configuration of a tiny model's file with further metadata."""

    def read(*metadata: tuple[Any, ...], architecture: str = "LlamaForCausalLM", **options: Any) -> dict[str, Any]:
        return GGUFReader(_converted(convert, metadata, architecture, options)).config()

    return read


@pytest.fixture
def refused(convert: Convert) -> Refused:
    def read(
        *metadata: tuple[Any, ...],
        architecture: str = "LlamaForCausalLM",
        extra: Any = (),
        leave_out: Sequence[str] = (),
        **model: Any,
    ) -> str:
        options = {"metadata": metadata, "extra": extra, "leave_out": leave_out}
        _, file = convert(architecture, options=options, **model)
        message = refusal(file)
        assert str(file) in message
        return message

    return read


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_configuration_is_the_folders(architecture: str, tie: bool, convert: Convert) -> None:
    folder, file = convert(architecture, tie=tie, rope_theta=1e6, rms_norm_eps=1e-5)
    expected, found = json.loads((folder / "config.json").read_text()), GGUFReader(file).config()
    assert found.pop("rope_parameters") == {"rope_type": "default", "rope_theta": expected.pop("rope_theta")}
    assert found.pop("dtype") == expected.pop("torch_dtype")
    if architecture != "Qwen2ForCausalLM":
        assert (found.pop("attention_bias"), found.pop("mlp_bias")) == (False, False)
    assert found == expected


def test_keys_of_the_model_that_nobody_reads_are_told(config: Configured, caplog: pytest.LogCaptureFixture) -> None:
    config(("add_vocab_size", 288), ("add_string", "llama.tensor_data_layout", "Meta AI original pth"))
    assert not caplog.records
    config(("add_float32", "llama.new.multiplier", 2.0), ("add_float32", "llama.rope.scaling.factor", 2.0))
    (told,) = caplog.messages
    assert "keys of the model that are not understood: new.multiplier, rope.scaling.factor" in told


def test_head_size_follows_from_the_sizes(config: Configured) -> None:
    assert config(leave_out=["attention.key_length", "attention.value_length"])["head_dim"] == 16


def test_values_for_each_layer_that_agree_are_one_value(config: Configured, refused: Refused) -> None:
    assert config(("add_head_count_kv", [2, 2]))["num_key_value_heads"] == 2
    assert "the same for all layers" in refused(("add_head_count_kv", [2, 4]))


def test_keys_and_values_have_as_many_heads_as_queries_unless_told(config: Configured) -> None:
    model = {"num_key_value_heads": 4}
    assert config(leave_out=["attention.head_count_kv"], **model)["num_key_value_heads"] == 4


def test_ends_of_turn_are_ends(config: Configured) -> None:
    assert config(("add_eot_token_id", 258))["eos_token_id"] == [257, 258]
    assert config(("add_eot_token_id", 257))["eos_token_id"] == 257
    assert config(leave_out=["tokenizer.ggml.eos_token_id"])["eos_token_id"] is None
    assert config(("add_bos_token_id", 256))["bos_token_id"] == 256


def test_biases_are_declared_where_all_are_stored(config: Configured) -> None:
    assert config(attention_bias=True)["attention_bias"] is True
    assert config(mlp_bias=True)["mlp_bias"] is True


# --- positions


def scaling(kind: str, factor: float, *more: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
    return (
        ("add_string", "llama.rope.scaling.type", kind),
        ("add_float32", "llama.rope.scaling.factor", factor),
        *more,
    )


def test_positions_are_stretched_linearly(config: Configured) -> None:
    expected = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    assert config(*scaling("linear", 4.0))["rope_parameters"] == expected
    assert config(("add_float32", "llama.rope.scale_linear", 4.0))["rope_parameters"] == expected
    assert config(*scaling("none", 4.0))["rope_parameters"]["rope_type"] == "default"


def test_positions_are_stretched_by_yarn(config: Configured) -> None:
    original = ("add_uint32", "llama.rope.scaling.original_context_length", 128)
    found = config(*scaling("yarn", 4.0, original))["rope_parameters"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    assert found == {**yarn, "original_max_position_embeddings": 128}
    beta = ("add_float32", "llama.rope.scaling.yarn_beta_fast", 16.0)
    found = config(*scaling("yarn", 4.0, beta))["rope_parameters"]
    assert found == {**yarn, "original_max_position_embeddings": 512, "beta_fast": 16.0}


def llama3_factors(factor: float, original: int, head_dim: int = 16) -> tuple[str, NDArray[np.float32]]:
    """As llama.cpp's converter writes them (LlamaModel.generate_extra_tensors)."""
    low, high, theta = 1.0, 4.0, 500000.0
    factors = []
    for frequency in 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim):
        wave = 2 * math.pi / frequency
        if wave < original / high:
            factors.append(1.0)
        elif wave > original / low:
            factors.append(factor)
        else:
            smooth = (original / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return ("rope_freqs.weight", np.array(factors, np.float32))


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 4096), (8.0, 2048)])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_llama3_parameters_are_found_from_the_factors(
    factor: float, original: int, head_dim: int, config: Configured
) -> None:
    extra = [llama3_factors(factor, original, head_dim=head_dim)]
    found = config(extra=extra, rope_theta=5e5, head_dim=head_dim)["rope_parameters"]
    stretched = {
        key: found[key] for key in ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "rope_theta")
    }
    assert stretched == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "rope_theta": 5e5,
    }
    again = llama3_factors(factor, found["original_max_position_embeddings"], head_dim=head_dim)
    np.testing.assert_allclose(again[1], extra[0][1], rtol=1e-5)
    if head_dim > 16:  # 8 frequencies may leave no wave between the bounds, which leaves the length open
        assert found["original_max_position_embeddings"] == original


def test_the_original_length_of_the_metadata_counts(config: Configured, refused: Refused) -> None:
    original = ("add_uint32", "llama.rope.scaling.original_context_length", 3000)
    extra = [llama3_factors(8.0, 3000)]
    found = config(original, extra=extra, rope_theta=5e5)["rope_parameters"]
    assert found["original_max_position_embeddings"] == 3000
    assert "not known" in refused(extra=[llama3_factors(8.0, 3000, head_dim=128)], rope_theta=5e5, head_dim=128)


def test_factors_of_1_change_nothing(config: Configured) -> None:
    extra = [("rope_freqs.weight", np.ones(8, np.float32))]
    assert config(extra=extra)["rope_parameters"]["rope_type"] == "default"


def test_the_factors_are_no_tensor_of_the_model(convert: Convert) -> None:
    reader = GGUFReader(convert(options={"extra": [("rope_freqs.weight", np.ones(8, np.float32))]})[1])
    assert not [name for name in reader.tensors if "rope" in name]


@pytest.mark.parametrize(
    "factors",
    [
        np.linspace(1, 2, 8),
        np.full(8, np.nan),
        np.zeros(8),
        np.full(7, 1.0),
        np.full(8, np.inf),
        -np.ones(8),
    ],
)
def test_factors_of_another_origin_are_refused(factors: Any, refused: Refused) -> None:
    message = refused(extra=[("rope_freqs.weight", factors.astype(np.float32))])
    for fact in ("rope_freqs.weight", "8 factors of type llama3", f"{len(factors)} factors"):
        assert fact in message


def test_factors_beside_another_stretching_are_refused(refused: Refused) -> None:
    extra = [("rope_freqs.weight", np.ones(8, np.float32))]
    assert "none beside the tensor rope_freqs.weight" in refused(*scaling("yarn", 4.0), extra=extra)
    assert "no row of numbers" in refused(extra=[("rope_freqs.weight", np.ones((2, 8), np.float32))])


# --- windows


def test_a_window_makes_a_mistral(config: Configured) -> None:
    found = config(("add_sliding_window", 128))
    assert (found["architectures"], found["model_type"], found["sliding_window"]) == (
        ["MistralForCausalLM"],
        "mistral",
        128,
    )
    assert "sliding_window" not in config(("add_sliding_window", 512))


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_windows_of_families_that_do_not_say_where_are_refused(
    architecture: str, config: Configured, refused: Refused
) -> None:
    assert "attention.sliding_window" in refused(("add_sliding_window", 128), architecture=architecture)
    assert "sliding_window" not in config(("add_sliding_window", 32768), architecture=architecture)


# --- refusals


@pytest.mark.parametrize(
    ("metadata", "facts"),
    [
        ([("add_string", "general.architecture", "gemma3")], ["'gemma3'", "llama, qwen2, qwen3"]),
        ([("add_uint32", "general.architecture", 3)], ["architecture 3", "llama, qwen2, qwen3"]),
        ([("add_expert_count", 8)], ["llama.expert_count", "8"]),
        ([("add_clamp_kqv", 8.0)], ["llama.attention.clamp_kqv", "8.0"]),
        ([("add_final_logit_softcapping", 30.0)], ["llama.final_logit_softcapping", "30.0"]),
        ([("add_bool", "llama.attention.causal", False)], ["llama.attention.causal"]),
        ([("add_value_length", 32)], ["llama.attention.value_length", "16", "32"]),
        ([("add_rope_dimension_count", 8)], ["llama.rope.dimension_count", "16", "8"]),
        ([("add_block_count", 2**31)], ["llama.block_count", str(2**31)]),
        ([("add_block_count", 0)], ["llama.block_count", "0"]),
        ([("add_head_count", 0)], ["llama.attention.head_count"]),
        ([("add_string", "llama.embedding_length", "64")], ["llama.embedding_length", "'64'"]),
        ([("add_bool", "llama.context_length", True)], ["llama.context_length", "True"]),
        ([("add_layer_norm_rms_eps", 0.0)], ["layer_norm_rms_epsilon", "0.0"]),
        ([("add_layer_norm_rms_eps", float("nan"))], ["layer_norm_rms_epsilon", "nan"]),
        ([("add_rope_freq_base", float("inf"))], ["rope.freq_base", "inf"]),
        (
            [("add_string", "llama.rope.scaling.type", "longrope")],
            ["rope.scaling.type", "none, linear or yarn", "'longrope'"],
        ),
        ([("add_string", "llama.rope.scaling.type", "linear")], ["rope.scaling.factor", "nothing"]),
        ([("add_float32", "llama.rope.scaling.attn_factor", 2.0)], ["rope.scaling.attn_factor", "2.0"]),
        ([("add_token_list", ["a"] * 289)], ["token_embd.weight", "289", "288"]),
    ],
)
def test_what_is_not_computed_is_refused_by_key(
    metadata: list[tuple[Any, ...]], facts: list[str], refused: Refused
) -> None:
    message = refused(*metadata)
    assert all(fact in message for fact in facts), message


def test_sizes_that_are_missing_are_named(refused: Refused) -> None:
    for key in ("context_length", "embedding_length", "feed_forward_length", "attention.head_count", "block_count"):
        message = refused(leave_out=[key])
        assert f"llama.{key}" in message
        assert "nothing" in message


def test_long_factors_are_refused(refused: Refused) -> None:
    assert "rope_factors_long.weight" in refused(extra=[("rope_factors_long.weight", np.ones(8, np.float32))])


def test_a_file_of_something_else_has_no_embedding(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for method in (
        writer.add_block_count,
        writer.add_context_length,
        writer.add_embedding_length,
        writer.add_head_count,
    ):
        method(1)
    writer.add_feed_forward_length(1)
    writer.add_key_length(2)
    writer.add_tensor("x", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "no embedding" in refusal(tmp_path / "x.gguf")
