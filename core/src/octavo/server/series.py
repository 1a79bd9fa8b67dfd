"""The numbers behind metrics and charts: histograms, quantiles over a short window, and the last minutes second by second.

Written on the engine's thread, read on others. Each entry costs a fraction of a microsecond, whatever was entered before.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SECONDS_KEPT = 300
_STEPS_PER_E = 25
"""Quantiles are kept to 1 part in 25: what a chart shows."""


class Histogram:
    """Counts by upper bound, and a sum: what Prometheus calls a histogram."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Counts a value in the first bucket whose bound is not below it."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Quantiles:
    """Values on a logarithmic scale, from which quantiles within 2 % are told. Values of no seconds at all count as 1 us."""

    __slots__ = ("counts",)

    def __init__(self, parts: Iterable[Quantiles] = ()) -> None:
        self.counts: Counter[int] = Counter()
        for part in parts:
            self.counts.update(dict(part.counts))  # a copy, made at once: another thread may be adding

    def add(self, value: float, times: int = 1) -> None:
        self.counts[round(math.log(max(value, 1e-6)) * _STEPS_PER_E)] += times

    def at(self, share: float) -> float | None:
        """The value that `share` of all values do not exceed; None where there are none."""
        counts = sorted(dict(self.counts).items())
        left = share * sum(times for _, times in counts)
        for key, times in counts:
            left -= times
            if left <= 1e-9:
                return math.exp(key / _STEPS_PER_E)
        return math.exp(counts[-1][0] / _STEPS_PER_E) if counts else None


@dataclass(slots=True)
class Second:
    """What happened in one second: its tokens and latencies, and how many requests there were and what they held at its end."""

    time: int
    prompt_tokens: int = 0
    generation_tokens: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    first_token: Quantiles = field(default_factory=Quantiles)
    inter_token: Quantiles = field(default_factory=Quantiles)


class History:
    """The last minutes by seconds since `started`, of `time.monotonic()`. Seconds in which nothing happened are left out."""

    def __init__(self, started: float) -> None:
        self.started = started
        self._seconds: deque[Second] = deque([Second(0)], maxlen=SECONDS_KEPT)

    def at(self, now: float) -> Second:
        """The current second, to be added to."""
        time, latest = int(now - self.started), self._seconds[-1]
        if time > latest.time:
            latest = Second(time)
            self._seconds.append(latest)
        return latest

    def complete(self, now: float, since: int = -1) -> list[Second]:
        """The seconds after `since` that are over, oldest first, as far as they are kept."""
        end = int(now - self.started)
        return [second for second in list(self._seconds) if since < second.time < end]

    def window(self, now: float, seconds: int) -> list[Second]:
        """The last so many seconds, the current one included."""
        begin = int(now - self.started) - seconds
        return [second for second in list(self._seconds) if second.time > begin]
