"""The linear method for 8-bit weights whose inputs are quantised to 8 bits as well."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo import ActivationSpec, CheckpointError, LinearMethod, LinearRequest, QuantizedWeight
from octavo_linear_cuda.machine import why_not
from octavo_linear_cuda.packing import OUTPUTS, by_row, ceil_div
from octavo_linear_cuda.tuning import Tile, Work, tile_for

MAX_INPUTS = 131_071  # 2^31 - 1 over 128 * 128: sums of products of two int8 stay in int32
MAX_INPUTS_ASYMMETRIC = 65_535  # the zeros, times the sum of a row, may add as much again
_BLOCK = 128
_ELEMENTS = 1024
_FP8_FROM = (8, 9)


class W8A8(LinearMethod):
    """int8 on int8, or fp8 on fp8, by tensor cores: inputs scaled by token, tensor or group, weights also by group."""

    name = "cuda_w8a8"
    rank = 20

    @classmethod
    def why_not(cls, request: LinearRequest) -> str | None:
        spec, activation = request.spec, request.spec.activation
        if (reason := why_not(request.platform)) is not None:
            return reason
        if activation is None:
            return "is for layers whose inputs are quantised"
        kinds = {"int8": [f"int{bits}" for bits in range(2, 9)], "fp8_e4m3": ["fp8_e4m3"]}
        if spec.code not in kinds.get(activation.code, ()):
            return f"multiplies int8 with int8 and fp8_e4m3 with fp8_e4m3, these are {spec}"
        if spec.has_zeros or spec.act_order:
            return f"takes symmetric weights in the order of inputs, these are {spec}"
        if (reason := _why_not_inputs(activation)) is not None:
            return reason
        for group in (spec.group_shape[1], activation.group_size if activation.granularity == "per_group" else -1):
            if group != -1 and group % 32:
                return f"takes groups of multiples of 32 inputs, these are of {group}"
        limit = MAX_INPUTS if activation.symmetric else MAX_INPUTS_ASYMMETRIC
        if activation.code == "int8" and request.in_features > limit:
            return f"sums in int32, which holds {limit} inputs, these are {request.in_features}"
        if request.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"gives float16, bfloat16 or float32, not {str(request.dtype).removeprefix('torch.')}"
        return why_not(request.platform, _FP8_FROM) if activation.code == "fp8_e4m3" else None

    codes: Tensor
    scales: Tensor
    sums: Tensor | None
    bias: Tensor | None
    input_scale: Tensor | None
    input_zero: Tensor | None

    def __init__(self, weight: QuantizedWeight, request: LinearRequest) -> None:
        super().__init__(weight, request)
        spec, activation = weight.spec, weight.spec.activation
        assert activation is not None
        assert weight.scales is not None
        self._activation, self.dtype, self._platform = activation, request.dtype, request.platform
        self._outputs, self._inputs = weight.out_features, weight.in_features
        group = -1 if weight.scales.shape[1] == 1 else spec.group_shape[1]
        x_group = activation.group_size if activation.granularity == "per_group" else -1
        self._grouped = max(group, x_group) > 0
        self._block = math.gcd(_BLOCK, *(g for g in (group, x_group) if g > 0))
        self._group = group // self._block if group > 0 else 0
        self._x_group = x_group if 0 < x_group < weight.in_features else weight.in_features
        outputs, inputs = -weight.out_features % OUTPUTS, -weight.in_features % self._block
        padded = F.pad(weight.codes.view(torch.int8), (0, inputs, 0, outputs)).view(weight.codes.dtype).contiguous()
        scales = F.pad(by_row(weight, weight.scales.float()).t(), (0, outputs)).contiguous()
        sums = None
        if not activation.symmetric:
            blocks = padded.view(len(padded), -1, self._block if self._grouped else padded.shape[1])
            sums = blocks.sum(2, dtype=torch.int32).t().contiguous()
        static = not activation.dynamic
        for name, tensor in (
            ("codes", padded),
            ("scales", scales),
            ("sums", sums),
            ("bias", weight.bias),
            ("input_scale", _one_number(weight.input_scale, 1.0, padded) if static else None),
            ("input_zero", _stored_zero(weight, request) if static and not activation.symmetric else None),
        ):
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], self._outputs, dtype=self.dtype, device=x.device)
        if x.shape[0]:
            self.multiply(x, out, tile_for(self.work(x.shape[0]), self._platform))
        return out

    def work(self, rows: int) -> Work:
        """What a call with so many rows is, for the tables."""
        kernel = "w8a8" if self.codes.dtype == torch.int8 else "fp8"
        return Work(kernel, rows, self._outputs, self._inputs, self._block if self._grouped else -1)

    def multiply(self, x: Tensor, out: Tensor, tile: Tile) -> None:
        """Computes into out (rows, outputs), in tiles as given."""
        from octavo_linear_cuda.kernels.codes import code_product, scale_parts
        from octavo_linear_cuda.kernels.weights import sum_parts

        rows, bias, integers = x.shape[0], self.bias, self.codes.dtype == torch.int8
        padded_outputs, padded_inputs = self.codes.shape
        inputs, x_scales, x_zeros = self._quantised(x)
        blocks = padded_inputs // self._block
        each = ceil_div(blocks, min(tile.splits, blocks))
        splits = ceil_div(blocks, each)
        parts = out
        if splits > 1:
            kind = torch.int32 if integers and not self._grouped else torch.float32
            parts = torch.empty(splits, *out.shape, dtype=kind, device=x.device)
        code_product[(padded_outputs // tile.outputs, ceil_div(rows, tile.rows), splits)](
            inputs,
            self.codes,
            x_scales,
            x_zeros,
            self.scales,
            self.sums,
            bias,
            parts,
            rows,
            self._outputs,
            padded_inputs,
            padded_outputs,
            x_scales.shape[1],
            blocks,
            each,
            INTEGERS=integers,
            GROUPED=self._grouped,
            GROUP=self._group or blocks,
            X_GROUP=max(self._x_group // self._block, 1) if x_scales.shape[1] > 1 else blocks,
            HAS_ZEROS=self.sums is not None,
            HAS_BIAS=bias is not None,
            WIDENED=not integers and self.dtype == torch.float32,
            SPLIT=splits > 1,
            BLOCK_OUT=tile.outputs,
            BLOCK_ROWS=tile.rows,
            BLOCK_IN=self._block,
            STAGES=tile.stages,
            num_warps=tile.warps,
            enable_fp_fusion=True,
        )
        if splits > 1:
            size, block, has_bias = out.numel(), _ELEMENTS, bias is not None
            settings = {
                "SPLITS": splits,
                "HAS_BIAS": has_bias,
                "BLOCK": block,
                "num_warps": 4,
                "enable_fp_fusion": True,
            }
            grid = (ceil_div(size, block),)
            if self._grouped:
                sum_parts[grid](parts, bias, out, size, self._outputs, **settings)
            else:
                scale_parts[grid](parts, x_scales, self.scales, bias, out, size, self._outputs, **settings)

    def _quantised(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes (rows, padded inputs), scales (rows, groups) and, where inputs are asymmetric, zeros (rows,) int32."""
        from octavo_linear_cuda.kernels.codes import quantise_rows

        rows, padded = x.shape[0], self.codes.shape[1]
        groups = ceil_div(self._inputs, self._x_group)
        codes = torch.empty(rows, padded, dtype=self.codes.dtype, device=x.device)
        scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
        zeros = None if self.sums is None else torch.empty(rows, dtype=torch.int32, device=x.device)
        x = x if x.stride(1) == 1 else x.contiguous()
        quantise_rows[(rows, groups)](
            x,
            self.input_scale,
            self.input_zero,
            codes,
            scales,
            zeros,
            self._inputs,
            x.stride(0),
            padded,
            self._x_group,
            groups,
            FP8=codes.dtype != torch.int8,
            DYNAMIC=self._activation.dynamic,
            SYMMETRIC=self._activation.symmetric,
            BLOCK=min(max(1 << (self._x_group - 1).bit_length(), _BLOCK), _ELEMENTS),
            num_warps=4,
            enable_fp_fusion=True,
        )
        return codes, scales, zeros


def _why_not_inputs(activation: ActivationSpec) -> str | None:
    known = activation.symmetric or activation.code == "int8"
    if activation.granularity == "per_group":
        known = activation.dynamic and activation.symmetric and activation.group_size > 0
    elif activation.granularity != ("per_token" if activation.dynamic else "per_tensor"):
        known = False
    return None if known else f"inputs quantised as '{activation}' are not supported"


def _one_number(tensor: Tensor | None, default: float, like: Tensor) -> Tensor:
    """A scalar, () fp32."""
    if tensor is None:
        return torch.tensor(default, dtype=torch.float32, device=like.device)
    return tensor.to(torch.float32).reshape(())


def _stored_zero(weight: QuantizedWeight, request: LinearRequest) -> Tensor:
    """The zero of static inputs; raises CheckpointError where it is no int8 code, which would break the int32 bound."""
    zero = _one_number(weight.input_zero, 0.0, weight.codes)
    if not (float(zero).is_integer() and -128 <= float(zero) <= 127):
        raise CheckpointError(
            f"{request.layer}: the zero of its inputs is no int8 code", expected="-128 to 127", found=float(zero)
        )
    return zero
