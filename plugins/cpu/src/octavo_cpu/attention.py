"""Paged attention over KV blocks of every type that is stored, and the writing of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo import AttentionBackend, AttentionBatch, AttentionLayer, AttentionRequest, KVEncoding, LayerKV
from octavo_cpu.native import STORAGE, native, result, rows_of, why_not

_MOST_HEAD_DIM = 256
"""As csrc/attention_units.h has it."""


@dataclass(slots=True)
class Plan:
    """One step's batch as the native side reads it; the tensors must live as long."""

    batch: AttentionBatch
    handle: Any


@dataclass(slots=True)
class _Layer:
    """A layer's constants and blocks as the native side reads them."""

    layer: AttentionLayer
    kv: LayerKV
    attention: Any
    blocks: Any
    tensors: list[Tensor] = field(default_factory=list)


class NativeAttention(AttentionBackend):
    """Decode and chunked prefill in one kernel; each block is read once for all heads that share it."""

    name = "cpu"
    rank = 30
    loads = frozenset(STORAGE)
    reads_scales = True
    batch_invariant = True

    @classmethod
    def why_not(cls, request: AttentionRequest) -> str | None:
        if (reason := why_not(request.platform, request.dtype)) is not None:
            return reason
        if (widest := max(layer.head_dim for layer in request.layers)) > _MOST_HEAD_DIM:
            return f"is for heads of up to {_MOST_HEAD_DIM}, the model's have {widest}"
        if len({(layer.heads, layer.kv_heads, layer.head_dim) for layer in request.layers}) > 1:
            return "plans a step once, for layers whose heads are alike"
        return None

    def __init__(self, request: AttentionRequest) -> None:
        self._first = _constants(request.layers[0])
        self._layers: dict[tuple[int, bool], _Layer] = {}

    def plan(self, batch: AttentionBatch) -> Plan:
        tables = batch.block_tables.contiguous()
        handle = native().Batch(
            len(batch.seq_lens_list),
            len(batch.slot_mapping),
            batch.block_size,
            batch.query_start_loc.data_ptr(),
            batch.seq_lens.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            batch.slot_mapping.data_ptr(),
        )
        handle.plan(self._first)
        return Plan(batch, handle)

    def stores(self, layer: AttentionLayer, encoding: KVEncoding) -> bool:
        return encoding.storage in STORAGE

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv: LayerKV,
        encoding: KVEncoding,
        plan: Plan,
    ) -> Tensor:
        known = self._known(layer, kv, encoding)
        key, value = rows_of(key), rows_of(value)
        native().store_kv(
            known.attention,
            known.blocks,
            plan.handle,
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
        )
        return self._read(known, query, plan)

    def forward(self, layer: AttentionLayer, query: Tensor, kv: LayerKV, plan: Plan) -> Tensor:
        return self._read(self._known(layer, kv, None), query, plan)

    def _read(self, known: _Layer, query: Tensor, plan: Plan) -> Tensor:
        query = rows_of(query)
        out = result(len(query), *query.shape[1:])
        native().attend(known.attention, known.blocks, plan.handle, query.data_ptr(), query.stride(0), out.data_ptr())
        return out

    def _known(self, layer: AttentionLayer, kv: LayerKV, encoding: KVEncoding | None) -> _Layer:
        """The layer's handles; made again where it comes with other blocks than the last time."""
        key = (layer.index, encoding is not None)
        known = self._layers.get(key)
        if known is None or known.kv is not kv or known.layer != layer:
            self._layers[key] = known = _prepare(layer, kv, encoding)
        return known


def _constants(layer: AttentionLayer) -> Any:
    return native().Attention(
        layer.heads, layer.kv_heads, layer.head_dim, layer.scale, layer.sliding_window or 0, layer.soft_cap or 0.0
    )


def _prepare(layer: AttentionLayer, kv: LayerKV, encoding: KVEncoding | None) -> _Layer:
    tensors: list[Tensor] = []

    def by_head(scale: Tensor | None) -> int:
        if scale is None:
            return 0
        tensors.append(scale.float().expand(layer.kv_heads).contiguous())
        return tensors[-1].data_ptr()

    static = (None, None) if encoding is None else (encoding.key_scale, encoding.value_scale)
    scale_type = torch.float32 if kv.key_scale is None else kv.key_scale.dtype
    blocks = native().KVBlocks(
        STORAGE[kv.key.dtype],
        kv.key.data_ptr(),
        kv.value.data_ptr(),
        STORAGE[scale_type],
        *(0 if scale is None else scale.data_ptr() for scale in (kv.key_scale, kv.value_scale)),
        *(by_head(scale) for scale in static),
    )
    return _Layer(layer, kv, _constants(layer), blocks, tensors)
