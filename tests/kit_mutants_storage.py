"""KV formats and quant configs with one mistake each, and the test of the kit that must name it."""

from __future__ import annotations

from dataclasses import replace

import torch
from kit_subjects import ByteKV, Fp8KV, NibbleConfig, caught_by

from octavo.attention.kv_format import LayerKV, PlainKV
from octavo.quant.config import Golden
from octavo.quant.weight import QuantizedWeight

# --- KV formats


@caught_by("test_no_other_slot_is_touched")
class WritesOneSlotTooMany(PlainKV):
    def write(self, layer, kv, key, value, slot_mapping):
        following = (slot_mapping[-1:] + 1) % (kv.key.shape[0] * self.geometry.block_size)
        super().write(layer, kv, key[-1:], value[-1:], following)
        super().write(layer, kv, key, value, slot_mapping)


@caught_by("test_bytes_per_block_is_what_allocate_takes")
class ForgetsAboutV(PlainKV):
    def bytes_per_block(self):
        return super().bytes_per_block() // 2


@caught_by("test_bytes_per_block_is_what_allocate_takes")
class ForgetsAboutScales(ByteKV):
    def bytes_per_block(self):
        g = self.geometry
        return 2 * g.num_layers * g.kv_heads * g.block_size * g.head_dim


@caught_by("test_what_is_written_is_read")
class SwapsKeyAndValue(PlainKV):
    def write(self, layer, kv, key, value, slot_mapping):
        super().write(layer, kv, value, key, slot_mapping)


@caught_by("test_a_slot_can_be_overwritten")
class AddsToTheSlot(PlainKV):
    def write(self, layer, kv, key, value, slot_mapping):
        block, offset = slot_mapping // self.geometry.block_size, slot_mapping % self.geometry.block_size
        kv.key[block, :, offset] += key
        kv.value[block, :, offset] += value


@caught_by("test_blocks_start_zeroed")
class LeavesBlocksAsTheyAre(PlainKV):
    def allocate(self, num_blocks, device):
        kv = super().allocate(num_blocks, device)
        return LayerKV(kv.key + 1, kv.value)


@caught_by("test_tokens_are_stored_independently")
class OneScaleForAllTokens(ByteKV):
    def largest(self, x):
        return x.abs().amax((0, 2), keepdim=True)[..., 0].expand(x.shape[:2])


@caught_by("test_extreme_values_stay_finite")
class OverflowsToInfinity(Fp8KV):
    key_scale = 0.125

    def store(self, x, scale):
        return (x.float() / scale).to(self.storage)


@caught_by("test_raw_storage_with_folded_scales_equals_decoded_blocks")
class ForgetsToFold(Fp8KV):
    def fold(self, layer, query):
        return query


@caught_by("test_decode_takes_blocks_in_any_order")
class SortsBlocks(PlainKV):
    def decode(self, layer, kv, block_ids):
        return super().decode(layer, kv, block_ids.sort().values)


@caught_by("test_shapes_and_types")
class DecodesToStorage(Fp8KV):
    def decode(self, layer, kv, block_ids):
        return LayerKV(kv.key[block_ids], kv.value[block_ids])


# --- quant configs


@caught_by("test_goldens_stand_for_their_weights")
class SwapsNibblesBothWays(NibbleConfig):
    shifts = (4, 0)


@caught_by("test_goldens_stand_for_their_weights")
class ShiftsZerosBothWays(NibbleConfig):
    zero_shift = 1


@caught_by("test_random_weights_survive")
class ForgetsTheBias(NibbleConfig):
    def serialise(self, layer, weight):
        return super().serialise(layer, replace(weight, bias=None))


@caught_by("test_random_weights_survive")
class LosesTheHighestBit(NibbleConfig):
    def canonicalise(self, layer, tensors):
        weight = super().canonicalise(layer, tensors)
        return weight if layer.in_features < 8 else replace(weight, codes=weight.codes & 7)


@caught_by("test_wrong_shapes_are_refused")
class TrustsShapes(NibbleConfig):
    def spec_for(self, layer, stored):
        return super().spec_for(layer, {s: replace(t, shape=self.expected(layer)[s][1]) for s, t in stored.items()})

    def canonicalise(self, layer, tensors):
        fitted = {s: t[: layer.out_features, : self.expected(layer)[s][1][1]] for s, t in tensors.items()}
        return super().canonicalise(layer, fitted)


@caught_by("test_wrong_types_are_refused")
class TrustsTypes(NibbleConfig):
    def spec_for(self, layer, stored):
        return super().spec_for(layer, {s: replace(t, dtype=self.expected(layer)[s][0]) for s, t in stored.items()})

    def canonicalise(self, layer, tensors):
        return super().canonicalise(layer, {s: t.to(self.expected(layer)[s][0]) for s, t in tensors.items()})


@caught_by("test_a_missing_tensor_is_named")
class RaisesKeyError(NibbleConfig):
    def spec_for(self, layer, stored):
        return super().spec_for(layer, stored) if "scales" in stored else stored["scales"]


@caught_by("test_a_missing_tensor_is_named")
class TakesHalfALayerForPlain(NibbleConfig):
    def spec_for(self, layer, stored):
        return super().spec_for(layer, stored) if "packed" in stored else None


@caught_by("test_a_plain_weight_is_left_alone")
class ClaimsPlainWeights(NibbleConfig):
    def spec_for(self, layer, stored):
        return super().spec_for(layer, {} if "weight" in stored else stored) or self.goldens_spec(stored)

    def goldens_spec(self, stored):
        return replace(QuantizedWeight.from_float(torch.ones(1, 1)).spec, code="uint4")


@caught_by("test_a_foreign_weight_is_refused")
class WritesAnything(NibbleConfig):
    def serialise(self, layer, weight):
        return {"packed": weight.codes} if weight.spec.code == "kit-unknown" else super().serialise(layer, weight)


@caught_by("test_unknown_settings_are_reported")
class SwallowsSettings(NibbleConfig):
    @classmethod
    def parse(cls, source):
        return super().parse(replace(source, raw={"group_size": source.raw.get("group_size")}))


@caught_by("test_other_folders_are_not_claimed")
class ClaimsEveryFolder(NibbleConfig):
    @classmethod
    def detect(cls, source, tensors):
        return True


@caught_by("test_a_golden_does_not_read_the_same_backwards")
class ShowsAPalindrome(NibbleConfig):
    @classmethod
    def goldens(cls):
        (golden,) = super().goldens()
        tensors = {**golden.tensors, "packed": torch.full((2, 2), 0x55, dtype=torch.uint8)}
        tensors |= {"scales": torch.ones(2, 2).half(), "zeros": torch.zeros(2, 2, dtype=torch.uint8)}
        return [Golden(golden.settings, tensors, torch.full((2, 4), 5.0))]


@caught_by("test_goldens_stand_for_their_weights")
class ShowsNothing(NibbleConfig):
    @classmethod
    def goldens(cls):
        return []
