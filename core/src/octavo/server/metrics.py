"""What operators see: Prometheus metrics under vLLM's names, the numbers of the page, and a line in the log.

Counters are read where they are counted, at scrape: nothing is added up twice, so none can go backwards. Histograms are filled
on the engine's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from octavo.engine.engine import Engine
from octavo.engine.stats import EngineStats
from octavo.front.outputs import RequestOutput
from octavo.server.series import Histogram, History, Quantiles, Second

if TYPE_CHECKING:
    from octavo.server.engine_thread import StepRecord
    from octavo.server.generation import EngineRequest

logger = logging.getLogger(__name__)

PREFIX = "octavo:"
FINISH_REASONS = ("stop", "length", "abort", "error")
WINDOW_S = 60
"""Seconds that the latencies of the page's figures are taken over."""

# The buckets are vLLM's, so that dashboards and alerts port.
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `most`."""
    bounds = (mantissa * 10**exponent for exponent in range(len(str(most))) for mantissa in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= most)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens since the last line in the log, and when that was."""

    time: float
    prompt_tokens: int
    generation_tokens: int
    prefix_queries: int
    prefix_hits: int


class Metrics(Collector):
    """Observes an engine thread and tells what it saw. One for each app: it has its own registry.

    `stats` gives the engine's numbers from any thread; `rejections` counts, by reason, the requests that the server refused.
    """

    def __init__(
        self,
        engine: Engine,
        model_name: str,
        stats: Callable[[], EngineStats],
        rejections: Mapping[str, int] | None = None,
    ) -> None:
        self.engine, self.stats = engine, stats
        self.rejections: Mapping[str, int] = Counter() if rejections is None else rejections
        lengths = one_two_five(engine.model_info.max_model_len)
        self.histograms = {
            "time_to_first_token_seconds": Histogram(_FIRST_TOKEN_S),
            "inter_token_latency_seconds": Histogram(_TOKEN_S),
            "request_time_per_output_token_seconds": Histogram(_TOKEN_S),
            "e2e_request_latency_seconds": Histogram(_REQUEST_S),
            "request_queue_time_seconds": Histogram(_REQUEST_S),
            "request_inference_time_seconds": Histogram(_REQUEST_S),
            "request_prefill_time_seconds": Histogram(_REQUEST_S),
            "request_decode_time_seconds": Histogram(_REQUEST_S),
            "request_prompt_tokens": Histogram(lengths),
            "request_generation_tokens": Histogram(lengths),
            "request_max_num_generation_tokens": Histogram(lengths),
            "request_prefill_kv_computed_tokens": Histogram(lengths),
            "request_params_n": Histogram((1, 2, 5, 10, 20)),
            "request_params_max_tokens": Histogram(lengths),
            "iteration_tokens_total": Histogram(_STEP_TOKENS),
        }
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.history = History(time.monotonic())
        self._labels = {"model_name": model_name, "engine": "0"}
        # By request and sequence: how many tokens it had when it was last seen to have a new one, and when that was.
        self._seen: defaultdict[str, dict[int, tuple[int, float]]] = defaultdict(dict)
        self._logged = self._rates()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    # --- on the engine's thread

    def on_added(self, request: EngineRequest) -> None:
        """Nothing is counted until a request has a token or ends; but the queue is longer now."""
        self._look(time.monotonic())

    def _look(self, now: float) -> Second:
        """Notes what runs and waits, as the latest that is known of this second, which is returned."""
        second, scheduler, pool = self.history.at(now), self.engine.scheduler, self.engine.scheduler.pool
        second.running, second.waiting = len(scheduler.running), scheduler.num_waiting + scheduler.num_swapped
        second.kv_usage = 1 - pool.num_free / pool.num_blocks
        return second

    def on_step(self, engine: Engine, step: StepRecord) -> None:
        """Counts the tokens of a step, and the time since those before."""
        second, inter = self._look(step.ended), Counter[float]()
        num_tokens = 0
        for delta in step.deltas:
            output, index = delta.output, delta.sequence_index
            num, seen = len(delta.completion.token_ids), self._seen[output.request_id]
            before, then = seen.get(index, (0, None))
            if num == before:  # its end without a token
                continue
            came = output.metrics.last_token_time or step.ended
            if then is not None:
                inter[came - then] += 1
            elif not seen:
                waited = came - output.metrics.arrival_time
                self.histograms["time_to_first_token_seconds"].add(waited)
                second.first_token.add(waited)
                self.prompt_tokens += len(output.prompt_token_ids)
                self.cached_tokens += output.num_cached_tokens
                second.prompt_tokens += len(output.prompt_token_ids)
            num_tokens += num - before
            seen[index] = (num, came)
        for seconds, times in inter.items():
            self.histograms["inter_token_latency_seconds"].add(seconds, times)
            second.inter_token.add(seconds, times)
        self.generation_tokens += num_tokens
        if step.num_scheduled_tokens:
            self.histograms["iteration_tokens_total"].add(step.num_scheduled_tokens)
        second.generation_tokens += num_tokens

    def on_finished(self, request: EngineRequest, output: RequestOutput) -> None:
        """Counts a request that ended, in whatever way, and how long its parts took as far as it got."""
        self._seen.pop(output.request_id, None)
        self._look(time.monotonic())
        reasons = [completion.finish_reason or "abort" for completion in output.outputs]
        self.finished[next((reason for reason in ("error", "abort") if reason in reasons), reasons[0])] += 1
        times, params, add = output.metrics, request.params, self._add
        lengths = [len(completion.token_ids) for completion in output.outputs]
        add("request_params_n", params.n)
        add("request_params_max_tokens", params.max_tokens)
        add("request_prompt_tokens", len(output.prompt_token_ids))
        add("request_generation_tokens", sum(lengths))
        add("request_max_num_generation_tokens", max(lengths))
        add("e2e_request_latency_seconds", _between(times.arrival_time, times.finished_time))
        if times.first_token_time is None:
            return
        add("request_prefill_kv_computed_tokens", len(output.prompt_token_ids) - output.num_cached_tokens)
        add("request_queue_time_seconds", _between(times.arrival_time, times.first_scheduled_time))
        add("request_prefill_time_seconds", _between(times.first_scheduled_time, times.first_token_time))
        add("request_inference_time_seconds", _between(times.first_scheduled_time, times.last_token_time))
        decode = _between(times.first_token_time, times.last_token_time)
        add("request_decode_time_seconds", decode)
        if decode is not None and max(lengths) > 1:
            add("request_time_per_output_token_seconds", decode / (max(lengths) - 1))

    def _add(self, name: str, value: float | None) -> None:
        if value is not None:
            self.histograms[name].add(value)

    # --- from other threads

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now, for the registry."""
        stats = self.stats()
        counters = stats.scheduler
        yield self._gauge("num_requests_running", "Requests in the running batch.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait, swapped ones not counted.", stats.num_waiting)
        yield self._gauge("num_requests_swapped", "Requests whose blocks lie on the host.", stats.num_swapped)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks that requests hold, 0 to 1.", stats.kv_usage)
        yield self._gauge("kv_blocks", "KV blocks.", stats.num_blocks)
        yield self._gauge("kv_blocks_free", "KV blocks that nobody holds, cached ones included.", stats.num_free_blocks)
        yield self._gauge("kv_blocks_cached", "KV blocks with a known prefix, held or free.", stats.num_cached_blocks)
        yield self._gauge("kv_slots_utilization", "Tokens stored over slots of held blocks.", stats.kv.utilization)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", counters.prefix_queries)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", counters.prefix_hits)
        swaps = counters.num_swaps
        kinds = {"swap": swaps, "recompute": counters.num_preemptions - swaps}
        yield self._counters("num_preemptions", "Preemptions, by what became of the blocks.", "kind", kinds)
        yield self._counter("kv_blocks_swapped_out", "KV blocks copied to the host.", counters.blocks_swapped_out)
        yield self._counter("kv_blocks_swapped_in", "KV blocks copied from the host.", counters.blocks_swapped_in)
        yield self._counter("engine_steps", "Forward passes.", counters.num_steps)
        yield self._counter("prompt_tokens", "Prompt tokens of requests with a first token.", self.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Of these, tokens found in the prefix cache.", self.cached_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", self.generation_tokens)
        yield self._counters("request_success", "Requests that ended, by why.", "finished_reason", dict(self.finished))
        yield self._counters("requests_rejected", "Requests refused, by why.", "reason", dict(self.rejections))
        for name, histogram in self.histograms.items():
            yield self._histogram(name, histogram)
        yield from self._infos()

    def _gauge(self, name: str, text: str, value: float, extra: Mapping[str, str] | None = None) -> Metric:
        labels = self._labels | (dict(extra) if extra else {})
        family = GaugeMetricFamily(PREFIX + name, text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: int) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        total, buckets = 0, []
        for bound, count in zip((*map(str, map(float, histogram.bounds)), "+Inf"), list(histogram.counts), strict=True):
            total += count
            buckets.append((bound, float(total)))
        text = f"Histogram of {name.removesuffix('_total').replace('_', ' ')}."
        family = HistogramMetricFamily(PREFIX + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, histogram.sum)
        return family

    def _infos(self) -> Iterator[Metric]:
        """What does not change: settings, formats and kernels, as labels of gauges that are 1."""
        info, config = self.engine.model_info, self.engine.config
        stats = self.stats()
        cache = {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(stats.num_blocks),  # vLLM's name, whatever the device
            "num_cpu_blocks": str(stats.num_host_blocks),
            "cache_dtype": info.kv_cache_dtype or config.kv_cache_dtype,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "preemption_mode": config.preemption_mode,
        }
        yield self._gauge("cache_config_info", "Settings of the KV cache.", 1, cache)
        schemes = ", ".join(sorted({linear.spec for linear in info.linears}))
        quantization = {
            "quantization": info.quantization or "none",
            "weights": schemes,
            "dtype": info.dtype,
            "kv_cache_dtype": info.kv_cache_dtype,
            "attention_backend": info.attention,
        }
        yield self._gauge("quantization_info", "Formats of weights and KV cache.", 1, quantization)
        layers: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        for linear in info.linears:
            layers[linear.spec, linear.kernel] += 1
            sizes[linear.spec, linear.kernel] += linear.num_bytes
        for name, text, values in (
            ("kernel_info", "Kernels of linear layers.", dict.fromkeys(layers, 1)),
            ("kernel_layers", "Linear layers by scheme and kernel.", layers),
            ("kernel_weight_bytes", "Bytes of their weights in memory.", sizes),
        ):
            family = GaugeMetricFamily(PREFIX + name, text, labels=[*self._labels, "scheme", "kernel"])
            for key, value in values.items():
                family.add_metric([*self._labels.values(), *key], value)
            yield family

    def latency(self, now: float) -> dict[str, float | None]:
        """Medians and 99th percentiles of the last minute, in seconds; None where there was no token."""
        seconds = self.history.window(now, WINDOW_S)
        first, inter = (Quantiles(getattr(s, name) for s in seconds) for name in ("first_token", "inter_token"))
        return {
            "ttft_p50": first.at(0.5),
            "ttft_p99": first.at(0.99),
            "itl_p50": inter.at(0.5),
            "itl_p99": inter.at(0.99),
        }

    # --- the line in the log

    def _rates(self) -> Rates:
        counters = self.engine.scheduler.stats
        totals = self.prompt_tokens, self.generation_tokens, counters.prefix_queries, counters.prefix_hits
        return Rates(time.monotonic(), *totals)

    def log_line(self) -> str | None:
        """What happened since the last line; None where nothing did and nothing runs."""
        last, now, stats = self._logged, self._rates(), self.stats()
        self._logged = now
        prompt, generated = now.prompt_tokens - last.prompt_tokens, now.generation_tokens - last.generation_tokens
        if not (prompt or generated or stats.num_running or stats.num_waiting or stats.num_swapped):
            return None
        seconds = max(now.time - last.time, 1e-3)
        queries, hits = now.prefix_queries - last.prefix_queries, now.prefix_hits - last.prefix_hits
        swapped = f", {stats.num_swapped} swapped" if stats.num_swapped else ""
        return (
            f"prompts {prompt / seconds:,.1f} tokens/s, generation {generated / seconds:,.1f} tokens/s; "
            f"{stats.num_running} running, {stats.num_waiting} waiting{swapped}; "
            f"KV cache {100 * stats.kv_usage:.1f} % of {stats.num_blocks:,} blocks, "
            f"prefix hits {100 * hits / max(queries, 1):.1f} %; "
            f"preemptions {stats.scheduler.num_preemptions:,} since start"
        )

    async def log_forever(self, interval_s: float = 10.0) -> None:
        """Writes a line every so many seconds in which there was work."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                if line := self.log_line():
                    logger.info("%s", line)
            except Exception:
                logger.warning("the line of statistics failed; it is tried again", exc_info=True)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(end - start, 0.0)


def seconds_as_columns(metrics: Metrics, now: float, since: int) -> dict[str, Sequence[float | None]]:
    """The seconds after `since` that are over, one list for each quantity; times in seconds since start."""
    seconds = metrics.history.complete(now, since)
    columns: dict[str, Sequence[float | None]] = {
        name: [getattr(second, name) for second in seconds]
        for name in ("time", "prompt_tokens", "generation_tokens", "running", "waiting", "kv_usage")
    }
    for name, kind in (("ttft", "first_token"), ("itl", "inter_token")):
        for percent in (50, 99):
            columns[f"{name}_p{percent}"] = [getattr(second, kind).at(percent / 100) for second in seconds]
    return columns
