"""How K and V sit in a block: the contract, the plain format, and the adapter that lets any backend read any format.

A format owns the bytes: the engine asks it how many a block takes and nobody else computes that. Blocks are allocated
zeroed, and a slot is written before it is read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend, AttentionBatch, AttentionLayer, KVEncoding, LayerKV

if TYPE_CHECKING:
    from octavo.quant.kv_scales import KVScales


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of the KV cache of layers that are stored alike; `dtype` is the compute type of K and V before that."""

    num_layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


class KVFormat(ABC):
    """One way to store K and V. Chosen by `--kv-cache-dtype NAME`, or by layer. One instance serves all layers stored alike.

    Calibrated scales reach only a format that `uses_scales`: one entry for each layer of the model, found by
    `AttentionLayer.index`; none at all mean 1. `without_scales` names the format to choose instead where nobody has any.
    """

    name: ClassVar[str]
    other_names: ClassVar[tuple[str, ...]] = ()
    uses_scales: ClassVar[bool] = False
    without_scales: ClassVar[str | None] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "write" in vars(cls) and "encoding" not in vars(cls):  # what it inherits describes another way of writing
            cls.encoding = KVFormat.encoding  # type: ignore[method-assign]

    def __init__(self, geometry: KVGeometry, scales: Sequence[KVScales] = ()) -> None:
        self.geometry, self.scales = geometry, tuple(scales)

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
        """Bytes that one block takes over all layers of the geometry, scales included: what `allocate` allocates for it."""

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

    def encoding(self, layer: AttentionLayer) -> KVEncoding | None:
        """What `write` does to numbers, where a backend may do it instead; None where only `write` knows.

        A subclass that brings its own `write` states this anew, or it is None.
        """
        return None

    def fold(self, layer: AttentionLayer, query: Tensor) -> Tensor:
        """The query (tokens, heads, head_dim) with a static key scale multiplied in, for backends that read raw storage."""
        return query

    def unfold(self, layer: AttentionLayer, out: Tensor) -> Tensor:
        """The output (tokens, heads, head_dim) of a backend that read raw storage, with a static value scale applied."""
        return out


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """A tensor of zeros that takes host memory only where it is written: what `allocate` should use for big pools."""
    if device != "cpu" or 0 in shape:
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

    def encoding(self, layer: AttentionLayer) -> KVEncoding | None:
        return KVEncoding(self.storage, torch.finfo(self.storage).max)

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


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Which format stores each layer, by layer index. Layers that are stored alike share one instance."""

    formats: tuple[KVFormat, ...]

    @classmethod
    def of(cls, kinds: Sequence[type[KVFormat]], geometry: KVGeometry, scales: Sequence[KVScales] = ()) -> KVLayout:
        """One kind for each layer, given all layers' scales where it uses them. `geometry` is that of the whole model."""
        made: dict[type[KVFormat], KVFormat] = {}
        for kind in dict.fromkeys(kinds):
            own = replace(geometry, num_layers=sum(other is kind for other in kinds))
            made[kind] = kind(own, scales) if kind.uses_scales else kind(own)
        return cls(tuple(made[kind] for kind in kinds))

    @property
    def layers_by_format(self) -> dict[KVFormat, list[int]]:
        """The layers that each format stores, in order of the first."""
        found: dict[KVFormat, list[int]] = {}
        for index, kv_format in enumerate(self.formats):
            found.setdefault(kv_format, []).append(index)
        return found

    @property
    def name(self) -> str:
        """What is stored how: "auto", or "auto (layers 0-1), fp8_e4m3 (layers 2-29)"."""
        parts = self.layers_by_format
        if len(parts) == 1:
            return self.formats[0].name
        return ", ".join(f"{kv_format.name} (layers {ranges(layers)})" for kv_format, layers in parts.items())

    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers."""
        return sum(kv_format.bytes_per_block() for kv_format in self.layers_by_format)


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        values = [value for _, value in run]
        parts.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    return ",".join(parts)


class MixedBackend(AttentionBackend):
    """One backend for each layer, where layers are stored differently."""

    name = "mixed"
    rank = 0
    loads = frozenset()

    def __init__(self, layout: KVLayout, by_layer: Sequence[AttentionBackend]) -> None:
        self.layout, self.by_layer = layout, tuple(by_layer)

    @classmethod
    def why_not(cls, request: Any) -> str | None:
        return "is an adapter, chosen with the backends that it holds"

    def plan(self, batch: AttentionBatch) -> list[Any]:
        plans = {backend: backend.plan(batch) for backend in dict.fromkeys(self.by_layer)}
        return [plans[backend] for backend in self.by_layer]

    def stores(self, layer: AttentionLayer, encoding: KVEncoding) -> bool:
        return self.by_layer[layer.index].stores(layer, encoding)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv: LayerKV,
        encoding: KVEncoding,
        plan: list[Any],
    ) -> Tensor:
        i = layer.index
        return self.by_layer[i].attend(layer, query, key, value, kv, encoding, plan[i])

    def forward(self, layer: AttentionLayer, query: Tensor, kv: LayerKV, plan: list[Any]) -> Tensor:
        i = layer.index
        return _read(self.by_layer[i], self.layout.formats[i], layer, query, kv, plan[i])


class PagedKV:
    """The KV memory of one worker: all layers' blocks, and what is done to whole blocks. One format, or one a layer."""

    def __init__(
        self,
        kv_format: KVFormat | KVLayout,
        layers: Sequence[AttentionLayer],
        num_blocks: int,
        device: str,
        num_host_blocks: int = 0,
    ) -> None:
        self.layout = kv_format if isinstance(kv_format, KVLayout) else KVLayout((kv_format,) * len(layers))
        self.num_blocks, self.num_host_blocks = num_blocks, num_host_blocks
        self.layers = [kv_format.allocate(num_blocks, device) for kv_format in self.layout.formats]
        self.host_layers = [kv_format.allocate(num_host_blocks, "cpu") for kv_format in self.layout.formats]
        if device != "cpu" and num_host_blocks:  # pinned: copies run beside the host
            self.host_layers = [kv.pinned() for kv in self.host_layers]

    @property
    def block_size(self) -> int:
        return self.layout.formats[0].geometry.block_size

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, destination): copy-on-write of a forked request's last block."""
        _copy_blocks(self.layers, self.layers, pairs)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks to the host: (block, host block)."""
        _copy_blocks(self.layers, self.host_layers, pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks back: (host block, block)."""
        _copy_blocks(self.host_layers, self.layers, pairs)


