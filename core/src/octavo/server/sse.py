"""Streaming answers as server-sent events, and noticing that the client has left, streaming or not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import api_error

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientLeft(Exception):
    """The client closed its connection before the answer was complete."""


class EventStream(Response):
    """An answer whose body is events as they come. `close` is called once it is over, whoever ended it.

    An error in the middle becomes the last event, in the envelope of every error, and the stream ends with it.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], close: Callable[[], None], headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.ensure_future(self._watch(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                event = b"data: " + api_error(error).encoded() + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()
            watcher.cancel()

    async def _watch(self, receive: Receive) -> None:
        """Aborts as soon as the client leaves: an abort ends the events, and so the loop that sends them."""
        await _until_left(receive)
        self._close()


async def unless_left(request: Request, work: Awaitable[T]) -> T:
    """What `work` gives, or ClientLeft if the client leaves before; then the work is cancelled."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_left(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
