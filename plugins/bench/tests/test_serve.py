"""Whole runs: against a server whose time is made up, where every figure is known, and over real sockets."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import ConfigError
from octavo.testing import tiny_tokenizer
from octavo_bench import serve
from octavo_bench.command import Bench
from octavo_bench.datasets import RoughTokens
from octavo_bench.metrics import Summary, as_json
from octavo_bench.plots import plot
from octavo_bench.recorder import RequestResult


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    Bench().add_arguments(parser)
    return parser.parse_args(["serve", *arguments])


def plan_of(*arguments: str) -> serve.Plan:
    small = ("--random-input-len", "5", "--random-output-len", "10")
    return serve.make_plan(options(*small, *arguments), "m", {}, RoughTokens())


@pytest.fixture
def measured(run_virtually: Callable[..., Any]) -> Callable[..., tuple[Summary, list[RequestResult]]]:
    def run(server: Any, *arguments: str) -> tuple[Summary, list[RequestResult]]:
        return run_virtually(lambda clock: serve.measure(plan_of(*arguments), server.post, clock))

    return run


# --- a time that is made up


def test_v49_known_timings_come_out(measured: Callable[..., Any], fake: Any) -> None:
    """First token after 100 ms, then 10 ms a token, every 5th request refused, every 7th cut off: exact, not within 5 %."""
    server = fake(tokens=10, refuse_every=5, cut_every=7)
    summary, results = measured(server, "--num-prompts", "70", "--request-rate", "10")
    found = as_json(summary, results, [50, 99], ["ttft", "tpot", "itl", "e2el"], True)
    refused, cut = 14, 8
    assert (summary.completed, summary.failed) == (70 - refused - cut, refused + cut)
    assert summary.causes == {"HTTP 500: it broke": refused, "the stream was cut off before its end": cut}
    assert (found["mean_ttft_ms"], found["p99_ttft_ms"]) == pytest.approx((100, 100))
    assert (found["mean_itl_ms"], found["p50_itl_ms"], found["mean_tpot_ms"]) == pytest.approx((10, 10, 10))
    assert found["std_itl_ms"] == pytest.approx(0, abs=1e-6)
    assert found["mean_e2el_ms"] == pytest.approx(190)
    assert len(summary.times["itl"]) == 48 * 9, "nine latencies for ten tokens"
    assert (summary.total_input_tokens, summary.total_output_tokens) == (48 * 7, 480)
    assert summary.duration == pytest.approx(7.0 + 0.19, abs=0.1)
    assert found["output_throughput"] == pytest.approx(480 / summary.duration)
    assert sum(bool(e) for e in found["errors"]) == 22


def test_v49_several_tokens_in_a_chunk_change_no_mean(measured: Callable[..., Any], fake: Any) -> None:
    summary, results = measured(fake(tokens=12, per_chunk=3), "--num-prompts", "4")
    assert all(r.chunk_tokens == [3, 3, 3, 3] for r in results)
    assert list(summary.times["itl"]) == pytest.approx([0.01] * 36)
    assert list(summary.times["tpot"]) == pytest.approx([0.01] * 4)


def test_all_at_once_is_as_long_as_one(measured: Callable[..., Any], fake: Any) -> None:
    summary, _ = measured(fake(tokens=11), "--num-prompts", "50")
    assert summary.duration == pytest.approx(0.2)
    assert summary.peak_concurrent_requests == 50
    assert summary.peak_output_tokens_per_s == 550
    assert summary.per_second(summary.completed) == pytest.approx(250)


def test_max_concurrency_starts_clocks_late(measured: Callable[..., Any], fake: Any) -> None:
    summary, _ = measured(fake(tokens=11), "--num-prompts", "50", "--max-concurrency", "5")
    assert summary.duration == pytest.approx(2.0)
    assert summary.peak_concurrent_requests == 5
    assert list(summary.times["ttft"]) == pytest.approx([0.1] * 50), (
        "waiting for a place is the client's, not the server's"
    )


def test_the_request_rate_is_kept(measured: Callable[..., Any], fake: Any) -> None:
    server = fake(tokens=1)
    measured(server, "--num-prompts", "40", "--request-rate", "8", "--burstiness", "2")
    assert server.sent_at[-1] == pytest.approx(5.0)
    assert server.sent_at == sorted(server.sent_at)


def test_goodput(measured: Callable[..., Any], fake: Any) -> None:
    summary, _ = measured(fake(tokens=11), "--num-prompts", "10", "--goodput", "ttft:101", "tpot:10.1")
    assert summary.good == 10
    summary, _ = measured(fake(tokens=11), "--num-prompts", "10", "--goodput", "ttft:99")
    assert summary.good == 0


def test_a_server_that_never_ends_is_given_up(measured: Callable[..., Any], fake: Any) -> None:
    summary, _ = measured(fake(first_s=1e6), "--num-prompts", "2", "--request-timeout-sec", "30")
    assert summary.causes == {"no end after 30 s": 2}
    assert summary.duration == pytest.approx(30)


def test_what_is_asked_for(measured: Callable[..., Any], fake: Any) -> None:
    server = fake()
    arguments = ("--ignore-eos", "--temperature", "0", "--top-k", "4", "--extra-body", '{"logprobs": 1}')
    measured(server, "--num-prompts", "1", *arguments)
    (body,) = server.bodies
    assert body == {
        "model": "m",
        "prompt": body["prompt"],
        "max_tokens": 10,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
        "top_k": 4,
        "logprobs": 1,
    }
    assert server.paths == ["http://127.0.0.1:8000/v1/completions"]
    chat = fake()
    measured(chat, "--num-prompts", "1", "--backend", "openai-chat", "--base-url", "http://x:1/")
    assert chat.bodies[0]["messages"][0]["role"] == "user"
    assert chat.bodies[0]["max_completion_tokens"] == 10
    assert chat.paths == ["http://x:1/v1/chat/completions"]


def test_warm_ups_are_not_counted(run_virtually: Callable[..., Any], fake: Any) -> None:
    server = fake()
    plan = plan_of("--num-prompts", "3", "--num-warmups", "4")
    run_virtually(lambda clock: serve.warm_up(plan, server.post, clock))
    assert len(server.bodies) == 4
    assert len({json.dumps(b) for b in server.bodies}) == 1
    with pytest.raises(ConfigError, match="a warm-up request failed: HTTP 500: it broke"):
        run_virtually(lambda clock: serve.warm_up(plan, fake(refuse_every=2).post, clock))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request-rate", "0"], "--request-rate 0.0: expected more than 0"),
        (["--burstiness", "-1"], "--burstiness -1.0"),
        (["--max-concurrency", "0"], "--max-concurrency 0"),
        (["--num-warmups", "-1"], "--num-warmups -1"),
        (["--goodput", "ttft"], "--goodput ttft: expected NAME:MILLISECONDS"),
        (["--goodput", "itl:5"], "expected one of ttft, tpot, e2el"),
        (["--percentile-metrics", "ttft,foo"], "no metric 'foo'"),
        (["--metric-percentiles", "101"], "from 0 to 100, got 101"),
        (["--metric-percentiles", "many"], "expected numbers"),
        (["--extra-body", "[1]"], "expected a JSON object"),
        (["--ramp-up-start-rps", "1"], "need --ramp-up-strategy"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps and"),
        (["--ramp-up-strategy", "linear", "--request-rate", "3"], "both set the rate"),
        (["--num-prompts", "0"], "--num-prompts 0: expected 1 or more"),
        (["--input-len", "0"], "--input-len 0: expected 1 or more"),
        (["--random-range-ratio", "1"], "--random-range-ratio 1.0"),
        (["--dataset-path", "x"], "--dataset-path is for --dataset-name custom"),
    ],
)
def test_unusable_flags_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(*arguments)


def test_headers_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    assert serve._headers(options())["Authorization"] == "Bearer from-environment"
    found = serve._headers(options("--api-key", "k", "--header", "A=b=c", "--header", "D=e"))
    assert found == {"Authorization": "Bearer k", "A": "b=c", "D": "e"}
    with pytest.raises(ConfigError, match="expected NAME=VALUE"):
        serve._headers(options("--metadata", "nothing"))


# --- real sockets


def pieces(text: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(text), size):
        yield text[start : start + size]


class Background:
    """A server in a thread of its own, for runs of the command, which bring their own event loop."""

    def __init__(self, sockets: Callable[..., Any], answers: Callable[[str, dict], Iterator[bytes]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self.url = ""

        async def main() -> None:
            self._end = asyncio.Event()
            async with sockets(answers) as self.url:
                self._ready.set()
                await self._end.wait()

        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(main()))
        self._thread.start()
        assert self._ready.wait(60)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)
        self._loop.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def stream(cut: int, tokens: int = 4) -> Iterator[bytes]:
    """A good answer, its bytes cut into small pieces, with keep-alives and two events that may share a piece."""
    body = b": keep-alive\n\n"
    for i in range(tokens):
        body += b'data: {"choices": [{"index": 0, "text": "w%d ", "finish_reason": null}]}\r\n\r\n' % i
    body += b': again\n\ndata: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
    body += (
        b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": %d}}\n\ndata: [DONE]\n\n' % tokens
    )
    yield HEAD
    yield from pieces(body, cut)


@pytest.fixture
def answering(sockets: Callable[..., Any]) -> Iterator[Callable[..., str]]:
    running: list[Background] = []

    def start(answers: Callable[[int, str], Iterator[bytes]]) -> str:
        number = 0

        def answer(path: str, body: dict) -> Iterator[bytes]:
            nonlocal number
            if path == "/v1/models":
                yield b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"data": [{"id": "listed"}]}'
                return
            number += 1
            yield from answers(number, body["model"])

        running.append(Background(sockets, answer))
        return running[-1].url

    yield start
    for server in running:
        server.stop()


def run(*arguments: str) -> int:
    return Bench().run(options("--random-input-len", "6", "--random-output-len", "4", "--disable-tqdm", *arguments))


def test_a_run_over_sockets(answering: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_tokenizer(tmp_path / "tokenizer")
    models: list[str] = []

    def answers(number: int, model: str) -> Iterator[bytes]:
        models.append(model)
        return stream(cut=1 + 7 * number)

    url = answering(answers)
    arguments = ("--base-url", url, "--num-prompts", "12", "--max-concurrency", "3", "--num-warmups", "2")
    files = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path / "out"), "--result-filename", "r.json")
    more = ("--metadata", "gpu=none", "--metric-percentiles", "50,99", "--percentile-metrics", "ttft,e2el")
    ready = ("--ready-check-timeout-sec", "60", "--tokenizer", str(tmp_path / "tokenizer"), "--plot-timeline")
    assert run(*arguments, *files, *more, *ready) == 0
    assert set(models) == {"listed"}
    assert len(models) == 14
    found = json.loads((tmp_path / "out" / "r.json").read_text())
    assert (found["completed"], found["failed"], found["model_id"], found["gpu"]) == (12, 0, "listed", "none")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (12 * 9, 48)
    assert found["output_lens"] == [4] * 12
    assert found["generated_texts"] == ["w0 w1 w2 w3 "] * 12
    assert found["max_concurrent_requests"] <= 3
    assert {"p50_ttft_ms", "p99_e2el_ms"} <= found.keys()
    assert "mean_itl_ms" not in found
    assert (tmp_path / "out" / "r.png").read_bytes().startswith(b"\x89PNG")
    block = capsys.readouterr().out
    assert "Successful requests:                     12" in block
    assert "Maximum request concurrency:             3" in block


def test_v49_failures_over_sockets_give_an_exit_code(
    answering: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    def answers(number: int, model: str) -> Iterator[bytes]:
        if number % 5 == 0:
            yield b'HTTP/1.1 500 x\r\nConnection: close\r\n\r\n{"error": {"message": "it broke"}}'
        elif number % 7 == 0:
            yield from list(stream(cut=40))[:5]
        elif number == 8:
            yield HEAD + b'data: {"error": {"message": "lost"}}\n\n'
        elif number == 9:
            yield b"HTTP/1.1 429 x\r\nConnection: close\r\n\r\nslow down"
        elif number == 11:
            return  # the connection is closed without a word
        else:
            yield from stream(cut=100)

    url = answering(answers)
    assert run("--base-url", url, "--model", "m", "--num-prompts", "14", "--max-concurrency", "1") == 1
    captured = capsys.readouterr()
    assert "Successful requests:                     7" in captured.out
    assert "Failed requests:                         7" in captured.out
    assert "failed: 2 x HTTP 500: it broke" in captured.out
    assert "failed: 2 x the stream was cut off before its end" in captured.out
    assert "failed: 1 x error in the stream: lost" in captured.out
    assert "failed: 1 x HTTP 429: slow down" in captured.out
    assert "failed: 1 x ServerDisconnectedError" in captured.out
    assert "no --tokenizer" in captured.err


def test_results_are_appended(answering: Callable[..., str], tmp_path: Path) -> None:
    url = answering(lambda number, model: stream(cut=1000))
    for _ in range(3):
        arguments = ("--append-result", "--result-dir", str(tmp_path), "--result-filename", "all.jsonl")
        assert run("--base-url", url, "--num-prompts", "2", *arguments) == 0
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [line["completed"] for line in lines] == [2, 2, 2]


def test_the_file_is_named_after_the_run(answering: Callable[..., str], tmp_path: Path) -> None:
    url = answering(lambda number, model: stream(cut=1000))
    arguments = ("--num-prompts", "2", "--request-rate", "1000", "--max-concurrency", "2", "--label", "ours")
    assert run("--base-url", url, "--save-result", "--result-dir", str(tmp_path), *arguments) == 0
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("ours-1000.0qps-concurrency2-listed-")


def test_no_server_is_told_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"127.0.0.1:9/v1/models names no model .* is the server running\?"):
        run("--port", "9", "--num-prompts", "2")
    with pytest.raises(ConfigError, match=r"is not ready after 0\.1 s"):
        run("--port", "9", "--num-prompts", "2", "--ready-check-timeout-sec", "0.1")
    assert run("--port", "9", "--num-prompts", "2", "--model", "m") == 1
    assert "failed: 2 x ClientConnectorError" in capsys.readouterr().out


def test_plots_need_matplotlib_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="matplotlib"):
        run("--port", "9", "--plot", "x.png")


def test_a_plot_of_failures_alone(tmp_path: Path, measured: Callable[..., Any], fake: Any) -> None:
    summary, results = measured(fake(refuse_every=1), "--num-prompts", "3")
    plot(summary, results, tmp_path / "x.png", "nothing worked")
    assert (tmp_path / "x.png").stat().st_size > 1000
