"""Files that the gguf package's own writer makes of tiny models: names, rows, settings, tokenizer, and the whole engine."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import octavo_gguf
from octavo import LLM, CheckpointError, ConfigError, LinearLayer, SamplingParams
from octavo_gguf.config import GGUFConfig
from octavo_gguf.header import read_header
from octavo_gguf.reader import GGUFReader

Convert = Callable[..., tuple[Path, Path]]
TYPES = gguf.GGMLQuantizationType
FAMILIES = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["The capital of France is", "one, two,", "Grüße, 世界"]


def refusal(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        call(*arguments)
    return str(caught.value)


def greedy(path: Path) -> list[list[int]]:
    llm = LLM(str(path), dtype="float32", num_blocks_override=32, max_model_len=128)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


# --- tensors


@pytest.mark.parametrize("architecture", FAMILIES)
def test_q54_float_files_hold_the_model_bit_for_bit_and_biases_where_stored(
    architecture: str, convert: Convert
) -> None:
    options = {"attention_bias": True, "mlp_bias": True} if architecture == "LlamaForCausalLM" else {}
    folder, file = convert(architecture, **options)
    expected, reader = load_file(folder / "model.safetensors"), GGUFReader(file)
    assert set(reader.tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(reader.read(name), tensor), name
        assert (reader.tensors[name].shape, reader.tensors[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        assert reader.tensors[name].file == str(file)
    assert "quantization_config" not in reader.config()
    assert any(name.endswith("q_proj.bias") for name in expected) == (architecture != "Qwen3ForCausalLM")


@pytest.mark.parametrize("kind", [TYPES.F16, TYPES.BF16])
def test_16_bit_files(kind: Any, convert: Convert) -> None:
    folder, file = convert(matrices=kind)
    reader, dtype = GGUFReader(file), {TYPES.F16: torch.float16, TYPES.BF16: torch.bfloat16}[kind]
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(reader.read(name), tensor.to(dtype) if tensor.dim() == 2 else tensor)
    assert reader.config()["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("kind", [TYPES.Q4_0, TYPES.Q4_1, TYPES.Q5_0, TYPES.Q5_1, TYPES.Q8_0])
def test_blocks_appear_under_their_type_and_stand_for_the_rows_of_the_model(
    architecture: str, kind: Any, convert: Convert
) -> None:
    folder, file = convert(architecture, kind, TYPES.Q8_0)
    reader, seen = GGUFReader(file), 0
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() == 1:
            assert torch.equal(reader.read(name), tensor)
            continue
        module, seen = name.removesuffix(".weight"), seen + 1
        used = TYPES.Q8_0 if "embed_tokens" in name else kind
        suffix = used.name.lower()
        info, rows = reader.tensors[f"{module}.{suffix}"], reader.read(f"{module}.{suffix}")
        elements, size = gguf.GGML_QUANT_SIZES[used]
        assert (info.dtype, info.shape) == (torch.uint8, (tensor.shape[0], tensor.shape[1] // elements * size))
        assert (rows.dtype, tuple(rows.shape)) == (info.dtype, info.shape)
        assert name not in reader.tensors
        layer = LinearLayer(module, tensor.shape[1], tensor.shape[0])
        assert GGUFConfig().spec_for(layer, {suffix: info}) is not None
        expected = torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), used), used))
        found = GGUFConfig().canonicalise(layer, {suffix: rows}).dequantize()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert seen == len([t for t in reader.tensors.values() if t.dtype == torch.uint8])
    assert reader.config()["quantization_config"] == {"quant_method": "gguf"}


def test_tensors_without_a_name_keep_theirs(convert: Convert) -> None:
    extra = [("blk.0.attn_sinks.weight", np.zeros(4, np.float32)), ("something", np.zeros(4, np.float32))]
    reader = GGUFReader(convert(options={"extra": extra})[1])
    assert {"blk.0.attn_sinks.weight", "something"} <= set(reader.tensors)
    assert torch.equal(reader.read("something"), torch.zeros(4))


def test_a_tensor_under_both_names_is_refused(convert: Convert) -> None:
    extra = [("model.norm.weight", np.zeros(64, np.float32))]
    message = refusal(GGUFReader, convert(options={"extra": extra})[1])
    assert "model.norm.weight" in message
    assert "output_norm.weight" in message


def test_rows_that_are_no_pairs_are_refused(convert: Convert) -> None:
    _, file = convert(options={"metadata": [("add_head_count", 24), ("add_key_length", 16), ("add_head_count_kv", 24)]})
    message = refusal(GGUFReader(file).read, "model.layers.0.self_attn.q_proj.weight")
    assert "64 rows are no pairs for each of 24 heads" in message


def test_a_file_that_has_become_shorter_is_noticed(convert: Convert) -> None:
    _, file = convert()
    reader = GGUFReader(file)
    file.write_bytes(file.read_bytes()[:4096])
    assert "has become shorter" in refusal(reader.read, list(reader.tensors)[-1])
    file.unlink()
    assert "cannot read a tensor" in refusal(reader.read, list(reader.tensors)[-1])


# --- the engine


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_q53_float_files_give_the_tokens_of_the_folder_tied_or_not(
    architecture: str, tie: bool, convert: Convert
) -> None:
    folder, file = convert(architecture, tie=tie)
    expected = greedy(folder)
    assert greedy(file) == expected
    assert greedy(file.parent) == expected


@pytest.mark.parametrize(
    ("matrices", "embedding"),
    [
        (TYPES.Q8_0, TYPES.F16),
        (TYPES.Q4_1, TYPES.Q8_0),
        (
            lambda name: {"v": TYPES.Q6_K, "o": TYPES.Q5_K, "n": TYPES.Q3_K, "p": TYPES.Q2_K}.get(
                name[-13], TYPES.Q4_K
            ),
            TYPES.Q6_K,
        ),
    ],
)
@pytest.mark.parametrize("tie", [False, True])
def test_q44_q52_mixed_types_with_embedding_and_head_give_the_tokens_of_the_same_numbers_as_floats(
    matrices: Any, embedding: Any, tie: bool, convert: Convert
) -> None:
    """The floats are those that the gguf package's decoder makes of the file."""
    from safetensors.torch import save_file

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    folder, file = convert("LlamaForCausalLM", matrices, embedding, tie=tie, **sizes)
    kinds = {tensor.type.name for tensor in read_header(file).tensors}
    assert len(kinds) >= 2
    reader, plain = GGUFReader(file), {}
    for name, info in reader.tensors.items():
        module, _, suffix = name.rpartition(".")
        data = reader.read(name)
        if info.dtype == torch.uint8:
            data = torch.from_numpy(gguf.dequantize(data.numpy(), TYPES[suffix.upper()]))
        plain[f"{module}.weight"] = data.float()
    save_file(plain, folder / "model.safetensors")
    assert greedy(file) == greedy(folder)


