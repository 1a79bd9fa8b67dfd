"""The arithmetic: results of requests to the figures that are printed and saved. No clock, no input or output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import Any

from octavo_bench.recorder import RequestResult

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile with linear interpolation between neighbours, as numpy's default; 0 where there are no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = floor(place), ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def mean(values: Sequence[float]) -> float:
    """0 where there are no values."""
    return sum(values) / len(values) if values else 0.0


def std(values: Sequence[float]) -> float:
    """Of the population, as numpy's default."""
    centre = mean(values)
    return sqrt(mean([(v - centre) ** 2 for v in values]))


@dataclass(frozen=True, slots=True)
class Summary:
    """All figures of a run. `times` holds seconds by metric; failed requests count in `failed` and `causes` alone."""

    duration: float
    completed: int
    failed: int
    causes: Mapping[str, int]
    total_input_tokens: int
    total_output_tokens: int
    good: int | None  # requests that met all goals; None where there are no goals
    peak_output_tokens_per_s: float
    peak_concurrent_requests: int
    times: Mapping[str, Sequence[float]]

    def per_second(self, number: float) -> float:
        return number / self.duration if self.duration > 0 else 0.0


def summarise(
    results: Sequence[RequestResult], start: float, end: float, goals_ms: Mapping[str, float] | None = None
) -> Summary:
    """The figures of requests that ran between two times of one clock; `goals_ms` are limits by metric."""
    done = [r for r in results if r.success]
    good = None
    if goals_ms:
        good = sum(all(_met(r, name, limit) for name, limit in goals_ms.items()) for r in done)
    return Summary(
        duration=end - start,
        completed=len(done),
        failed=len(results) - len(done),
        causes=dict(Counter(r.error for r in results if not r.success).most_common()),
        total_input_tokens=sum(r.prompt_tokens for r in done),
        total_output_tokens=sum(r.output_tokens for r in done),
        good=good,
        peak_output_tokens_per_s=_peak_tokens(done, start),
        peak_concurrent_requests=_peak_requests(results),
        times={
            "ttft": [r.ttft for r in done if r.ttft is not None],
            "tpot": [r.tpot for r in done if r.tpot is not None],
            "itl": [wait for r in done for wait in r.itls],
            "e2el": [r.latency for r in done],
        },
    )


def _met(result: RequestResult, name: str, limit_ms: float) -> bool:
    """A request without the metric, such as TPOT of one token, meets its goal."""
    value = {"ttft": result.ttft, "tpot": result.tpot, "e2el": result.latency}[name]
    return value is None or value * 1000 <= limit_ms


def _peak_tokens(results: Sequence[RequestResult], start: float) -> float:
    """Most output tokens in one second, the seconds counted from the start."""
    seconds: Counter[int] = Counter()
    for result in results:
        for time, tokens in zip(result.chunk_times, result.chunk_tokens, strict=True):
            seconds[int(time - start)] += tokens
    return float(max(seconds.values(), default=0))


def _peak_requests(results: Sequence[RequestResult]) -> int:
    """Most requests under way at one moment; one that ends when another starts does not count twice."""
    changes = sorted([(r.start, 1) for r in results] + [(r.end, -1) for r in results])
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def as_json(
    summary: Summary,
    results: Sequence[RequestResult],
    percentiles: Sequence[float],
    selected: Sequence[str],
    detailed: bool,
) -> dict[str, Any]:
    """The figures under vLLM's keys; `detailed` adds lists with one entry for each request, those that failed included."""
    found: dict[str, Any] = {
        "duration": summary.duration,
        "completed": summary.completed,
        "failed": summary.failed,
        "failures": dict(summary.causes),
        "total_input_tokens": summary.total_input_tokens,
        "total_output_tokens": summary.total_output_tokens,
        "request_throughput": summary.per_second(summary.completed),
        "request_goodput": None if summary.good is None else summary.per_second(summary.good),
        "output_throughput": summary.per_second(summary.total_output_tokens),
        "total_token_throughput": summary.per_second(summary.total_input_tokens + summary.total_output_tokens),
        "max_output_tokens_per_s": summary.peak_output_tokens_per_s,
        "max_concurrent_requests": summary.peak_concurrent_requests,
    }
    for name in selected:
        values = [1000 * v for v in summary.times[name]]
        found[f"mean_{name}_ms"], found[f"median_{name}_ms"] = mean(values), percentile(values, 50)
        found[f"std_{name}_ms"] = std(values)
        for percent in percentiles:
            found[f"p{percent:g}_{name}_ms"] = percentile(values, percent)
    if detailed:
        first = min((r.start for r in results), default=0.0)
        found |= {
            "input_lens": [r.prompt_tokens for r in results],
            "output_lens": [r.output_tokens for r in results],
            "ttfts": [r.ttft or 0.0 for r in results],
            "itls": [r.itls for r in results],
            "start_times": [r.start - first for r in results],
            "latencies": [r.latency for r in results],
            "generated_texts": [r.text for r in results],
            "errors": [r.error for r in results],
        }
    return found


def printed(
    summary: Summary,
    percentiles: Sequence[float],
    selected: Sequence[str],
    *,
    request_rate: float = float("inf"),
    max_concurrency: int | None = None,
) -> str:
    """The block that `vllm bench serve` prints, followed by what failed and why."""
    lines = [f"{' Serving Benchmark Result ':=^50}"]

    def line(name: str, value: float) -> None:
        lines.append(f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}")

    line("Successful requests:", summary.completed)
    line("Failed requests:", summary.failed)
    if max_concurrency is not None:
        line("Maximum request concurrency:", max_concurrency)
    if request_rate != float("inf"):
        line("Request rate configured (RPS):", float(request_rate))
    line("Benchmark duration (s):", summary.duration)
    line("Total input tokens:", summary.total_input_tokens)
    line("Total generated tokens:", summary.total_output_tokens)
    line("Request throughput (req/s):", summary.per_second(summary.completed))
    if summary.good is not None:
        line("Request goodput (req/s):", summary.per_second(summary.good))
    line("Output token throughput (tok/s):", summary.per_second(summary.total_output_tokens))
    line("Peak output token throughput (tok/s):", summary.peak_output_tokens_per_s)
    line("Peak concurrent requests:", float(summary.peak_concurrent_requests))
    total = summary.total_input_tokens + summary.total_output_tokens
    line("Total token throughput (tok/s):", summary.per_second(total))
    for name in selected:
        short, title = METRICS[name]
        values = [1000 * v for v in summary.times[name]]
        lines.append(f"{title:-^50}")
        line(f"Mean {short} (ms):", mean(values))
        line(f"Median {short} (ms):", percentile(values, 50))
        for percent in percentiles:
            line(f"P{percent:g} {short} (ms):", percentile(values, percent))
    lines.append("=" * 50)
    lines += [f"failed: {count} x {cause}" for cause, count in summary.causes.items()]
    return "\n".join(lines)
