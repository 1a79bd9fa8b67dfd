"""How much the server takes on: bounds on the sequences and on the prompt tokens that wait, checked before any work."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from octavo.server.errors import APIError

_MAX_RETRY_S = 60


class Ticket:
    """One call's place: `sequences` and `tokens` count as waiting until they start, and as running until it is closed."""

    def __init__(self, admission: Admission, sequences: int) -> None:
        self._admission = admission
        self.waiting, self.tokens = sequences, 0
        self.running = 0

    def started(self, sequences: int, tokens: int) -> None:
        """The first token of a prompt's sequences came."""
        sequences, tokens = min(sequences, self.waiting), min(tokens, self.tokens)
        self.waiting, self.tokens, self.running = (
            self.waiting - sequences,
            self.tokens - tokens,
            self.running + sequences,
        )
        self._admission.note_start(sequences, tokens)

    def close(self) -> None:
        """Gives everything back. May be called twice."""
        self._admission.waiting -= self.waiting
        self._admission.tokens -= self.tokens
        self._admission.running -= self.running
        self.waiting = self.tokens = self.running = 0


class Admission:
    """Counts on the event loop what waits and what runs. Seats that the engine has free need no place in the queue.

    `engine_waits` says whether requests wait in the engine although seats are free: then memory is what they wait for.
    """

    def __init__(self, seats: int, max_sequences: int, max_tokens: int, engine_waits: Callable[[], bool]) -> None:
        self.seats, self.max_sequences, self.max_tokens = seats, max_sequences, max_tokens
        self.waiting = self.tokens = self.running = 0
        self.refused: Counter[str] = Counter()
        self._engine_waits = engine_waits
        self._start_interval_s = 0.1  # moving average of the time between two starts
        self._last_start = time.monotonic()

    def enter(self, sequences: int) -> Ticket:
        """A place for so many sequences, or APIError 429 with Retry-After."""
        free = 0 if self._engine_waits() else max(0, self.seats - self.running)
        if self.waiting + sequences > self.max_sequences + free:
            if sequences > self.max_sequences + self.seats:
                raise APIError(
                    f"the request asks for {sequences} sequences (prompts x n); this server takes at most "
                    f"{self.max_sequences + self.seats} at once (max_num_queued_reqs {self.max_sequences})",
                    param="n",
                )
            raise self._full(
                "queue_requests",
                f"{self.waiting} sequences wait; {sequences} more would exceed max_num_queued_reqs ({self.max_sequences})",
            )
        self.waiting += sequences
        return Ticket(self, sequences)

    def take_tokens(self, ticket: Ticket, tokens: int) -> None:
        """Adds prompt tokens to a place, or APIError 429. With nothing else waiting, any request may enter."""
        if self.tokens and self.tokens + tokens > self.max_tokens:
            raise self._full(
                "queue_tokens",
                f"{self.tokens} prompt tokens wait; {tokens} more would exceed max_num_queued_tokens ({self.max_tokens})",
            )
        self.tokens += tokens
        ticket.tokens += tokens

    def note_start(self, sequences: int, tokens: int) -> None:
        """Books that waiting sequences run now."""
        self.waiting -= sequences
        self.tokens -= tokens
        self.running += sequences
        now = time.monotonic()
        self._start_interval_s += 0.1 * (min(now - self._last_start, 10.0) / max(sequences, 1) - self._start_interval_s)
        self._last_start = now

    def _full(self, reason: str, message: str) -> APIError:
        self.refused[reason] += 1
        wait = min(max(1, round(self.waiting * self._start_interval_s)), _MAX_RETRY_S)
        return APIError(
            f"the queue is full: {message}; try again in {wait} s", 429, code=reason, headers={"Retry-After": str(wait)}
        )
