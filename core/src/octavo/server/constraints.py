"""Structured output: from a request's fields to SamplingParams, compiled before the engine hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from octavo.engine.grammar import StructuredOutputsParams
from octavo.engine.sampling_params import SamplingParams
from octavo.errors import RequestError
from octavo.server.core import Server
from octavo.server.schema import ChatRequest, SamplingFields
from octavo.server.tools.choice import ToolChoice

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's earlier names."""


async def install_constraint(request: SamplingFields, params: SamplingParams, server: Server) -> SamplingParams:
    """The params with what the request says of the output's form. Raises RequestError for what cannot be honoured."""
    asked = _asked(request)
    if isinstance(request, ChatRequest):
        tools = ToolChoice.of(request, server.settings.enable_auto_tool_choice)
        if tools.mode == "auto":
            if asked:
                raise RequestError(
                    f"{next(iter(asked))} would keep the model from calling tools; set tool_choice to none or required",
                    param=next(iter(asked)),
                )
            if server.tool_parser is not None and request.skip_special_tokens is None:
                params = params.model_copy(update={"skip_special_tokens": False})  # tags may be special tokens
        elif (forced := tools.structured_outputs) is not None:
            asked.pop("response_format", None)  # it is about content, of which there is none
            asked["tools"] = forced
    if len(asked) > 1:
        raise RequestError(f"{' and '.join(asked)} contradict each other: send one of them", param=list(asked)[1])
    for param, structured in asked.items():
        params = await constrained(params, structured, server, param)
    return params


async def constrained(
    params: SamplingParams, structured: StructuredOutputsParams, server: Server, param: str
) -> SamplingParams:
    """The params with a constraint that is compiled by now, on a thread of its own; `param` is what a refusal names."""
    try:
        await asyncio.to_thread(server.thread.processor.grammars.compile, structured)
    except RequestError as error:
        text = str(error).removeprefix("structured_outputs: ")
        raise RequestError(text if text.startswith(param) else f"{param}: {text}", param=param) from None
    return params.model_copy(update={"structured_outputs": structured})


def response_format(value: Mapping[str, Any], param: str = "response_format") -> StructuredOutputsParams | None:
    """What OpenAI's response_format asks for, the nested form of chat or the flat one of responses; None for text."""
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        nested = value.get("json_schema", value)
        schema = nested.get("schema") if isinstance(nested, Mapping) else None
        if schema is None:
            raise RequestError(f"{param}: a json_schema needs a schema", param=param)
        return _made(param, json=schema)
    if kind == "structural_tag":
        return _made(param, structural_tag=dict(value))
    shown = repr(kind)[:64]
    raise RequestError(
        f"{param}.type: expected text, json_object, json_schema or structural_tag, got {shown}", param=f"{param}.type"
    )


def _asked(request: SamplingFields) -> dict[str, StructuredOutputsParams]:
    """What fields of the request ask for, by field."""
    asked: dict[str, StructuredOutputsParams] = {}
    if request.response_format is not None and (form := response_format(request.response_format)) is not None:
        asked["response_format"] = form
    if request.structured_outputs is not None:
        asked["structured_outputs"] = _made("structured_outputs", **request.structured_outputs)
    for name, kind in _GUIDED.items():
        if (value := getattr(request, name)) is not None:
            asked[name] = _made(name, **{kind: value})
    return asked


def _made(param: str, **values: Any) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**values)
    except RequestError as error:
        raise RequestError(f"{param}: {error}", param=param) from None
