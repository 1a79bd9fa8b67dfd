"""Checkpoints that other people's tools wrote, through the whole engine. They are not part of the project: skipped without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import all_logits, registry
from transformers import LlamaForCausalLM

from octavo import LLM, CheckpointError, ConfigError, SamplingParams

ROOT = Path(__file__).parents[1]
TINY_AWQ = ("tiny-awq-gemm-gm", "tiny-awq-gemm-aa", "tiny-awq-gemv-aa")


def load(folder: Path, **settings: object) -> LLM:
    return LLM(str(folder), registry=registry(), dtype="float32", num_blocks_override=64, **settings)


def loss(logits: torch.Tensor, token_ids: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1], token_ids[1:]))


def test_float_base_equals_its_writers_logits_and_text(shared: Path) -> None:
    folder = shared / "checkpoints" / "tiny-llama-fp16"
    reference = load_file(folder / "reference.safetensors")
    llm = load(folder)
    ids = reference["input_ids"][0]
    logits = all_logits(llm, ids.tolist())
    with torch.no_grad():
        theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0]
    assert (logits - theirs).abs().max() < 2e-5
    # The stored logits are those of the model before it was rounded to fp16 for saving.
    assert (logits - reference["logits_fp32"][0]).abs().max() < 0.02
    assert loss(logits, ids) == pytest.approx(2.958, abs=0.001)
    greedy = reference["greedy_ids"][0].tolist()
    prompt = {"prompt_token_ids": greedy[:16]}
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=len(greedy) - 16, ignore_eos=True))
    assert output.outputs[0].token_ids == greedy[16:]


def test_trained_model_with_odd_sizes(shared: Path) -> None:
    folder = shared / "checkpoints" / "stories260k"
    reference = load_file(folder / "reference.safetensors")
    ids = reference["greedy_ids"][0].tolist()
    logits = all_logits(load(folder), ids)
    assert torch.allclose(logits, reference["logits_fp32"][0], atol=1e-4)


@pytest.mark.parametrize("quantization", [None, "awq"])
@pytest.mark.parametrize("name", TINY_AWQ)
def test_tiny_awq_logits_equal_the_stored_ones(shared: Path, name: str, quantization: str | None) -> None:
    folder = shared / "checkpoints" / name
    llm = load(folder, quantization=quantization)
    assert {r.spec for r in llm.engine.model_info.linears} == {"uint4 g32 asym", "float"}
    stored = folder / "reference_tool.safetensors"
    reference = load_file(
        stored if stored.exists() else shared / "checkpoints/tiny-awq-gemm-aa/reference_tool.safetensors"
    )
    ids = reference["input_ids"][0]
    logits = all_logits(llm, ids.tolist())
    # The tool rounds its dequantised weights to fp16, octavo multiplies in fp32: 5e-4 of each weight.
    assert loss(logits, ids) == pytest.approx(loss(reference["logits_dense_fp32"][0], ids), abs=1e-3)
    if stored.exists():
        assert (logits - reference["logits_dense_fp32"][0]).abs().max() < 0.02


def test_corrupt_checkpoint_is_seen_by_its_loss(shared: Path) -> None:
    """Its structure is sound, so it loads; that its numbers are wrong shows against the float model only."""
    folder = shared / "checkpoints" / "tiny-awq-gemm-aa-CORRUPT"
    ids = load_file(folder / "reference_tool.safetensors")["input_ids"][0]
    assert loss(all_logits(load(folder), ids.tolist()), ids) == pytest.approx(5.59, abs=0.02)


@pytest.mark.parametrize(
    ("name", "method"), [("tiny-gptq-4bit-g32", "gptq"), ("tiny-ct-w8a8_rtn", "compressed-tensors")]
)
def test_formats_without_a_plugin_are_refused_by_name(shared: Path, name: str, method: str) -> None:
    folder = shared / "checkpoints" / name
    if method in registry().quant_configs:
        pytest.skip(f"a plugin for {method} is installed")
    with pytest.raises(CheckpointError, match=method):
        load(folder)
    with pytest.raises(ConfigError) as caught:
        load(folder, quantization="awq")
    assert all(part in str(caught.value) for part in ("'awq'", f"'{method}'", "config.json"))


def test_kv_scales_are_not_ignored(shared: Path) -> None:
    with pytest.raises((CheckpointError, ConfigError)):
        load(shared / "checkpoints" / "tiny-ct-kvint8")


@pytest.fixture(scope="module")
def real_awq(shared: Path, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("awq") / "model"
    script = shared / "checkpoints" / "assemble.py"
    subprocess.run([sys.executable, str(script), "smollm2-awq-gemm-g64", str(demo_model), str(out)], check=True)
    return out


@pytest.mark.slow
def test_real_awq_checkpoint_answers(real_awq: Path) -> None:
    llm = load(real_awq, linear_kernels="*=dequantized?")
    (output,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0, max_tokens=24)
    )
    assert "Paris" in output.outputs[0].text


@pytest.mark.slow
def test_real_awq_perplexity_is_the_recorded_one(real_awq: Path, shared: Path) -> None:
    script = ROOT / "benchmarks" / "perplexity.py"
    command = [sys.executable, str(script), str(real_awq), str(shared / "text" / "wikitext2-test.txt"), "-n", "12"]
    run = subprocess.run([*command, "--quantization", "awq", "--json"], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert found["perplexity"] == pytest.approx(31.55, rel=0.002)
    assert "reference (uint4 g64 asym)" in found["kernels"]
