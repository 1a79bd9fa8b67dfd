"""The suite of quantizers: it passes what is right, and names each mistake."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import registry

from octavo import CalibratedGroup, QuantizedGroup, QuantizerOptions, WeightSpec
from octavo.quant.quantizer import RoundToNearest
from octavo.testing import QuantizerSuite, failures_of
from octavo.testing.check import suites_for


class TestRoundToNearest(QuantizerSuite):
    quantizer = RoundToNearest


class Rounding(RoundToNearest):
    calibrates = True


class Shouting(Rounding):
    name = "Loud"


class Mute(Rounding):
    class Options(QuantizerOptions):
        trick: int = 3


class AnnouncesOther(Rounding):
    def spec(self, layer):
        return WeightSpec("uint8", (1, self.group_size), has_zeros=True)

    def quantize(self, group):
        made = super().quantize(group)
        return replace(made, weights=tuple(replace(w, spec=replace(w.spec, code="uint4")) for w in made.weights))


class WideScales(Rounding):
    def quantize(self, group):
        made = super().quantize(group)
        return replace(made, weights=tuple(replace(w, scales=w.scales.float()) for w in made.weights))


class DividesByActivity(Rounding):
    """Does not think of channels that were never active."""

    def quantize(self, group: CalibratedGroup) -> QuantizedGroup:
        divisor = group.inputs.mean_abs
        divided = replace(group, weights=tuple(weight * divisor for weight in group.weights))
        return replace(super().quantize(divided), divisor=divisor)


class DividesEachChannel(Rounding):
    def quantize(self, group: CalibratedGroup) -> QuantizedGroup:
        divisor = torch.linspace(1, 2, group.in_features)
        divided = replace(group, weights=tuple(weight * divisor for weight in group.weights))
        return replace(super().quantize(divided), divisor=divisor)


class Forgetful(Rounding):
    def quantize(self, group: CalibratedGroup) -> QuantizedGroup:
        made = super().quantize(group)
        return replace(made, weights=tuple(replace(w, codes=torch.zeros_like(w.codes)) for w in made.weights))


class Scribbling(Rounding):
    def quantize(self, group: CalibratedGroup) -> QuantizedGroup:
        group.weights[0][0, 0] += 1
        return super().quantize(group)


class CountsThreads(Rounding):
    def quantize(self, group: CalibratedGroup) -> QuantizedGroup:
        from octavo.quant import calibration

        made = super().quantize(group)
        shift = calibration._workers[-1] if calibration._workers else 0
        return replace(made, weights=tuple(replace(w, scales=w.scales + shift) for w in made.weights))


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (Shouting, "test_names"),
        (Mute, "test_names"),
        (AnnouncesOther, "test_makes_what_it_announces"),
        (WideScales, "test_makes_what_it_announces"),
        (DividesByActivity, "test_is_finite_and_better_than_nothing"),
        (DividesByActivity, "test_divisors_are_positive_and_shared_as_they_must_be"),
        (DividesEachChannel, "test_divisors_are_positive_and_shared_as_they_must_be"),
        (Forgetful, "test_is_finite_and_better_than_nothing"),
        (Scribbling, "test_leaves_its_input_alone"),
        (CountsThreads, "test_threads_change_no_bit"),
    ],
)
def test_mutant_is_killed(mutant, test):
    suite = type(f"Test{mutant.__name__}", (QuantizerSuite,), {"quantizer": mutant})
    assert failures_of(suite, [test]) == [test]


def test_check_plugin_finds_quantizers() -> None:
    assert "TestAWQQuantizer" in suites_for(registry(), "awq")
