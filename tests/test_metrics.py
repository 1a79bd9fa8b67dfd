"""Metrics: what is counted after known requests, under vLLM's names and buckets; the log line; the numbers behind them."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_support import Running, running_server, wait_for
from support import scripted_llm

from octavo import LLM, SamplingParams
from octavo.engine.stats import EngineStats
from octavo.server.generation import EngineRequest
from octavo.server.metrics import Metrics, one_two_five
from octavo.server.series import Histogram, History, Quantiles
from octavo.testing import tiny_model

END = 257
LONG = tuple(range(10, 50))  # 40 tokens: two full blocks of 16, and 8
SHORT = (1, 2, 3)
SCRIPTS = {LONG: [60, 61, 62, 63, END], SHORT: list(range(70, 90))}

VLLM_NAMES = """
num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total
num_preemptions_total prompt_tokens_total prompt_tokens_cached_total generation_tokens_total request_success_total
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket request_time_per_output_token_seconds_bucket
e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket request_inference_time_seconds_bucket
request_prefill_time_seconds_bucket request_decode_time_seconds_bucket request_prompt_tokens_bucket
request_generation_tokens_bucket request_max_num_generation_tokens_bucket request_params_n_bucket
request_params_max_tokens_bucket request_prefill_kv_computed_tokens_bucket iteration_tokens_total_bucket cache_config_info
"""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running_server(scripted_llm(tmp_path, SCRIPTS, max_num_batched_tokens=256)) as running:
        yield running


def metrics_of(server: Running) -> Metrics:
    (metrics,) = [observer for observer in server.thread.observers if isinstance(observer, Metrics)]
    return metrics


def ask(server: Running, *prompts: tuple[int, ...], name: str = "request", **params: object) -> None:
    """Runs prompts together, to their ends."""

    async def run() -> None:
        requests = [
            EngineRequest(f"{name}-{i}", list(prompt), SamplingParams(**{"temperature": 0, "max_tokens": 8, **params}))
            for i, prompt in enumerate(prompts)
        ]
        generation = await server.thread.submit(requests, stream=False)
        await generation.wait()

    asyncio.run(run())
    wait_for(lambda: server.thread.idle and not metrics_of(server)._seen)


def scrape(server: Running) -> Samples:
    """All samples, without the labels that every one has."""
    text = server.get("/metrics").text
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            key = sample.name.removeprefix("octavo:"), frozenset(labels.items())
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_counts_after_known_requests(server: Running) -> None:
    ask(server, LONG, SHORT)
    samples = scrape(server)
    assert value(samples, "prompt_tokens_total") == 43
    assert value(samples, "generation_tokens_total") == 5 + 8  # an end token is generated too
    assert value(samples, "request_success_total", finished_reason="stop") == 1
    assert value(samples, "request_success_total", finished_reason="length") == 1
    assert value(samples, "time_to_first_token_seconds_count") == 2
    assert value(samples, "inter_token_latency_seconds_count") == 4 + 7
    assert value(samples, "prefix_cache_queries_total") == 43
    assert value(samples, "prefix_cache_hits_total") == 0
    assert value(samples, "iteration_tokens_total_count") == value(samples, "engine_steps_total") == 8
    assert value(samples, "iteration_tokens_total_sum") == 43 + 4 + 7
    assert value(samples, "request_prompt_tokens_sum") == 43
    assert value(samples, "request_prompt_tokens_bucket", le="5.0") == 1
    assert value(samples, "request_generation_tokens_sum") == 13
    assert value(samples, "request_params_max_tokens_sum") == 16
    for name in ("queue", "prefill", "decode", "inference"):
        assert value(samples, f"request_{name}_time_seconds_count") == 2
    assert value(samples, "e2e_request_latency_seconds_count") == 2
    assert value(samples, "request_time_per_output_token_seconds_count") == 2
    assert value(samples, "num_requests_running") == value(samples, "num_requests_waiting") == 0
    assert value(samples, "kv_cache_usage_perc") == 0


def test_times_add_up(server: Running) -> None:
    ask(server, LONG)
    samples = scrape(server)
    parts = [value(samples, f"request_{name}_time_seconds_sum") for name in ("queue", "prefill", "decode")]
    whole = value(samples, "e2e_request_latency_seconds_sum")
    assert all(part >= 0 for part in parts)
    assert sum(parts) <= whole
    assert value(samples, "time_to_first_token_seconds_sum") == pytest.approx(parts[0] + parts[1], rel=1e-6)
    assert value(samples, "inter_token_latency_seconds_sum") == pytest.approx(parts[2], rel=1e-6)
    assert value(samples, "request_time_per_output_token_seconds_sum") == pytest.approx(parts[2] / 4, rel=1e-6)


def test_prefix_hits_are_tokens_that_need_no_prefill(server: Running) -> None:
    ask(server, LONG)
    ask(server, LONG, name="again")
    samples = scrape(server)
    assert value(samples, "prefix_cache_queries_total") == 80
    assert value(samples, "prefix_cache_hits_total") == value(samples, "prompt_tokens_cached_total") == 32
    assert value(samples, "request_prefill_kv_computed_tokens_sum") == 40 + 8


def test_several_outputs_are_one_request(server: Running) -> None:
    ask(server, SHORT, n=3, temperature=0.1)
    samples = scrape(server)
    assert value(samples, "request_success_total", finished_reason="length") == 1
    assert value(samples, "request_params_n_sum") == 3
    assert value(samples, "generation_tokens_total") == value(samples, "request_generation_tokens_sum") == 24
    assert value(samples, "request_max_num_generation_tokens_sum") == 8
    assert value(samples, "time_to_first_token_seconds_count") == 1
    assert value(samples, "inter_token_latency_seconds_count") == 21
    assert value(samples, "prompt_tokens_total") == 3


def test_vllms_names_are_all_there(server: Running) -> None:
    names = {name for name, _ in scrape(server)}
    assert [name for name in VLLM_NAMES.split() if name not in names] == []


def test_buckets_are_vllms(server: Running) -> None:
    bounds: dict[str, list[float]] = {}
    for (name, labels), _ in scrape(server).items():
        if name.endswith("_bucket"):
            bounds.setdefault(name.removesuffix("_bucket"), []).append(float(dict(labels)["le"]))
    assert bounds["iteration_tokens_total"] == [
        *(1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        math.inf,
    ]
    assert bounds["time_to_first_token_seconds"][:4] == [0.001, 0.005, 0.01, 0.02]
    assert bounds["time_to_first_token_seconds"][-4:] == [160, 640, 2560, math.inf]
    assert bounds["inter_token_latency_seconds"] == bounds["request_time_per_output_token_seconds"]
    assert len(bounds["inter_token_latency_seconds"]) == 19 + 1
    assert bounds["e2e_request_latency_seconds"][0] == 0.3
    assert bounds["e2e_request_latency_seconds"][-2] == 7680
    assert bounds["request_prompt_tokens"] == [1, 2, 5, 10, 20, 50, 100, 200, 500, math.inf]  # max_model_len is 512
    assert bounds["request_params_n"] == [1, 2, 5, 10, 20, math.inf]


def test_one_two_five() -> None:
    assert one_two_five(1) == (1,)
    assert one_two_five(4096) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    assert one_two_five(5000)[-1] == 5000


def test_each_app_has_its_own_registry(tmp_path: Path) -> None:
    llms = [scripted_llm(tmp_path / name, SCRIPTS) for name in "ab"]
    with running_server(llms[0]) as first, running_server(llms[1]) as second:
        ask(first, SHORT)
        assert value(scrape(first), "prompt_tokens_total") == 3
        assert value(scrape(second), "prompt_tokens_total") == 0


def test_prometheus_may_ask_for_openmetrics(server: Running) -> None:
    plain = server.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    answer = server.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_refused_requests_are_counted_by_reason(server: Running) -> None:
    assert server.post("/v1/completions", {"model": "no such model", "prompt": "x"}).status_code == 404
    rejected = {labels: v for (name, labels), v in scrape(server).items() if name == "requests_rejected_total"}
    assert rejected == {frozenset({("reason", "model_not_found")}): 1}


def test_aborted_requests_are_counted_as_such(server: Running) -> None:
    async def leave() -> None:
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        generation = await server.thread.submit([EngineRequest("left", list(SHORT), params)], stream=True)
        await generation.take()
        generation.close()

    asyncio.run(leave())
    wait_for(lambda: server.thread.idle)
    samples = scrape(server)
    assert value(samples, "request_success_total", finished_reason="abort") == 1
    assert value(samples, "e2e_request_latency_seconds_count") == 1
    assert not metrics_of(server)._seen


def test_v48_nothing_goes_backwards_under_preemption_and_prefix_hits(tmp_path: Path) -> None:
    prompts = {tuple(range(start, start + 20)): [200] * 60 for start in (10, 40, 70, 100)}
    llm = scripted_llm(tmp_path, prompts, num_blocks_override=14, max_model_len=96, max_num_seqs=8)
    with running_server(llm) as server:
        before: Samples = {}
        for turn in range(3):
            ask(server, *prompts, name=f"turn{turn}", max_tokens=60)
            samples = scrape(server)
            shrunk = [k for k in before if k[0].endswith(("_total", "_count", "_bucket")) and samples[k] < before[k]]
            assert not shrunk
            before = samples
        assert value(before, "num_preemptions_total", kind="recompute") > 0
        assert value(before, "prompt_tokens_total") == 3 * 80, "what is computed again is no new prompt"
        assert value(before, "generation_tokens_total") == 3 * 4 * 60


def test_v48_a_broken_sink_costs_one_warning_and_no_request(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: object) -> None:
        raise ValueError("counters can only be increased")

    monkeypatch.setattr(Histogram, "add", broken)
    with caplog.at_level(logging.WARNING):
        for turn in range(3):
            answer = server.post("/v1/completions", {"prompt": list(SHORT), "max_tokens": 4, "temperature": 0})
            assert answer.json()["usage"]["completion_tokens"] == 4, turn
    assert sum("Metrics" in record.message for record in caplog.records) == 1
    assert server.get("/metrics").status_code == 200


def test_v48_a_client_may_use_its_request_id_again(server: Running) -> None:
    for _ in range(2):
        ask(server, SHORT)
    samples = scrape(server)
    assert value(samples, "time_to_first_token_seconds_count") == 2
    assert value(samples, "generation_tokens_total") == 16


@pytest.mark.usefixtures("core_kernels")
def test_kernels_and_formats_are_labels(tmp_path: Path) -> None:
    with running_server(tiny_model(tmp_path)) as server:
        samples = scrape(server)
        linears = server.llm.engine.model_info.linears
        assert value(samples, "kernel_info", scheme="float", kernel="dense") == 1
        assert value(samples, "kernel_layers", scheme="float", kernel="dense") == len(linears) > 0
        assert value(samples, "kernel_weight_bytes", scheme="float", kernel="dense") == sum(
            r.num_bytes for r in linears
        )
        (quantization,) = [dict(labels) for (name, labels) in samples if name == "quantization_info"]
        assert quantization["quantization"] == "none"
        assert quantization["dtype"] == "float32"
        assert quantization["attention_backend"]
        (cache,) = [dict(labels) for (name, labels) in samples if name == "cache_config_info"]
        assert (cache["block_size"], cache["num_gpu_blocks"], cache["num_cpu_blocks"]) == ("16", "256", "0")


# --- the line in the log


def idle_metrics(llm: LLM) -> tuple[Metrics, Callable[[], EngineStats]]:
    return Metrics(llm.engine, "model", llm.engine.stats), llm.engine.stats


def test_the_line_is_written_only_while_there_is_work(server: Running) -> None:
    metrics = metrics_of(server)
    assert metrics.log_line() is None
    ask(server, LONG, SHORT)
    line = metrics.log_line()
    assert line is not None
    assert "0 running, 0 waiting" in line
    assert "prefix hits 0.0 %" in line
    assert "of 64 blocks" in line
    assert metrics.log_line() is None, "what was told is not told again"


def test_the_line_tells_of_work_that_has_no_token_yet(tmp_path: Path) -> None:
    llm = scripted_llm(tmp_path, SCRIPTS)
    metrics, _ = idle_metrics(llm)
    llm.engine.add_request("waits", LONG, SamplingParams())
    line = metrics.log_line()
    assert line is not None
    assert "0 running, 1 waiting" in line


def test_the_line_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics, _ = idle_metrics(scripted_llm(tmp_path, SCRIPTS))
    lines = iter([ValueError("no line"), "the line", None])

    def line() -> str | None:
        item = next(lines, None)
        if isinstance(item, Exception):
            raise item
        return item

    monkeypatch.setattr(metrics, "log_line", line)

    async def run() -> None:
        task = asyncio.ensure_future(metrics.log_forever(0.01))
        while "the line" not in caplog.text:
            await asyncio.sleep(0.01)
        task.cancel()

    with caplog.at_level(logging.INFO):
        asyncio.run(asyncio.wait_for(run(), 30))
    assert "it is tried again" in caplog.text


# --- the numbers behind


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram([1, 5])
    for number in (0.5, 1, 1.0001, 5, 6):
        histogram.add(number)
    histogram.add(2, times=3)
    assert histogram.counts == [2, 5, 1]
    assert histogram.sum == pytest.approx(0.5 + 1 + 1.0001 + 5 + 6 + 6)


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_quantiles_are_close_to_the_exact_ones(share: float) -> None:
    dice = random.Random(3)
    numbers = [dice.lognormvariate(-3, 1.5) for _ in range(2000)]
    halves = [Quantiles(), Quantiles()]
    for i, number in enumerate(numbers):
        halves[i % 2].add(number)
    exact = sorted(numbers)[math.ceil(share * len(numbers)) - 1]
    assert Quantiles(halves).at(share) == pytest.approx(exact, rel=0.021)
    assert Quantiles().at(share) is None


def test_quantiles_of_nothing_long_and_of_equal_values() -> None:
    quantiles = Quantiles()
    quantiles.add(0.0, times=10)
    assert quantiles.at(0.99) == pytest.approx(1e-6, rel=0.03)
    quantiles.add(2.0, times=1000)
    assert quantiles.at(0.5) == quantiles.at(1.0) == pytest.approx(2.0, rel=0.03)


def test_history_keeps_seconds_that_are_over_and_forgets_old_ones() -> None:
    history = History(started=100.0)
    history.at(100.2).generation_tokens += 3
    history.at(100.9).generation_tokens += 4
    history.at(103.1).generation_tokens += 5
    assert [(s.time, s.generation_tokens) for s in history.complete(103.5)] == [(0, 7)]
    assert [(s.time, s.generation_tokens) for s in history.complete(104.0)] == [(0, 7), (3, 5)]
    assert [s.time for s in history.complete(104.0, since=0)] == [3]
    assert [s.time for s in history.window(103.5, 3)] == [3]
    for second in range(1000):
        history.at(200.0 + second)
    assert len(history.complete(5000.0)) == 300


# --- the dashboard


def test_the_dashboard_asks_only_for_metrics_that_there_are(server: Running) -> None:
    dashboard = json.loads((Path(__file__).parents[1] / "docs" / "grafana.json").read_text())
    ask(server, SHORT)
    server.post("/v1/completions", {"model": "no such model", "prompt": "x"})
    names = {name for name, _ in scrape(server)}
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(r"octavo:(\w+)|(process_\w+)", expression)}
    asked_names = {first or second for first, second in asked}
    infos = {"kernel_weight_bytes"}  # of linear layers, of which a scripted model has none
    assert asked_names - names - infos == set()
    assert len(panels) >= 15
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
