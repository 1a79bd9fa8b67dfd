"""How the input of a linear layer is quantised: the one definition that kernels, the reference and the kit share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.quant.weight import CODES, ActivationSpec


def why_not_quantize(activation: ActivationSpec) -> str | None:
    """Why inputs cannot be quantised so, or None if `quantize_inputs` does it."""
    if activation.code not in CODES or CODES[activation.code].low == 0:
        return f"inputs cannot be quantised to '{activation.code}'"
    if activation.granularity not in ("per_token", "per_tensor", "per_group"):
        return f"inputs cannot be quantised '{activation.granularity}'"
    if activation.granularity == "per_group" and activation.group_size < 1:
        return f"inputs cannot be quantised in groups of {activation.group_size}"
    if activation.dynamic and activation.granularity == "per_tensor":
        return "a scale over all rows would make a request's numbers depend on its neighbours"
    if not activation.dynamic and activation.granularity != "per_tensor":
        return f"static scales of inputs are per_tensor, not {activation.granularity}"
    if not activation.symmetric and activation.code != "int8":
        return f"asymmetric inputs are int8, not {activation.code}"
    return None


def quantize_inputs(
    x: Tensor, activation: ActivationSpec, input_scale: Tensor | None = None, input_zero: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x (tokens, in_features) -> codes alike, scales fp32 and, for asymmetric inputs, zeros fp32: x ~ scales * (codes - zeros).

    Scales are (tokens, 1) or (tokens, groups), zeros alike or, where static, (1, 1); a last group may be short. A dynamic
    scale is the largest magnitude over the largest code, or the range, 0 included, over 255; it is 1 where all inputs are 0.
    Any scale is NaN where an input is. Values round half to even and saturate. `input_scale` and `input_zero` hold one number
    and are for static activations.
    """
    code = CODES[activation.code]
    wide = x.to(torch.float32)
    tiles = wide.unsqueeze(1)
    if activation.granularity == "per_group":
        size = activation.group_size
        tiles = F.pad(wide, (0, -wide.shape[1] % size)).reshape(len(wide), -(-wide.shape[1] // size), size)
    zeros: Tensor | None = None
    if not activation.dynamic:
        assert input_scale is not None
        scales = input_scale.to(torch.float32).reshape(1, 1)
        scales = torch.where(tiles.isnan().any(2), torch.nan, scales)  # no code stands for NaN, so the scale must
        if not activation.symmetric:
            zeros = torch.zeros(1, 1) if input_zero is None else input_zero.to(torch.float32).reshape(1, 1)
            zeros = zeros.to(scales.device)
    else:
        if activation.symmetric:
            scales = tiles.abs().amax(2) / code.high
        else:
            low, high = tiles.amin(2).clamp(max=0), tiles.amax(2).clamp(min=0)
            scales = (high - low) / (code.high - code.low)
            zeros = torch.round(code.low - low / torch.where(scales == 0, 1.0, scales))
        scales = torch.where(scales == 0, 1.0, scales)  # NaN stays, so that the row's result is NaN too
    scaled = tiles / scales.unsqueeze(-1)
    if not code.dtype.is_floating_point:
        scaled = scaled.round() if zeros is None else (scaled + zeros.unsqueeze(-1)).round()
    codes = scaled.clamp(code.low, code.high).to(code.dtype)
    return codes.flatten(1)[:, : x.shape[1]].contiguous(), scales, zeros


def dequantize_inputs(codes: Tensor, scales: Tensor, zeros: Tensor | None, activation: ActivationSpec) -> Tensor:
    """The numbers (tokens, in_features), fp32, that the result of `quantize_inputs` stands for."""
    values = codes.to(torch.float32)

    def expand(groups: Tensor) -> Tensor:
        if activation.granularity != "per_group":
            return groups
        return groups.repeat_interleave(activation.group_size, dim=1)[:, : codes.shape[1]]

    return (values if zeros is None else values - expand(zeros)) * expand(scales)
