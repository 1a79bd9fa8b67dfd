"""`octavo convert`: from each format that is installed into each other, and nothing left behind where it fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from convert_support import (
    ASYMMETRIC,
    HOLDING,
    TARGETS,
    convert,
    entries,
    expect_same_tensors,
    logits,
    needs,
    quantised_model,
    tensors_of,
)
from safetensors.torch import load_file, save_file
from support import registry

import octavo.front.convert
from octavo import (
    LLM,
    LayerFacts,
    LinearLayer,
    QuantConfig,
    QuantizedWeight,
    Registry,
    TensorInfo,
    WeightSpec,
)
from octavo.cli import main
from octavo.model.shards import ShardWriter
from octavo.testing import tiny_config, tiny_model


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "awq"
    return quantised_model(folder, "awq", ASYMMETRIC, architecture="Qwen2ForCausalLM", dtype=torch.float16, shards=2)


# --- the numbers


@pytest.mark.parametrize("middle", HOLDING)
def test_there_and_back_changes_no_byte(awq: Path, tmp_path: Path, middle: str) -> None:
    between = convert(awq, tmp_path / "middle", middle)
    back = convert(between, tmp_path / "back", "awq")
    expect_same_tensors(back, awq)
    assert torch.equal(logits(between), logits(awq))


@pytest.mark.parametrize("middle", ["gptq", "gptq_v2", "compressed-tensors"])
@pytest.mark.parametrize("name", ["tiny-awq-gemm-aa", "tiny-awq-gemm-gm"])
def test_files_of_other_tools_there_and_back(shared: Path, tmp_path: Path, name: str, middle: str) -> None:
    needs(middle)
    source = tmp_path / "source"
    source.mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(shared / "checkpoints" / name / file, source / file)
    between = convert(source, tmp_path / "middle", middle)
    expect_same_tensors(convert(between, tmp_path / "back", "awq"), source)
    assert torch.equal(logits(between), logits(source))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("tiny-gptq-4bit-g32", "awq"),
        ("tiny-gptq-4bit-g32", "compressed-tensors"),
        ("tiny-gptq-4bit-g32-actorder", "gptq_v2"),
        ("tiny-gptq-4bit-g32-asym", "awq"),
        ("tiny-gptq-4bit-channel", "awq"),
        ("tiny-gptq-8bit-g32", "compressed-tensors"),
        ("tiny-gptq-2bit-g32", "gptq_v2"),
        ("tiny-ct-w4a16_gptq", "gptq"),
        ("tiny-ct-awq_asym", "gptq_v2"),
        ("tiny-ct-w8a8_rtn", "compressed-tensors"),
    ],
)
def test_other_formats_keep_their_logits(shared: Path, tmp_path: Path, name: str, target: str) -> None:
    source = shared / "checkpoints" / name
    needs(target, json.loads((source / "config.json").read_text())["quantization_config"]["quant_method"])
    found = convert(source, tmp_path / "found", target)
    assert not (found / "quantize_config.json").exists()
    assert torch.equal(logits(found), logits(source))


def test_q06_symmetric_files_without_zeros(tmp_path: Path) -> None:
    source = quantised_model(tmp_path / "source", "awq", ASYMMETRIC)
    tensors = {name: tensor for name, tensor in tensors_of(source).items() if not name.endswith("qzeros")}
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["zero_point"] = False
    (source / "config.json").write_text(json.dumps(config))
    for target in HOLDING:
        found = convert(source, tmp_path / target, target)
        assert torch.equal(logits(found), logits(source)), target
    zeros = [t for name, t in tensors_of(tmp_path / "awq").items() if name.endswith("qzeros")]
    assert all((words == 0x88888888 - 2**32).all() for words in zeros)
    assert len(zeros) == 14


@pytest.mark.parametrize("target", HOLDING)
def test_q13_zeros_of_0_survive_every_format(tmp_path: Path, target: str) -> None:
    source = quantised_model(tmp_path / "source", "awq", ASYMMETRIC)
    tensors = tensors_of(source)
    for name, tensor in tensors.items():
        if name.endswith("qzeros"):
            tensor[0] = 0  # all zeros of the first group
            tensor[1, 0] = -1  # and eight of 15
    save_file(tensors, source / "model.safetensors")
    found = convert(source, tmp_path / "found", target)
    assert torch.equal(logits(found), logits(source))
    expect_same_tensors(convert(found, tmp_path / "back", "awq"), source)


def test_q55_scales_of_activations_are_kept_or_refused(
    awq: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(awq, source)
    name = "model.layers.1.mlp.act.scales"
    file = next(source.glob("*00001-of*.safetensors"))
    save_file(load_file(file) | {name: torch.full((128,), 2.0)}, file)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = file.name
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    again = convert(source, tmp_path / "again", "awq")
    assert torch.equal(tensors_of(again)[name], torch.full((128,), 2.0))
    assert torch.equal(logits(again), logits(source))
    assert not torch.equal(logits(again), logits(awq))
    needs("gptq")
    assert main(["convert", str(source), str(tmp_path / "gptq"), "--to", "gptq"]) == 2
    assert name in capsys.readouterr().err
    assert not (tmp_path / "gptq").exists()


# --- the folder


def test_all_else_stays_as_it_was(awq: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    shutil.copytree(awq, source)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "LICENSE").write_text("licence")
    (source / "README.md").write_text("an AWQ model")
    scales = {str(layer): 0.5 for layer in range(2)}
    (source / "kv_cache_scales.json").write_text(json.dumps({"kv_cache": {"scaling_factor": {"0": scales}}}))
    (source / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "zero_point": True}))
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
    before = json.loads((source / "config.json").read_text())
    old = {"compression_config": before["quantization_config"]}
    (source / "config.json").write_text(
        json.dumps(before | old | {"text_config": {"quantization_config": {"bits": 4}}})
    )
    found = convert(source, tmp_path / "found", "awq")
    assert entries(found) == [
        "LICENSE",
        "additional_chat_templates",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "kv_cache_scales.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    after = json.loads((found / "config.json").read_text())
    del before["quantization_config"]
    settings = after.pop("quantization_config")
    assert after.pop("text_config") == {}
    assert after == before
    assert settings["quant_method"] == "awq"
    assert settings["modules_to_not_convert"] == ["lm_head"]
    shown = capsys.readouterr().out
    assert f"{found}: 14 layers converted to awq" in shown
    assert " bytes -> " in shown
    LLM(str(found), registry=registry(), num_blocks_override=8).tokenizer.chat([{"role": "user", "content": "a"}])


def test_shards_hold_what_the_index_says(awq: Path, tmp_path: Path) -> None:
    found = convert(awq, tmp_path / "found", "awq", "--max-shard-size", "64k")
    expect_same_tensors(found, awq)
    index = json.loads((found / "model.safetensors.index.json").read_text())
    files = sorted(found.glob("*.safetensors"))
    assert len(files) > 2
    assert [file.name for file in files] == [
        f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in tensors_of(found).values())
    assert all(file.stat().st_size <= 64_000 or len(load_file(file)) == 1 for file in files)
    assert torch.equal(logits(found), logits(awq))


def test_a_quantised_head_is_converted_too(tmp_path: Path) -> None:
    kind = registry().quant_configs["awq"]
    config = tiny_config()
    layers = {LinearLayer("model.layers.0.mlp.up_proj", 64, 128): LayerFacts(ASYMMETRIC, False, torch.float16)}
    source = quantised_model(tmp_path / "source", "awq", ASYMMETRIC)
    tensors = tensors_of(source)
    head = octavo.round_to_nearest(tensors.pop("lm_head.weight"), ASYMMETRIC)
    layer = LinearLayer("lm_head", config["hidden_size"], config["vocab_size"])
    stored = kind.for_weights("awq", layers).serialise(layer, head)
    save_file(
        tensors | {f"lm_head.{suffix}": tensor for suffix, tensor in stored.items()}, source / "model.safetensors"
    )
    found = convert(source, tmp_path / "found", "awq")
    settings = json.loads((found / "config.json").read_text())["quantization_config"]
    assert settings["lm_head"] is True
    assert "modules_to_not_convert" not in settings
    expect_same_tensors(found, source)


def test_scales_of_the_kv_cache_are_kept(tmp_path: Path) -> None:
    source = quantised_model(tmp_path / "source", "awq", ASYMMETRIC)
    scales = {f"model.layers.{n}.self_attn.{side}_scale": torch.tensor(0.5 + n) for n in (0, 1) for side in "kv"}
    save_file(tensors_of(source) | scales, source / "model.safetensors")
    expect_same_tensors(convert(source, tmp_path / "found", "awq"), source)


def test_a_wish_for_the_kv_cache_that_is_lost_is_told(
    awq: Path, tmp_path: Path, halves: object, caplog: pytest.LogCaptureFixture
) -> None:
    source = convert(awq, tmp_path / "source", "halves")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["kv"] = "fp8_e4m3"
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "found", "awq")
    assert "asks for K and V as fp8_e4m3" in caplog.text


def test_int8_with_quantised_inputs_there_and_back(shared: Path, tmp_path: Path) -> None:
    needs("w8a8_int8", "compressed-tensors")
    source = tmp_path / "source"
    source.mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(shared / "checkpoints" / "tiny-ct-w8a8_rtn" / file, source / file)
    between = convert(source, tmp_path / "between", "w8a8_int8")
    assert torch.equal(logits(between), logits(source))
    expect_same_tensors(convert(between, tmp_path / "back", "compressed-tensors"), source)


def test_an_empty_folder_is_filled(awq: Path, tmp_path: Path) -> None:
    (tmp_path / "found").mkdir()
    expect_same_tensors(convert(awq, tmp_path / "found", "awq"), awq)
    assert entries(tmp_path) == ["found"]


# --- refusals


@pytest.mark.parametrize(
    ("name", "target", "facts"),
    [
        ("tiny-gptq-8bit-g32", "awq", ["uint8", "uint4"]),
        ("tiny-gptq-2bit-g32", "awq", ["uint2", "uint4"]),
        ("tiny-gptq-4bit-g32-actorder", "awq", ["act_order", "inputs in order"]),
        ("tiny-ct-w8a8_rtn", "awq", ["int8 per_token", "uint4"]),
        ("tiny-ct-w8a8_rtn", "gptq", ["int8"]),
        ("tiny-ct-kvfp8", "awq", ["not quantised"]),
    ],
)
def test_what_the_target_cannot_hold_is_refused_by_layer(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, target: str, facts: list[str]
) -> None:
    source = shared / "checkpoints" / name
    needs(target, json.loads((source / "config.json").read_text())["quantization_config"]["quant_method"])
    assert main(["convert", str(source), str(tmp_path / "found"), "--to", target]) == 2
    message = capsys.readouterr().err
    for fact in facts if "not quantised" in facts else [*facts, "model.layers.0.self_attn.q_proj"]:
        assert fact in message
    assert entries(tmp_path) == []


def test_unknown_targets_are_answered_with_the_known(
    awq: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(awq), str(tmp_path / "found"), "--to", "awx"]) == 2
    message = capsys.readouterr().err
    assert "--to awx" in message
    assert all(target in message for target in TARGETS)


def test_a_float_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_model(tmp_path / "source")
    assert main(["convert", str(source), str(tmp_path / "found"), "--to", "awq"]) == 2
    assert "not quantised" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["file", "full", "missing"])
def test_a_destination_in_use_is_refused(
    awq: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    place = tmp_path / "found"
    if what == "file":
        place.write_text("mine")
    elif what == "full":
        place.mkdir()
        (place / "notes.txt").write_text("mine")
    else:
        place = place / "below"
    assert main(["convert", str(awq), str(place), "--to", "awq"]) == 2
    assert str(place if what != "missing" else place.parent) in capsys.readouterr().err
    assert what == "missing" or (place if what == "file" else place / "notes.txt").read_text() == "mine"


def test_tensors_of_no_layer_are_refused_or_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = quantised_model(tmp_path / "source", "awq", ASYMMETRIC)
    tensors = tensors_of(source)
    save_file(tensors | {"visual.qweight": torch.zeros(8, 8, dtype=torch.int32)}, source / "model.safetensors")
    assert main(["convert", str(source), str(tmp_path / "found"), "--to", "awq"]) == 2
    message = capsys.readouterr().err
    assert "visual.qweight" in message
    assert "--ignore-tensors '*.qweight'" in message
    found = convert(source, tmp_path / "found", "awq", "--ignore-tensors", "visual.*")
    assert tensors_of(found).keys() == tensors.keys()


@pytest.mark.parametrize("size", ["x", "0", "-1"])
def test_shard_sizes_that_are_none_are_refused(
    awq: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    assert main(["convert", str(awq), str(tmp_path / "found"), "--to", "awq", f"--max-shard-size={size}"]) == 2
    assert "--max-shard-size" in capsys.readouterr().err


# --- formats that misbehave, and interruptions


class Halves(QuantConfig):
    """Codes and real-valued zeros, as GGUF's Q4_1 has; as a target, it writes what `flaw` says."""

    name = "halves"
    suffixes = ("codes", "scale", "zero", "bias")
    targets = ("halves",)
    wanted: ClassVar[str] = ""
    flaw: str = ""
    kv: str | None = None

    @property
    def kv_cache(self) -> str | None:
        return self.kv

    def spec_for(self, layer: LinearLayer, stored: dict[str, TensorInfo]) -> WeightSpec | None:
        return ASYMMETRIC if "codes" in stored else None

    def canonicalise(self, layer: LinearLayer, tensors: dict[str, torch.Tensor]) -> QuantizedWeight:
        return QuantizedWeight(
            ASYMMETRIC, tensors["codes"], tensors["scale"], tensors["zero"], bias=tensors.get("bias")
        )

    def serialise(self, layer: LinearLayer, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        assert weight.scales is not None
        assert weight.zeros is not None
        tensors = {"codes": weight.codes, "scale": weight.scales, "zero": weight.zeros}
        if "layers.1" in layer.name and self.flaw == "raises":
            raise RuntimeError("out of luck")
        if "layers.1" in layer.name and self.flaw == "loses":
            tensors["scale"] = weight.scales.bfloat16().to(weight.scales.dtype)
        return tensors if weight.bias is None else tensors | {"bias": weight.bias}

    @classmethod
    def for_weights(cls, target: str, layers: dict[LinearLayer, LayerFacts]) -> Halves:
        return cls(flaw=cls.wanted)

    def settings(self) -> dict[str, Any]:
        return {"quant_method": self.name, "flaw": self.flaw}


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Installs `Halves` as a format; the function sets its flaw."""
    installed = registry()
    extended = replace(installed, quant_configs={**installed.quant_configs, "halves": Halves})

    def found(config: object) -> Registry:
        return extended

    monkeypatch.setattr(octavo.front.convert, "registry_for", found)
    return lambda flaw: monkeypatch.setattr(Halves, "wanted", flaw)


@pytest.mark.parametrize("target", HOLDING)
def test_real_valued_zeros_are_refused(
    awq: Path, tmp_path: Path, halves: object, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    source = convert(awq, tmp_path / "source", "halves")
    tensors = tensors_of(source)
    tensors["model.layers.1.mlp.up_proj.zero"][3, 1] = 7.5
    save_file(tensors, source / "model.safetensors")
    assert main(["convert", str(source), str(tmp_path / "found"), "--to", target]) == 2
    message = capsys.readouterr().err
    assert "model.layers.1.mlp.up_proj" in message
    assert "zero" in message
    assert target != "awq" or "7.5" in message
    assert entries(tmp_path) == ["source"]
    expect_same_tensors(convert(source, tmp_path / "again", "halves"), source)


@pytest.mark.parametrize(
    ("flaw", "facts"),
    [
        ("raises", ["format 'halves' cannot write model.layers.1.", "RuntimeError: out of luck"]),
        ("loses", ["model.layers.1.", "different in its numbers, scales"]),
    ],
)
def test_a_format_that_fails_is_named_and_leaves_nothing(
    awq: Path,
    tmp_path: Path,
    halves: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    flaw: str,
    facts: list[str],
) -> None:
    halves(flaw)
    assert main(["convert", str(awq), str(tmp_path / "found"), "--to", "halves"]) == 2
    message = capsys.readouterr().err
    assert all(fact in message for fact in facts), message
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "code", "fact"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device"), 2, "No space left on device"),
        (RuntimeError("a bug"), 1, "a bug"),
    ],
)
@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupted_conversion_leaves_nothing(
    awq: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    fact: str,
    existing: bool,
) -> None:
    seen: list[list[str]] = []

    def failing(self: ShardWriter) -> None:
        seen.append(entries(tmp_path))
        raise error

    monkeypatch.setattr(ShardWriter, "finish", failing)
    if existing:
        (tmp_path / "found").mkdir()
    assert main(["convert", str(awq), str(tmp_path / "found"), "--to", "awq"]) == code
    assert fact in capsys.readouterr().err
    assert any(".found." in name for name in seen[0]), "it was writing beside the destination"
    assert entries(tmp_path) == (["found"] if existing else [])
    assert not existing or entries(tmp_path / "found") == []


def test_a_full_disk_is_seen_before_writing(
    awq: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert main(["convert", str(awq), str(tmp_path / "found"), "--to", "awq"]) == 2
    message = capsys.readouterr().err
    assert "1,000 bytes free" in message
    assert str(tmp_path) in message


def test_damage_between_writing_and_reading_is_noticed(
    awq: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finish = ShardWriter.finish

    def damaging(self: ShardWriter) -> None:
        finish(self)
        file = self._folder / "model.safetensors"
        tensors = load_file(file)
        tensors["model.layers.0.self_attn.q_proj.qweight"][5, 0] ^= 1
        save_file(tensors, file)

    monkeypatch.setattr(ShardWriter, "finish", damaging)
    assert main(["convert", str(awq), str(tmp_path / "found"), "--to", "awq"]) == 2
    assert "model.layers.0.self_attn.q_proj" in capsys.readouterr().err
    assert entries(tmp_path) == []
