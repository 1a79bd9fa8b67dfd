"""The figures of results that are written by hand."""

from __future__ import annotations

import json
from random import Random
from statistics import fmean, pstdev

import numpy as np
import pytest

from octavo_bench.metrics import as_json, mean, percentile, printed, std, summarise
from octavo_bench.recorder import RequestResult


def answered(start: float, times: list[float], prompt: int = 5) -> RequestResult:
    return RequestResult(
        prompt, start, True, "", "x" * len(times), times, [1] * len(times), len(times), times[-1] if times else start
    )


def failed(start: float, end: float, cause: str) -> RequestResult:
    return RequestResult(5, start, False, cause, chunk_times=[start], output_tokens=99, end=end)


def test_percentiles_are_numpys() -> None:
    random = Random(1)
    for number in (1, 2, 3, 10, 101):
        values = [random.expovariate(1) for _ in range(number)]
        for percent in (0, 1, 25, 50, 90, 99, 99.9, 100):
            assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
        assert mean(values) == pytest.approx(fmean(values))
        assert std(values) == pytest.approx(pstdev(values))
    assert percentile([], 99) == mean([]) == std([]) == 0


RESULTS = [
    answered(0.0, [0.1, 0.2, 0.4]),
    answered(0.5, [1.5, 1.6], prompt=7),
    failed(0.2, 0.3, "HTTP 500: it broke"),
    failed(0.3, 0.9, "the stream was cut off before its end"),
    failed(0.3, 0.9, "HTTP 500: it broke"),
    answered(1.5, [1.7]),
]


def test_v49_failures_are_counted_by_cause_and_excluded() -> None:
    summary = summarise(RESULTS, 0.0, 2.0)
    assert (summary.completed, summary.failed) == (3, 3)
    assert summary.causes == {"HTTP 500: it broke": 2, "the stream was cut off before its end": 1}
    assert (summary.total_input_tokens, summary.total_output_tokens) == (17, 6)
    assert list(summary.times["ttft"]) == pytest.approx([0.1, 1.0, 0.2])
    assert list(summary.times["itl"]) == pytest.approx([0.1, 0.2, 0.1])
    assert list(summary.times["tpot"]) == pytest.approx([0.15, 0.1])
    assert list(summary.times["e2el"]) == pytest.approx([0.4, 1.1, 0.2])
    assert summary.peak_output_tokens_per_s == 3
    assert summary.peak_concurrent_requests == 3


def test_goodput_counts_requests_that_met_all_goals() -> None:
    def good(**goals: float) -> int | None:
        return summarise(RESULTS, 0.0, 2.0, goals).good

    assert good() is None
    assert good(ttft=201) == 2
    assert good(ttft=201, tpot=151) == 2, "one token has no TPOT to miss"
    assert good(ttft=99.9) == 0
    assert good(e2el=1101, tpot=101) == 2


def test_one_request_after_the_other_is_one_at_a_time() -> None:
    summary = summarise([answered(0, [1.0]), answered(1.0, [2.0])], 0, 2)
    assert summary.peak_concurrent_requests == 1


def test_the_block_is_vllms() -> None:
    text = printed(
        summarise(RESULTS, 0.0, 2.0, {"ttft": 200}), [50, 99.9], ["ttft", "e2el"], request_rate=4, max_concurrency=8
    )
    assert text.splitlines() == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     3         ",
        "Failed requests:                         3         ",
        "Maximum request concurrency:             8         ",
        "Request rate configured (RPS):           4.00      ",
        "Benchmark duration (s):                  2.00      ",
        "Total input tokens:                      17        ",
        "Total generated tokens:                  6         ",
        "Request throughput (req/s):              1.50      ",
        "Request goodput (req/s):                 1.00      ",
        "Output token throughput (tok/s):         3.00      ",
        "Peak output token throughput (tok/s):    3.00      ",
        "Peak concurrent requests:                3.00      ",
        "Total token throughput (tok/s):          11.50     ",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          433.33    ",
        "Median TTFT (ms):                        200.00    ",
        "P50 TTFT (ms):                           200.00    ",
        "P99.9 TTFT (ms):                         998.40    ",
        "----------------End-to-end Latency----------------",
        "Mean E2EL (ms):                          566.67    ",
        "Median E2EL (ms):                        400.00    ",
        "P50 E2EL (ms):                           400.00    ",
        "P99.9 E2EL (ms):                         1098.60   ",
        "==================================================",
        "failed: 2 x HTTP 500: it broke",
        "failed: 1 x the stream was cut off before its end",
    ]


def test_the_json_keys_are_vllms() -> None:
    found = json.loads(json.dumps(as_json(summarise(RESULTS, 0.0, 2.0), RESULTS, [99], ["ttft", "tpot", "itl"], True)))
    wanted = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"}
    wanted |= {"output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls", "errors"}
    wanted |= {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl")}
    assert wanted <= found.keys()
    assert found["mean_tpot_ms"] == pytest.approx(125)
    assert len(found["ttfts"]) == len(found["errors"]) == len(RESULTS)
    plain = as_json(summarise(RESULTS, 0.0, 2.0), RESULTS, [99], ["ttft"], False)
    assert not {"ttfts", "itls", "generated_texts", "errors", "mean_itl_ms"} & plain.keys()


def test_nothing_at_all_is_all_zeros() -> None:
    summary = summarise([], 0.0, 0.0)
    text = printed(summary, [99], ["ttft", "tpot", "itl", "e2el"])
    assert "nan" not in text
    assert as_json(summary, [], [99], ["ttft"], True)["request_throughput"] == 0
