"""What scheduling costs: microseconds of Python around each forward, by running requests and by size of the pool.

No model and no torch: the "executor" answers every request with the same token at once. Blocks are scattered over the pool
as after long use, so that large pools show their cache misses; the work itself is the same. Garbage collection is off while
time is taken, as in timeit. What is printed is the median over many steps, and of several such medians the least, since
other work on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from collections.abc import Callable
from itertools import product
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import Scheduler
from octavo.engine.step import Step, StepOutput

BLOCK_SIZE = 16
RUNNING = (1, 16, 256, 1024)
POOLS = (1_000, 10_000, 100_000, 1_000_000)
ARRIVALS = 256
SHARED_TOKENS, OWN_TOKENS = 512, 16
BLOCKED_POOL = 10_000
SWAPPED = 16


def make_scheduler(num_blocks: int, caching: bool = True, **settings: Any) -> Scheduler:
    """A scheduler whose free blocks lie in random order."""
    scheduler = Scheduler(
        num_blocks,
        BLOCK_SIZE,
        max_num_seqs=max(RUNNING),
        max_num_batched_tokens=BLOCKED_POOL * BLOCK_SIZE,
        enable_prefix_caching=caching,
        **settings,
    )
    blocks = scheduler.pool.allocate(num_blocks)
    Random(0).shuffle(blocks)
    scheduler.pool.free(blocks)
    return scheduler


def answer(step: Step) -> StepOutput:
    """The output of a forward: a token for each request whose tokens are then all computed."""
    scheduled = zip(step.requests, step.num_scheduled_tokens, strict=True)
    return StepOutput([7 if r.num_computed_tokens + num == len(r.token_ids) else -1 for r, num in scheduled])


def clear(scheduler: Scheduler) -> None:
    """Ends all requests and forgets all prefixes."""
    for request in list(scheduler):
        scheduler.finish(request.request_id, "abort")
    scheduler.pool.reset_prefix_cache()


def start(scheduler: Scheduler) -> None:
    """Runs until all requests decode."""
    while any(len(r.token_ids) == r.num_prompt_tokens for r in scheduler):
        step = scheduler.schedule()
        scheduler.commit(step, answer(step))


def time_us(function: Callable[[], object], repeats: int) -> float:
    """Median microseconds of one call."""
    times = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            begin = perf_counter()
            function()
            times.append(perf_counter() - begin)
    finally:
        gc.enable()
    return median(times) * 1e6


def decode_us(scheduler: Scheduler, num_running: int, steps: int) -> float | None:
    """One `schedule` and `commit` while all requests decode; None where that many do not fit into the pool.

    Prompts have 1 to 16 tokens, so that each step allocates and publishes a block for every 16th request.
    """
    steps = min(steps, (scheduler.pool.num_blocks // num_running - 1) * BLOCK_SIZE - 1)
    if steps < BLOCK_SIZE:
        return None
    params = SamplingParams(max_tokens=None)
    for i in range(num_running):
        scheduler.add(Request(str(i), [i, *range(i % BLOCK_SIZE)], params))
    start(scheduler)
    output = StepOutput([7] * num_running)
    cost = time_us(lambda: scheduler.commit(scheduler.schedule(), output), steps)
    assert scheduler.stats.num_preemptions == 0
    clear(scheduler)
    return cost


def beside_preempted_us(scheduler: Scheduler, num_running: int, steps: int) -> float:
    """The same while 16 preempted requests of 512 tokens wait for a seat: swapped if there are host blocks, else to recompute.

    Needs a scheduler by priority, as the others must run before them.
    """
    params = SamplingParams(max_tokens=None)
    for i in range(SWAPPED):
        scheduler.add(Request(f"preempted-{i}", [i] * SHARED_TOKENS, params, priority=1))
    start(scheduler)
    for _ in range(SWAPPED):
        scheduler._preempt(scheduler.running[-1], Step())
    scheduler.max_num_seqs = num_running
    for i in range(num_running):
        scheduler.add(Request(str(i), [i, *range(i % BLOCK_SIZE)], params))
    while any(len(r.token_ids) == r.num_prompt_tokens for r in scheduler):
        step = scheduler.schedule()
        scheduler.commit(step, answer(step))
    output = StepOutput([7] * num_running)
    cost = time_us(lambda: scheduler.commit(scheduler.schedule(), output), steps)
    assert scheduler.num_swapped == (SWAPPED if scheduler.swap.host.num_blocks else 0)
    scheduler.max_num_seqs = max(RUNNING)
    clear(scheduler)
    return cost


def arrival_us(scheduler: Scheduler, shared: bool, waves: int) -> float:
    """One request's whole stay: queued, admitted, computed in one step, published, ended, its blocks freed.

    256 arrive at once, with 528 prompt tokens each, of which the first 512 are cached where `shared`.
    """
    num_tokens = SHARED_TOKENS + OWN_TOKENS
    params = SamplingParams(max_tokens=1)
    prefix = list(range(SHARED_TOKENS))
    scheduler.add(Request("first", [*prefix, -1], params, limit_tokens=SHARED_TOKENS + 2))
    start(scheduler)
    hits = scheduler.stats.prefix_hits
    requests = []
    for i in range(waves * ARRIVALS):
        tokens = [*prefix, *[i] * OWN_TOKENS] if shared else [i] * num_tokens
        requests.append(Request(str(i), tokens, params, limit_tokens=num_tokens + 1))
    waiting = iter(requests)
    output = StepOutput([7] * ARRIVALS)

    def wave() -> None:
        for _ in range(ARRIVALS):
            scheduler.add(next(waiting))
        scheduler.commit(scheduler.schedule(), output)

    cost = time_us(wave, waves) / ARRIVALS
    assert len(scheduler) == 0
    assert scheduler.stats.prefix_hits - hits == shared * len(requests) * SHARED_TOKENS
    clear(scheduler)
    return cost


def blocked_us(steps: int) -> float:
    """A step of 256 decoding requests while a cached prompt, half the pool, waits for blocks and loses some in each step."""
    scheduler = make_scheduler(BLOCKED_POOL)
    params = SamplingParams(max_tokens=None)
    long_prompt = list(range(BLOCKED_POOL // 2 * BLOCK_SIZE))
    scheduler.add(Request("cached", long_prompt, params, limit_tokens=len(long_prompt) + 1))
    start(scheduler)
    held = BLOCKED_POOL // 2 // ARRIVALS * BLOCK_SIZE
    for i in range(ARRIVALS):
        scheduler.add(Request(str(i), [i, *range(held + i % BLOCK_SIZE)], params))
    start(scheduler)
    scheduler.add(Request("waiting", long_prompt, params))
    output = StepOutput([7] * ARRIVALS)
    evicted = scheduler.pool.num_evictions
    cost = time_us(lambda: scheduler.commit(scheduler.schedule(), output), steps)
    assert scheduler.num_waiting == 1
    assert scheduler.pool.num_evictions > evicted
    return cost


def measure(steps: int, rounds: int) -> dict[str, Any]:
    """All results, in microseconds. Rounds go over everything, so that a busy moment of the machine spoils one at most."""
    schedulers = {pool: make_scheduler(pool) for pool in POOLS}
    uncached = {pool: make_scheduler(pool, caching=False) for pool in POOLS[1:]}
    decode: dict[int, dict[int, float | None]] = {n: dict.fromkeys(POOLS) for n in RUNNING}
    arrivals: dict[int, dict[str, float | None]] = {pool: {} for pool in POOLS[1:]}
    blocked: dict[str, float | None] = {}
    plain = make_scheduler(POOLS[-1], caching=False, by_priority=True)
    full = make_scheduler(POOLS[-1], by_priority=True, num_host_blocks=POOLS[1])
    features: dict[int, dict[str, float | None]] = {n: {} for n in RUNNING}
    for _ in range(rounds):
        for n, pool in product(RUNNING, POOLS):
            _keep(decode[n], pool, decode_us(schedulers[pool], n, steps))
        for pool, costs in arrivals.items():
            _keep(costs, "no prefix cache", arrival_us(uncached[pool], False, 3))
            _keep(costs, "nothing in common", arrival_us(schedulers[pool], False, 3))
            _keep(costs, "512 of 528 tokens cached", arrival_us(schedulers[pool], True, 3))
        _keep(blocked, "", blocked_us(steps // 2))
        for n, costs in features.items():
            _keep(costs, "plain", beside_preempted_us(plain, n, steps))
            _keep(costs, "full", beside_preempted_us(full, n, steps))
    fitting = {n: [cost for cost in decode[n].values() if cost is not None] for n in RUNNING}
    return {
        "decode_us_per_step": decode,
        "decode_us_per_request": {n: round(median(fitting[n]) / n, 2) for n in RUNNING},
        "growth_with_pool": {n: round(fitting[n][-1] / fitting[n][0], 2) for n in RUNNING},
        "arrival_us_per_request": arrivals,
        "blocked_us_per_step": blocked[""],
        "beside_preempted_us_per_step": features,
    }


def _keep(costs: dict[Any, float | None], key: object, cost: float | None) -> None:
    """Notes the least of the costs measured so far."""
    if cost is not None:
        costs[key] = min(round(cost, 2), costs.get(key) or math.inf)


def show(results: dict[str, Any]) -> None:
    """Prints the results as tables."""
    names = "".join(f"{f'10^{math.log10(pool):.0f} blocks':>13}" for pool in POOLS)
    print(f"schedule + commit, us a step, all requests decoding\n{'running':>8}{names}{'us/request':>13}{'growth':>10}")
    for n in RUNNING:
        cells = "".join(f"{'-' if cost is None else cost:>13}" for cost in results["decode_us_per_step"][n].values())
        print(f"{n:>8}{cells}{results['decode_us_per_request'][n]:>13}{results['growth_with_pool'][n]:>10}")
    each = results["decode_us_per_request"]
    ratio = each[1024] / each[256]
    print(f"growth: largest pool over smallest. A request costs at 1024 running {ratio:.2f} x that at 256.\n")
    print(f"{ARRIVALS} arrivals at once, {SHARED_TOKENS + OWN_TOKENS} prompt tokens, 1 output token: us a request")
    for pool, costs in results["arrival_us_per_request"].items():
        cells = "; ".join(f"{name} {cost}" for name, cost in costs.items())
        print(f"{f'10^{math.log10(pool):.0f} blocks':>13}  {cells}")
    print(
        f"\n{ARRIVALS} decoding while a cached prompt of {BLOCKED_POOL // 2} blocks waits and is evicted bit by bit: "
        f"{results['blocked_us_per_step']} us a step"
    )
    print(f"\n{SWAPPED} preempted requests wait, pool of 10^6 blocks: us a step without and with prefix cache and swap")
    for n, costs in results["beside_preempted_us_per_step"].items():
        print(f"{n:>8} running  {costs['plain']} {costs['full']}  ratio {costs['full'] / costs['plain']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps for each median (default: 200)")
    parser.add_argument("--rounds", type=int, default=3, help="medians of which the least counts (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    results = measure(options.steps, options.rounds)
    if options.json:
        print(json.dumps(results))
    else:
        show(results)


if __name__ == "__main__":
    main()
