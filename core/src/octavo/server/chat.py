"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.engine.sampling_params import SamplingParams
from octavo.errors import RequestError
from octavo.front.outputs import CompletionOutput, RequestOutput
from octavo.server.call import Call, StreamUsage, head, usage
from octavo.server.completions import truncated
from octavo.server.constraints import install_constraint
from octavo.server.core import Server
from octavo.server.errors import dumps
from octavo.server.fields import check_fields, warning_headers
from octavo.server.generation import Chunk, Generation
from octavo.server.logprobs import TokenNames, prompt_logprobs
from octavo.server.messages import plain_messages
from octavo.server.sampling import sampling_params
from octavo.server.schema import ChatFields, ChatRequest
from octavo.server.sse import DONE
from octavo.server.tools.choice import ToolChoice, ToolStream

ParserFor = Callable[[], ToolStream | None]


def chat_routes(server: Server) -> APIRouter:
    router = APIRouter(tags=["generate"])
    chats = Chats(server)

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation through the model's chat template."""
        return await chats.create(body, request)

    return router


async def prompt_of(server: Server, body: ChatFields) -> list[int]:
    """The ids of a request's conversation."""
    template = server.prompter.chat_template or server.thread.tokenizer.hf_tokenizer.chat_template or ""
    messages = plain_messages(body.messages, "developer" in str(template))
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt contradict each other", param="continue_final_message"
        )
    options: dict[str, Any] = {
        "add_generation_prompt": body.add_generation_prompt is not False and not continues,
        "continue_final_message": continues,
        "tools": (getattr(body, "tool_choice", None) != "none" and body.tools) or None,
    }
    if body.documents is not None:
        options["documents"] = body.documents
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    return await server.prompter.chat(
        messages, add_special_tokens=bool(body.add_special_tokens), template_kwargs=extra, **options
    )


