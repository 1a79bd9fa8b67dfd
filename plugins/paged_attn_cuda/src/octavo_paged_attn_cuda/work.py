"""How a step's attention is divided among programs: which rows over which positions, on the host, in numpy.

A row is a query head of a token; the heads of one KV head and all tokens of a request are its rows, in tiles. Where tiles are
fewer than the GPU has room for, long ones are cut along the positions and their parts summed afterwards (flash decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

_LEAST_PART = 256
"""Positions of a part, at least: shorter ones cost more in the sum than they save."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The shape of a kernel's tiles, for `group` query heads a KV head."""

    group: int
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        """Tokens of one request that always fit in one tile."""
        return self.rows // self.group


@dataclass(frozen=True, slots=True)
class Work:
    """Items (n, 8) and merges (m, 5) as `kernels.attention` reads them; `slots` parts lie between."""

    items: Ints
    merges: Ints
    slots: int


def divide(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    chosen: NDArray[np.bool_],
    tiling: Tiling,
    window: int | None,
    programs: int,
) -> Work:
    """The work of one KV head for the `chosen` requests; `programs` is how many of its items should run at once.

    A request's division depends on others only where it is cut into parts.
    """
    request = np.flatnonzero(chosen)
    lens, ends = np.asarray(query_lens, dtype=np.int64), np.asarray(seq_lens, dtype=np.int64)
    starts = np.cumsum(lens) - lens
    rows = lens[request] * tiling.group
    tiles = -(-rows // tiling.rows)
    which = np.repeat(np.arange(len(request)), tiles)
    request, rows = request[which], rows[which]
    first_row = _within(tiles) * tiling.rows
    shift = (ends - lens)[request]
    last_row = np.minimum(first_row + tiling.rows, rows) - 1
    end = shift + last_row // tiling.group + 1
    begin = np.zeros_like(end)
    if window is not None:
        begin = np.maximum(shift + first_row // tiling.group - window + 1, 0)
    steps = -(-end // tiling.columns) - begin // tiling.columns
    parts = _parts(steps, tiling.columns, programs)
    each = -(-steps // parts)
    parts = -(-steps // each)  # without empty ones
    cut = parts > 1
    slots = np.where(cut, np.cumsum(np.where(cut, parts, 0)) - parts, -1)
    merges = np.stack([starts[request], rows, first_row, slots, parts], axis=1)[cut]

    which, part = np.repeat(np.arange(len(parts)), parts), _within(parts)
    low = (begin[which] // tiling.columns + part * each[which]) * tiling.columns
    high = np.minimum(low + each[which] * tiling.columns, end[which])
    low = np.maximum(low, begin[which])
    slot = np.where(cut[which], slots[which] + part, -1)
    columns = (request[which], starts[request][which], rows[which], first_row[which], shift[which], low, high, slot)
    items = np.stack(columns, axis=1)
    longest_first = np.argsort(low - high, kind="stable")
    return Work(items[longest_first].astype(np.int32), merges.astype(np.int32), int(np.sum(parts[cut])))


def graph_size(requests: int) -> int:
    """The size of the recorded step that serves so many requests: 1, 2, 4, then multiples of 8, 16 from 64 and 32 from 256."""
    if requests <= 4:
        return 1 << (requests - 1).bit_length()
    step = 8 if requests <= 64 else 16 if requests <= 256 else 32
    return -(-requests // step) * step


def most_items(requests: int, programs: int) -> int:
    """Of so many requests with one tile each: all parts but the last of each tile are as long as a share of the whole."""
    return requests + programs


def _within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """[2, 3] -> [0, 1, 0, 1, 2]."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def _parts(steps: NDArray[np.int64], columns: int, programs: int) -> NDArray[np.int64]:
    """Into how many parts each tile of so many steps is cut, so that about `programs` parts are alike in length."""
    least = max(1, _LEAST_PART // columns)
    share = max(least, -(-int(steps.sum()) // programs))
    return -(-steps // share)
