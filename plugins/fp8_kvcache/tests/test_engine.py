"""Whole engines over 8-bit K and V: scales that take effect (V13), and results that do not depend on circumstances."""

import json
import logging
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, CheckpointError, ConfigError, Platform, SamplingParams, discover
from octavo.testing import hostile, tiny_model

NAMES = ["fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
MODULES = [f"model.layers.{index}.self_attn" for index in range(2)]


def prompt(length: int, seed: int = 0) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(7 * i + 31 * seed + i * i * (seed + 1)) % 250 for i in range(length)]}


PROMPTS = [prompt(5), prompt(37, 1), prompt(16, 2), prompt(61, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny float model with scales of K and V beside its weights: K per tensor, V per head."""
    return scaled(tmp_path_factory.mktemp("model"), {"k_scale": 0.02, "v_scale": [0.01, 0.03]})


def scaled(folder: Path, tails: Mapping[str, object]) -> Path:
    tiny_model(folder)
    stored = load_file(folder / "model.safetensors")
    stored |= {f"{module}.{tail}": torch.as_tensor(value) for module in MODULES for tail, value in tails.items()}
    save_file(stored, folder / "model.safetensors")
    return folder


def engine(folder: Path, dtype: str, blocks: int = 64, **settings: object) -> LLM:
    llm = LLM(str(folder), kv_cache_dtype=dtype, num_blocks_override=blocks, **settings)
    hostile(llm.engine.executor.runner.kv, range(blocks))  # what nobody wrote must not be read
    return llm


def formats(llm: LLM) -> list[str]:
    return [kv_format.name for kv_format in llm.engine.executor.runner.kv.layout.formats]


def logprobs(llm: LLM, ids: list[int]) -> torch.Tensor:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": ids}, params)
    assert output.prompt_logprobs is not None
    found = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([entry[token].logprob for token, entry in found if entry is not None])


def test_the_plugin_brings_its_formats_by_name() -> None:
    registry = discover(Platform.detect("cpu"))
    assert "octavo_kv_formats" in next(p for p in registry.plugins if p.name == "fp8_kvcache").hooks
    assert [registry.kv_formats[name].name for name in NAMES] == NAMES
    assert registry.kv_formats["fp8"].name == "fp8_e4m3"


# --- results do not depend on circumstances


@pytest.mark.parametrize("dtype", NAMES)
def test_v15_v16_tokens_do_not_depend_on_blocks_chunks_or_neighbours(folder: Path, dtype: str) -> None:
    alone = engine(folder, dtype, enable_prefix_caching=False)
    expected = [alone.generate(p, GREEDY)[0].outputs[0].token_ids for p in PROMPTS]
    for settings in (
        {"block_size": 1, "blocks": 300},
        {"block_size": 32},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"blocks": 6, "max_num_batched_tokens": 64, "max_num_seqs": 4},
    ):
        llm = engine(folder, dtype, **settings)
        for source in ("computed", "from the prefix cache"):
            found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
            assert found == expected, f"{settings}, {source}"
    assert llm.stats().scheduler.num_preemptions, "the last pool is too small for all"


def test_finer_codes_cost_less(folder: Path) -> None:
    """The mean error of a logprob; random weights are harsher than trained ones."""
    ids = prompt(120, 3)["prompt_token_ids"]
    plain = logprobs(engine(folder, "auto"), ids)
    errors = {dtype: float((logprobs(engine(folder, dtype), ids) - plain).abs().mean()) for dtype in NAMES}
    assert 0 < errors["int8_per_token_head"] < 0.6 * errors["fp8_per_token_head"]
    assert errors["fp8_per_token_head"] < 0.8 * errors["fp8_e5m2"] < 0.4
    assert errors["fp8_e4m3"] < 0.8 * errors["fp8_e5m2"]


def test_layers_may_be_stored_differently(folder: Path) -> None:
    llm = engine(folder, "fp8_per_token_head", kv_cache_dtype_map="0=auto,*=fp8")
    assert formats(llm) == ["auto", "fp8_e4m3"]
    assert [kv.key.dtype for kv in llm.engine.executor.runner.kv.layers] == [torch.float32, torch.float8_e4m3fn]
    assert llm.generate(PROMPTS, GREEDY)[3].outputs[0].token_ids


# --- scales


def test_v13_scales_of_the_checkpoint_take_effect(folder: Path, tmp_path: Path) -> None:
    ids = prompt(80, 1)["prompt_token_ids"]
    llm = engine(folder, "fp8")
    assert formats(llm) == ["fp8_e4m3"] * 2
    stored = llm.engine.executor.runner.kv.layout.formats[0].scales
    assert [float(one.k) for one in stored] == pytest.approx([0.02, 0.02])
    assert stored[1].v.tolist() == pytest.approx([0.01, 0.03])
    calibrated = logprobs(llm, ids)
    unit = logprobs(engine(folder, "fp8", kv_scales="unit"), ids)
    wrong = logprobs(engine(scaled(tmp_path, {"k_scale": 3000.0}), "fp8"), ids)
    plain = logprobs(engine(folder, "auto"), ids)
    assert not torch.equal(calibrated, unit)
    error = [float((found - plain).abs().mean()) for found in (calibrated, unit, wrong)]
    assert 3 * max(error[:2]) < error[2], "K and V of about 1 vanish at a scale of 3000"


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3"])
def test_q60_e4m3_without_scales_gets_scales_as_it_goes(
    tmp_path: Path, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    llm = engine(tiny_model(tmp_path), dtype)
    assert formats(llm) == ["fp8_per_token_head"] * 2
    assert "fp8_per_token_head instead of fp8_e4m3: there are no calibrated scales" in caplog.text
    assert formats(engine(tmp_path, dtype, kv_scales="unit")) == ["fp8_e4m3"] * 2


@pytest.mark.parametrize("dtype", NAMES[1:])
def test_formats_that_need_no_scales_say_so(folder: Path, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert formats(engine(folder, dtype)) == [dtype] * 2
    assert f"KV scales are not needed: K and V are stored as {dtype}" in caplog.text
    with pytest.raises(ConfigError, match=f"stored as {dtype}, which uses no scales"):
        engine(folder, dtype, kv_scales="unit")


@pytest.mark.parametrize("bad", [0.0, -0.5, math.nan, math.inf])
def test_v13_bad_scales_are_refused_in_checkpoint_and_file(tmp_path: Path, bad: float) -> None:
    with pytest.raises(CheckpointError, match="not a positive number"):
        engine(scaled(tmp_path / "model", {"k_scale": bad, "v_scale": 1.0}), "fp8")
    side = {f"{module}.k_scale": torch.tensor([bad]) for module in MODULES}
    save_file(side, tmp_path / "scales.safetensors")
    plain = tiny_model(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="not a positive number"):
        engine(plain, "fp8", kv_scales=str(tmp_path / "scales.safetensors"))


# --- a checkpoint of llm-compressor


@pytest.fixture
def calibrated(shared: Path, tmp_path: Path) -> Path:
    """tiny-ct-kvfp8 as a float model with scales beside its weights, so that no plugin for its settings is needed."""
    folder = tmp_path / "model"
    shutil.copytree(shared / "checkpoints" / "tiny-ct-kvfp8", folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def losses(llm: LLM, folder: Path) -> tuple[float, float]:
    """Mean loss on the tokens of the reference: ours, and that of the tool that calibrated."""
    reference = load_file(folder / "reference_tool.safetensors")
    rows = reference["input_ids"].reshape(-1, reference["input_ids"].shape[-1])
    logits = reference["logits_reload_fp32"].reshape(*rows.shape, -1).float()
    theirs = -logits[:, :-1].log_softmax(-1).gather(-1, rows[:, 1:, None]).mean()
    ours = -torch.cat([logprobs(llm, row.tolist()) for row in rows]).mean()
    return float(ours), float(theirs)


def test_scales_of_llm_compressor_serve(calibrated: Path) -> None:
    llm = engine(calibrated, "fp8")
    assert formats(llm) == ["fp8_e4m3"] * 2
    stored = load_file(calibrated / "model.safetensors")
    for module, one in zip(MODULES, llm.engine.executor.runner.kv.layout.formats[0].scales, strict=True):
        assert float(one.k) == float(stored[f"{module}.k_scale"])
        assert float(one.v) == float(stored[f"{module}.v_scale"])
    ours, theirs = losses(llm, calibrated)
    assert ours == pytest.approx(theirs, abs=0.01)


def test_auto_follows_the_settings_of_llm_compressor(shared: Path) -> None:
    if "compressed-tensors" not in discover(Platform.detect("cpu")).quant_configs:
        pytest.skip("no installed plugin reads compressed-tensors settings")
    folder = shared / "checkpoints" / "tiny-ct-kvfp8"
    llm = engine(folder, "auto")
    assert formats(llm) == ["fp8_e4m3"] * 2
    ours, theirs = losses(llm, folder)
    assert ours == pytest.approx(theirs, abs=0.01)
