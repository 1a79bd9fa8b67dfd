"""The layers that `LinearMethodSuite` asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.platforms import Platform
from octavo.quant.linear import LinearRequest
from octavo.quant.weight import FLOAT, ActivationSpec, QuantizedWeight, WeightSpec
from octavo.testing.weights import on_device, random_weight

ROWS = (1, 2, 7, 8, 9, 17, 64)
MANY_ROWS = 130
"""Tried with one shape of each spec: kernels change their path for prompts."""
SHAPES = ((320, 48), (256, 128), (97, 33), (264, 7), (33, 130), (1, 1))
"""(in_features, out_features): multiples of common tiles, and what is left over when tiles do not fit."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class WeightCell:
    """One weight: what its numbers mean, its shape, and details that the request does not show."""

    spec: WeightSpec
    in_features: int
    out_features: int
    zeros: str = "real"
    balanced: bool = True
    scale_dtype: torch.dtype = torch.float32
    transposed: bool = False  # codes come as a transposed view, as formats that pack along the inputs unpack them
    turn: int = 0  # says which compute types come with a bias; alternates over specs and shapes

    def __str__(self) -> str:
        details = [f"{self.zeros} zeros"] if self.spec.has_zeros else []
        details += ["groups of unequal size"] if not self.balanced else []
        details += ["transposed codes"] if self.transposed else []
        return ", ".join([f"{self.spec} {self.out_features} x {self.in_features}", *details])

    @property
    def rows(self) -> tuple[int, ...]:
        """Numbers of rows to multiply with, largest last."""
        return (*ROWS, MANY_ROWS) if self.turn % len(SHAPES) == 0 else ROWS

    def weight(self, device: str, seed: int = 0) -> QuantizedWeight:
        """The weight, with a bias; the same at each call."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + self.in_features * 1_009 + self.out_features)
        weight = random_weight(
            self.spec,
            self.out_features,
            self.in_features,
            generator,
            zeros=self.zeros,
            scale_dtype=self.scale_dtype,
            balanced=self.balanced,
        )
        codes = weight.codes.t().contiguous().t() if self.transposed else weight.codes
        bias = torch.randn(self.out_features, generator=generator).to(self.scale_dtype)
        return on_device(replace(weight, codes=codes, bias=bias), device)

    def request(self, dtype: torch.dtype, bias: bool, platform: Platform) -> LinearRequest:
        """The request that a loader would make for this weight."""
        return LinearRequest("kit.layer", self.spec, self.in_features, self.out_features, bias, dtype, platform)


def weight_cells() -> Iterator[WeightCell]:
    """All weights of the sweep."""
    scale_dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for number, (spec, zeros, balanced) in enumerate(_specs()):
        for place, (in_features, out_features) in enumerate(SHAPES):
            scale_dtype, transposed = scale_dtypes[(number + place) % 3], (number + place) % 4 == 3
            turn = number + place
            yield WeightCell(spec, in_features, out_features, zeros, balanced, scale_dtype, transposed, turn)


def _specs() -> Iterator[tuple[WeightSpec, str, bool]]:
    """(spec, kind of zeros, whether act-order groups are of equal size)."""
    yield FLOAT, "real", True
    for code in ("uint4", "uint2", "uint3", "uint8"):
        for group in (16, 32, 64, 128, 256, -1):
            for zeros in ("real", "integer", "midpoint"):
                yield WeightSpec(code, (1, group), has_zeros=True), zeros, True
        for group, zeros in ((32, "integer"), (128, "real"), (-1, "midpoint")):
            spec = WeightSpec(code, (1, group), has_zeros=True, act_order=True)
            yield spec, zeros, True
            yield spec, zeros, False
    yield WeightSpec("uint4", (1, 32)), "real", True
    yield WeightSpec("uint4", (16, 16), has_zeros=True), "real", True
    yield WeightSpec("uint4", (3, 5), has_zeros=True), "integer", True
    yield WeightSpec("int4", (1, 32)), "real", True
    for code in ("int8", "fp8_e4m3"):
        for shape in ((1, -1), (-1, -1), (1, 16), (1, 128), (16, 16), (128, 128)):
            yield WeightSpec(code, shape), "real", True
    yield WeightSpec("int8", (1, -1), has_zeros=True), "integer", True
    yield WeightSpec("int8", (1, 64), has_zeros=True, act_order=True), "real", True


def activation_cells() -> Iterator[WeightCell]:
    """Weights whose inputs are quantised too."""
    int8 = [
        ActivationSpec("int8"),
        ActivationSpec("int8", symmetric=False),
        ActivationSpec("int8", "per_tensor", dynamic=False),
        ActivationSpec("int8", "per_tensor", dynamic=False, symmetric=False),
    ]
    fp8 = [ActivationSpec("fp8_e4m3"), ActivationSpec("fp8_e4m3", "per_tensor", dynamic=False)]
    specs = [WeightSpec("int8", shape, activation=a) for a in int8 for shape in ((1, -1), (-1, -1), (1, 32))]
    specs += [WeightSpec("fp8_e4m3", shape, activation=a) for a in fp8 for shape in ((1, -1), (-1, -1))]
    specs += [WeightSpec("fp8_e4m3", (128, 128), activation=ActivationSpec("fp8_e4m3", "per_group", group_size=128))]
    specs += [WeightSpec("uint4", (1, 32), has_zeros=True, activation=int8[0])]
    for number, spec in enumerate(specs):
        for place, (in_features, out_features) in enumerate(SHAPES):
            yield WeightCell(spec, in_features, out_features, "integer", turn=number + place)


def nonsense(platform: Platform) -> Iterator[LinearRequest]:
    """Requests that no kernel can serve, because nobody has defined what they mean."""
    yield LinearRequest("kit.layer", WeightSpec("kit-unknown"), 64, 64, False, torch.float32, platform)
    for code, shape in (("uint4", (1, 32)), ("int8", (1, -1)), ("fp8_e4m3", (1, -1))):
        for activation in (ActivationSpec("kit-unknown"), ActivationSpec("int8", "kit-unknown")):
            spec = WeightSpec(code, shape, has_zeros=code == "uint4", activation=activation)
            yield LinearRequest("kit.layer", spec, 64, 64, True, torch.float32, platform)


def inputs(rows: int, in_features: int, dtype: torch.dtype, device: str, seed: int = 1) -> Tensor:
    """x (rows, in_features): some rows all positive, so that errors of one sign add up, and row 5 all zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, in_features, generator=generator)
    x[::3] = x[::3].abs() + 0.25
    x[5:6] = 0
    return x.to(device, dtype)
