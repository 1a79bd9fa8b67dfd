"""Containers, headers and settings of model folders: what is read, refused or reported, and what stays open afterwards."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import registry

from octavo import LLM, Checkpoint, CheckpointError, ConfigError, EngineConfig, SamplingParams, WeightSpec
from octavo import platforms as machine
from octavo.model.checkpoint import SafetensorsReader, TorchBinReader, open_checkpoint
from octavo.model.plan import ModelPlan, end_token_ids, plan_model
from octavo.testing import tiny_model
from octavo_awq.config import AWQConfig

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
NAMES = ("model.norm.weight", "model.embed_tokens.weight")


def load(folder: Path, **settings: object) -> LLM:
    return LLM(str(folder), registry=registry(), **{"num_blocks_override": 64, **settings})


def tokens(llm: LLM) -> list[int]:
    return llm.generate(["hello"], GREEDY)[0].outputs[0].token_ids


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(str(folder), [SafetensorsReader, TorchBinReader])


def plan(folder: Path, **settings: object) -> ModelPlan:
    return plan_model(EngineConfig(model=str(folder), **settings), registry(), opened(folder))


def configure(folder: Path, name: str = "config.json", **values: object) -> Path:
    old = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(old | values))
    return folder


def add(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")
    return folder


def awq_model(folder: Path) -> Path:
    spec = WeightSpec("uint4", (1, 32), has_zeros=True)
    return tiny_model(folder, quantize=(AWQConfig(bits=4, group_size=32), spec), settings=AWQ)


def as_bin(folder: Path, *shards: tuple[str, dict[str, object]], index: dict[str, str] | None = None) -> Path:
    """Replaces the weights of a folder by pickles."""
    (folder / "model.safetensors").unlink()
    for name, content in shards:
        torch.save(content, folder / name)
    if index is not None:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# --- memory: weights are the engine's own


@pytest.mark.parametrize("make", [tiny_model, awq_model])
def test_files_may_change_once_they_are_loaded(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path)
    llm = load(folder)
    expected = tokens(load(folder))
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\0" * file.stat().st_size)
    assert tokens(llm) == expected
    with file.open("r+b") as stream:
        stream.truncate(0)
    assert tokens(llm) == expected


@pytest.mark.parametrize("container", ["safetensors", "bin"])
def test_nothing_stays_mapped_after_loading(tmp_path: Path, container: str) -> None:
    folder = tiny_model(tmp_path)
    if container == "bin":
        as_bin(folder, ("pytorch_model.bin", load_file(folder / "model.safetensors")))
    llm = load(folder)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert llm.engine.executor.runner.loaded.plan.checkpoint.stored("model.norm")["weight"].shape == (64,)


# --- shards, indices and strays


def test_bin_index_decides_which_copy_counts(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    expected, weights = tokens(load(folder)), load_file(folder / "model.safetensors")
    norm = {NAMES[0]: weights.pop(NAMES[0])}
    stale = {NAMES[0]: torch.zeros(64)}
    first, second = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    index = {name: second for name in weights} | {NAMES[0]: first}
    as_bin(folder, (first, norm), (second, weights | stale), index=index)
    assert tokens(load(folder)) == expected
    (folder / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(CheckpointError, match="two files hold the same tensor"):
        load(folder)


def test_bin_index_that_names_an_absent_tensor(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = "pytorch_model-00001-of-00001.bin"
    as_bin(folder, (name, weights), index=dict.fromkeys([*weights, "other"], name))
    with pytest.raises(CheckpointError, match="does not hold") as caught:
        load(folder)
    assert caught.value.tensor == "other"


def test_bin_entries_that_are_no_plain_tensors_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_model(tmp_path)
    extra = {"epoch": 3, "sparse": torch.ones(2, 2).to_sparse()}
    as_bin(folder, ("pytorch_model.bin", load_file(folder / "model.safetensors") | extra))
    assert opened(folder).tensors.keys().isdisjoint(extra)
    assert ["2 entries" in text and "epoch, sparse" in text for text in warnings(caplog)] == [True]


def test_bin_of_the_old_form_and_files_of_trainers(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    expected, weights = tokens(load(folder)), load_file(folder / "model.safetensors")
    as_bin(folder)
    torch.save(weights, folder / "weights.bin", _use_new_zipfile_serialization=False)
    for name in ("training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt"):
        (folder / name).write_bytes(b"no pickle at all")
    assert tokens(load(folder)) == expected
    (folder / "weights.bin").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load(folder)


def test_stale_index_beside_a_whole_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_model(tmp_path)
    expected = tokens(load(folder))
    index = {"weight_map": {NAMES[0]: "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert tokens(load(folder)) == expected
    assert len([text for text in warnings(caplog) if "model-00001-of-00002" in text]) == 1


# --- types in headers


def append(folder: Path, name: str, dtype: str, size: int) -> Path:
    """Appends a tensor of any declared type to a safetensors file."""
    data = (folder / "model.safetensors").read_bytes()
    length = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:length])
    end = len(data) - length
    header[name] = {"dtype": dtype, "shape": [8], "data_offsets": [end, end + size]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[length:] + b"\0" * size)
    return folder


@pytest.mark.parametrize(
    ("dtype", "size"), [("U16", 16), ("U32", 32), ("U64", 64), ("C64", 64), ("F8_E8M0", 8), ("F6_E2M3", 6), ("F4", 4)]
)
def test_types_of_tensors_that_nobody_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str, size: int
) -> None:
    folder = append(tiny_model(tmp_path), "extra", dtype, size)
    load(folder)
    assert warnings(caplog) == ["1 tensor(s) of the checkpoint are not used: extra"]
    if dtype == "F6_E2M3":
        with pytest.raises(CheckpointError, match="extra"):
            opened(folder).read("extra")


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"]
)
def test_float8_without_scales_is_refused(tmp_path: Path, name: str) -> None:
    folder = tiny_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    add(folder, **{name: weights.get(name, torch.zeros(64)).to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match="stored as float8, but no scales are") as caught:
        load(folder)
    assert caught.value.tensor == name


# --- the head


@pytest.mark.parametrize("other", [None, "output.weight"])
def test_untied_head_must_be_stored(tmp_path: Path, other: str | None) -> None:
    folder = tiny_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    head = weights.pop("lm_head.weight")
    save_file(weights | ({other: head} if other else {}), folder / "model.safetensors")
    for attempt in (load, plan):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight") as caught:
            attempt(folder)
        assert (caught.value.hint or "").startswith(other or "")
        assert bool(caught.value.hint) == bool(other)


# --- settings that change nothing


def test_settings_of_a_format_that_no_layer_is_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_model(tmp_path, settings=AWQ)
    for attempt in (load, plan):
        caplog.clear()
        attempt(folder)
        assert ["not one layer is quantised" in text for text in warnings(caplog)] == [True]
        with pytest.raises(ConfigError, match="not one layer is quantised"):
            attempt(folder, quantization="awq")


def test_ignored_tensors_do_not_make_a_model_quantised(tmp_path: Path) -> None:
    expected = tokens(load(tiny_model(tmp_path)))
    scales = {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in ("k_scale", "v_scale")}
    folder = add(tmp_path, **scales, **{"model.layers.0.mlp.up_proj.scales": torch.ones(1)})
    with pytest.raises(CheckpointError, match="quantised tensors"):
        load(folder)
    with pytest.raises(CheckpointError, match="only some layers have KV scales"):
        load(folder, ignore_tensors=("*.scales",))
    assert tokens(load(folder, ignore_tensors=("*.scales", "*.k_scale", "*.v_scale"))) == expected


def test_patterns_that_match_nothing_are_reported_once_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_model(tmp_path)
    fits = {"*.q_proj": "dense", "*gate_proj|up_proj": "dense", "lm_head": "dense"}
    for attempt in (load, plan):
        caplog.clear()
        attempt(folder, linear_kernels=fits | {"*.w1": "dense"}, ignore_tensors=("lm_head.*", "*.nothing"))
        assert warnings(caplog) == [
            "--linear-kernels: nothing matches the pattern '*.w1'",
            "--ignore-tensors: nothing matches the pattern '*.nothing'",
        ]


# --- values of config files


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"text_config": ["a"]}, "'text_config'"),
        ({"text_config": "a"}, "'text_config'"),
        ({"quantization_config": "awq"}, "quantization settings"),
        ({"max_position_embeddings": 2**24 + 1}, "'max_position_embeddings'"),
        ({"max_position_embeddings": 10**30}, "'max_position_embeddings'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e308}}, "'max_position_embeddings'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 10**400}}, "'factor'"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 10**30}}, "'original_max"),
        ({"vocab_size": 10**30}, "'vocab_size'"),
        ({"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'rope_theta'"),
    ],
)
def test_unusable_values_of_config_json(tmp_path: Path, values: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        plan(configure(tiny_model(tmp_path), **values))


def test_unusable_quantization_settings_of_a_side_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json"):
        opened(configure(tiny_model(tmp_path), "hf_quant_config.json", quantization=5))


def test_json_with_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    """Such a string cannot be printed, compared with a plugin's names or shown in an error."""
    for content in ('{"model_type": "\\ud800"}', '{"\\udfff": 1}'):
        (tiny_model(tmp_path) / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match="surrogates not allowed") as caught:
            opened(tmp_path)
        assert str(caught.value).encode()


