"""Paged attention, elementwise kernels and captured steps for NVIDIA GPUs, in Triton.

`work` divides a step among programs, `kernels` holds what runs on the GPU, `support` says where that is possible. Nothing here
touches a GPU before a kernel is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo import hookimpl

if TYPE_CHECKING:
    from octavo import AttentionBackend, FusedOps, Platform, StepGraph

octavo_api = (1, 0)


@hookimpl
def octavo_attention_backends(platform: Platform) -> Sequence[type[AttentionBackend]]:
    from octavo_paged_attn_cuda.attention import TritonAttention

    return [TritonAttention]


@hookimpl
def octavo_fused_ops(platform: Platform) -> Sequence[type[FusedOps]]:
    from octavo_paged_attn_cuda.ops import TritonOps

    return [TritonOps]


@hookimpl
def octavo_step_graphs(platform: Platform) -> Sequence[type[StepGraph]]:
    from octavo_paged_attn_cuda.graph import CudaGraphs

    return [CudaGraphs]
