"""Normalisation, rotary embedding, gating and rows of tables: one launch each."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import Embedding, FusedOps, Platform, QuantizedWeight
from octavo_paged_attn_cuda.support import COMPUTE_TYPES, power_of_two, why_not

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
"""As kernels.elementwise numbers them."""
_ELEMENTS = 2048
"""Of a program, about, where its rows are shorter or can be cut."""


class TritonOps(FusedOps):
    """Sums and functions in fp32; results are rounded where torch's would be, except that `rotate` rounds once."""

    name = "triton"
    rank = 20

    @classmethod
    def why_not(cls, platform: Platform, dtype: torch.dtype) -> str | None:
        return why_not(platform, dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm, sum); the sum is x where nothing is added."""
        from octavo_paged_attn_cuda.kernels import elementwise

        x = rows_joined(x)
        out = _like(x)
        total = x if residual is None else _like(x)
        residual = None if residual is None else rows_joined(residual)
        tokens, size = len(x), x.shape[-1]
        inner, width = x[0].numel() // size if tokens else 1, power_of_two(size)
        rows = min(power_of_two(inner), max(1, _ELEMENTS // width))
        if tokens:
            elementwise.rms_norm[(tokens, -(-inner // rows))](
                *(out, total, x, x.stride(0), residual, 0 if residual is None else residual.stride(0), weight, eps),
                INNER=inner,
                SIZE=size,
                ROWS=rows,
                WIDTH=width,
                num_warps=4 if rows * width <= 2 * _ELEMENTS else 8,
                enable_fp_fusion=True,
            )
        return out, total

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from octavo_paged_attn_cuda.kernels import elementwise

        x = rows_joined(x)
        tokens, heads, head_dim = x.shape
        out, half = _like(x), cos.shape[-1]
        rest, width = head_dim - 2 * half, power_of_two(half)
        rows = min(power_of_two(heads), max(1, _ELEMENTS // (2 * width)))
        cos, sin = cos.contiguous(), sin.contiguous()
        if tokens:
            elementwise.rotate[(tokens, -(-heads // rows))](
                *(out, x, x.stride(0), cos, sin, cos.stride(0)),
                HEADS=heads,
                HEAD_DIM=head_dim,
                HALF=half,
                REST=rest,
                ROWS=rows,
                WIDTH=width,
                REST_WIDTH=power_of_two(max(rest, 1)),
                num_warps=4,
                enable_fp_fusion=True,
            )
        return out

    def gated(self, gate_up: Tensor, activation: str, divisor: Tensor | None = None) -> Tensor:
        from octavo_paged_attn_cuda.kernels import elementwise

        gate_up = rows_joined(gate_up)
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
        width = min(power_of_two(size), _ELEMENTS // 2)
        if tokens:
            elementwise.gated[(tokens, -(-size // width))](
                *(out, gate_up, gate_up.stride(0), divisor),
                SIZE=size,
                ACTIVATION=_ACTIVATIONS[activation],
                WIDTH=width,
                num_warps=4,
                enable_fp_fusion=True,
            )
        return out

    def gather(self, table: Tensor, indices: Tensor) -> Tensor:
        return _rows(table, indices, table.dtype) if table.dtype in COMPUTE_TYPES else super().gather(table, indices)

    def embedding(self, weight: QuantizedWeight, dtype: torch.dtype) -> Embedding:
        return TritonEmbedding(weight, dtype) if weight.spec.is_float else super().embedding(weight, dtype)


class TritonEmbedding(Embedding):
    """The table in the type in which it is stored; rows are converted as they are read."""

    def forward(self, token_ids: Tensor) -> Tensor:
        return _rows(self.weight.codes, token_ids, self.dtype)


def _rows(table: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    from octavo_paged_attn_cuda.kernels import elementwise

    table = rows_joined(table)
    rows, size = len(indices), table.shape[1]
    out = torch.empty((rows, size), dtype=dtype, device=table.device)
    width = min(power_of_two(size), _ELEMENTS)
    if rows:
        elementwise.gather[(rows, -(-size // width))](
            *(out, table, table.stride(0), indices), SIZE=size, WIDTH=width, num_warps=4, enable_fp_fusion=True
        )
    return out


def rows_joined(x: Tensor) -> Tensor:
    """x (tokens, ...) whose tokens may lie apart, but nothing within one."""
    return x if x[:1].is_contiguous() else x.contiguous()


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
