"""From the stretching factors that llama.cpp stores for Llama 3.1 back to the parameters that made them.

The converter writes rope_freqs.weight, one divisor a frequency, instead of the parameters. Those are solved for, and what
they give is compared with what is stored: factors of any other origin are refused.
"""

from __future__ import annotations

import math
from typing import Any

from octavo import CheckpointError

_LOW, _HIGH = 1.0, 4.0  # low_freq_factor and high_freq_factor of every model of this kind so far
_ORIGINALS = (8192, 4096, 16384, 32768, 2048, 65536, 131072)
_TOLERANCE = 1e-5  # relative; factors are stored in fp32


def llama3_parameters(
    factors: list[float], theta: float, head_dim: int, positions: int, original: int, file: str
) -> dict[str, Any]:
    """`rope_parameters` of type llama3, or of type default where all factors are 1.

    `original` is the length before stretching by the metadata, 0 where it is silent. Raises CheckpointError.
    """
    if len(factors) == head_dim // 2 and all(factor == 1 for factor in factors):
        return {"rope_type": "default"}
    largest = max(factors, default=math.nan)
    lengths = (original,) if original else dict.fromkeys((*_ORIGINALS, positions))
    for length in lengths if 1 < largest < math.inf else ():
        expected = _factors(largest, length, theta, head_dim)
        close = [math.isclose(a, b, rel_tol=_TOLERANCE) for a, b in zip(factors, expected, strict=False)]
        if len(factors) == len(expected) and all(close):
            return {
                "rope_type": "llama3",
                "factor": float(largest),
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": length,
            }
    raise CheckpointError(
        "the rotary frequencies are stretched in a way that is not known",
        file=file,
        tensor="rope_freqs.weight",
        expected=f"{head_dim // 2} factors of type llama3 with low_freq_factor {_LOW:g}, high_freq_factor {_HIGH:g}, "
        f"rope_theta {theta:g} and an original length of {original or ', '.join(map(str, _ORIGINALS))}",
        found=f"{len(factors)} factors, up to {largest:g}",
    )


def _factors(factor: float, original: int, theta: float, head_dim: int) -> list[float]:
    """Divisors by frequency: 1 for short waves, `factor` for long ones, in between a blend of the frequencies."""
    divisors = []
    for index in range(head_dim // 2):
        wave = 2 * math.pi * theta ** (2 * index / head_dim)
        blend = min(max((original / wave - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        divisors.append(1 / ((1 - blend) / factor + blend))
    return divisors