def test_q26_splits_are_one_model_and_missing_ones_are_named(convert: Convert, tmp_path: Path) -> None:
    _, whole = convert(matrices=TYPES.Q8_0)
    _, part = convert(matrices=TYPES.Q8_0, options={"split": 8})
    names = sorted(file.name for file in part.parent.glob("*.gguf"))
    assert len(names) > 2
    one, parts = GGUFReader(whole), GGUFReader(part.parent)
    assert set(one.tensors) == set(parts.tensors)
    assert one.config() == parts.config()
    for name in one.tensors:
        assert torch.equal(one.read(name), parts.read(name))
    assert set(GGUFReader(part.parent / names[1]).tensors) == set(one.tensors)
    (part.parent / names[1]).rename(tmp_path / "elsewhere")
    message = refusal(GGUFReader, part.parent)
    assert names[1] in message
    assert "fetch the missing files" in message
    (tmp_path / "alone.gguf").write_bytes((part.parent / names[0]).read_bytes())
    assert "part of a split model" in refusal(GGUFReader, tmp_path / "alone.gguf")


def test_splits_that_do_not_belong_together_are_refused(convert: Convert) -> None:
    _, part = convert(options={"split": 8})
    files = sorted(part.parent.glob("*.gguf"))
    first, second = files[0].read_bytes(), files[1].read_bytes()
    files[1].write_bytes(first)
    assert "wrong place" in refusal(GGUFReader, part.parent)
    files[0].write_bytes(second)
    assert "wrong place" in refusal(GGUFReader, part.parent)


