"""Small, right classes that the tests of the kit put under test, and whose mutants it must catch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F

from octavo.attention.backend import AttentionBackend, LayerKV
from octavo.attention.kv_format import KVFormat, PlainKV
from octavo.errors import CheckpointError
from octavo.quant.config import Golden, QuantConfig
from octavo.quant.linear import LinearMethod, ReferenceMethod
from octavo.quant.weight import ActivationSpec, QuantizedWeight, WeightSpec
from octavo.testing import AttentionBackendSuite, KVFormatSuite, LinearMethodSuite, QuantConfigSuite


class Small(ReferenceMethod):
    """Core's reference, for few enough layers to be quick."""

    dtypes = (torch.float32,)

    @classmethod
    def why_not(cls, request):
        if request.spec.code != "uint4" or request.dtype not in cls.dtypes:
            return "computes with uint4 in fp32 only"
        return super().why_not(request)

    def __init__(self, weight, request):
        super().__init__(self.change(weight), request)

    def change(self, weight):
        return weight


class Int8Method(LinearMethod):
    """int8 weights times int8 inputs, summed exactly in float64."""

    name = "int8"
    rank = 0

    @classmethod
    def why_not(cls, request):
        if request.spec.code != "int8" or request.spec.act_order or request.spec.has_zeros:
            return "computes with symmetric int8 weights"
        if request.spec.activation != ActivationSpec("int8"):
            return "quantises inputs to int8, one scale a token"
        return None

    def __init__(self, weight, request):
        super().__init__(weight, request)
        self.dtype = request.dtype
        self.register_buffer("weight", weight.dequantize().double())
        self.register_buffer("bias", None if weight.bias is None else weight.bias.double())

    def scales(self, x):
        largest = x.abs().amax(-1, keepdim=True)
        return torch.where(largest > 0, largest / 127, 1.0)

    def round(self, x):
        return x.round()

    def forward(self, x):
        x = x.float()
        scales = self.scales(x) if len(x) else x.new_ones(0, 1)
        codes = self.round(x / scales).clamp(-128, 127)
        return F.linear(codes.double() * scales, self.weight, self.bias).to(self.dtype)


