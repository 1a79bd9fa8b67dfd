"""Numbers to 8-bit codes, alike on every version of torch: some saturate in a plain cast, some give NaN or infinity.

E4M3 has no infinity: 448 is its largest number, and 0x7F and 0xFF are NaN. E5M2 reaches 57344; 0x7C and 0xFC are infinite, what
lies above them NaN. Source: OCP 8-bit floating point specification 1.0, types E4M3 (torch.float8_e4m3fn) and E5M2.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0, torch.int8: 127.0}
"""The largest number of each type that is written; int8 leaves out -128, so that it is symmetric."""


def encode(values: Tensor, storage: torch.dtype) -> Tensor:
    """fp32 values as codes, rounded to the nearest, ties to even; beyond the range the largest number.

    NaN stays NaN, so that a request that computed one ends with an error instead of going on with a number of ours. int8 has
    no code for it: there the scale must be NaN.
    """
    largest = LARGEST[storage]
    limited = values.clamp(-largest, largest)  # lets NaN pass
    return limited.nan_to_num().round().to(storage) if storage == torch.int8 else limited.to(storage)


def bounded(values: Tensor) -> Tensor:
    """Values as fp32 numbers whose scale is a number too: infinities as the largest number or 2^127. NaN stays NaN."""
    limit = min(torch.finfo(values.dtype).max, 2.0**127)  # 448 times a rounded scale must not overflow when it is read
    return values.float().clamp(-limit, limit)


def as_compute(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Decoded fp32 values in the compute type: beyond its range its largest number. NaN stays NaN."""
    limit = torch.finfo(dtype).max
    return (values.clamp(-limit, limit) if limit < torch.finfo(torch.float32).max else values).to(dtype)
