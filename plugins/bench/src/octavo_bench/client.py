"""One streamed request to a server with OpenAI's API. Whatever goes wrong becomes the result's error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from octavo_bench.datasets import Sample
from octavo_bench.recorder import EventParser, Recorder, RequestResult, StreamError, error_message

if TYPE_CHECKING:
    import aiohttp

CHUNK_BYTES = 1 << 16


class Answer(Protocol):
    """The head of a response, and its bytes as they arrive."""

    status: int

    def chunks(self) -> AsyncIterator[bytes]: ...


Post = Callable[[str, bytes, Mapping[str, str]], AbstractAsyncContextManager[Answer]]
"""Sends a POST of a body with headers to an address. Tests bring their own, with a clock of their own."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how to ask it. `chat` sends the prompt as a user's message; `body` is added to each request."""

    url: str
    model: str
    chat: bool
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = False
    timeout_s: float = 6 * 3600

    def request(self, sample: Sample) -> bytes:
        """The JSON that asks for a sample."""
        wanted: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.chat:
            wanted |= {"messages": [{"role": "user", "content": sample.prompt}]}
            wanted |= {"max_completion_tokens": sample.output_tokens}
        else:
            wanted |= {"prompt": sample.prompt, "max_tokens": sample.output_tokens}
        if self.ignore_eos:
            wanted["ignore_eos"] = True
        return json.dumps({**wanted, **self.body}).encode()


async def ask(
    target: Target,
    sample: Sample,
    post: Post,
    *,
    clock: Callable[[], float],
    count: Callable[[str], int] | None = None,
    progress: Callable[[int], object] = lambda chunks: None,
) -> RequestResult:
    """Sends one sample and notes when each piece of the answer came. Never raises but for cancellation."""
    result = RequestResult(sample.prompt_tokens)
    body = target.request(sample)
    result.start = clock()
    try:
        async with asyncio.timeout(target.timeout_s), post(target.url, body, target.headers) as answer:
            if answer.status != 200:
                raise StreamError(await _refusal(answer))
            await _read(answer, Recorder(result, count), clock, progress)
    except StreamError as error:
        result.error = str(error)
    except TimeoutError:
        result.error = f"no end after {target.timeout_s:g} s"
    except Exception as error:  # the transport's own
        result.error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if not result.success:
        result.end = clock()
    return result


async def _read(
    answer: Answer, recorder: Recorder, clock: Callable[[], float], progress: Callable[[int], object]
) -> None:
    parser = EventParser()
    async for chunk in answer.chunks():
        now = clock()
        carried = sum([recorder.event(data, now) for data in parser.feed(chunk)])
        if carried:
            progress(carried)
        if recorder.done:
            break
    else:
        for data in parser.end():
            recorder.event(data, clock())
    recorder.finish()


async def _refusal(answer: Answer) -> str:
    """The status and the message of an answer that is an error."""
    raw = b""
    async for chunk in answer.chunks():
        raw += chunk
        if len(raw) > CHUNK_BYTES:
            break
    try:
        content = json.loads(raw)
        message = error_message(content.get("error", content))
    except (ValueError, AttributeError):
        message = " ".join(raw.decode(errors="replace").split())[:200]
    return f"HTTP {answer.status}: {message}" if message else f"HTTP {answer.status}"


@asynccontextmanager
async def http_post() -> AsyncIterator[Post]:
    """A `Post` over HTTP, with as many connections as there are requests at once."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=60)

    class HTTPAnswer:
        def __init__(self, response: aiohttp.ClientResponse) -> None:
            self.status, self._response = response.status, response

        async def chunks(self) -> AsyncIterator[bytes]:
            async for chunk in self._response.content.iter_any():
                yield chunk

    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        @asynccontextmanager
        async def post(url: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[Answer]:
            async with session.post(
                url, data=body, headers={"Content-Type": "application/json", **headers}
            ) as response:
                yield HTTPAnswer(response)

        yield post


async def get_json(url: str, headers: Mapping[str, str], timeout_s: float = 30) -> Any:
    """A GET that answers with JSON; raises StreamError where it does not."""
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.get(url, headers=dict(headers)) as response,
        ):
            if response.status != 200:
                raise StreamError(f"HTTP {response.status}")
            return await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise StreamError(str(error) or type(error).__name__) from None
