"""What `octavo tune` does: products of random weights in every sound tile, timed, the fastest of each written down."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo import ActivationSpec, ConfigError, LinearRequest, Platform, QuantizedWeight, WeightSpec
from octavo_linear_cuda.machine import why_not
from octavo_linear_cuda.tune import SHAPES
from octavo_linear_cuda.tuning import Table, Tile, Work, bucket, cache_file, chip_of, ruled, shipped
from octavo_linear_cuda.w8a8 import W8A8
from octavo_linear_cuda.weight_only import WeightOnly

Measure = Callable[[Callable[[], None]], float]
"""Calls a function some times and gives the seconds of one call."""
DEVICE = "cuda"
_FEW, _MANY = 64, 256
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def run(options: argparse.Namespace) -> int:
    """Measures on the GPU and writes the table. Raises ConfigError without a GPU, and for flags that say nothing known."""
    shapes = [_pair(text) for text in SHAPES.get(options.shapes, options.shapes).split(",")]
    specs = [spec_of(text) for text in options.kernels.split(",")]
    rows = [_whole(text, "--rows") for text in options.rows.split(",")]
    if options.dtype not in _DTYPES:
        raise ConfigError(f"--dtype: expected one of {', '.join(_DTYPES)}, found '{options.dtype}'")
    if not torch.cuda.is_available():
        raise ConfigError("octavo tune measures on an NVIDIA GPU, and torch sees none here")
    platform = Platform.detect("cuda")
    if (reason := why_not(platform)) is not None:
        raise ConfigError(f"octavo tune cannot run: {reason}")
    path = Path(options.output) if options.output else cache_file(chip_of(platform))
    table = Table.read(path.read_text(encoding="utf-8")) if path.exists() else None
    table = replace(table or shipped(chip_of(platform)), rules={}, measured=torch.cuda.get_device_name())
    for spec, (outputs, inputs) in product(specs, shapes):
        layer = layer_of(spec, outputs, inputs, _DTYPES[options.dtype], platform, DEVICE)
        found = tune(layer, sorted({bucket(r) for r in rows}), platform, _seconds, DEVICE)
        table = replace(table, shapes={**table.shapes, layer.work(1).shape: found})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(table.write(), encoding="utf-8")
    print(f"written to {path}")
    return 0


def tune(
    layer: WeightOnly | W8A8, rows: Sequence[int], platform: Platform, measure: Measure, device: str
) -> dict[int, Tile]:
    """The fastest tile for each number of rows, of those that give the result of the rule's tile."""
    found: dict[int, Tile] = {}
    for number in rows:
        work = layer.work(number)
        first = ruled(work, shipped(chip_of(platform)))
        x = torch.randn(number, work.inputs, device=device).to(layer.dtype)
        expected = _result(layer, x, first)
        timed: list[tuple[float, Tile]] = []
        for tile in dict.fromkeys((first, *candidates(work))):
            out = _result(layer, x, tile)
            if out is not None and (expected is None or _agree(out, expected)):
                timed.append((measure(partial(layer.multiply, x, out, tile)), tile))
        if timed:
            seconds, found[number] = min(timed, key=lambda pair: pair[0])
            ruled_seconds = dict((tile, s) for s, tile in timed).get(first)
            gain = "" if ruled_seconds is None else f", {ruled_seconds / seconds:.2f} times as fast as the rule's"
            print(f"{work.shape}, {number} rows: {seconds * 1e6:.1f} us in {found[number]}{gain}", flush=True)
    return found


def candidates(work: Work) -> Iterator[Tile]:
    """Tiles worth a try: for few rows mostly splits, for many rows large ones."""
    heights: tuple[int, ...] = (64, 128) if work.rows < _MANY else (64, 128, 256)
    options: Any = product((64, 128), heights, (1,), (4, 8), (2, 3, 4))
    if work.rows <= _FEW:
        heights = tuple(rows for rows in (8, 16, 32, 64) if work.rows <= 2 * rows)[:2]
        options = product((64, 128), heights, (1, 2, 4, 8, 16), (4, 8), (3, 4, 5))
    for outputs, height, splits, warps, stages in options:
        if splits == 1 or work.inputs // splits >= 256:
            yield Tile(outputs, height, splits, warps, stages)


