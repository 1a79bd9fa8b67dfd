"""Quantised linear layers at the shapes of 7B models: right, and how fast against torch's bf16 product and the chip's ceilings.

Bytes are those of weights, inputs and outputs, each moved once; operations are two for a weight and row. Layers are measured in
rotation, so many that their weights do not stay in the L2 cache, and as a captured graph, without the time of launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from frame import Context
from torch import Tensor

from octavo import ActivationSpec, LinearMethod, LinearRequest, QuantizedWeight, WeightSpec, quantize_inputs
from octavo_linear_cuda.w8a8 import W8A8
from octavo_linear_cuda.weight_only import WeightOnly

SHAPES = {"qkv": (12288, 4096), "o": (4096, 4096), "gate|up": (22016, 4096), "down": (4096, 11008)}
QUICK = ("gate|up", "down")
ROWS = (1, 16, 64, 512, 4096)
KINDS = {
    "w4a16 g128": WeightSpec("uint4", (1, 128), has_zeros=True),
    "w8a8": WeightSpec("int8", activation=ActivationSpec("int8")),
    "fp8": WeightSpec("fp8_e4m3", activation=ActivationSpec("fp8_e4m3")),
}
_CACHE = 160 << 20
"""More bytes than any L2 cache holds, twice."""
_MOST_ERROR = 0.02
"""Of the largest result: products of rounded weights and results in bf16."""


def run(context: Context) -> list[dict[str, Any]]:
    """A line for each kind, shape and number of rows; `right` says whether results are those of fp32."""
    shapes = {name: SHAPES[name] for name in (QUICK if context.quick else SHAPES)}
    all_rows = ROWS
    if context.tiny:
        shapes, all_rows = {"tiny": (96, 160)}, (1, 17)
    lines = []
    for shape, (outputs, inputs) in shapes.items():
        dense = _dense_seconds(outputs, inputs, all_rows, context)
        for kind, spec in KINDS.items():
            method: type[LinearMethod] = WeightOnly if spec.activation is None else W8A8
            request = LinearRequest(f"{kind} {shape}", spec, inputs, outputs, False, torch.bfloat16, context.platform)
            if (reason := method.why_not(request)) is not None:
                lines.append({"what": kind, "shape": shape, "refused": reason})
                continue
            weight = random_weight(spec, outputs, inputs, context.device)
            layers = [method(weight, request)]
            held = sum(buffer.numel() * buffer.element_size() for buffer in layers[0].buffers())
            layers += [method(weight, request) for _ in range(0 if context.tiny else _CACHE // held)]
            for rows in all_rows:
                x = _inputs(rows, inputs, context.device)
                want = expected(x, weight)
                error = float((layers[0](x).float() - want).abs().max() / want.abs().max())
                seconds = _seconds([lambda layer=layer, x=x: layer(x) for layer in layers], context)
                moved, done = held + 2 * rows * (inputs + outputs), 2 * rows * inputs * outputs
                line = {"what": kind, "shape": shape, "rows": rows, "right": error <= _MOST_ERROR, "error": error}
                lines.append(line | _rates(seconds, moved, done, context) | {"times bf16": dense[rows] / seconds})
    return lines


def random_weight(spec: WeightSpec, outputs: int, inputs: int, device: torch.device) -> QuantizedWeight:
    """Random codes over their whole range, made on the GPU; products are of about 1."""
    generator = torch.Generator(device).manual_seed(0)
    groups = spec.num_groups(outputs, inputs)
    largest = {"uint4": 8, "int8": 128, "fp8_e4m3": 1}[spec.code]
    scales = (torch.rand(groups, device=device, generator=generator) + 0.5) / largest / inputs**0.5
    if spec.code == "fp8_e4m3":
        codes = torch.randn(outputs, inputs, device=device, generator=generator).to(torch.float8_e4m3fn)
    else:
        low, high, dtype = (0, 16, torch.uint8) if spec.code == "uint4" else (-128, 128, torch.int8)
        codes = torch.randint(low, high, (outputs, inputs), device=device, generator=generator, dtype=dtype)
    zeros = torch.randint(0, 16, groups, device=device, generator=generator).float() if spec.has_zeros else None
    return QuantizedWeight(spec, codes, scales.to(torch.bfloat16), zeros)


def expected(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The product in fp32, by torch, of inputs quantised as the layer wants them."""
    values = x.float()
    if (activation := weight.spec.activation) is not None:
        codes, scales, _ = quantize_inputs(x, activation)
        values = codes.float() * scales
    return values @ weight.dequantize().t()


def _inputs(rows: int, inputs: int, device: torch.device) -> Tensor:
    return torch.randn(rows, inputs, device=device).to(torch.bfloat16)


def _dense_seconds(outputs: int, inputs: int, all_rows: tuple[int, ...], context: Context) -> dict[int, float]:
    """torch's bf16 product, by rows."""
    count = 1 if context.tiny else math.ceil(_CACHE / (2 * outputs * inputs))
    weights = [_inputs(outputs, inputs, context.device) for _ in range(count)]
    found = {}
    for rows in all_rows:
        x = _inputs(rows, inputs, context.device)
        found[rows] = _seconds([lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in weights], context)
    return found


def _seconds(calls: list[Callable[[], Tensor]], context: Context) -> float:
    """Of one call, all taken in turn; on a GPU they are captured after a first round, which compiles."""

    def round_of_calls() -> None:
        for call in calls:
            call()

    if context.device.type != "cuda":
        return context.measure(round_of_calls) / len(calls)
    round_of_calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        round_of_calls()
    return context.measure(graph.replay) / len(calls)


def _rates(seconds: float, num_bytes: int, operations: int, context: Context) -> dict[str, float]:
    """Rates, and as shares of the ceilings that were measured on this GPU."""
    rates = {"us": seconds * 1e6, "GB/s": num_bytes / seconds / 1e9, "TFLOP/s": operations / seconds / 1e12}
    shares = {"of copy": rates["GB/s"] / context.ceilings.copy, "of matmul": rates["TFLOP/s"] / context.ceilings.matmul}
    return rates | shares
