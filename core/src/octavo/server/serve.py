"""`octavo serve`: loads a model, listens, and ends in good order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.front.llm import LLM
from octavo.server.app import make_app
from octavo.server.core import Server
from octavo.server.engine_thread import EngineThread
from octavo.server.errors import APIError
from octavo.server.settings import ServerSettings

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.001
"""The engine's thread hands the interpreter over this often at most: at Python's 5 ms the event loop waits too long for it."""
_LAST_WORDS_S = 5
"""After the time to drain is up, streams have this long to send their last event."""


def serve(config: EngineConfig, settings: ServerSettings) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    sock = listen(settings)  # before the weights: a port that is taken must not cost the minutes that those take
    with contextlib.closing(sock):
        llm = LLM(config)
        thread = EngineThread(llm.engine, llm.tokenizer)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            app = make_app(thread, settings)
            http = HTTPServer(uvicorn_config(app, settings), app.state.server)
            gc.collect()
            gc.freeze()  # what was loaded stays: a full collection that walked it would stop everybody for long
            thread.start()
            logger.info("settings: %s", _told(settings))
            http.run(sockets=[sock])
        finally:
            thread.stop()
            llm.shutdown()
    return 1 if thread.failure is not None else 0


def uvicorn_config(app: Any, settings: ServerSettings) -> uvicorn.Config:
    """uvicorn's own settings. Its parser is h11 whatever else is installed: limits and refusals are then ours."""
    try:
        config = uvicorn.Config(
            app,
            http=EnvelopeProtocol,
            ws="none",
            log_level=settings.uvicorn_log_level,
            access_log=not settings.disable_uvicorn_access_log,
            h11_max_incomplete_event_size=settings.h11_max_incomplete_event_size,
            timeout_keep_alive=settings.timeout_keep_alive,
            timeout_graceful_shutdown=int(settings.shutdown_timeout) + 2 * _LAST_WORDS_S,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
            ssl_ca_certs=settings.ssl_ca_certs,
            ssl_cert_reqs=settings.ssl_cert_reqs,
            server_header=False,
        )
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"--ssl-certfile {settings.ssl_certfile}: {error}") from None
    return config


class HTTPServer(uvicorn.Server):
    """uvicorn, with one timeout for a graceful end.

    From the first SIGTERM or SIGINT on nothing new is accepted, and what runs may end. When `shutdown_timeout` is over, or a
    second signal comes, what still runs ends with an error that says so.
    """

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._server = server
        self._drain: asyncio.TimerHandle | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._server.draining:
            self._end_all()
        self._server.draining = self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            logger.info("%s is served at %s", ", ".join(self._server.names), _place(self._server.settings, sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._server.draining = True
        self._drain = asyncio.get_running_loop().call_later(self._server.settings.shutdown_timeout, self._end_all)
        await super().shutdown(sockets)
        self._drain.cancel()

    def _end_all(self) -> None:
        self._server.thread.fail_all("the server is shutting down")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that was heeded is not raised again: the exit code tells."""
        in_main = threading.current_thread() is threading.main_thread()  # no other may listen to signals
        handled = (signal.SIGINT, signal.SIGTERM) if in_main else ()
        before = {sig: signal.signal(sig, self.handle_exit) for sig in handled}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


class EnvelopeProtocol(H11Protocol):
    """HTTP whose refusals of malformed requests are in the envelope too, 431 for headers that are too large."""

    def send_400_response(self, msg: str) -> None:
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        text = (
            "the headers are too large (h11_max_incomplete_event_size)" if status == 431 else "not a valid HTTP request"
        )
        body = APIError(text, status).encoded()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        with contextlib.suppress(h11.LocalProtocolError):  # an answer is under way already
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def listen(settings: ServerSettings) -> socket.socket:
    """The socket to accept from. Raises ConfigError where it cannot be had."""
    host = settings.host or "127.0.0.1"
    if settings.uds is not None:
        sock, shown = socket.socket(socket.AF_UNIX), f"--uds {settings.uds}"
    else:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shown = f"--host {host} --port {settings.port}"
    try:
        sock.bind(settings.uds or (host, settings.port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"{shown}: cannot listen there: {error.strerror or error}") from None
    return sock


def _place(settings: ServerSettings, sock: socket.socket) -> str:
    """Where clients find the server."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = sock.getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _told(settings: ServerSettings) -> str:
    """The settings that are not defaults, secrets hidden."""
    given = settings.model_dump(mode="json", exclude_defaults=True)
    return ", ".join(f"{name}={value}" for name, value in given.items()) or "defaults"
