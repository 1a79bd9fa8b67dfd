"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.engine.sampling_params import SamplingParams
from octavo.errors import RequestError
from octavo.front.outputs import CompletionOutput, RequestOutput
from octavo.server.call import Call, StreamUsage, head, usage
from octavo.server.constraints import install_constraint
from octavo.server.core import Server
from octavo.server.errors import dumps
from octavo.server.fields import check_fields, warning_headers
from octavo.server.generation import Chunk, Generation
from octavo.server.logprobs import TextPlace, TokenNames, prompt_logprobs
from octavo.server.sampling import sampling_params
from octavo.server.schema import CompletionRequest
from octavo.server.sse import DONE


def completion_routes(server: Server) -> APIRouter:
    router = APIRouter(tags=["generate"])
    completions = Completions(server)

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Completes one prompt, or each of several: text or token ids."""
        return await completions.create(body, request)

    return router


class Completions:
    """The endpoint's answers."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.names = TokenNames(server.thread.tokenizer)

    async def create(self, body: CompletionRequest, request: Request) -> Response:
        server = self.server
        model = server.check_model(body.model)
        notices = check_fields(body, server.settings.strict_fields, ["user"] if body.user else [])
        params = sampling_params(body, server)
        given = _listed(body.prompt, server.settings.max_prompts_per_request)
        with Call(server, request, "cmpl", len(given) * params.n) as call:
            call.headers |= warning_headers(notices)
            params = await install_constraint(body, params, server)
            prompts = await asyncio.gather(*(self._encode(prompt, body) for prompt in given))
            generation = await call.submit(prompts, params, body, stream=bool(body.stream))
            echoes = [await self._echo(text, ids) for text, ids in prompts] if body.echo else None
            if body.stream:
                return call.stream(self._events(call, generation, body, params, model, echoes))
            return await call.answer(lambda outputs: self._whole(call, outputs, body, params, model, echoes))

    async def _encode(self, prompt: str | list[int], body: CompletionRequest) -> tuple[str | None, list[int]]:
        keep = body.truncate_prompt_tokens
        text, ids = None, prompt
        if isinstance(prompt, str):
            special = body.add_special_tokens is not False
            text = prompt
            ids = await self.server.prompter.encode(prompt, add_special_tokens=special, bounded=keep is None)
        assert isinstance(ids, list)
        return text, truncated(ids, keep, self.server.max_model_len)

    async def _echo(self, text: str | None, ids: list[int]) -> str:
        return await self.server.prompter.decode(ids, skip_special_tokens=False) if text is None else text

    def _whole(
        self,
        call: Call,
        outputs: list[RequestOutput],
        body: CompletionRequest,
        params: SamplingParams,
        model: str,
        echoes: list[str] | None,
    ) -> dict[str, Any]:
        choices = []
        scored_only = body.max_tokens == 0
        for i, output in enumerate(outputs):
            for completion in output.outputs:
                if scored_only:
                    completion = CompletionOutput(completion.index, logprobs=[], finish_reason="length")
                text = completion.text
                ids, logprobs = completion.token_ids, completion.logprobs
                choice = {
                    "index": i * params.n + completion.index,
                    "text": text,
                    "logprobs": None,
                    "finish_reason": completion.finish_reason,
                    "stop_reason": completion.stop_reason,
                    "prompt_logprobs": None
                    if body.prompt_logprobs is None
                    else prompt_logprobs(output.prompt_logprobs or []),
                }
                before: list[Any] = []
                if echoes is not None:
                    choice["text"] = echoes[i] + text
                    before = list(zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False))
                if logprobs is not None and params.logprobs is not None:
                    place = TextPlace(params.skip_special_tokens)
                    both = [*before, *zip(ids, logprobs, strict=True)]
                    choice["logprobs"] = self._logprobs(
                        [t for t, _ in both], [lp for _, lp in both], body, params, place
                    )
                if body.return_token_ids:
                    choice |= {"token_ids": ids, "prompt_token_ids": output.prompt_token_ids}
                choices.append(choice)
        counts = usage(outputs, self.server.settings.enable_prompt_tokens_details)
        if scored_only:
            counts |= {"completion_tokens": 0, "total_tokens": counts["prompt_tokens"]}
        return {**head(call, "text_completion", model), "choices": choices, "usage": counts}

    def _logprobs(
        self, ids: list[int], logprobs: list[Any], body: CompletionRequest, params: SamplingParams, place: TextPlace
    ) -> dict[str, Any]:
        return self.names.completion(ids, logprobs, params.logprobs or 0, bool(body.return_tokens_as_token_ids), place)

    async def _events(
        self,
        call: Call,
        generation: Generation,
        body: CompletionRequest,
        params: SamplingParams,
        model: str,
        echoes: list[str] | None,
    ) -> AsyncIterator[bytes]:
        start = dumps(head(call, "text_completion", model))[:-1] + ',"choices":[{"index":'
        told = StreamUsage(body, self.server, generation)
        places: dict[int, TextPlace] = {}
        scored_only = body.max_tokens == 0
        while chunks := await generation.take():
            events = []
            for chunk in chunks:
                choice = chunk.prompt_index * params.n + chunk.index
                if scored_only:
                    chunk = Chunk(chunk.prompt_index, chunk.index, "", [], [], "length")
                told.completion_tokens += len(chunk.token_ids)
                tail = ""
                if choice not in places:
                    places[choice] = TextPlace(params.skip_special_tokens)
                    output = generation.outputs[chunk.prompt_index]
                    if body.return_token_ids:
                        tail += f',"prompt_token_ids":{dumps(output.prompt_token_ids)}'
                    if body.prompt_logprobs is not None:
                        tail += f',"prompt_logprobs":{dumps(prompt_logprobs(output.prompt_logprobs or []))}'
                    if echoes is not None:
                        echo = echoes[chunk.prompt_index]
                        logprobs = "null"
                        if params.logprobs is not None:
                            scored = list(output.prompt_logprobs or [])
                            named = self._logprobs(output.prompt_token_ids, scored, body, params, places[choice])
                            logprobs = dumps(named)
                        events.append(
                            f'data: {start}{choice},"text":{dumps(echo)},"logprobs":{logprobs},"finish_reason":null,'
                            f'"stop_reason":null}}]{told.part()}}}\n\n'
                        )
                logprobs = "null"
                if chunk.logprobs is not None and params.logprobs is not None:
                    named = self._logprobs(chunk.token_ids, chunk.logprobs, body, params, places[choice])
                    logprobs = dumps(named)
                if body.return_token_ids:
                    tail += f',"token_ids":{dumps(chunk.token_ids)}'
                ends = "null" if chunk.finish_reason is None else f'"{chunk.finish_reason}"'
                why = "null" if chunk.stop_reason is None else dumps(chunk.stop_reason)
                events.append(
                    f'data: {start}{choice},"text":{dumps(chunk.text)},"logprobs":{logprobs},"finish_reason":{ends},'
                    f'"stop_reason":{why}{tail}}}]{told.part()}}}\n\n'
                )
            yield "".join(events).encode()
        if told.at_end:
            yield (
                b"data: "
                + dumps({**head(call, "text_completion", model), "choices": [], "usage": told.total()}).encode()
                + b"\n\n"
            )
        yield DONE


def truncated(ids: list[int], keep: int | None, max_model_len: int) -> list[int]:
    """The last `keep` tokens of a prompt; -1: as many as the model takes."""
    if keep is None:
        return ids
    if keep < -1 or keep == 0:
        raise RequestError(
            f"truncate_prompt_tokens must be 1 or more, or -1, got {keep}", param="truncate_prompt_tokens"
        )
    return ids[-(max_model_len - 1 if keep == -1 else keep) :]


def _listed(prompt: Any, most: int) -> list[str | list[int]]:
    listed = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if len(listed) > most:
        raise RequestError(f"{len(listed)} prompts; at most {most} are taken (max_prompts_per_request)", param="prompt")
    return listed
