"""llama.cpp and its fork ik_llama.cpp, by their own benchmark programs over GGUF files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.cpu import gguf_files
from benchmarks.cpu.work import BATCHES, LOAD, PREFILL, Case, Command, Peer

TYPES = {"int4": "Q4_0", "int4-float": "Q4_0", "gguf": "Q4_0", "int8": "Q8_0", "float16": "F16"}


def read_bench(text: str, work: str) -> dict[str, float]:
    """Tokens a second of the one test that llama-bench ran, from its JSON among other lines; raises ValueError without."""
    start = text.find("[")
    while start >= 0:
        try:
            (test,), _ = json.JSONDecoder().raw_decode(text, start)
            return {work: float(test["avg_ts"])}
        except (ValueError, TypeError, KeyError):
            start = text.find("[", start + 1)
    raise ValueError("llama-bench printed no result")


def read_batched(text: str) -> dict[str, float]:
    """Tokens a second by batch size from the table of llama-batched-bench; raises ValueError where there is none."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if "|" in line]
    heads = [i for i, row in enumerate(rows) if row[:3] == ["PP", "TG", "B"]]
    if not heads:
        raise ValueError("llama-batched-bench printed no table")
    batch, speed = rows[heads[0]].index("B"), rows[heads[0]].index("S_TG t/s")
    numbers = [row for row in rows[heads[0] + 1 :] if len(row) > speed and re.fullmatch(r"\d+", row[batch])]
    if not numbers:
        raise ValueError("the table of llama-batched-bench has no rows")
    return {f"decode {row[batch]}": float(row[speed]) for row in numbers}


class LlamaCpp(Peer):
    name = "llama.cpp"
    options = ("--llama-bench", "--llama-batched-bench")
    one_test: Sequence[str] = ("-r", "1", "-o", "json")
    cold: Sequence[str] = ("--no-warmup",)
    always: Sequence[str] = ()
    batched_always: Sequence[str] = ()
    kv8: Sequence[str] = ("-ctk", "q8_0", "-ctv", "q8_0", "-fa", "1")

    def __init__(self, bench: str | None, batched: str | None) -> None:
        found = (None if given is None else shutil.which(given) for given in (bench, batched))
        self.bench, self.batched = (None if path is None else os.path.abspath(path) for path in found)

    def why_not(self) -> str | None:
        return None if self.bench else f"not found: {self.options[0]} PATH (and {self.options[1]} PATH)"

    def version(self) -> str:
        assert self.bench is not None
        run = subprocess.run([self.bench, "--version"], capture_output=True, text=True)
        found = re.search(r"version: .*", run.stdout + run.stderr)
        return found.group() if found else os.path.realpath(self.bench)

    def refuses(self, case: Case, job: str) -> str | None:
        missing = job == "batch" and self.batched is None
        return f"not found: {self.options[1]} PATH" if missing else None

    def prepare(self, case: Case) -> None:
        gguf_files.make(case.cache, case.shape, TYPES[case.kind.name])

    def model(self, case: Case) -> Path:
        return gguf_files.path(case.cache, case.shape, TYPES[case.kind.name])

    def commands(self, case: Case, job: str, seed: int = 1) -> list[Command]:
        sizes = case.sizes
        if job == "single":
            return [
                self._test(case, LOAD, ["-p", "2", "-n", "0", *self.cold], wall=LOAD),
                self._test(case, PREFILL, ["-p", str(sizes.prefill), "-n", "0"]),
                self._test(case, "decode 1", self.decode_after(sizes.prompt, sizes.decode)),
            ]
        if job == "batch":
            return [self._batched(case)]
        more = self.kv8 if job == "context kv8" else ()
        return [self._test(case, job, [*self.decode_after(sizes.context, sizes.context_decode), *more])]

    def decode_after(self, context: int, tokens: int) -> list[str]:
        """Options that decode so many tokens after a context, and time nothing else."""
        return ["-p", "0", "-n", str(tokens), "-d", str(context)]

    def _test(self, case: Case, work: str, more: Sequence[str], wall: str | None = None) -> Command:
        assert self.bench is not None
        model = ["-m", str(self.model(case)), "-t", str(case.threads)]

        def read(text: str) -> Mapping[str, float]:
            found = read_bench(text, work)
            return {} if wall else found

        return Command([self.bench, *model, *self.one_test, *self.always, *more], read=read, wall=wall)

    def _batched(self, case: Case) -> Command:
        assert self.batched is not None
        sizes = case.sizes
        largest = BATCHES[-1] * (sizes.prompt + sizes.decode)
        options = {"-npp": sizes.prompt, "-ntg": sizes.decode, "-npl": ",".join(map(str, BATCHES[1:])), "-c": largest}
        threads = ["-t", str(case.threads), "-tb", str(case.threads)]
        listed = [str(part) for pair in options.items() for part in pair]
        command = [self.batched, "-m", str(self.model(case)), *threads, *listed, *self.batched_always]
        return Command(command, read=read_batched)


class IkLlamaCpp(LlamaCpp):
    """With weights repacked at load (-rtr), as it is fastest.

    Batches share one prompt (-pps), for with prompts of their own its attention ends in a failed assertion: its sequences
    read less of K and V than the others' do.
    """

    name = "ik_llama.cpp"
    options = ("--ik-bench", "--ik-batched-bench")
    cold = ("-w", "0")
    always = ("-rtr", "1")
    batched_always = ("-rtr", "-pps")
    kv8 = ("-ctk", "q8_0", "-ctv", "q8_0")

    def version(self) -> str:
        assert self.bench is not None
        return os.path.realpath(self.bench)

    def decode_after(self, context: int, tokens: int) -> list[str]:
        return ["-p", "0", "-n", "0", "-gp", f"{context},{tokens}"]
