"""Native kernels for ordinary CPUs: linear layers, paged attention, what lies between, and a whole forward in one call.

The C++ side (csrc/) knows addresses and numbers; this side knows octavo's contracts. `native` is the door between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo import hookimpl

if TYPE_CHECKING:
    from octavo import AttentionBackend, FusedOps, LinearMethod, Platform, StepGraph

octavo_api = (1, 0)


@hookimpl
def octavo_linear_methods(platform: Platform) -> Sequence[type[LinearMethod]]:
    from octavo_cpu.linear import W8A8, FloatInputs, Int8Inputs

    return [W8A8, Int8Inputs, FloatInputs]


@hookimpl
def octavo_attention_backends(platform: Platform) -> Sequence[type[AttentionBackend]]:
    from octavo_cpu.attention import NativeAttention

    return [NativeAttention]


@hookimpl
def octavo_fused_ops(platform: Platform) -> Sequence[type[FusedOps]]:
    from octavo_cpu.ops import NativeOps

    return [NativeOps]


@hookimpl
def octavo_step_graphs(platform: Platform) -> Sequence[type[StepGraph]]:
    from octavo_cpu.tape import Tape

    return [Tape]
