"""The conformance suite of attention kernels: exact masks, exact block tables, and never a read of what nobody wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend, AttentionLayer, AttentionRequest
from octavo.platforms import Platform
from octavo.testing.paging import PagedSequence, Pool, lay_out
from octavo.testing.suite import Suite, as_bytes, deviation, expect_none_wrong, refusal, same_bits

LENGTHS = (1, 15, 16, 17, 31, 32, 33)
DECODE = tuple((1, length) for length in LENGTHS)
PREFILL = tuple((length, length) for length in LENGTHS)
MIXED = ((1, 33), (5, 20), (1, 1), (16, 16), (7, 40), (1, 16), (17, 33), (2, 2), (33, 33))
"""(query_len, seq_len): decodes, whole prompts, and chunks of prompts in one step."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KV_DTYPES = (*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
"""Storage types that the suite can fill. int8 comes with a scale per token and head, the others with none."""
PLAIN = AttentionLayer(index=0, heads=4, kv_heads=2, head_dim=64, scale=0.125)

_SUM_ERROR = 2.0**-18
"""Of fp32 sums in any order and of exp and tanh, as a share of the sum of magnitudes."""


@dataclass(frozen=True, slots=True)
class AttentionCell:
    """One step for one kind of layer."""

    layer: AttentionLayer
    dtype: torch.dtype
    kv_dtype: torch.dtype
    rows: Sequence[tuple[int, int]] = MIXED
    block_size: int = 16
    forks: bool = False

    def __str__(self) -> str:
        layer, types = self.layer, [str(t).removeprefix("torch.") for t in (self.dtype, self.kv_dtype)]
        window = "" if layer.sliding_window is None else f", window {layer.sliding_window}"
        cap = "" if layer.soft_cap is None else f", soft cap {layer.soft_cap}"
        shape = f"{layer.heads}/{layer.kv_heads} heads of {layer.head_dim}, scale {layer.scale:.3g}"
        return f"{shape}{window}{cap}, {types[0]} over {types[1]}, blocks of {self.block_size}"

    def request(self, platform: Platform) -> AttentionRequest:
        return AttentionRequest([self.layer], self.dtype, self.block_size, self.kv_dtype, platform)

    def pool(self, seed: int = 0) -> Pool:
        return lay_out(self.rows, self.layer, self.block_size, self.dtype, self.kv_dtype, self.forks, seed)


