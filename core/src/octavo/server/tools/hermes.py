"""Calls as Hermes and Qwen write them: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>` in between text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from octavo.server.tools.parser import CallReader, Calls, ToolDelta, ToolGolden, ToolParser, partial_end

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(Calls, ToolParser):
    """Text with tagged calls in it.

    A tag inside a JSON string is text. A call whose JSON is cut off or not closed is passed on as far as it goes, once its name
    and the start of its arguments are known; before that it stays content, tag included. Whitespace around calls, and what
    stands between a call and its closing tag, is dropped.
    """

    name: ClassVar[str] = "hermes"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._text = ""  # not yet looked at; in content, whitespace and what may be a tag
        self._lead = ""  # the whitespace before a tag, which is content again if no call follows
        self._several = False  # the current call is not the first after its tag
        self._mode = self._in_content

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return OPEN in chat_template

    @classmethod
    def goldens(cls) -> Sequence[ToolGolden]:
        call = '{"name": "f", "arguments": {"a": "}</tool_call>{\\"", "b": [1, {}]}}'
        arguments = '{"a": "}</tool_call>{\\"", "b": [1, {}]}'
        return [
            ToolGolden("The answer is 3 < 4.\n", "The answer is 3 < 4.\n"),
            ToolGolden(f"{OPEN}\n{call}\n{CLOSE}", "", (("f", arguments),)),
            ToolGolden(f"Look:\n{OPEN}{call}{CLOSE}\n{OPEN}{call}{CLOSE}\n", "Look:", (("f", arguments),) * 2),
            ToolGolden(f'{OPEN}{{"arguments": {{}}, "name": "g"}}{CLOSE} Done.', " Done.", (("g", "{}"),)),
            ToolGolden(f'{OPEN}{{"name": "g"}}{CLOSE}', "", (("g", "{}"),)),
            ToolGolden(f'{OPEN}{{"name": "f", "arguments": {{"a": 1}}{CLOSE}', "", (("f", '{"a": 1}'),)),
            ToolGolden(f'{OPEN}{{"name": "f", "arguments": {{"a": "x', "", (("f", '{"a": "x'),)),
            ToolGolden(f'{OPEN}{{"name": "f", "argu', f'{OPEN}{{"name": "f", "argu'),
            ToolGolden(f"a {OPEN}nothing{CLOSE} b", f"a {OPEN}nothing{CLOSE} b"),
            ToolGolden("a <tool_ca", "a <tool_ca"),
        ]

    def feed(self, text: str) -> Sequence[ToolDelta]:
        self._text += text
        while self._mode():
            pass
        self._pass_on()
        return self._given()

    def finish(self) -> Sequence[ToolDelta]:
        if self._mode == self._in_call:
            if self.reader is not None and not self.reader.announced:
                several = self._several
                self._reject(0)
                self._say("" if several else self._text)
        elif self._mode == self._in_content and (not self.num_calls or self._text.strip()):
            self._say(self._text)
        self._text = ""
        return self._given()

    def _in_content(self) -> bool:
        """Passes text on up to a tag; True if one is there, and what follows is to be read otherwise."""
        start = self._text.find(OPEN)
        if start >= 0:
            content = self._text[:start].rstrip()
            self._say(content)
            self._lead, self._several = self._text[len(content) : start], False
            self._text = self._text[start + len(OPEN) :]
            self.reader, self._mode = CallReader(), self._in_call
            return True
        certain = len(self._text[: len(self._text) - partial_end(self._text, OPEN)].rstrip())
        self._say(self._text[:certain])
        self._text = self._text[certain:]
        return False

    def _in_call(self) -> bool:
        reader, text = self.reader, self._text
        assert reader is not None
        for i, char in enumerate(text):
            closes = char == "<" and not reader.in_string and CLOSE.startswith(text[i : i + len(CLOSE)])
            if closes and len(text) - i < len(CLOSE):
                self._text = text[i:]
                return False
            if not closes:
                reader.read(char)
            if reader.failed or (closes and not reader.announced):
                self._reject(i)
                return True
            if reader.done or closes:
                self._pass_on()
                self._text, self._mode = text[i + (not closes) :], self._after_call
                return True
        self._text = ""
        return False

    def _reject(self, start: int) -> None:
        """What was taken for a call, up to `start`, is none: it is content with its tag, or dropped behind another call."""
        assert self.reader is not None
        if not self._several:
            self._say(self._lead + OPEN + self.reader.text)
        self._mode = self._after_call if self._several else self._in_content
        self._text, self.reader = self._text[start:], None

    def _after_call(self) -> bool:
        """Looks for the closing tag, or for another call before it."""
        text = self._text
        close, another = text.find(CLOSE), text.find("{")
        if another >= 0 and (close < 0 or another < close):
            self._text, self._several = text[another:], True
            self.reader, self._mode = CallReader(), self._in_call
            return True
        if close >= 0:
            self._text, self._mode, self.reader = text[close + len(CLOSE) :], self._in_content, None
            return True
        self._text = text[len(text) - partial_end(text, CLOSE) :]
        return False
