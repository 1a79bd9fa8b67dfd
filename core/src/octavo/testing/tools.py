"""The suite for tool-call formats: that a text gives the same calls however it is cut, and that nothing is lost or leaks."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import ClassVar

from octavo.server.tools.parser import ToolDelta, ToolParser
from octavo.testing.suite import Suite

NAMES = ("f", "g")
Result = tuple[str, tuple[tuple[str, str], ...]]


def read_calls(parser: ToolParser, pieces: Sequence[str]) -> Result:
    """Content and (name, arguments) of an output that comes in pieces; fails on deltas that are out of order."""
    deltas: list[ToolDelta] = []
    for piece in pieces:
        deltas += parser.feed(piece)
    deltas += parser.finish()
    content = "".join(delta.content for delta in deltas)
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        assert delta.content or delta.index >= 0, "a delta without anything"
        if delta.index < 0:
            continue
        assert not delta.content, "a delta of content and call at once"
        if delta.name is not None:
            assert delta.index == len(calls), f"call {delta.index} begins after {len(calls)}"
            calls.append((delta.name, ""))
        assert delta.index == len(calls) - 1, f"arguments of call {delta.index} come after call {len(calls) - 1} began"
        name, arguments = calls[-1]
        calls[-1] = (name, arguments + delta.arguments)
    assert parser.num_calls == len(calls)
    return content, tuple(calls)


class ToolParserSuite(Suite):
    """Proves a tool-call format: `class TestMine(ToolParserSuite): parser = MyParser`."""

    parser: ClassVar[type[ToolParser]]
    _subject = "parser"

    def read(self, *pieces: str) -> Result:
        return read_calls(self.parser(NAMES), pieces)

    def test_goldens(self) -> None:
        goldens = self.parser.goldens()
        assert any(len(golden.calls) > 1 for golden in goldens), "no golden has several calls"
        assert any(not golden.calls for golden in goldens), "no golden has no call"
        for golden in goldens:
            assert self.read(golden.text) == (golden.content, golden.calls), f"{golden.text!r}"

    def test_cuts_change_nothing(self) -> None:
        for golden in self.parser.goldens():
            whole, text = (golden.content, golden.calls), golden.text
            assert self.read(*text) == whole, f"{text!r}, character by character"
            for cut in range(len(text) + 1):
                assert self.read(text[:cut], text[cut:]) == whole, f"{text[:cut]!r} + {text[cut:]!r}"

    def test_garbage_is_read_alike_and_never_raises(self) -> None:
        goldens = [golden.text for golden in self.parser.goldens()]
        random = Random(0)
        for _ in range(2000):
            parts = [random.choice(goldens) for _ in range(random.randint(1, 3))]
            text = "".join(part[random.randrange(len(part)) :][: random.randrange(1, 40)] for part in parts)
            cuts = sorted(random.randrange(len(text) + 1) for _ in range(random.randint(1, 6)))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            found = self.read(*pieces)
            assert found == self.read(text), f"{pieces}"
            if not found[1]:
                assert found[0] == text, "there are no calls, and the content is not the text"

    def test_plain_text_comes_at_once(self) -> None:
        parser = self.parser(NAMES)
        assert [delta.content for word in ("It", " is", " 3.") for delta in parser.feed(word)] == ["It", " is", " 3."]
