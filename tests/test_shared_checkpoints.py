"""Checkpoints that other people's tools wrote, through the whole engine. They are not part of the project: skipped without."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from formats_support import plan
from safetensors.torch import load_file
from support import all_logits, registry
from transformers import LlamaForCausalLM

from octavo import LLM, CheckpointError, ConfigError, SamplingParams
from octavo.model.loader import stored_weight

ROOT = Path(__file__).parents[1]


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


@dataclass(frozen=True)
class Tiny:
    """What a tiny folder must come to: specs of its linears, the loss that its writer's README records, and how far single
    logits may be from the stored ones (None: activations are rounded, and rounding flips; then top-1 and loss count).
    """

    spec: str
    loss: float | None
    logits: str = "logits_dense_fp32"
    difference: float | None = 0.01


ROUNDED = Tiny("int8 channel x int8 per_token", 2.963, "logits_reload_fp32", None)
TINY = {
    "tiny-awq-gemm-aa": Tiny("uint4 g32 asym", 2.953),
    "tiny-awq-gemm-gm": Tiny("uint4 g32 asym", 2.952),
    "tiny-awq-gemv-aa": Tiny("uint4 g32 asym", 2.953),
    "tiny-awq-gemm-aa-CORRUPT": Tiny("uint4 g32 asym", 5.59),
    "tiny-ct-awq_asym": Tiny("uint4 g32 asym", 2.953, "logits_reload_fp32"),
    "tiny-ct-kvfp8": Tiny("float", 2.956, "logits_reload_fp32", None),
    "tiny-ct-kvint8": Tiny("float", 2.956, "logits_reload_fp32", None),
    "tiny-ct-w4a16_gptq": Tiny("uint4 g32 asym", 2.957, "logits_reload_fp32"),
    "tiny-ct-w4a16_gptq_actweight": Tiny("uint4 g32 asym", 2.967, "logits_reload_fp32"),
    "tiny-ct-w8a8-sq-gptq": ROUNDED,
    "tiny-ct-w8a8_rtn": replace(ROUNDED, loss=2.960),
    "tiny-gptq-2bit-g32": Tiny("uint2 g32 asym act_order", 3.065),
    "tiny-gptq-4bit-channel": Tiny("uint4 channel asym", None),
    "tiny-gptq-4bit-g32": Tiny("uint4 g32 asym", 2.963),
    "tiny-gptq-4bit-g32-actorder": Tiny("uint4 g32 asym act_order", 2.979),
    "tiny-gptq-4bit-g32-asym": Tiny("uint4 g32 asym", 2.973),
    "tiny-gptq-4bit-gar": Tiny("uint4 g32 asym", None),
    "tiny-gptq-8bit-g32": Tiny("uint8 g32 asym act_order", 2.958),
}
OTHERS = {
    "tiny-llama-fp16",
    "stories260k",
    "smollm2-awq-gemm-g64",
    "smollm2-ct-kvfp8",
    "smollm2-gptq-4bit-g64-actorder",
}
"""Folders with tests of their own below."""
PLAIN_KV = {"tiny-ct-kvint8": "float32"}
"""What the user decides where no plugin stores the KV cache that a folder asks for."""


def test_every_folder_is_tested(shared: Path) -> None:
    assert {path.name for path in (shared / "checkpoints").iterdir() if path.is_dir()} == TINY.keys() | OTHERS


def tiny(shared: Path, name: str, **settings: object) -> LLM:
    return load(shared / "checkpoints" / name, kv_cache_dtype=PLAIN_KV.get(name, "auto"), **settings)


def method_of(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"])


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_tiny_logits_are_the_stored_ones(shared: Path, name: str, named: bool) -> None:
    wanted, folder = TINY[name], shared / "checkpoints" / name
    llm = tiny(shared, name, quantization=method_of(folder) if named else None)
    assert {r.spec for r in llm.engine.model_info.linears} == {wanted.spec, "float"}
    stored = folder / "reference_tool.safetensors"
    alike = (
        shared / "checkpoints" / "tiny-awq-gemm-aa" / "reference_tool.safetensors"
    )  # the same weights in another layout
    reference = load_file(stored if stored.exists() else alike)
    ids, theirs = reference["input_ids"][0], reference[wanted.logits][0].float()
    logits = all_logits(llm, ids.tolist())
    if wanted.difference is not None:
        # the tool rounds its dequantised weights to fp16, octavo multiplies in fp32: 5e-4 of each weight
        assert (logits - theirs).abs().max() < wanted.difference
        assert loss(logits, ids) == pytest.approx(loss(theirs, ids), abs=1e-3)
    else:
        assert loss(logits, ids) == pytest.approx(loss(theirs, ids), abs=0.01)
        assert (logits.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.92
    if wanted.loss is not None:
        assert loss(logits, ids) == pytest.approx(wanted.loss, abs=0.002 if wanted.difference is not None else 0.01)


@pytest.mark.parametrize("name", TINY)
def test_tiny_weights_are_what_their_writer_dequantised(shared: Path, name: str) -> None:
    """Through the engine's own planning and reading; the writers rounded to fp16, and so must we."""
    folder = shared / "checkpoints" / name
    made = plan(folder)
    theirs = load_file(folder / "reference_dequant_fp16.safetensors")
    layers = {layer.name: layer for group in made.groups for layer in group.layers}
    assert len(theirs) == 14
    for tensor, expected in theirs.items():
        found = stored_weight(made, layers[tensor.removesuffix(".weight")]).dequantize(torch.float16)
        assert torch.equal(found, expected), tensor


