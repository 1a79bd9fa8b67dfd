"""Servers with known timings: one in the same event loop whose time is made up, one behind a real socket."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest


class _JumpingSelector(selectors.DefaultSelector):
    """Does not wait: time jumps to when the next timer is due."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list:
        if timeout is not None and timeout > 0:
            self.now += timeout
        return super().select(0 if timeout is not None else None)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while code runs and jumps over every wait."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


@pytest.fixture(scope="session")
def run_virtually() -> Callable[[Callable[[Callable[[], float]], Awaitable[Any]]], Any]:
    """Runs `main(clock)` to its end in no time."""

    def run(main: Callable[[Callable[[], float]], Awaitable[Any]]) -> Any:
        loop = VirtualLoop()
        try:
            return loop.run_until_complete(main(loop.time))
        finally:
            loop.close()

    return run


def event(text: str | None = None, **more: Any) -> bytes:
    """One event of a completion."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": more.pop("finish_reason", None)}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


@dataclass
class FakeServer:
    """Answers with `tokens` pieces, the first after `first_s`, the others `each_s` apart; some requests go wrong.

    Every `refuse_every`th request is answered with 500, every `cut_every`th ends in the middle.
    """

    tokens: int = 10
    first_s: float = 0.1
    each_s: float = 0.01
    refuse_every: int = 0
    cut_every: int = 0
    per_chunk: int = 1
    slots: int = 1000
    bodies: list[dict] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    sent_at: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[Any]:
        self.bodies.append(json.loads(body))
        self.paths.append(url)
        self.sent_at.append(asyncio.get_running_loop().time())
        number = len(self.bodies)
        refused = self.refuse_every and number % self.refuse_every == 0
        cut = self.cut_every and number % self.cut_every == 0
        yield _FakeAnswer(self, 500 if refused else 200, bool(cut))


@dataclass
class _FakeAnswer:
    server: FakeServer
    status: int
    cut: bool

    async def chunks(self) -> AsyncIterator[bytes]:
        server = self.server
        if self.status != 200:
            yield b'{"error": {"message": "it broke", "type": "server_error"}}'
            return
        await asyncio.sleep(server.first_s)
        for start in range(0, server.tokens, server.per_chunk):
            number = min(server.per_chunk, server.tokens - start)
            if start:
                await asyncio.sleep(server.each_s * number)
            yield event("w " * number)
            if self.cut and start >= server.tokens // 2:
                return
        yield event("", finish_reason="length")
        yield event(None, usage={"prompt_tokens": 7, "completion_tokens": server.tokens})
        yield DONE


@pytest.fixture
def fake() -> type[FakeServer]:
    return FakeServer


@pytest.fixture
def sockets() -> Callable[..., Any]:
    return socket_server


def answer_with(pieces: Sequence[bytes], status: int = 200, content: str = "text/event-stream") -> Iterator[bytes]:
    """What a real socket sends, cut as given: a head, then the pieces, then the end of the connection."""
    yield f"HTTP/1.1 {status} x\r\nContent-Type: {content}\r\nConnection: close\r\n\r\n".encode()
    yield from pieces


@asynccontextmanager
async def socket_server(answers: Callable[[str, dict], Iterator[bytes]]) -> AsyncIterator[str]:
    """A server on a free port that sends the pieces that `answers(path, body)` gives for each request; yields its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(li.split(":")[1]) for li in head.splitlines() if li.lower().startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        for piece in answers(head.split()[1], body):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
