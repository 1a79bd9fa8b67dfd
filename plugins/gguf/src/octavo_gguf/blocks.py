"""The block types of GGUF to the bit: from bytes to codes, scales and minima, and back.

A row of a weight is a run of blocks of 32 or 256 elements. Half-precision numbers are little-endian. Source: ggml's
ggml-quants.c. A block that stands for d * q + m is given as scale d and zero -m / d, so that its value is
scale * (q - zero); one whose d is 0 holds m throughout and becomes code 0, scale m, zero -1, which is exactly m.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import WeightSpec

# codes (blocks, elements), scales (blocks, groups), minima as scales or None
Parts = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A way to store a run of elements. `midpoint` is the zero of types without minima whose codes are unsigned."""

    name: str
    elements: int
    num_bytes: int
    code: str
    group: int
    unpack: Callable[[Tensor], Parts]
    midpoint: int | None = None
    has_minima: bool = False

    @property
    def spec(self) -> WeightSpec:
        return WeightSpec(self.code, (1, self.group), has_zeros=self.has_minima or self.midpoint is not None)

    def decode(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes (out, in), scales and zeros (out, groups), from bytes (out, row bytes) of whole blocks."""
        out_features = rows.shape[0]
        codes, scales, minima = self.unpack(rows.reshape(-1, self.num_bytes))
        codes, scales = codes.reshape(out_features, -1), scales.reshape(out_features, -1)
        if minima is None:
            return codes, scales, None if self.midpoint is None else torch.full_like(scales, self.midpoint)
        minima = minima.reshape(out_features, -1)
        return _with_zeros(codes, scales, minima, self.group)


def _with_zeros(codes: Tensor, scales: Tensor, minima: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same numbers with zeros in place of minima."""
    flat = scales == 0
    # where both are 0 the sign of the minimum is kept, so that writing restores it
    zeros = -minima.float() / torch.where(flat, 1.0, scales.float())
    constant = flat & (minima != 0)
    if bool(constant.any()):
        scales = torch.where(constant, minima.to(scales.dtype), scales)
        zeros = torch.where(constant, -1.0, zeros)
        codes = codes.reshape(*constant.shape, group).masked_fill(constant[..., None], 0).reshape(codes.shape)
    return codes, scales, zeros


def _half(blocks: Tensor, start: int) -> Tensor:
    """(blocks, 1) of the fp16 numbers that start at a byte."""
    return blocks[:, start : start + 2].clone(memory_format=torch.contiguous_format).view(torch.float16)


def _fields(data: Tensor, bits: int) -> Tensor:
    """(..., n, width) of n-th fields of `bits` bits, lowest first, of bytes (..., width); width is a multiple of 4."""
    # four bytes at a time, which torch shifts many times faster; a copy, as words must begin at a multiple of 4
    words = data.clone(memory_format=torch.contiguous_format).view(torch.int32)
    fields = words.new_empty(*words.shape[:-1], 8 // bits, words.shape[-1])
    for number, field in enumerate(fields.unbind(-2)):
        torch.bitwise_right_shift(words, number * bits, out=field)
    return fields.bitwise_and_((2**bits - 1) * 0x01010101).view(torch.uint8)


# --- blocks of 32: fp16 d, fp16 m in some, high bits in some, codes


def _unpack_32(blocks: Tensor, bits: int, has_minimum: bool) -> Parts:
    """Low nibbles of 16 bytes are elements 0..15, high ones 16..31; fifth bits are a word, bit i for element i."""
    start = 4 if has_minimum else 2
    codes = _fields(blocks[:, -16:], 4).flatten(1)
    if bits == 5:
        fifth = _fields(blocks[:, start : start + 4], 1).transpose(1, 2).flatten(1)
        codes = codes | (fifth << 4)
    return codes, _half(blocks, 0), _half(blocks, 2) if has_minimum else None


def _unpack_q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0), None


# --- blocks of 256: groups whose scales are small integers, times d


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales and 8 minima of 6 bits each, from 12 bytes."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=1)
    minima = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=1)
    return scales, minima


def _unpack_q4_k(blocks: Tensor) -> Parts:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    codes = _fields(blocks[:, -128:].reshape(-1, 4, 32), 4)
    d, dmin = _half(blocks, 0).float(), _half(blocks, 2).float()
    return codes.flatten(1), d * scales, -dmin * minima


