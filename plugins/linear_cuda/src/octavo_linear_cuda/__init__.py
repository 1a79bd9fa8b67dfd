"""Quantised linear layers on NVIDIA GPUs, in Triton: weights of 1 to 8 bits on float inputs, and W8A8 in int8 and fp8.

`weight_only` and `w8a8` are the linear methods, `packing` turns octavo's canonical weight into words, `kernels` holds what runs
on the GPU, and `tuning` says in which tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo import hookimpl

if TYPE_CHECKING:
    from octavo import Command, LinearMethod, Platform

octavo_api = (1, 0)


@hookimpl
def octavo_linear_methods(platform: Platform) -> Sequence[type[LinearMethod]]:
    from octavo_linear_cuda.w8a8 import W8A8
    from octavo_linear_cuda.weight_only import WeightOnly

    return [W8A8, WeightOnly]


@hookimpl
def octavo_commands() -> Sequence[type[Command]]:
    from octavo_linear_cuda.tune import Tune

    return [Tune]
