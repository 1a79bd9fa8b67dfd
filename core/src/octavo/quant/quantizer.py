"""The contract of a quantizer (float weight in, `QuantizedWeight` out) and the simplest one, rounding to nearest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from octavo.quant.weight import CODES, LinearLayer, QuantizedWeight, WeightSpec


class Quantizer(ABC):
    """Turns the float weight of one layer into codes and scales of a given spec."""

    name: ClassVar[str]

    @abstractmethod
    def quantize(self, layer: LinearLayer, weight: Tensor, spec: WeightSpec, inputs: Tensor | None) -> QuantizedWeight:
        """weight (out_features, in_features) -> codes of `spec`; `inputs` (tokens, in_features) are calibration inputs.

        Must return finite scales for any finite weight, also for groups that are all zero. Raises ConfigError that names
        the layer where the spec is not one it can produce.
        """


class RoundToNearest(Quantizer):
    """Min-max scales per group and rounding to nearest even: needs no calibration data."""

    name = "rtn"

    def quantize(
        self, layer: LinearLayer, weight: Tensor, spec: WeightSpec, inputs: Tensor | None = None
    ) -> QuantizedWeight:
        return round_to_nearest(weight, spec)


def rounded_spec(spec: WeightSpec) -> WeightSpec:
    """The spec of what `round_to_nearest` makes: unsigned codes get zeros, the midpoint where none are wanted."""
    return replace(spec, has_zeros=spec.has_zeros or CODES[spec.code].low == 0, act_order=False)


def round_to_nearest(weight: Tensor, spec: WeightSpec) -> QuantizedWeight:
    """Quantises a float weight (out, in) to `rounded_spec(spec)`.

    The range of each group includes 0; it is symmetric unless the spec has zeros. Scales are fp32; a group that is all zero
    gets scale 1 and decodes to exact zeros.
    """
    code = CODES[spec.code]
    rows, columns = weight.shape
    out_group = rows if spec.group_shape[0] == -1 else spec.group_shape[0]
    in_group = columns if spec.group_shape[1] == -1 else spec.group_shape[1]
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % in_group, 0, -rows % out_group))
    tiles = padded.view(-(-rows // out_group), out_group, -(-columns // in_group), in_group)
    low = tiles.amin(dim=(1, 3)).clamp(max=0)
    high = tiles.amax(dim=(1, 3)).clamp(min=0)
    asymmetric = spec.has_zeros and code.low == 0
    if asymmetric:
        scales = (high - low) / code.high
        scales = torch.where(scales > 0, scales, 1.0)
        zeros = torch.round(-low / scales).clamp(code.low, code.high)
    else:
        middle = 2 ** (int(code.high).bit_length() - 1) if code.low == 0 else 0
        scales = torch.maximum(-low, high) / (code.high - middle)
        scales = torch.where(scales > 0, scales, 1.0)
        zeros = torch.full_like(scales, float(middle))
    scaled = tiles / scales[:, None, :, None] + zeros[:, None, :, None]
    if not code.dtype.is_floating_point:
        scaled = scaled.round()
    codes = scaled.clamp(code.low, code.high).to(code.dtype).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    made = rounded_spec(spec)
    return QuantizedWeight(made, codes.contiguous(), scales, zeros if made.has_zeros else None)