class Chats:
    """The endpoint's answers."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.names = TokenNames(server.thread.tokenizer)

    async def create(self, body: ChatRequest, request: Request) -> Response:
        server = self.server
        model = server.check_model(body.model)
        notices = check_fields(body, server.settings.strict_fields, ["user"] if body.user else [])
        params = sampling_params(body, server)
        tools = ToolChoice.of(body, server.settings.enable_auto_tool_choice)
        parser = lambda: tools.stream(server.tool_parser)  # noqa: E731 - one for each sequence
        with Call(server, request, "chatcmpl", params.n) as call:
            call.headers |= warning_headers(notices)
            params = await install_constraint(body, params, server)
            ids = truncated(await prompt_of(server, body), body.truncate_prompt_tokens, server.max_model_len)
            echo = _final_text(body) if body.echo and body.continue_final_message else ""
            generation = await call.submit([(None, ids)], params, body, stream=bool(body.stream))
            if body.stream:
                return call.stream(self._events(call, generation, body, params, model, echo, parser))
            return await call.answer(lambda outputs: self._whole(call, outputs[0], body, params, model, echo, parser))

    def _whole(
        self,
        call: Call,
        output: RequestOutput,
        body: ChatRequest,
        params: SamplingParams,
        model: str,
        echo: str,
        parser: ParserFor,
    ) -> dict[str, Any]:
        return {
            **head(call, "chat.completion", model),
            "choices": [self._choice(c, body, params, echo, parser()) for c in output.outputs],
            "usage": usage([output], self.server.settings.enable_prompt_tokens_details),
            "prompt_logprobs": None if body.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs or []),
            **({"prompt_token_ids": output.prompt_token_ids} if body.return_token_ids else {}),
        }

    def _choice(
        self,
        completion: CompletionOutput,
        body: ChatRequest,
        params: SamplingParams,
        echo: str,
        parser: ToolStream | None,
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.server.settings.response_role, "content": echo + completion.text}
        reason = completion.finish_reason
        if parser is not None:
            message |= _merged([*parser.feed(completion.text), *parser.finish()], echo)
            if parser.called and reason == "stop":
                reason = "tool_calls"
        choice = {
            "index": completion.index,
            "message": {**message, "refusal": None},
            "logprobs": None
            if completion.logprobs is None
            else self._logprobs(completion.token_ids, completion.logprobs, body, params),
            "finish_reason": reason,
            "stop_reason": completion.stop_reason,
        }
        return {**choice, "token_ids": completion.token_ids} if body.return_token_ids else choice

    def _logprobs(
        self, ids: list[int], logprobs: list[Any], body: ChatRequest, params: SamplingParams
    ) -> dict[str, Any]:
        return self.names.chat(ids, logprobs, params.logprobs or 0, bool(body.return_tokens_as_token_ids))

    async def _events(
        self,
        call: Call,
        generation: Generation,
        body: ChatRequest,
        params: SamplingParams,
        model: str,
        echo: str,
        parser: ParserFor,
    ) -> AsyncIterator[bytes]:
        start = "data: " + dumps(head(call, "chat.completion.chunk", model))[:-1] + ',"choices":[{"index":'
        told = StreamUsage(body, self.server, generation)
        parsers: dict[int, ToolStream | None] = {}
        while chunks := await generation.take():
            events: list[str] = []
            for chunk in chunks:
                told.completion_tokens += len(chunk.token_ids)
                if chunk.index not in parsers:
                    parsers[chunk.index] = parser()
                    delta = dumps({"role": self.server.settings.response_role, "content": echo})
                    first = ""
                    if body.return_token_ids:
                        first += f',"prompt_token_ids":{dumps(generation.requests[0].prompt_token_ids)}'
                    if body.prompt_logprobs is not None:
                        first += (
                            f',"prompt_logprobs":{dumps(prompt_logprobs(generation.outputs[0].prompt_logprobs or []))}'
                        )
                    events.append(
                        f'{start}{chunk.index},"delta":{delta},"logprobs":null,"finish_reason":null}}]'
                        f"{first}{told.part()}}}\n\n"
                    )
                deltas, reason = _deltas(chunk, parsers[chunk.index])
                logprobs = "null"
                if chunk.logprobs:
                    logprobs = dumps(self._logprobs(chunk.token_ids, chunk.logprobs, body, params))
                for delta in deltas[:-1]:
                    events.append(
                        f'{start}{chunk.index},"delta":{delta},"logprobs":null,"finish_reason":null}}]{told.part()}}}\n\n'
                    )
                if not deltas and not chunk.logprobs and not body.return_token_ids:
                    continue  # a tool parser holds the text back
                ends = "null" if reason is None else f'"{reason}"'
                why = "" if chunk.stop_reason is None else f',"stop_reason":{dumps(chunk.stop_reason)}'
                ids = f',"token_ids":{dumps(chunk.token_ids)}' if body.return_token_ids else ""
                events.append(
                    f'{start}{chunk.index},"delta":{deltas[-1] if deltas else "{}"},"logprobs":{logprobs},'
                    f'"finish_reason":{ends}{why}{ids}}}]{told.part()}}}\n\n'
                )
            if events:
                yield "".join(events).encode()
        if told.at_end:
            last = {**head(call, "chat.completion.chunk", model), "choices": [], "usage": told.total()}
            yield f"data: {dumps(last)}\n\n".encode()
        yield DONE


def _deltas(chunk: Chunk, parser: ToolStream | None) -> tuple[list[str], str | None]:
    """The deltas of a chunk as JSON, and its finish reason. None while text is held back, one at least at the end."""
    reason = chunk.finish_reason
    if parser is None:
        return [f'{{"content":{dumps(chunk.text)}}}' if chunk.text else "{}"], reason
    found = parser.feed(chunk.text) if chunk.text else []
    if reason is not None:
        found += parser.finish()
        if parser.called and reason == "stop":
            reason = "tool_calls"
    return [dumps(delta) for delta in found] or (["{}"] if reason is not None else []), reason


def _merged(deltas: list[dict[str, Any]], echo: str) -> dict[str, Any]:
    """The message that a stream of deltas adds up to; content is None where there are only calls."""
    text = echo + "".join(delta.get("content") or "" for delta in deltas)
    calls: dict[int, dict[str, Any]] = {}
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        call = calls.setdefault(
            part["index"], {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = part.get("id") or call["id"]
        for key, value in part.get("function", {}).items():
            call["function"][key] += value or ""
    if not calls:
        return {"content": text}
    return {"content": text or None, "tool_calls": [calls[index] for index in sorted(calls)]}


def _final_text(body: ChatRequest) -> str:
    content = body.messages[-1].get("content")
    return content if isinstance(content, str) else ""