def _copy_blocks(sources: Sequence[LayerKV], targets: Sequence[LayerKV], pairs: Sequence[tuple[int, int]]) -> None:
    """Copies blocks (source, target) of all layers, in the order of the device's other work."""
    if not pairs:
        return
    source_ids, target_ids = (torch.tensor(ids) for ids in zip(*pairs, strict=True))
    for source, target in zip(sources, targets, strict=True):
        for read, written in zip(source.tensors, target.tensors, strict=True):
            if read.device == written.device:
                written[target_ids] = read[source_ids]
            else:
                for source_id, target_id in pairs:
                    written[target_id].copy_(read[source_id], non_blocking=True)


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Everything that attention needs in one step: handed down through the model's forward as an argument."""

    batch: AttentionBatch
    backend: AttentionBackend
    plan: Any
    kv: PagedKV

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stores this step's key and value (tokens, kv_heads, head_dim), then attends: (tokens, heads, head_dim)."""
        kv, kv_format = self.kv.layers[layer.index], self.kv.layout.formats[layer.index]
        encoding = kv_format.encoding(layer)
        if encoding is not None and self.backend.stores(layer, encoding):
            return self.backend.attend(layer, query, key, value, kv, encoding, self.plan)
        kv_format.write(layer, kv, key, value, self.batch.slot_mapping)
        return _read(self.backend, kv_format, layer, query, kv, self.plan)


def _read(
    backend: AttentionBackend, kv_format: KVFormat, layer: AttentionLayer, query: Tensor, kv: LayerKV, plan: Any
) -> Tensor:
    """Attention over stored blocks: raw storage is read between fold and unfold; adapters know the format themselves."""
    if isinstance(backend, DecodingBackend | MixedBackend):
        return backend.forward(layer, query, kv, plan)
    return kv_format.unfold(layer, backend.forward(layer, kv_format.fold(layer, query), kv, plan))
