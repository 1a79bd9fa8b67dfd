"""What every HTTP request passes before the app sees it: its id, the key, the size and pace of its body.

Denied by default: a path that is not in OPEN_PATHS, letter for letter, needs the key, so a route that is added later cannot be
forgotten. No route is matched here.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
import uuid
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.errors import APIError, api_error

if TYPE_CHECKING:
    from octavo.server.core import Server

OPEN_PATHS = frozenset(["/", "/health", "/ready"])
"""Served to GET and HEAD without a key: the probes, and the page, which holds no data of its own."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """ASGI middleware; see the module's first line. Sets `scope["state"]` to request_id, tenant and arrival_time."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app, self.server, self.settings = app, server, server.settings
        self._keys = [hashlib.sha256(key.get_secret_value().encode()).digest() for key in self.settings.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, tenant=None, arrival_time=time.monotonic())
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self.settings.enable_request_id_headers:
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._check_key(scope, headers)
            if scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
                if self.server.draining:
                    raise APIError(
                        "the server is shutting down", 503, headers={"Retry-After": "5", "Connection": "close"}
                    )
                receive = await self._read_body(headers, receive)
            await self.app(scope, receive, answer)
        except Exception as error:  # the app's own error handler has answered already, in nearly all cases
            if not started:
                await _send_error(api_error(error), answer)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        if not self._keys:
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._keys]  # all, so that time tells nothing
        if scheme.lower() != "bearer" or not any(matches):
            self.server.rejections["unauthorised"] += 1
            what = "the API key is wrong" if key else "this server needs an API key: send 'Authorization: Bearer KEY'"
            raise APIError(what, 401, headers={"WWW-Authenticate": "Bearer"})
        if len(self._keys) > 1:
            scope["state"]["tenant"] = digest.hex()[:16]

    async def _read_body(self, headers: Headers, receive: Receive) -> Receive:
        """Reads the whole body within its limits, and returns a `receive` that has it."""
        limit, length = self.settings.max_body_bytes, headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise self._too_large(f"{length} bytes")
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.settings.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise APIError(
                            "the client left before it had sent all of the request", 400, code="disconnected"
                        )
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise self._too_large(f"more than {limit} bytes")
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise APIError(
                f"the body did not arrive within {self.settings.body_timeout:g} s (body_timeout)",
                408,
                headers={"Connection": "close"},
            ) from None
        body: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def replay() -> Message:
            return body.pop() if body else await receive()

        return replay

    def _too_large(self, found: str) -> APIError:
        limit = self.settings.max_body_bytes
        return APIError(
            f"the body has {found}, at most {limit} are taken (max_body_bytes)",
            413,
            code="body_too_large",
            headers={"Connection": "close"},
        )


async def _send_error(error: APIError, send: Send) -> None:
    body = error.encoded()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})
