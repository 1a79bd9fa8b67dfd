"""Structured output and tool calls over HTTP, through the official SDK: a scripted model, so each byte is known."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel
from server_support import Running, running_server
from support import scripted_llm

from octavo.server.tools.hermes import CLOSE, OPEN
from octavo.testing import tiny_model
from octavo.testing.models import IM_END, IM_START

CALL = '{"name": "weather", "arguments": {"city": "Zürich 🌶", "days": [1, 2]}}'
ARGUMENTS = '{"city": "Zürich 🌶", "days": [1, 2]}'
REQUIRED = '[{"name": "weather", "parameters": {"city": "Zürich", "days": [1]}}, {"name": "clock", "parameters": {}}]'
SCRIPTS: Mapping[str, str] = {
    "one": f"Let me see.\n{OPEN}\n{CALL}\n{CLOSE}",
    "two": f"{OPEN}{CALL}{CLOSE}\n{OPEN}{CALL}{CLOSE}",
    "none": "It is <b>3</b> o'clock, é.",
    "llama": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "malformed": f'{OPEN}{{"name": "weather", "arguments": {{"city": oops}}{CLOSE}',
    "no call": f"{OPEN}weather(1){CLOSE} ok",
    "tag": "a <tool_ca",
    "required": REQUIRED,
    "named": '{"city": "Zürich", "days": []}',
    "person": '{"name": "Ada é", "age": 36}',
}


class Weather(BaseModel):
    """The weather."""

    city: str
    days: list[int]


class Person(BaseModel):
    name: str
    age: int


TOOLS: Any = [
    pydantic_function_tool(Weather, name="weather"),
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]


def chat_ids(text: str) -> tuple[int, ...]:
    return (IM_START, *f"user\n{text}".encode(), IM_END, *b"\n", IM_START, *b"assistant\n")


def scripts() -> dict[Sequence[int], Sequence[int]]:
    return {chat_ids(prompt): [*output.encode(), IM_END] for prompt, output in SCRIPTS.items()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    llm = scripted_llm(tmp_path_factory.mktemp("tools"), scripts(), num_blocks_override=256)
    with running_server(llm, enable_auto_tool_choice=True, tool_call_parser="hermes") as running:
        yield running


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with random weights: it says only what it is held to."""
    with running_server(tiny_model(tmp_path_factory.mktemp("tiny"))) as running:
        yield running


def ask(running: Running, prompt: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": prompt}]
    return running.client().chat.completions.create(model="", messages=messages, temperature=0, **options)


def streamed(running: Running, prompt: str, **options: Any) -> tuple[str, list[dict[str, str]], str | None, list[Any]]:
    """Content, calls, finish reason and chunks of a stream, put together as clients do."""
    content, calls, reason, chunks = (
        "",
        list[dict[str, str]](),
        None,
        list(ask(running, prompt, stream=True, **options)),
    )
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            if part.id is not None:
                assert part.index == len(calls)
                assert part.type == "function"
                calls.append({"id": part.id, "name": part.function.name, "arguments": ""})
            calls[part.index]["arguments"] += part.function.arguments or ""
        reason = choice.finish_reason or reason
    return content, calls, reason, chunks


# --- the model's own calls


@pytest.mark.parametrize(
    ("prompt", "content", "calls", "reason"),
    [
        ("one", "Let me see.", [ARGUMENTS], "tool_calls"),
        ("two", None, [ARGUMENTS, ARGUMENTS], "tool_calls"),
        ("none", SCRIPTS["none"], [], "stop"),
        ("malformed", None, ['{"city": oops}'], "tool_calls"),
        ("no call", SCRIPTS["no call"], [], "stop"),
        ("tag", SCRIPTS["tag"], [], "stop"),
    ],
)
def test_calls_streamed_and_whole(
    server: Running, prompt: str, content: str | None, calls: list[str], reason: str
) -> None:
    (choice,) = ask(server, prompt, tools=TOOLS).choices
    assert choice.message.content == content
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []] == [
        ("weather", a) for a in calls
    ]
    assert choice.finish_reason == reason
    text, found, ended, chunks = streamed(server, prompt, tools=TOOLS)
    assert (text or None, [c["arguments"] for c in found], ended) == (content, calls, reason)
    assert len({c["id"] for c in found}) == len(calls)
    if calls:
        shown = [c.delta.content or "" for chunk in chunks for c in chunk.choices]
        assert not any("<" in text or "tool_call" in text for text in shown), "a tag leaked"
        pieces = [p for chunk in chunks for c in chunk.choices for p in c.delta.tool_calls or ()]
        assert len(pieces) > 5, "the arguments came in one piece"


