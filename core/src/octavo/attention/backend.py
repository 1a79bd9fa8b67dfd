"""The contract of an attention kernel, what it is told about a step, and how one is chosen.

A backend reads KV blocks and never writes them; `KVFormat` writes. What a step looks like is planned once (`plan`), then
every layer is a `forward`. Nothing is kept between calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.platforms import Platform


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The K and V blocks of one layer: `key` and `value` (num_blocks, kv_heads, block_size, head_dim).

    `key_scale` and `value_scale` (num_blocks, kv_heads, block_size) exist only in formats with a scale per token and head.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors present; each has the blocks as its first dimension."""
        found = (self.key, self.value, self.key_scale, self.value_scale)
        return tuple(t for t in found if t is not None)

    def pinned(self) -> LayerKV:
        """The same in page-locked host memory, from which a GPU copies beside other work."""
        found = (self.key, self.value, self.key_scale, self.value_scale)
        return LayerKV(*(None if t is None else t.pin_memory() for t in found))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class KVEncoding:
    """The arithmetic of a KV format, for backends that write blocks themselves: clamp(x / scale) to the storage type.

    Scales (1,) or (kv_heads,) fp32 are constants of the layer, None for 1. With `smallest_scale` each token and head has its
    own, max(largest magnitude / `largest`, smallest_scale), kept in `LayerKV`; magnitudes above 2^127 count as that. NaN stays
    NaN, in the scale where a type has no code for it.
    """

    storage: torch.dtype
    largest: float  # number that is written; what is beyond becomes it
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    smallest_scale: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What one step computes, for `requests` sequences and `tokens` scheduled tokens. Prefill and decode look alike.

    Tokens of a request are consecutive and end at its `seq_lens`. Index tensors are int32 on the compute device.

    All entries of `block_tables` are valid ids, but not all are the request's own: those past its last block are not, and where
    every layer has a sliding window, neither are those wholly before the widest window of its first scheduled token. Such
    blocks may belong to others or to nobody and hold NaN: they are not to be read, not even to be masked afterwards.
    """

    query_start_loc: Tensor  # (requests + 1,) first scheduled token of each request
    seq_lens: Tensor  # (requests,) tokens of the request once this step is done
    block_tables: Tensor  # (requests, max_blocks); only entries that the docstring names are the request's
    slot_mapping: Tensor  # (tokens,) int64 slot = block * block_size + offset that each token's K and V go to
    prompt_lens: Tensor  # (requests,)
    query_lens_list: Sequence[int]  # the same numbers on the host
    seq_lens_list: Sequence[int]
    block_size: int


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The constants of one layer's attention: softmax(scale * q k^T, masked) v.

    `sliding_window` w lets position p see p - w + 1 ... p; `soft_cap` c replaces scores s by c * tanh(s / c).
    """

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionRequest:
    """A model that needs an attention kernel: its layers, the compute type, and how KV is stored."""

    layers: Sequence[AttentionLayer]
    dtype: torch.dtype
    block_size: int
    kv_dtype: torch.dtype  # type of the blocks that the backend would read
    platform: Platform
    kv_has_scales: bool = False  # whether those blocks come with a scale per token and head


class AttentionBackend(ABC):
    """A paged attention kernel. `rank` as in LinearMethod.

    `loads` are the KV storage types it reads natively, with `reads_scales` also those that come with `LayerKV.key_scale` and
    `value_scale`. Of other blocks it gets decoded copies in the compute type. `batch_invariant` promises the same bits for a
    token whatever else the step computes, of its own sequence or of others.
    """

    name: ClassVar[str]
    rank: ClassVar[int]
    loads: ClassVar[frozenset[torch.dtype]]
    reads_scales: ClassVar[bool] = False
    batch_invariant: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def why_not(cls, request: AttentionRequest) -> str | None:
        """None if this kernel serves all layers of the request, else a sentence for the user. Never raises."""

    @abstractmethod
    def __init__(self, request: AttentionRequest) -> None: ...

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> Any:
        """Prepares a step; the result is handed to each `forward` of that step."""

    def stores(self, layer: AttentionLayer, encoding: KVEncoding) -> bool:
        """Whether `attend` writes such K and V itself; else their format does before each `forward`."""
        return False

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv: LayerKV,
        encoding: KVEncoding,
        plan: Any,
    ) -> Tensor:
        """Stores key and value (tokens, kv_heads, head_dim) as their format would, bit for bit, then attends as `forward`.

        Scales are part of what it reads: nothing is folded into the query.
        """
        raise NotImplementedError

    @abstractmethod
    def forward(self, layer: AttentionLayer, query: Tensor, kv: LayerKV, plan: Any) -> Tensor:
        """query (tokens, heads, head_dim) -> (tokens, heads, head_dim), causal. Head h reads KV head h // (heads / kv_heads).

        Reads only slots that belong to the batch's sequences: any other slot may hold NaN.
        """
