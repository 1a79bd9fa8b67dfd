"""The linear methods: weights of any code on float inputs or on inputs quantised here, and W8A8."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo import ActivationSpec, LinearMethod, LinearRequest, QuantizedWeight
from octavo_cpu.native import native, result, rows_of, why_not
from octavo_cpu.packing import BITS, U4, U8, pack, packed_code

_MOST = 128
"""Inputs that share a scale at most, where inputs of weight-only layers are quantised."""
_PER_SEGMENT, _PER_TOKEN, _STATIC = range(3)


class _Native(LinearMethod):
    """A packed weight, its memory as buffers."""

    batch_invariant = True
    _most: ClassVar[int | None] = None

    def __init__(self, weight: QuantizedWeight, request: LinearRequest) -> None:
        super().__init__(weight, request)
        packed = pack(weight, self._cut(request))
        self._weight, self._out, self._inputs = packed.handle, request.out_features, self._quantised(weight, request)
        for name, tensor in packed.tensors.items():
            self.register_buffer(name, tensor)

    @classmethod
    def _cut(cls, request: LinearRequest) -> int | None:
        """The longest segment; None for whole groups."""
        return None

    def _quantised(self, weight: QuantizedWeight, request: LinearRequest) -> Any:
        """How inputs are quantised; None where they are not."""
        return None

    @classmethod
    def planned_bytes(cls, request: LinearRequest) -> int:
        code = packed_code(request.spec)
        shape = request.out_features, request.in_features
        if code is None:  # plain numbers, of 16 bits as a rule
            return math.prod(shape) * 2
        groups = math.prod(request.spec.num_groups(*shape))
        return math.prod(shape) * BITS[code] // 8 + groups * 4 * (1 + request.spec.has_zeros)

    def forward(self, x: Tensor) -> Tensor:
        x, rows = rows_of(x), x.shape[0]
        out = result(rows, self._out)
        native().linear(self._weight, self._inputs, x.data_ptr(), x.stride(0), rows, out.data_ptr(), out.stride(0))
        return out


class FloatInputs(_Native):
    """Weights of any code, or plain ones in the type in which they are stored; products and sums in fp32."""

    name = "cpu_float"
    rank = 29

    @classmethod
    def why_not(cls, request: LinearRequest) -> str | None:
        if (reason := why_not(request.platform, request.dtype)) is not None:
            return reason
        if request.spec.activation is not None:
            return f"leaves inputs unquantised, the layer wants {request.spec.activation}"
        if not request.spec.is_float and packed_code(request.spec) is None:
            return f"does not know the code '{request.spec.code}'"
        return None


class Int8Inputs(_Native):
    """Weights of 2 to 8 bits on inputs that it quantises to int8, for each token and group; sums in a group are exact."""

    name = "cpu_int8"
    rank = 30

    @classmethod
    def why_not(cls, request: LinearRequest) -> str | None:
        if (reason := why_not(request.platform, request.dtype)) is not None:
            return reason
        code = packed_code(request.spec)
        if request.spec.activation is not None or code is None or code > U8:
            return "is for weights of 2 to 8 bits whose inputs are not quantised"
        if request.activations == "float":
            return "quantises inputs, which --cpu-activations float excludes"
        if request.activations == "auto" and code > U4:
            return "quantises inputs, which --cpu-activations auto does for weights of up to 4 bits"
        return None

    @classmethod
    def inputs_as(cls, request: LinearRequest) -> ActivationSpec | None:
        return ActivationSpec("int8", "per_weight_group", group_size=_MOST)

    @classmethod
    def _cut(cls, request: LinearRequest) -> int | None:
        return _MOST

    def _quantised(self, weight: QuantizedWeight, request: LinearRequest) -> Any:
        return native().Inputs(_PER_SEGMENT, True, 1.0, 0.0)


class W8A8(_Native):
    """Integer weights on int8 inputs, as the checkpoint wants both; sums in int32 are exact."""

    name = "cpu_w8a8"
    rank = 30

    @classmethod
    def why_not(cls, request: LinearRequest) -> str | None:
        if (reason := why_not(request.platform, request.dtype)) is not None:
            return reason
        code, activation = packed_code(request.spec), request.spec.activation
        if activation is None or activation.code != "int8" or code is None or code > U8:
            return "is for integer weights with int8 inputs"
        if activation.granularity == "per_group":
            group = request.spec.group_shape[1]
            if request.spec.act_order or not (activation.dynamic and activation.symmetric):
                return f"inputs quantised {activation} are not supported"
            if group != -1 and group % activation.group_size:
                return f"groups of {activation.group_size} inputs do not divide those of {group} weights"
        elif activation.granularity not in ("per_token", "per_tensor"):
            return f"inputs quantised {activation.granularity} are not supported"
        elif activation.dynamic == (activation.granularity == "per_tensor"):
            return f"inputs quantised {activation} are not supported"
        return None

    @classmethod
    def _cut(cls, request: LinearRequest) -> int | None:
        activation = request.spec.activation
        assert activation is not None
        return activation.group_size if activation.granularity == "per_group" else None

    def _quantised(self, weight: QuantizedWeight, request: LinearRequest) -> Any:
        activation = request.spec.activation
        assert activation is not None
        kind = _PER_SEGMENT if activation.granularity == "per_group" else _PER_TOKEN if activation.dynamic else _STATIC
        scale, zero = (
            default if tensor is None else float(tensor.to(torch.float32).reshape(()))
            for tensor, default in ((weight.input_scale, 1.0), (weight.input_zero, 0.0))
        )
        return native().Inputs(kind, activation.symmetric, scale, zero)