def test_without_tools_or_with_none_all_is_content(server: Running) -> None:
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = ask(server, "one", **options).choices
        assert (choice.message.content, choice.message.tool_calls) == (SCRIPTS["one"], None)


def test_parallel_calls_can_be_refused(server: Running) -> None:
    (choice,) = ask(server, "two", tools=TOOLS, parallel_tool_calls=False).choices
    assert len(choice.message.tool_calls) == 1
    assert len(streamed(server, "two", tools=TOOLS, parallel_tool_calls=False)[1]) == 1


def test_a_call_that_is_cut_short_says_so(server: Running) -> None:
    cut = len(f"Let me see.\n{OPEN}\n".encode()) + len(b'{"name": "weather", "arguments": {"city": "Z')
    (choice,) = ask(server, "one", tools=TOOLS, max_tokens=cut).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Z'
    content, calls, reason, _ = streamed(server, "one", tools=TOOLS, max_tokens=cut)
    assert (content, calls[0]["arguments"], reason) == ("Let me see.", '{"city": "Z', "length")


def test_the_sdks_streaming_helper_parses_calls(server: Running) -> None:
    messages: Any = [{"role": "user", "content": "one"}]
    with server.client().chat.completions.stream(
        model="", messages=messages, tools=[TOOLS[0]], temperature=0
    ) as stream:
        events = list(stream)
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in deltas) == ARGUMENTS
    (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Weather(city="Zürich 🌶", days=[1, 2])


def test_llamas_format(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template += "<|im_start|>assistant{{ '\n' }}"
    llm = scripted_llm(tmp_path, scripts())
    hint = '{# "parameters": dictionary of argument name #}'
    with running_server(
        llm, enable_auto_tool_choice=True, tool_call_parser="auto", chat_template=hint + template
    ) as running:
        (choice,) = ask(running, "llama", tools=TOOLS).choices
        assert choice.message.tool_calls[0].function.arguments == ARGUMENTS
        assert streamed(running, "llama", tools=TOOLS)[1][0]["arguments"] == ARGUMENTS
        (choice,) = ask(running, "person", tools=TOOLS).choices
        assert choice.message.content == SCRIPTS["person"]


def test_results_of_calls_go_back_to_the_model(tiny: Running) -> None:
    messages: Any = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    answer = tiny.client().chat.completions.create(model="", messages=messages, max_tokens=2)
    assert answer.choices[0].finish_reason in ("stop", "length")


# --- calls that the request asks for


def test_required_calls(server: Running) -> None:
    (choice,) = ask(server, "required", tools=TOOLS, tool_choice="required").choices
    expected = [("weather", '{"city": "Zürich", "days": [1]}'), ("clock", "{}")]
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == expected
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    content, calls, reason, _ = streamed(server, "required", tools=TOOLS, tool_choice="required")
    assert (content, [(c["name"], c["arguments"]) for c in calls], reason) == ("", expected, "tool_calls")


def test_a_named_call(server: Running) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    (choice,) = ask(server, "named", tools=TOOLS, tool_choice=named).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", SCRIPTS["named"])
    assert choice.finish_reason == "stop"
    _, calls, reason, _ = streamed(server, "named", tools=TOOLS, tool_choice=named)
    assert ([(c["name"], c["arguments"]) for c in calls], reason) == ([("weather", SCRIPTS["named"])], "stop")


def test_random_weights_are_held_to_the_schema_of_a_tool(tiny: Running) -> None:
    parameters = {
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/u"}, "n": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["unit", "n"],
        "$defs": {"u": {"enum": ["C", "F"]}},
    }
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("f", "g")]
    for choice in ("required", {"type": "function", "function": {"name": "g"}}):
        for seed in range(3):
            (answer,) = ask(
                tiny, "x", tools=tools, tool_choice=choice, parallel_tool_calls=False, seed=seed, max_tokens=300
            ).choices
            (call,) = answer.message.tool_calls
            assert call.function.name in ("f", "g")
            if answer.finish_reason != "length":
                found = json.loads(call.function.arguments)
                assert found.keys() == {"unit", "n"}
                assert found["unit"] in ("C", "F")


# --- response_format and vLLM's fields


def test_response_format_through_the_sdk(server: Running) -> None:
    messages: Any = [{"role": "user", "content": "person"}]
    completions = server.client().chat.completions
    parsed = completions.parse(model="", messages=messages, response_format=Person, temperature=0)
    assert parsed.choices[0].message.parsed == Person(name="Ada é", age=36)
    with completions.stream(model="", messages=messages, response_format=Person, temperature=0) as stream:
        events = list(stream)
    assert stream.get_final_completion().choices[0].message.parsed == Person(name="Ada é", age=36)
    assert "".join(event.delta for event in events if event.type == "content.delta") == SCRIPTS["person"]


@pytest.mark.parametrize(
    ("field", "value", "fits"),
    [
        ("structured_outputs", {"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ("structured_outputs", {"regex": "[0-9]{3}"}, str.isdigit),
        ("structured_outputs", {"json": {"type": "integer", "maximum": 9, "minimum": 0}}, str.isdigit),
        ("structured_outputs", {"grammar": 'start: "a" | "b"'}, lambda text: text in ("a", "b")),
        ("guided_choice", ["yes", "no"], lambda text: text in ("yes", "no")),
        ("guided_regex", "[0-9]{3}", str.isdigit),
        ("guided_json", {"enum": ["é"]}, lambda text: text == '"é"'),
        ("guided_grammar", 'root ::= "a" | "b"', lambda text: text in ("a", "b")),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1}}},
            lambda t: t == "1",
        ),
        ("response_format", {"type": "text"}, lambda text: True),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_fields(tiny: Running, field: str, value: Any, fits: Any, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    answer = tiny.post(path, {**body, field: value, "max_tokens": 20, "temperature": 1.0, "seed": 1, "n": 2})
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert fits(text), text


SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"properties": {"a": {"type": "nope"}}}}}
FORCED = {"type": "function", "function": {"name": "f"}}
BAD_TOOL = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "nope"}}}}}]


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed"),
        ({"structured_outputs": {"json": {"$ref": "#/nowhere"}}}, "structured_outputs", "nowhere"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs", "not"),
        ({"structured_outputs": {"json": {"type": "string", "pattern": "\\q"}}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"nope": 1}}, "structured_outputs", "nope"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "contradict"),
        ({"guided_regex": "("}, "guided_regex", "unclosed"),
        ({"response_format": SCHEMA}, "response_format", "#/properties/a"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"tools": BAD_TOOL, "tool_choice": FORCED}, "tools", "#/properties/a"),
        ({"tools": BAD_TOOL, "tool_choice": "required"}, "tools", "nope"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tools", "contradict"),
        ({"tools": TOOLS}, "tool_choice", "--enable-auto-tool-choice"),
        ({"tools": TOOLS, "tool_choice": FORCED}, "tool_choice", "no tool 'f'"),
    ],
)
def test_v36_bad_constraints_are_400_before_any_token(tiny: Running, fields: Any, param: str, word: str) -> None:
    steps = tiny.llm.stats().scheduler.num_steps
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **fields}
    for stream in (False, True):
        answer = tiny.post("/v1/chat/completions", {**body, "stream": stream})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert word in error["message"]
    assert tiny.llm.stats().scheduler.num_steps == steps
    assert tiny.get("/health").status_code == 200


