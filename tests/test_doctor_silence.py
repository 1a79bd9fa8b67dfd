"""`octavo doctor` is silent where nothing is wrong: tiny models of all families and formats, and what other tools wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import registry

from octavo import EngineConfig, LayerFacts, LinearLayer, WeightSpec, round_to_nearest
from octavo.front.doctor import Diagnosis, examine
from octavo.quant.weight import FLOAT
from octavo.testing import tiny_model
from octavo_awq.config import AWQConfig

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def diagnose(folder: Path, **settings: Any) -> Diagnosis:
    return examine(EngineConfig(model=folder, **settings))


def found(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(finding.severity, finding.kind) for finding in diagnosis.findings.found]


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
@pytest.mark.parametrize("options", [{}, {"tie": True}, {"shards": 3}, {"dtype": torch.bfloat16}])
def test_good_models_are_silent(tmp_path: Path, architecture: str, options: dict[str, Any]) -> None:
    diagnosis = diagnose(tiny_model(tmp_path, architecture, **options))
    assert found(diagnosis) == []
    assert (diagnosis.loads, diagnosis.fits, diagnosis.exit_code(strict=True)) == (True, True, 0)
    assert diagnosis.kv_plan is not None
    assert diagnosis.kv_plan.longest_tokens == 512


def test_good_models_of_every_installed_format_are_silent(tmp_path: Path) -> None:
    """Each format that can be written, in each of its forms, over all linears of the decoder."""
    stored = load_file(tiny_model(tmp_path / "float") / "model.safetensors")
    layers = [LinearLayer(n.removesuffix(".weight"), *reversed(t.shape)) for n, t in stored.items() if "_proj" in n]
    written = []
    for quant in sorted(set(registry().quant_configs.values()), key=lambda quant: quant.name):
        spec = quant.online_spec(LinearLayer("model.layers.0.self_attn.q_proj", 64, 64))
        for target in quant.targets if spec is not None else ():
            weight = round_to_nearest(torch.randn(64, 64), spec)
            facts = {layer: LayerFacts(weight.spec, weight.is_symmetric, torch.float32) for layer in layers}
            facts[LinearLayer("lm_head", 64, 288)] = LayerFacts(FLOAT)
            config = quant.for_weights(target, facts)
            folder = tiny_model(tmp_path / target, quantize=(config, spec), settings=config.settings())
            diagnosis = diagnose(folder)
            assert found(diagnosis) == [], f"{target}: {diagnosis.findings.found}"
            assert str(weight.spec) in {report.spec for report in diagnosis.plan.linears}
            written.append(target)
    assert "awq" in written


@pytest.mark.parametrize("zero_point", [True, False])
@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast"])
def test_good_awq_models_are_silent(tmp_path: Path, version: str, zero_point: bool) -> None:
    settings = {**AWQ, "version": version, "zero_point": zero_point, "group_size": 64}
    config = AWQConfig(bits=4, group_size=64, version=version, zero_point=zero_point)
    spec = WeightSpec("uint4", (1, 64), has_zeros=zero_point)
    assert found(diagnose(tiny_model(tmp_path, quantize=(config, spec), settings=settings))) == []


def test_shared_checkpoints_raise_no_false_alarm(shared: Path) -> None:
    """Notes may be; errors and warnings only where something is to be said: fp8 and int8 caches, files of unknown formats."""
    folders = sorted(path for path in (shared / "checkpoints").iterdir() if (path / "model.safetensors").exists())
    assert len(folders) > 10
    alarms = {}
    for folder in folders:
        diagnosis = diagnose(folder)
        loud = [f for f in diagnosis.findings.found if f.severity != "note"]
        loud = [f for f in loud if "KV cache" not in f.message and "no installed plugin reads" not in f.message]
        if loud:
            alarms[folder.name] = [str(f) for f in loud]
    assert alarms == {}


def test_demo_model_raises_no_false_alarm(demo_model: Path) -> None:
    diagnosis = diagnose(demo_model)
    assert found(diagnosis) == []
    assert diagnosis.findings.bytes_left >= 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-awq-gemm-g64", "smollm2-gptq-4bit-g64-actorder", "smollm2-ct-kvfp8"])
def test_real_checkpoints_raise_no_false_alarm(shared: Path, demo_model: Path, tmp_path: Path, name: str) -> None:
    script = shared / "checkpoints" / "assemble.py"
    folder = tmp_path / "model"
    subprocess.run([sys.executable, str(script), name, str(demo_model), str(folder)], check=True)
    diagnosis = diagnose(folder)
    loud = [f for f in diagnosis.findings.found if f.severity != "note" and "KV cache" not in f.message]
    assert [str(f) for f in loud if "no installed plugin reads" not in f.message] == []
