"""How well KV memory is used: a mixed load in a small pool, beside what contiguous reservations would do with the same bytes.

64 requests arrive at once. Each begins with the same system prompt of 200 tokens; its own prompt and its output have
log-normal lengths with the means of ShareGPT conversations (161 and 338 tokens; Kwon et al., arXiv 2309.06180), cut to what
the longest admitted request leaves. Tokens are random numbers: only lengths and prefixes matter here.

After each step that leaves requests running it is counted what their blocks hold. Utilisation is tokens stored / slots in the
blocks that requests hold, where a shared block counts once on both sides; the mean is taken over all such states. Cached
blocks that nobody holds count neither way. Reservations are simulated for the same requests in the same order: a request gets
the longest that is admitted (as classic systems do), or the next power of two of what it will need, which no real system can
know.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from octavo import EngineConfig, OctavoError, Platform, Registry, SamplingParams, discover
from octavo.engine.engine import Engine
from octavo.engine.executor import BlockPairs, Executor, ModelInfo
from octavo.engine.kv_plan import kv_geometry
from octavo.engine.step import Step, StepOutput
from octavo.model.checkpoint import open_checkpoint
from octavo.model.plan import ModelPlan
from octavo.quant.kv_scales import unit_kv_scales

SYSTEM_TOKENS, MEAN_PROMPT, MEAN_OUTPUT = 200, 161, 338
SPREAD = 0.9  # standard deviation of the logarithm


@dataclass(frozen=True, slots=True)
class Job:
    """A request: its prompt, system prompt included, and how many tokens it will get."""

    prompt: list[int]
    num_output: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.num_output


@dataclass(frozen=True, slots=True)
class State:
    """The pool after a step. `used` blocks are held by requests, `shared` ones by several; `cached` ones by nobody."""

    used: int
    shared: int
    cached: int
    free: int
    tokens: int
    sharing: float
    running: int
    waiting: int
    swapped: int


def workload(number: int, seed: int, longest: int) -> list[Job]:
    """The same requests for the same arguments."""
    random = Random(seed)
    system = [random.randrange(1000, 30_000) for _ in range(SYSTEM_TOKENS)]

    def length(average: int) -> int:
        return max(4, round(random.lognormvariate(log(average) - SPREAD**2 / 2, SPREAD)))

    jobs = []
    for _ in range(number):
        own = min(length(MEAN_PROMPT), (longest - SYSTEM_TOKENS) // 2)
        output = min(length(MEAN_OUTPUT), longest - SYSTEM_TOKENS - own)
        jobs.append(Job(system + [random.randrange(1000, 30_000) for _ in range(own)], output))
    return jobs


class ScriptedExecutor(Executor):
    """Answers at once and keeps no memory: what the scheduler does depends on lengths and prefixes alone."""

    name = "scripted"

    def __init__(self, num_blocks: int, num_host_blocks: int, info: ModelInfo) -> None:
        self._num_blocks, self._num_host_blocks, self._info = num_blocks, num_host_blocks, info
        self._answers = 0

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_host_blocks(self) -> int:
        return self._num_host_blocks

    @property
    def model_info(self) -> ModelInfo:
        return self._info

    def move_blocks(self, swap_out: BlockPairs, swap_in: BlockPairs, copies: BlockPairs) -> None:
        pass

    def execute(self, step: Step) -> StepOutput:
        tokens = []
        for request, num in zip(step.requests, step.num_scheduled_tokens, strict=True):
            self._answers += 1
            ends = request.num_computed_tokens + num == len(request.token_ids)
            tokens.append(self._answers % 30_000 if ends else -1)
        return StepOutput(tokens)


def state(engine: Engine) -> State:
    stats, pool = engine.stats(), engine.scheduler.pool
    used = stats.num_blocks - stats.num_free_blocks
    in_use = sum(pool.ref_counts[node.block] > 0 for node in pool._index.values())
    cached = stats.num_cached_blocks - in_use
    return State(
        used=used,
        shared=sum(count > 1 for count in pool.ref_counts),
        cached=cached,
        free=stats.num_free_blocks - cached,
        tokens=stats.kv.num_tokens,
        sharing=stats.kv.sharing,
        running=stats.num_running,
        waiting=stats.num_waiting,
        swapped=stats.num_swapped,
    )


def run(engine: Engine, jobs: Sequence[Job], advance: Callable[[int], object]) -> list[State]:
    """Serves all requests; the states after each step that leaves some running."""
    for number, job in enumerate(jobs):
        params = SamplingParams(temperature=0, max_tokens=job.num_output, ignore_eos=True)
        engine.add_request(str(number), job.prompt, params)
    states: list[State] = []
    got = Counter[str]()
    while engine.has_unfinished:
        updates = engine.step()
        for update in updates:
            if update.finish_reason == "error":
                sys.exit(f"kv_memory: request {update.request_id} failed: {update.stop_reason}")
            got[update.request_id] += update.token_id >= 0
        advance(len(updates))
        if engine.scheduler.running:
            states.append(state(engine))
    assert all(got[str(number)] == job.num_output for number, job in enumerate(jobs)), "a request was lost"
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks, "blocks leaked"
    return states


def reserved(jobs: Sequence[Job], slots: int, need: Callable[[Job], int]) -> dict[str, float]:
    """Contiguous memory, first come first served, a token for each running request in each step."""
    waiting, running = list(jobs), dict[int, int]()
    free, number, counts, used, taken = slots, 0, [], 0, 0
    while waiting or running:
        while waiting and need(waiting[0]) <= free:
            free -= need(waiting.pop(0))
            running[number] = 0
            number += 1
        if not running:
            sys.exit("kv_memory: a request does not fit into the pool; raise --kv-tokens")
        if waiting:
            counts.append(len(running))
        used += sum(len(jobs[i].prompt) + done for i, done in running.items())
        taken += slots - free
        for i in list(running):
            running[i] += 1
            if running[i] >= jobs[i].num_output:
                del running[i]
                free += need(jobs[i])
    return {"concurrency": mean(counts) if counts else float(len(jobs)), "utilization": used / taken}


def summary(engine: Engine, states: Sequence[State], jobs: Sequence[Job], longest: int) -> dict[str, Any]:
    """All figures. Concurrency is the mean while others wait, which is when memory decides it."""
    size, pool = engine.config.block_size, engine.scheduler.pool
    counts, slots = engine.stats().scheduler, pool.num_blocks * size
    pressed = [s.running for s in states if s.waiting + s.swapped] or [s.running for s in states]
    peak = max(states, key=lambda s: s.used)
    tokens, held = sum(s.tokens for s in states), sum(s.used for s in states) * size
    others = {
        "contiguous, maximum length": reserved(jobs, slots, lambda job: longest),
        "contiguous, power of two": reserved(jobs, slots, lambda job: 1 << (job.num_tokens - 1).bit_length()),
    }
    return {
        "pool": {"blocks": pool.num_blocks, "block_size": size, "tokens": slots},
        "paged": {"concurrency": mean(pressed), "utilization": tokens / held},
        "peak_concurrency": max(s.running for s in states),
        "utilization_at_peak": peak.tokens / (peak.used * size),
        "empty_slots_per_request": mean((s.used * size - s.tokens) / s.running for s in states),
        "sharing": mean(s.sharing for s in states),
        "prefix_hit_rate": engine.stats().prefix_hit_rate,
        "preemptions": {"recompute": counts.num_recomputes, "swap": counts.num_swaps},
        "swapped_blocks": {"out": counts.blocks_swapped_out, "in": counts.blocks_swapped_in},
        "steps": counts.num_steps,
        "computed_tokens": counts.num_scheduled_tokens,
        **others,
        "concurrency_ratio": {name: mean(pressed) / other["concurrency"] for name, other in others.items()},
    }


def bytes_by_format(plan: ModelPlan, registry: Registry, block_size: int) -> dict[str, float]:
    """Bytes that a token takes in each KV format, for a model computed in 16 bits."""
    import torch

    geometry = kv_geometry(plan.config, block_size, torch.bfloat16)
    found = {}
    for kind in dict.fromkeys(registry.kv_formats.values()):
        made = kind(geometry, unit_kv_scales(plan.config.num_layers)) if kind.uses_scales else kind(geometry)
        found[kind.name] = made.bytes_per_block() / block_size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def show(results: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, pool = Console(), results["pool"]
    table = Table(title=f"{pool['tokens']:,} tokens of KV memory, blocks of {pool['block_size']}")
    for name in ("memory", "utilisation", "requests at once", "paged has"):
        table.add_column(name, justify="left" if name == "memory" else "right")
    for name in ("paged", "contiguous, maximum length", "contiguous, power of two"):
        ratio = results["concurrency_ratio"].get(name)
        row = results[name]
        shown = "" if ratio is None else f"{ratio:.1f} x"
        table.add_row(name, f"{row['utilization']:.1%}", f"{row['concurrency']:.1f}", shown)
    console.print(table)
    preempted, swapped = results["preemptions"], results["swapped_blocks"]
    console.print(
        f"utilisation at peak {results['utilization_at_peak']:.1%}; "
        f"{results['empty_slots_per_request']:.1f} empty slots a request; sharing {results['sharing']:.2f}; "
        f"prefix hits {results['prefix_hit_rate']:.1%}; most at once {results['peak_concurrency']}\n"
        f"preemptions: {preempted['recompute']} recomputed, {preempted['swap']} swapped "
        f"({swapped['out']} blocks out, {swapped['in']} in); {results['steps']:,} steps"
    )
    sizes = results["bytes_per_token"]
    table = Table(title="a token in each KV format, model in 16 bits")
    for name in ("format", "bytes", "tokens in the same bytes"):
        table.add_column(name, justify="left" if name == "format" else "right")
    for name, size in sizes.items():
        table.add_row(name, f"{size:,.0f}", f"{sizes['bfloat16'] / size:.2f} x")
    console.print(table)


def chart(states: Sequence[State], num_blocks: int, file: Path) -> None:
    """The pool over time, and below it the requests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (blocks, requests) = pyplot.subplots(2, 1, figsize=(10, 6), sharex=True, height_ratios=(2, 1))
    steps = range(len(states))
    layers = {
        "held by one request": [s.used - s.shared for s in states],
        "shared": [s.shared for s in states],
        "cached": [s.cached for s in states],
        "free": [s.free for s in states],
    }
    blocks.stackplot(steps, *layers.values(), labels=list(layers), colors=["#3b6ea5", "#16324f", "#a9c4de", "#f0f0f0"])
    blocks.set(ylabel="KV blocks", ylim=(0, num_blocks), title="KV memory over time")
    for name in ("running", "waiting", "swapped"):
        requests.plot(steps, [getattr(s, name) for s in states], label=name)
    requests.set(xlabel="step", ylabel="requests")
    for axes in (blocks, requests):
        axes.legend(loc="upper right", fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def make_engine(options: argparse.Namespace, registry: Registry) -> tuple[Engine, ModelPlan]:
    settings: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": options.longest,
        "block_size": options.block_size,
        "num_blocks_override": options.kv_tokens // options.block_size,
        "kv_cache_dtype": options.kv_cache_dtype,
        "preemption_mode": options.preemption_mode,
        "max_num_seqs": options.requests,
        "enable_prefix_caching": options.prefix_caching,
    }
    if options.swap_space is not None:
        settings["swap_space"] = options.swap_space
    config = EngineConfig(**settings)
    plan = ModelPlan.of(config, registry, open_checkpoint(config.model, registry.checkpoint_readers))
    if not options.scripted:
        return Engine(config, registry), plan
    host = config.num_blocks_override or 0
    info = ModelInfo(vocab_size=plan.config.vocab_size, max_model_len=options.longest, end_token_ids=frozenset())
    executor = ScriptedExecutor(host, host if options.preemption_mode == "swap" else 0, info)
    return Engine(config, registry, executor), plan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model; with --scripted only its shape is read")
    parser.add_argument("--scripted", action="store_true", help="the real scheduler without forwards: seconds")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-tokens", type=int, default=8192, help="size of the pool (8192)")
    parser.add_argument("--longest", type=int, default=2048, help="longest request that is admitted (2048)")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--preemption-mode", default="recompute", choices=("recompute", "swap", "auto"))
    parser.add_argument("--swap-space", help="GiB of host memory for swapping, such as 512MiB")
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--chart", type=Path, help="write the pool over time to this PNG (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.chart is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error("--chart needs matplotlib: pip install matplotlib")
    from rich.console import Console
    from rich.progress import Progress

    registry = discover(Platform.detect("auto"))
    jobs = workload(options.requests, options.seed, options.longest)
    try:
        engine, plan = make_engine(options, registry)
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
            task = bar.add_task("serving", total=sum(job.num_output for job in jobs))
            states = run(engine, jobs, lambda tokens: bar.update(task, advance=tokens))
    except OctavoError as error:
        print(f"kv_memory: {error}", file=sys.stderr)
        return error.exit_code
    results = summary(engine, states, jobs, options.longest)
    results["bytes_per_token"] = bytes_by_format(plan, registry, options.block_size)
    if options.chart is not None:
        chart(states, engine.scheduler.pool.num_blocks, options.chart)
    if options.json:
        print(json.dumps({**results, "states": [asdict(s) for s in states]}))
    else:
        show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
