"""Makes W8A8 weights: smooths the inputs of linears (SmoothQuant), then rounds inputs and weights to int8.

Xiao et al., "SmoothQuant", arXiv 2211.10438: dividing input channels by a factor, and multiplying the weight's columns by it,
moves outliers from inputs, which are hard to round, into weights, which are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from octavo import (
    ActivationSpec,
    CalibratedGroup,
    ConfigError,
    InputStatistics,
    LinearLayer,
    QuantizedGroup,
    QuantizedWeight,
    Quantizer,
    QuantizerOptions,
    Rounding,
    WeightSpec,
    compensated_rounding,
    gram_loss,
    quantize_inputs,
    round_to_nearest,
)

_HIGHEST = 127
_ALPHAS = tuple(step / 10 for step in range(11))
_RANGES = tuple(1 - step / 20 for step in range(13))
_MIDDLE = 128


class W8A8Options(QuantizerOptions):
    """What users may set of W8A8."""

    bits: int = Field(8, ge=8, le=8, description="Bits of a code: 8.")
    group_size: int | None = Field(-1, ge=-1, le=-1, description="Inputs that share a scale: -1, all of a layer.")
    symmetric: bool = Field(True, description="Weights have scales only; kernels want nothing else.")
    scale_dtype: Literal["float16", "bfloat16", "float32"] = Field(
        "float32", description="Type in which scales are stored."
    )
    alpha: float | None = Field(
        None, ge=0, le=1, description="How much of the outliers moves into the weights; none: searched for each group."
    )
    smooth: bool = Field(
        True, description="Moves outliers of inputs into the weights, where what comes before can take it."
    )
    compensate: bool = Field(True, description="Rounds weights as GPTQ does; false: to nearest.")
    activations: Literal["dynamic", "static"] = Field(
        "dynamic", description="Scales of inputs: computed for each token, or one number from calibration."
    )
    symmetric_inputs: bool = Field(True, description="Inputs have no zero points.")
    damp: float = Field(0.01, ge=0, le=10, description="Added to the diagonal of the Gram matrix, times its mean.")
    sweeps: int = Field(1, ge=0, le=100, description="How often codes and scales are improved in turn after rounding.")


@dataclass(frozen=True, slots=True)
class _Inputs:
    """How a group's inputs are rounded: the stored scale and zero if they are static, and the noise (in,) that it makes.

    `noise` is the mean of each channel's squared error of rounding.
    """

    noise: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None


class W8A8Quantizer(Quantizer):
    """SmoothQuant with a searched exponent, and int8 weights with a scale for each output.

    Rounding inputs adds noise of a known size to each channel. Weights are fitted to noisy inputs: their Gram matrix is that of
    the inputs plus the noise on its diagonal.
    """

    name = "w8a8"
    target = "compressed-tensors"
    Options = W8A8Options
    needs = frozenset({"gram", "sample"})

    def __init__(self, options: QuantizerOptions, layers: Sequence[LinearLayer]) -> None:
        super().__init__(options, layers)
        assert isinstance(options, W8A8Options)
        if not options.symmetric:
            raise ConfigError("w8a8: asymmetric int8 weights run in no kernel; leave symmetric at true")
        self._options = options
        static = options.activations == "static"
        self._activation = ActivationSpec(
            "int8", "per_tensor" if static else "per_token", not static, options.symmetric_inputs
        )

    def spec(self, layer: LinearLayer) -> WeightSpec:
        return WeightSpec("int8", (1, -1), activation=self._activation)

    def quantize(self, group: CalibratedGroup) -> QuantizedGroup:
        seen, whole, notes = group.statistics(), torch.cat(group.weights), []
        if seen.tokens == 0:
            notes.append("rounded to nearest: no token of the calibration text reached it")
            if self._options.activations == "static":
                notes.append("its static input scale is a guess, 1/127")
        divisor = self._divisor(group, seen, whole) if self._options.smooth and seen.tokens else None
        if divisor is not None:
            whole, seen = whole * divisor, seen.divided(divisor)
        inputs = self._inputs(seen, whole)
        codes, scales = self._round(whole, seen, inputs, notes)
        weights, start = [], 0
        for layer, weight in zip(group.layers, group.weights, strict=True):
            rows = slice(start, start + len(weight))
            start = rows.stop
            weights.append(
                QuantizedWeight(
                    self.spec(layer),
                    codes[rows].contiguous(),
                    scales[rows].contiguous(),
                    input_scale=inputs.scale,
                    input_zero=inputs.zero,
                )
            )
        return QuantizedGroup(tuple(weights), divisor, tuple(notes))

    # --- smoothing

    def _divisor(self, group: CalibratedGroup, seen: InputStatistics, weight: Tensor) -> Tensor | None:
        """The factor (in,) that inputs are divided by, None where none is allowed or none is better than none."""
        if group.producers is None:
            return None
        largest = _shared(seen.largest, group.producers)
        widest = _shared(weight.abs().amax(0), group.producers)
        if self._options.alpha is not None:
            return group.storable(_factor(largest, widest, self._options.alpha))
        best, least = None, self._loss(seen, weight)
        for alpha in _ALPHAS:
            divisor = group.storable(_factor(largest, widest, alpha))
            if (loss := self._loss(seen.divided(divisor), weight * divisor)) < least:
                best, least = divisor, loss
        return best

    def _loss(self, seen: InputStatistics, weight: Tensor) -> float:
        """The mean squared error of the outputs for one token: of rounding weights, and of rounding inputs."""
        assert seen.gram is not None
        rounded = round_to_nearest(weight, WeightSpec("int8", (1, -1))).dequantize()
        of_weights = gram_loss(rounded - weight, seen.gram.float()) / seen.tokens
        return float(of_weights + self._inputs(seen, weight).noise @ weight.square().sum(0))

    # --- inputs

    def _inputs(self, seen: InputStatistics, weight: Tensor) -> _Inputs:
        if seen.sample is None or not len(seen.sample):
            one = torch.ones(1) / _HIGHEST
            static = self._options.activations == "static"
            return _Inputs(
                torch.zeros(weight.shape[1]), one if static else None, _zero(self._activation, torch.zeros(1))
            )
        if self._options.activations == "dynamic":
            return _Inputs(self._noise(seen.sample))
        low, high = seen.low.min().clamp(max=0), seen.high.max().clamp(min=0)
        importance, best, least = weight.square().sum(0), None, torch.inf
        for part in _RANGES:
            scale, zero = self._static(part * low, part * high)
            noise = self._noise(seen.sample, scale, zero)
            if best is None or float(noise @ importance) < least:
                best, least = _Inputs(noise, scale, zero), float(noise @ importance)
        assert best is not None
        return best

    def _static(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scale and zero, each (1,), of one range for all inputs."""
        if self._activation.symmetric:
            scale = torch.maximum(-low, high) / _HIGHEST
            return torch.where(scale > 0, scale, 1.0).reshape(1), None
        scale = (high - low) / 255
        scale = torch.where(scale > 0, scale, 1.0)
        return scale.reshape(1), _zero(self._activation, torch.round(-128 - low / scale).clamp(-128, 127).reshape(1))

    def _noise(self, x: Tensor, scale: Tensor | None = None, zero: Tensor | None = None) -> Tensor:
        """The mean squared error (in,) of rounding inputs x (rows, in)."""
        codes, scales, zeros = quantize_inputs(x, self._activation, scale, zero)
        values = codes.float() if zeros is None else codes.float() - zeros
        return (values * scales - x).square().mean(0)

    # --- weights

    def _round(self, weight: Tensor, seen: InputStatistics, inputs: _Inputs, notes: list[str]) -> tuple[Tensor, Tensor]:
        """int8 codes (out, in) and scales (out, 1)."""
        options = self._options
        if not options.compensate or seen.tokens == 0:
            rounded = round_to_nearest(weight, WeightSpec("int8", (1, -1)), self.scale_dtype)
            assert rounded.scales is not None
            return rounded.codes, rounded.scales
        assert seen.gram is not None
        noise = torch.diag(inputs.noise.double()) * seen.tokens
        rounding = Rounding(
            8, True, -1, self.scale_dtype, "importance", sweeps=options.sweeps, damp=options.damp, shift=1.0
        )
        found = compensated_rounding(weight, seen.gram + noise, rounding, -noise)
        if found.damp is None:
            notes.append("rounded to nearest: its Gram matrix is singular with any damping")
        elif found.damp > options.damp:
            notes.append(f"its Gram matrix is singular: damping {found.damp:g} instead of {options.damp:g}")
        return (found.codes.to(torch.int16) - _MIDDLE).to(torch.int8), found.scales


def _shared(values: Tensor, producers: Tensor) -> Tensor:
    """The largest value (in,) among channels that one producer feeds."""
    largest = values.new_zeros(int(producers.max()) + 1).scatter_reduce_(0, producers, values, "amax")
    return largest[producers]


def _factor(largest: Tensor, widest: Tensor, alpha: float) -> Tensor:
    """largest^alpha / widest^(1 - alpha) (in,), around 1; 1 for channels that are 0 in inputs or weights."""
    factor = largest.double() ** alpha / widest.double() ** (1 - alpha)
    usable = (largest > 0) & (widest > 0) & torch.isfinite(factor) & (factor > 0)
    logs = torch.where(usable, factor, 1.0).log()
    centre = logs[usable].mean() if bool(usable.any()) else logs.new_zeros(())
    return torch.where(usable, (logs - centre).clamp(-12, 12).exp(), 1.0).float()


def _zero(activation: ActivationSpec, zero: Tensor) -> Tensor | None:
    return None if activation.symmetric or activation.dynamic else zero
