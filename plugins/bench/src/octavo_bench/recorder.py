"""What is noted of one streamed answer: server-sent events from raw bytes, and the time at which each token came.

Nothing here reads a clock or a socket, so its arithmetic is tested with times that are made up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_EVENT_BYTES = 1 << 26


class StreamError(Exception):
    """An answer that is none: the message is the cause that the report counts."""


class EventParser:
    """Bytes as they arrive, cut anywhere, to the data of server-sent events (WHATWG HTML, section 9.2.6).

    Lines may end with LF, CR LF or CR; comments, which keep a connection alive, and fields other than data are skipped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that these bytes complete."""
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        buffer = self._rest + chunk
        if buffer.endswith(b"\r"):  # whether it belongs to a CR LF is known only with the next bytes
            self._after_cr = True
        lines = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise StreamError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return [event for line in lines if (event := self._line(line)) is not None]

    def end(self) -> list[bytes]:
        """The last event, where the stream ended without the blank line that completes it."""
        events = [self._line(self._rest)] if self._rest else []
        self._rest = b""
        return [event for event in [*events, self._line(b"")] if event is not None]

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None


@dataclass(slots=True)
class RequestResult:
    """One request. Times in seconds of the run's clock. `tokens` are the output tokens of each chunk that carried text."""

    prompt_tokens: int
    start: float = 0.0
    success: bool = False
    error: str = ""
    text: str = ""
    chunk_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    output_tokens: int = 0
    end: float = 0.0

    @property
    def latency(self) -> float:
        """From sending to the last piece of the answer."""
        return self.end - self.start

    @property
    def ttft(self) -> float | None:
        """Time to the first token; None where no token came."""
        return self.chunk_times[0] - self.start if self.chunk_times else None

    @property
    def itls(self) -> list[float]:
        """One latency for each token after the first chunk. Tokens that came together share their wait evenly."""
        waits: list[float] = []
        for before, now, tokens in zip(self.chunk_times, self.chunk_times[1:], self.chunk_tokens[1:], strict=False):
            waits += [(now - before) / tokens] * tokens
        return waits

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first chunk; None where there is none."""
        rest = self.output_tokens - (self.chunk_tokens[0] if self.chunk_tokens else 0)
        return None if not self.chunk_times or rest < 1 else (self.end - self.chunk_times[0]) / rest


class Recorder:
    """Books the events of one answer into a RequestResult."""

    def __init__(self, result: RequestResult, count: Callable[[str], int] | None = None) -> None:
        self.result = result
        self.done = False
        self._count = count
        self._texts: list[str] = []
        self._reported: list[int | None] = []  # output tokens so far, where the server says so with each chunk
        self._usage: Mapping[str, Any] = {}
        self._ended = False
        self._first_event: float | None = None

    def event(self, data: bytes, now: float) -> bool:
        """Books one event at its time; True if it carried text. Raises StreamError where it is an error or no JSON."""
        if data.strip() == b"[DONE]":
            self.done = True
            return False
        try:
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError
        except ValueError:
            raise StreamError("an event that is no JSON object") from None
        if (error := event.get("error")) is not None:
            raise StreamError(f"error in the stream: {error_message(error)}")
        usage = event.get("usage")
        if isinstance(usage, Mapping):
            self._usage = usage
        carried = False
        for choice in event.get("choices") or ():
            text = _text(choice)
            self.result.end = now
            self._ended |= choice.get("finish_reason") is not None
            if self._first_event is None and not _only_role(choice):
                self._first_event = now
            if text:
                carried = True
                self.result.chunk_times.append(now)
                self._texts.append(text)
                self._reported.append(usage.get("completion_tokens") if isinstance(usage, Mapping) else None)
        return carried

    def finish(self) -> None:
        """Checks that the answer is whole, and distributes its tokens over the chunks. Raises StreamError if it was cut off."""
        if not self.done and not self._ended:
            raise StreamError("the stream was cut off before its end")
        result = self.result
        result.text = "".join(self._texts)
        result.prompt_tokens = self._usage.get("prompt_tokens") or result.prompt_tokens
        tokens = self._usage.get("completion_tokens")
        if tokens is None:
            tokens = self._count(result.text) if self._count is not None else len(self._texts)
        result.output_tokens = int(tokens)
        if not self._texts and result.output_tokens > 0 and self._first_event is not None:
            # all tokens are invisible, such as special ones: their time is that of the events
            result.chunk_times, self._texts, self._reported = [self._first_event], [""], [None]
        result.chunk_tokens = self._distributed(result.output_tokens)
        result.success = True

    def _distributed(self, total: int) -> list[int]:
        chunks = len(self._texts)
        known = [n for n in self._reported if n is not None]
        if chunks and len(known) == chunks:
            return [max(now - before, 1) for before, now in zip([0, *known], known, strict=False)]
        if total == chunks or not chunks:
            return [1] * chunks
        return share_tokens(total, [self._count(t) if self._count else len(t) for t in self._texts])


def share_tokens(total: int, weights: Sequence[int]) -> list[int]:
    """`total` tokens over chunks by their weights, at least one each, exact in the sum unless there are more chunks."""
    counts, spare = [1] * len(weights), total - len(weights)
    extra = [max(weight - 1, 0) for weight in weights]
    if spare <= 0:
        return counts
    if not sum(extra):
        extra = [1] * len(weights)
    shares = [spare * weight / sum(extra) for weight in extra]
    counts = [1 + int(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: int(shares[i]) - shares[i])
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def error_message(error: Any) -> str:
    """The message of an OpenAI error envelope's inner part, on one line."""
    message = error.get("message", error) if isinstance(error, Mapping) else error
    return " ".join(str(message).split())[:200]


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a choice of completions or chat; reasoning and tool calls are output as well."""
    delta = choice.get("delta")
    if not isinstance(delta, Mapping):
        return choice.get("text") or ""
    text = (delta.get("content") or "") + (delta.get("reasoning_content") or delta.get("reasoning") or "")
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        text += (function.get("name") or "") + (function.get("arguments") or "")
    return text


def _only_role(choice: Mapping[str, Any]) -> bool:
    """Whether this announces an answer, which servers do before or with the first token, and carries none of it."""
    delta = choice.get("delta")
    return isinstance(delta, Mapping) and "role" in delta and not _text(choice) and choice.get("finish_reason") is None
