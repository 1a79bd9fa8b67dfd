"""The timings that all drivers share, so that engines driven from Python are measured in one way.

An engine is a function generate(prompts, max_tokens): it completes each prompt (token ids), greedily and without regard to end
tokens, and returns when all are done. Decoding n sequences is n * G / (t(G + 1 tokens) - t(1 token)), where the shorter time
is the mean of one before and one after the longer. This file imports nothing of octavo's: it runs in the peers' environments.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

MARK = "RESULT "
Generate = Callable[[Sequence[list[int]], int], Any]


def seconds_since_start() -> float:
    """Since this process began; interpreter start and imports included."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    with open("/proc/uptime") as file:
        return float(file.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def prompts(seed: int, number: int, length: int, vocab: int) -> list[list[int]]:
    """Random prompts without special tokens."""
    source = random.Random(seed)
    return [[source.randrange(300, vocab) for _ in range(length)] for _ in range(number)]


def seconds(generate: Generate, batch: Sequence[list[int]], max_tokens: int) -> float:
    start = time.perf_counter()
    generate(batch, max_tokens)
    return time.perf_counter() - start


def decode_rate(generate: Generate, batches: Sequence[Sequence[list[int]]], num_tokens: int) -> float:
    """Tokens a second of all sequences together. `batches` are three of one size: they may be equal where prefixes are kept."""
    before = seconds(generate, batches[0], 1)
    whole = seconds(generate, batches[1], num_tokens + 1)
    after = seconds(generate, batches[2], 1)
    return len(batches[1]) * num_tokens / max(whole - (before + after) / 2, 1e-9)


def measure(generate: Generate, options: dict[str, Any]) -> dict[str, float]:
    """Values by workload, in the order of `options["works"]`; `generate` has a model loaded, and has computed nothing yet.

    Long contexts need an engine that keeps prefixes: the prompt is computed once, before time is taken.
    """
    sizes, vocab = options["sizes"], options["vocab"]
    found: dict[str, float] = {}
    seed = iter(range(options["seed"] * 1000, 10**9))
    if "load" in options["works"]:
        generate(prompts(next(seed), 1, 2, vocab), 1)
        found["load"] = seconds_since_start()
    for work in options["works"]:
        what, _, batch = work.partition(" ")
        if what == "prefill":
            for _ in range(2):  # the first warms up
                once = seconds(generate, prompts(next(seed), 1, sizes["prefill"], vocab), 1)
                found[work] = sizes["prefill"] / once
        elif what == "decode":
            generate(prompts(next(seed), int(batch), sizes["prompt"], vocab), min(4, sizes["decode"]))
            batches = [prompts(next(seed), int(batch), sizes["prompt"], vocab) for _ in range(3)]
            found[work] = decode_rate(generate, batches, sizes["decode"])
        elif what == "context":
            long = prompts(next(seed), 1, sizes["context"], vocab)
            generate(long, 2)
            found[work] = decode_rate(generate, [long] * 3, sizes["context_decode"])
    return found


def options() -> dict[str, Any]:
    """What the benchmark asks of this driver."""
    found: dict[str, Any] = json.loads(sys.argv[1])
    return found


def report(values: dict[str, float], **notes: Any) -> None:
    print(f"\n{MARK}{json.dumps({'values': values, 'notes': notes})}", flush=True)