def spec_of(text: str) -> WeightSpec:
    """What "w4a16:128", "w8a8" or "fp8:128" stands for: symmetric, groups after the colon or a scale for each output."""
    kernel, _, group = text.partition(":")
    size = _whole(group, "--kernels") if group else -1
    plain: Mapping[str, WeightSpec] = {
        **{f"w{bits}a16": WeightSpec(f"uint{bits}", (1, size), has_zeros=True) for bits in (2, 3, 4, 8)},
        "w8a8": WeightSpec("int8", (1, size), activation=ActivationSpec("int8")),
        "fp8": WeightSpec("fp8_e4m3", (1, -1), activation=ActivationSpec("fp8_e4m3")),
    }
    if kernel == "fp8" and size > 0:
        activation = ActivationSpec("fp8_e4m3", "per_group", group_size=size)
        return WeightSpec("fp8_e4m3", (size, size), activation=activation)
    if kernel not in plain:
        raise ConfigError(f"--kernels: expected {', '.join(plain)}, with a group after a colon or not, found '{text}'")
    return plain[kernel]


def layer_of(
    spec: WeightSpec, outputs: int, inputs: int, dtype: torch.dtype, platform: Platform, device: str
) -> WeightOnly | W8A8:
    """A layer of random weights. Raises ConfigError where the kernels do not take it."""
    method = WeightOnly if spec.activation is None else W8A8
    request = LinearRequest("tune", spec, inputs, outputs, False, dtype, platform)
    if (reason := method.why_not(request)) is not None:
        raise ConfigError(f"--kernels: {method.name} {reason}")
    groups = spec.num_groups(outputs, inputs)
    scales = (torch.rand(groups, device=device) + 0.5).to(dtype) / 64
    zeros = torch.full_like(scales, 1 << (int(spec.code.lstrip("uint")) - 1)) if spec.has_zeros else None
    return method(QuantizedWeight(spec, _codes(spec, outputs, inputs, device), scales, zeros), request)


def _codes(spec: WeightSpec, outputs: int, inputs: int, device: str) -> Tensor:
    if spec.code.startswith("fp8"):
        return torch.randn(outputs, inputs, device=device).to(torch.float8_e4m3fn)
    if spec.code.startswith("uint"):
        high = 1 << int(spec.code.lstrip("uint"))
        return torch.randint(0, high, (outputs, inputs), dtype=torch.uint8, device=device)
    return torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, device=device)


def _result(layer: WeightOnly | W8A8, x: Tensor, tile: Tile) -> Tensor | None:
    """The product in such tiles; None where they take more registers or shared memory than there are."""
    from triton import OutOfResources

    out = torch.empty(x.shape[0], layer.work(1).outputs, dtype=layer.dtype, device=x.device)
    try:
        layer.multiply(x, out, tile)
    except OutOfResources:
        return None
    return out


def _agree(found: Tensor, expected: Tensor) -> bool:
    """Whether two results differ by no more than roundings of 16 bits do."""
    return bool((found.float() - expected.float()).abs().max() <= 0.02 * expected.float().abs().max())


def _seconds(call: Callable[[], None]) -> float:
    from triton.testing import do_bench

    return float(do_bench(call, warmup=10, rep=40, return_mode="median")) / 1e3


def _pair(text: str) -> tuple[int, int]:
    outputs, cross, inputs = text.partition("x")
    if not cross:
        raise ConfigError(f"--shapes: expected OUTPUTSxINPUTS or one of {', '.join(SHAPES)}, found '{text}'")
    return _whole(outputs, "--shapes"), _whole(inputs, "--shapes")


def _whole(text: str, flag: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{flag}: expected a whole number of 1 or more, found '{text}'")
    return int(text)
