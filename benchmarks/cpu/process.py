"""Running a program in a process of its own, with what it printed, its wall time and its peak memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.cpu.drivers import clocked


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended. `errors` is what it wrote to stderr."""

    output: str
    errors: str
    exit_code: int
    wall_s: float
    peak_rss_bytes: int

    @classmethod
    def parse(cls, output: str, errors: str) -> Ended:
        """From the output of clocked.py; what never came to an end has exit code -1."""
        text, mark, last = output.rpartition(clocked.MARK)
        if not mark:
            return cls(output, errors, -1, 0.0, 0)
        return cls(text, errors, **json.loads(last))


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    timeout_s: float = 600,
) -> Ended:
    """`prefix` is a command that runs a command, such as "taskset -c 0,1"; what it waits for is not timed."""
    timed = [*prefix, sys.executable, str(Path(clocked.__file__)), *arguments]
    merged = {**os.environ, **(environment or {})}
    with TemporaryDirectory() as folder:  # some leave logs where they run
        try:
            process = subprocess.Popen(
                timed,
                cwd=folder,
                env=merged,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            errors += f"\nended after {timeout_s:.0f} s"
        except BaseException:
            end_children()
            raise
    return Ended.parse(output, errors)


def end_children() -> None:
    """Kills what this process has started, with all that runs under it: it would disturb whatever is timed next."""
    for listed in Path("/proc/self/task").glob("*/children"):
        for child in map(int, listed.read_text().split()):
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError):
                    kill(child, signal.SIGKILL)
