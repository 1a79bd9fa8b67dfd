"""When requests are sent, in a time that is made up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import fmean, pstdev
from typing import Any

import pytest

from octavo_bench.traffic import RampUp, arrivals, send_all


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in zip([0.0, *times], times, strict=False)]


def test_no_rate_is_all_at_once() -> None:
    assert arrivals(5, float("inf")) == [0.0] * 5


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness: float) -> None:
    times = arrivals(4000, 20.0, burstiness=burstiness, seed=3)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200), "the last comes after number / rate"
    found = gaps(times)
    assert pstdev(found) / fmean(found) == pytest.approx(burstiness**-0.5, rel=0.1)


def test_the_same_seed_gives_the_same_times() -> None:
    assert arrivals(50, 3.0, seed=1) == arrivals(50, 3.0, seed=1) != arrivals(50, 3.0, seed=2)


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 55.0), ("exponential", 31.6)])
def test_the_rate_rises(strategy: str, middle: float) -> None:
    ramp = RampUp(strategy, 10, 100)
    assert [ramp.rate(p) for p in (0, 0.5, 1)] == pytest.approx([10, middle, 100], rel=0.01)
    found = gaps(arrivals(3000, float("inf"), ramp_up=ramp))
    assert fmean(found[:300]) / fmean(found[-300:]) > 4


def test_requests_go_out_in_time_and_no_more_than_allowed(run_virtually: Callable[..., Any]) -> None:
    sent: list[tuple[str, float]] = []
    most = 0

    async def main(clock: Callable[[], float]) -> list[str]:
        running = 0

        async def send(item: str) -> str:
            nonlocal running, most
            sent.append((item, clock()))
            running += 1
            most = max(most, running)
            await asyncio.sleep(1.0)
            running -= 1
            return item.upper()

        return await send_all("abcd", [0.0, 0.1, 0.2, 5.0], send, max_concurrency=2, clock=clock)

    assert run_virtually(main) == list("ABCD")
    assert sent == [("a", 0.0), ("b", 0.1), ("c", 1.0), ("d", 5.0)]
    assert most == 2
