"""Paged attention against float64: every storage, hostile memory, and the same bits however a token comes to be computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

native = pytest.importorskip("octavo_cpu._native")

NAN = float("nan")
F32, F16, BF16, E4M3, E5M2, I8 = range(6)
TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
NAMES = ["f32", "f16", "bf16", "e4m3", "e5m2", "i8"]


@pytest.fixture(autouse=True, params=native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs each test on one instruction set."""
    before, threads = native.isa(), native.threads()
    native.set_isa(request.param)
    torch.manual_seed(0)
    yield request.param
    native.set_isa(before)
    native.set_threads(threads)


@dataclass
class Shape:
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    storage: int = F32
    window: int = 0
    soft_cap: float = 0.0
    scaled: bool = False  # a scale per token and head
    scale_storage: int = F32
    static: bool = False

    @property
    def attention(self) -> object:
        return native.Attention(
            *(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, self.window, self.soft_cap)
        )


@dataclass
class Sequences:
    """Sequences of up to so many tokens each, in blocks strewn over memory that is otherwise NaN."""

    shape: Shape
    lengths: Sequence[int]
    spread: float = 1.0
    keys: list[Tensor] = field(init=False)  # what is stored, decoded: (tokens, kv_heads, head_dim) float64
    values: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        s, kind = self.shape, TYPES[self.shape.storage]
        counts = [-(-length // s.block_size) for length in self.lengths]
        self.pool = sum(counts) + 3
        ids = torch.randperm(self.pool).tolist()
        self.hostile, ids = ids[0], ids[1:]
        self.blocks = [[ids.pop() for _ in range(count)] for count in counts]
        shape = (self.pool, s.kv_heads, s.block_size)
        hostile = torch.full((*shape, s.head_dim), NAN)
        self.key, self.value = (
            (torch.full_like(hostile, -128) if s.storage == I8 else hostile.clone()).to(kind) for _ in range(2)
        )
        self.key_scale, self.value_scale = (torch.full(shape, NAN, dtype=TYPES[s.scale_storage]) for _ in range(2))
        self.static = [torch.rand(s.kv_heads) + 0.5 for _ in range(2)]
        self.keys, self.values = [], []
        for length, blocks in zip(self.lengths, self.blocks, strict=True):
            at = torch.tensor(blocks)[torch.arange(length) // s.block_size], torch.arange(length) % s.block_size
            for stored, scales, decoded, static in (
                (self.key, self.key_scale, self.keys, self.static[0]),
                (self.value, self.value_scale, self.values, self.static[1]),
            ):
                codes = torch.randn(length, s.kv_heads, s.head_dim) * self.spread
                codes = (codes * 40).round().clamp(-127, 127).to(kind) if s.storage == I8 else codes.to(kind)
                _bytes(stored)[at[0], :, at[1]] = _bytes(codes)
                scale = ((torch.rand(length, s.kv_heads) + 0.5) / (40 if s.storage == I8 else 1)).to(scales.dtype)
                scales[at[0], :, at[1]] = scale
                wide = codes.double()
                if s.scaled:
                    wide = wide * scale.double()[..., None]
                decoded.append(wide * static.double()[:, None] if s.static else wide)

    @property
    def kv(self) -> object:
        s = self.shape
        return native.KVBlocks(
            *(s.storage, self.key.data_ptr(), self.value.data_ptr(), s.scale_storage),
            *((self.key_scale.data_ptr(), self.value_scale.data_ptr()) if s.scaled else (0, 0)),
            *((self.static[0].data_ptr(), self.static[1].data_ptr()) if s.static else (0, 0)),
        )

    def attend(self, query: Tensor, parts: Sequence[tuple[int, int, int]], planned: Shape | None = None) -> Tensor:
        """Attention of the tokens first ... last - 1 of each (sequence, first, last); query (tokens, heads, head_dim)."""
        s = self.shape
        starts = [0]
        for _, first, last in parts:
            starts.append(starts[-1] + last - first)
        tables = torch.full((len(parts), max(map(len, self.blocks)) + 2), self.hostile, dtype=torch.int32)
        for row, (sequence, first, last) in enumerate(parts):
            seen = max(0, first - s.window + 1) // s.block_size if s.window else 0
            used = self.blocks[sequence][seen : -(-last // s.block_size)]
            tables[row, seen : seen + len(used)] = torch.tensor(used, dtype=torch.int32)
        start_loc = torch.tensor(starts, dtype=torch.int32)
        seq_lens = torch.tensor([last for _, _, last in parts], dtype=torch.int32)
        batch = native.Batch(
            *(len(parts), starts[-1], s.block_size, start_loc.data_ptr(), seq_lens.data_ptr(), tables.data_ptr()),
            *(tables.stride(0), 0),
        )
        batch.plan((planned or s).attention)
        size = s.heads * s.head_dim
        memory = torch.full((starts[-1] + 2, size + 7), NAN)  # a part of a wider row
        memory[1:-1, 3 : 3 + size] = query.reshape(-1, size)
        out = torch.full((starts[-1] * size + 64,), 7.0)
        native.attend(s.attention, self.kv, batch, memory[1:, 3:].data_ptr(), size + 7, out[32:].data_ptr())
        assert (out[:32] == 7).all()
        assert (out[-32:] == 7).all()
        return out[32:-32].view(-1, s.heads, s.head_dim).clone()

    def exact(self, query: Tensor, sequence: int, first: int) -> Tensor:
        """The same of one sequence in float64."""
        s, q = self.shape, query.double()
        k, v = (
            x[sequence][: first + len(q)].repeat_interleave(s.heads // s.kv_heads, 1) for x in (self.keys, self.values)
        )
        scores = torch.einsum("thd,khd->htk", q, k) * s.head_dim**-0.5
        if s.soft_cap:
            scores = s.soft_cap * torch.tanh(scores / s.soft_cap)
        ahead = torch.arange(len(k)) - torch.arange(first, first + len(q))[:, None]
        hidden = (ahead > 0) | (ahead <= -s.window if s.window else False)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("htk,khd->thd", weights, v)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.itemsize == 1 else x


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def check(shape: Shape, parts: Sequence[tuple[int, int]], spread: float = 1.0, error: float = 3e-6) -> None:
    """(tokens before, tokens computed) of each request, all in one batch, each alone, and on more threads."""
    sequences = Sequences(shape, [before + computed for before, computed in parts], spread)
    queries = [torch.randn(computed, shape.heads, shape.head_dim) for _, computed in parts]
    asked = [(i, before, before + computed) for i, (before, computed) in enumerate(parts)]
    native.set_threads(1)
    found = sequences.attend(torch.cat(queries), asked)
    for threads in (2, 3):
        native.set_threads(threads)
        assert same(found, sequences.attend(torch.cat(queries), asked))
    start = 0
    for query, part in zip(queries, asked, strict=True):
        own = found[start : start + len(query)]
        wanted = sequences.exact(query, part[0], part[1])
        torch.testing.assert_close(own.double(), wanted, rtol=2e-5, atol=error)
        assert same(own, sequences.attend(query, [part]))
        start += len(query)


SHAPES = {
    "smol": Shape(9, 3, 64),
    "one kv head": Shape(5, 1, 16),
    "every head its own": Shape(3, 3, 48),
    "many heads a group": Shape(71, 1, 64),
    "large heads": Shape(4, 2, 256),
    "odd heads": Shape(4, 2, 40),
    "tiny heads": Shape(2, 1, 3),
    "odd large heads": Shape(2, 2, 119),
    "small blocks": Shape(4, 2, 32, block_size=4),
    "odd blocks": Shape(4, 2, 32, block_size=7),
    "blocks of one": Shape(2, 1, 16, block_size=1),
    "large blocks": Shape(4, 2, 32, block_size=256),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_decode(shape: Shape) -> None:
    check(shape, [(0, 1), (15, 1), (16, 1), (127, 1), (128, 1), (300, 1)])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_prefill(shape: Shape) -> None:
    check(shape, [(0, 33), (0, 1), (100, 40), (250, 3)])


@pytest.mark.parametrize("storage", range(6), ids=NAMES)
@pytest.mark.parametrize("head_dim", [64, 20])
@pytest.mark.parametrize("scales", ["none", "static", "head", "head in fp16"])
def test_storage(storage: int, head_dim: int, scales: str) -> None:
    shape = Shape(4, 2, head_dim, storage=storage, static=scales == "static", scaled=scales.startswith("head"))
    if scales == "head in fp16":
        shape.scale_storage = F16
    spread = 1.0 / 40 if storage == I8 and not shape.scaled else 1.0
    check(shape, [(40, 1), (0, 30), (200, 2), (130, 17)], spread)


@pytest.mark.parametrize("window", [1, 5, 16, 100, 128, 129, 1000])
@pytest.mark.parametrize("block_size", [7, 16])
def test_sliding_window(window: int, block_size: int) -> None:
    shape = Shape(4, 2, 32, block_size, window=window)
    check(shape, [(300, 1), (0, 70), (200, 40), (3, 2), (255, 60)])


def test_a_plan_serves_layers_with_other_windows() -> None:
    shape = Shape(4, 2, 32, window=40)
    sequences = Sequences(shape, [700, 300])
    query = torch.randn(13, 4, 32)
    parts = [(0, 699, 700), (1, 288, 300)]
    for threads in (1, 2):
        native.set_threads(threads)
        assert same(sequences.attend(query, parts), sequences.attend(query, parts, replace(shape, window=0)))
        assert same(sequences.attend(query, parts), sequences.attend(query, parts, replace(shape, window=500)))


@pytest.mark.parametrize("soft_cap", [1.0, 30.0])
def test_soft_cap(soft_cap: float) -> None:
    check(Shape(4, 2, 32, soft_cap=soft_cap, window=90), [(150, 1), (0, 40)], spread=2.0, error=1e-5)


@pytest.mark.parametrize("shape", [Shape(9, 3, 64, storage=F16), Shape(4, 2, 40, storage=E4M3, scaled=True, window=50)])
def test_the_bits_of_a_token_do_not_depend_on_its_chunk(shape: Shape) -> None:
    length = 300
    sequences = Sequences(shape, [length])
    query = torch.randn(length, shape.heads, shape.head_dim)
    whole = sequences.attend(query, [(0, 0, length)])
    for size in (1, 2, 3, 5, 64, 129):
        native.set_threads(size % 3 + 1)
        for first in range(0, length, size) if size > 2 else (0, 15, 16, 127, 128, 129, 255, 256, 298):
            last = min(first + size, length)
            assert same(whole[first:last], sequences.attend(query[first:last], [(0, first, last)])), (first, last)


@pytest.mark.parametrize("storage", [F32, F16, BF16, E4M3, E5M2], ids=NAMES[:5])
@pytest.mark.parametrize("scaled", [False, True])
def test_numbers_of_later_tokens_reach_no_earlier_one(storage: int, scaled: bool) -> None:
    shape = Shape(6, 2, 32, storage=storage, scaled=scaled)
    sequences = Sequences(shape, [200])
    query = torch.randn(200, 6, 32)
    before = sequences.attend(query, [(0, 0, 200)])
    for at in (150, 70):
        block, offset = sequences.blocks[0][at // 16], at % 16
        nothing = torch.tensor([NAN, -NAN]).to(TYPES[storage])
        _bytes(sequences.key)[block, :, offset] = _bytes(nothing)[1]
        _bytes(sequences.value)[block, :, offset] = _bytes(nothing)[0]
        own = sequences.attend(query[at : at + 1], [(0, at, at + 1)])
        assert own.isnan().all()
        after = sequences.attend(query, [(0, 0, 200)])
        assert same(before[:at], after[:at])
        assert after[at:].isnan().all()


def test_numbers_before_the_window_reach_nobody() -> None:
    shape = Shape(6, 2, 32, storage=F32, window=20)
    sequences = Sequences(shape, [200])
    query = torch.randn(200, 6, 32)
    before = sequences.attend(query, [(0, 0, 200)])
    block, offset = sequences.blocks[0][100 // 16], 100 % 16
    sequences.key[block, :, offset], sequences.value[block, :, offset] = NAN, NAN
    after = sequences.attend(query, [(0, 0, 200)])
    assert same(before[:100], after[:100])
    assert same(before[120:], after[120:])
    assert after[100:120].isnan().all()


def test_large_scores() -> None:
    shape = Shape(2, 1, 16)
    check(shape, [(200, 3)], spread=100.0, error=5e-3)  # scores of a thousand, of which fp32 keeps four places
    sequences = Sequences(shape, [200])
    sequences.key[:] = -1e30
    query = torch.full((1, 2, 16), 1e20)  # every score is -infinity
    assert sequences.attend(query, [(0, 199, 200)]).isnan().all()


def test_heads_beyond_the_largest_are_refused() -> None:
    sequences = Sequences(Shape(1, 1, 257), [3])
    with pytest.raises(ValueError, match="256"):
        sequences.attend(torch.randn(1, 1, 257), [(0, 2, 3)])
