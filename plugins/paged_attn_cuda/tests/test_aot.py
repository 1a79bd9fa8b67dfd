"""The kernels compiled for GPUs that are not here: they fit, spill little or nothing, and use what the chips have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.testing import CompiledKernel, compiled_kernels, why_no_compiler

pytestmark = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))
CASES = Path(__file__).with_name("aot_cases.py")
SHARED = {(8, 0): 166_912, (9, 0): 232_448}
SPILLS = {"decode": 0, "prefill": 128, "elementwise": 0}
"""Bytes of local memory that a thread may use, at most. Prefill with heads of 256 keeps more than 255 registers hold."""


def check(kernels: list[CompiledKernel]) -> None:
    wrong = []
    for kernel in kernels:
        kind, in_fp32 = kernel.case.partition(" ")[0], "fp32" in kernel.case
        chip = "sm_{}{}".format(*kernel.capability)
        attends, prefills_on_hopper = kernel.name == "attend", kind == "prefill" and chip == "sm_90" and not in_fp32
        faults = {
            "does not fit in shared memory": kernel.shared_bytes > SHARED[kernel.capability],
            f"spills {kernel.stack_bytes} bytes": kernel.stack_bytes > SPILLS[kind],
            "uses no tensor cores": attends and not in_fp32 and not kernel.tensor_core_instructions,
            "rounds fp32 to tf32": attends and in_fp32 and kernel.tensor_core_instructions > 0,
            "does not use Hopper's tensor cores": attends
            and prefills_on_hopper
            and not kernel.count("wgmma.mma_async"),
            "loads K and V without overlap": attends and not kernel.count("cp.async"),
        }
        wrong += [f"{kernel.case}, {kernel.name}, {chip}: {fault}" for fault, found in faults.items() if found]
    assert wrong == []


def test_a_decode_and_a_prefill() -> None:
    kernels = compiled_kernels(CASES, only="128 bf16 e4m3")
    assert {(k.name, k.capability) for k in kernels} == {
        (name, chip) for name in ("store", "attend", "reduce") for chip in SHARED
    }
    assert {k.case for k in kernels} == {"decode 128 bf16 e4m3", "prefill 128 bf16 e4m3"}
    check(kernels)


@pytest.mark.skipif(
    "OCTAVO_TEST_EVERYTHING" not in os.environ, reason="minutes of compiling: set OCTAVO_TEST_EVERYTHING=1"
)
@pytest.mark.parametrize("chip", SHARED, ids=str)
@pytest.mark.parametrize("kind", SPILLS)
def test_every_case(kind: str, chip: tuple[int, int]) -> None:
    kernels = compiled_kernels(CASES, (chip,), only=kind)
    assert len({kernel.case for kernel in kernels}) >= (1 if kind == "elementwise" else 8)
    check(kernels)
