"""`octavo bench startup`: from a new process to the first token, with the model's files read from disk and from memory."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo import ConfigError, EngineConfig, OctavoError, add_engine_settings, engine_config
from octavo_bench.latency import percentiles, print_seconds
from octavo_bench.metrics import mean
from octavo_bench.progress import Bar

PHASES = ("import", "load", "first_token", "total")

# Runs in the new process. Its clock starts with the interpreter's first statement; the rest of its start is some 20 ms.
_PROBE = """
import time
start = time.perf_counter()
import json, sys
from octavo import LLM, EngineConfig, SamplingParams
imported = time.perf_counter()
llm = LLM(EngineConfig(**json.load(sys.stdin)))
loaded = time.perf_counter()
(answer,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
first = time.perf_counter()
if answer.outputs[0].finish_reason == "error":
    sys.exit(f"the first token failed: {answer.outputs[0].stop_reason}")
phases = {"import": imported - start, "load": loaded - imported, "first_token": first - loaded}
print(json.dumps({**phases, "total": first - start}))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `vllm bench startup`, and the engine's."""
    add_engine_settings(parser)
    for flag, default, text in (
        ("--num-iters-cold", 3, "Starts with the model's files dropped from the page cache."),
        ("--num-iters-warmup", 1, "Starts that are not counted, before the warm ones."),
        ("--num-iters-warm", 3, "Starts with the files in the page cache."),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} Default: {default}.")
    parser.add_argument("--output-json", metavar="FILE", help="Write the figures.")


def run(options: argparse.Namespace) -> int:
    """Measures and prints cold and warm starts."""
    config = engine_config(options)
    counts = {"cold": options.num_iters_cold, "warm": options.num_iters_warm}
    if min(*counts.values(), options.num_iters_warmup) < 0 or not any(counts.values()):
        raise ConfigError(
            "--num-iters-cold, --num-iters-warmup, --num-iters-warm: expected 0 or more, and some to measure"
        )
    figures: dict[str, Any] = {}
    total = sum(counts.values()) + options.num_iters_warmup
    with Bar("starts", total, not config.disable_progress and sys.stderr.isatty()) as bar:

        def start(cold: bool) -> Mapping[str, float]:
            if cold:
                drop_from_page_cache(Path(config.model))
            found = probe(config)
            bar.advance()
            return found

        runs = {"cold": [start(True) for _ in range(counts["cold"])]}
        for _ in range(options.num_iters_warmup):
            start(False)
        runs["warm"] = [start(False) for _ in range(counts["warm"])]
    for kind, found in runs.items():
        if found:
            seconds = {phase: [one[phase] for one in found] for phase in PHASES}
            figures[kind] = {p: {"avg": mean(s), "times": s, "percentiles": percentiles(s)} for p, s in seconds.items()}
            _print(kind, seconds)
    if options.output_json:
        Path(options.output_json).write_text(json.dumps(figures, indent=4), encoding="utf-8")
    return 0


def _print(kind: str, seconds: Mapping[str, Sequence[float]]) -> None:
    parts = ", ".join(f"{phase.replace('_', ' ')} {mean(seconds[phase]):.2f}" for phase in PHASES[:-1])
    print(f"{kind} starts ({len(seconds['total'])}), seconds: {parts}")
    print_seconds(seconds["total"], f"{kind} startup time")


def probe(config: EngineConfig) -> dict[str, float]:
    """Seconds by phase of one start in a new process. Raises OctavoError with its last words if it fails."""
    settings = config.model_dump_json(exclude_unset=True)
    run = subprocess.run([sys.executable, "-c", _PROBE], input=settings, capture_output=True, text=True)
    if run.returncode:
        raise OctavoError(f"a start failed: {(run.stderr.strip().splitlines() or ['no words'])[-1]}")
    return {str(k): float(v) for k, v in json.loads(run.stdout.splitlines()[-1]).items()}


def drop_from_page_cache(model: Path) -> None:
    """Makes the next reader fetch the model's files from disk; raises ConfigError where the system cannot do that."""
    if not hasattr(os, "posix_fadvise"):
        raise ConfigError("cold starts need a system with posix_fadvise; say --num-iters-cold 0")
    files = [p for p in model.rglob("*") if p.is_file()] if model.is_dir() else [model]
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
