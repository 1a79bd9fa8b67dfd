"""How K and V sit in a block: the contract, the plain format, and the adapter that lets any backend read any format.

A format owns the bytes: the engine asks it how many a block takes and nobody else computes that. Blocks are allocated
zeroed, and a slot is written before it is read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend, AttentionBatch, AttentionLayer, LayerKV


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of a model's KV cache; `dtype` is the compute type of K and V before they are stored."""

    num_layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


class KVFormat(ABC):
    """One way to store K and V. Chosen by `--kv-cache-dtype NAME`."""

    name: ClassVar[str]
    other_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, geometry: KVGeometry) -> None:
        self.geometry = geometry

    @property
    @abstractmethod
    def storage(self) -> torch.dtype:
        """The type of stored K and V elements."""

    @property
    def has_scales(self) -> bool:
        """Whether blocks carry a scale per token and head (`LayerKV.key_scale`, `value_scale`)."""
        return False

    @abstractmethod
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers, scales included: exactly what `allocate` allocates per block."""

    @abstractmethod
    def allocate(self, num_blocks: int, device: str) -> LayerKV:
        """Zeroed blocks for one layer."""

    @abstractmethod
    def write(self, layer: AttentionLayer, kv: LayerKV, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Stores key and value (tokens, kv_heads, head_dim) into slots (tokens,) of `kv`, touching no other slot."""

    @abstractmethod
    def decode(self, layer: AttentionLayer, kv: LayerKV, block_ids: Tensor) -> LayerKV:
        """Blocks (n,) as plain K and V of the compute type, (n, kv_heads, block_size, head_dim) each.

        The contents of slots never written are undefined.
        """

    def fold(self, layer: AttentionLayer, query: Tensor) -> Tensor:
        """The query (tokens, heads, head_dim) with a static key scale multiplied in, for backends that read raw storage."""
        return query

    def unfold(self, layer: AttentionLayer, out: Tensor) -> Tensor:
        """The output (tokens, heads, head_dim) of a backend that read raw storage, with a static value scale applied."""
        return out


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """A tensor of zeros that takes host memory only where it is written: what `allocate` should use for big pools."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize  # torch.zeros would touch every page, calloc does not
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)


class PlainKV(KVFormat):
    """K and V as they are, in the compute type."""

    name = "auto"

    @property
    def storage(self) -> torch.dtype:
        return self.geometry.dtype

    def bytes_per_block(self) -> int:
        g = self.geometry
        return 2 * g.num_layers * g.kv_heads * g.block_size * g.head_dim * self.storage.itemsize

    def allocate(self, num_blocks: int, device: str) -> LayerKV:
        g = self.geometry
        shape = (num_blocks, g.kv_heads, g.block_size, g.head_dim)
        return LayerKV(*(zeroed(shape, self.storage, device) for _ in range(2)))

    def write(self, layer: AttentionLayer, kv: LayerKV, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        block, offset = slot_mapping // self.geometry.block_size, slot_mapping % self.geometry.block_size
        kv.key[block, :, offset] = self._stored(key)
        kv.value[block, :, offset] = self._stored(value)

    def _stored(self, values: Tensor) -> Tensor:
        """Values in the storage type; what exceeds its range becomes its largest number, never infinity."""
        largest = torch.finfo(self.storage).max
        if largest < torch.finfo(values.dtype).max:
            values = values.float().clamp(-largest, largest)
        return values.to(self.storage)

    def decode(self, layer: AttentionLayer, kv: LayerKV, block_ids: Tensor) -> LayerKV:
        return LayerKV(kv.key[block_ids], kv.value[block_ids])


class Float32KV(PlainKV):
    """K and V in fp32, whatever the compute type."""

    name = "float32"
    other_names: ClassVar[tuple[str, ...]] = ("float",)
    _storage: ClassVar[torch.dtype] = torch.float32

    @property
    def storage(self) -> torch.dtype:
        return self._storage

    def decode(self, layer: AttentionLayer, kv: LayerKV, block_ids: Tensor) -> LayerKV:
        dtype = self.geometry.dtype
        return LayerKV(kv.key[block_ids].to(dtype), kv.value[block_ids].to(dtype))


class BFloat16KV(Float32KV):
    """K and V in bf16."""

    name = "bfloat16"
    other_names = ()
    _storage = torch.bfloat16


class Float16KV(Float32KV):
    """K and V in fp16."""

    name = "float16"
    other_names = ("half",)
    _storage = torch.float16


@dataclass(frozen=True, slots=True)
class _DecodedPlan:
    block_ids: Tensor
    inner: Any


class DecodingBackend(AttentionBackend):
    """Any backend over any format: decodes the blocks in use, then lets the backend read those as plain blocks."""

    name = "decoding"
    rank = 0
    loads = frozenset()

    def __init__(self, inner: AttentionBackend, kv_format: KVFormat) -> None:
        self.inner, self.format = inner, kv_format

    @classmethod
    def why_not(cls, request: Any) -> str | None:
        return "is an adapter, chosen with the backend that it wraps"

    def plan(self, batch: AttentionBatch) -> _DecodedPlan:
        used = torch.zeros(int(batch.block_tables.max()) + 1, dtype=torch.int32, device=batch.block_tables.device)
        for row, length in zip(batch.block_tables, batch.seq_lens_list, strict=True):
            used[row[: -(-length // batch.block_size)].long()] = 1
        block_ids = used.nonzero().flatten()
        renumbered = (used.cumsum(0, dtype=torch.int32) - 1).clamp(min=0)
        tables = renumbered[batch.block_tables.long()]
        return _DecodedPlan(block_ids, self.inner.plan(replace(batch, block_tables=tables)))

    def forward(self, layer: AttentionLayer, query: Tensor, kv: LayerKV, plan: _DecodedPlan) -> Tensor:
        decoded = self.format.decode(layer, kv, plan.block_ids)
        return self.inner.forward(layer, query, decoded, plan.inner)


class PagedKV:
    """The KV memory of one worker: all layers' blocks in one format, and what is done to whole blocks."""

    def __init__(self, kv_format: KVFormat, layers: Sequence[AttentionLayer], num_blocks: int, device: str) -> None:
        self.format, self.num_blocks = kv_format, num_blocks
        self.layers = [kv_format.allocate(num_blocks, device) for _ in layers]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, destination): copy-on-write of a forked request's last block."""
        if not pairs:
            return
        source, destination = (torch.tensor(ids) for ids in zip(*pairs, strict=True))
        for kv in self.layers:
            for tensor in kv.tensors:
                tensor[destination] = tensor[source]


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Everything that attention needs in one step: handed down through the model's forward as an argument."""

    batch: AttentionBatch
    backend: AttentionBackend
    plan: Any
    kv: PagedKV

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stores this step's key and value (tokens, kv_heads, head_dim), then attends: (tokens, heads, head_dim)."""
        kv, kv_format = self.kv.layers[layer.index], self.kv.format
        kv_format.write(layer, kv, key, value, self.batch.slot_mapping)
        if isinstance(self.backend, DecodingBackend):
            return self.backend.forward(layer, query, kv, self.plan)
        folded = kv_format.fold(layer, query)
        return kv_format.unfold(layer, self.backend.forward(layer, folded, kv, self.plan))
