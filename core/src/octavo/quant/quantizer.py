"""The contract of a quantizer: float linears that share an input in, `QuantizedWeight`s out; and the simplest one.

A quantizer knows neither models nor files. Core's driver runs calibration text through the decoder, group of linears by group,
and hands over the weights with what it saw of their input; what comes back is written by the format that holds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

from octavo.errors import ConfigError
from octavo.quant.calibration import InputStatistics
from octavo.quant.weight import CODES, LinearLayer, QuantizedWeight, WeightSpec

ScaleDtype = Literal["float16", "bfloat16", "float32"]
_USUAL_GROUPS = (128, 64, 32)


class QuantizerOptions(BaseModel):
    """What users may set of a quantizer: fields are flags (`--set NAME=VALUE`, recipes), descriptions their help."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bits: int = Field(4, ge=2, le=8, description="Bits of a code.")
    group_size: int | None = Field(
        None,
        description="Inputs that share a scale; -1: all of a layer. Default: the largest of 128, 64, 32 that divides the "
        "inputs of all layers.",
    )
    symmetric: bool = Field(False, description="Groups have scales only, no zeros.")
    scale_dtype: ScaleDtype = Field("float16", description="Type in which scales are stored.")

    @field_validator("group_size")
    @classmethod
    def _check_group_size(cls, value: int | None) -> int | None:
        if value is not None and value != -1 and value < 1:
            raise ValueError("must be -1 (one group over all inputs) or positive")
        return value


@dataclass(frozen=True, slots=True)
class CalibratedGroup:
    """Float linears that read one input: q, k and v; o; gate and up; down; the head.

    `weights` (out, in) fp32, one for each of `layers`, are not to be changed in place. `inputs` is what calibration saw of the
    input, None without calibration. `producers` (in,) int64: where the input may be divided by a factor for each channel
    (the producer, a norm or a linear, absorbs it), channels with the same number must share it; None: it may not. `norm` (in,)
    is the producer's weight in the type that stores it, where it is a norm.
    """

    layers: tuple[LinearLayer, ...]
    weights: tuple[Tensor, ...]
    inputs: InputStatistics | None = None
    producers: Tensor | None = None
    norm: Tensor | None = None

    @property
    def in_features(self) -> int:
        return self.layers[0].in_features

    def storable(self, divisor: Tensor) -> Tensor:
        """The divisor (in,) fp32 near to `divisor` that a norm absorbs without rounding its stored weight; others stay."""
        if self.norm is None:
            return divisor.float()
        wide = self.norm.float()
        exact = wide / (wide / divisor).to(self.norm.dtype).float()
        return torch.where(torch.isfinite(exact) & (exact > 0), exact, 1.0)

    def statistics(self) -> InputStatistics:
        """`inputs`; raises ConfigError that names the layer where there are none."""
        if self.inputs is None:
            raise ConfigError(f"{self.layers[0].name}: this method needs calibration inputs, and none were taken")
        return self.inputs


@dataclass(frozen=True, slots=True)
class QuantizedGroup:
    """What a quantizer makes of a group: `weights` (without bias) for inputs that are x / `divisor` (in,), x without one.

    `notes` are fallbacks that a user should know of, "rounded to nearest: ..."; the driver names the layers.
    """

    weights: tuple[QuantizedWeight, ...]
    divisor: Tensor | None = None
    notes: tuple[str, ...] = ()


