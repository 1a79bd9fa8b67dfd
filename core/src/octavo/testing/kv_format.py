"""The conformance suite of KV formats: what is written is read back, nothing else is touched, and bytes are counted right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from octavo.attention.backend import AttentionLayer, AttentionRequest, LayerKV
from octavo.attention.kv_format import KVFormat, KVGeometry
from octavo.attention.reference import ReferenceAttention
from octavo.platforms import Platform
from octavo.quant.kv_scales import KVScales
from octavo.testing.paging import Pool, lay_out
from octavo.testing.suite import Suite, as_bytes, deviation, expect_none_wrong, same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_BLOCKS = 7
_LAYER = 1
"""Index of the layer that is written: not the first, so that its scales are not either."""


class KVFormatSuite(Suite):
    """Set `format` to the `KVFormat` under test.

    Values must come back within `read_error`, or within `relative_error` times the largest magnitude of the token's head for
    a format that sets it (0.04 say, for 4 bits): None judges by the storage type.
    """

    format: ClassVar[type[KVFormat]]
    relative_error: ClassVar[float | None] = None
    _subject = "format"

    def test_names(self) -> None:
        names = [self.format.name, *self.format.other_names]
        for name in names:
            assert isinstance(name, str), f"{name!r} is not a string"
            assert name == name.strip().lower() != "", f"'{name}' must be lower case, without spaces around"
        assert len(set(names)) == len(names), f"a name occurs twice in {names}"

    def test_bytes_per_block_is_what_allocate_takes(self) -> None:
        wrong = []
        geometries = list(_geometries())
        for geometry in geometries:
            kv_format = self.format(geometry)
            for num_blocks in (1, 2, NUM_BLOCKS):
                layers = [kv_format.allocate(num_blocks, self.device) for _ in range(geometry.num_layers)]
                storages = [tensor.untyped_storage() for kv in layers for tensor in kv.tensors]
                taken = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
                if taken != num_blocks * kv_format.bytes_per_block():
                    per_block = kv_format.bytes_per_block()
                    wrong.append(f"{geometry}: {num_blocks} blocks take {taken} bytes, not {num_blocks} x {per_block}")
        expect_none_wrong(wrong, 3 * len(geometries))

    def test_blocks_start_zeroed(self) -> None:
        for geometry in _geometries():
            for tensor in self.format(geometry).allocate(NUM_BLOCKS, self.device).tensors:
                assert not as_bytes(tensor).any(), f"{geometry}: allocate returned bytes that are not 0"

    def test_shapes_and_types(self) -> None:
        for geometry in _geometries():
            kv_format = self.format(geometry)
            kv = kv_format.allocate(NUM_BLOCKS, self.device)
            dims = (NUM_BLOCKS, geometry.kv_heads, geometry.block_size)
            for tensor in kv.tensors:
                assert tuple(tensor.shape[:3]) == dims, (
                    f"{geometry}: a tensor is {tuple(tensor.shape)}, not {dims} + ..."
                )
            for tensor in (kv.key, kv.value):
                assert tensor.dtype == kv_format.storage, f"storage is {kv_format.storage}, blocks are {tensor.dtype}"
            decoded = kv_format.decode(_layer(geometry), kv, torch.tensor([3, 0], device=self.device))
            for tensor in decoded.tensors:
                assert tensor.dtype == geometry.dtype, f"{geometry}: decoded to {tensor.dtype}"
                assert tuple(tensor.shape) == (2, *dims[1:], geometry.head_dim), f"decoded shape {tuple(tensor.shape)}"
            assert len(decoded.tensors) == 2, "decoded blocks must be plain, without scales"

    def test_what_is_written_is_read(self) -> None:
        wrong, geometries = [], list(_geometries())
        for geometry in geometries:
            written = _Written(self.format, geometry, self.device)
            for name, found, given in written.read():
                if (reason := deviation(found, given, self.read_error(given, written.format))) is not None:
                    wrong.append(f"{geometry}: {name}: {reason}")
        expect_none_wrong(wrong, len(geometries))

    def test_small_and_large_values_are_read(self) -> None:
        wrong, geometries = [], list(_geometries())
        for geometry in geometries:
            for factor in (0.05, 20.0):
                written = _Written(self.format, geometry, self.device, factor=factor)
                for name, found, given in written.read():
                    if (reason := deviation(found, given, self.read_error(given, written.format))) is not None:
                        wrong.append(f"{geometry}: {name} of about {factor}: {reason}")
        expect_none_wrong(wrong, 2 * len(geometries))

    def test_extreme_values_stay_finite(self) -> None:
        for geometry in _geometries():
            written = _Written(self.format, geometry, self.device, extreme=True)
            for name, found, given in written.read():
                assert bool(torch.isfinite(found).all()), (
                    f"{geometry}: {name} of 0 and +-1e4 come back as NaN or infinite"
                )
                assert bool((found[given == 0] == 0).all()), f"{geometry}: {name} of 0 comes back as another value"
                assert bool((found.sign() == given.sign()).all()), f"{geometry}: {name} of +-1e4 lost its sign"

    def test_no_other_slot_is_touched(self) -> None:
        for geometry in _geometries():
            kv_format = self.format(geometry)
            for slots in _slot_lists(geometry.block_size):
                kv = kv_format.allocate(NUM_BLOCKS, self.device)
                for tensor in kv.tensors:
                    noise = torch.randint(0, 256, as_bytes(tensor).shape, dtype=torch.uint8)
                    tensor.copy_(noise.view(tensor.dtype).squeeze(-1))
                before = [_by_slot(tensor) for tensor in kv.tensors]
                key, value = _values(len(slots), geometry, self.device)
                kv_format.write(_layer(geometry), kv, key, value, torch.tensor(slots, device=self.device))
                others = sorted(set(range(NUM_BLOCKS * geometry.block_size)) - set(slots))
                for tensor, then in zip(kv.tensors, before, strict=True):
                    touched = (_by_slot(tensor)[others] != then[others]).flatten(1).any(1).nonzero().flatten()
                    names = [others[int(i)] for i in touched]
                    assert not names, f"{geometry}: writing slots {slots} changed slots {names}"

    def test_a_slot_can_be_overwritten(self) -> None:
        for geometry in _geometries():
            written = _Written(self.format, geometry, self.device, factor=30.0)
            fresh = _Written(self.format, geometry, self.device, seed=1)
            written.write(fresh.key, fresh.value, fresh.slots)
            assert written.equals(fresh), f"{geometry}: a slot written twice differs from one written once"

    def test_tokens_are_stored_independently(self) -> None:
        for geometry in _geometries():
            together = _Written(self.format, geometry, self.device)
            order = torch.randperm(len(together.slots)).to(self.device)
            for name, groups in {"in another order": [order], "one by one": list(order[:, None])}.items():
                kv = together.format.allocate(NUM_BLOCKS, self.device)
                apart = together.with_blocks(kv)
                for rows in groups:
                    apart.write(together.key[rows], together.value[rows], together.slots[rows])
                assert apart.equals(together), f"{geometry}: tokens written {name} give other bytes"

    def test_other_slots_do_not_matter(self) -> None:
        for geometry in _geometries():
            plain = _Written(self.format, geometry, self.device)
            kv = plain.format.allocate(NUM_BLOCKS, self.device)
            for tensor in kv.tensors:
                tensor.copy_(torch.full_like(tensor, float("nan") if tensor.dtype.is_floating_point else 99))
            dirty = plain.with_blocks(kv)
            dirty.write(plain.key, plain.value, plain.slots)
            for (name, found, _), (_, expected, _) in zip(dirty.read(), plain.read(), strict=True):
                assert same_bits(found, expected), f"{geometry}: {name} depends on what lay in the blocks before"

    def test_strided_inputs(self) -> None:
        for geometry in _geometries():
            plain = _Written(self.format, geometry, self.device)
            kv_heads = geometry.kv_heads
            fused = torch.cat([plain.key, plain.value], dim=1)
            strided = plain.with_blocks(plain.format.allocate(NUM_BLOCKS, self.device))
            strided.write(fused[:, :kv_heads], fused[:, kv_heads:], plain.slots)
            assert strided.equals(plain), f"{geometry}: key and value cut from a fused projection give other bytes"

    def test_modifies_no_input(self) -> None:
        for geometry in _geometries():
            written = _Written(self.format, geometry, self.device)
            given = [t.clone() for t in (written.key, written.value, written.slots)]
            written.write(written.key, written.value, written.slots)
            blocks = [t.clone() for t in written.kv.tensors]
            written.read()
            now = (written.key, written.value, written.slots, *written.kv.tensors)
            assert all(same_bits(a, b) for a, b in zip(now, (*given, *blocks), strict=True)), "an input was modified"

    def test_decode_takes_blocks_in_any_order(self) -> None:
        for geometry in _geometries():
            written = _Written(self.format, geometry, self.device)
            everything = written.decode(range(NUM_BLOCKS))
            for ids in ([4], [6, 0, 2], [1, 1, 5], list(range(NUM_BLOCKS))[::-1]):
                for found, whole in zip(written.decode(ids).tensors, everything.tensors, strict=True):
                    assert same_bits(found, whole[ids]), (
                        f"{geometry}: decode of blocks {ids} differs from decode of all"
                    )

    def test_raw_storage_with_folded_scales_equals_decoded_blocks(self) -> None:
        """A backend that reads the storage type computes, between fold and unfold, what it computes over decoded blocks."""
        for geometry, made in _with_scales(self.format):
            written = _attended(made, self.device)
            if written is None:
                continue
            kv_format, (kv, pool, layer) = made, written
            platform = Platform.detect(self.device)
            backend = ReferenceAttention(
                AttentionRequest([layer], torch.float32, geometry.block_size, torch.float32, platform)
            )
            plan, query = backend.plan(pool.batch(self.device)), pool.queries().to(self.device)
            decoded = kv_format.decode(layer, kv, torch.arange(pool.num_blocks, device=self.device))
            expected = backend.forward(layer, query, decoded, plan)
            raw = LayerKV(kv.key.float(), kv.value.float())
            found = kv_format.unfold(layer, backend.forward(layer, kv_format.fold(layer, query), raw, plan))
            reason = deviation(found, expected, 1e-4 * (1 + expected.double().abs()))
            assert reason is None, f"{geometry}: {reason}"

    def test_calibrated_scales_divide_what_is_stored(self) -> None:
        """A format that `uses_scales` stores K / k and V / v of the layer as it stores numbers without scales."""
        for geometry, made in _with_scales(self.format):
            if not made.scales:
                continue
            plain, layer = self.format(geometry), _layer(geometry)
            slots = torch.arange(geometry.block_size + 3, device=self.device)
            key, value = _values(len(slots), geometry, self.device)
            scales = made.scales[layer.index]
            kv, expected = (kv_format.allocate(2, self.device) for kv_format in (made, plain))
            made.write(layer, kv, key, value, slots)
            by_k, by_v = (one.to(self.device).reshape(-1, 1) for one in (scales.k, scales.v))
            plain.write(layer, expected, key / by_k, value / by_v, slots)
            for stored, other in zip(kv.tensors, expected.tensors, strict=True):
                assert same_bits(stored, other), f"{geometry}: what is stored is not K or V over its scale"
            blocks = torch.arange(2, device=self.device)
            found, undone = made.decode(layer, kv, blocks), plain.decode(layer, expected, blocks)
            assert same_bits(found.key, undone.key * by_k[..., None]), f"{geometry}: K is not decoded times its scale"
            assert same_bits(found.value, undone.value * by_v[..., None]), f"{geometry}: nor V times its scale"

    def read_error(self, given: Tensor, kv_format: KVFormat) -> Tensor:
        """How far values (..., head_dim) may come back from what was written: half a step of the storage type.

        Floating storage: half a unit in the last place, or half its smallest number at scale 1, or at the scale that spans
        the token's head where that is more. int8: a symmetric scale per token and head; other integers: 4 bits of that.
        Plus one rounding to the compute type.
        """
        wide = given.double().abs()
        largest = wide.amax(-1, keepdim=True)
        rounding = torch.finfo(given.dtype).eps / 2 * wide
        storage = kv_format.storage
        if self.relative_error is not None:
            return self.relative_error * largest + rounding
        if not storage.is_floating_point:
            step = largest / (127 if storage == torch.int8 else 7)
            return 0.6 * step + rounding  # the scale itself may be rounded
        if storage.itemsize > 1 and torch.promote_types(storage, given.dtype) == storage:
            return torch.zeros_like(wide)
        info = torch.finfo(storage)
        smallest = info.smallest_normal * info.eps * torch.clamp(largest / info.max, min=1)
        return 1.01 * (info.eps / 2 * wide + smallest / 2) + rounding


class _Written:
    """A format with some random tokens written at scattered slots; some blocks stay untouched, some are full."""

    def __init__(
        self,
        kv_format: type[KVFormat],
        geometry: KVGeometry,
        device: str,
        *,
        factor: float = 1.0,
        extreme: bool = False,
        seed: int = 0,
    ) -> None:
        self.format, self.geometry, self.device = kv_format(geometry), geometry, device
        size = geometry.block_size
        slots = [*range(2 * size - 1, 3 * size + 1), 0, size // 2, 6 * size - 1, 5 * size]
        self.slots = torch.tensor(list(dict.fromkeys(slots)), device=device)
        self.key, self.value = _values(len(self.slots), geometry, device, seed, extreme, factor)
        self.kv = self.format.allocate(NUM_BLOCKS, device)
        self.write(self.key, self.value, self.slots)

    def with_blocks(self, kv: LayerKV) -> _Written:
        other = object.__new__(_Written)
        other.__dict__.update(self.__dict__, kv=kv)
        return other

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        self.format.write(_layer(self.geometry), self.kv, key, value, slots)

    def decode(self, ids: range | list[int]) -> LayerKV:
        return self.format.decode(_layer(self.geometry), self.kv, torch.tensor(list(ids), device=self.device))

    def read(self) -> list[tuple[str, Tensor, Tensor]]:
        """("key" or "value", what is read back, what was written), (tokens, kv_heads, head_dim) each."""
        decoded = self.decode(range(NUM_BLOCKS))
        block, offset = self.slots // self.geometry.block_size, self.slots % self.geometry.block_size
        return [
            ("key", decoded.key[block, :, offset], self.key),
            ("value", decoded.value[block, :, offset], self.value),
        ]

    def equals(self, other: _Written) -> bool:
        """Whether the bytes of the slots written are the same."""
        pairs = zip(self.kv.tensors, other.kv.tensors, strict=True)
        return all(torch.equal(_by_slot(a)[self.slots], _by_slot(b)[self.slots]) for a, b in pairs)


def _with_scales(kind: type[KVFormat]) -> Iterator[tuple[KVGeometry, KVFormat]]:
    """A format over fp32 without scales and, if it `uses_scales`, with some: per tensor and per head, powers of 2.

    No two layers, heads or sides have equal ones.
    """
    for geometry in _geometries(dtypes=(torch.float32,)):
        yield geometry, kind(geometry)
        for count in (1, geometry.kv_heads) if kind.uses_scales else ():
            exponents = torch.arange(2 * (_LAYER + 1) * count).reshape(_LAYER + 1, 2, count)
            scales = 2.0 ** (exponents % 7 - 3)
            yield geometry, kind(geometry, [KVScales(*(one.squeeze() for one in layer)) for layer in scales])


def _attended(made: KVFormat, device: str) -> tuple[LayerKV, Pool, AttentionLayer] | None:
    """Sequences written through a format whose storage is plain floating numbers; None for other formats."""
    geometry, layer = made.geometry, _layer(made.geometry)
    pool = lay_out(((1, 33), (5, 20), (16, 16)), layer, geometry.block_size, geometry.dtype, geometry.dtype)
    kv = made.allocate(pool.num_blocks, device)
    if not made.storage.is_floating_point or len(kv.tensors) != 2:
        return None
    for sequence in pool.sequences:
        key, value = (t.to(device, geometry.dtype) for t in (sequence.key, sequence.value))
        made.write(layer, kv, key, value, pool.slots(sequence).to(device))
    return kv, pool, layer


def _geometries(dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[KVGeometry]:
    shapes = ((2, 2, 64, 16), (1, 1, 32, 8), (3, 3, 80, 32), (2, 8, 128, 16))
    for dtype in dtypes:
        for num_layers, kv_heads, head_dim, block_size in shapes:
            yield KVGeometry(num_layers, kv_heads, head_dim, block_size, dtype)


def _layer(geometry: KVGeometry) -> AttentionLayer:
    heads = 2 * geometry.kv_heads
    return AttentionLayer(_LAYER, heads, geometry.kv_heads, geometry.head_dim, geometry.head_dim**-0.5)


def _slot_lists(block_size: int) -> Iterator[list[int]]:
    """Slots to write: single ones at the ends of blocks, a run over a border, scattered ones."""
    yield [0]
    yield [block_size - 1]
    yield [NUM_BLOCKS * block_size - 1]
    yield list(range(3 * block_size - 2, 3 * block_size + 2))
    yield [5 * block_size + 3, block_size, 2, 4 * block_size - 1]


def _values(
    tokens: int, geometry: KVGeometry, device: str, seed: int = 0, extreme: bool = False, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """key and value (tokens, kv_heads, head_dim), different from each other; `extreme`: heads of 0 and +-1e4 only."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, tokens, geometry.kv_heads, geometry.head_dim)
    if extreme:
        values = torch.randint(-1, 2, shape, generator=generator) * 1e4
        values[:, 0] = 0
    else:
        values = torch.randn(shape, generator=generator) * factor
    key, value = values.to(device, geometry.dtype)
    return key, value


def _by_slot(tensor: Tensor) -> Tensor:
    """The bytes of a tensor (num_blocks, kv_heads, block_size, ...) as (slots, bytes), in a copy."""
    by_token = as_bytes(tensor).transpose(1, 2).flatten(0, 1)
    return by_token.flatten(1).clone()
