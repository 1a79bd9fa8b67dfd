"""Whole folders, loaded as a user loads them: what comes out is what the dense model with the same numbers says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from octavo import (
    LLM,
    CheckpointError,
    LinearLayer,
    OctavoError,
    QuantSource,
    SamplingParams,
    WeightSpec,
    round_to_nearest,
)
from octavo.testing import tiny_model
from octavo_gptq.config import GPTQConfig

SPEC = WeightSpec("uint4", (1, 32), has_zeros=True)
PROMPTS = ["The capital", "x"]


def config(**raw: Any) -> GPTQConfig:
    return GPTQConfig.parse(QuantSource({"bits": 4, "group_size": 32, "sym": False, **raw}, "test"))


def outputs(folder: Path) -> list[tuple[tuple[int, ...], list[float]]]:
    """Greedy tokens of each prompt, and the log probability of each."""
    llm = LLM(str(folder), disable_progress=True, kv_cache_memory_bytes=2**20)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    results = []
    for output in llm.generate(PROMPTS, params):
        (completion,) = output.outputs
        tokens = tuple(completion.token_ids)
        assert completion.logprobs is not None
        results.append((tokens, [at[token].logprob for at, token in zip(completion.logprobs, tokens, strict=True)]))
    return results


def dense(folder: Path, target: Path) -> Path:
    """A float folder with the numbers that a GPTQ folder stands for, by the format's own decoding of each layer."""
    raw = json.loads((folder / "config.json").read_text())
    own = GPTQConfig.parse(QuantSource(raw.pop("quantization_config"), "config.json"))
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    (target / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    for module in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        stored = {s: tensors.pop(f"{module}.{s}") for s in GPTQConfig.suffixes if f"{module}.{s}" in tensors}
        inputs = len(stored["g_idx"])
        weight = own.canonicalise(LinearLayer(module, inputs, stored["scales"].shape[1]), stored)
        tensors[f"{module}.weight"] = weight.dequantize()
    save_file(tensors, target / "model.safetensors")
    return target


def expect_same(folder: Path, tmp_path: Path) -> None:
    for found, expected in zip(outputs(folder), outputs(dense(folder, tmp_path / "dense")), strict=True):
        assert found[0] == expected[0]
        assert found[1] == pytest.approx(expected[1], abs=1e-4)


def change_settings(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
def test_v04_v05_a_folder_gives_the_tokens_of_the_dense_model(version: str, act_order: bool, tmp_path: Path) -> None:
    own = config(checkpoint_format=version, desc_act=act_order)
    spec = WeightSpec("uint4", (1, 32), has_zeros=True, act_order=act_order)
    folder = tiny_model(tmp_path / "model", quantize=(own, spec), settings=own.settings())
    expect_same(folder, tmp_path)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_q15_folders_of_other_widths_run(bits: int, tmp_path: Path) -> None:
    own = config(bits=bits)
    spec = WeightSpec(f"uint{bits}", (1, 32), has_zeros=True)
    folder = tiny_model(tmp_path / "model", quantize=(own, spec), settings=own.settings())
    expect_same(folder, tmp_path)


@pytest.mark.parametrize("skip", [["*self_attn*"], ["*.q_proj"], ["*.up_proj"]])
def test_v01_q44_folders_with_plain_layers_run(skip: list[str], tmp_path: Path) -> None:
    own = config(dynamic={f"-:.*{pattern.strip('*.')}": {} for pattern in skip})
    folder = tiny_model(tmp_path / "model", quantize=(own, SPEC), settings=own.settings(), skip=skip)
    expect_same(folder, tmp_path)


def test_q02_settings_inside_text_config_are_read(tmp_path: Path) -> None:
    own = config()
    folder = tiny_model(tmp_path / "model", quantize=(own, SPEC), settings=own.settings())
    expected = outputs(folder)

    def move(raw: dict[str, Any]) -> None:
        raw["text_config"] = {"quantization_config": raw.pop("quantization_config")}

    change_settings(folder, move)
    assert outputs(folder) == expected


def test_q01_q03_settings_in_the_side_file_count_and_contradictions_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = config()
    folder = tiny_model(tmp_path / "model", quantize=(own, SPEC), settings=own.settings())
    expected = outputs(folder)
    side = {"bits": 4, "group_size": 32, "sym": False, "desc_act": True, "damp_percent": 0.01}
    (folder / "quantize_config.json").write_text(json.dumps({**side, "group_size": 64}))
    assert outputs(folder) == expected
    assert "group_size" in caplog.text
    (folder / "quantize_config.json").write_text(json.dumps(side))
    change_settings(folder, lambda raw: raw.pop("quantization_config"))
    assert outputs(folder) == expected


def test_q01_symmetric_folder_without_any_settings_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own, spec = config(sym=True), WeightSpec("uint4", (1, 32))
    folder = tiny_model(tmp_path / "model", quantize=(own, spec), settings=own.settings())
    expected = outputs(folder)
    change_settings(folder, lambda raw: raw.pop("quantization_config"))
    assert outputs(folder) == expected
    assert "no quantization settings found" in caplog.text


def test_q01_asymmetric_folder_without_settings_asks_for_what_is_undecidable(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", quantize=(config(), SPEC))
    with pytest.raises(CheckpointError, match="neither sym nor checkpoint_format"):
        LLM(str(folder), disable_progress=True)


def test_v03_another_method_than_the_folders_is_refused(tmp_path: Path) -> None:
    own = config()
    folder = tiny_model(tmp_path / "model", quantize=(own, SPEC), settings=own.settings())
    with pytest.raises(OctavoError, match="gptq"):
        LLM(str(folder), quantization="awq", disable_progress=True)


def test_q52_a_quantised_head_runs(tmp_path: Path) -> None:
    own = config(dynamic={"+:lm_head": {"bits": 8, "group_size": -1}}, lm_head=True)
    folder = tiny_model(tmp_path / "model", quantize=(own, SPEC), settings=own.settings())
    tensors = load_file(folder / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    weight = round_to_nearest(head, WeightSpec("uint8", (1, -1), has_zeros=True))
    stored = own.serialise(LinearLayer("lm_head", head.shape[1], head.shape[0]), weight)
    tensors |= {f"lm_head.{suffix}": tensor for suffix, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    expect_same(folder, tmp_path)


def test_auto_round_folder_runs(tmp_path: Path) -> None:
    own = config(sym=True)
    folder = tiny_model(tmp_path / "model", quantize=(own, WeightSpec("uint4", (1, 32))), settings=own.settings())
    expected = outputs(folder)

    def rename(raw: dict[str, Any]) -> None:
        words = {"quant_method": "intel/auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int"}
        raw["quantization_config"] = {"bits": 4, "group_size": 32, "sym": True, **words}

    change_settings(folder, rename)
    assert outputs(folder) == expected


@pytest.mark.parametrize(
    "name", ["2bit-g32", "4bit-channel", "4bit-g32", "4bit-g32-actorder", "4bit-g32-asym", "4bit-gar", "8bit-g32"]
)
def test_a_foreign_folder_runs_as_its_writer_dequantised_it(name: str, shared: Path) -> None:
    """Against the stored logits of the tool's own dequantised weights in fp32."""
    folder = shared / "checkpoints" / f"tiny-gptq-{name}"
    reference = load_file(folder / "reference_tool.safetensors")
    ids = reference["input_ids"].reshape(-1)[:32].tolist()
    expected = reference["logits_dense_fp32"][0, : len(ids)].log_softmax(-1)
    llm = LLM(str(folder), disable_progress=True, kv_cache_memory_bytes=2**20)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params)
    (completion,) = output.outputs
    token = completion.token_ids[0]
    assert token == int(expected[-1].argmax())
    assert completion.logprobs is not None
    assert completion.logprobs[0][token].logprob == pytest.approx(float(expected[-1, token]), abs=2e-3)
