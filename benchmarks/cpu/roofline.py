"""The ceilings of this machine: builds roofline.cpp with the compiler at hand, runs it, and answers what a workload may use."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.cpu.process import run

SOURCE = Path(__file__).with_suffix(".cpp")
MEGABYTES = (32, 100, 200, 512, 2000)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Best rates by number of threads: operations a second by "int8" or "fp32", and bytes a second by size of what is read."""

    peaks: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    reads: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    sets: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, lines: Iterable[str]) -> Ceilings:
        """From what the program prints."""
        peaks: dict[str, dict[int, float]] = {}
        reads: dict[int, dict[int, float]] = {}
        sets: dict[str, str] = {}
        for found in (json.loads(line) for line in lines if line.startswith('{"what"')):
            if found["what"] == "read":
                reads.setdefault(found["threads"], {})[found["megabytes"]] = found["per_s"]
            else:
                peaks.setdefault(found["what"], {})[found["threads"]] = found["per_s"]
                sets[found["what"]] = found["set"]
        return cls(peaks, reads, sets)

    def peak(self, kind: str, threads: int) -> float | None:
        """Operations a second, or None where they were not measured."""
        return self.peaks.get(kind, {}).get(threads)

    def bandwidth(self, num_bytes: float, threads: int) -> float | None:
        """Bytes a second for a working set, interpolated over the logarithm of its size, or the nearest."""
        measured = sorted(self.reads.get(threads, {}).items())
        if not measured:
            return None
        size = num_bytes / 1e6
        if size <= measured[0][0]:
            return measured[0][1]
        for (low, slow), (high, fast) in pairwise(measured):
            if size <= high:
                share = math.log(size / low) / math.log(high / low)
                return slow + share * (fast - slow)
        return measured[-1][1]

    def as_dict(self) -> dict[str, Any]:
        return {"peaks": self.peaks, "reads": self.reads, "sets": self.sets}

    def __str__(self) -> str:
        parts = []
        for kind, by_threads in self.peaks.items():
            rates = " / ".join(f"{rate / 1e9:.0f}" for rate in by_threads.values())
            parts.append(f"{kind} {rates} G a second ({self.sets[kind]})")
        for threads, by_size in self.reads.items():
            rates = ", ".join(f"{size} MB {rate / 1e9:.1f}" for size, rate in sorted(by_size.items()))
            parts.append(f"reading with {threads} thread(s), GB a second: {rates}")
        return "\n".join(parts)


def measure(cache: Path, prefix: list[str], threads: Iterable[int], seconds: float) -> Ceilings | str:
    """Builds the program, where it is not built yet, and runs it; a sentence where that cannot be done."""
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        return "no ceilings: there is no C++ compiler (g++ or clang++) to build roofline.cpp with"
    program = cache / f"roofline-{sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    if not program.exists():
        cache.mkdir(parents=True, exist_ok=True)
        options = ["-O3", "-march=native", "-std=c++20", "-pthread"]
        built = run([compiler, *options, str(SOURCE), "-o", str(program)])
        if built.exit_code != 0:
            return f"no ceilings: {compiler} does not build roofline.cpp:\n{built.errors[-2000:]}"
    wanted = [str(seconds), ",".join(map(str, threads)), ",".join(map(str, MEGABYTES))]
    found = run([str(program), *wanted], prefix=prefix)
    if found.exit_code != 0:
        return f"no ceilings: roofline ended with {found.exit_code}: {found.errors[-500:]}"
    return Ceilings.parse(found.output.splitlines())
