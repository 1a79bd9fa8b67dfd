"""What `octavo convert` writes, in the hands of other people's tools; and GGUF files as its source."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from convert_support import HOLDING, PROMPT, convert, entries, logits, needs, tensors_of
from support import registry
from transformers import AutoModelForCausalLM

from octavo import LLM
from octavo.cli import main
from octavo.testing import tiny_model

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("shard", ["5g", "60k"])
def test_transformers_reads_our_compressed_tensors(shared: Path, tmp_path: Path, shard: str) -> None:
    """Symmetric ones: transformers 5.24 cannot load packed zero points, those of llm-compressor's own files included."""
    pytest.importorskip("compressed_tensors")
    needs("gptq", "compressed-tensors")
    source = shared / "checkpoints" / "tiny-gptq-4bit-g32"
    found = convert(source, tmp_path / "found", "compressed-tensors", "--max-shard-size", shard)
    theirs = AutoModelForCausalLM.from_pretrained(found, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    assert (logits(found) - expected).abs().max() < 2e-5
    assert torch.equal(logits(found), logits(source))


@pytest.mark.parametrize(("name", "target"), [("tiny-awq-gemm-aa", "gptq"), ("tiny-gptq-4bit-g32", "awq")])
def test_gptqmodel_reads_our_files(shared: Path, tmp_path: Path, name: str, target: str) -> None:
    needs("gptq")
    gptqmodel = pytest.importorskip("gptqmodel", reason="gptqmodel, which reads GPTQ and AWQ, is not installed")
    found = convert(shared / "checkpoints" / name, tmp_path / "found", target)
    model = gptqmodel.GPTQModel.load(str(found), device="cpu", backend="torch")
    with torch.no_grad():
        expected = model.model(torch.tensor([PROMPT])).logits[0].float()
    assert (logits(found) - expected).abs().max() < 0.05


# --- GGUF


@pytest.fixture(scope="module")
def gguf_tools() -> ModuleType:
    """The GGUF writer of the plugin's own tests."""
    file = ROOT / "plugins" / "gguf" / "tests" / "conftest.py"
    if "gguf" not in registry().quant_configs or not file.is_file():
        pytest.skip("the plugin for GGUF is not installed")
    spec = importlib.util.spec_from_file_location("gguf_tools", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gguf_file(folder: Path, tools: ModuleType, linears: str, others: str, **options: object) -> Path:
    """A tiny model as a GGUF file: its linears in one type, embedding and head in another."""
    model = tiny_model(folder / "float", **options)

    def kind(name: str) -> object:
        return getattr(tools.TYPES, linears if name.endswith("_proj.weight") else others)

    return Path(tools.write_gguf(model, folder / "model.gguf", kind, getattr(tools.TYPES, others)))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("target", HOLDING)
def test_a_gguf_file_becomes_a_folder(tmp_path: Path, gguf_tools: ModuleType, target: str, tie: bool) -> None:
    file = gguf_file(tmp_path, gguf_tools, "Q4_0", "F16", tie=tie)
    found = convert(file, tmp_path / "found", target)
    assert torch.equal(logits(found), logits(file))
    tensors = tensors_of(found)
    assert tensors["model.embed_tokens.weight"].dtype == torch.float16
    assert tensors["model.norm.weight"].dtype == torch.float32
    assert ("lm_head.weight" in tensors) != tie
    config = json.loads((found / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["quantization_config"]["quant_method"] == registry().quant_configs[target.partition("_")[0]].name
    (mine, theirs) = (LLM(str(path), registry=registry(), num_blocks_override=8).tokenizer for path in (found, file))
    messages = [{"role": "user", "content": "Grüße!"}]
    assert mine.chat(messages) == theirs.chat(messages)
    assert mine.end_token_ids == theirs.end_token_ids


@pytest.mark.parametrize(
    ("linears", "others", "layer"),
    [
        ("Q4_1", "F16", "model.layers.0."),  # minima are real-valued zeros
        ("Q5_0", "F16", "model.layers.0.self_attn.q_proj"),
        ("Q4_0", "Q8_0", "model.embed_tokens"),
    ],
)
def test_blocks_that_awq_cannot_hold_are_refused(
    tmp_path: Path,
    gguf_tools: ModuleType,
    capsys: pytest.CaptureFixture[str],
    linears: str,
    others: str,
    layer: str,
) -> None:
    file = gguf_file(tmp_path, gguf_tools, linears, others)
    before = entries(tmp_path)
    assert main(["convert", str(file), str(tmp_path / "found"), "--to", "awq"]) == 2
    assert layer in capsys.readouterr().err
    assert entries(tmp_path) == before
