"""What a request says of tools: which there are, whether the model may or must call them, and how its output is read.

The model calls of its own accord in the format of `--tool-call-parser`. Where a call is required, structured output allows
nothing but calls as JSON, so no format of the model's own is needed.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from octavo.engine.grammar import StructuredOutputsParams
from octavo.errors import ConfigError, RequestError
from octavo.server.tools.chosen import NamedCall, RequiredCalls
from octavo.server.tools.parser import ToolDelta, ToolParser, ToolReader

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class ToolFields(Protocol):
    """The fields of a chat request that are about tools."""

    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A request's tools, by name with the schemas of their arguments, and what is to become of them.

    `allowed` are those that may be called. With "named" there is one; with "none" the model does not hear of any.
    """

    mode: Literal["none", "auto", "required", "named"]
    allowed: Mapping[str, Mapping[str, Any]]
    parallel: bool = True

    @classmethod
    def of(cls, request: ToolFields, auto_enabled: bool) -> ToolChoice:
        """Reads and checks a request's fields; raises RequestError that names one."""
        tools = _tools(request.tools or [])
        choice = request.tool_choice if request.tool_choice is not None else "auto"
        parallel = request.parallel_tool_calls is not False
        if isinstance(choice, Mapping):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
            if choice.get("type") != "function" or not isinstance(name, str):
                raise RequestError(
                    'tool_choice: expected {"type": "function", "function": {"name": ...}}', param="tool_choice"
                )
            if name not in tools:
                known = ", ".join(tools) or "none"
                raise RequestError(f"tool_choice: no tool '{name[:64]}' in tools; found: {known}", param="tool_choice")
            return cls("named", {name: tools[name]}, parallel)
        if choice not in ("none", "auto", "required"):
            raise RequestError(
                f"tool_choice: expected none, auto, required or a function, got {choice[:64]!r}", param="tool_choice"
            )
        if choice == "required" and not tools:
            raise RequestError("tool_choice is required, but tools are not given", param="tool_choice")
        if choice == "auto" and tools and not auto_enabled:
            raise RequestError(
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
                param="tool_choice",
            )
        return cls(choice if tools else "none", tools if choice != "none" else {}, parallel)  # type: ignore[arg-type]

    @property
    def structured_outputs(self) -> StructuredOutputsParams | None:
        """What holds the output to the calls that are asked for; None where the model is free. Raises RequestError."""
        if self.mode == "named":
            (schema,) = self.allowed.values()
        elif self.mode == "required":
            schema = _list_of_calls(self.allowed, self.parallel)
        else:
            return None
        try:
            return StructuredOutputsParams(json=dict(schema), disable_additional_properties=True)
        except RequestError as error:
            raise RequestError(f"tools: {error}", param="tools") from None

    def stream(self, parser: type[ToolParser] | None) -> ToolStream | None:
        """What reads one output; None where it is content, all of it. `parser` is the server's."""
        reader: ToolReader
        if self.mode == "named":
            reader = NamedCall(self.allowed)
        elif self.mode == "required":
            reader = RequiredCalls(self.allowed)
        elif self.mode == "auto" and parser is not None:
            reader = parser(self.allowed)
        else:
            return None
        return ToolStream(reader, self.parallel)


def find_parser(
    parsers: Mapping[str, type[ToolParser]], name: str | None, chat_template: str
) -> type[ToolParser] | None:
    """The parser that `--tool-call-parser` names; with "auto" the one that recognises the template. Raises ConfigError."""
    if name is None or name in parsers:
        return None if name is None else parsers[name]
    known = ", ".join(sorted(parsers))
    if name != "auto":
        raise ConfigError(f"--tool-call-parser {name}: no such parser; installed: {known}, and auto chooses among them")
    found = [parser for parser in parsers.values() if parser.recognises(chat_template)]
    if len(found) != 1:
        names = ", ".join(parser.name for parser in found) or "none of them"
        raise ConfigError(f"--tool-call-parser auto: {names} recognises the chat template; name one of {known}")
    return found[0]


class ToolStream:
    """One output as OpenAI's deltas, from its text. `called` says that its finish reason is "tool_calls" in place of "stop"."""

    def __init__(self, reader: ToolReader, parallel: bool = True) -> None:
        self._reader, self._parallel = reader, parallel

    @property
    def called(self) -> bool:
        """OpenAI says "stop" where the request named the call."""
        return self._reader.num_calls > 0 and not isinstance(self._reader, NamedCall)

    def feed(self, text: str) -> list[dict[str, Any]]:
        """What more text makes certain, as objects for `delta`; none where it is held back."""
        return self._shown(self._reader.feed(text))

    def finish(self) -> list[dict[str, Any]]:
        """The rest, when no more text comes."""
        return self._shown(self._reader.finish())

    def _shown(self, deltas: Sequence[ToolDelta]) -> list[dict[str, Any]]:
        shown: list[dict[str, Any]] = []
        for delta in deltas:
            if delta.index < 0:
                shown.append({"content": delta.content})
                continue
            if delta.index > 0 and not self._parallel:
                continue  # asked for with parallel_tool_calls: false
            call: dict[str, Any] = {"index": delta.index}
            if delta.name is not None:
                call |= {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            named = {} if delta.name is None else {"name": delta.name}
            shown.append({"tool_calls": [{**call, "function": {**named, "arguments": delta.arguments}}]})
        return shown


def _tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Schemas of arguments by the tools' names."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed", param="tools")
    found: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise RequestError(f'{where}: expected {{"type": "function", "function": {{...}}}}', param=where)
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(
                f"{where}.function.name: expected 1 to 64 letters, digits, '_', '-' or '.'",
                param=f"{where}.function.name",
            )
        if name in found:
            raise RequestError(
                f"{where}.function.name: '{name}' is another tool's name", param=f"{where}.function.name"
            )
        if schema is not None and not isinstance(schema, Mapping):
            raise RequestError(
                f"{where}.function.parameters: expected a JSON schema", param=f"{where}.function.parameters"
            )
        found[name] = schema or {"type": "object", "properties": {}}
    return found


def _list_of_calls(tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """The schema of a list of calls. Each tool's schema gets a place of its own, and its references are led there."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{i}"}},
            "required": ["name", "parameters"],
        }
        for i, name in enumerate(tools)
    ]
    schemas = {str(i): _moved(schema, f"#/$defs/{i}") for i, schema in enumerate(tools.values())}
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": schemas}


def _moved(schema: Any, place: str, skip: Collection[str] = ("const", "enum", "default", "examples")) -> Any:
    """A schema whose references to its own parts lead to them at their new place."""
    if isinstance(schema, Mapping):
        moved = {key: value if key in skip else _moved(value, place) for key, value in schema.items()}
        target = moved.get("$ref")
        if isinstance(target, str) and target.startswith("#"):
            moved["$ref"] = place + target[1:]
        return moved
    return [_moved(item, place) for item in schema] if isinstance(schema, list) else schema
