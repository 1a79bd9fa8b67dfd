"""How codes of a few bits lie in 32-bit words: pure functions between int32 words and uint8 codes, along the last dimension.

Two packings exist. `dense` is one bitstream: code i occupies bits i * bits .. of the row, lowest bit first, and may straddle
two words. `padded` keeps codes whole: 32 // bits of them to a word, the highest bits of which stay 0; compressed-tensors
wrote it until late 2025. For 1, 2, 4 and 8 bits both are the same. Words are bit patterns: one whose top bit is set reads as
a negative integer, which shifting and masking do not mind. Bits beyond the last code are 0. The host is little-endian, as
are files.

Source: compressed-tensors `compressors/pack_quantized/helpers.py`, versions of October 2025 and of 2026.
"""

from __future__ import annotations

from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor


def num_words(count: int, bits: int, dense: bool = True) -> int:
    """Words that hold `count` codes."""
    return -(-count * bits // 32) if dense else -(-count // (32 // bits))


def unpack(words: Tensor, bits: int, count: int, dense: bool = True) -> Tensor:
    """int32 words (.., W) -> uint8 codes (.., count); W is `num_words` of the count or more."""
    mask = 2**bits - 1
    if 8 % bits == 0:  # byte by byte: a quarter of the memory traffic
        # flat, because the stride of a single column may be anything, also in what torch calls contiguous
        parts = words.reshape(-1).view(torch.uint8).reshape(*words.shape[:-1], 4 * words.shape[-1])
        return torch.stack([(parts >> shift) & mask for shift in range(0, 8, bits)], -1).flatten(-2)[..., :count]
    period, places = _places(bits, dense)
    tiles = torch.unflatten(F.pad(words, (0, -words.shape[-1] % period)), -1, (-1, period))
    codes = []
    for word, shift in places:
        code = tiles[..., word] >> shift
        if (low := 32 - shift) < bits:
            code = (code & (2**low - 1)) | (tiles[..., word + 1] << low)
        codes.append((code & mask).to(torch.uint8))
    return torch.stack(codes, -1).flatten(-2)[..., :count]


def pack(codes: Tensor, bits: int, dense: bool = True) -> Tensor:
    """The inverse of `unpack`: uint8 codes (.., count), each below 2**bits, -> int32 words (.., num_words)."""
    count = codes.shape[-1]
    if 8 % bits == 0:
        fields = torch.unflatten(F.pad(codes, (0, -count % (32 // bits))), -1, (-1, 8 // bits))
        parts = torch.zeros(fields.shape[:-1], dtype=torch.uint8, device=codes.device)
        for i in range(8 // bits):
            parts |= fields[..., i] << bits * i
        return parts.view(torch.int32)
    period, places = _places(bits, dense)
    tiles = torch.unflatten(F.pad(codes, (0, -count % len(places))), -1, (-1, len(places)))
    words = torch.zeros((*tiles.shape[:-1], period), dtype=torch.int32, device=codes.device)
    for i, (word, shift) in enumerate(places):
        code = tiles[..., i].to(torch.int32)
        words[..., word] |= code << shift
        if (low := 32 - shift) < bits:
            words[..., word + 1] |= code >> low
    return words.flatten(-2)[..., : num_words(count, bits, dense)].contiguous()


def fits(words: Tensor, bits: int, count: int, dense: bool) -> bool:
    """Whether the bits that a packing leaves unused are all 0, as in every file that was written with it."""
    if words.shape[-1] != num_words(count, bits, dense):
        return False
    return torch.equal(pack(unpack(words, bits, count, dense), bits, dense), words)


def _places(bits: int, dense: bool) -> tuple[int, list[tuple[int, int]]]:
    """Words after which the pattern repeats, and (word, lowest bit) of each code in them."""
    if not dense:
        return 1, [(0, bits * i) for i in range(32 // bits)]
    period = bits // gcd(bits, 32)
    return period, [divmod(bits * i, 32) for i in range(32 * period // bits)]
