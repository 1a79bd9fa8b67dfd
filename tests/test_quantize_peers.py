"""What `octavo quantize` wrote, read by others: independent decoders and transformers give the logits that octavo computes."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from convert_support import tensors_of
from support import all_logits, registry

from octavo import LLM
from octavo.cli import main
from octavo.testing import tiny_model

TEXT = "".join(chr(ord("a") + (i * i + i // 7) % 26) for i in range(3000))
IDS = [int(i) for i in torch.randint(0, 250, (40,), generator=torch.Generator().manual_seed(3))]
pytestmark = pytest.mark.usefixtures("core_kernels")


def load(folder: Path) -> LLM:
    return LLM(str(folder), registry=registry(), dtype="float32", num_blocks_override=16)


def decoded(folder: Path, shared: Path, group: int) -> dict[str, torch.Tensor]:
    """The weights (out, in) of an AWQ checkpoint by the decoder in the shared folder, and its other tensors as they are."""
    spec = importlib.util.spec_from_file_location("oracle_decoders", shared / "oracle" / "decoders.py")
    assert spec is not None
    assert spec.loader is not None
    oracle = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(oracle)
    stored = tensors_of(folder)
    found = {name: tensor for name, tensor in stored.items() if name.endswith((".weight", ".bias"))}
    for module in [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]:
        parts = [stored[f"{module}.{suffix}"].numpy() for suffix in ("qweight", "qzeros", "scales")]
        found[f"{module}.weight"] = torch.from_numpy(oracle.awq_gemm(*parts, group))
    return found


def test_transformers_computes_the_same_from_weights_that_others_decode(shared: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    options = ["--method", "awq", "--group-size", "32", "--num-samples", "6", "--max-length", "64"]
    options += ["--calibration", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), "--disable-progress"]
    assert main(["quantize", str(model), *options]) == 0
    other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    weights = {name: tensor.float() for name, tensor in decoded(tmp_path / "out", shared, 32).items()}
    other.load_state_dict(weights)
    with torch.inference_mode():
        expected = other(torch.tensor([IDS])).logits[0]
    found = all_logits(load(tmp_path / "out"), IDS)
    assert torch.allclose(found, expected, atol=2e-4)


def test_a_trained_model_loses_no_more_than_by_autoawq(shared: Path, tmp_path: Path) -> None:
    """The tiny trained model in the shared folder: loss 2.958 as floats, 2.953 in AutoAWQ's and llm-compressor's AWQ."""
    from safetensors.torch import load_file

    model = shared / "checkpoints" / "tiny-llama-fp16"
    ids = load_file(model / "reference.safetensors")["input_ids"]
    options = [
        "--method",
        "awq",
        "--group-size",
        "32",
        "--num-samples",
        "16",
        "--max-length",
        "64",
        "--disable-progress",
    ]
    text = ["--calibration", str(shared / "text" / "wikitext2-valid-calibration.txt")]
    assert main(["quantize", str(model), *options, *text, "--out", str(tmp_path / "out")]) == 0

    def loss(folder: Path) -> float:
        llm, lost, count = load(folder), 0.0, 0
        for row in ids.view(-1, ids.shape[-1]):
            logs = torch.log_softmax(all_logits(llm, row.tolist())[:-1], -1)
            lost -= float(logs.gather(1, row[1:, None]).sum())
            count += len(row) - 1
        return lost / count

    before, after = loss(model), loss(tmp_path / "out")
    assert math.isfinite(after)
    assert after < before + 0.01
