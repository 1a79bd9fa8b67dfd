"""From octavo's canonical weight to the words that kernels/weights.py reads.

Inputs lie in blocks, a block in slabs, a slab of 2 * WORDS inputs. Word i of a block's output n holds, for each of its slabs,
the codes of inputs 2i and 2i + 1 of that slab, the same number of bits into its low and its high half. So the words of an
output lie together, those of a tile of outputs in one run of memory, and a slab is unpacked two codes at a time.
3-bit codes are 2 bits in words of 8 slabs and 1 bit in words of 16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo import QuantizedWeight, WeightSpec, weight_segments

OUTPUTS = 128
"""Outputs are padded to a multiple of this, the largest tile."""
_BLOCK = {2: 256, 3: 256, 4: 128, 8: 128}
"""Inputs of a block at most, by bits: rows of inputs for a block must fit into shared memory, several times over."""
_FP8 = {"fp8_e4m3": 1, "fp8_e5m2": 2}


def ceil_div(size: int, part: int) -> int:
    """How many parts hold `size`."""
    return -(-size // part)


@dataclass(frozen=True, slots=True)
class Codes:
    """How codes of one kind are packed: `bits` each, `fp8` as kernels/weights.py numbers it (0: integers)."""

    bits: int
    fp8: int = 0

    @property
    def slabs(self) -> int:
        """Slabs of a block."""
        return 16 if self.bits == 3 else 16 // self.bits


def codes_of(spec: WeightSpec) -> Codes | None:
    """How the codes of a quantised weight are packed, None for codes that these kernels do not know."""
    if spec.code in _FP8:
        return Codes(8, _FP8[spec.code])
    kind, bits = spec.code.rstrip("0123456789"), spec.code.lstrip("uint")
    if kind not in ("int", "uint") or not bits.isdigit() or not 1 <= int(bits) <= 8:
        return None
    return Codes(next(width for width in (2, 3, 4, 8) if width >= int(bits)))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where inputs lie, in slabs of `slab`: `segment` slabs are scaled together, `group` slabs share a row of scales.

    `segment` is 0 where one scale serves all inputs of an output. `source` says which input lies where (-1: none), None
    where each is in its place. `rows` are the groups of the rows of scales.
    """

    slab: int
    blocks: int
    segment: int
    group: int
    rows: Tensor
    source: Tensor | None


