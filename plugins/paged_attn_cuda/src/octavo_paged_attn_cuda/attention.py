"""The attention backend: a step is divided once (`plan`), then each layer is one or two launches, and one more for sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo import AttentionBackend, AttentionBatch, AttentionLayer, AttentionRequest, KVEncoding, LayerKV
from octavo_paged_attn_cuda.support import COMPUTE_TYPES, interpreted, multiprocessors, power_of_two, why_not
from octavo_paged_attn_cuda.work import Tiling, Work, divide, graph_size, most_items

_CODES = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2, torch.int8: 3}
"""As kernels.codes numbers them; 0 are floats."""
_MOST_HEAD_DIM = 256
_MOST_ROWS = 128
_PER_MULTIPROCESSOR = 4
"""Programs that a multiprocessor has room for, by registers and shared memory of the decode kernel."""
_SLOTS = 16
"""Parts that `reduce` sums at once."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel's tiles and how it is compiled."""

    tiling: Tiling
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one launch of a step does: `items` and `merges` of `Work`, on the device.

    Rows of -1 are none; the first `num_items` and `num_merges` are those of the step. `merged_rows` is how many of a tile's
    rows have parts to be summed, at most, `num_slots` how many parts there are.
    """

    launch: Launch
    items: Tensor
    merges: Tensor
    num_items: int
    num_merges: int
    merged_rows: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, divided. `shares` by window: launches for decoding requests and for others."""

    batch: AttentionBatch
    shares: dict[int | None, tuple[Share, ...]]


