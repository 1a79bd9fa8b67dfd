"""Routes beside generation: models, tokenizing, probes, and the prefix cache."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from octavo import __version__
from octavo.errors import RequestError
from octavo.server.chat import prompt_of
from octavo.server.core import Server
from octavo.server.errors import APIError, JSONReply
from octavo.server.fields import check_fields, warning_headers
from octavo.server.schema import ChatFields, DetokenizeRequest, TokenizeRequest


def operation_routes(server: Server) -> APIRouter:
    router = APIRouter(tags=["operate"])

    @router.get("/v1/models")
    async def list_models() -> Response:
        """The one model, under each of its names."""
        return JSONReply({"object": "list", "data": [model_card(server, name) for name in server.names]})

    @router.get("/v1/models/{name:path}")
    async def show_model(name: str) -> Response:
        """One name of the model."""
        return JSONReply(model_card(server, server.check_model(name)))

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a text, or of a conversation by the chat template."""
        server.check_model(body.model)
        notices = check_fields(body, server.settings.strict_fields)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give prompt or messages, one of them", param="prompt")
        if body.messages is not None:
            fields = {name: getattr(body, name) for name in ChatFields.model_fields if name in body.model_fields_set}
            ids = await prompt_of(server, ChatFields(**fields))
        else:
            special = body.add_special_tokens is not False
            ids = await server.prompter.encode(body.prompt or "", add_special_tokens=special, bounded=False)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": server.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = server.thread.tokenizer.hf_tokenizer.convert_ids_to_tokens(ids)
        return JSONReply(answer, headers=warning_headers(notices))

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens included."""
        server.check_model(body.model)
        notices = check_fields(body, server.settings.strict_fields)
        size = server.thread.engine.model_info.vocab_size
        if bad := [token for token in body.tokens if not 0 <= token < size]:
            raise RequestError(f"tokens: token id {bad[0]} is outside the vocabulary (0 to {size - 1})", param="tokens")
        text = await server.prompter.decode(body.tokens, skip_special_tokens=False)
        return JSONReply({"prompt": text}, headers=warning_headers(notices))

    @router.get("/health")
    async def health() -> Response:
        """200 while the engine makes progress, or has nothing to do; 503 once it has stopped or stalled."""
        check_health(server)
        return Response()

    @router.get("/ready")
    async def ready() -> Response:
        """200 while new requests are welcome: healthy, and not shutting down."""
        check_health(server)
        if server.draining:
            raise APIError("the server is shutting down", 503)
        return Response()

    @router.get("/version")
    async def version() -> Response:
        """octavo's version."""
        return JSONReply({"version": __version__})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Forgets all cached prefixes; running requests keep their blocks."""
        await server.thread.call(lambda engine: engine.reset_prefix_cache())
        return Response()

    return router


def check_health(server: Server) -> None:
    """APIError 503 where the engine's thread has ended, or has had work for long without finishing a step."""
    thread, limit = server.thread, server.settings.health_timeout
    if not thread.alive:
        why = f": {type(thread.failure).__name__}" if thread.failure is not None else ""
        raise APIError(f"the engine has stopped{why}", 503, code="engine_dead")
    if (stalled := thread.stalled_s) > limit:
        raise APIError(
            f"the engine has work, and has finished no step for {stalled:.0f} s (health_timeout {limit:g} s)",
            503,
            code="engine_stalled",
        )


def model_card(server: Server, name: str) -> dict[str, Any]:
    """A model as /v1/models shows it."""
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "octavo",
        "root": server.names[0],
        "parent": None,
        "max_model_len": server.max_model_len,
    }
