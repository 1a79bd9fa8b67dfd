"""POST /v1/responses: the part of it that is about text. Nothing is stored, so no response can be continued by its id."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.engine.sampling_params import SamplingParams
from octavo.errors import RequestError
from octavo.front.outputs import RequestOutput
from octavo.server.call import Call
from octavo.server.chat import prompt_of
from octavo.server.constraints import constrained, response_format
from octavo.server.core import Server
from octavo.server.errors import api_error, dumps
from octavo.server.fields import check_fields, warning_headers
from octavo.server.generation import Generation
from octavo.server.logprobs import TokenNames
from octavo.server.sampling import sampling_params
from octavo.server.schema import ChatFields, ChatRequest, ResponsesRequest

_LOGPROBS = "message.output_text.logprobs"
_REFUSED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (None,),
    "background": (None, False),
    "truncation": (None, "disabled"),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
}
"""Fields of the API that are not served, with the values that ask for nothing."""


def responses_routes(server: Server) -> APIRouter:
    router = APIRouter(tags=["generate"])
    responses = Responses(server)

    @router.post("/v1/responses")
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answers a text or a conversation with text."""
        return await responses.create(body, request)

    return router


@dataclass(slots=True)
class _Answer:
    """One response on its way: what its events and the final object share."""

    call: Call
    body: ResponsesRequest
    params: SamplingParams
    model: str
    message_id: str
    num_prompt_tokens: int

    def message(self, text: str, logprobs: list[Any], status: str) -> dict[str, Any]:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [self.part(text, logprobs)],
        }

    def part(self, text: str, logprobs: list[Any]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class Responses:
    """The endpoint's answers."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.names = TokenNames(server.thread.tokenizer)

    async def create(self, body: ResponsesRequest, request: Request) -> Response:
        server = self.server
        model = server.check_model(body.model)
        idle = [name for name in ("user", "metadata", "reasoning") if getattr(body, name)]
        notices = check_fields(body, server.settings.strict_fields, [*idle, *(["store"] if body.store else [])])
        for name, harmless in _REFUSED.items():
            if getattr(body, name) not in harmless:
                raise RequestError(f"{name} is not supported by this server", param=name)
        unknown = [item for item in body.include or () if item != _LOGPROBS]
        if unknown:
            raise RequestError(f"include: '{unknown[0][:100]}' is not supported, only '{_LOGPROBS}'", param="include")
        fields = ChatRequest.model_validate(
            {
                "messages": [],
                "temperature": body.temperature,
                "top_p": body.top_p,
                "max_completion_tokens": body.max_output_tokens,
                "logprobs": _LOGPROBS in (body.include or ()),
                "top_logprobs": body.top_logprobs,
                "priority": body.priority,
                "cache_salt": body.cache_salt,
            }
        )
        params = sampling_params(fields, server)
        with Call(server, request, "resp", 1) as call:
            call.headers |= warning_headers(notices)
            form = (body.text or {}).get("format")
            if form is not None:
                if not isinstance(form, dict):
                    raise RequestError("text.format: expected an object", param="text.format")
                if (structured := response_format(form, "text.format")) is not None:
                    params = await constrained(params, structured, server, "text.format")
            ids = await prompt_of(server, ChatFields(messages=_messages(body)))
            generation = await call.submit([(None, ids)], params, fields, stream=bool(body.stream))
            answer = _Answer(call, body, params, model, f"msg_{uuid.uuid4().hex}", len(ids))
            if body.stream:
                return call.stream(self._events(answer, generation))
            return await call.answer(lambda outputs: self._whole(answer, outputs[0]))

    def _whole(self, answer: _Answer, output: RequestOutput) -> dict[str, Any]:
        (completion,) = output.outputs
        logprobs = self._logprobs(completion.token_ids, completion.logprobs, answer.params)
        status = _status(completion.finish_reason)
        return self._object(
            answer, status, [answer.message(completion.text, logprobs, status)], len(completion.token_ids), output
        )

    def _object(
        self,
        answer: _Answer,
        status: str,
        output: list[dict[str, Any]],
        num_tokens: int = 0,
        request: RequestOutput | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        body, params = answer.body, answer.params
        return {
            "id": answer.call.id,
            "object": "response",
            "created_at": answer.call.created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": answer.model,
            "output": output,
            "parallel_tool_calls": bool(body.parallel_tool_calls),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None
            if request is None
            else {
                "input_tokens": answer.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": request.num_cached_tokens},
                "output_tokens": num_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.num_prompt_tokens + num_tokens,
            },
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _logprobs(self, ids: list[int], logprobs: Any, params: SamplingParams) -> list[dict[str, Any]]:
        if logprobs is None:
            return []
        content: list[dict[str, Any]] = self.names.chat(ids, logprobs, params.logprobs or 0, False)["content"]
        return content

    async def _events(self, answer: _Answer, generation: Generation) -> AsyncIterator[bytes]:
        number = -1

        def event(kind: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            return f"event: {kind}\ndata: {dumps({'type': kind, 'sequence_number': number, **fields})}\n\n".encode()

        started = self._object(answer, "in_progress", [])
        place = {"output_index": 0, "item_id": answer.message_id, "content_index": 0}
        yield event("response.created", response=started)
        yield event("response.in_progress", response=started)
        yield event(
            "response.output_item.added",
            output_index=0,
            item={**answer.message("", [], "in_progress"), "content": []},
        )
        yield event("response.content_part.added", part=answer.part("", []), **place)
        texts: list[str] = []
        logprobs: list[dict[str, Any]] = []
        reason, num_tokens = None, 0
        try:
            while chunks := await generation.take():
                for chunk in chunks:
                    found = self._logprobs(chunk.token_ids, chunk.logprobs, answer.params)
                    logprobs += found
                    texts.append(chunk.text)
                    num_tokens += len(chunk.token_ids)
                    reason = chunk.finish_reason or reason
                    if chunk.text:
                        yield event("response.output_text.delta", delta=chunk.text, logprobs=found, **place)
        except Exception as error:
            told = api_error(error)
            failure = {"code": told.code or told.type, "message": told.message}
            yield event("response.failed", response=self._object(answer, "failed", [], error=failure))
            return
        text, status = "".join(texts), _status(reason)
        message = answer.message(text, logprobs, status)
        yield event("response.output_text.done", text=text, logprobs=logprobs, **place)
        yield event("response.content_part.done", part=message["content"][0], **place)
        yield event("response.output_item.done", output_index=0, item=message)
        final = self._object(answer, status, [message], num_tokens, generation.outputs[0])
        yield event(f"response.{status}", response=final)


def _status(reason: str | None) -> str:
    return "incomplete" if reason == "length" else "completed"


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation that `instructions` and `input` are; messages[i] in an error counts the instructions."""
    first = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*first, {"role": "user", "content": body.input}]
    for i, item in enumerate(body.input):
        if (kind := item.get("type", "message")) != "message":
            raise RequestError(f"input[{i}]: items of type {str(kind)[:100]!r} are not supported", param=f"input[{i}]")
    kept = ("role", "content", "name")
    return [*first, *({key: item[key] for key in kept if key in item} for item in body.input)]
