"""Continuous against static batching: one engine, the same kernels, the same requests of mixed lengths, all there at first.

Static servers fill a batch, and nobody joins until all of it is done. `static, padded` computes as they do: every prompt is as
long as the batch's longest, and every sequence runs as long as the longest output; what is beyond a request's own length is
computed and thrown away. `static, unpadded` is the kinder form, whose only loss is places that stay empty. Counted are tokens
that were asked for. TPOT is the time between a request's own first and last token over the tokens in between; normalised
latency is its whole time, queueing included, over its tokens (Orca, OSDI 2022), which is where static batching hurts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from octavo import LLM, OctavoError, SamplingParams

SPREAD = 1.0
"""Standard deviation of the logarithm of lengths: ShareGPT's are about that wide."""


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt, and how many tokens are wanted."""

    prompt: list[int]
    num_output: int


@dataclass(slots=True)
class Run:
    """When each request's own tokens came, in seconds from the start, and how many places did useful work in each step."""

    elapsed: float = 0.0
    times: dict[int, list[float]] = field(default_factory=dict)
    useful: list[tuple[float, int]] = field(default_factory=list)
    computed_tokens: int = 0


def workload(number: int, mean_prompt: int, mean_output: int, longest: int, seed: int) -> list[Job]:
    """The same requests for the same arguments; lengths are log-normal."""
    random = Random(seed)

    def length(average: int) -> int:
        return min(max(2, round(random.lognormvariate(log(average) - SPREAD**2 / 2, SPREAD))), longest // 2)

    return [
        Job([random.randrange(1000, 30_000) for _ in range(length(mean_prompt))], length(mean_output))
        for _ in range(number)
    ]


def continuous(jobs: Sequence[Job], seats: int) -> list[list[tuple[int, Job]]]:
    """One wave: the scheduler decides who joins when."""
    return [list(enumerate(jobs))]


def static(jobs: Sequence[Job], seats: int) -> list[list[tuple[int, Job]]]:
    """Batches in order of arrival."""
    listed = list(enumerate(jobs))
    return [listed[i : i + seats] for i in range(0, len(listed), seats)]


def padded(jobs: Sequence[Job], seats: int) -> list[list[tuple[int, Job]]]:
    """The same batches, each request as long as its batch's longest prompt and output."""
    waves = []
    for wave in static(jobs, seats):
        longest, outputs = max(len(job.prompt) for _, job in wave), max(job.num_output for _, job in wave)
        waves.append([(i, Job([1000] * (longest - len(job.prompt)) + job.prompt, outputs)) for i, job in wave])
    return waves


MODES = {"continuous": continuous, "static, unpadded": static, "static, padded": padded}


def run(
    llm: LLM, jobs: Sequence[Job], waves: Sequence[Sequence[tuple[int, Job]]], advance: Callable[[int], object]
) -> Run:
    """Serves the waves one after another; tokens beyond what a job wants are computed and not counted."""
    engine, result = llm.engine, Run(times={i: [] for i in range(len(jobs))})
    before = engine.stats().scheduler.num_scheduled_tokens
    start = time.perf_counter()
    for wave in waves:
        for i, job in wave:
            params = SamplingParams(temperature=0, max_tokens=job.num_output, ignore_eos=True)
            engine.add_request(str(i), job.prompt, params)
        while engine.has_unfinished:
            updates, useful = engine.step(), 0
            now = time.perf_counter() - start
            for update in updates:
                if update.finish_reason == "error":
                    sys.exit(f"continuous_batching: a request failed: {update.stop_reason}")
                times = result.times[int(update.request_id)]
                if len(times) < jobs[int(update.request_id)].num_output:
                    times.append(now)
                    useful += 1
            result.useful.append((now, useful))
            advance(useful)
    result.elapsed = time.perf_counter() - start
    result.computed_tokens = engine.stats().scheduler.num_scheduled_tokens - before
    assert all(len(result.times[i]) == job.num_output for i, job in enumerate(jobs)), "a token was lost"
    return result


def figures(result: Run, jobs: Sequence[Job]) -> dict[str, float]:
    """Milliseconds and tokens a second."""
    outputs = sum(job.num_output for job in jobs)
    tpots = [(t[-1] - t[0]) / (len(t) - 1) for t in result.times.values() if len(t) > 1]
    return {
        "elapsed_s": result.elapsed,
        "output_tokens_per_s": outputs / result.elapsed,
        "mean_tpot_ms": 1000 * fmean(tpots),
        "median_tpot_ms": 1000 * median(tpots),
        "mean_ttft_ms": 1000 * fmean(t[0] for t in result.times.values()),
        "normalised_latency_ms": 1000 * fmean(t[-1] / len(t) for t in result.times.values()),
        "steps": len(result.useful),
        "tokens_per_step": fmean(n for _, n in result.useful),
        "computed_tokens": result.computed_tokens,
    }


def show(found: Mapping[str, Mapping[str, float]], jobs: Sequence[Job], seats: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.width = max(console.width, 110)  # in a pipe it would be 80
    prompts, outputs = sum(len(job.prompt) for job in jobs), sum(job.num_output for job in jobs)
    table = Table(title=f"{len(jobs)} requests, {prompts} prompt and {outputs} output tokens, {seats} at once")
    columns = (
        "tokens/s",
        "TPOT ms mean",
        "median",
        "TTFT ms",
        "normalised latency ms",
        "tokens a step",
        "tokens computed",
    )
    table.add_column("batching")
    for name in columns:
        table.add_column(name, justify="right")
    for name, f in found.items():
        values = [f["output_tokens_per_s"], f["mean_tpot_ms"], f["median_tpot_ms"], f["mean_ttft_ms"]]
        values += [f["normalised_latency_ms"], f["tokens_per_step"]]
        table.add_row(name, *(f"{v:,.1f}" for v in values), f"{f['computed_tokens']:,.0f}")
    console.print(table)
    speed = found["continuous"]["output_tokens_per_s"]
    for name in list(MODES)[1:]:
        print(f"continuous is {speed / found[name]['output_tokens_per_s']:.2f} x as fast as {name}")


def chart(runs: Mapping[str, Run], found: Mapping[str, Mapping[str, float]], seats: int, file: Path) -> None:
    """Places that did useful work over time, and the two figures side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = dict(zip(MODES, ("#3b6ea5", "#7fa87f", "#e0a458"), strict=True))
    figure = pyplot.figure(figsize=(11, 7))
    grid = figure.add_gridspec(3, 3, width_ratios=(3, 1, 1))
    end = max(result.elapsed for result in runs.values())
    for row, (name, result) in enumerate(runs.items()):
        axes = figure.add_subplot(grid[row, 0])
        times, counts = zip(*result.useful, strict=True)
        axes.fill_between(times, counts, step="pre", color=colours[name], linewidth=0)
        axes.set(xlim=(0, end), ylim=(0, seats * 1.05), ylabel="useful places", title=name)
    axes.set(xlabel="seconds")
    for column, (key, title) in enumerate(
        (("output_tokens_per_s", "tokens/s"), ("normalised_latency_ms", "normalised\nlatency, ms")), 1
    ):
        axes = figure.add_subplot(grid[:, column])
        bars = axes.bar(list(runs), [found[name][key] for name in runs], color=[colours[name] for name in runs])
        axes.bar_label(bars, fmt="%.0f")
        axes.set(title=title)
        axes.set_xticks(range(len(runs)), [name.replace(", ", "\n") for name in runs], fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=8, help="places in a batch (8)")
    parser.add_argument("--mean-prompt", type=int, default=32, help="mean prompt tokens (32)")
    parser.add_argument("--mean-output", type=int, default=48, help="mean output tokens (48)")
    parser.add_argument("--longest", type=int, default=512, help="longest prompt and output together (512)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chart", type=Path, help="write a picture to this PNG (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.chart is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error("--chart needs matplotlib: pip install matplotlib")
    from rich.console import Console
    from rich.progress import Progress

    seats = options.max_num_seqs
    jobs = workload(options.requests, options.mean_prompt, options.mean_output, options.longest, options.seed)
    settings: dict[str, Any] = {
        "max_num_seqs": seats,
        "max_model_len": options.longest,
        "num_blocks_override": seats * options.longest // 16,
        "enable_prefix_caching": False,  # padding would be found in it
        "dtype": options.dtype,
    }
    runs: dict[str, Run] = {}
    try:
        with (
            LLM(options.model, **settings) as llm,
            Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar,
        ):
            warm = [Job(job.prompt, 2) for job in jobs[:seats]]  # the first product of each size is slower
            run(llm, warm, continuous(warm, seats), lambda n: None)
            for name, arrange in MODES.items():
                task = bar.add_task(name, total=sum(job.num_output for job in jobs))
                runs[name] = run(llm, jobs, arrange(jobs, seats), partial(bar.advance, task))
    except OctavoError as error:
        print(f"continuous_batching: {error}", file=sys.stderr)
        return error.exit_code
    found = {name: figures(result, jobs) for name, result in runs.items()}
    if options.chart is not None:
        chart(runs, found, seats, options.chart)
    if options.json:
        print(json.dumps(found))
    else:
        show(found, jobs, seats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