class Quantizer(ABC):
    """One algorithm, with its options, for one model. It holds nothing of the layers that it has seen.

    The same input must give the same bits: sums in one order, `parallel_map` instead of threads of torch's (the driver has set
    them to one).
    """

    name: ClassVar[str]
    """What `--method` and recipes call it."""
    target: ClassVar[str]
    """The format that is written if the user names none: one of `QuantConfig.targets`."""
    Options: ClassVar[type[QuantizerOptions]] = QuantizerOptions
    needs: frozenset[str] = frozenset()
    """Of "gram", "cross" and "sample", what `InputStatistics` must hold. May be set by the constructor."""
    calibrates: bool = True
    """Whether calibration text is run at all."""
    propagates: bool = True
    """Whether inputs come through what was quantised before. May be set by the constructor."""

    def __init__(self, options: QuantizerOptions, layers: Sequence[LinearLayer]) -> None:
        """`layers` are all that will come. Raises ConfigError, naming one, where they and the options do not fit."""
        self.options, self.layers = options, tuple(layers)
        self.group_size = common_group(layers) if options.group_size is None else options.group_size
        self.scale_dtype: torch.dtype = getattr(torch, options.scale_dtype)
        for layer in layers:
            if self.group_size != -1 and layer.in_features % self.group_size:
                raise ConfigError(
                    f"{layer.name}: group_size {self.group_size} does not divide its {layer.in_features} inputs"
                )

    def spec(self, layer: LinearLayer) -> WeightSpec:
        """What `quantize` makes of a layer. By default unsigned integers with zeros, in groups of inputs."""
        return WeightSpec(f"uint{self.options.bits}", (1, self.group_size), has_zeros=True)

    @abstractmethod
    def quantize(self, group: CalibratedGroup) -> QuantizedGroup:
        """Weights of `spec(layer)` for each layer of the group, whose scales are of `scale_dtype`.

        Finite for any finite weights and statistics: groups that are all zero, channels that were never active, a Gram
        matrix that is singular, no tokens at all. What it then does instead is told in `notes`.
        """


def common_group(layers: Sequence[LinearLayer]) -> int:
    """The largest of the usual group sizes that divides the inputs of all layers, -1 where none does."""
    return next((size for size in _USUAL_GROUPS if all(layer.in_features % size == 0 for layer in layers)), -1)


class RoundToNearest(Quantizer):
    """Min-max scales per group and rounding to nearest even: needs no calibration data."""

    name = "rtn"
    target = "gptq"
    calibrates = False

    def quantize(self, group: CalibratedGroup) -> QuantizedGroup:
        weights = []
        for layer, weight in zip(group.layers, group.weights, strict=True):
            spec = replace(self.spec(layer), has_zeros=not self.options.symmetric)
            weights.append(round_to_nearest(weight, spec, self.scale_dtype))
        return QuantizedGroup(tuple(weights))


def rounded_spec(spec: WeightSpec) -> WeightSpec:
    """The spec of what `round_to_nearest` makes: unsigned codes get zeros, the midpoint where none are wanted."""
    return replace(spec, has_zeros=spec.has_zeros or CODES[spec.code].low == 0, act_order=False)


def round_to_nearest(weight: Tensor, spec: WeightSpec, scale_dtype: torch.dtype = torch.float32) -> QuantizedWeight:
    """Quantises a float weight (out, in) to `rounded_spec(spec)`.

    The range of each group includes 0; it is symmetric unless the spec has zeros. Codes are nearest for the scales as stored; a
    group that is all zero, or whose scale vanishes in `scale_dtype`, gets scale 1 and decodes to exact zeros if it is zero.
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
        scales = stored_scales((high - low) / code.high, scale_dtype)
        zeros = torch.round(-low / scales.float()).clamp(code.low, code.high)
    else:
        middle = 2 ** (int(code.high).bit_length() - 1) if code.low == 0 else 0
        scales = stored_scales(torch.maximum(-low, high) / (code.high - middle), scale_dtype)
        zeros = torch.full_like(scales, float(middle), dtype=torch.float32)
    scaled = tiles / scales.float()[:, None, :, None] + zeros[:, None, :, None]
    if not code.dtype.is_floating_point:
        scaled = scaled.round()
    codes = scaled.clamp(code.low, code.high).to(code.dtype).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    made = rounded_spec(spec)
    return QuantizedWeight(made, codes.contiguous(), scales, zeros if made.has_zeros else None)


def stored_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in the type that stores them, 1 where they are 0 there; clamped to its largest number."""
    stored = scales.clamp(max=torch.finfo(dtype).max).to(dtype)
    return torch.where(stored > 0, stored, torch.ones_like(stored))
