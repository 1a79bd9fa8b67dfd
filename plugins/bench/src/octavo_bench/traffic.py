"""When requests are sent: Poisson or burstier arrivals, rates that rise, a limit on how many are under way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RampUp:
    """A rate that goes from one value to another over the run, in requests per second."""

    strategy: str  # "linear" or "exponential"
    start_rps: float
    end_rps: float

    def rate(self, progress: float) -> float:
        """At a share of the requests between 0 and 1."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return float(self.start_rps * (self.end_rps / self.start_rps) ** progress)


def arrivals(
    number: int, rate: float, *, burstiness: float = 1.0, ramp_up: RampUp | None = None, seed: int = 0
) -> list[float]:
    """Seconds after the start at which each request is sent, ascending.

    Gaps are gamma distributed: `burstiness` 1 is a Poisson process, less comes in bursts, more is steadier. Without a ramp
    they are scaled so that the last request comes after exactly number / rate seconds, as vLLM does.
    """
    if ramp_up is None and rate == float("inf"):
        return [0.0] * number
    random, now, times = Random(seed), 0.0, []
    for i in range(number):
        current = rate if ramp_up is None else ramp_up.rate(i / max(number - 1, 1))
        now += random.gammavariate(burstiness, 1 / (current * burstiness))
        times.append(now)
    if ramp_up is None and now > 0:
        scale = number / rate / now
        times = [time * scale for time in times]
    return times


async def send_all(
    items: Sequence[Item],
    times: Sequence[float],
    send: Callable[[Item], Awaitable[Result]],
    *,
    max_concurrency: int | None = None,
    clock: Callable[[], float],
) -> list[Result]:
    """Sends each item at its time after now; results are in the order of the items. `send` must not raise.

    With `max_concurrency`, a request waits for a free place before it is sent, and its clock starts only then.
    """
    gate = asyncio.Semaphore(max_concurrency or max(len(items), 1))
    start = clock()

    async def one(item: Item) -> Result:
        async with gate:
            return await send(item)

    tasks = []
    try:
        for item, time in zip(items, times, strict=True):
            if (wait := start + time - clock()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(item)))
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
