"""Engines that a driver in a process of its own runs, by one protocol: options as JSON in, one line of JSON out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cpu.drivers import timing
from benchmarks.cpu.work import JOBS, Case, Command, Peer

DRIVERS = Path(timing.__file__).parent


def result(text: str) -> dict[str, Any]:
    """The values and notes that a driver printed; raises ValueError where it printed none."""
    lines = [line for line in text.splitlines() if line.startswith(timing.MARK)]
    if not lines:
        raise ValueError("the driver printed no result")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(timing.MARK))
    return found


class DrivenPeer(Peer):
    """An engine with a driver. `python` is the interpreter of its environment, None where none was named."""

    driver: str
    module: str
    option: str  # that names the interpreter

    def __init__(self, python: str | None = sys.executable) -> None:
        self.python = None if python is None else os.path.abspath(python)

    def why_not(self) -> str | None:
        if self.python is None:
            return f"no environment named: {self.option} PYTHON"
        return None if self.version() else f"{self.python} has no {self.module}"

    def version(self) -> str:
        assert self.python is not None
        code = f"from importlib.metadata import version; print(version('{self.module}'))"
        try:
            run = subprocess.run([self.python, "-c", code], capture_output=True, text=True, timeout=60)
        except OSError:
            return ""
        return run.stdout.strip()

    def model(self, case: Case) -> Path:
        raise NotImplementedError

    def settings(self, case: Case, job: str) -> dict[str, Any]:
        return {}

    def environment(self, case: Case) -> Mapping[str, str]:
        return {}

    def commands(self, case: Case, job: str, seed: int = 1) -> list[Command]:
        options = {
            "model": str(self.model(case)),
            "threads": case.threads,
            "vocab": case.shape.vocab,
            "sizes": asdict(case.sizes),
            "works": JOBS[job],
            "settings": self.settings(case, job),
            "seed": seed,
        }
        assert self.python is not None
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(case.threads))
        return [
            Command(
                [self.python, str(DRIVERS / f"{self.driver}.py"), json.dumps(options)],
                read=lambda text: result(text)["values"],
                notes=lambda text: result(text)["notes"],
                environment={**threads, **self.environment(case)},
            )
        ]
