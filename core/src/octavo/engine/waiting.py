"""The requests that wait, in order. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from octavo.engine.request import Request, Status

Order = tuple[int, int, int]


class WaitingQueue:
    """A heap by `order`. Requests that end while they wait stay in until they come up, or until they are the most of it."""

    def __init__(self, order: Callable[[Request], Order]) -> None:
        self._order = order
        self._heap: list[tuple[Order, Request]] = []

    def __len__(self) -> int:
        """Entries, those of ended requests included."""
        return len(self._heap)

    def push(self, request: Request, num_waiting: int) -> None:
        """Adds a request; `num_waiting` are left of those that were added."""
        if len(self._heap) > 2 * num_waiting + 64:
            self._heap = [entry for entry in self._heap if _waits(entry[1])]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self._order(request), request))

    def head(self) -> Request | None:
        """The first in order."""
        while self._heap and not _waits(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Takes the first entry out."""
        return heapq.heappop(self._heap)[1]


def _waits(request: Request) -> bool:
    return request.status is Status.WAITING or request.status is Status.SWAPPED