def _unpack_q5_k(blocks: Tensor) -> Parts:
    codes, scales, minima = _unpack_q4_k(blocks)
    fifth = _fields(blocks[:, 16:48], 1)  # bit s of byte i: element i of group s
    return codes | (fifth.flatten(1) << 4), scales, minima


def _unpack_q6_k(blocks: Tensor) -> Parts:
    low = _fields(blocks[:, :128].reshape(-1, 2, 64), 4).flatten(1)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).flatten(1)
    codes = (low | (high << 4)).view(torch.int8) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return codes, _half(blocks, 208).float() * scales, None


def _unpack_q2_k(blocks: Tensor) -> Parts:
    codes = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).flatten(1)
    d, dmin = _half(blocks, 80).float(), _half(blocks, 82).float()
    return codes, d * (blocks[:, :16] & 15), -dmin * (blocks[:, :16] >> 4)


def _unpack_q3_k(blocks: Tensor) -> Parts:
    low = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).flatten(1)
    kept = _fields(blocks[:, :32], 1).flatten(1)  # a bit that is not set takes 4 away
    codes = (low | (kept << 2)).view(torch.int8) - 4
    scales = _fields(blocks[:, 96:104], 4).flatten(1) | (_fields(blocks[:, 104:108], 2).flatten(1) << 4)
    return codes, _half(blocks, 108).float() * (scales.view(torch.int8) - 32), None


BLOCK_TYPES: dict[str, BlockType] = {
    block.name: block
    for block in (
        BlockType("q4_0", 32, 18, "uint4", 32, lambda b: _unpack_32(b, 4, False), midpoint=8),
        BlockType("q4_1", 32, 20, "uint4", 32, lambda b: _unpack_32(b, 4, True), has_minima=True),
        BlockType("q5_0", 32, 22, "uint5", 32, lambda b: _unpack_32(b, 5, False), midpoint=16),
        BlockType("q5_1", 32, 24, "uint5", 32, lambda b: _unpack_32(b, 5, True), has_minima=True),
        BlockType("q8_0", 32, 34, "int8", 32, _unpack_q8_0),
        BlockType("q2_k", 256, 84, "uint2", 16, _unpack_q2_k, has_minima=True),
        BlockType("q3_k", 256, 110, "int3", 16, _unpack_q3_k),
        BlockType("q4_k", 256, 144, "uint4", 32, _unpack_q4_k, has_minima=True),
        BlockType("q5_k", 256, 176, "uint5", 32, _unpack_q5_k, has_minima=True),
        BlockType("q6_k", 256, 210, "int6", 16, _unpack_q6_k),
    )
}
"""The block types that are read, by the last name part under which the reader presents them."""

WRITABLE = ("q4_0", "q4_1", "q8_0")
"""Types whose bytes follow from codes, scales and zeros; the others are read only."""


# --- writing


def encode(name: str, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Bytes (out, row bytes) of a type in `WRITABLE`: the inverse of `BlockType.decode`.

    Raises ValueError with a sentence where the type cannot hold the numbers exactly.
    """
    block = BLOCK_TYPES[name]
    out_features = codes.shape[0]
    codes, scales = codes.reshape(-1, block.elements), scales.reshape(-1, 1)
    minima = None
    if block.has_minima:
        assert zeros is not None
        scales, minima = _with_minima(codes, scales, zeros.reshape(-1, 1))
    elif block.midpoint is not None and (zeros is None or bool((zeros != block.midpoint).any())):
        raise ValueError(f"its zeros are not all {block.midpoint}")
    if not torch.equal(scales.half().double(), scales.double()):
        raise ValueError("a scale is not a number that fp16 holds exactly")
    parts = [numbers.half().view(torch.uint8) for numbers in (scales, minima) if numbers is not None]
    if block.code == "int8":
        parts.append(codes.contiguous().view(torch.uint8))
    else:
        parts.append(codes[:, :16] | (codes[:, 16:] << 4))
    return torch.cat(parts, dim=1).reshape(out_features, -1)


def _with_minima(codes: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima (blocks, 1) of the same numbers with minima in place of zeros, which are lost nowhere."""
    constant = (zeros == -1) & (codes == 0).all(dim=1, keepdim=True)
    wide, zeros = scales.float(), zeros.float()
    minima = torch.where(constant, wide, -(zeros * wide))
    exact = (wide == 0) | torch.where(constant, minima.half().float() == wide, -minima.half().float() / wide == zeros)
    if not bool(exact.all()):
        raise ValueError("a minimum, -zero * scale, is not a number that fp16 holds exactly")
    return torch.where(constant, 0.0, wide), minima