class AttentionBackendSuite(Suite):
    """Set `backend` to the `AttentionBackend` under test.

    Steps that the backend refuses are skipped; `expected_attention` states the tolerance for the others. On a CPU a request
    alone must give the same bits as in any batch; on other devices only if the backend declares `batch_invariant = True`. That
    also promises the same bits for a token whatever the chunk that it comes in.
    """

    backend: ClassVar[type[AttentionBackend]]
    _subject = "backend"

    def test_name_rank_and_loads(self) -> None:
        name = self.backend.name
        assert isinstance(name, str), "name must be a string"
        assert name == name.strip().lower() != "", "name must be lower case, without spaces around"
        assert isinstance(self.backend.rank, int), "rank must be an integer"
        assert isinstance(self.backend.loads, frozenset), "loads must be a frozenset of torch types"
        assert all(isinstance(dtype, torch.dtype) for dtype in self.backend.loads), "loads must hold torch types"

    def test_accepts_a_step(self) -> None:
        known = self.backend.loads & set(KV_DTYPES)
        assert known, f"loads {set(self.backend.loads) or 'nothing'}; the kit can fill {', '.join(map(str, KV_DTYPES))}"
        assert self._accepted(), "refuses every step of the kit"

    def test_decode(self) -> None:
        self._compare(self._accepted(rows=DECODE))

    def test_prefill(self) -> None:
        self._compare(self._accepted(rows=PREFILL))

    def test_decode_and_chunked_prefill_in_one_step(self) -> None:
        self._compare(self._accepted(rows=MIXED))

    def test_long_sequences(self) -> None:
        self._compare(self._accepted(rows=((1, 257), (1, 1100), (40, 600), (1, 5))))

    def test_heads_share_kv_heads(self) -> None:
        counts = ((2, 2), (4, 2), (6, 2), (8, 1), (16, 2), (9, 3), (1, 1))
        self._compare(self._accepted(replace(PLAIN, heads=h, kv_heads=kv) for h, kv in counts))

    def test_head_dims(self) -> None:
        self._compare(self._accepted(replace(PLAIN, head_dim=size) for size in (32, 64, 80, 128)))

    def test_scale(self) -> None:
        self._compare(self._accepted(replace(PLAIN, scale=scale) for scale in (0.05, 0.5, 4.0)))

    def test_sliding_window(self) -> None:
        layers = [replace(PLAIN, sliding_window=window) for window in (1, 5, 16, 17, 33, 1000)]
        for rows in (MIXED, DECODE, PREFILL):
            self._compare(self._accepted(layers, rows))

    def test_blocks_that_left_the_window_are_not_read(self) -> None:
        wrong, cells = [], self._accepted([replace(PLAIN, sliding_window=w) for w in (1, 5, 16)], block_size=8)
        for cell in cells:
            pool = cell.pool()
            expected, tolerance = expected_attention(cell, pool)
            found = self._run(cell, pool, dropped=True)
            if (reason := deviation(found.cpu(), expected, tolerance)) is not None:
                wrong.append(f"{cell}, blocks before the window given back: {reason}")
        expect_none_wrong(wrong, len(cells))

    def test_soft_cap(self) -> None:
        layers = [replace(PLAIN, soft_cap=cap, sliding_window=window) for cap in (0.5, 30.0) for window in (None, 7)]
        self._compare(self._accepted(layers))

    def test_layers_may_differ(self) -> None:
        layers = [PLAIN, replace(PLAIN, index=1, sliding_window=5), replace(PLAIN, index=2, soft_cap=2.0, scale=0.3)]
        wrong, cells = [], self._accepted()
        for cell in cells:
            request = replace(cell.request(_platform(self.device)), layers=layers)
            if refusal(self.backend, request) is not None:
                continue
            pool, backend = cell.pool(), self.backend(request)
            query, kv = pool.queries().to(self.device), pool.blocks(cell.kv_dtype, self.device)
            with torch.inference_mode():
                plan = backend.plan(pool.batch(self.device))
                found = [backend.forward(layer, query, kv, plan) for layer in layers]
            for layer, result in zip(layers, found, strict=True):
                expected, tolerance = expected_attention(replace(cell, layer=layer), pool)
                if (reason := deviation(result.cpu(), expected, tolerance)) is not None:
                    wrong.append(f"{replace(cell, layer=layer)}, one of three layers: {reason}")
        expect_none_wrong(wrong, 3 * len(cells))

    def test_block_sizes(self) -> None:
        for block_size in (1, 8, 16, 32, 128):
            self._compare(self._accepted(block_size=block_size))

    def test_forks_share_blocks(self) -> None:
        rows = ((1, 33), (1, 17), (1, 40), (3, 20), (33, 33), (1, 33))
        self._compare(self._accepted(rows=rows, forks=True))

    def test_unwritten_slots_do_not_matter(self) -> None:
        layers = (PLAIN, replace(PLAIN, sliding_window=5))
        wrong, cells = [], self._accepted(layers)
        for cell in cells:
            pool = cell.pool()
            results = [self._run(cell, pool, unwritten=fill) for fill in (0.0, float("nan"), 100.0)]
            if not all(same_bits(result, results[0]) for result in results[1:]):
                wrong.append(f"{cell}: the result depends on slots that no sequence of the batch wrote")
        expect_none_wrong(wrong, len(cells))

    def test_a_request_alone_equals_it_in_a_batch(self) -> None:
        exact = self.device == "cpu" or getattr(self.backend, "batch_invariant", False)
        wrong, cells = (
            [],
            self._accepted((PLAIN, replace(PLAIN, sliding_window=7), replace(PLAIN, heads=9, kv_heads=3))),
        )
        for cell in cells:
            pool = cell.pool()
            batch, tolerance = self._run(cell, pool), expected_attention(cell, pool)[1]
            start = 0
            for sequence in pool.sequences:
                alone = self._run(cell, replace(pool, sequences=(sequence,)))
                rows = slice(start, start + sequence.query_len)
                reason = deviation(alone, batch[rows], 2 * tolerance[rows].to(self.device))
                if reason is None and exact and not same_bits(alone, batch[rows]):
                    reason = "other bits"
                if reason is not None:
                    wrong.append(f"{cell}: {sequence.query_len} of {sequence.seq_len} tokens, alone: {reason}")
                start += sequence.query_len
        expect_none_wrong(wrong, len(cells))

    def test_a_token_does_not_depend_on_its_chunk(self) -> None:
        exact = getattr(self.backend, "batch_invariant", False)
        layers = (PLAIN, replace(PLAIN, sliding_window=7), replace(PLAIN, heads=9, kv_heads=3, soft_cap=2.0))
        wrong, cells = [], self._accepted(layers, rows=((150, 150), (33, 140)))
        for cell in cells:
            pool = cell.pool()
            whole, tolerance = self._run(cell, pool), expected_attention(cell, pool)[1]
            start = 0
            for sequence in pool.sequences:
                rows = slice(start, start + sequence.query_len)
                for chunk in (1, 2, 7, 64):
                    part = torch.cat([self._run(cell, replace(pool, sequences=(s,))) for s in chunks(sequence, chunk)])
                    reason = deviation(part, whole[rows], 2 * tolerance[rows].to(self.device))
                    if reason is None and exact and not same_bits(part, whole[rows]):
                        reason = "other bits, although the backend declares batch_invariant"
                    if reason is not None:
                        wrong.append(f"{cell}: {sequence.query_len} tokens in chunks of {chunk}: {reason}")
                start += sequence.query_len
        expect_none_wrong(wrong, 8 * len(cells))

    def test_keeps_no_state(self) -> None:
        wrong, cells = [], self._accepted((PLAIN, replace(PLAIN, sliding_window=5)))
        for cell in cells:
            pools = [cell.pool(), replace(cell, rows=DECODE).pool(seed=1)]
            backend = self.backend(cell.request(_platform(self.device)))
            with torch.inference_mode():
                plans = [backend.plan(pool.batch(self.device)) for pool in pools]
                work = [
                    (p.queries().to(self.device), p.blocks(cell.kv_dtype, self.device), plan)
                    for p, plan in zip(pools, plans, strict=True)
                ]
                results = [backend.forward(cell.layer, *job) for job in work]
                kept = [result.clone() for result in results]
                again = [backend.forward(cell.layer, *job) for job in reversed(work)][::-1]
            if not all(same_bits(now, then) for now, then in zip(results, kept, strict=True)):
                wrong.append(f"{cell}: a later call overwrote an earlier result")
            if not all(same_bits(now, then) for now, then in zip(again, kept, strict=True)):
                wrong.append(f"{cell}: the same step gives another result after another step")
            if not all(same_bits(then, self._run(cell, pool)) for then, pool in zip(kept, pools, strict=True)):
                wrong.append(f"{cell}: a step planned and run between others gives another result")
        expect_none_wrong(wrong, len(cells))

    def test_modifies_nothing(self) -> None:
        wrong, cells = [], self._accepted((PLAIN, replace(PLAIN, sliding_window=5)))
        for cell in cells:
            pool = cell.pool()
            backend = self.backend(cell.request(_platform(self.device)))
            query, kv, batch = (
                pool.queries().to(self.device),
                pool.blocks(cell.kv_dtype, self.device),
                pool.batch(self.device),
            )
            given = {
                "query": query,
                **{name: getattr(kv, name) for name in ("key", "value", "key_scale", "value_scale")},
            }
            given |= {f.name: getattr(batch, f.name) for f in fields(batch)}
            tensors = {name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}
            before = {name: as_bytes(tensor).clone() for name, tensor in tensors.items()}
            with torch.inference_mode():
                backend.forward(cell.layer, query, kv, backend.plan(batch))
            changed = [name for name, tensor in tensors.items() if not torch.equal(as_bytes(tensor), before[name])]
            wrong += [f"{cell}: {name} was modified" for name in changed]
        expect_none_wrong(wrong, len(cells))

    def test_query_cut_from_a_fused_projection(self) -> None:
        wrong, cells = [], self._accepted()
        for cell in cells:
            pool = cell.pool()
            expected, tolerance = expected_attention(cell, pool)
            if (reason := deviation(self._run(cell, pool, strided=True).cpu(), expected, tolerance)) is not None:
                wrong.append(f"{cell}: {reason}")
        expect_none_wrong(wrong, len(cells))

    def _accepted(
        self,
        layers: Iterable[AttentionLayer] = (PLAIN,),
        rows: Sequence[tuple[int, int]] = MIXED,
        block_size: int = 16,
        forks: bool = False,
    ) -> list[AttentionCell]:
        """The cells of these layers, in all types, that the backend does not refuse."""
        kv_dtypes = [dtype for dtype in KV_DTYPES if dtype in self.backend.loads]
        return [
            cell
            for layer in layers
            for dtype in DTYPES
            for kv_dtype in kv_dtypes
            for cell in [AttentionCell(layer, dtype, kv_dtype, rows, block_size, forks)]
            if refusal(self.backend, cell.request(_platform(self.device))) is None
        ]

    def _run(
        self,
        cell: AttentionCell,
        pool: Pool,
        unwritten: float = float("nan"),
        strided: bool = False,
        dropped: bool = False,
    ) -> Tensor:
        backend = self.backend(cell.request(_platform(self.device)))
        query = pool.queries().to(self.device)
        if strided:
            query = torch.cat([query, query + 1], dim=1)[:, : query.shape[1]]
        kv = pool.blocks(cell.kv_dtype, self.device, unwritten)
        with torch.inference_mode():
            plan = backend.plan(pool.batch(self.device, window=cell.layer.sliding_window if dropped else None))
            return backend.forward(cell.layer, query, kv, plan)

    def _compare(self, cells: Sequence[AttentionCell]) -> None:
        wrong = []
        for cell in cells:
            pool = cell.pool()
            expected, tolerance = expected_attention(cell, pool)
            found = self._run(cell, pool)
            reason = deviation(found.cpu(), expected, tolerance)
            if reason is None and found.dtype != cell.dtype:
                reason = f"result is {found.dtype}"
            if reason is not None:
                wrong.append(f"{cell}: {reason}")
        expect_none_wrong(wrong, len(cells))


