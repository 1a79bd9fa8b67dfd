"""A checkpoint format, and a kernel. Neither knows the other: they meet in `QuantizedWeight`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from octavo import (
    CheckpointError,
    Golden,
    LinearLayer,
    LinearMethod,
    LinearRequest,
    QuantConfig,
    QuantizedWeight,
    TensorInfo,
    WeightSpec,
)

SPEC = WeightSpec("int8", (1, -1))  # signed bytes, one scale for each output


class RowwiseConfig(QuantConfig):
    """`codes` int8 (out, in) and `scale` fp32 (out,): weight[n, k] = scale[n] * codes[n, k]."""

    name = "int8-rowwise"
    suffixes = ("codes", "scale", "bias")

    @classmethod
    def goldens(cls) -> Sequence[Golden]:
        stored = {"codes": torch.tensor([[-128, 1, 2], [3, 0, 127]], dtype=torch.int8), "scale": torch.tensor([0.5, 2])}
        return [Golden({}, stored, torch.tensor([[-64, 0.5, 1], [6, 0, 254]]))]

    def spec_for(self, layer: LinearLayer, stored: Mapping[str, TensorInfo]) -> WeightSpec | None:
        rows, columns = layer.out_features, layer.in_features
        wanted = {"codes": ((rows, columns), torch.int8), "scale": ((rows,), torch.float32)}
        found = {suffix: (stored[suffix].shape, stored[suffix].dtype) for suffix in wanted if suffix in stored}
        if not found:
            return None  # this layer is stored unquantised
        if found != wanted:
            raise CheckpointError(f"{self.name}: cannot read {layer.name}", expected=wanted, found=found)
        return SPEC

    def canonicalise(self, layer: LinearLayer, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        return QuantizedWeight(SPEC, tensors["codes"], tensors["scale"][:, None], bias=tensors.get("bias"))

    def serialise(self, layer: LinearLayer, weight: QuantizedWeight) -> dict[str, Tensor]:
        if weight.spec != SPEC or weight.scales is None:
            raise CheckpointError(f"{self.name}: {layer.name} is {weight.spec}, this format stores {SPEC} only")
        tensors = {"codes": weight.codes, "scale": weight.scales[:, 0].float()}
        return tensors if weight.bias is None else tensors | {"bias": weight.bias}


class RowwiseMethod(LinearMethod):
    """Multiplies by the codes as they are and scales the sums: no dequantised matrix is made. Serves any int8 format."""

    name = "rowwise"
    rank = 15
    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    @classmethod
    def why_not(cls, request: LinearRequest) -> str | None:
        return None if request.spec == SPEC else f"computes {SPEC} weights, these are {request.spec}"

    def __init__(self, weight: QuantizedWeight, request: LinearRequest) -> None:
        super().__init__(weight, request)
        for name in ("codes", "scales", "bias"):
            self.register_buffer(name, getattr(weight, name))

    def forward(self, x: Tensor) -> Tensor:
        out = (x.float() @ self.codes.float().T) * self.scales.float().T
        return (out if self.bias is None else out + self.bias.float()).to(x.dtype)
