"""One call's requests in the engine, as the event loop sees them: what it hands over, and the chunks that come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.engine.sampling_params import SamplingParams
from octavo.front.outputs import LogprobsByToken, RequestOutput


class EngineUnavailable(Exception):
    """The engine cannot take or finish a request: its thread has ended, or is being stopped."""


class GenerationFailed(Exception):
    """A request ended with an error after it was accepted; the message says which."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt for the engine. `prompt` is its text, where there is one."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float | None = None  # of time.monotonic(), when the call came in


@dataclass(slots=True)
class Chunk:
    """What is new in sequence `index` of prompt `prompt_index` of a call. Text, tokens and logprobs belong together."""

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[LogprobsByToken] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def merge(self, later: Chunk) -> None:
        """Appends what came later in the same sequence."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class Generation:
    """The requests of one call, seen from the event loop that submitted them. Not thread-safe.

    `outputs`, one a prompt, are complete once `wait` has returned or `take` has returned nothing.
    """

    def __init__(self, requests: Sequence[EngineRequest], stream: bool, abort: Callable[[], None]) -> None:
        self.requests, self.stream = requests, stream
        self.outputs: list[RequestOutput] = []
        self.loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = self.loop.create_future()
        self.on_started: Callable[[int], None] | None = None
        """Called on the event loop with a prompt's index once its first token, or its end, has come."""
        self._abort = abort
        self._pending: dict[tuple[int, int], Chunk] = {}
        self._unfinished = len(requests)
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    @property
    def finished(self) -> bool:
        return self._unfinished == 0 or self._failure is not None

    async def take(self) -> list[Chunk]:
        """What is new since the last call, at most one chunk a sequence; waits for some. Empty once all is over.

        Raises GenerationFailed or EngineUnavailable where a request ended with an error, once the text before it was taken; the
        others of the call are aborted.
        """
        while not self._pending and not self.finished:
            self._news.clear()
            await self._news.wait()
        if self._failure is not None and not self._pending:
            self.close()
            raise self._failure
        chunks, self._pending = list(self._pending.values()), {}
        return chunks

    async def wait(self) -> list[RequestOutput]:
        """The outputs, once all are complete. Raises as `take` does."""
        while not self.finished:
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            self.close()
            raise self._failure
        return self.outputs

    def close(self) -> None:
        """Aborts what is unfinished; nothing is sent to the engine if all is over. May be called twice."""
        if self._unfinished:
            self._unfinished = 0
            self._abort()
        self._news.set()

    # --- what the engine's thread has the event loop run

    def feed(self, chunk: Chunk) -> None:
        if chunk.finish_reason == "error":
            self._failure = self._failure or GenerationFailed(str(chunk.stop_reason))
            chunk.finish_reason = chunk.stop_reason = None  # `take` raises it, after the text that came before
        key = (chunk.prompt_index, chunk.index)
        if (known := self._pending.get(key)) is not None:
            known.merge(chunk)
        elif self.stream and (chunk.text or chunk.finish_reason is not None):
            self._pending[key] = chunk
        self._news.set()

    def started(self, prompt_index: int) -> None:
        if self.on_started is not None:
            self.on_started(prompt_index)

    def end_one(self) -> None:
        self._unfinished = max(self._unfinished - 1, 0)
        self._news.set()

    def fail(self, error: Exception) -> None:
        if not self.finished:
            self._failure, self._unfinished = error, 0
        if not self.accepted.done():
            self.accepted.set_exception(error)
        self._news.set()
