"""One small layer for each block type, written out in bytes: what a row holds, and the numbers it stands for.

Half-precision numbers are little-endian: `00 3C` is 1, `00 38` 0.5, `00 34` 0.25, `01 3C` 1.0009765625.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo import Golden

_SETTINGS = {"quant_method": "gguf"}


def goldens() -> Sequence[Golden]:
    """Goldens of all types; Q4_0, Q4_1 and Q8_0 are written, too."""
    return [_q4_0(), _q4_1(), _q5_0(), _q5_1(), _q8_0(), _q2_k(), _q3_k(), _q4_k(), _q5_k(), _q6_k()]


def _golden(name: str, rows: Sequence[str], weight: Tensor, read_only: bool = False) -> Golden:
    stored = torch.tensor([list(bytes.fromhex(row)) for row in rows], dtype=torch.uint8)
    return Golden(_SETTINGS, {name: stored}, weight.reshape(len(rows), -1).float(), read_only)


def _ramp(first: int, last: int) -> Tensor:
    """first ... last, downwards where last is less."""
    step = 1 if first <= last else -1
    return torch.arange(first, last + step, step).float()


def _flat(values: Sequence[float], times: int) -> Tensor:
    """Each value `times` times."""
    return torch.tensor(values).float().repeat_interleave(times)


def _q4_0() -> Golden:
    """d = 1; byte i holds element i in its low nibble and element 16 + i in its high one, each plus 8."""
    weight = torch.zeros(32)
    weight[:4], weight[16:20] = torch.tensor([-8.0, 1, 2, 3]), torch.tensor([7.0, -1, 0, 4])
    return _golden("q4_0", ["003C F0 79 8A CB" + "88" * 12], weight)


def _q4_1() -> Golden:
    """d, m, nibbles: d * q + m. The second block has d = 0, so it is m throughout; the last has a negative d."""
    ramps = "F0 E1 D2 C3 B4 A5 96 87 78 69 5A 4B 3C 2D 1E 0F"  # 0 ... 15, then 15 ... 0
    first = "0038 00C0" + ramps + "0000 0042" + "00" * 16
    second = "003C 0034" + "10" * 16 + "00B8 003C" + "F0" * 16
    weight = [torch.cat([_ramp(0, 15), _ramp(15, 0)]) * 0.5 - 2, _flat([3], 32)]
    weight += [_flat([0.25, 1.25], 16), _flat([1, -6.5], 16)]
    return _golden("q4_1", [first, second], torch.cat(weight))


def _q5_0() -> Golden:
    """d = 2, fifth bits in a word (bit i for element i), nibbles: element i is i, minus 16."""
    nibbles = "00 11 22 33 44 55 66 77 88 99 AA BB CC DD EE FF"
    return _golden("q5_0", ["0040 0000FFFF" + nibbles], (_ramp(0, 31) - 16) * 2, read_only=True)


def _q5_1() -> Golden:
    """d = 0.25, m = 1, fifth bits of elements 0, 2, ... 14 and 24 ... 31, nibbles 1 and 2."""
    codes = torch.cat([torch.tensor([17.0, 1]).repeat(8), _flat([2, 18], 8)])
    return _golden("q5_1", ["0034 003C 555500FF" + "21" * 16], codes * 0.25 + 1, read_only=True)


def _q8_0() -> Golden:
    """d = 0.5, then signed bytes."""
    codes = torch.cat([torch.tensor([-128.0, 127]), _ramp(0, 29)])
    return _golden("q8_0", ["0038 80 7F" + bytes(range(30)).hex()], codes * 0.5)


# Fields of two bits of 32 bytes are 4 runs of 32 elements. First half: runs of 0, 1, 2, 3. Second half: 3, 2, 1, 0 in the
# first 16 elements of each run, 0 in the others.
_TWO_BITS = "E4" * 32 + "1B" * 16 + "00" * 16
_TWO_BIT_CODES = (0, 0, 1, 1, 2, 2, 3, 3, 3, 0, 2, 0, 1, 0, 0, 0)  # of 16 groups of 16


def _q2_k() -> Golden:
    """16 bytes of a scale (low nibble) and a minimum, two-bit codes, d = dmin = 1: d * scale * q - dmin * minimum."""
    scales, minima = torch.tensor([1, 2, 0, 12]).repeat(4), torch.tensor([2, 1, 3, 3]).repeat(4)
    weight = (torch.tensor(_TWO_BIT_CODES) * scales - minima).repeat_interleave(16)
    return _golden("q2_k", ["21 12 30 3C" * 4 + _TWO_BITS + "003C 003C"], weight, read_only=True)


def _q3_k() -> Golden:
    """Third bits, two-bit codes, scales, d = 0.25: d * (scale - 32) * q. A third bit that is not set takes 4 from q.

    Bit s of byte i is for element 32 s + i. Scales have 6 bits: four in 8 bytes (low nibbles 0 ... 7, high ones 8 ... 15),
    two in 4 bytes (field j of byte k for scale 4 j + k).
    """
    scales = torch.tensor([33, 31, 34, 30, 36, 28, 40, 24, 48, 16, 63, 0, 32, 35, 29, 37]) - 32
    third = torch.tensor([-4, 0, 0, -4]).repeat(4)  # AA: runs 1, 3, 5, 7 keep their codes; 55: runs 0, 2, 4, 6
    weight = ((torch.tensor(_TWO_BIT_CODES) + third) * scales).repeat_interleave(16) * 0.25
    packed = "01 0F F2 0E 04 3C D8 58 BA 95 7A 85"
    return _golden("q3_k", ["AA" * 16 + "55" * 16 + _TWO_BITS + packed + "0034"], weight, read_only=True)


# Scales and minima of 8 groups, 6 bits each in 12 bytes: those of groups 0 ... 3 are the low 6 bits of bytes 0 ... 3 and
# 4 ... 7; those of groups 4 ... 7 have their low 4 bits in bytes 8 ... 11 and their high 2 bits on top of bytes 0 ... 7.
_SIX_BITS = "7F 81 C2 20 BF 80 7F 05 34 11 80 20"
_SCALES, _MINIMA = (63, 1, 2, 32, 20, 33, 48, 0), (63, 0, 63, 5, 35, 33, 24, 2)
_NIBBLES = "F0 E1 D2 C3 B4 A5 96 87 78 69 5A 4B 3C 2D 1E 0F" * 8  # 32 bytes for each pair of groups, low nibbles first
_STEP = 1.0009765625  # of d and dmin: the products do not fit into fp16, so that no simpler type could hold the layer


def _k_weight(codes: Tensor) -> Tensor:
    """d * scale * q - dmin * minimum, for codes of 8 groups."""
    scales, minima = torch.tensor(_SCALES)[:, None], torch.tensor(_MINIMA)[:, None]
    return (codes.reshape(8, 32) * scales - minima) * _STEP


def _k_nibbles() -> Tensor:
    return torch.cat([_ramp(0, 15).repeat(2), _ramp(15, 0).repeat(2)]).repeat(4)


def _q4_k() -> Golden:
    """d, dmin, scales and minima, nibbles. The last group has scale 0: it is its minimum throughout."""
    return _golden("q4_k", ["013C 013C" + _SIX_BITS + _NIBBLES], _k_weight(_k_nibbles()), read_only=True)


def _q5_k() -> Golden:
    """As Q4_K with fifth bits before the nibbles: bit s of byte i is for element i of group s."""
    fifth = torch.cat([_flat([16, 0], 16).repeat(4), _flat([0, 16], 16).repeat(4)])
    row = "013C 013C" + _SIX_BITS + "0F" * 16 + "F0" * 16 + _NIBBLES
    return _golden("q5_k", [row], _k_weight(_k_nibbles() + fifth), read_only=True)


def _q6_k() -> Golden:
    """Low nibbles, high bits, 16 signed scales, d = 0.5 at the end: d * scale * (q - 32).

    In each half of 128 elements, 64 bytes hold elements 0 ... 63 in low nibbles and 64 ... 127 in high ones; 32 bytes hold
    the high bits of 4 runs of 32.
    """
    low = "21" * 32 + "43" * 32 + "00 11 22 33 44 55 66 77 88 99 AA BB CC DD EE FF" * 4
    high = "E4" * 32 + "00" * 32
    scales = "01 FE 03 FC 05 FA 07 F8 09 F6 0B F4 0D F2 0F F0"
    codes = torch.cat([_flat([1, 3 + 16, 2 + 32, 4 + 48], 32), _ramp(0, 15).repeat(8)])
    factors = torch.arange(1, 17) * torch.tensor([1, -1]).repeat(8)
    weight = (codes - 32) * factors.repeat_interleave(16) * 0.5
    return _golden("q6_k", [low + high + scales + "0038"], weight, read_only=True)