class TritonAttention(AttentionBackend):
    """Decode with positions cut into parts, prefill in tiles; K and V of any storage type, each loaded once for its heads."""

    name = "triton"
    rank = 20
    loads = frozenset({*COMPUTE_TYPES, *_CODES})
    reads_scales = True

    @classmethod
    def why_not(cls, request: AttentionRequest) -> str | None:
        if (reason := why_not(request.platform, request.dtype)) is not None:
            return reason
        if (widest := max(layer.head_dim for layer in request.layers)) > _MOST_HEAD_DIM:
            return f"is for heads of up to {_MOST_HEAD_DIM}, the model's have {widest}"
        if len({(layer.heads, layer.kv_heads, layer.head_dim) for layer in request.layers}) > 1:
            return "plans a step once, for layers whose heads are alike"
        if (group := request.layers[0].heads // request.layers[0].kv_heads) > _MOST_ROWS:
            return f"serves up to {_MOST_ROWS} query heads a KV head, the model has {group}"
        return None

    def __init__(self, request: AttentionRequest) -> None:
        self.first = first = request.layers[0]
        self.kv_heads, self.group = first.kv_heads, first.heads // first.kv_heads
        self.width = power_of_two(first.head_dim, 16)
        self.windows = tuple(dict.fromkeys(layer.sliding_window for layer in request.layers))
        self.native_fp8 = request.platform.capability is not None and request.platform.capability >= (8, 9)
        self.decode, self.prefill = launches(
            self.group, self.width, request.dtype, request.kv_dtype, request.platform.capability
        )

    def plan(self, batch: AttentionBatch) -> Plan:
        device = batch.seq_lens.device
        lens = np.asarray(batch.query_lens_list)
        decoding = lens <= self.decode.tiling.tokens
        programs = self.programs(device)
        single = all(num == 1 for num in batch.query_lens_list)
        room = most_items(graph_size(len(lens)), programs) if single else 0
        shares = {}
        for window in self.windows:
            found = []
            for launch, chosen in ((self.decode, decoding), (self.prefill, ~decoding)):
                if chosen.any():
                    work = divide(batch.query_lens_list, batch.seq_lens_list, chosen, launch.tiling, window, programs)
                    found.append(self._share(launch, work, device, room))
            shares[window] = tuple(found)
        return Plan(batch, shares)

    def programs(self, device: torch.device) -> int:
        """Of one KV head, how many should run at once."""
        return max(1, _PER_MULTIPROCESSOR * multiprocessors(device) // self.kv_heads)

    def _share(self, launch: Launch, work: Work, device: torch.device, room: int) -> Share:
        """With `room` for so many items: steps of one token a request are recorded, and the record serves many."""
        numbers = np.full((max(room, len(work.items)) * 8 + max(room, len(work.merges)) * 5,), -1, dtype=np.int32)
        split = max(room, len(work.items)) * 8
        numbers[: work.items.size] = work.items.reshape(-1)
        numbers[split : split + work.merges.size] = work.merges.reshape(-1)
        placed = upload(numbers, device)
        return Share(
            launch,
            placed[:split].view(-1, 8),
            placed[split:].view(-1, 5),
            len(work.items),
            len(work.merges),
            min(int(work.merges[:, 1].max(initial=0)), launch.tiling.rows),
            work.slots,
        )

    def stores(self, layer: AttentionLayer, encoding: KVEncoding) -> bool:
        return encoding.storage in self.loads

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
        store_kv(layer, key, value, kv, encoding, plan.batch.slot_mapping)
        return self._attend(layer, query, kv, plan, (encoding.key_scale, encoding.value_scale))

    def forward(self, layer: AttentionLayer, query: Tensor, kv: LayerKV, plan: Plan) -> Tensor:
        return self._attend(layer, query, kv, plan, (None, None))

    def _attend(
        self, layer: AttentionLayer, query: Tensor, kv: LayerKV, plan: Plan, static: tuple[Tensor | None, Tensor | None]
    ) -> Tensor:
        from octavo_paged_attn_cuda.kernels import attention as kernels

        query = heads_joined(query)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        tables = plan.batch.block_tables
        k_static, v_static = (None if scale is None else scale.reshape(-1) for scale in static)
        precision = "ieee" if query.dtype == torch.float32 else "tf32"
        for share in plan.shares[layer.sliding_window]:
            launch, tiling = share.launch, share.launch.tiling
            slots = (share.num_slots, self.kv_heads, tiling.rows)
            parts = torch.empty((*slots, self.width), dtype=torch.float32, device=query.device)
            sums = torch.empty((*slots, 2), dtype=torch.float32, device=query.device)
            kernels.attend[(share.num_items, self.kv_heads)](
                *(out, parts, sums, query, query.stride(0)),
                *(codes_of(kv.key), codes_of(kv.value), *kv.key.stride()[:3], *kv.value.stride()[:3]),
                *(kv.key_scale, kv.value_scale, *scale_strides(kv)),
                *(k_static, v_static, static_stride(k_static), static_stride(v_static)),
                *(share.items, tables, tables.stride(0)),
                *(layer.scale, layer.soft_cap or 0.0, layer.sliding_window or 0),
                KV_HEADS=self.kv_heads,
                GROUP=self.group,
                HEAD_DIM=layer.head_dim,
                PAGE=plan.batch.block_size,
                KIND=_CODES.get(kv.key.dtype, 0),
                NATIVE=self.native_fp8,
                WINDOW=layer.sliding_window is not None,
                CAP=layer.soft_cap is not None,
                ROWS=tiling.rows,
                COLUMNS=tiling.columns,
                WIDTH=self.width,
                PRECISION=precision,
                STAGES=launch.num_stages,
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
                enable_fp_fusion=True,
            )
            if share.num_merges:
                kernels.reduce[(share.num_merges, self.kv_heads, share.merged_rows)](
                    *(out, parts, sums, share.merges, v_static, static_stride(v_static)),
                    KV_HEADS=self.kv_heads,
                    GROUP=self.group,
                    HEAD_DIM=layer.head_dim,
                    ROWS=tiling.rows,
                    WIDTH=self.width,
                    SLOTS=_SLOTS,
                    num_warps=4,
                    enable_fp_fusion=True,
                )
        return out


def launches(
    group: int, width: int, dtype: torch.dtype, stored: torch.dtype, capability: tuple[int, int] | None
) -> tuple[Launch, Launch]:
    """The launches for decoding requests, whose heads fit in one tile, and for others: as registers and shared memory allow.

    The numbers are those under which nothing spills, or least: see tests/aot_cases.py.
    """
    rows = min(power_of_two(group, 16), _MOST_ROWS)
    if interpreted():  # each operation costs the same, whatever its size
        return Launch(Tiling(group, rows, 128), 1, 1), Launch(Tiling(group, 128, 128), 1, 1)
    hopper = capability is not None and capability >= (9, 0)
    small = stored.itemsize == 1
    if dtype == torch.float32:  # without tensor cores
        launch = Launch(Tiling(group, rows, 32 if width <= 128 else 16), 8, 2)
        return launch, launch
    if rows > 32:
        decode = Launch(Tiling(group, rows, 32), 8, 2)
    else:
        decode = Launch(Tiling(group, rows, 64 if width <= 128 else 32), 8 if small else 4, 3)
    if width > 128:
        return decode, Launch(Tiling(group, 128, 64), 8, 2) if hopper else Launch(Tiling(group, 64, 32), 8, 2)
    if hopper:
        return decode, Launch(Tiling(group, 128, 64 if small else 128), 8, 3 if small else 2)
    return decode, Launch(Tiling(group, 64, 32), 4, 3) if small else Launch(Tiling(group, 128, 64), 8, 2)


def store_kv(
    layer: AttentionLayer, key: Tensor, value: Tensor, kv: LayerKV, encoding: KVEncoding, slots: Tensor
) -> None:
    """Writes key and value (tokens, kv_heads, head_dim) into slots (tokens,), as their format would; slots < 0 are left out."""
    from octavo_paged_attn_cuda.kernels import store as kernels

    key, value = heads_joined(key), heads_joined(value)
    kind, given = _CODES.get(encoding.storage, 0), torch.finfo(key.dtype).max
    k_static, v_static = (
        None if scale is None else scale.reshape(-1) for scale in (encoding.key_scale, encoding.value_scale)
    )
    by_head = encoding.smallest_scale is not None
    kernels.store[(len(slots), 2)](
        *(key, value, key.stride(0), value.stride(0)),
        *(codes_of(kv.key), codes_of(kv.value), *kv.key.stride()[:3], *kv.value.stride()[:3]),
        *((kv.key_scale, kv.value_scale) if by_head else (None, None)),
        *scale_strides(kv),
        *(k_static, v_static, static_stride(k_static), static_stride(v_static)),
        *(slots, encoding.largest, min(given, 2.0**127), encoding.smallest_scale or 0.0),
        KV_HEADS=layer.kv_heads,
        HEAD_DIM=layer.head_dim,
        PAGE=kv.key.shape[2],
        KIND=kind,
        CLAMPS=kind > 0 or k_static is not None or encoding.largest < given,
        HEADS=power_of_two(layer.kv_heads, 1),
        WIDTH=power_of_two(layer.head_dim, 16),
        num_warps=4,
        enable_fp_fusion=True,
    )


def codes_of(blocks: Tensor) -> Tensor:
    """Blocks as the kernels load them: fp8 as bytes, everything else as it is."""
    return blocks.view(torch.uint8) if blocks.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else blocks


def scale_strides(kv: LayerKV) -> Sequence[int]:
    return (0, 0, 0) if kv.key_scale is None else kv.key_scale.stride()


def static_stride(scale: Tensor | None) -> int:
    """One scale for the layer, or one for each KV head."""
    return 0 if scale is None or len(scale) == 1 else 1


def heads_joined(rows: Tensor) -> Tensor:
    """(tokens, heads, head_dim) whose heads lie one after another; tokens may lie apart, as parts of a fused q|k|v do."""
    joined = rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
    return rows if joined else rows.contiguous()


def upload(numbers: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """To a GPU while this process goes on."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