def test_index_with_names_that_no_file_can_have(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for name in ("x" * 5000, "a\0b"):
        index.write_text(json.dumps({"weight_map": content["weight_map"] | {"model.norm.weight": name}}))
        with pytest.raises(CheckpointError, match="missing"):
            opened(folder)


def test_json_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tiny_model(tmp_path) / "config.json").write_text('{"a":' * 200_000)
    with pytest.raises(CheckpointError, match="JSON"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("value", "usable", "reported"),
    [
        (257, {257}, None),
        (None, set(), None),
        ([257, 258], {257, 258}, None),
        ("</s>", set(), "'</s>'"),
        (["a", [1]], set(), r"'a', [1]"),
        ([257, None], {257}, "None"),
        (-1, set(), "-1"),
        (288, set(), "288"),
        (2.0, set(), "2.0"),
    ],
)
def test_end_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: object, usable: set[int], reported: str | None
) -> None:
    folder = configure(tiny_model(tmp_path), eos_token_id=value)
    (folder / "generation_config.json").unlink()
    assert end_token_ids(opened(folder), 288) == usable
    assert [reported in text for text in warnings(caplog)] == ([] if reported is None else [True])


# --- sizes


@pytest.mark.parametrize(("max_model_len", "rows"), [(None, 256), (40, 40)])
def test_rotary_table_covers_what_is_served(tmp_path: Path, max_model_len: int | None, rows: int) -> None:
    folder = configure(tiny_model(tmp_path), max_position_embeddings=256)
    llm = load(folder, max_model_len=max_model_len)
    assert llm.engine.executor.runner.model.rope.cos.shape[0] == rows


