"""How the engine looks from outside: each KV block, who holds it, and what runs and waits. No torch.

These functions may be called from any thread while the engine steps, and neither wait for a step nor delay one: each reads
through single copies that the interpreter makes at once. So a view may be taken while a step is being booked, and its parts may
then be one step apart.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.engine.blocks import CACHED, FREE, SHARED, USED, BlockPool
from octavo.engine.ledger import Ledger
from octavo.engine.request import Request, Status

BLOCK_STATES = (FREE, CACHED, USED, SHARED)


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The blocks of a pool in order, `blocks_per_cell` of them a cell (fewer in the last).

    `runs` are (cells, free, cached, used, shared): so many cells in a row of which each has so many blocks of each kind.
    """

    num_blocks: int
    blocks_per_cell: int
    runs: list[tuple[int, ...]]


def block_map(pool: BlockPool, max_cells: int) -> BlockMap:
    """A pool of any size as at most `max_cells` cells. A million blocks take milliseconds, outside the interpreter lock."""
    import numpy as np

    states = np.frombuffer(bytes(pool.states), dtype=np.uint8)
    per_cell = max(1, -(-pool.num_blocks // max_cells))
    num_cells = -(-pool.num_blocks // per_cell)
    if not num_cells:
        return BlockMap(0, 1, [])
    padded = np.full(num_cells * per_cell, 255, dtype=np.uint8)
    padded[: len(states)] = states
    cells = padded.reshape(num_cells, per_cell)
    counts = np.stack([np.count_nonzero(cells == state, axis=1) for state in BLOCK_STATES], axis=1)
    starts = np.flatnonzero(np.append(True, (counts[1:] != counts[:-1]).any(axis=1)))
    lengths = np.diff(np.append(starts, num_cells))
    rows = zip(lengths.tolist(), counts[starts].tolist(), strict=True)
    return BlockMap(pool.num_blocks, per_cell, [(length, *row) for length, row in rows])


@dataclass(frozen=True, slots=True)
class Holder:
    """A request and how many of some blocks it holds."""

    request_id: str
    num_blocks: int


def block_holders(requests: Iterable[Request], first: int, last: int, *, host: bool = False) -> list[Holder]:
    """Who holds any of the blocks `first` to `last`, of the device or the host. Looks through all blocks held by requests.

    The engine's thread gets its turn after each request, so it waits for no more than one request's blocks.
    """
    wanted = set(range(first, last + 1))
    holders = []
    for request in requests:
        time.sleep(0)
        found = wanted.intersection(request.host_block_ids if host else request.held_block_ids)
        if found:
            holders.append(Holder(request.request_id, len(found)))
    return holders


def block_runs(requests: Iterable[Request], *, host: bool = False) -> list[tuple[int, int]]:
    """The blocks that any of the requests holds, as runs of (first, number), in order."""
    runs: list[tuple[int, int]] = []
    held = (request.host_block_ids if host else request.held_block_ids for request in requests)
    for block in sorted(set().union(*held)):
        if runs and block == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as far as it is. `phase`: prefill, decode, waiting or swapped. `priority`: lower goes first."""

    request_id: str
    phase: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    limit_tokens: int
    num_blocks: int
    num_cached_tokens: int
    num_preemptions: int
    priority: int


@dataclass(frozen=True, slots=True)
class BatchView:
    """The requests in order, running ones first, at most so many of each; and what the last step computed.

    `decode_tokens` are those of requests that computed one token, `prefill_tokens` the others, `step_requests` all of both.
    """

    running: list[RequestView]
    waiting: list[RequestView]
    step_requests: int
    decode_tokens: int
    prefill_tokens: int


def batch_view(ledger: Ledger, most: int) -> BatchView:
    """What runs and what waits: the first `most` of each."""
    step = ledger.last_step
    scheduled = list(step.num_scheduled_tokens)
    decodes = scheduled.count(1)
    return BatchView(
        running=[_view(request) for request in ledger.running[:most]],
        waiting=[_view(request) for request in ledger.first_waiting(most)],
        step_requests=len(scheduled),
        decode_tokens=decodes,
        prefill_tokens=sum(scheduled) - decodes,
    )


def _view(request: Request) -> RequestView:
    tokens, computed = len(request.token_ids), request.num_computed_tokens
    phase = {Status.WAITING: "waiting", Status.SWAPPED: "swapped"}.get(request.status)
    return RequestView(
        request_id=request.request_id,
        phase=phase or ("decode" if computed + 1 >= tokens else "prefill"),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=computed,
        num_output_tokens=tokens - request.num_prompt_tokens,
        limit_tokens=request.limit_tokens,
        num_blocks=len(request.host_block_ids) or len(request.held_block_ids),
        num_cached_tokens=request.num_cached_tokens or 0,
        num_preemptions=request.num_preemptions,
        priority=request.priority,
    )