# --- which path


def test_what_is_claimed(convert: Convert, tmp_path: Path) -> None:
    folder, file = convert()
    assert GGUFReader.claims(file)
    assert GGUFReader.claims(file.parent)
    assert not GGUFReader.claims(folder)
    assert not GGUFReader.claims(folder / "config.json")
    assert not GGUFReader.claims(tmp_path / "nothing.gguf")
    (both := tmp_path / "both").mkdir()
    (both / "model.gguf").write_bytes(file.read_bytes())
    (both / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert not GGUFReader.claims(both)


def test_several_models_in_a_folder_are_listed(convert: Convert) -> None:
    _, file = convert()
    for name in ("model-q4.gguf", "mmproj.gguf"):
        (file.parent / name).write_bytes(file.read_bytes())
    assert GGUFReader.claims(file.parent)
    message = refusal(GGUFReader, file.parent)
    for fact in ("more than one GGUF model", "mmproj.gguf", "model-q4.gguf", "model.gguf", "Give the path of one file"):
        assert fact in message
    assert GGUFReader(file).tensors


def test_the_hooks_bring_reader_and_format() -> None:
    assert octavo_gguf.octavo_checkpoint_readers() == [GGUFReader]
    assert octavo_gguf.octavo_quant_configs() == [GGUFConfig]
    assert octavo_gguf.octavo_api == (1, 0)


# --- the front part


@pytest.mark.parametrize("kind", [TYPES.F32, TYPES.Q4_1])
def test_the_header_is_what_the_packages_reader_reads(kind: Any, convert: Convert) -> None:
    more = [
        ("add_float64", "a.double", 0.1),
        ("add_int64", "a.long", -(2**60)),
        ("add_uint64", "a.ulong", 2**63),
        ("add_int8", "a.byte", -3),
        ("add_uint16", "a.short", 65535),
        ("add_bool", "a.bool", True),
        ("add_array", "a.floats", [0.5, 0.25]),
        ("add_array", "a.texts", ["é", "", "x"]),
        ("add_custom_alignment", 64),
    ]
    _, file = convert(matrices=kind, options={"metadata": more})
    ours, theirs = read_header(file), gguf.GGUFReader(file)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert set(ours.metadata) == set(fields)
    for key, value in ours.metadata.items():
        assert np.float32(value) == np.float32(fields[key]) if isinstance(value, float) else value == fields[key], key
    assert [t.name for t in ours.tensors] == [t.name for t in theirs.tensors]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert (mine.start, mine.num_bytes, mine.type) == (other.data_offset, other.n_bytes, other.tensor_type)
        assert mine.shape == tuple(reversed(other.shape.tolist()))


# --- tokenizer


def test_the_tokenizer_is_the_folders(convert: Convert) -> None:
    from transformers import AutoTokenizer

    folder, file = convert()
    ours, theirs = GGUFReader(file).tokenizer(), AutoTokenizer.from_pretrained(folder)
    for text in (*PROMPTS, "a  b\n\tc", "<|im_start|>user", "🦊" * 3, ""):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    messages = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)
    assert (ours.eos_token, ours.pad_token, ours.bos_token) == (theirs.eos_token, theirs.pad_token, theirs.bos_token)
    assert ours.decode([72, 105, 257], skip_special_tokens=True) == "Hi"


