"""Kernels compiled for GPUs that are not here: what is found, and what does not fit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.testing import compiled_kernels, compiling, why_no_compiler
from octavo.testing.aot import main, table

pytestmark = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))

CASES = """
import torch, triton
import triton.language as tl

@triton.jit
def doubled(x, out, n, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

@triton.jit
def product(x, y, out, n, STAGES: tl.constexpr):
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    total = tl.zeros([64, 64], tl.float32)
    for start in tl.range(0, n * 4096, 4096, num_stages=STAGES):
        total = tl.dot(tl.load(x + start + at), tl.load(y + start + at), total)
    tl.store(out + at, total)

def double(platform):
    x = torch.zeros(1000)
    for _ in range(2):
        doubled[(4,)](x, torch.empty_like(x), 1000, WIDTH=256, num_warps=2, enable_fp_fusion=True)

def multiply(stages):
    x = torch.zeros(64, 64, dtype=torch.float16)
    product[(1,)](x, x, torch.empty(64, 64), 9, STAGES=stages, num_warps=8, enable_fp_fusion=True)

def cases():
    return {"double": double, "multiply": lambda platform: multiply(2), "too much": lambda platform: multiply(16)}
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("aot") / "aot_cases.py"
    path.write_text(CASES)
    return path


def test_what_a_case_launches_is_compiled_for_each_chip(cases: Path) -> None:
    eighty, ninety = compiled_kernels(cases, only="double")
    assert (eighty.name, eighty.capability, eighty.grid, eighty.num_warps) == ("doubled", (8, 0), (4, 1, 1), 2)
    assert ninety.capability == (9, 0)
    for kernel in (eighty, ninety):
        assert 0 < kernel.registers <= 255
        assert kernel.stack_bytes == kernel.tensor_core_instructions == 0
        assert kernel.count("ld.global") > 0
        assert kernel.count("ld.globa") == 0


def test_instructions_are_counted_and_shown(cases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kernel,) = compiled_kernels(cases, ((8, 0),), only="multiply")
    assert kernel.count("mma.sync") == kernel.tensor_core_instructions > 0
    head, row = table([kernel]).splitlines()
    assert head.split() == [
        "case",
        "kernel",
        "chip",
        "warps",
        "stages",
        "regs",
        "stack",
        "shared",
        "mma",
        "wgmma",
        "copies",
    ]
    assert row.split()[:4] == ["multiply", "product", "sm_80", "8"]
    assert row.split()[8] == str(kernel.count("mma.sync"))
    if "TRITON_INTERPRET" not in os.environ:
        assert main([str(cases), "--sm", "80", "--only", "multiply"]) == 0
        assert capsys.readouterr().out.strip() == table([kernel])


def test_what_does_not_fit_is_an_error_that_names_the_case(cases: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)sm_80: too much.*out of resource: shared memory"):
        compiled_kernels(cases, ((8, 0),), only="too much")


def test_nothing_is_compiled_where_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), compiling((9, 0)):
        pass
