"""The GPU benchmark's script: it runs without a GPU, on small shapes, and writes what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu" / "run.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, env=environment)


def test_small_shapes_without_a_gpu(tmp_path: Path) -> None:
    done = run("--tiny", "--only", "attention", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert set(found["parts"]) == {"ceilings", "attention"}
    rows = found["parts"]["attention"]
    assert len(rows) == 6
    assert all(row["right"] for row in rows)
    assert all(("GB/s" in row) == row["what"].startswith("decode") for row in rows)
    text = (tmp_path / "gpu.txt").read_text()
    assert all(row["what"] in text for row in rows)


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run("--quick", "--out", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.strip() == "no CUDA device is here; --tiny shows that the script works"
    assert not list(tmp_path.iterdir())
