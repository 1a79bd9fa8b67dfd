"""One call on its way through the server: admission, submission, the answer, and giving everything back at its end."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.sampling_params import SamplingParams
from octavo.front.outputs import RequestOutput
from octavo.server.core import Server
from octavo.server.errors import JSONReply, dumps
from octavo.server.generation import EngineRequest, Generation
from octavo.server.schema import SamplingFields
from octavo.server.sse import ClientLeft, EventStream, unless_left

logger = logging.getLogger(__name__)
_CLIENT_CLOSED = 499  # nginx's number for a client that left; nobody reads it, the log does


class Call:
    """A call that generates. Use as `with Call(...) as call`: unless `stream` takes it over, it ends with the block."""

    def __init__(self, server: Server, request: Request, prefix: str, sequences: int) -> None:
        self.server, self.request = server, request
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.headers: dict[str, str] = {}
        self.generation: Generation | None = None
        self._ticket = server.admission.enter(sequences)
        self._sequences = sequences
        self._handed_over = False

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._handed_over:
            self.close()

    def close(self) -> None:
        """Aborts what still runs and frees its place in the queue. May be called twice."""
        if self.generation is not None:
            self.generation.close()
        self._ticket.close()

    async def submit(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        params: SamplingParams,
        fields: Any,
        *,
        stream: bool,
    ) -> Generation:
        """Queues the prompts, text and ids of each."""
        server, state = self.server, self.request.scope["state"]
        self.server.admission.take_tokens(self._ticket, sum(len(ids) for _, ids in prompts))
        requests = [
            EngineRequest(
                f"{self.id}-{i}",
                ids,
                params,
                prompt=text,
                priority=fields.priority or 0,
                cache_salt=cache_salt(state["tenant"], fields.cache_salt),
                arrival_time=state["arrival_time"],
            )
            for i, (text, ids) in enumerate(prompts)
        ]
        self.generation = await server.thread.submit(requests, stream=stream)
        sizes = [len(ids) for _, ids in prompts]
        self.generation.on_started = lambda index: self._ticket.started(params.n, sizes[index])
        self._log(requests, params)
        return self.generation

    async def answer(self, build: Callable[[list[RequestOutput]], dict[str, Any]]) -> Response:
        """The whole answer, made of all outputs once they are complete."""
        assert self.generation is not None
        try:
            outputs = await unless_left(self.request, self.generation.wait())
        except ClientLeft:
            return Response(status_code=_CLIENT_CLOSED)
        return JSONReply(build(outputs), headers=self.headers)

    def stream(self, events: AsyncIterator[bytes]) -> Response:
        """The answer as events; the call ends when they do or the client leaves."""
        self._handed_over = True
        return EventStream(events, self.close, self.headers)

    def _log(self, requests: Sequence[EngineRequest], params: SamplingParams) -> None:
        """One JSON line for those who want to know who asks what: sizes and settings, no text."""
        if not self.server.settings.enable_log_requests:
            return
        given = params.model_dump(mode="json", exclude_defaults=True)
        for secret in ("stop", "bad_words", "structured_outputs", "logit_bias", "allowed_token_ids"):
            if secret in given:
                given[secret] = "given"
        line = {
            "request_id": self.request.scope["state"]["request_id"],
            "id": self.id,
            "path": self.request.url.path,
            "prompt_tokens": [len(r.prompt_token_ids) for r in requests],
            "params": given,
        }
        logger.info("request %s", dumps(line))


def cache_salt(tenant: str | None, salt: str | None) -> str | None:
    """What keeps prefixes apart: by API key where there are several, and by the client's own salt within."""
    return salt if tenant is None else f"{tenant}:{salt or ''}"


def usage(outputs: Sequence[RequestOutput], details: bool) -> dict[str, Any]:
    """Token counts of a complete call."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    return usage_of(prompt, completion, sum(o.num_cached_tokens for o in outputs) if details else None)


def usage_of(prompt: int, completion: int, cached: int | None) -> dict[str, Any]:
    """Token counts; `cached` of the prompt's were found in the prefix cache."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return counts


class StreamUsage:
    """What a stream tells of usage: at its end, with every event, or not at all."""

    def __init__(self, fields: SamplingFields, server: Server, generation: Generation) -> None:
        options = fields.stream_options
        self.at_end = server.settings.enable_force_include_usage or bool(options and options.include_usage)
        self._always = self.at_end and bool(options and options.continuous_usage_stats)
        self._details = server.settings.enable_prompt_tokens_details
        self._generation = generation
        self._prompt = sum(len(r.prompt_token_ids) for r in generation.requests)
        self.completion_tokens = 0

    def total(self) -> dict[str, Any]:
        cached = sum(output.num_cached_tokens for output in self._generation.outputs)
        return usage_of(self._prompt, self.completion_tokens, cached if self._details else None)

    def part(self) -> str:
        """The piece of JSON that each event carries."""
        if not self.at_end:
            return ""
        return f',"usage":{dumps(self.total())}' if self._always else ',"usage":null'


def head(call: Call, kind: str, model: str) -> Mapping[str, Any]:
    """How each answer and each event begins."""
    return {"id": call.id, "object": kind, "created": call.created, "model": model}
