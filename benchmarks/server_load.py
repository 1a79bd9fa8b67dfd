"""Many clients, some of whom leave, err or are killed: what goes wrong, what is left behind, and whether memory grows.

    python benchmarks/server_load.py MODEL --seconds 600 --streams 200

Starts `octavo serve MODEL` and keeps so many streams open. Of the clients, 5 % leave in the middle, 2 % send bad requests, and
one process of them is killed with SIGKILL every few seconds and started anew. Exit code 1 if a good request failed, anything
was left behind, or the p99 of /health is over 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

BAD: list[dict[str, Any]] = [
    {"prompt": ""},
    {"prompt": "x", "temperature": -1},
    {"prompt": [10**9]},
    {"prompt": "x", "max_tokens": 0},
    {"prompt": "x", "n": 10**6},
]


async def client(
    http: httpx.AsyncClient, url: str, name: str, end: float, seen: Counter[str], choose: random.Random
) -> None:
    """One request after another, until the time is up."""
    while time.time() < end:
        kind = choose.choices(["good", "leaves", "bad"], [93, 5, 2])[0]
        body: dict[str, Any] = {
            "model": name,
            "prompt": "".join(choose.choices("abcdefgh ", k=choose.randint(1, 120))),
            "max_tokens": choose.randint(1, 48),
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        try:
            if kind == "bad":
                answer = await http.post(f"{url}/v1/completions", json={**choose.choice(BAD), "model": name})
                seen["bad" if answer.status_code == 400 else f"bad request answered {answer.status_code}"] += 1
                continue
            async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                if answer.status_code == 429:
                    seen["429"] += 1
                    await asyncio.sleep(float(answer.headers["retry-after"]))
                    continue
                leave_after = choose.randint(0, 5) if kind == "leaves" else -1
                last = ""
                async for line in answer.aiter_lines():
                    if leave_after == 0:
                        break
                    leave_after -= bool(line)
                    if line.startswith("data: {"):
                        last = line
                    elif line == "data: [DONE]":
                        usage = json.loads(last[6:])["usage"]["completion_tokens"]
                        kind = kind if usage == body["max_tokens"] else f"good request with {usage} tokens"
                        seen["tokens"] += usage
                seen[kind] += 1
                if kind == "good" and '"usage":{' not in last:
                    seen["good request cut off"] += 1
        except Exception as error:
            seen[f"{kind} request: {type(error).__name__}"] += 1


def clients(url: str, name: str, number: int, seconds: float, seed: int, ready: Any, results: Any) -> None:
    """A process of clients; says when it begins, and its counts at the end, if nobody kills it before."""
    seen: Counter[str] = Counter()
    os.nice(10)  # they are on the server's machine: what they take is not what is measured

    async def together() -> None:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http:
            ready.set()
            end = time.time() + seconds
            each = (client(http, url, name, end, seen, random.Random(f"{seed}-{i}")) for i in range(number))
            await asyncio.gather(*each)

    asyncio.run(together())
    results.put(seen)


def rss_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def state(url: str) -> tuple[int, int, int, int]:
    """Running, waiting, free blocks, all blocks."""
    engine = httpx.get(f"{url}/v1/octavo/stats", timeout=60).json()["engine"]
    return engine["num_running"], engine["num_waiting"], engine["num_free_blocks"], engine["num_blocks"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="Folder of the model. Default: a tiny one, made for this.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument(
        "--kill-every", type=float, default=5, help="Seconds between two kills of a process of clients."
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            from octavo.testing import tiny_model  # the processes of clients need no torch

            model = str(tiny_model(Path(folder) / "tiny"))
        return run(model, options)


def run(model: str, options: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "octavo.cli", "serve", model, "--port", "0", "--served-model-name", "m"]
    command += ["--num-gpu-blocks-override", "1024", "--disable-log-stats"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    lines = iter(server.stderr.readline, "")
    url = next(found[1] for line in lines if (found := re.search(r"is served at (\S+)", line)))
    context = multiprocessing.get_context("spawn")
    results, nowhere = context.Queue(), context.Queue()
    share = options.streams // 10

    def start_clients(number: int, seed: int, results: Any) -> Any:
        ready = context.Event()
        process = context.Process(
            target=clients, args=(url, "m", number, options.seconds, seed, ready, results), daemon=True
        )
        process.start()
        return process, ready

    steady = [start_clients((options.streams - share) // 2, seed, results) for seed in (1, 2)]
    (victim, ready), kills = start_clients(share, 3, nowhere), 0
    for _, begun in (*steady, (victim, ready)):
        begun.wait(120)
    start = time.time()
    end = start + options.seconds
    health: list[float] = []
    memory: list[tuple[float, float]] = []
    next_kill = start + options.kill_every
    with httpx.Client(timeout=60) as probe:
        while time.time() < end:
            before = time.perf_counter()
            assert probe.get(f"{url}/health").status_code == 200
            health.append(1000 * (time.perf_counter() - before))
            memory.append((time.time() - start, rss_mib(server.pid)))
            if time.time() > next_kill and ready.is_set():
                victim.kill()
                victim.join()
                kills, next_kill = kills + 1, time.time() + options.kill_every
                victim, ready = start_clients(share, 100 + kills, nowhere)
            time.sleep(0.1)
    seen: Counter[str] = sum((results.get(timeout=180) for _ in steady), Counter())
    ready.wait(120)
    victim.kill()
    for process in (*(process for process, _ in steady), victim):
        process.join()
    left = state(url)
    for _ in range(100):
        if left[:2] == (0, 0) and left[2] == left[3]:
            break
        time.sleep(0.1)
        left = state(url)
    server.terminate()
    code = server.wait(60)
    late = [point for point in memory if point[0] > options.seconds / 2]
    slope = statistics.linear_regression(*zip(*late, strict=True)).slope * 60 if len(late) > 2 else 0.0
    p99 = statistics.quantiles(health, n=100)[98]
    expected = {"good", "leaves", "bad", "tokens", "429"}
    errors = {kind: count for kind, count in seen.items() if kind not in expected and not kind.startswith("leaves")}
    print(f"{options.seconds:.0f} s, {options.streams} streams: {dict(seen)}; {kills} processes of clients killed")
    print(f"errors of good and bad requests: {errors or 'none'}")
    print(
        f"left behind: {left[0]} running, {left[1]} waiting, {left[3] - left[2]} of {left[3]} blocks held; exit code {code}"
    )
    print(f"RSS {memory[0][1]:.0f} -> {memory[-1][1]:.0f} MiB, slope over the second half {slope:+.2f} MiB a minute")
    print(
        f"/health: median {statistics.median(health):.1f} ms, p99 {p99:.1f} ms, max {max(health):.1f} ms, {len(health)} probes"
    )
    failed = bool(errors) or left[:2] != (0, 0) or left[2] != left[3] or p99 > 100 or code != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
