"""The elementwise kernels of a decoder: the contract that a plugin may fill, and its torch default."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from octavo.model.embedding import Embedding
from octavo.platforms import Platform
from octavo.quant.weight import QuantizedWeight

_GELU = math.sqrt(2 / math.pi)


class FusedOps(ABC):
    """One set of elementwise kernels; the willing set of the highest `rank` serves the whole model.

    Inputs may be views with any row stride (parts of a fused q|k|v); `cos` and `sin` are fp32.
    """

    name: ClassVar[str]
    rank: ClassVar[int]

    @classmethod
    @abstractmethod
    def why_not(cls, platform: Platform, dtype: torch.dtype) -> str | None:
        """None if these kernels run here in this compute type, else a sentence."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x (..., size) / rms(x) * weight (size,), the mean in fp32."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""

    @abstractmethod
    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of x (tokens, heads, head_dim) in half-split pairs, by cos and sin (tokens, rotary_dim / 2)."""

    @abstractmethod
    def gated(self, gate_up: Tensor, activation: str, divisor: Tensor | None = None) -> Tensor:
        """activation(gate) * up / divisor (size,), for gate_up (tokens, 2 * size); "silu", "gelu" or "gelu_tanh"."""

    def gather(self, table: Tensor, indices: Tensor) -> Tensor:
        """Rows (tokens, size) of a table (n, size), by indices (tokens,) int64."""
        return table.index_select(0, indices)

    def embedding(self, weight: QuantizedWeight, dtype: torch.dtype) -> Embedding:
        """The table of token embeddings, prepared for rows in the compute type. A tied head is made of its `weight`."""
        return Embedding(QuantizedWeight.from_float(weight.codes.to(dtype)) if weight.spec.is_float else weight, dtype)


class TorchOps(FusedOps):
    """Plain torch, on any device: the reference."""

    name = "torch"
    rank = 0

    @classmethod
    def why_not(cls, platform: Platform, dtype: torch.dtype) -> str | None:
        return None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
        left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1)

    def gated(self, gate_up: Tensor, activation: str, divisor: Tensor | None = None) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        # F.silu and F.gelu round otherwise in the last elements of a tensor or of a thread's share, exp, tanh and erf do not
        wide = gate.float()
        if activation == "silu":
            factor = 1 / (1 + torch.exp(-wide))
        elif activation == "gelu_tanh":
            factor = 0.5 * (1 + torch.tanh(_GELU * (wide + 0.044715 * wide * wide * wide)))
        else:
            factor = 0.5 * (1 + torch.erf(wide * math.sqrt(0.5)))
        gated = (wide * factor).to(gate.dtype) * up
        return gated if divisor is None else gated / divisor
