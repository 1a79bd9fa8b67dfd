"""What is compiled for GPUs that are not here: each kind of kernel as 7B models use it, for a token, a batch and a prompt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from octavo import ActivationSpec, LinearMethod, LinearRequest, Platform, WeightSpec
from octavo.testing import random_weight
from octavo_linear_cuda.w8a8 import W8A8
from octavo_linear_cuda.weight_only import WeightOnly

ROWS = {"decode": 1, "batch": 16, "prompt": 512}
OUTPUTS, INPUTS = 128, 4096
PER_TOKEN = ActivationSpec("int8")
WEIGHTS = {
    "w4 g128": WeightSpec("uint4", (1, 128), has_zeros=True),
    "w4 g32": WeightSpec("uint4", (1, 32), has_zeros=True),
    "w4 channel": WeightSpec("int4", (1, -1)),
    "w4 act-order": WeightSpec("uint4", (1, 128), has_zeros=True, act_order=True),
    "w2 g64": WeightSpec("uint2", (1, 64), has_zeros=True),
    "w3 g128": WeightSpec("uint3", (1, 128), has_zeros=True),
    "w8 channel": WeightSpec("int8"),
    "w8 g128": WeightSpec("uint8", (1, 128), has_zeros=True),
    "fp8 weight": WeightSpec("fp8_e4m3"),
}
BOTH = {
    "w8a8": WeightSpec("int8", activation=PER_TOKEN),
    "w8a8 asym": WeightSpec("int8", activation=ActivationSpec("int8", symmetric=False)),
    "w8a8 g32": WeightSpec("int8", (1, 32), activation=PER_TOKEN),
    "fp8": WeightSpec("fp8_e4m3", activation=ActivationSpec("fp8_e4m3")),
    "fp8 blocks": WeightSpec(
        "fp8_e4m3", (128, 128), activation=ActivationSpec("fp8_e4m3", "per_group", group_size=128)
    ),
}


def cases() -> dict[str, Callable[[Platform], None]]:
    """Cases by name: kind, type, rows."""
    found: dict[str, Callable[[Platform], None]] = {}
    for rows, number in ROWS.items():
        for name, spec in WEIGHTS.items():
            found[f"{name} bf16 {rows}"] = partial(_launch, WeightOnly, spec, torch.bfloat16, number)
        found[f"w4 g128 fp16 {rows}"] = partial(_launch, WeightOnly, WEIGHTS["w4 g128"], torch.float16, number)
        for name in ("w4 g128", "w3 g128"):
            found[f"{name} fp32 {rows}"] = partial(_launch, WeightOnly, WEIGHTS[name], torch.float32, number)
        for name, spec in BOTH.items():
            found[f"{name} bf16 {rows}"] = partial(_launch, W8A8, spec, torch.bfloat16, number)
    return found


def _launch(method: type[LinearMethod], spec: WeightSpec, dtype: torch.dtype, rows: int, platform: Platform) -> None:
    request = LinearRequest("aot.layer", spec, INPUTS, OUTPUTS, True, dtype, platform)
    if method.why_not(request) is not None:  # fp8 on a chip without it
        return
    weight = random_weight(spec, OUTPUTS, INPUTS, torch.Generator().manual_seed(0), scale_dtype=torch.bfloat16)
    layer = method(weight, request)
    with torch.inference_mode():
        layer(torch.empty(rows, INPUTS, dtype=dtype))
