"""What goes wrong, in the envelope of the OpenAI API: {"error": {"message", "type", "param", "code"}}, everywhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from octavo.errors import OctavoError, RequestError
from octavo.server.generation import EngineUnavailable, GenerationFailed

logger = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 429: "queue_full", 503: "unavailable"}
_MAX_INPUT = 100  # characters of a refused value that are shown


def dumps(value: Any) -> str:
    """Compact JSON in ASCII: no text, whatever half a surrogate pair is in it, fails on its way out."""
    return json.dumps(value, separators=(",", ":"))


class JSONReply(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content).encode()


class APIError(Exception):
    """An error for the client. `type` and `code` follow from the status unless given."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param = message, status, param
        self.type = type or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.code = code or _CODES.get(status)
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        return dumps(self.body).encode()


def api_error(error: Exception) -> APIError:
    """Any exception as what the client may know of it. What is not meant for people is logged, and told by its type alone."""
    match error:
        case APIError():
            return error
        case RequestError():
            return APIError(str(error), error.http_status, param=error.param)
        case EngineUnavailable():
            return APIError(str(error), 503)
        case GenerationFailed():
            return APIError(str(error), 500, code="generation_failed")
        case OctavoError():
            return APIError(str(error), error.http_status)
        case HTTPException():
            return APIError(str(error.detail), error.status_code, headers=error.headers)
        case RequestValidationError():
            return _validation_error(error)
    logger.error("a request failed with %s", type(error).__name__, exc_info=error)
    return APIError(f"internal error: {type(error).__name__}", 500)


def _validation_error(error: RequestValidationError) -> APIError:
    """The first of pydantic's findings, by the name of the field as the client wrote it."""
    first = error.errors()[0]
    where = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return APIError("the body is not JSON", code="invalid_json")
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".") or None
    message = str(first["msg"]).removeprefix("Value error, ")
    found = first.get("input")
    shown = "" if found is None or isinstance(found, dict | list) or first["type"] == "missing" else f", got {found!r}"
    if len(shown) > _MAX_INPUT:
        shown = shown[:_MAX_INPUT] + "..."
    return APIError(f"{name}: {message}{shown}" if name else message, param=name)


def install_error_handlers(app: FastAPI) -> None:
    """Has the app answer every exception in the envelope."""

    async def answer(request: Request, error: Exception) -> JSONReply:
        told = api_error(error)
        if hasattr(request.app.state, "server"):
            request.app.state.server.rejections[told.code or told.type] += 1
        return JSONReply(told.body, told.status, told.headers)

    for kind in (
        APIError,
        OctavoError,
        EngineUnavailable,
        GenerationFailed,
        HTTPException,
        RequestValidationError,
        Exception,
    ):
        app.add_exception_handler(kind, answer)
