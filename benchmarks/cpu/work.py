"""What is measured: the workloads, and how an engine answers for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu.shapes import Kind, Shape

BATCHES = (1, 4, 8, 16)
LOAD, PREFILL, RSS = "load", "prefill", "peak RSS"
CONTEXT = {"context kv16": 2, "context kv8": 1}
"""Decoding at a long context, with bytes of each number in K and V."""
JOBS: Mapping[str, tuple[str, ...]] = {
    "single": (LOAD, PREFILL, "decode 1"),
    "batch": tuple(f"decode {batch}" for batch in BATCHES[1:]),
    **{name: (name,) for name in CONTEXT},
}
"""Workloads that one process computes after one another, by the job's name. Peak RSS is that of the job "single"."""
UNITS = {LOAD: "s", RSS: "MB"}
WORKS = (*JOBS["single"], *JOBS["batch"], *CONTEXT, RSS)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of each workload: a prefill, a prompt before decoding, decoded tokens, a long context and decoded ones there."""

    prefill: int = 512
    prompt: int = 128
    decode: int = 64
    context: int = 4096
    context_decode: int = 32


@dataclass(frozen=True, slots=True)
class Case:
    """One shape with one kind of weights, and where its checkpoints are."""

    shape: Shape
    kind: Kind
    cache: Path
    sizes: Sizes
    threads: int

    def __str__(self) -> str:
        return f"{self.shape.name} {self.kind.name}"


@dataclass(frozen=True, slots=True)
class Command:
    """A process to run, and how what it writes, stdout and then stderr, becomes values by workload, and notes."""

    arguments: Sequence[str]
    read: Callable[[str], Mapping[str, float]]
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: Callable[[str], Mapping[str, Any]] = lambda text: {}
    wall: str | None = None  # the workload that the wall time of the whole process answers
    timeout_s: float = 600


class Peer:
    """An engine. `why_not` names what is missing where it cannot run."""

    name: str

    def why_not(self) -> str | None:
        raise NotImplementedError

    def refuses(self, case: Case, job: str) -> str | None:
        """Why the engine does not run a job; None where it does."""
        return None

    def prepare(self, case: Case) -> None:
        """Makes checkpoints of the engine's own, once."""

    def commands(self, case: Case, job: str, seed: int = 1) -> list[Command]:
        raise NotImplementedError

    def version(self) -> str:
        return ""
