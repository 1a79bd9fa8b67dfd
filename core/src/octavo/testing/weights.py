"""Random weights of any spec, for suites and for tiny models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octavo.quant.quantizer import round_to_nearest
from octavo.quant.weight import CODES, QuantizedWeight, WeightSpec

FIELDS = ("codes", "scales", "zeros", "group_index", "input_scale", "input_zero", "bias")
"""The tensors of a `QuantizedWeight`."""


def random_weight(
    spec: WeightSpec,
    out_features: int,
    in_features: int,
    generator: torch.Generator,
    *,
    zeros: str = "real",
    scale_dtype: torch.dtype = torch.float32,
    balanced: bool = True,
) -> QuantizedWeight:
    """A weight of `spec` with codes over their whole range and products of about 1.

    `zeros` is "real" (not integers), "integer" or "midpoint". Act-order groups are a random permutation of k // group;
    unless `balanced`, they differ in size, as they do after a slice. Static activation scales are made where the spec has them.
    """

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    shape = (out_features, in_features)
    norm = in_features**-0.5
    if spec.is_float:
        return QuantizedWeight(spec, (torch.randn(shape, generator=generator) * norm).to(scale_dtype))
    code = CODES[spec.code]
    if code.dtype.is_floating_point:
        codes = (torch.randn(shape, generator=generator) * code.high / 4).clamp(code.low, code.high).to(code.dtype)
    else:
        codes = torch.randint(int(code.low), int(code.high) + 1, shape, generator=generator).to(code.dtype)
    groups = [1 if group == -1 else -(-size // group) for size, group in zip(shape, spec.group_shape, strict=True)]
    scales = ((uniform(*groups) + 0.5) * norm / code.high).to(scale_dtype)
    zero = None
    if spec.has_zeros:
        zero = code.low + uniform(*groups) * (code.high - code.low)
        if zeros == "integer":
            zero = zero.round()
        elif zeros == "midpoint":
            zero = torch.full_like(zero, float((code.low + code.high + 1) // 2))
    weight = QuantizedWeight(spec, codes, scales, zero, random_group_index(spec, in_features, generator, balanced))
    if spec.activation is None or spec.activation.dynamic:
        return weight
    largest = 127.0 if spec.activation.code == "int8" else 448.0
    shift = None if spec.activation.symmetric else torch.tensor([5.0])
    return replace(weight, input_scale=torch.tensor([2.5 / largest]), input_zero=shift)


def random_group_index(
    spec: WeightSpec, in_features: int, generator: torch.Generator, balanced: bool = True
) -> Tensor | None:
    """A random `group_index` (in_features,) for act-order specs, None for others."""
    if not spec.act_order:
        return None
    group = in_features if spec.group_shape[1] == -1 else spec.group_shape[1]
    if not balanced:
        return torch.randint(0, -(-in_features // group), (in_features,), generator=generator, dtype=torch.int32)
    return (torch.randperm(in_features, generator=generator) // group).to(torch.int32)


def quantise(weight: Tensor, spec: WeightSpec, generator: torch.Generator) -> QuantizedWeight:
    """Rounds a float weight (out, in) to `spec` like `round_to_nearest`, with random groups for act-order specs."""
    if not spec.act_order:
        return round_to_nearest(weight, spec)
    order = torch.randperm(weight.shape[1], generator=generator)
    rounded = round_to_nearest(weight[:, order], replace(spec, act_order=False))
    back = order.argsort()
    group = weight.shape[1] if spec.group_shape[1] == -1 else spec.group_shape[1]
    index = (back // group).to(torch.int32)
    act_order = replace(rounded.spec, act_order=True)
    return replace(rounded, spec=act_order, codes=rounded.codes[:, back].contiguous(), group_index=index)


def on_device(weight: QuantizedWeight, device: str) -> QuantizedWeight:
    """The same weight with all tensors on `device`."""
    tensors = {name: value for name in FIELDS if (value := getattr(weight, name)) is not None}
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors.items()}
    return replace(weight, **moved)
