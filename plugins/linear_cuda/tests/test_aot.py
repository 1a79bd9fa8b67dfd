"""Every kind of kernel compiled for GPUs that are not here: fits, does not spill, and multiplies on tensor cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from octavo.testing import CompiledKernel, compiled_kernels, why_no_compiler

CASES = Path(__file__).with_name("aot_cases.py")
PRODUCTS = ("weight_product", "code_product")
MOST_STACK = {(8, 0): 0, (8, 6): 8, (8, 9): 8, (9, 0): 0}
"""Bytes of registers spilt by a thread; 3-bit codes at few rows spill two on chips with less shared memory."""
MOST_SHARED = {(8, 0): 166_912, (8, 6): 101_376, (8, 9): 101_376, (9, 0): 232_448}
USUAL = ((8, 0), (9, 0))


def compiled(only: str, capabilities: Sequence[tuple[int, int]] = USUAL) -> list[CompiledKernel]:
    if (reason := why_no_compiler()) is not None:
        pytest.skip(reason)
    kernels = compiled_kernels(CASES, capabilities, only)
    assert {kernel.capability for kernel in kernels} == set(capabilities)
    return kernels


def check(kernels: list[CompiledKernel]) -> None:
    for kernel in kernels:
        where = f"{kernel.case} on {kernel.capability}: {kernel.name}"
        assert kernel.stack_bytes <= MOST_STACK[kernel.capability], f"{where} spills {kernel.stack_bytes} bytes"
        assert kernel.shared_bytes <= MOST_SHARED[kernel.capability], where
        if kernel.name in PRODUCTS:
            instruction = "wgmma.mma_async" if kernel.capability >= (9, 0) else "mma.sync"
            assert kernel.count(instruction) > 0, f"{where} has no {instruction}"
            assert kernel.count("cp.async") > 0, f"{where} does not load ahead"


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("w4 g128 bf16", {"weight_product", "sum_parts"}),  # a token, a batch and a prompt
        ("w8a8 bf16 prompt", {"quantise_rows", "code_product"}),
    ],
)
def test_the_usual_cases(only: str, names: set[str]) -> None:
    kernels = compiled(only)
    assert {kernel.name for kernel in kernels} == names
    check(kernels)


@pytest.mark.skipif(
    "OCTAVO_TEST_EVERYTHING" not in os.environ, reason="minutes of compiling: set OCTAVO_TEST_EVERYTHING=1"
)
@pytest.mark.parametrize("capability", MOST_SHARED)
def test_every_case(capability: tuple[int, int]) -> None:
    """All codes, types and numbers of rows; `make aot` prints the same as a table."""
    check(compiled("", (capability,)))
