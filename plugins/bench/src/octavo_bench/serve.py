"""`octavo bench serve`: load for a running server, octavo's or anybody's, as `vllm bench serve` puts it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo import ConfigError
from octavo_bench import datasets
from octavo_bench.client import Post, Target, ask, get_json, http_post
from octavo_bench.datasets import RoughTokens, Sample
from octavo_bench.metrics import METRICS, Summary, as_json, printed, summarise
from octavo_bench.progress import Bar
from octavo_bench.recorder import RequestResult, StreamError
from octavo_bench.tokens import Tokens
from octavo_bench.traffic import RampUp, arrivals, send_all

BACKENDS = {"openai": False, "vllm": False, "octavo": False, "openai-chat": True}
"""By name, whether it is chat: the first three are one."""
GOALS = ("ttft", "tpot", "e2el")
READY_INTERVAL_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `vllm bench serve`."""
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=list(BACKENDS), default="openai", help="Completions, or openai-chat.")
    server.add_argument("--base-url", metavar="URL", help="Address of the server, instead of --host and --port.")
    server.add_argument("--host", default="127.0.0.1", help="Default: 127.0.0.1.")
    server.add_argument("--port", type=int, default=8000, help="Default: 8000.")
    server.add_argument("--endpoint", metavar="PATH", help="Default: /v1/completions, or /v1/chat/completions.")
    server.add_argument("--model", metavar="NAME", help="Model to ask for. Default: the first that the server lists.")
    server.add_argument("--served-model-name", metavar="NAME", help="What the server calls it, if not --model.")
    server.add_argument(
        "--tokenizer", metavar="FOLDER", help="Folder with tokenizer.json. Default: --model, if it is one."
    )
    server.add_argument("--api-key", metavar="KEY", help="Key of the server. Default: $OPENAI_API_KEY.")
    server.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE", help="A header; may be repeated."
    )
    server.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=0,
        metavar="S",
        help="Wait this long for the server. Default: 0.",
    )
    server.add_argument("--request-timeout-sec", type=float, default=6 * 3600, metavar="S", help="Default: six hours.")
    datasets.add_arguments(parser)
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--request-rate", type=float, default=float("inf"), metavar="RPS", help="Default: inf, all at once."
    )
    traffic.add_argument(
        "--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; less: bursts; more: steady. Default: 1."
    )
    traffic.add_argument("--max-concurrency", type=int, metavar="N", help="Most requests at once. Default: no limit.")
    traffic.add_argument(
        "--ramp-up-strategy", choices=["linear", "exponential"], help="How the rate rises over the run."
    )
    traffic.add_argument("--ramp-up-start-rps", type=float, metavar="RPS", help="Rate at the first request.")
    traffic.add_argument("--ramp-up-end-rps", type=float, metavar="RPS", help="Rate at the last request.")
    traffic.add_argument(
        "--num-warmups", type=int, default=0, metavar="N", help="Requests before the clock. Default: 0."
    )
    traffic.add_argument("--seed", type=int, default=0, metavar="N", help="Seed of all that is random. Default: 0.")
    request = parser.add_argument_group("request")
    request.add_argument("--ignore-eos", action="store_true", help="Ask for exactly the output length.")
    for name, kind in (
        ("temperature", float),
        ("top-p", float),
        ("top-k", int),
        ("min-p", float),
        ("frequency-penalty", float),
        ("presence-penalty", float),
        ("repetition-penalty", float),
    ):
        request.add_argument(f"--{name}", type=kind, metavar="X", help="Default: the server's.")
    request.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="Added to each request.")
    report = parser.add_argument_group("report")
    report.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        metavar="LIST",
        help="Of ttft,tpot,itl,e2el. Default: ttft,tpot,itl.",
    )
    report.add_argument("--metric-percentiles", default="99", metavar="LIST", help="Such as 50,90,99. Default: 99.")
    report.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="Goals of a good request: ttft, tpot, e2el in ms."
    )
    report.add_argument("--save-result", action="store_true", help="Write the figures as JSON.")
    report.add_argument("--save-detailed", action="store_true", help="Write lists with all requests as well.")
    report.add_argument("--append-result", action="store_true", help="Append a line to the file.")
    report.add_argument("--result-dir", metavar="FOLDER", help="Where to write. Default: here.")
    report.add_argument("--result-filename", metavar="FILE", help="Default: made of the label, rate, model and time.")
    report.add_argument("--metadata", nargs="*", default=[], metavar="NAME=VALUE", help="Noted in the file.")
    report.add_argument("--label", help="What the file calls the server. Default: the backend.")
    report.add_argument("--plot", metavar="FILE", help="PNG of TTFT, ITL and the timeline.")
    report.add_argument("--plot-timeline", action="store_true", help="The same beside the result file.")
    report.add_argument("--disable-tqdm", action="store_true", help="Show no progress bar.")


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a run needs, checked; `body` is added to each request."""

    target: Target
    samples: Sequence[Sample]
    times: Sequence[float]
    max_concurrency: int | None
    num_warmups: int
    goals_ms: Mapping[str, float]
    selected: Sequence[str]
    percentiles: Sequence[float]


def run(options: argparse.Namespace) -> int:
    """Measures, prints, and saves. The exit code is 1 if any request failed, or none was answered."""
    if options.plot or options.plot_timeline:
        from octavo_bench.plots import need_matplotlib

        need_matplotlib()
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> int:
    headers = _headers(options)
    await _wait_ready(options, headers)
    name = options.served_model_name or options.model or await _first_model(options, headers)
    tokens = _tokens(options)
    plan = make_plan(options, name, headers, tokens)
    count = None if isinstance(tokens, RoughTokens) else tokens.count
    enabled = not options.disable_tqdm and sys.stderr.isatty()
    async with http_post() as post:
        with Bar("warming up", plan.num_warmups, enabled) as bar:
            await warm_up(plan, post, time.perf_counter, bar.request)
        with Bar("serving", len(plan.samples), enabled) as bar:
            summary, results = await measure(
                plan, post, time.perf_counter, count, on_chunk=bar.tokens, on_result=bar.request
            )
    print(
        printed(
            summary,
            plan.percentiles,
            plan.selected,
            request_rate=options.request_rate,
            max_concurrency=options.max_concurrency,
        )
    )
    _save(options, plan, name, summary, results)
    return 1 if summary.failed or not summary.completed else 0


async def measure(
    plan: Plan,
    post: Post,
    clock: Callable[[], float],
    count: Callable[[str], int] | None = None,
    *,
    on_chunk: Callable[[int], object] = lambda chunks: None,
    on_result: Callable[[RequestResult], object] = lambda result: None,
) -> tuple[Summary, list[RequestResult]]:
    """Sends all samples and sums up; all times are of `clock`, which must be the one that `asyncio.sleep` follows."""

    async def send(sample: Sample) -> RequestResult:
        result = await ask(plan.target, sample, post, clock=clock, count=count, progress=on_chunk)
        on_result(result)
        return result

    start = clock()
    results = await send_all(plan.samples, plan.times, send, max_concurrency=plan.max_concurrency, clock=clock)
    return summarise(results, start, clock(), plan.goals_ms), results


async def warm_up(
    plan: Plan,
    post: Post,
    clock: Callable[[], float],
    on_result: Callable[[RequestResult], object] = lambda result: None,
) -> None:
    """Sends the first sample a few times. Raises ConfigError if one fails: the run would only repeat that."""

    async def send(sample: Sample) -> RequestResult:
        result = await ask(plan.target, sample, post, clock=clock)
        on_result(result)
        return result

    samples = [plan.samples[0]] * plan.num_warmups
    results = await send_all(samples, [0.0] * len(samples), send, max_concurrency=plan.max_concurrency, clock=clock)
    if failed := [r for r in results if not r.success]:
        raise ConfigError(f"a warm-up request failed: {failed[0].error}")


def make_plan(options: argparse.Namespace, model: str, headers: Mapping[str, str], tokens: Tokens) -> Plan:
    """Checks the flags and draws the prompts. Raises ConfigError that names the flag."""
    for name in ("request_rate", "burstiness", "max_concurrency"):
        if (value := getattr(options, name)) is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected more than 0")
    if options.num_warmups < 0:
        raise ConfigError(f"--num-warmups {options.num_warmups}: expected 0 or more")
    chat = BACKENDS[options.backend]
    names = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
    body = {n: getattr(options, n) for n in names if getattr(options, n) is not None}
    if not isinstance(options.extra_body, dict):
        raise ConfigError(f"--extra-body: expected a JSON object, got {options.extra_body!r}")
    path = options.endpoint or ("/v1/chat/completions" if chat else "/v1/completions")
    target = Target(
        _base(options) + path,
        model,
        chat,
        headers,
        {**body, **options.extra_body},
        options.ignore_eos,
        options.request_timeout_sec,
    )
    samples = datasets.samples(options, tokens)
    return Plan(
        target,
        samples,
        arrivals(
            len(samples),
            options.request_rate,
            burstiness=options.burstiness,
            ramp_up=_ramp_up(options),
            seed=options.seed,
        ),
        options.max_concurrency,
        options.num_warmups,
        _goals(options.goodput),
        _selected(options.percentile_metrics),
        _percentiles(options.metric_percentiles),
    )


def _ramp_up(options: argparse.Namespace) -> RampUp | None:
    start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
    if options.ramp_up_strategy is None:
        if start is not None or end is not None:
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return None
    if options.request_rate != float("inf"):
        raise ConfigError("--request-rate and --ramp-up-strategy both set the rate; leave one of them out")
    if start is None or end is None or not (start > 0 and end > 0):
        raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, both above 0")
    return RampUp(options.ramp_up_strategy, start, end)


def _goals(texts: Sequence[str]) -> dict[str, float]:
    goals = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            raise ConfigError(f"--goodput {text}: expected NAME:MILLISECONDS, such as ttft:200") from None
        if name not in GOALS or not goals[name] >= 0:
            raise ConfigError(f"--goodput {text}: expected one of {', '.join(GOALS)} and a limit of 0 or more")
    return goals


def _selected(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if wrong := [name for name in names if name not in METRICS]:
        raise ConfigError(f"--percentile-metrics: no metric '{wrong[0]}'; there are {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(item) for item in text.split(",") if item]
    except ValueError:
        values = [-1.0]
    if wrong := [v for v in values if not 0 <= v <= 100]:
        raise ConfigError(f"--metric-percentiles {text}: expected numbers from 0 to 100, got {wrong[0]:g}")
    return values


def _headers(options: argparse.Namespace) -> dict[str, str]:
    if wrong := [text for text in [*options.header, *options.metadata] if "=" not in text]:
        raise ConfigError(f"'{wrong[0]}': expected NAME=VALUE")
    key = options.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return headers | dict(text.split("=", 1) for text in options.header)


def _base(options: argparse.Namespace) -> str:
    base = options.base_url or f"http://{options.host}:{options.port}"
    return str(base).rstrip("/")


async def _wait_ready(options: argparse.Namespace, headers: Mapping[str, str]) -> None:
    """Asks for the list of models until it comes."""
    end = time.monotonic() + options.ready_check_timeout_sec
    while options.ready_check_timeout_sec > 0:
        try:
            await get_json(f"{_base(options)}/v1/models", headers)
            return
        except StreamError as error:
            if time.monotonic() >= end:
                raise ConfigError(
                    f"{_base(options)} is not ready after {options.ready_check_timeout_sec:g} s: {error}"
                ) from None
            await asyncio.sleep(READY_INTERVAL_S)


async def _first_model(options: argparse.Namespace, headers: Mapping[str, str]) -> str:
    url = f"{_base(options)}/v1/models"
    try:
        return str((await get_json(url, headers))["data"][0]["id"])
    except (StreamError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{url} names no model ({error}); is the server running? Or name one with --model") from None


def _tokens(options: argparse.Namespace) -> Tokens:
    folder = options.tokenizer
    if folder is None and options.model and (Path(options.model).expanduser() / "tokenizer.json").is_file():
        folder = options.model
    if folder is not None:
        return Tokens(folder)
    print(
        "octavo bench: no --tokenizer: prompts are about as long as asked for, and tokens are what the server counts",
        file=sys.stderr,
    )
    return RoughTokens()


def _save(
    options: argparse.Namespace, plan: Plan, model: str, summary: Summary, results: Sequence[RequestResult]
) -> None:
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    label = options.label or options.backend
    limit = "" if options.max_concurrency is None else f"-concurrency{options.max_concurrency}"
    name = options.result_filename or f"{label}-{options.request_rate}qps{limit}-{Path(model).name}-{now}.json"
    file = Path(options.result_dir or ".") / name
    wanted = [Path(options.plot)] if options.plot else []
    wanted += [file.with_suffix(".png")] if options.plot_timeline else []
    if options.save_result or options.append_result or options.save_detailed or options.plot_timeline:
        file.parent.mkdir(parents=True, exist_ok=True)
    if options.save_result or options.append_result or options.save_detailed:
        record: dict[str, Any] = {
            "date": now,
            "backend": options.backend,
            "label": options.label,
            "model_id": model,
            "tokenizer_id": options.tokenizer or options.model,
            "num_prompts": len(plan.samples),
            "dataset_name": options.dataset_name,
            **dict(text.split("=", 1) for text in options.metadata),
            "request_rate": "inf" if options.request_rate == float("inf") else options.request_rate,
            "burstiness": options.burstiness,
            "max_concurrency": options.max_concurrency,
            **as_json(summary, results, plan.percentiles, plan.selected, options.save_detailed),
        }
        with file.open("a" if options.append_result else "w", encoding="utf-8") as out:
            if options.append_result and out.tell():
                out.write("\n")
            json.dump(record, out)
        print(f"octavo bench: {file}", file=sys.stderr)
    for picture in wanted:
        from octavo_bench.plots import plot

        plot(summary, results, picture, f"{model}, {len(results)} requests, rate {options.request_rate:g}/s")
        print(f"octavo bench: {picture}", file=sys.stderr)
