"""int8 weights in torch: `Int8Method` for int8 inputs, whose sums are exact, and `Int8WeightMethod` for float ones.

With int8 inputs A and weights B, scales sa and sb, and the inputs' zeros za, which are 0 where they are symmetric:
y[m, n] = sa[m] * sb[n] * (sum_k A[m, k] * B[n, k] - za[m] * sum_k B[n, k]) + bias[n]. What is in parentheses is int32 and
exact, so a row's result does not depend on the rows beside it; the rest is fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo import CheckpointError, LinearMethod, LinearRequest, QuantizedWeight, quantize_inputs, row_product

MAX_INPUTS = 131_071  # 2^31 - 1 over 128 * 128: sums of products of two int8 stay in int32
MAX_INPUTS_ASYMMETRIC = 65_535  # the zeros, times the sum of a row, may add as much again
_TILE = 2**18  # weights that are widened at a time: 1 MiB as fp32, which stays in a core's cache
_CHUNK = 1024  # products of at most 128 * 128 whose sums fp32 holds exactly, in any order: 2^24

Product = Callable[[Tensor, Tensor], Tensor]
"""(tokens, in) int8 and (out, in) int8 -> (tokens, out) int32, exact."""


class Int8Method(LinearMethod):
    """int8 x int8 by `torch._int_mm`, or by exact fp32 products of 1024 inputs at a time where torch has no working one."""

    name = "int8_torch"
    rank = 10
    batch_invariant: ClassVar[bool] = True

    @classmethod
    def why_not(cls, request: LinearRequest) -> str | None:
        spec, activation = request.spec, request.spec.activation
        if spec.code != "int8" or spec.has_zeros or spec.act_order:
            return f"computes symmetric int8 weights, these are {spec}"
        if activation is None or activation.code != "int8":
            return f"computes int8 inputs, these are {activation or 'not quantised'}"
        if spec.group_shape[1] != -1:
            return f"takes one scale for each output or all, these are groups of {spec.group_shape[1]} inputs"
        if activation.granularity != ("per_token" if activation.dynamic else "per_tensor"):
            kind = "dynamic" if activation.dynamic else "static"
            return f"takes inputs scaled per token, or per tensor by a stored scale, these are {kind} {activation.granularity}"
        limit = MAX_INPUTS if activation.symmetric else MAX_INPUTS_ASYMMETRIC
        if request.in_features > limit:
            return f"sums in int32, which holds {limit} inputs, these are {request.in_features}"
        product_for(request.platform.device)
        return None

    @classmethod
    def planned_bytes(cls, request: LinearRequest) -> int:
        activation = request.spec.activation
        asymmetric = activation is not None and not activation.symmetric
        rows, columns = _padded(request.platform.device, request.out_features, request.in_features)
        return rows * columns + 4 * request.out_features * (1 + request.has_bias + asymmetric)

    codes: Tensor
    scales: Tensor
    sums: Tensor | None
    bias: Tensor | None
    input_scale: Tensor | None
    input_zero: Tensor | None

    def __init__(self, weight: QuantizedWeight, request: LinearRequest) -> None:
        super().__init__(weight, request)
        activation, out = weight.spec.activation, weight.out_features
        assert activation is not None
        self._activation, self._dtype, self._out = activation, request.dtype, out
        self._product = product_for(request.platform.device)
        scales, bias = _epilogue(weight)
        sums = None if activation.symmetric else weight.codes.sum(dim=1, dtype=torch.int32).reshape(1, -1)
        input_scale, input_zero = weight.input_scale, None
        if activation.dynamic:
            input_scale = None
        elif sums is not None:
            input_zero = _stored_zero(weight, request)
            sums = sums * input_zero.to(torch.int32)  # folded once: what each output subtracts
        rows, columns = _padded(request.platform.device, out, weight.in_features)
        codes = F.pad(weight.codes, (0, columns - weight.in_features, 0, rows - out))
        for name, value in (("codes", codes.contiguous()), ("scales", scales), ("sums", sums), ("bias", bias)):
            self.register_buffer(name, value)
        self.register_buffer("input_scale", input_scale)
        self.register_buffer("input_zero", input_zero)

    def forward(self, x: Tensor) -> Tensor:
        inputs, scales, zeros = quantize_inputs(x, self._activation, self.input_scale, self.input_zero)
        sums = self._product(inputs, self.codes)[:, : self._out]
        if self.sums is not None and zeros is not None:
            sums = sums - (self.sums if self.input_zero is not None else zeros.to(torch.int32) * self.sums)
        result = sums.to(torch.float32).mul_(scales).mul_(self.scales)
        if self.bias is not None:
            result += self.bias
        return result.to(self._dtype)


class Int8WeightMethod(LinearMethod):
    """int8 weights and float inputs on a CPU: widens the codes tile by tile, multiplies, scales the sums.

    Faster than dequantising a whole layer before each product, because no widened weight leaves the cache.
    """

    name = "int8_weight_torch"
    rank = 10
    batch_invariant: ClassVar[bool] = True

    @classmethod
    def why_not(cls, request: LinearRequest) -> str | None:
        spec = request.spec
        if request.platform.device != "cpu":
            return f"is made for the caches of CPUs, this is {request.platform.device}"
        if spec.code != "int8" or spec.has_zeros or spec.act_order or spec.group_shape[1] != -1:
            return f"computes symmetric int8 weights with one scale for each output or all, these are {spec}"
        return None if spec.activation is None else f"leaves inputs as they are, the layer wants {spec.activation}"

    @classmethod
    def planned_bytes(cls, request: LinearRequest) -> int:
        return request.out_features * (request.in_features + 4 * (1 + request.has_bias))

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, weight: QuantizedWeight, request: LinearRequest) -> None:
        super().__init__(weight, request)
        self._dtype, self._rows = request.dtype, max(1, _TILE // weight.in_features)
        scales, bias = _epilogue(weight)
        for name, value in (("codes", weight.codes.contiguous()), ("scales", scales), ("bias", bias)):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        tiles = [self.codes[start : start + self._rows] for start in range(0, len(self.codes), self._rows)]
        result = torch.cat([row_product(wide, tile.to(torch.float32).t()) for tile in tiles], dim=1).mul_(self.scales)
        if self.bias is not None:
            result += self.bias
        return result.to(self._dtype)


def _epilogue(weight: QuantizedWeight) -> tuple[Tensor, Tensor | None]:
    """Scales and bias in fp32, each (1, out): what is done to the sums of a row."""
    assert weight.scales is not None
    out = weight.out_features
    group = out if weight.spec.group_shape[0] == -1 else weight.spec.group_shape[0]
    scales = weight.scales.to(torch.float32).reshape(1, -1).repeat_interleave(group, dim=1)[:, :out].contiguous()
    return scales, None if weight.bias is None else weight.bias.to(torch.float32).reshape(1, -1)


def _stored_zero(weight: QuantizedWeight, request: LinearRequest) -> Tensor:
    """The zero of static inputs, (); raises CheckpointError where it is no int8 code, which would break the int32 bound."""
    if weight.input_zero is None:
        return torch.zeros((), device=weight.codes.device)
    zero = weight.input_zero.to(torch.float32).reshape(())
    if not (float(zero).is_integer() and -128 <= float(zero) <= 127):
        raise CheckpointError(
            f"{request.layer}: the zero of its inputs is no int8 code", expected="-128 to 127", found=float(zero)
        )
    return zero


def _padded(device: str, rows: int, columns: int) -> tuple[int, int]:
    """The shape in which a weight is kept: CUDA's integer product wants both sizes to be multiples of 8."""
    return (rows, columns) if device == "cpu" else (-(-rows // 8) * 8, -(-columns // 8) * 8)


@cache
def product_for(device: str) -> Product:
    """The fastest exact product of this build of torch on a kind of device; each is tried on small layers before."""
    fast = int_mm if device == "cpu" else int_mm_padded
    return fast if is_exact(fast, device) else chunked


def is_exact(product: Product, device: str) -> bool:
    """Whether a product exists and sums exactly, also where every product is as large as it can be.

    Products of int8 that take a detour over saturating int16 sums (x86 without VNNI, say) fail at the extremes only.
    """
    generator = torch.Generator().manual_seed(0)
    for tokens, inputs, outputs in ((1, 64, 48), (7, 96, 8), (17, 1032, 40), (64, 256, 264), (3, 97, 33)):
        if device != "cpu":
            inputs, outputs = -(-inputs // 8) * 8, -(-outputs // 8) * 8
        for low, high in ((-128, 128), (-128, -127), (127, 128)):
            left = torch.randint(low, high, (tokens, inputs), generator=generator).to(torch.int8)
            right = torch.randint(-128, high, (outputs, inputs), generator=generator).to(torch.int8)
            try:
                found = product(left.to(device), right.to(device)).cpu()
            except (RuntimeError, AttributeError, AssertionError):  # not built, or not for these sizes
                return False
            if not torch.equal(found.long(), left.long() @ right.long().t()):
                return False
    return True


def int_mm(inputs: Tensor, codes: Tensor) -> Tensor:
    """`torch._int_mm` as CPUs have it: any sizes."""
    return torch._int_mm(inputs, codes.t())


def int_mm_padded(inputs: Tensor, codes: Tensor) -> Tensor:
    """`torch._int_mm` as CUDA has it: more than 16 rows and a multiple of 8 of them and of inputs; zeros add nothing."""
    tokens = inputs.shape[0]
    rows = max(24, -(-tokens // 8) * 8)
    return torch._int_mm(F.pad(inputs, (0, codes.shape[1] - inputs.shape[1], 0, rows - tokens)), codes.t())[:tokens]


def chunked(inputs: Tensor, codes: Tensor) -> Tensor:
    """Exact fp32 products of at most 1024 inputs each, added in int32: every partial sum is a whole number below 2^24."""
    total = torch.zeros(inputs.shape[0], codes.shape[0], dtype=torch.int32, device=inputs.device)
    inputs = F.pad(inputs, (0, codes.shape[1] - inputs.shape[1]))
    for start in range(0, codes.shape[1], _CHUNK):
        part = slice(start, start + _CHUNK)
        total += (inputs[:, part].to(torch.float32) @ codes[:, part].to(torch.float32).t()).to(torch.int32)
    return total