def test_a_file_without_tokenizer_loads_and_says_so_when_asked(convert: Convert) -> None:
    _, file = convert(options={"leave_out": ["tokenizer.ggml.model"]})
    reader = GGUFReader(file)
    assert "tokenizer.ggml.model one of gpt2, llama" in refusal(reader.tokenizer)


def test_an_unknown_way_to_cut_text_is_reported(convert: Convert, caplog: pytest.LogCaptureFixture) -> None:
    _, file = convert(options={"metadata": [("add_tokenizer_pre", "foo")]})
    with caplog.at_level(logging.WARNING):
        GGUFReader(file).tokenizer()
    assert "tokenizer.ggml.pre 'foo'" in caplog.text
    caplog.clear()
    GGUFReader(convert()[1]).tokenizer()
    assert caplog.text == ""


def test_a_piece_that_is_a_token_of_llama3_needs_no_merges(convert: Convert) -> None:
    tokens = ["h", "i", "u", "hi", "hu", "<s>"]
    metadata = [
        ("add_token_list", tokens),
        ("add_token_types", [1, 1, 1, 1, 1, 3]),
        ("add_token_merges", ["h u"]),
        ("add_bos_token_id", 5),
        ("add_eos_token_id", 5),
        ("add_pad_token_id", 5),
    ]
    for pre, expected in (("llama-bpe", [5, 3]), ("gpt-2", [0, 1])):
        _, file = convert(options={"metadata": [*metadata, ("add_tokenizer_pre", pre)]})
        assert GGUFReader(file).tokenizer().encode("hi") == expected
    options = {"metadata": [*metadata, ("add_tokenizer_pre", "llama-bpe"), ("add_add_bos_token", False)]}
    assert GGUFReader(convert(options=options)[1]).tokenizer().encode("hi") == [3]


def test_a_sentencepiece_vocabulary_begins_with_bos(convert: Convert) -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁a", "a", "▁"]
    metadata = [
        ("add_tokenizer_model", "llama"),
        ("add_token_list", tokens),
        ("add_token_scores", [0.0, 0.0, 0.0, -1.0, -2.0, -3.0]),
        ("add_token_types", [2, 3, 3, 1, 1, 1]),
        ("add_bos_token_id", 1),
        ("add_eos_token_id", 2),
    ]
    leave_out = [f"tokenizer.ggml.{key}" for key in ("pre", "merges", "padding_token_id")]
    tokenizer = GGUFReader(convert(options={"leave_out": leave_out, "metadata": metadata})[1]).tokenizer()
    assert tokenizer.encode("a") == [1, 3]
    assert tokenizer.decode([3, 3]) == "a a"
    metadata.append(("add_add_space_prefix", False))
    tokenizer = GGUFReader(convert(options={"leave_out": leave_out, "metadata": metadata})[1]).tokenizer()
    assert tokenizer.encode("a a") == [1, 4, 3]
    assert tokenizer.decode([3, 3]) == " a a"


@pytest.mark.parametrize(
    ("metadata", "fact"),
    [
        ([("add_eos_token_id", 5000)], "eos_token that the vocabulary does not hold"),
        ([("add_token_types", [1, 2])], "token_type does not belong to the vocabulary"),
        ([("add_token_list", ["a", "a"])], "holds a token twice"),
        ([("add_string", "tokenizer.ggml.tokens", "a")], "no vocabulary"),
        ([("add_string", "tokenizer.ggml.merges", "a b")], "no list of texts"),
        ([("add_token_merges", ["a b c d"])], "cannot build the tokenizer"),
        ([("add_tokenizer_model", "bert")], "found: 'bert'"),
    ],
)
def test_tokenizers_that_cannot_be_are_refused(metadata: list[tuple[Any, ...]], fact: str, convert: Convert) -> None:
    _, file = convert(options={"metadata": metadata})
    message = refusal(GGUFReader(file).tokenizer)
    assert fact in message
    assert str(file) in message
