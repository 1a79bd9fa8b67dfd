"""The contract of tool-call formats, and what all of them share: reading one call, a JSON object, as it comes.

Models write calls into their text, each family in its own way. A `ToolParser` takes the text of one output apart, piece by
piece, and gives the same result however the text is cut. What a model wrote as arguments is passed on as it stands,
valid or not, as OpenAI does; what turns out to be no call stays content, to the last character.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of an output: content, or of call `index` its name (first, once) or more of its arguments."""

    content: str = ""
    index: int = -1
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolGolden:
    """A text in some format, and what it holds: content, and calls as (name, arguments as they are written)."""

    text: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()


class ToolReader(ABC):
    """Takes the text of one output apart into content and calls, as it comes."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` are the tools of the request."""
        self.names = names
        self.num_calls = 0

    @abstractmethod
    def feed(self, text: str) -> Sequence[ToolDelta]:
        """What more text makes certain. Nothing of it that may yet become part of a call is content."""

    @abstractmethod
    def finish(self) -> Sequence[ToolDelta]:
        """The rest, when no more text comes."""


class ToolParser(ToolReader):
    """A format in which models write calls of their own accord. Chosen by `--tool-call-parser NAME`."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def recognises(cls, chat_template: str) -> bool:
        """Whether a model with this chat template writes its calls in this format: for `--tool-call-parser auto`."""

    @classmethod
    @abstractmethod
    def goldens(cls) -> Sequence[ToolGolden]:
        """Texts of the format, with one call, several, none, and ones cut short. Their tools are named "f" and "g"."""


class CallReader:
    """One call as JSON, `{"name": "f", "arguments": {...}}`, in any order, "parameters" meaning the same; read by character.

    Brackets and strings are followed, no more: what is inside the arguments is the caller's affair. `name` is known before
    `take` gives arguments.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = self.failed = self.announced = False
        self.in_string = False
        self._read: list[str] = []
        self._state = self._open
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._escaped = self._streams = False
        self._arguments: str | None = None  # complete, before the name was known
        self._pending: list[str] = []

    @property
    def text(self) -> str:
        """All that was read, without the character at which it failed."""
        return "".join(self._read[:-1] if self.failed else self._read)

    def read(self, char: str) -> None:
        """Takes the next character, unless the call is `done` or has `failed` to be one."""
        self._read.append(char)
        self._state(char)

    def take(self) -> str:
        """More of the arguments; the first time, the call is certain to be one."""
        pending = "".join(self._pending)
        self._pending.clear()
        return pending

    def _fail(self) -> None:
        self.failed = not self.announced
        self.done = self.announced

    def _announce(self) -> None:
        self.announced = True

    def _open(self, char: str) -> None:
        if char == "{":
            self._state = self._before_key
        elif char not in _SPACE:
            self._fail()

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._begin_value(char)
            self._state = self._in_key
        elif char == "}":
            self._end()
        elif char not in _SPACE + ",":
            self._fail()

    def _begin_value(self, char: str) -> None:
        self._value = [char]
        self.in_string = char == '"'
        self._depth = int(char in "{[")
        self._escaped = False

    def _in_key(self, char: str) -> None:
        self._value.append(char)
        if self._string_ends(char):
            self._key = str(_loaded("".join(self._value)))
            self._state = self._before_colon

    def _before_colon(self, char: str) -> None:
        if char == ":":
            self._state = self._before_value
        elif char not in _SPACE:
            self._fail()

    def _before_value(self, char: str) -> None:
        if char in _SPACE:
            return
        if char in ",:}]":
            self._fail()
            return
        self._begin_value(char)
        self._state = self._in_value
        known = self._arguments is not None or self.announced
        if self._key in ("arguments", "parameters") and char == "{" and self.name is not None and not known:
            self._streams = True
            self._announce()
            self._pending.append(char)

    def _in_value(self, char: str) -> None:
        scalar = not self.in_string and self._depth == 0
        if scalar and char in _SPACE + ",}]":  # a number, true, false or null ends before this
            self._end_value()
            if not self.failed and not self.done:
                self._state(char)
            return
        self._value.append(char)
        if self._streams:
            self._pending.append(char)
        if self.in_string:
            if self._string_ends(char) and self._depth == 0:
                self._end_value()
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()

    def _string_ends(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self.in_string = False
        return not self.in_string

    def _end_value(self) -> None:
        self._state = self._before_key
        text = "".join(self._value)
        if self._streams:
            self._streams = False
        elif self._key == "name" and self.name is None:
            name = _loaded(text)
            if not isinstance(name, str) or not name or name != name.encode(errors="ignore").decode():
                self._fail()
                return
            self.name = name
            if self._arguments is not None:
                self._announce()
                self._pending.append(self._arguments)
        elif self._key in ("arguments", "parameters") and self._arguments is None and not self.announced:
            self._arguments = _as_object(text)
            if self.name is not None:
                self._announce()
                self._pending.append(self._arguments)

    def _end(self) -> None:
        if self.name is None:
            self._fail()
            return
        if not self.announced:
            self._announce()
            self._pending.append("{}")
        self.done = True


def _loaded(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _as_object(text: str) -> str:
    """Arguments that are no object: null means none, and a string may hold the object as text."""
    if text == "null":
        return "{}"
    inner = _loaded(text) if text.startswith('"') else None
    return inner if isinstance(inner, str) and isinstance(_loaded(inner), dict) else text


def partial_end(text: str, tag: str, start: int = 0) -> int:
    """How many characters at the end of a text, from `start` on, may be the beginning of a tag."""
    for size in range(min(len(tag) - 1, len(text) - start), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


class Calls(ToolReader):
    """What readers of JSON calls share: the current call, and deltas that are joined where they belong together."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self.reader: CallReader | None = None
        self._passed: CallReader | None = None  # the last that was announced
        self._deltas: list[ToolDelta] = []

    def _say(self, content: str) -> None:
        if content:
            self._deltas.append(ToolDelta(content))

    def _pass_on(self) -> None:
        """Passes on what is new of the current call."""
        reader = self.reader
        if reader is None or not reader.announced:
            return
        first = reader is not self._passed
        if first:
            self._passed = reader
            self.num_calls += 1
        arguments = reader.take()
        if first or arguments:
            self._deltas.append(
                ToolDelta(index=self.num_calls - 1, name=reader.name if first else None, arguments=arguments)
            )

    def _given(self) -> list[ToolDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas
