"""Tool calls, without a server: formats read from text in any pieces, and what a request may say of tools."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import ConfigError, RequestError, StructuredOutputsParams, ToolDelta, ToolGolden, ToolParser
from octavo.server.tools.choice import MAX_TOOLS, ToolChoice, ToolStream, find_parser
from octavo.server.tools.chosen import NamedCall, RequiredCalls
from octavo.server.tools.hermes import CLOSE, OPEN, HermesParser
from octavo.server.tools.llama import TAG, Llama3JSONParser
from octavo.server.tools.parser import CallReader, ToolReader
from octavo.testing import ToolParserSuite, failures_of
from octavo.testing.tools import NAMES, read_calls


class TestHermesParser(ToolParserSuite):
    parser = HermesParser


class TestLlama3JSONParser(ToolParserSuite):
    parser = Llama3JSONParser


# --- any split gives what the whole text gives

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(max_size=5), values, max_size=3)
plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<{"), max_size=20)


def split(draw: Any, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=300, deadline=None)
@given(st.data(), st.lists(arguments, min_size=1, max_size=3), plain, st.booleans(), st.sampled_from(["", "\n", " "]))
def test_hermes_in_any_pieces(data: Any, calls: list[dict[str, Any]], before: str, ascii_only: bool, gap: str) -> None:
    written = [json.dumps(call, ensure_ascii=ascii_only) for call in calls]
    blocks = [f'{OPEN}{gap}{{"name": "f", "arguments": {text}}}{gap}{CLOSE}' for text in written]
    pieces = split(data.draw, before + gap.join(blocks))
    assert read_calls(HermesParser(NAMES), pieces) == (before.rstrip(), tuple(("f", text) for text in written))


@settings(max_examples=300, deadline=None)
@given(st.data(), st.lists(arguments, min_size=1, max_size=3), st.sampled_from([";", "; ", "\n"]))
def test_llama_and_required_in_any_pieces(data: Any, calls: list[dict[str, Any]], gap: str) -> None:
    written = [json.dumps(call, ensure_ascii=False) for call in calls]
    blocks = [f'{{"name": "g", "parameters": {text}}}' for text in written]
    expected = ("", tuple(("g", text) for text in written))
    assert read_calls(Llama3JSONParser(NAMES), split(data.draw, gap.join(blocks))) == expected
    assert read_calls(Llama3JSONParser(NAMES), split(data.draw, TAG + gap.join(blocks))) == expected
    assert read_calls(RequiredCalls(NAMES), split(data.draw, f"[{', '.join(blocks)}]")) == expected  # type: ignore[arg-type]


@settings(max_examples=500, deadline=None)
@given(st.data(), st.sampled_from([HermesParser, Llama3JSONParser]))
def test_garbage_in_any_pieces(data: Any, parser: type[ToolParser]) -> None:
    parts = [
        OPEN,
        CLOSE,
        TAG,
        "<tool_",
        "{",
        "}",
        '"name"',
        ":",
        '"f"',
        ",",
        '"arguments"',
        '{"a": 1}',
        "\\",
        '"',
        " ",
        "é",
        ";",
        "[",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=14)))
    found = read_calls(parser(NAMES), split(data.draw, text))
    assert found == read_calls(parser(NAMES), [text])
    if not found[1]:
        assert found[0] == text


# --- what models write in other ways than they should


def hermes(text: str) -> Any:
    return read_calls(HermesParser(NAMES), list(text))


@pytest.mark.parametrize(
    ("written", "name", "arguments"),
    [
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', "f", '{"a": 1}'),
        ('{"name": "f", "arguments": null}', "f", "{}"),
        ('{"name": "f", "arguments": "plain"}', "f", '"plain"'),
        ('{"name": "f", "arguments": [1, 2]}', "f", "[1, 2]"),
        ('{"name": "f", "arguments": 12}', "f", "12"),
        ('{"name": "f", "parameters": {"a": 1}}', "f", '{"a": 1}'),
        ('{"id": 3, "type": "function", "arguments": {"a": [{}]}, "name": "f"}', "f", '{"a": [{}]}'),
        ('{"name": "f", "arguments": {"a": 1}, "arguments": {"b": 2}, "name": "g"}', "f", '{"a": 1}'),
        ('{"name": "\\u0066", "arguments": {}}', "f", "{}"),
        ('{"name": "unknown", "arguments": {}}', "unknown", "{}"),
        ('{"name": "f", "arguments": {"a": 1, oops}}', "f", '{"a": 1, oops}'),
        ('{"name": "f", "arguments": {"a": "1" "b"}', "f", '{"a": "1" "b"}'),
        ('{"name": "f", "arguments": {"a": 1}}}}}', "f", '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1', "f", '{"a": 1'),
        ('{"name": "f", "arguments": {"a": 1}} and more', "f", '{"a": 1}'),
    ],
)
def test_odd_calls_are_passed_on(written: str, name: str, arguments: str) -> None:
    assert hermes(OPEN + written + CLOSE) == ("", ((name, arguments),))


@pytest.mark.parametrize(
    "inner",
    [
        "",
        "{}",
        "f(1)",
        '{"arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "f"',
        "{name: f}",
        '{"name": "\\ud800", "arguments": {}}',
        '["f", {}]',
        '{"name": "f", "arguments": }',
        '{"name" "f"}',
    ],
)
def test_what_is_no_call_stays_content_to_the_last_character(inner: str) -> None:
    text = f"a {OPEN}{inner}{CLOSE} b"
    assert hermes(text) == (text, ())
    good = f'{OPEN}{{"name": "g"}}{CLOSE}'
    content, calls = hermes(text + good)
    assert (content, calls) == (text, (("g", "{}"),))


def test_two_calls_in_one_tag_and_a_tag_that_is_not_closed() -> None:
    call = '{"name": "f", "arguments": {}}'
    assert hermes(f"{OPEN}{call}\n{call}{CLOSE}") == ("", (("f", "{}"),) * 2)
    assert hermes(f"{OPEN}{call}{OPEN}{call}{CLOSE}") == ("", (("f", "{}"),) * 2)
    assert hermes(f"{OPEN}{call} {{nothing}}{CLOSE}after") == ("after", (("f", "{}"),))


def test_deep_nesting_costs_no_stack() -> None:
    deep = '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}"
    assert read_calls(HermesParser(NAMES), [f'{OPEN}{{"name": "f", "arguments": {deep}}}{CLOSE}'])[1] == (("f", deep),)
    quoted = json.dumps(deep)
    assert read_calls(HermesParser(NAMES), [f'{OPEN}{{"name": "f", "arguments": {quoted}}}{CLOSE}'])[1] == (
        ("f", quoted),
    )


def test_arguments_come_as_they_are_written() -> None:
    parser, seen = HermesParser(NAMES), list[str]()
    for piece in (OPEN, '{"name": "f", ', '"arguments": {"a', '": "x', "y", '"}', "}", CLOSE):
        seen.append("".join(delta.arguments for delta in parser.feed(piece)))
    assert seen == ["", "", '{"a', '": "x', "y", '"}', "", ""]


def test_json_that_is_an_answer_is_no_call() -> None:
    for answer in ('{"name": "Ada", "age": 36}', '{"f": 1}', '{"parameters": {"a": 1}}', "{", '{"name": "f", "x'):
        assert read_calls(Llama3JSONParser(NAMES), list(answer)) == (answer, ())


# --- what requests say


def request(tools: Any = None, choice: Any = None, parallel: bool | None = None) -> Any:
    return SimpleNamespace(tools=tools, tool_choice=choice, parallel_tool_calls=parallel)


def tool(name: str = "f", parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("asked", "mode"),
    [
        (request(), "none"),
        (request([], "auto"), "none"),
        (request(None, "none"), "none"),
        (request([tool()], "none"), "none"),
        (request([tool()]), "auto"),
        (request([tool()], "auto"), "auto"),
        (request([tool()], "required"), "required"),
        (request([tool()], {"type": "function", "function": {"name": "f"}}), "named"),
    ],
)
def test_modes(asked: Any, mode: str) -> None:
    choice = ToolChoice.of(asked, auto_enabled=True)
    assert choice.mode == mode
    assert (choice.structured_outputs is not None) == (mode in ("required", "named"))
    assert (choice.stream(HermesParser) is None) == (mode == "none")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (request([tool()], "sometimes"), "tool_choice"),
        (request(None, "required"), "tool_choice"),
        (request([tool()], {"type": "function", "function": {"name": "g"}}), "tool_choice"),
        (request([tool()], {"type": "function"}), "tool_choice"),
        (request([tool()], {"type": "custom", "name": "f"}), "tool_choice"),
        (request([tool()] * 2), "tools[1].function.name"),
        (request([tool(str(i)) for i in range(MAX_TOOLS + 1)]), "tools"),
        (request([tool("a b")]), "tools[0].function.name"),
        (request([{"type": "function"}]), "tools[0]"),
        (request([{"type": "web_search"}]), "tools[0]"),
        (request([tool("f", [1])]), "tools[0].function.parameters"),
    ],
)
def test_refusals_name_the_field(asked: Any, param: str) -> None:
    with pytest.raises(RequestError) as error:
        ToolChoice.of(asked, auto_enabled=True)
    assert error.value.param == param


def test_auto_needs_the_servers_consent() -> None:
    with pytest.raises(RequestError, match="--enable-auto-tool-choice"):
        ToolChoice.of(request([tool()]), auto_enabled=False)
    assert ToolChoice.of(request([tool()], "required"), auto_enabled=False).mode == "required"


def test_schemas_of_tools_keep_their_own_definitions() -> None:
    def with_definition(kind: str) -> dict[str, Any]:
        part = {"x": {"type": kind}}
        return {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"], "$defs": part}

    tools = [tool("f", with_definition("integer")), tool("g", with_definition("boolean"))]
    structured = ToolChoice.of(request(tools, "required", False), False).structured_outputs
    assert isinstance(structured, StructuredOutputsParams)
    schema = json.loads(structured.spec.text)
    assert schema["maxItems"] == 1
    assert [schema["$defs"][i]["properties"]["a"]["$ref"] for i in "01"] == ["#/$defs/0/$defs/x", "#/$defs/1/$defs/x"]


def test_a_schema_with_a_reference_as_a_value_is_left_alone() -> None:
    constant = {"properties": {"a": {"const": {"$ref": "#"}}, "$ref": {"type": "integer"}}}
    structured = ToolChoice.of(request([tool("f", constant)], "required"), False).structured_outputs
    assert structured is not None
    assert json.loads(structured.spec.text)["$defs"]["0"] == constant


def test_finding_a_parser() -> None:
    class Both(HermesParser):
        name = "both"

    parsers: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3_json": Llama3JSONParser}
    assert find_parser(parsers, None, "") is None
    assert find_parser(parsers, "hermes", "") is HermesParser
    assert find_parser(parsers, "auto", "... <tool_call> ...") is HermesParser
    llama = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    assert find_parser(parsers, "auto", llama) is Llama3JSONParser
    for name, template in (("nope", ""), ("auto", "plain")):
        with pytest.raises(ConfigError, match="hermes, llama3_json"):
            find_parser(parsers, name, template)
    with pytest.raises(ConfigError, match="hermes, both"):
        find_parser({**parsers, "both": Both}, "auto", "<tool_call>")


def test_a_named_call_ends_with_stop_and_parallel_calls_can_be_refused() -> None:
    named = ToolStream(NamedCall(["f"]))
    (first,), (second,) = named.feed('{"a"'), named.feed(": 1}")
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a"'}
    assert second["tool_calls"][0]["function"] == {"arguments": ": 1}"}
    assert "id" not in second["tool_calls"][0]
    assert not named.called
    call = f'{OPEN}{{"name": "f"}}{CLOSE}'
    for parallel, calls in ((True, 2), (False, 1)):
        stream = ToolStream(HermesParser(["f"]), parallel)
        assert len([*stream.feed(call * 2), *stream.finish()]) == calls
        assert stream.called


# --- the suite itself


class Leaky(HermesParser):
    """Passes on at once what may be a tag."""

    def feed(self, text: str) -> Any:
        return (
            [ToolDelta(text)]
            if self._mode == self._in_content and OPEN not in self._text + text
            else super().feed(text)
        )


class Forgetful(HermesParser):
    def finish(self) -> Any:
        return []


class Slow(HermesParser):
    """Gives everything at the end."""

    def feed(self, text: str) -> Any:
        self._all = getattr(self, "_all", "") + text
        return []

    def finish(self) -> Any:
        return [*super().feed(self._all), *super().finish()]


class Wrong(HermesParser):
    @classmethod
    def goldens(cls) -> Any:
        return [ToolGolden("a", "b"), *HermesParser.goldens()]


@pytest.mark.parametrize("mutant", [Leaky, Forgetful, Slow, Wrong])
def test_the_suite_kills(mutant: type[ToolParser]) -> None:
    assert failures_of(type("TestMutant", (ToolParserSuite,), {"parser": mutant}))


def test_readers_begin_without_calls() -> None:
    readers: list[ToolReader] = [HermesParser(NAMES), RequiredCalls(NAMES), NamedCall(["f"])]
    assert [reader.num_calls for reader in readers] == [0, 0, 0]
    assert not CallReader().announced