@pytest.mark.parametrize("name", TINY)
def test_another_format_is_refused_with_both_names(shared: Path, name: str) -> None:
    own = method_of(shared / "checkpoints" / name)
    other = "gptq" if own == "awq" else "awq"
    with pytest.raises(ConfigError) as caught:
        tiny(shared, name, quantization=other)
    assert all(part in str(caught.value) for part in (f"'{other}'", f"'{own}'", "config.json"))


def test_formats_without_a_plugin_are_refused_by_name(shared: Path) -> None:
    bare = replace(registry(), quant_configs={})
    for name in ("tiny-gptq-4bit-g32", "tiny-ct-w8a8_rtn", "tiny-awq-gemm-aa"):
        folder = shared / "checkpoints" / name
        with pytest.raises(
            CheckpointError, match=f"no installed plugin reads quantization format '{method_of(folder)}'"
        ):
            LLM(str(folder), registry=bare)


def test_a_kv_cache_in_int8_is_refused_until_the_user_decides(shared: Path) -> None:
    folder = shared / "checkpoints" / "tiny-ct-kvint8"
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert all(part in str(caught.value) for part in ("int8", "no installed plugin stores", "--kv-cache-dtype float32"))
    with pytest.raises(ConfigError):
        load(folder, kv_cache_dtype="int8")


@pytest.mark.parametrize("name", ["tiny-ct-kvfp8", "tiny-ct-kvint8"])
def test_kv_scales_are_read(shared: Path, name: str) -> None:
    stored = load_file(shared / "checkpoints" / name / "model.safetensors")
    scales = tiny(shared, name).engine.executor.runner.loaded.kv_scales
    assert len(scales) == 2
    for index, layer in enumerate(scales):
        for side in ("k", "v"):
            assert float(getattr(layer, side)) == float(stored[f"model.layers.{index}.self_attn.{side}_scale"])


# --- SmolLM2-135M, as other people's tools quantised it


@pytest.fixture(scope="module")
def real(shared: Path, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Complete folders by name, each assembled once from what is shared and the demo model."""
    made: dict[str, Path] = {}

    def assemble(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "model"
            script = shared / "checkpoints" / "assemble.py"
            subprocess.run([sys.executable, str(script), name, str(demo_model), str(made[name])], check=True)
        return made[name]

    return assemble


REAL = {
    "smollm2-awq-gemm-g64": ("awq", 31.55, "uint4 g64 asym"),
    "smollm2-gptq-4bit-g64-actorder": ("gptq", 34.75, "uint4 g64 asym act_order"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REAL, "smollm2-ct-kvfp8"])
def test_real_checkpoints_answer(real: Callable[[str], Path], name: str) -> None:
    llm = load(real(name), linear_kernels="*=dequantized?")
    (output,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0, max_tokens=24)
    )
    assert "Paris" in output.outputs[0].text


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_perplexity_is_the_recorded_one(real: Callable[[str], Path], shared: Path, name: str) -> None:
    method, recorded, spec = REAL[name]
    script = ROOT / "benchmarks" / "perplexity.py"
    command = [sys.executable, str(script), str(real(name)), str(shared / "text" / "wikitext2-test.txt"), "-n", "12"]
    run = subprocess.run([*command, "--quantization", method, "--json"], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert found["perplexity"] == pytest.approx(recorded, rel=0.002)
    assert any(kernel.endswith(f" ({spec})") for kernel in found["kernels"])


@pytest.mark.slow
def test_real_kv_scales_lie_beside_the_float_model(real: Callable[[str], Path], demo_model: Path, shared: Path) -> None:
    """Loss is near the float model's: K and V are in fp8 where a plugin stores that (26.62 against 26.41 was recorded)."""
    llm, plain = load(real("smollm2-ct-kvfp8")), load(demo_model)
    scales = llm.engine.executor.runner.loaded.kv_scales
    assert len(scales) == 30
    assert all(float(scale) > 0 for layer in scales for scale in (layer.k, layer.v))
    text = (shared / "text" / "wikitext2-test.txt").read_text()[:4000]
    ids = llm.tokenizer.encode_plain(text)[:512]
    found, expected = (loss(all_logits(model, ids), torch.tensor(ids)) for model in (llm, plain))
    assert found == pytest.approx(expected, rel=0.01 if "fp8_e4m3" in registry().kv_formats else 0.002)
