"""What a linear kernel must compute, in float64, and how far from it a result may be: for the self-test and the kit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from octavo.quant.weight import CODES, ActivationSpec, QuantizedWeight

_SUM_ERROR = 2.0**-19
"""Of fp32 sums in any order, as a share of the sum of magnitudes: 32 units in the last place."""


def expected_product(
    x: Tensor, weight: QuantizedWeight, bias: bool, dtype: torch.dtype, inputs_as: ActivationSpec | None = None
) -> tuple[Tensor, Tensor]:
    """The product (rows, out_features) in float64, and how far from it a kernel may be that reads inputs as `inputs_as`.

    A kernel may round weights, bias and result to `dtype`, once each (so 2 units in the last place of their magnitude); codes,
    zeros and scales it must combine, and sums it must keep, in fp32 or better (2^-19 of the sum of magnitudes).
    Where inputs are quantised, either neighbour of a tie is right.
    """
    ulp = torch.finfo(dtype).eps / 2
    tiny = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    wide = weight.dequantize().double()
    values, slack = x.double(), None
    if inputs_as is not None:
        weight = replace(weight, spec=replace(weight.spec, activation=inputs_as))
    if weight.spec.activation is not None:
        values, slack = quantised_inputs(x, weight)
    shift = weight.bias.double() if bias and weight.bias is not None else torch.zeros_like(wide[:, 0])
    product = values @ wide.t() + shift
    magnitude = values.abs() @ wide.abs().t() + shift.abs()
    summed = values.abs() @ _summand(weight).t() + shift.abs()
    tolerance = 2 * ulp * (magnitude + product.abs()) + _SUM_ERROR * summed
    tolerance += tiny * (values.abs().sum(1, keepdim=True) + 1)
    if slack is not None:
        tolerance += slack @ wide.abs().t()
    return product, tolerance


def _summand(weight: QuantizedWeight) -> Tensor:
    """|scale| * (|code| + |zero|): what a kernel sums that takes zeros out of the product."""
    if weight.scales is None or weight.zeros is None:
        return weight.dequantize().double().abs()
    only_codes = replace(weight, spec=replace(weight.spec, has_zeros=False), zeros=None)
    only_zeros = replace(weight, codes=torch.zeros_like(weight.codes))
    return only_codes.dequantize().double().abs() + only_zeros.dequantize().double().abs()


def quantised_inputs(x: Tensor, weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """x (rows, in_features) as its quantised values in float64, and by how much each may differ after a rounding tie.

    Dynamic scales are the largest magnitude over the largest code (asymmetric: the range, 0 included, over 255), values are
    rounded half to even and clamped; a range of zero gives zeros.
    """
    values = _quantised(x, weight, 1.0)
    nudged = [(_quantised(x, weight, 1.0 + step) - values).abs() for step in (-1e-6, 1e-6)]
    noise = 4e-6 * values.abs()  # the nudge itself, where no tie is crossed
    slack = torch.maximum(*nudged)
    return values, torch.where(slack > noise, slack, 0.0)


def _quantised(x: Tensor, weight: QuantizedWeight, nudge: float) -> Tensor:
    activation = weight.spec.activation
    assert activation is not None
    if activation.granularity == "per_weight_group":
        return _quantised_by_segment(x, weight, activation, nudge)
    code = CODES[activation.code]
    wide = x.double()
    size = activation.group_size if activation.granularity == "per_group" else wide.shape[1]
    rest = -wide.shape[1] % size
    padded = torch.nn.functional.pad(wide, (0, rest))
    groups = padded.view(len(wide), -1, size)
    zero = torch.zeros_like(groups[..., :1])
    if not activation.dynamic:
        assert weight.input_scale is not None
        scale = weight.input_scale.double().reshape(1, 1, 1) * nudge
        if weight.input_zero is not None:
            zero = weight.input_zero.double().reshape(1, 1, 1)
    elif activation.symmetric:
        scale = groups.abs().amax(-1, keepdim=True) / code.high * nudge
    else:
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / 255 * nudge
        zero = (-128 - low / torch.where(scale > 0, scale, 1.0)).round()
    scale = torch.where(scale > 0, scale, 1.0)
    scaled = groups / scale + zero
    if not code.dtype.is_floating_point:
        scaled = scaled.round()
    codes = scaled.clamp(code.low, code.high)
    if code.dtype.is_floating_point:
        codes = codes.float().to(code.dtype).double()
    return ((codes - zero) * scale / nudge).flatten(1)[:, : wide.shape[1]]


def _quantised_by_segment(x: Tensor, weight: QuantizedWeight, activation: ActivationSpec, nudge: float) -> Tensor:
    """Symmetric and dynamic, a scale for each token and segment of inputs."""
    values, code = torch.empty_like(x, dtype=torch.float64), CODES[activation.code]
    for columns in weight_segments(weight, activation.group_size):
        part = x[:, columns].double()
        scale = part.abs().amax(1, keepdim=True) / code.high * nudge
        scale = torch.where(scale > 0, scale, 1.0)
        values[:, columns] = (part / scale).round().clamp(code.low, code.high) * scale / nudge
    return values


def weight_segments(weight: QuantizedWeight, most: int) -> list[Tensor]:
    """The inputs of each group of a weight, in the order of groups, a group of more than `most` cut into several."""
    size, group = weight.in_features, weight.spec.group_shape[1]
    index = weight.group_index
    if index is None:
        index = torch.arange(size) // (size if group == -1 else group)
    order = index.cpu().long().argsort(stable=True)
    ends = index.cpu().long().bincount().cumsum(0).tolist()
    bounds = [
        (start, min(start + most, end)) for first, end in pairwise([0, *ends]) for start in range(first, end, most)
    ]
    return [order[start:end] for start, end in bounds]
