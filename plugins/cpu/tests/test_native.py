"""The door to the native module: what happens without it, and on which threads it runs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import octavo_cpu.native as door
from octavo import LLM, AttentionLayer, AttentionRequest, Platform, QuantizedWeight, SamplingParams, WeightSpec
from octavo.testing import tiny_model
from octavo_cpu.attention import NativeAttention
from octavo_cpu.packing import pack

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
_WITHOUT = """
import sys
sys.modules["octavo_cpu._native"] = None  # as if it had never been built
from octavo import LLM, SamplingParams
llm = LLM(sys.argv[1], num_blocks_override=16, disable_progress=True, quantize_weights="int4")
(output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
info = llm.engine.model_info
print(len(output.outputs[0].token_ids), {report.kernel for report in info.linears}, info.attention)
"""


def test_v08_without_the_native_module_slower_kernels_serve_and_one_line_says_so(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT, str(tmp_path)], capture_output=True, text=True, check=True, timeout=300
    )
    assert "cpu_" not in run.stdout
    assert run.stdout.startswith("4 ")
    assert run.stderr.count("cannot be used") == 1
    assert "Slower kernels take its place" in run.stderr


def test_v08_an_instruction_set_that_is_not_here_is_named_with_those_that_are(tmp_path: Path) -> None:
    if door.native() is None:
        pytest.skip("octavo-cpu has no native module here")
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import octavo_cpu.native as n; print(n.why_not(__import__('octavo').Platform.detect('cpu')))",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "OCTAVO_CPU_ISA": "amx9"},
    )
    assert "'amx9'" in run.stdout
    assert "portable" in run.stdout


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({"OCTAVO_CPU_THREADS": "3", "OMP_NUM_THREADS": "1"}, 3),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "2,1"}, 2),
    ],
    ids=str,
)
def test_v41_threads_are_those_that_a_setting_names(
    environment: dict[str, str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OCTAVO_CPU_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    threads, cpus = door._threads()
    assert threads == count
    assert len(cpus) in (0, count)


def test_v41_threads_follow_affinity_cores_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OCTAVO_CPU_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(door, "_physical_cores", lambda: [0, 2, 4, 6])
    monkeypatch.setattr(door, "_quota", lambda: 64)
    assert door._threads() == (4, [0, 2, 4, 6])
    monkeypatch.setattr(door, "_quota", lambda: 2)
    assert door._threads() == (2, [0, 2])


@pytest.mark.parametrize("value", ["0", "many", "-1"])
def test_v41_a_number_of_threads_that_is_none_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CPU_THREADS", value)
    with pytest.raises(ValueError, match=f"OCTAVO_CPU_THREADS is '{value}'"):
        door._threads()


def test_v41_the_thread_plan_is_shown_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if door.native() is None:
        pytest.skip("octavo-cpu has no native module here")
    tiny_model(tmp_path)
    with caplog.at_level(logging.INFO), LLM(str(tmp_path), num_blocks_override=16, disable_progress=True) as llm:
        llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    assert any(f"on {door.native().threads()} thread" in record.message for record in caplog.records)


def test_another_device_or_type_is_refused_by_name() -> None:
    cuda = Platform("cuda", "x86_64", frozenset(), 8, (9, 0))
    assert door.why_not(cuda) == "is for CPUs"
    reason = door.why_not(Platform.detect("cpu"), torch.bfloat16)
    assert reason == "computes in float32, not in bfloat16"


def test_lasting_memory_is_zero_and_aligned() -> None:
    for size in (0, 1, 4096, (2 << 20) + 5):
        memory: Any = door.lasting(size)
        assert len(memory) == max(size, 1)
        assert not memory.any()
        assert memory.data_ptr() % 64 == 0


def attention_request(*heads: tuple[int, int, int]) -> AttentionRequest:
    """Layers with so many heads, KV heads and dimensions."""
    layers = [AttentionLayer(i, *sizes, scale=1.0) for i, sizes in enumerate(heads)]
    return AttentionRequest(layers, torch.float32, 16, torch.float32, Platform.detect("cpu"))


@pytest.mark.parametrize(
    ("heads", "says"),
    [
        (((4, 2, 256), (4, 2, 256)), None),
        (((4, 2, 64), (4, 2, 320)), "is for heads of up to 256, the model's have 320"),
        (((8, 2, 64), (4, 2, 64)), "plans a step once, for layers whose heads are alike"),
        (((4, 4, 64), (4, 2, 64)), "plans a step once, for layers whose heads are alike"),
    ],
)
def test_v08_attention_refuses_heads_that_it_cannot_serve(
    heads: tuple[tuple[int, int, int], ...], says: str | None
) -> None:
    if door.native() is None:
        pytest.skip("octavo-cpu has no native module here")
    assert NativeAttention.why_not(attention_request(*heads)) == says


@pytest.mark.parametrize(
    ("scales", "zeros", "kept"),
    [
        ([0.5, 0.25], [3, 15], {"scales": torch.float16, "zeros": torch.uint8}),
        ([0.5, 2.0**-100], [3, 15], {"scales": torch.bfloat16, "zeros": torch.uint8}),
        ([0.1, 0.2], [0.5, 3], {"scales": torch.float32, "offsets": torch.float32}),
        ([0.5, 0.25], [-1, 3], {"scales": torch.float16, "offsets": torch.float32}),
        ([0.5, 0.25], [7, 7], {"scales": torch.float16}),
    ],
)
def test_scales_and_zeros_take_the_least_room_that_holds_them(
    scales: list[float], zeros: list[float], kept: dict[str, torch.dtype]
) -> None:
    if door.native() is None:
        pytest.skip("octavo-cpu has no native module here")
    spec = WeightSpec("uint4", (1, 32), has_zeros=True)
    codes = torch.randint(16, (20, 64), dtype=torch.uint8)
    table = [torch.tensor(row).expand(20, 2).contiguous() for row in (scales, zeros)]
    packed = pack(QuantizedWeight(spec, codes, scales=table[0], zeros=table[1].float()))
    found = {name: packed.tensors[name].dtype for name in ("scales", "zeros", "offsets") if name in packed.tensors}
    assert found == kept
    assert all(packed.tensors[name].shape == (2, 2, 16) for name in kept)
