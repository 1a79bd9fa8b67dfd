"""The kit bites formats that get calibrated scales: each mutant has one mistake, and the suite must name it."""

from __future__ import annotations

import pytest
import torch
from kit_subjects import Fp8KV

from octavo.attention.kv_format import LayerKV
from octavo.testing import KVFormatSuite, failures_of

DIVIDES = "test_calibrated_scales_divide_what_is_stored"
FOLDS = "test_raw_storage_with_folded_scales_equals_decoded_blocks"


class CalibratedKV(Fp8KV):
    """e5m2 with each layer's own scales, per tensor or per head."""

    name = "toy_calibrated"
    uses_scales = True

    def scale(self, layer, side):
        return getattr(self.scales[layer.index], side).reshape(-1) if self.scales else torch.ones(1)

    def write(self, layer, kv, key, value, slot_mapping):
        block, offset = slot_mapping // self.geometry.block_size, slot_mapping % self.geometry.block_size
        kv.key[block, :, offset] = self.store(key, self.scale(layer, "k")[:, None])
        kv.value[block, :, offset] = self.store(value, self.scale(layer, "v")[:, None])

    def decode(self, layer, kv, block_ids):
        sides = ((kv.key, "k"), (kv.value, "v"))
        found = (t[block_ids].float() * self.scale(layer, side)[:, None, None] for t, side in sides)
        return LayerKV(*(t.to(self.geometry.dtype) for t in found))

    def by_head(self, layer, side):
        scale = self.scale(layer, side)
        return (scale if len(scale) == 1 else scale.repeat_interleave(layer.heads // len(scale)))[:, None]

    def fold(self, layer, query):
        return query * self.by_head(layer, "k")

    def unfold(self, layer, out):
        return out * self.by_head(layer, "v")


class IgnoresScales(CalibratedKV):
    def scale(self, layer, side):
        return torch.ones(1)


class TakesTheFirstLayers(CalibratedKV):
    def scale(self, layer, side):
        return getattr(self.scales[0], side).reshape(-1) if self.scales else torch.ones(1)


class SwapsTheSides(CalibratedKV):
    def scale(self, layer, side):
        return super().scale(layer, "v" if side == "k" else "k")


class GivesHeadsInTurn(CalibratedKV):
    def by_head(self, layer, side):
        scale = self.scale(layer, side)
        return (scale if len(scale) == 1 else scale.repeat(layer.heads // len(scale)))[:, None]


class ForgetsToUnfold(CalibratedKV):
    def unfold(self, layer, out):
        return out


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (IgnoresScales, DIVIDES),
        (TakesTheFirstLayers, DIVIDES),
        (SwapsTheSides, DIVIDES),
        (GivesHeadsInTurn, FOLDS),
        (ForgetsToUnfold, FOLDS),
    ],
)
def test_mutant_is_killed(mutant, test):
    suite = type("TestMutant", (KVFormatSuite,), {"format": mutant})
    assert failures_of(suite, [test]) == [test], f"{mutant.__name__} survives {test}"


def test_original_survives():
    assert failures_of(type("TestCalibrated", (KVFormatSuite,), {"format": CalibratedKV})) == []
