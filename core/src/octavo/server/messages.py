"""Chat messages as clients may write them, turned into what templates expect. Each refusal names messages[i]."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import RequestError

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def plain_messages(messages: Sequence[Mapping[str, Any]], knows_developer: bool) -> list[dict[str, Any]]:
    """The messages with texts for contents: parts joined, None as nothing, arguments of tool calls as objects.

    A developer's message is a system's for templates that do not mention developers. Raises RequestError.
    """
    if not messages:
        raise RequestError("messages is empty: at least one is needed", param="messages")
    return [_plain(message, f"messages[{i}]", knows_developer) for i, message in enumerate(messages)]


def _plain(message: Mapping[str, Any], where: str, knows_developer: bool) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role: expected one of {', '.join(_ROLES)}, got {_shown(role)}", param=f"{where}.role"
        )
    plain = {key: value for key, value in message.items() if value is not None}
    calls = plain.get("tool_calls")
    content = message.get("content")
    if content is None and not (
        role == "assistant" and (calls or message.get("refusal") or message.get("function_call"))
    ):
        raise RequestError(f"{where}.content is missing; only assistants that call tools may leave it out", param=where)
    plain["content"] = _text(content, f"{where}.content")
    if role == "developer" and not knows_developer:
        plain["role"] = "system"
    if calls is not None:
        plain["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    return plain


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}: expected text or a list of parts, got {_shown(content)}", param=where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
            continue
        if kind not in _TEXT_PARTS:
            what = f"parts of type {_shown(kind)}" if kind else "such parts"
            raise RequestError(
                f"{where}[{i}]: {what} are not supported; this server takes text only and fetches nothing",
                param=f"{where}[{i}]",
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise RequestError(f"{where}[{i}].text: expected text, got {_shown(text)}", param=f"{where}[{i}].text")
        texts.append(text)
    return "".join(texts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments parsed: templates write them as JSON themselves."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{where}: expected a list of calls", param=where)
    parsed = []
    for i, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{i}].function: expected an object with a name", param=f"{where}[{i}].function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # a model's own malformed call stays as it is
                arguments = json.loads(arguments or "{}")
        parsed.append({**call, "function": {**function, "arguments": {} if arguments is None else arguments}})
    return parsed


def _shown(value: Any) -> str:
    return repr(value)[:100]
