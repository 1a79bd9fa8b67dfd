"""The conformance kit on the attention kernels: under Triton's interpreter, and on a GPU where there is one.

The interpreter takes half a second for what a GPU does in microseconds. So there each kind of layer is tried with one pair of
types, another one for another layer; on a GPU with all of them.
"""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

import pytest

from octavo import AttentionRequest
from octavo.testing import AttentionBackendSuite, gpu

pytest.importorskip("triton")

from octavo_paged_attn_cuda.attention import TritonAttention
from octavo_paged_attn_cuda.support import COMPUTE_TYPES, interpreted

PAIRS = [(dtype, stored) for stored in sorted(TritonAttention.loads, key=str) for dtype in COMPUTE_TYPES]
needs_the_interpreter = pytest.mark.skipif(not interpreted(), reason="a GPU is here: the kernels are not interpreted")


class OnePair(TritonAttention):
    """The kernels, for one pair of types a layer and block size."""

    @classmethod
    def why_not(cls, request: AttentionRequest) -> str | None:
        kind = repr((request.layers[0], request.block_size))
        if (request.dtype, request.kv_dtype) != PAIRS[crc32(kind.encode()) % len(PAIRS)]:
            return "another pair of types is tried on this layer"
        return super().why_not(replace(request, platform=gpu((9, 0))))


@needs_the_interpreter
class TestAttention(AttentionBackendSuite):
    backend = OnePair

    @pytest.mark.slow
    def test_a_token_does_not_depend_on_its_chunk(self) -> None:
        super().test_a_token_does_not_depend_on_its_chunk()


@pytest.mark.skipif(interpreted(), reason="needs a CUDA device")
class TestAttentionOnGPU(AttentionBackendSuite):
    backend = TritonAttention
    device = "cuda"
