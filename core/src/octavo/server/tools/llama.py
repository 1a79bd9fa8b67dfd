"""Calls as Llama 3 writes them: the whole answer is `{"name": "f", "parameters": {...}}`, or several with ; in between."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from octavo.server.tools.parser import CallReader, Calls, ToolDelta, ToolGolden, ToolParser, partial_end

TAG = "<|python_tag|>"


class Llama3JSONParser(Calls, ToolParser):
    """Calls from the start of the text, or from a python tag on, until something else comes; all other text is content.

    There are no tags around a call, so JSON that names no tool of the request is an answer in JSON, not a call.
    """

    name: ClassVar[str] = "llama3_json"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._text = ""  # not yet looked at
        self._lead = ""  # what stands before a call, and is content again if none follows
        self._mode = self._before_call

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return TAG in chat_template or '"parameters": dictionary of argument name' in chat_template

    @classmethod
    def goldens(cls) -> Sequence[ToolGolden]:
        call = '{"name": "f", "parameters": {"a": "}; {\\"", "b": [1, {}]}}'
        arguments = '{"a": "}; {\\"", "b": [1, {}]}'
        return [
            ToolGolden("The answer is {3}.\n", "The answer is {3}.\n"),
            ToolGolden(call, "", (("f", arguments),)),
            ToolGolden(f"\n{call}; {call}\n", "", (("f", arguments),) * 2),
            ToolGolden(f"Look: {TAG}{call}", "Look: ", (("f", arguments),)),
            ToolGolden('{"type": "function", "parameters": {}, "name": "g"}', "", (("g", "{}"),)),
            ToolGolden('{"name": "g"} Done.', " Done.", (("g", "{}"),)),
            ToolGolden('{"name": "f", "parameters": {"a": "x', "", (("f", '{"a": "x'),)),
            ToolGolden('{"name": "f", "para', '{"name": "f", "para'),
            ToolGolden('{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}'),
            ToolGolden('{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}'),
            ToolGolden("a <|python_", "a <|python_"),
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
                self._say(self._lead + self.reader.text)
        elif self._mode == self._in_content or not self.num_calls or (self._lead + self._text).strip(" \t\r\n;,"):
            self._say(self._lead + self._text)
        self._text = self._lead = ""
        return self._given()

    def _before_call(self) -> bool:
        """Looks for a call behind whitespace, separators and a tag."""
        rest = self._text.lstrip(" \t\r\n;," if self.num_calls else None)
        self._lead += self._text[: len(self._text) - len(rest)]
        self._text = rest
        if rest.startswith(TAG):
            self._lead, self._text = self._lead + TAG, rest[len(TAG) :]
            return True
        if rest.startswith("{"):
            self.reader, self._mode = CallReader(), self._in_call
            return True
        if not rest or TAG.startswith(rest):
            return False
        self._begin_content()
        return True

    def _in_call(self) -> bool:
        reader = self.reader
        assert reader is not None
        for i, char in enumerate(self._text):
            reader.read(char)
            if reader.failed or (reader.name is not None and reader.name not in self.names):
                self._lead += reader.text
                self._text = self._text[i + (not reader.failed) :]
                self._begin_content()
                return True
            if reader.announced:
                self._lead = ""
            if reader.done:
                self._pass_on()
                self._text, self._mode = self._text[i + 1 :], self._before_call
                return True
        self._text = ""
        return False

    def _begin_content(self) -> None:
        self._say(self._lead)
        self._lead, self.reader, self._mode = "", None, self._in_content

    def _in_content(self) -> bool:
        start = self._text.find(TAG)
        if start >= 0:
            self._say(self._text[:start])
            self._text, self._mode = self._text[start:], self._before_call
            return True
        certain = len(self._text) - partial_end(self._text, TAG)
        self._say(self._text[:certain])
        self._text = self._text[certain:]
        return False