@cache
def _platform(device: str) -> Platform:
    return Platform.detect(device)


def chunks(sequence: PagedSequence, size: int) -> list[PagedSequence]:
    """The steps of a prompt whose queries are computed a few at a time."""
    first = sequence.seq_len - sequence.query_len
    parts = []
    for start in range(0, sequence.query_len, size):
        query = sequence.query[start : start + size]
        end = first + start + len(query)
        parts.append(replace(sequence, key=sequence.key[:end], value=sequence.value[:end], query=query))
    return parts


def expected_attention(cell: AttentionCell, pool: Pool) -> tuple[Tensor, Tensor]:
    """The result (tokens, heads, head_dim) in float64 from contiguous K and V, and how far from it a kernel may be.

    A kernel may round probabilities and result to the compute type (2 units in the last place of the sum of magnitudes), and
    K where it is stored wider than that; scores, softmax and sums it must keep in fp32 (2^-18 of the sums of magnitudes).
    """
    parts = [_expected(cell, sequence) for sequence in pool.sequences]
    return torch.cat([values for values, _ in parts]), torch.cat([tolerance for _, tolerance in parts])


def _expected(cell: AttentionCell, sequence: PagedSequence) -> tuple[Tensor, Tensor]:
    layer = cell.layer
    shares = layer.heads // layer.kv_heads
    kv_heads = torch.tensor([head // shares for head in range(layer.heads)])
    query = sequence.query.double()
    key, value = sequence.key.double()[:, kv_heads], sequence.value.double()[:, kv_heads]
    scores = layer.scale * torch.einsum("qhd,khd->hqk", query, key)
    magnitude = layer.scale * torch.einsum("qhd,khd->hqk", query.abs(), key.abs())
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    for row in range(sequence.query_len):
        position = sequence.seq_len - sequence.query_len + row
        scores[:, row, position + 1 :] = -torch.inf
        if layer.sliding_window is not None:
            scores[:, row, : max(0, position - layer.sliding_window + 1)] = -torch.inf
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    result = torch.einsum("hqk,khd->qhd", weights, value)
    ulp = torch.finfo(cell.dtype).eps / 2
    score_error = _SUM_ERROR * (1 + magnitude.amax(-1))
    if cell.kv_dtype.itemsize > cell.dtype.itemsize:
        score_error = score_error + 2 * ulp * magnitude.amax(-1)
    mixed = torch.einsum("hqk,khd->qhd", weights, value.abs())
    tolerance = 2 * ulp * (mixed + result.abs()) + 2 * score_error.t()[..., None] * mixed + 1e-7
    return result, tolerance