@pytest.mark.usefixtures("core_kernels")
def test_resident_bytes_follow_the_compute_type(tmp_path: Path) -> None:
    stored = plan(tiny_model(tmp_path / "f", dtype=torch.bfloat16), dtype="bfloat16")
    assert stored.resident_bytes == stored.stored_bytes
    assert plan(tmp_path / "f", dtype="float32").resident_bytes == 2 * stored.stored_bytes
    codes = sum(t.numel() for n, t in load_file(tmp_path / "f" / "model.safetensors").items() if "_proj" in n)
    quantised = plan(awq_model(tmp_path / "q"), dtype="float32")
    plain = quantised.other_bytes + quantised.embedding_bytes  # fp32 in the file and in memory
    assert codes < quantised.resident_bytes - plain - 4 * 288 * 64 < 1.2 * codes


def test_more_blocks_than_memory_are_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"GiB, but the machine has [\d,.]+ GiB"):
        load(tiny_model(tmp_path), num_blocks_override=2**50)


@pytest.mark.parametrize(
    ("names", "counted"),
    [
        (("memory.max", "memory.current", "memory.stat"), "inactive_file"),
        (
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
            "total_inactive_file",
        ),
    ],
)
def test_cached_files_count_as_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: Sequence[str], counted: str
) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in zip(names, ("1000000\n", "900000\n", f"anon 7\n{counted} 600000\nslab 5\n"), strict=True):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.available_memory_bytes() == 700_000


def test_v40_kv_memory_is_what_the_container_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, without a setting, and however much RAM the host has; a small container is no reason to refuse."""
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 0\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    folder = tiny_model(tmp_path / "model")
    blocks = []
    for limit, used in ((64 << 20, 60 << 20), (12 << 20, 10 << 20)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        llm = LLM(str(folder), max_num_seqs=4096, max_num_batched_tokens=4096)
        kv = llm.engine.executor.runner.kv_plan
        assert (limit - used) / 2 - kv.bytes_per_block < kv.num_bytes <= (limit - used) / 2
        assert len(tokens(llm)) > 0
        blocks.append(kv.num_blocks)
        llm.shutdown()
    assert blocks[0] > blocks[1]
    (tmp_path / "memory.current").write_text(f"{12 << 20}\n")
    with pytest.raises(ConfigError, match=r"no memory for KV blocks.*--kv-cache-memory-bytes"):
        LLM(str(folder))