def layout_of(weight: QuantizedWeight, codes: Codes) -> Layout:
    """Chooses the largest slab that pads little, and pads each group to whole slabs where groups do not fit."""
    size, group = weight.in_features, weight.spec.group_shape[1]
    device = weight.codes.device
    one = weight.scales is None or weight.scales.shape[1] == 1
    if one or (weight.group_index is None and group % 16 == 0):
        largest = _BLOCK[codes.bits] // codes.slabs
        fitting = [slab for slab in (64, 32, 16) if slab <= largest and (one or group % slab == 0)]
        padded = {slab: -(-size // (slab * codes.slabs)) * slab * codes.slabs for slab in fitting}
        slab = next(s for s in fitting if padded[s] <= max(1.05 * size, size + 128) or s == fitting[-1])
        blocks = padded[slab] // (slab * codes.slabs)
        if one:
            return Layout(slab, blocks, 0, blocks * codes.slabs, torch.zeros(1, dtype=torch.long, device=device), None)
        segment = math.gcd(group // slab, codes.slabs)
        wanted = -(-blocks * codes.slabs // (group // slab))
        rows = torch.arange(wanted, device=device).clamp(max=-(-size // group) - 1)
        return Layout(slab, blocks, segment, group // slab, rows, None)
    segments = [s.to(device) for s in weight_segments(weight, size)]
    typical = sorted(len(s) for s in segments)[len(segments) // 2]
    slab = min(32 if typical > 48 else 16, _BLOCK[codes.bits] // codes.slabs)
    parts = [F.pad(s, (0, -len(s) % slab), value=-1) for s in segments]
    source = torch.cat(parts)
    source = F.pad(source, (0, -len(source) % (slab * codes.slabs)), value=-1).to(torch.int32)
    groups = torch.arange(size, device=device) // max(group, 1) if weight.group_index is None else weight.group_index
    firsts = source[::slab].long()
    rows = torch.where(firsts >= 0, groups.long()[firsts.clamp(min=0)], 0)
    return Layout(slab, len(source) // (slab * codes.slabs), 1, 1, rows, source)


def packed(weight: QuantizedWeight, codes: Codes, layout: Layout) -> dict[str, Tensor | None]:
    """The tensors of a prepared layer, by the names that `weight_product` has for them."""
    assert weight.scales is not None
    values = _bytes(weight.codes, weight.spec, codes)
    middle = 0 if codes.fp8 else 1 << (codes.bits - 1)
    total = layout.blocks * codes.slabs * layout.slab
    if layout.source is None:
        values = F.pad(values, (0, total - values.shape[1]), value=middle)
    else:
        values = torch.where(layout.source >= 0, values[:, layout.source.long().clamp(min=0)], middle)
    values = F.pad(values, (0, 0, 0, -len(values) % OUTPUTS), value=middle)
    pairs = values.view(len(values), layout.blocks, codes.slabs, layout.slab // 2, 2)
    tensors: dict[str, Tensor | None] = {"tops": None}
    if codes.bits == 3:
        tensors["codes"] = _words(pairs & 3, 2)
        tensors["tops"] = _words(pairs >> 2, 1)
    else:
        tensors["codes"] = _words(pairs, codes.bits)
    scales = by_row(weight, weight.scales)[:, layout.rows]
    tensors["scales"] = _columns(scales)
    zeros = _shifted_zeros(weight, middle)
    tensors["zeros"] = None if zeros is None else _columns(_in(scales.dtype, by_row(weight, zeros)[:, layout.rows]))
    tensors["source"] = layout.source
    tensors["bias"] = weight.bias
    return tensors


def _bytes(codes: Tensor, spec: WeightSpec, kind: Codes) -> Tensor:
    """Codes as uint8; integers with sign are moved to the middle of the range of as many bits as they are packed in."""
    if kind.fp8:
        return codes.view(torch.uint8)
    if codes.dtype == torch.uint8:
        return codes
    return (codes.to(torch.int16) + (1 << (kind.bits - 1))).to(torch.uint8)


def _shifted_zeros(weight: QuantizedWeight, middle: int) -> Tensor | None:
    """What is to be taken from codes that are `middle` less than they were, None if that is nothing."""
    shift = middle if weight.codes.dtype == torch.uint8 else 0
    if weight.zeros is None:
        return None if weight.scales is None or not shift else torch.full_like(weight.scales.float(), -shift)
    zeros = weight.zeros.float() - shift
    return zeros if bool(zeros.any()) else None


def _words(pairs: Tensor, bits: int) -> Tensor:
    """Pairs of codes (outputs, blocks, slabs, words, 2) -> words (tiles, outputs, words), as many slabs in each as it holds."""
    outputs, blocks, slabs, words, _ = pairs.shape
    each = 16 // bits
    tiles = pairs.view(outputs, blocks * slabs // each, each, words, 2).permute(1, 0, 3, 4, 2)
    result = torch.zeros(tiles.shape[:3], dtype=torch.int32, device=pairs.device)
    for half in range(2):
        for slab in range(each):
            result |= tiles[..., half, slab].to(torch.int32) << (16 * half + bits * slab)
    return result


def _in(dtype: torch.dtype, zeros: Tensor) -> Tensor:
    """Zeros in the type of the scales, if that holds them exactly."""
    return narrow if torch.equal((narrow := zeros.to(dtype)).float(), zeros.float()) else zeros.float()


def by_row(weight: QuantizedWeight, groups: Tensor) -> Tensor:
    """(G_out, G_in) -> (out_features, G_in)."""
    out_group = weight.spec.group_shape[0]
    if groups.shape[0] == 1:
        return groups.expand(weight.out_features, -1)
    return groups.repeat_interleave(out_group, dim=0)[: weight.out_features] if out_group > 1 else groups


def _columns(by_row: Tensor) -> Tensor:
    """(outputs, n) -> (n, padded outputs), zeros behind."""
    return F.pad(by_row.t(), (0, -by_row.shape[0] % OUTPUTS)).contiguous()
