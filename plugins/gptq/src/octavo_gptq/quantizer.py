"""Makes GPTQ weights: which options there are, and what becomes of a group of linears. The mathematics are core's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from octavo import (
    CalibratedGroup,
    ConfigError,
    LinearLayer,
    QuantizedGroup,
    QuantizedWeight,
    Quantizer,
    QuantizerOptions,
    Rounding,
    WeightSpec,
    compensated_rounding,
)
from octavo_gptq.writing import why_not


class GPTQOptions(QuantizerOptions):
    """What users may set of GPTQ."""

    bits: Literal[2, 3, 4, 8] = Field(4, description="Bits of a code: 2, 3, 4 or 8.")
    symmetric: bool = Field(True, description="Zeros are the middle of the codes; false: each group has its own.")
    desc_act: bool = Field(
        False, description="Groups are formed in the order of the inputs' importance (act-order, stored as g_idx)."
    )
    group_aware: bool = Field(
        True, description="Rounds by importance inside groups that stay as they lie, so that g_idx is trivial."
    )
    static_groups: bool = Field(False, description="Groups and scales are those of the weight as it came.")
    search: bool = Field(True, description="Chooses scales by the error that they cause, not by the range alone.")
    sweeps: int = Field(2, ge=0, le=100, description="How often codes and scales are improved in turn afterwards.")
    damp: float = Field(0.01, ge=0, le=10, description="Added to the diagonal of the Gram matrix, times its mean.")
    gptaq: float = Field(
        0.0, ge=0, le=1, description="The part of the change of inputs by earlier layers that is made up for (GPTAQ)."
    )


class GPTQQuantizer(Quantizer):
    """GPTQ (arXiv 2210.17323) with group-aware order, searched scales, refinement and, if asked for, GPTAQ (arXiv 2504.02692).

    GPTAQ is solved exactly: Q is to give, from inputs X, what W gives from the float model's X'. The best real-valued weight
    for that, W' = W + W (X' - X)^T X (X^T X)^-1, is rounded like any other.
    """

    name = "gptq"
    target = "gptq"
    Options = GPTQOptions

    def __init__(self, options: QuantizerOptions, layers: Sequence[LinearLayer]) -> None:
        super().__init__(options, layers)
        assert isinstance(options, GPTQOptions)
        self._options = options
        self.needs = frozenset({"gram", "cross"} if options.gptaq else {"gram"})
        for layer in layers:
            if (reason := why_not(layer, self.spec(layer))) is not None:
                raise ConfigError(f"{layer.name}: GPTQ cannot hold this layer: {reason}")

    def spec(self, layer: LinearLayer) -> WeightSpec:
        options = self._options
        ordered = options.desc_act and not options.static_groups and self.group_size not in (-1, layer.in_features)
        return WeightSpec(f"uint{options.bits}", (1, self.group_size), has_zeros=True, act_order=ordered)

    def quantize(self, group: CalibratedGroup) -> QuantizedGroup:
        inputs, rounding, notes = group.statistics(), self._rounding, []
        gram = inputs.gram
        if inputs.tokens == 0 or gram is None:
            gram, rounding = torch.eye(group.in_features, dtype=torch.float64), replace(rounding, sweeps=0, shift=0.0)
            notes.append("rounded to nearest: no token of the calibration text reached it")
        made = compensated_rounding(torch.cat(group.weights), gram, rounding, inputs.cross)
        if made.damp is None:
            notes.append("rounded to nearest: its Gram matrix is singular with any damping")
        elif made.damp > rounding.damp:
            notes.append(f"its Gram matrix is singular: damping {made.damp:g} instead of {rounding.damp:g}")
        sizes = [layer.out_features for layer in group.layers]
        parts = zip(group.layers, *(torch.split(t, sizes) for t in (made.codes, made.scales, made.zeros)), strict=True)
        weights = [QuantizedWeight(self.spec(layer), c, s, z, made.group_index) for layer, c, s, z in parts]
        return QuantizedGroup(tuple(weights), notes=tuple(notes))

    @property
    def _rounding(self) -> Rounding:
        options = self._options
        return Rounding(
            options.bits,
            options.symmetric,
            self.group_size,
            self.scale_dtype,
            "importance" if options.desc_act else "group" if options.group_aware else "none",
            options.static_groups,
            options.search,
            options.sweeps,
            options.damp,
            options.gptaq,
        )