def test_a_format_that_would_keep_the_model_from_calling_is_refused(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="would keep the model from calling tools"):
        ask(server, "one", tools=TOOLS, response_format={"type": "json_object"})


def test_v37_hostile_grammars_delay_nobody(tiny: Running) -> None:
    """Large schemas are compiled while another stream runs: it goes on, and all end as they should."""
    properties = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i + 1}}}$"} for i in range(400)}
    hostile: list[Any] = [
        {"json": {"type": "object", "properties": properties}},
        {"json": {"enum": [f"value {i}" for i in range(9000)]}},
        {"regex": "((((a{1,60}){1,60}){1,60}){1,60}){1,60}"},
        {"regex": "(.{1,1000}){1,1000}"},
        {"regex": "(" * 50_000 + "a" + ")" * 50_000},
        {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 1_000_000}},
        {"grammar": "root ::= " + "(" * 10_000},
    ]
    answers: dict[int, httpx.Response] = {}

    def send(number: int) -> None:
        body = {"prompt": "x", "structured_outputs": hostile[number], "max_tokens": 3}
        answers[number] = tiny.post("/v1/completions", body)

    threads = [threading.Thread(target=send, args=(i,)) for i in range(len(hostile))]
    for thread in threads:
        thread.start()
    text = ask(tiny, "x", max_tokens=200, extra_body={"ignore_eos": True}, stream=True)
    assert sum(1 for _ in text) > 2
    for thread in threads:
        thread.join(120)
    assert {i: a.status_code for i, a in answers.items() if a.status_code not in (200, 400)} == {}
    assert len(answers) == len(hostile)
