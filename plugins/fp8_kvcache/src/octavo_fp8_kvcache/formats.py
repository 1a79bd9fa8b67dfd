"""How 8-bit K and V lie in blocks: codes (num_blocks, kv_heads, block_size, head_dim), and scales per token and head, if any.

Static scales are constants of a layer, folded out of a kernel: into the query those of K, into the output those of V.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo import AttentionLayer, KVEncoding, KVFormat, KVGeometry, KVScales, LayerKV, zeroed
from octavo_fp8_kvcache.codes import E4M3, E5M2, LARGEST, as_compute, bounded, encode

_SMALLEST_SCALE = 1e-6
"""Of a token's head: what an all-zero one gets, as in vLLM."""


class _ByteKV(KVFormat):
    """One byte an element."""

    _storage: torch.dtype

    @property
    def storage(self) -> torch.dtype:
        return self._storage

    def bytes_per_block(self) -> int:
        g = self.geometry
        scale_bytes = torch.float32.itemsize if self.has_scales else 0
        return 2 * g.num_layers * g.kv_heads * g.block_size * (g.head_dim + scale_bytes)

    def allocate(self, num_blocks: int, device: str) -> LayerKV:
        g = self.geometry
        shape = (num_blocks, g.kv_heads, g.block_size)
        codes = [zeroed((*shape, g.head_dim), self.storage, device) for _ in range(2)]
        scales = [zeroed(shape, torch.float32, device) for _ in range(2)] if self.has_scales else []
        return LayerKV(*codes, *scales)

    def _put(self, blocks: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        """Stores values (tokens, kv_heads, ...) at slots (tokens,) of blocks (num_blocks, kv_heads, block_size, ...)."""
        size = self.geometry.block_size
        _bits(blocks)[slot_mapping // size, :, slot_mapping % size] = _bits(values)


def _bits(tensor: Tensor) -> Tensor:
    """Bytes stay what they are when they are moved, on versions of torch too that cannot index fp8."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


class _StaticKV(_ByteKV):
    """Codes times constants of the layer: K times its scale k, V times its v, each for the tensor or for each KV head."""

    def __init__(self, geometry: KVGeometry, scales: Sequence[KVScales] = ()) -> None:
        super().__init__(geometry, scales)
        self._placed: dict[tuple[int, str, torch.device], Tensor] = {}

    def write(self, layer: AttentionLayer, kv: LayerKV, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        for blocks, values, side in ((kv.key, key, "k"), (kv.value, value, "v")):
            scale = self._scale(layer, side, values)
            scaled = values.float() if scale is None else values.float() / scale[:, None]
            self._put(blocks, encode(scaled, self.storage), slot_mapping)

    def encoding(self, layer: AttentionLayer) -> KVEncoding | None:
        key_scale, value_scale = (self._scale(layer, side, torch.empty(0)) for side in "kv")
        return KVEncoding(self.storage, LARGEST[self.storage], key_scale, value_scale)

    def decode(self, layer: AttentionLayer, kv: LayerKV, block_ids: Tensor) -> LayerKV:
        decoded = []
        for blocks, side in ((kv.key, "k"), (kv.value, "v")):
            codes = _bits(blocks)[block_ids].view(self.storage).float()
            scale = self._scale(layer, side, codes)
            scaled = codes if scale is None else codes * scale[:, None, None]
            decoded.append(as_compute(scaled, self.geometry.dtype))
        return LayerKV(*decoded)

    def fold(self, layer: AttentionLayer, query: Tensor) -> Tensor:
        return _times(query, self._scale(layer, "k", query))

    def unfold(self, layer: AttentionLayer, out: Tensor) -> Tensor:
        return _times(out, self._scale(layer, "v", out))

    def _scale(self, layer: AttentionLayer, side: str, like: Tensor) -> Tensor | None:
        """A layer's scale for K or V, (1,) or (kv_heads,), where `like` lies; None: it is 1."""
        if not self.scales:
            return None
        place = (layer.index, side, like.device)
        if place not in self._placed:  # one copy to the device, not one in every step
            scale: Tensor = getattr(self.scales[layer.index], side)
            self._placed[place] = scale.reshape(-1).to(like.device, torch.float32)
        return self._placed[place]


def _times(heads: Tensor, scale: Tensor | None) -> Tensor:
    """(tokens, heads, head_dim) times a scale, each query head by that of the KV head that it reads."""
    if scale is None:
        return heads
    by_head = scale if len(scale) == 1 else scale.repeat_interleave(heads.shape[1] // len(scale))
    return (heads.float() * by_head[:, None]).to(heads.dtype)


class E4M3KV(_StaticKV):
    """fp8 E4M3 with calibrated scales."""

    name = "fp8_e4m3"
    other_names = ("fp8",)
    uses_scales = True
    without_scales = "fp8_per_token_head"
    _storage = E4M3


class E5M2KV(_StaticKV):
    """fp8 E5M2, as computed: its range needs no scale, its two bits of mantissa are coarse."""

    name = "fp8_e5m2"
    _storage = E5M2


class E4M3PerTokenHeadKV(_ByteKV):
    """fp8 E4M3 with a scale for each token and KV head, for K and V each, computed when they are written."""

    name = "fp8_per_token_head"
    _storage = E4M3

    @property
    def has_scales(self) -> bool:
        return True

    def write(self, layer: AttentionLayer, kv: LayerKV, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        for blocks, scales, values in ((kv.key, kv.key_scale, key), (kv.value, kv.value_scale, value)):
            assert scales is not None
            numbers = bounded(values)
            scale = (numbers.abs().amax(-1) / LARGEST[self.storage]).clamp(min=_SMALLEST_SCALE)
            self._put(blocks, encode(numbers / scale[..., None], self.storage), slot_mapping)
            self._put(scales, scale, slot_mapping)

    def encoding(self, layer: AttentionLayer) -> KVEncoding | None:
        return KVEncoding(self.storage, LARGEST[self.storage], smallest_scale=_SMALLEST_SCALE)

    def decode(self, layer: AttentionLayer, kv: LayerKV, block_ids: Tensor) -> LayerKV:
        decoded = []
        for blocks, scales in ((kv.key, kv.key_scale), (kv.value, kv.value_scale)):
            assert scales is not None
            codes = _bits(blocks)[block_ids].view(self.storage).float()
            decoded.append(as_compute(codes * scales[block_ids][..., None], self.geometry.dtype))
        return LayerKV(*decoded)


class Int8PerTokenHeadKV(E4M3PerTokenHeadKV):
    """int8, -127 ... 127, with a scale for each token and KV head: finer than E4M3 near a head's largest number."""

    name = "int8_per_token_head"
    _storage = torch.int8
