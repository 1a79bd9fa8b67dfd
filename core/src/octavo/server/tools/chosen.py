"""Calls that the request asked for: their JSON is the whole output, because structured output allows nothing else."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from octavo.server.tools.parser import CallReader, Calls, ToolDelta, ToolReader


class RequiredCalls(Calls):
    """A JSON list of calls. What is no call, which only a cut can leave, is dropped."""

    def feed(self, text: str) -> Sequence[ToolDelta]:
        for char in text:
            if self.reader is None or self.reader.done:
                if char != "{":
                    continue
                self.reader = CallReader()
            self.reader.read(char)
            if self.reader.done:
                self._pass_on()
        self._pass_on()
        return self._given()

    def finish(self) -> Sequence[ToolDelta]:
        return ()


class NamedCall(ToolReader):
    """The arguments of the one tool that the request named."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        (self._name,) = names

    def feed(self, text: str) -> Sequence[ToolDelta]:
        if not text:
            return ()
        first, self.num_calls = not self.num_calls, 1
        return [ToolDelta(index=0, name=self._name if first else None, arguments=text)]

    def finish(self) -> Sequence[ToolDelta]:
        return ()
