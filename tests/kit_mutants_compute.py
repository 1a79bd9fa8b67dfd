"""Linear methods and attention backends with one mistake each, and the test of the kit that must name it."""

from __future__ import annotations

from dataclasses import replace

import torch
from kit_subjects import Int8Method, PagedToy, Small, caught_by

from octavo.attention.reference import ReferenceAttention

# --- linear methods


@caught_by("test_product_of_float_inputs")
class ZeroOffByOne(Small):
    def change(self, weight):
        return weight if weight.zeros is None else replace(weight, zeros=weight.zeros + 1)


@caught_by("test_product_of_float_inputs")
class IgnoresZeros(Small):
    def change(self, weight):
        return weight if weight.zeros is None else replace(weight, zeros=torch.full_like(weight.zeros, 8.0))


@caught_by("test_product_of_float_inputs")
class RoundsZeros(Small):
    def change(self, weight):
        return weight if weight.zeros is None else replace(weight, zeros=weight.zeros.round())


@caught_by("test_product_of_float_inputs")
class IgnoresGroupIndex(Small):
    def change(self, weight):
        if weight.group_index is None:
            return weight
        return replace(weight, spec=replace(weight.spec, act_order=False), group_index=None)


@caught_by("test_product_of_float_inputs")
class AssumesGroupsOfEqualSize(Small):
    def change(self, weight):
        if weight.group_index is None:
            return weight
        size = max(weight.spec.group_shape[1], 1)
        ranks = weight.group_index.argsort(stable=True).argsort()
        return replace(weight, group_index=(ranks // size).clamp(max=weight.scales.shape[1] - 1))


@caught_by("test_product_of_float_inputs")
class DropsBias(Small):
    def change(self, weight):
        return replace(weight, bias=None)


@caught_by("test_product_of_float_inputs")
class RoundsGroupCountDown(Small):
    def change(self, weight):
        whole = weight.in_features // max(weight.spec.group_shape[1], 1)
        if weight.scales.shape[1] < 2 or weight.group_index is not None or whole == weight.scales.shape[1]:
            return weight
        scales = weight.scales.clone()
        scales[:, whole:] = scales[:, whole - 1 : whole]
        return replace(weight, scales=scales)


@caught_by("test_product_of_float_inputs")
class TakesCodesForContiguous(Small):
    def change(self, weight):
        return replace(weight, codes=torch.as_strided(weight.codes, weight.codes.shape, (weight.in_features, 1)))


@caught_by("test_product_of_float_inputs")
class SumsInHalfPrecision(Small):
    def forward(self, x):
        return super().forward(x.bfloat16().float())


@caught_by("test_product_of_float_inputs")
class SkipsTheLastTileOfPrompts(Small):
    def forward(self, x):
        return super().forward(x.where(torch.arange(len(x))[:, None] < 128, 0))


@caught_by("test_product_of_float_inputs")
class ReturnsFp32(Small):
    dtypes = (torch.bfloat16,)

    def forward(self, x):
        return super().forward(x).float()


@caught_by("test_strided_inputs")
class TakesInputForContiguous(Small):
    def forward(self, x):
        return super().forward(torch.as_strided(x, x.shape, (x.shape[1], 1)))


@caught_by("test_a_row_ignores_its_neighbours")
class ScalesByTheBatch(Small):
    def forward(self, x):
        largest = x.abs().max() if len(x) else 1.0
        return super().forward(x / largest) * largest if self.bias is None else super().forward(x)


@caught_by("test_a_row_ignores_its_neighbours")
class LeaksNaN(Small):
    def forward(self, x):
        return super().forward(x) + 0 * x.sum()


@caught_by("test_keeps_no_state")
class RemembersTheLastInput(Small):
    def forward(self, x):
        last, self.last = getattr(self, "last", None), x.clone()
        return super().forward(x if last is None or last.shape != x.shape else last)


@caught_by("test_keeps_no_state")
class SharesAnOutputBuffer(Small):
    def forward(self, x):
        result = super().forward(x)
        if not hasattr(self, "buffer"):
            self.buffer = x.new_empty(4096, result.shape[1])
        self.buffer[: len(x)] = result
        return self.buffer[: len(x)]


@caught_by("test_modifies_nothing")
class ScalesInputInPlace(Small):
    def forward(self, x):
        return super().forward(x.clone().mul_(1.0)) if x.numel() == 0 else super().forward(x.mul_(2)) * 0.5


@caught_by("test_modifies_nothing")
class ShiftsZerosInPlace(Small):
    def change(self, weight):
        kept = replace(weight, zeros=None if weight.zeros is None else weight.zeros.clone())
        if weight.zeros is not None:
            weight.zeros.sub_(8)
        return kept


@caught_by("test_no_rows")
class FailsWithoutRows(Small):
    def forward(self, x):
        assert len(x)
        return super().forward(x)


@caught_by("test_a_row_alone_equals_the_row_in_a_batch")
class DeclaresMoreThanItKeeps(Small):
    batch_invariant = True

    def forward(self, x):
        return super().forward(x) if len(x) != 1 else super().forward(x.flip(1).flip(1) * 1.0000001)


@caught_by("test_a_row_alone_equals_the_row_in_a_batch")
class KeepsBitsOnlyAlone(Small):
    batch_invariant = True

    def forward(self, x):
        return super().forward(x) if len(x) in (1, 64) else super().forward(x * 1.0000001)


@caught_by("test_refuses_what_has_no_meaning")
class RefusesNothing(Small):
    @classmethod
    def why_not(cls, request):
        return None if request.spec.code in ("uint4", "kit-unknown") else "computes with uint4 only"


@caught_by("test_refuses_what_has_no_meaning")
class RaisesInsteadOfRefusing(Small):
    @classmethod
    def why_not(cls, request):
        return {"uint4": None, "int8": "is a different code"}[request.spec.code]


@caught_by("test_refuses_what_has_no_meaning")
class RefusesWithoutAReason(Small):
    @classmethod
    def why_not(cls, request):
        return "" if super().why_not(request) else None


@caught_by("test_accepts_a_layer")
class RefusesEverything(Small):
    @classmethod
    def why_not(cls, request):
        return "does not feel like it"


@caught_by("test_a_row_ignores_its_neighbours")
class OneScaleForTheBatch(Int8Method):
    def scales(self, x):
        return super().scales(x).amax(0, keepdim=True).expand(len(x), 1)


@caught_by("test_product_of_quantised_inputs")
class CutsInsteadOfRounding(Int8Method):
    def round(self, x):
        return x.trunc()


@caught_by("test_product_of_quantised_inputs")
class DividesZeroByZero(Int8Method):
    def scales(self, x):
        return x.abs().amax(-1, keepdim=True) / 127


# --- attention backends


@caught_by("test_decode")
class ReadsUnwrittenSlots(PagedToy):
    def gather(self, blocks, length):
        whole = blocks.transpose(1, 2).flatten(0, 1).float()
        return whole[:length] + 0 * whole[-1]


@caught_by("test_blocks_that_left_the_window_are_not_read")
class MasksWhatLeftTheWindow(PagedToy):
    def gather(self, blocks, length):
        whole = super().gather(blocks, length)
        return whole + 0 * whole[0]


@caught_by("test_heads_share_kv_heads")
class InterleavesHeads(PagedToy):
    def kv_head(self, layer, head):
        return head % layer.kv_heads


@caught_by("test_sliding_window")
class IgnoresTheWindow(PagedToy):
    def visible(self, layer, position):
        return 0, position + 1


@caught_by("test_sliding_window")
class WindowOffByOne(PagedToy):
    def visible(self, layer, position):
        first, stop = super().visible(layer, position)
        return (max(0, first - 1), stop) if layer.sliding_window else (first, stop)


@caught_by("test_prefill")
class SeesTheNextToken(PagedToy):
    def visible(self, layer, position):
        first, stop = super().visible(layer, position)
        return first, stop + 1


@caught_by("test_decode_and_chunked_prefill_in_one_step")
class StartsEachChunkAtZero(PagedToy):
    def positions(self, length, query_len):
        return range(length - 1, length) if query_len == 1 else range(query_len)


@caught_by("test_scale")
class IgnoresTheScale(PagedToy):
    def scores(self, layer, scores):
        return super().scores(replace(layer, scale=layer.head_dim**-0.5), scores)


@caught_by("test_soft_cap")
class IgnoresTheSoftCap(PagedToy):
    def scores(self, layer, scores):
        return super().scores(replace(layer, soft_cap=None), scores)


@caught_by("test_scale")
class OverflowsInSoftmax(PagedToy):
    def softmax(self, scores):
        return scores.exp() / scores.exp().sum(-1, keepdim=True)


@caught_by("test_long_sequences")
class ForgetsWhatIsLongAgo(PagedToy):
    def visible(self, layer, position):
        first, stop = super().visible(layer, position)
        return max(first, stop - 512), stop


@caught_by("test_layers_may_differ")
class KnowsOneLayer(PagedToy):
    def __init__(self, request):
        self.layer = request.layers[0]

    def forward(self, layer, query, kv, plan):
        return super().forward(self.layer, query, kv, plan)


@caught_by("test_keeps_no_state")
class KeepsThePlan(PagedToy):
    def plan(self, batch):
        self.batch = batch

    def forward(self, layer, query, kv, plan):
        return super().forward(layer, query[: sum(self.batch.query_lens_list)], kv, self.batch)


@caught_by("test_a_token_does_not_depend_on_its_chunk")
class LooksAtItsChunk(PagedToy):
    batch_invariant = True

    def forward(self, layer, query, kv, plan):
        out = super().forward(layer, query, kv, plan)
        return out * 1.0000002 if plan.query_lens_list == [7] else out


@caught_by("test_modifies_nothing")
class ClearsNaNInPlace(PagedToy):
    def forward(self, layer, query, kv, plan):
        kv.key.nan_to_num_()
        return super().forward(layer, query, kv, plan)


@caught_by("test_block_sizes")
class KnowsOneBlockSize(ReferenceAttention):
    def plan(self, batch):
        return replace(batch, block_size=16)


@caught_by("test_prefill")
class ReadsTheFirstBlockTwice(PagedToy):
    def forward(self, layer, query, kv, plan):
        tables = plan.block_tables.clone()
        tables[:, 2] = tables[:, 0]
        return super().forward(layer, query, kv, replace(plan, block_tables=tables))


@caught_by("test_accepts_a_step")
class LoadsNothing(PagedToy):
    loads = frozenset()


@caught_by("test_prefill")
class AnswersYesInsteadOfWhyNot(PagedToy):
    @classmethod
    def why_not(cls, request):
        return True