class PagedToy(AttentionBackend):
    """Attention with one loop over requests and one over positions; each rule is a method that a mutant can break."""

    name = "toy"
    rank = 0
    loads = frozenset({torch.float32, torch.bfloat16})

    @classmethod
    def why_not(cls, request):
        return "computes in fp32 only" if request.dtype != torch.float32 else None

    def __init__(self, request):
        pass

    def plan(self, batch):
        return batch

    def kv_head(self, layer, head):
        return head // (layer.heads // layer.kv_heads)

    def visible(self, layer, position):
        """First and one past the last position that a query sees."""
        first = 0 if layer.sliding_window is None else max(0, position - layer.sliding_window + 1)
        return first, position + 1

    def scores(self, layer, scores):
        scores = scores * layer.scale
        return scores if layer.soft_cap is None else layer.soft_cap * torch.tanh(scores / layer.soft_cap)

    def softmax(self, scores):
        return torch.softmax(scores, dim=-1)

    def positions(self, length, query_len):
        return range(length - query_len, length)

    def gather(self, blocks, length):
        return blocks.transpose(1, 2).flatten(0, 1)[:length].float()

    def forward(self, layer, query, kv, plan):
        out, start = torch.empty_like(query), 0
        heads = torch.tensor([self.kv_head(layer, head) for head in range(layer.heads)])
        for row, (query_len, length) in enumerate(zip(plan.query_lens_list, plan.seq_lens_list, strict=True)):
            table = plan.block_tables[row, : -(-length // plan.block_size)].long()
            key, value = (self.gather(t[table], length)[:, heads] for t in (kv.key, kv.value))
            for offset, position in enumerate(self.positions(length, query_len)):
                first, stop = self.visible(layer, position)
                seen = slice(first, min(stop, len(key)))
                scores = torch.einsum("hd,khd->hk", query[start + offset].float(), key[seen])
                weights = self.softmax(self.scores(layer, scores))
                out[start + offset] = torch.einsum("hk,khd->hd", weights, value[seen])
            start += query_len
        return out


class Fp8KV(PlainKV):
    """e5m2 with one static scale for K and one for V."""

    name = "toy_fp8"
    key_scale, value_scale = 0.5, 0.25

    @property
    def storage(self):
        return torch.float8_e5m2

    def store(self, x, scale):
        limit = torch.finfo(self.storage).max
        return (x.float() / scale).clamp(-limit, limit).to(self.storage)

    def write(self, layer, kv, key, value, slot_mapping):
        block, offset = slot_mapping // self.geometry.block_size, slot_mapping % self.geometry.block_size
        kv.key[block, :, offset] = self.store(key, self.key_scale)
        kv.value[block, :, offset] = self.store(value, self.value_scale)

    def decode(self, layer, kv, block_ids):
        sides = ((kv.key, self.key_scale), (kv.value, self.value_scale))
        return LayerKV(*((t[block_ids].float() * scale).to(self.geometry.dtype) for t, scale in sides))

    def fold(self, layer, query):
        return query * self.key_scale

    def unfold(self, layer, out):
        return out * self.value_scale


class ByteKV(KVFormat):
    """int8 with a scale for each token and head."""

    name = "toy_int8"

    @property
    def storage(self):
        return torch.int8

    def bytes_per_block(self):
        g = self.geometry
        return 2 * g.num_layers * g.kv_heads * g.block_size * (g.head_dim + 4)

    def allocate(self, num_blocks, device):
        g = self.geometry
        shape = (num_blocks, g.kv_heads, g.block_size)
        codes = [torch.zeros(*shape, g.head_dim, dtype=torch.int8, device=device) for _ in range(2)]
        return LayerKV(*codes, *(torch.zeros(shape, device=device) for _ in range(2)))

    def largest(self, x):
        return x.abs().amax(-1)

    def write(self, layer, kv, key, value, slot_mapping):
        block, offset = slot_mapping // self.geometry.block_size, slot_mapping % self.geometry.block_size
        for x, codes, scales in ((key, kv.key, kv.key_scale), (value, kv.value, kv.value_scale)):
            scale = self.largest(x.float()) / 127
            scaled = x.float() / torch.where(scale > 0, scale, 1.0)[..., None]
            codes[block, :, offset] = scaled.round().to(torch.int8)
            scales[block, :, offset] = scale

    def decode(self, layer, kv, block_ids):
        sides = ((kv.key, kv.key_scale), (kv.value, kv.value_scale))
        return LayerKV(*((t[block_ids] * s[block_ids][..., None]).to(self.geometry.dtype) for t, s in sides))


class NibbleConfig(QuantConfig):
    """4-bit groups: `packed` (out, in / 2) uint8, low nibble first; `scales` and `zeros` (out, groups) fp16 and uint8."""

    name: ClassVar = "nibble"
    aliases_of: ClassVar = {"group_size": ("q_group_size",)}
    suffixes: ClassVar = ("packed", "scales", "zeros", "bias")
    shifts: ClassVar = (0, 4)
    zero_shift: ClassVar = 0

    group_size: int

    @classmethod
    def goldens(cls):
        codes = torch.tensor([[0, 1, 2, 3], [4, 5, 15, 7]])
        scales, zeros = torch.tensor([[0.5, 0.25], [2.0, 1.0]]), torch.tensor([[3, 0], [15, 8]])
        weight = (codes - zeros.repeat_interleave(2, dim=1)) * scales.repeat_interleave(2, dim=1)
        tensors = {
            "packed": torch.tensor([[0x10, 0x32], [0x54, 0x7F]], dtype=torch.uint8),
            "scales": scales.half(),
            "zeros": zeros.to(torch.uint8),
        }
        return [Golden({"quant_method": "nibble", "group_size": 2}, tensors, weight)]

    def expected(self, layer):
        groups = layer.in_features // self.group_size
        return {
            "packed": (torch.uint8, (layer.out_features, layer.in_features // 2)),
            "scales": (torch.float16, (layer.out_features, groups)),
            "zeros": (torch.uint8, (layer.out_features, groups)),
        }

    def spec_for(self, layer, stored):
        if not set(stored) & {"packed", "scales", "zeros"}:
            return None
        for suffix, (dtype, shape) in self.expected(layer).items():
            if suffix not in stored:
                raise CheckpointError(f"{layer.name}: tensor is missing", tensor=suffix)
            found = (stored[suffix].dtype, stored[suffix].shape)
            if found != (dtype, shape):
                raise CheckpointError(
                    f"{layer.name}: wrong tensor", tensor=suffix, expected=(dtype, shape), found=found
                )
        return WeightSpec("uint4", (1, self.group_size), has_zeros=True)

    def canonicalise(self, layer, tensors):
        codes = torch.stack([tensors["packed"] >> shift & 15 for shift in self.shifts], dim=-1).flatten(1)
        zeros = tensors["zeros"].float() + self.zero_shift
        spec = WeightSpec("uint4", (1, self.group_size), has_zeros=True)
        return QuantizedWeight(spec, codes, tensors["scales"].float(), zeros, bias=tensors.get("bias"))

    def serialise(self, layer, weight) -> Mapping[str, torch.Tensor]:
        if weight.spec != WeightSpec("uint4", (1, self.group_size), has_zeros=True):
            raise CheckpointError(f"{layer.name}: cannot be stored", found=weight.spec)
        low, high = (weight.codes[:, part::2] << shift for part, shift in enumerate(self.shifts))
        tensors = {
            "packed": low | high,
            "scales": weight.scales.half(),
            "zeros": (weight.zeros - self.zero_shift).to(torch.uint8),
        }
        return tensors if weight.bias is None else {**tensors, "bias": weight.bias.half()}


MUTANTS: list[tuple[type, str, type, str]] = []
"""(suite, its attribute, the class with a mistake, a test that must fail)"""


def caught_by(test):
    """Registers a mutant and the test that must fail for it."""
    suites = {
        QuantConfig: (QuantConfigSuite, "config"),
        KVFormat: (KVFormatSuite, "format"),
        AttentionBackend: (AttentionBackendSuite, "backend"),
        LinearMethod: (LinearMethodSuite, "method"),
    }

    def register(mutant):
        suite, attribute = next(found for base, found in suites.items() if issubclass(mutant, base))
        MUTANTS.append((suite, attribute, mutant, test))
        return mutant

    return register
