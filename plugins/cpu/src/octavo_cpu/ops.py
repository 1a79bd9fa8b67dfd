"""Normalisation, rotary embedding, gating and rows of tables."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import Embedding, FusedOps, Platform, QuantizedWeight
from octavo_cpu.native import STORAGE, native, result, rows_of, why_not
from octavo_cpu.packing import pack, packed_code

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


class NativeOps(FusedOps):
    """One native call each."""

    name = "cpu"
    rank = 30

    @classmethod
    def why_not(cls, platform: Platform, dtype: torch.dtype) -> str | None:
        return why_not(platform, dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, size = x.shape[0], x.shape[-1]
        x = rows_of(x)
        out = result(rows, *x.shape[1:])
        inner = x[0].numel() // size if rows else 1
        native().rms_norm(x.data_ptr(), x.stride(0), rows, inner, size, size, weight.data_ptr(), eps, out.data_ptr())
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, residual = rows_of(x), rows_of(residual)
        rows, size = x.shape
        out, total = result(rows, size), result(rows, size)
        native().add_rms_norm(
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            rows,
            size,
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            total.data_ptr(),
        )
        return out, total

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = rows_of(x)
        rows, heads, head_dim = x.shape
        out = result(rows, heads, head_dim)
        half, stride = cos.shape[-1], cos.stride(0)
        native().rotate(
            x.data_ptr(),
            x.stride(0),
            rows,
            heads,
            head_dim,
            half,
            cos.data_ptr(),
            sin.data_ptr(),
            stride,
            out.data_ptr(),
        )
        return out

    def gated(self, gate_up: Tensor, activation: str, divisor: Tensor | None = None) -> Tensor:
        gate_up = rows_of(gate_up)
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = result(rows, size)
        by = 0 if divisor is None else divisor.data_ptr()
        native().gated(gate_up.data_ptr(), gate_up.stride(0), rows, size, _ACTIVATIONS[activation], by, out.data_ptr())
        return out

    def gather(self, table: Tensor, indices: Tensor) -> Tensor:
        if table.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return super().gather(table, indices)
        table = rows_of(table)
        out = result(len(indices), table.shape[1])
        native().gather(
            table.data_ptr(),
            STORAGE[table.dtype],
            table.stride(0),
            table.shape[1],
            indices.data_ptr(),
            len(indices),
            out.data_ptr(),
        )
        return out

    def embedding(self, weight: QuantizedWeight, dtype: torch.dtype) -> Embedding:
        return NativeEmbedding(weight, self)


class NativeEmbedding(Embedding):
    """The table in the type in which it is stored, or packed; rows become fp32 as they are read."""

    def __init__(self, weight: QuantizedWeight, ops: NativeOps) -> None:
        super().__init__(weight, torch.float32)
        self._ops = ops
        spec = weight.spec
        self._packed = None if spec.is_float or packed_code(spec) is None else pack(weight)
        if self._packed is not None:
            for name, tensor in self._packed.tensors.items():
                self.register_buffer(name, tensor)

    def forward(self, token_ids: Tensor) -> Tensor:
        if self._packed is None:
            if not self.weight.spec.is_float:
                return super().forward(token_ids)
            return self._ops.gather(self.weight.codes, token_ids)
        out = result(len(token_ids), self.weight.in_features)
        native().gather_packed(self._packed.handle, token_ids.data_ptr(), len(token_ids), out.data_ptr())
        return out
