"""A progress bar on a terminal's stderr: requests, output chunks, failures."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from octavo_bench.recorder import RequestResult


class Bar:
    """Shown while it is entered, if `enabled`; gone afterwards."""

    def __init__(self, name: str, total: int, enabled: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} chunks, {task.fields[failed]} failed"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not enabled or not total,
            transient=True,
        )
        self._task = self._bar.add_task(name, total=total, tokens=0, failed=0)
        self._tokens = self._failed = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def tokens(self, number: int) -> None:
        self._tokens += number
        self._bar.update(self._task, tokens=self._tokens)

    def request(self, result: RequestResult) -> None:
        self._failed += not result.success
        self._bar.update(self._task, advance=1, failed=self._failed)

    def advance(self, tokens: int = 0) -> None:
        """One more done, outside of a server."""
        self._tokens += tokens
        self._bar.update(self._task, advance=1, tokens=self._tokens)
