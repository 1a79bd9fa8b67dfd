"""The engine on a thread of its own: what the event loop hands to it, and how the answers come back.

The event loop never touches the engine. It puts commands into a queue, which the engine's thread reads between steps; chunks of
text come back in one callback a step, whatever the number of streams. So parsing, tokenizing and JSON never delay a step by
more than a turn of the interpreter lock, and a slow client delays nobody: what it has not taken yet is merged.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from octavo.engine.engine import Engine
from octavo.engine.stats import EngineStats
from octavo.errors import RequestError
from octavo.front.output_processor import OutputProcessor, TextDelta
from octavo.front.outputs import RequestOutput
from octavo.front.tokenizer import Tokenizer
from octavo.server.generation import Chunk, EngineRequest, EngineUnavailable, Generation, GenerationFailed

logger = logging.getLogger(__name__)
T = TypeVar("T")

_STATS_INTERVAL_S = 0.1
_MAX_FAILED_STEPS = 3
"""Steps in a row that may fail as a whole, each ending all requests, before the thread gives up."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, as observers see it. Times are of `time.monotonic()`; `deltas` may hold several sequences of a request."""

    started: float
    ended: float
    num_scheduled_tokens: int
    deltas: Sequence[TextDelta]


class Observer(Protocol):
    """Hears of everything on the engine's thread, between steps. What it raises is logged once and reaches no request."""

    def on_added(self, request: EngineRequest) -> None:
        """A request was accepted."""

    def on_step(self, engine: Engine, step: StepRecord) -> None:
        """A step was computed. Cheap reads of the engine are safe here."""

    def on_finished(self, request: EngineRequest, output: RequestOutput) -> None:
        """A request ended, whatever the reason: see its outputs' finish_reason. Called once for each that was added."""


@dataclass(slots=True)
class _Sequence:
    """Of one sequence, how many tokens are sent, and what waits until there is text for it."""

    num_tokens: int = 0
    held: Chunk | None = None


@dataclass(slots=True)
class _Running:
    """A request in the engine, on the engine's side."""

    generation: Generation
    prompt_index: int
    request: EngineRequest
    output: RequestOutput
    sequences: dict[int, _Sequence] = field(default_factory=lambda: defaultdict(_Sequence))
    started: bool = False


_Event = tuple[Callable[..., None], tuple[object, ...]]


