"""The linear method for quantised weights and float inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import CheckpointError, LinearMethod, LinearRequest, QuantizedWeight
from octavo_linear_cuda.machine import why_not
from octavo_linear_cuda.packing import OUTPUTS, ceil_div, codes_of, layout_of, packed
from octavo_linear_cuda.tuning import Tile, Work, tile_for

_ELEMENTS = 1024
_SCALED_FIRST_ROWS = 64
"""From so many rows in a tile on, scaling each weight once is less than scaling the sums of each group."""


class WeightOnly(LinearMethod):
    """Weights of 1 to 8 bits, integers or fp8, in groups of any size and order; sums in fp32 on tensor cores."""

    name = "cuda_weight_only"
    rank = 20

    @classmethod
    def why_not(cls, request: LinearRequest) -> str | None:
        if (reason := why_not(request.platform)) is not None:
            return reason
        if request.spec.activation is not None:
            return f"leaves inputs unquantised, the layer wants {request.spec.activation}"
        if (codes := codes_of(request.spec)) is None:
            return f"is for quantised weights of at most 8 bits, not for '{request.spec.code}'"
        if request.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"computes in float16, bfloat16 or float32, not in {str(request.dtype).removeprefix('torch.')}"
        if (words := request.out_features * request.in_features * codes.bits // 32) >= 1 << 30:
            return f"holds at most 2^30 words of 32 bits in a layer, these are {words}"
        return None

    @classmethod
    def planned_bytes(cls, request: LinearRequest) -> int:
        codes = codes_of(request.spec)
        bits = 8 if codes is None else codes.bits
        outputs = -(-request.out_features // OUTPUTS) * OUTPUTS
        groups = request.spec.num_groups(request.out_features, request.in_features)[1]
        return outputs * (request.in_features * bits // 8 + groups * 2 * (1 + request.spec.has_zeros))

    codes: Tensor
    tops: Tensor | None
    scales: Tensor
    zeros: Tensor | None
    source: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: QuantizedWeight, request: LinearRequest) -> None:
        super().__init__(weight, request)
        codes = codes_of(weight.spec)
        assert codes is not None
        if codes.fp8 and bool(weight.codes.float().isnan().any()):
            raise CheckpointError(
                f"{request.layer}: weights are NaN", hint="the file is damaged; export the model again"
            )
        layout = layout_of(weight, codes)
        self._packed_as, self._layout, self.dtype = codes, layout, request.dtype
        self._outputs, self._inputs, self._platform = weight.out_features, weight.in_features, request.platform
        for name, tensor in packed(weight, codes, layout).items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], self._outputs, dtype=self.dtype, device=x.device)
        if x.shape[0]:
            self.multiply(x, out, tile_for(self.work(x.shape[0]), self._platform))
        return out

    def work(self, rows: int) -> Work:
        """What a call with so many rows is, for the tables."""
        bits, group = self._packed_as.bits, self._layout.group * self._layout.slab if self._layout.segment else -1
        return Work(f"w{bits}a{self.dtype.itemsize * 8}", rows, self._outputs, self._inputs, group)

    def multiply(self, x: Tensor, out: Tensor, tile: Tile) -> None:
        """Computes into out (rows, outputs), in tiles as given."""
        from octavo_linear_cuda.kernels.weights import reorder_inputs, sum_parts, weight_product

        rows, layout, inputs = x.shape[0], self._layout, self._inputs
        if layout.source is not None and self.source is not None:
            inputs = len(self.source)
            moved = torch.empty(rows, inputs, dtype=x.dtype, device=x.device)
            x = x if x.stride(1) == 1 else x.contiguous()
            reorder_inputs[(rows, ceil_div(inputs, _ELEMENTS))](
                x, self.source, moved, inputs, x.stride(0), BLOCK=_ELEMENTS, num_warps=4, enable_fp_fusion=True
            )
            x = moved
        elif x.stride(1) != 1:
            x = x.contiguous()
        each = ceil_div(layout.blocks, min(tile.splits, layout.blocks))
        splits = ceil_div(layout.blocks, each)
        parts = out if splits == 1 else torch.empty(splits, *out.shape, dtype=torch.float32, device=x.device)
        grid = (self.codes.shape[1] // tile.outputs, ceil_div(rows, tile.rows), splits)
        weight_product[grid](
            x,
            self.codes,
            self.tops,
            self.scales,
            self.zeros,
            self.bias,
            parts,
            rows,
            self._outputs,
            inputs,
            x.stride(0),
            self.codes.shape[1],
            layout.blocks,
            each,
            BITS=self._packed_as.bits,
            FP8=self._packed_as.fp8,
            SLAB=layout.slab,
            SLABS=self._packed_as.slabs,
            SEGMENT=layout.segment,
            GROUP=layout.group,
            HAS_ZEROS=self.zeros is not None,
            HAS_BIAS=self.bias is not None,
            SCALED_FIRST=self._scales_first(tile),
            SPLIT=splits > 1,
            BLOCK_OUT=tile.outputs,
            BLOCK_ROWS=tile.rows,
            STAGES=tile.stages,
            num_warps=tile.warps,
            enable_fp_fusion=True,
        )
        if splits > 1:
            size = out.numel()
            sum_parts[(ceil_div(size, _ELEMENTS),)](
                parts,
                self.bias,
                out,
                size,
                self._outputs,
                SPLITS=splits,
                HAS_BIAS=self.bias is not None,
                BLOCK=_ELEMENTS,
                num_warps=4,
                enable_fp_fusion=True,
            )

    def _scales_first(self, tile: Tile) -> bool:
        exact = self.dtype == torch.float32
        one_scale = self._layout.segment == 0 and self.zeros is None
        return not exact and not one_scale and tile.rows >= _SCALED_FIRST_ROWS
