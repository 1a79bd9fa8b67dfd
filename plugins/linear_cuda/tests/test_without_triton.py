"""A machine without Triton: the plugin loads, and its kernels say what they lack."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
sys.modules["triton"] = None  # what an import finds where it is not installed
import torch
import octavo_linear_cuda
from octavo import LinearRequest, Platform, WeightSpec
platform = Platform("cuda", "x86_64", frozenset(), 1, (9, 0))
request = LinearRequest("a.layer", WeightSpec("int8"), 64, 64, False, torch.bfloat16, platform)
print(*(method.why_not(request) for method in octavo_linear_cuda.octavo_linear_methods(platform)), sep="\\n")
print(*(command.name for command in octavo_linear_cuda.octavo_commands()))
"""


def test_kernels_say_that_triton_is_missing() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    sentence = "needs Triton, which is not installed (pip install triton)"
    assert run.stdout.splitlines() == [sentence, sentence, "tune"]