class EngineThread:
    """Runs an engine, and the text side of it, on one thread. The methods may be called from any other."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, observers: Iterable[Observer] = ()) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.processor = OutputProcessor(engine, tokenizer)
        self.observers = list(observers)
        self._complained: set[int] = set()  # of observers that failed before
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._running: dict[str, _Running] = {}
        self._stats, self._stats_time = engine.stats(), 0.0
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._stopping = False
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        """What ended the thread, if anything did."""
        self.last_progress = time.monotonic()
        """When the thread last began or ended a step, or waited for work."""

    # --- from other threads

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def idle(self) -> bool:
        """No request is unfinished and no command waits."""
        return not self._running and self._commands.empty()

    @property
    def stalled_s(self) -> float:
        """Seconds since the thread last made progress, while there is work; else 0."""
        return 0.0 if self.idle else max(0.0, time.monotonic() - self.last_progress)

    def stats(self) -> EngineStats:
        """The engine a moment ago: at most about 0.1 s or one step old, exact while it is idle."""
        return self._stats

    async def submit(self, requests: Sequence[EngineRequest], *, stream: bool) -> Generation:
        """Queues the requests of one call, all or none.

        Raises RequestError where the engine refuses one, EngineUnavailable where there is no engine any more. Without `stream`
        only `wait` may be used, and tokens cost the event loop nothing.
        """
        listed = list(requests)
        generation = Generation(listed, stream, abort=lambda: self._put(lambda: self._abort(listed)))
        self._put(lambda: self._add(generation), generation.fail)
        try:
            await generation.accepted
        except asyncio.CancelledError:
            generation.close()
            raise
        return generation

    def call(self, function: Callable[[Engine], T]) -> Awaitable[T]:
        """Runs a function on the engine's thread between two steps and returns what it returns. Keep it short."""
        return asyncio.wrap_future(self.call_soon(function))

    def call_soon(self, function: Callable[[Engine], T]) -> Future[T]:
        """As `call`, for callers without an event loop."""
        result: Future[T] = Future()

        def run() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function(self.engine))
                except Exception as error:
                    result.set_exception(error)

        self._put(run, lambda error: result.set_exception(error))
        return result

    def fail_all(self, reason: str) -> None:
        """Ends all requests with an error, as a drain does whose time is up."""
        self._put(lambda: self._fail_all(EngineUnavailable(reason)))

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends what runs with an error, then the thread. The engine can then be shut down. May be called twice."""
        with self._lock:
            self._stopping = True
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _put(self, command: Callable[[], None], refuse: Callable[[Exception], None] | None = None) -> None:
        with self._lock:
            if self.alive:
                self._commands.put(command)
                return
        if refuse is not None:
            refuse(EngineUnavailable("the engine has stopped"))

    # --- on the engine's thread

    def _run(self) -> None:
        failed_steps = 0
        try:
            while self._take_commands():
                if not self.processor.has_unfinished:
                    continue
                try:
                    self._step()
                    failed_steps = 0
                except Exception as error:
                    failed_steps += 1
                    logger.exception("a step failed as a whole; all its requests are ended")
                    self._fail_all(GenerationFailed(f"the engine failed: {type(error).__name__}"))
                    if failed_steps >= _MAX_FAILED_STEPS:
                        raise
        except BaseException as error:
            self.failure = error
            logger.exception("the engine's thread has ended; the server can answer nothing more")
        with self._lock:
            self._stopping = True
        self._fail_all(EngineUnavailable("the engine has stopped"))
        while True:  # commands that came in before the flag was seen
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            if command is not None:
                command()
                self._fail_all(EngineUnavailable("the engine has stopped"))

    def _take_commands(self) -> bool:
        """Runs what was asked for; waits for something if there is nothing to compute. False once it is to stop."""
        self.last_progress = time.monotonic()
        if not self.processor.has_unfinished and self._commands.empty():
            self._take_stats()
            command = self._commands.get()
            self.last_progress = time.monotonic()
            if command is None:
                return False
            command()
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return True
            if command is None:
                return False
            command()

    def _step(self) -> None:
        counters, started = self.engine.scheduler.stats, time.monotonic()
        before = counters.num_scheduled_tokens
        deltas = self.processor.step()
        ended = self.last_progress = time.monotonic()
        events: dict[asyncio.AbstractEventLoop, list[_Event]] = defaultdict(list)
        for delta in deltas:
            if (running := self._running.get(delta.output.request_id)) is not None:
                self._collect(running, delta, events[running.generation.loop])
        over = [self._running.pop(d.output.request_id, None) for d in deltas if d.output.finished]
        for running in filter(None, over):
            events[running.generation.loop].append((running.generation.end_one, ()))
        for loop, batch in events.items():
            _post(loop, batch)
        if self.observers:
            step = StepRecord(started, ended, counters.num_scheduled_tokens - before, deltas)
            self._tell(lambda observer: observer.on_step(self.engine, step))
            for running in filter(None, over):
                self._tell_finished(running)
        if self.last_progress - self._stats_time > _STATS_INTERVAL_S:
            self._take_stats()

    def _collect(self, running: _Running, delta: TextDelta, events: list[_Event]) -> None:
        """Turns a delta into events for the event loop: copies, because the outputs go on changing here."""
        generation, completion = running.generation, delta.completion
        if not running.started:
            running.started = True
            events.append((generation.started, (running.prompt_index,)))
        sequence = running.sequences[delta.sequence_index]
        if generation.stream or completion.finish_reason == "error":
            start, sequence.num_tokens = sequence.num_tokens, len(completion.token_ids)
            chunk = Chunk(
                running.prompt_index,
                delta.sequence_index,
                delta.text,
                completion.token_ids[start:],
                None if completion.logprobs is None else completion.logprobs[start:],
                completion.finish_reason if delta.finished else None,
                completion.stop_reason if delta.finished else None,
            )
            if sequence.held is not None:
                sequence.held.merge(chunk)
                chunk, sequence.held = sequence.held, None
            if chunk.text or delta.finished:
                events.append((generation.feed, (chunk,)))
            else:
                sequence.held = chunk  # its text is not certain yet

    def _add(self, generation: Generation) -> None:
        added: list[EngineRequest] = []
        for i, request in enumerate(generation.requests):
            try:
                output = self.processor.add_request(
                    request.request_id,
                    request.prompt,
                    request.prompt_token_ids,
                    request.params,
                    request.priority,
                    cache_salt=request.cache_salt,
                    arrival_time=request.arrival_time,
                )
            except Exception as error:
                for earlier in added:
                    self.processor.abort(earlier.request_id)
                    del self._running[earlier.request_id]
                if isinstance(error, RequestError) and len(generation.requests) > 1:
                    error = RequestError(f"prompt {i}: {error}", param=error.param)
                _post(generation.loop, [(generation.fail, (error,))])
                return
            added.append(request)
            generation.outputs.append(output)
            self._running[request.request_id] = _Running(generation, i, request, output)
        _post(generation.loop, [(_accept, (generation.accepted,))])
        for request in added:
            self._tell(lambda observer, request=request: observer.on_added(request))  # type: ignore[misc]

    def _abort(self, requests: Iterable[EngineRequest]) -> None:
        for request in requests:
            if (running := self._running.pop(request.request_id, None)) is not None:
                self.processor.abort(request.request_id)
                self._tell_finished(running)

    def _fail_all(self, error: Exception) -> None:
        everything = list(self._running.values())
        for running in everything:
            try:
                self._abort([running.request])
            except Exception:
                logger.exception("request %s cannot be aborted", running.request.request_id)
            _post(running.generation.loop, [(running.generation.fail, (error,))])

    def _take_stats(self) -> None:
        self._stats, self._stats_time = self.engine.stats(), time.monotonic()

    def _tell_finished(self, running: _Running) -> None:
        self._tell(lambda observer: observer.on_finished(running.request, running.output))

    def _tell(self, message: Callable[[Observer], None]) -> None:
        for observer in self.observers:
            try:
                message(observer)
            except Exception:
                if id(observer) not in self._complained:
                    self._complained.add(id(observer))
                    logger.warning("%s failed; no request is affected", type(observer).__name__, exc_info=True)


def _accept(accepted: asyncio.Future[None]) -> None:
    if not accepted.done():
        accepted.set_result(None)


def _post(loop: asyncio.AbstractEventLoop, events: Sequence[_Event]) -> None:
    """Has the event loop run these, in one callback. An event loop that is gone wants to hear nothing."""
    try:
        loop.call_soon_threadsafe(_run_events, events)
    except RuntimeError:
        logger.debug("an event loop is closed; %d events are dropped", len(events))


def _run_events(events: Sequence[_Event]) -> None:
    for function, arguments in events:
        function(*arguments)
