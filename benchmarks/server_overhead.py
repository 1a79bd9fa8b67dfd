"""How many tokens a second one core can stream over HTTP when the model costs nothing.

    python benchmarks/server_overhead.py --concurrency 32 --requests 256 --profile profile.txt

The scripted model says one token a step without computing it, so what is left is ours: scheduling, detokenizing, JSON, HTTP.
The server is pinned to one core and its clients, in another process, to another. A token counts when its own event arrives:
events that carry several, because the server was behind, are told separately.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import io
import json
import multiprocessing
import os
import pstats
import re
import socket
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, EngineConfig, KVGeometry, ModelInfo, Platform, discover
from octavo.attention.backend import AttentionRequest
from octavo.attention.kv_format import PagedKV, PlainKV
from octavo.attention.reference import ReferenceAttention
from octavo.engine.in_process import InProcessExecutor
from octavo.engine.step import Step, StepOutput
from octavo.testing import ScriptedModel, tiny_tokenizer

PROMPT = [1, 2, 3, 4]
WORD = 65


def instant_llm(folder: Path, max_num_seqs: int, step_s: float) -> LLM:
    """A model whose every token is "A": no forward, no sampling."""
    tiny_tokenizer(folder)
    model = ScriptedModel({}, 288)

    class InstantExecutor(InProcessExecutor):
        name = "instant"

        def __init__(self, config: EngineConfig, registry: Any) -> None:
            (layer,) = model.attention_layers
            geometry = KVGeometry(1, layer.kv_heads, layer.head_dim, config.block_size, torch.float32)
            kv = PagedKV(PlainKV(geometry), [layer], 65_536, "cpu")
            request = AttentionRequest([layer], torch.float32, config.block_size, torch.float32, registry.platform)
            info = ModelInfo(288, 4096, frozenset([model.end_token_id]))
            from octavo.engine.runner import Runner

            self.runner = Runner.with_model(model, kv, ReferenceAttention(request), info, registry)

        def execute(self, step: Step) -> StepOutput:
            time.sleep(step_s)
            done = zip(step.requests, step.num_scheduled_tokens, strict=True)
            return StepOutput([WORD if r.num_computed_tokens + n == r.num_tokens else -1 for r, n in done])

    registry = replace(discover(Platform.detect("cpu")), executors={"instant": InstantExecutor})
    return LLM(str(folder), registry=registry, distributed_executor_backend="instant", max_num_seqs=max_num_seqs)


def serve(folder: str, core: int, concurrency: int, step_s: float, profile: str | None, pipe: Any) -> None:
    """The server's process: listens, tells its port, and at the end what it spent."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    from octavo.server.app import make_app
    from octavo.server.engine_thread import EngineThread
    from octavo.server.serve import SWITCH_INTERVAL_S, HTTPServer, uvicorn_config
    from octavo.server.settings import ServerSettings

    llm = instant_llm(Path(folder), concurrency, step_s)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    thread = EngineThread(llm.engine, llm.tokenizer)
    settings = ServerSettings(disable_log_stats=True)
    app = make_app(thread, settings)
    sock = socket.create_server(("127.0.0.1", 0))
    http = HTTPServer(uvicorn_config(app, settings), app.state.server)
    profilers = []
    if profile:
        run = thread._run

        def profiled() -> None:
            profiler = cProfile.Profile()
            profilers.append(("engine's thread", profiler))
            profiler.runcall(run)

        thread._thread = threading.Thread(target=profiled, daemon=True)
    thread.start()
    pipe.send(sock.getsockname()[1])

    def stop_when_told() -> None:
        pipe.recv()
        http.should_exit = True

    threading.Thread(target=stop_when_told, daemon=True).start()
    if profile:
        profiler = cProfile.Profile()
        profilers.append(("event loop", profiler))
        profiler.runcall(http.run, sockets=[sock])
    else:
        http.run(sockets=[sock])
    thread.stop()
    times = os.times()
    pipe.send((times.user + times.system, llm.engine.scheduler.stats.num_steps))
    if profile:
        text = io.StringIO()
        for name, profiler in profilers:
            text.write(f"=== {name}\n")
            pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(25)
        Path(profile).write_text(text.getvalue())


async def one(port: int, path: str, body: bytes) -> tuple[int, int]:
    """One stream over a plain socket, as cheap as a client can be: events with text, and tokens by usage."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    data = await reader.read()
    writer.close()
    events = [e for e in data.split(b"data: ")[1:] if b'"content":"A' in e or b'"text":"A' in e]
    tokens = re.findall(rb'"completion_tokens":(\d+)', data)
    return len(events), int(tokens[-1])


async def load(port: int, path: str, body: bytes, concurrency: int, requests: int) -> tuple[float, int, int]:
    queue = iter(range(requests))
    events = tokens = 0

    async def worker() -> None:
        nonlocal events, tokens
        for _ in queue:
            found = await one(port, path, body)
            events, tokens = events + found[0], tokens + found[1]

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return time.perf_counter() - start, events, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--step-ms", type=float, default=0, help="Let each step sleep so long, to leave time for each event."
    )
    parser.add_argument("--completions", action="store_true", help="/v1/completions instead of chat.")
    parser.add_argument("--profile", metavar="FILE", help="Write a profile of both threads; slows all down.")
    options = parser.parse_args()
    path = "/v1/completions" if options.completions else "/v1/chat/completions"
    body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": options.tokens}
    body |= {"prompt": PROMPT} if options.completions else {"messages": [{"role": "user", "content": "hi"}]}
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, cores[0], options.concurrency, options.step_ms / 1000, options.profile, theirs)
        process = context.Process(target=serve, args=arguments)
        process.start()
        os.sched_setaffinity(0, {cores[-1]})
        port = ours.recv()
        payload = json.dumps(body).encode()
        asyncio.run(load(port, path, payload, options.concurrency, options.concurrency))
        speeds, shares = [], []
        for _ in range(options.rounds):
            seconds, events, tokens = asyncio.run(load(port, path, payload, options.concurrency, options.requests))
            speeds.append(tokens / seconds)
            shares.append(events / tokens)
            print(f"{tokens} tokens in {events} events, {seconds:.2f} s: {tokens / seconds:,.0f} tokens/s")
        ours.send(None)
        cpu_s, steps = ours.recv()
        process.join()
    print(
        f"{path}, {options.concurrency} streams, server on one core: {statistics.median(speeds):,.0f} streamed tokens/s, "
        f"{statistics.median(shares):.2f} events a token; {cpu_s:.1f} s of CPU, {steps} steps"
    )


if __name__ == "__main__":
    main()
