"""`--auto-bits`: how many bits each group of linears gets, so that the model loses least at a given size.

What a group of linears would lose is measured: it is rounded to nearest with each number of bits, and the share of its outputs'
power that is lost over calibration text is weighed with how much its block (attention, MLP) adds to the residual stream.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.front.recipe import Assignment, Recipe
from octavo.model.layerwise import ROLES, LayerwiseModel
from octavo.model.loader import progress
from octavo.model.plan import ModelPlan
from octavo.quant.calibration import gram_loss
from octavo.quant.quantizer import Quantizer, round_to_nearest
from octavo.quant.weight import LinearLayer, QuantizedWeight, WeightSpec

logger = logging.getLogger(__name__)

_ENDS = {"qkv": "o", "o": "o", "gate_up": "down", "down": "down"}
"""The linear whose output a role's block adds to the stream."""
_MOST_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Choice:
    """One group with so many bits: what it costs in bits of file, and the harm that it does."""

    bits: int
    size: float
    harm: float


def choose_bits(
    plan: ModelPlan, recipe: Recipe, assignment: Assignment, average: float, choices: Sequence[int], tokens: Tensor
) -> dict[LinearLayer, int]:
    """Bits for each layer whose rule names none, `average` bits a weight in all, scales included.

    Raises ConfigError where not even the fewest bits fit.
    """
    fixed = {layer for layer, number in assignment.rules.items() if "bits" in recipe.rules[number].options}
    free = {layer: q for layer, q in assignment.quantizers.items() if layer not in fixed and layer in _decoder(plan)}
    if not free:
        raise ConfigError("--auto-bits: every layer that is quantised has a number of bits already")
    few = tokens[: max(1, _MOST_TOKENS // tokens.shape[1])]
    options = _measure(plan, free, sorted(choices), few)
    weights = sum(layer.in_features * layer.out_features for layer in free)
    chosen = spend(options, average * weights)
    if chosen is None:
        least = sum(one[0].size for one in options.values()) / weights
        raise ConfigError(f"--auto-bits {average}: the fewest bits, scales included, are {least:.3f} a weight")
    counts: dict[int, int] = {}
    for label, bits in chosen.items():
        logger.info("--auto-bits: %s gets %d", label, bits)
        counts[bits] = counts.get(bits, 0) + 1
    told = ", ".join(f"{count} of {bits} bits" for bits, count in sorted(counts.items()))
    logger.info("--auto-bits: of %d groups of layers, %s", len(chosen), told)
    found: dict[LinearLayer, int] = {}
    for index in range(plan.config.num_layers):
        for group in plan.layer_names(index).linears.values():
            found |= {layer: chosen[group.label] for layer in group.layers if layer in free}
    return found


def spend(options: Mapping[str, Sequence[Choice]], budget: float) -> dict[str, int] | None:
    """Bits by group for at most `budget` bits of file: from the fewest on, always the step that helps most for its size.

    `options` are in order of bits. None where the fewest do not fit.
    """
    place = dict.fromkeys(options, 0)
    spent = sum(one[0].size for one in options.values())
    if spent > budget:
        return None
    while True:
        steps = []
        for label, one in options.items():
            here = one[place[label]]
            for number in range(place[label] + 1, len(one)):
                there = one[number]
                gain = here.harm - there.harm
                if gain > 0 and spent + there.size - here.size <= budget:
                    steps.append((gain / (there.size - here.size), label, number))
        if not steps:
            return {label: one[place[label]].bits for label, one in options.items()}
        _, label, number = max(steps, key=lambda step: (step[0], step[1]))
        spent += options[label][number].size - options[label][place[label]].size
        place[label] = number


def _decoder(plan: ModelPlan) -> set[LinearLayer]:
    groups = (group for i in range(plan.config.num_layers) for group in plan.layer_names(i).linears.values())
    return {layer for group in groups for layer in group.layers}


def _measure(
    plan: ModelPlan, free: Mapping[LinearLayer, Quantizer], choices: Sequence[int], tokens: Tensor
) -> dict[str, list[Choice]]:
    # the first token of a text is often an attention sink whose stream is many times the others'
    model = LayerwiseModel(plan, tokens, quantised=False, floating=True, skip=min(1, tokens.shape[1] - 1), folder=None)
    options: dict[str, list[Choice]] = {}
    with progress("measuring sensitivity", plan.config.num_layers, plan.settings.disable_progress) as advance:
        for index in range(plan.config.num_layers):
            floats = model.open_layer(index)
            grams: dict[str, Tensor] = {}
            groups = plan.layer_names(index).linears
            for role in ROLES:
                label = groups[role].label
                needs = {"floating": frozenset({"gram"})}
                gram = model.collect(role, groups[role].layers[0].in_features, needs, label)["floating"].gram
                assert gram is not None
                grams[role] = gram.float()
            model.close_layer()
            stream = sum(float(model.counted(part).double().square().sum()) for part in model.hidden("floating"))
            added = {end: _power(floats[groups[end].layers[0]].codes, grams[end]) for end in ("o", "down")}
            for role in ROLES:
                members = [layer for layer in groups[role].layers if layer in free]
                if members:
                    share = added[_ENDS[role]] / stream
                    options[groups[role].label] = _choices(members, free, floats, grams[role], share, choices)
            advance()
    return options


def _choices(
    members: Sequence[LinearLayer],
    free: Mapping[LinearLayer, Quantizer],
    floats: Mapping[LinearLayer, QuantizedWeight],
    gram: Tensor,
    share: float,
    choices: Sequence[int],
) -> list[Choice]:
    found = []
    whole = sum(_power(floats[layer].codes, gram) for layer in members)
    for bits in choices:
        lost = size = 0.0
        for layer in members:
            quantizer, weight = free[layer], floats[layer].codes
            asymmetric = not quantizer.options.symmetric
            spec = WeightSpec(f"uint{bits}", (1, quantizer.group_size), has_zeros=asymmetric)
            made = round_to_nearest(weight, spec, quantizer.scale_dtype)
            assert made.scales is not None
            lost += _power(made.dequantize() - weight, gram)
            beside = quantizer.scale_dtype.itemsize * 8 + (bits if asymmetric else 0)
            size += weight.numel() * bits + made.scales.numel() * beside
        found.append(Choice(bits, size, share * lost / whole if whole else 0.0))
    return found


def _power(weight: Tensor, gram: Tensor) -> float:
    with torch.inference_mode():
        return float(gram_loss(weight, gram))
