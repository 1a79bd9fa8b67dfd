"""Servers for tests: the whole thing behind a real socket, in this process, over a tiny or a scripted model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from octavo import LLM
from octavo.server.app import make_app
from octavo.server.core import Server
from octavo.server.engine_thread import EngineThread
from octavo.server.serve import HTTPServer, listen, uvicorn_config
from octavo.server.settings import ServerSettings


@dataclass
class Running:
    """A server that listens."""

    url: str
    llm: LLM
    thread: EngineThread
    server: Server
    http: HTTPServer
    key: str = "none"
    _open: list[Any] = field(default_factory=list)

    def client(self, **options: Any) -> openai.OpenAI:
        """The official SDK, without retries."""
        client = openai.OpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": self.key, "max_retries": 0, "timeout": 60, **options}
        )
        self._open.append(client)
        return client

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": self.key, "max_retries": 0, "timeout": 60, **options}
        )

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, **{"timeout": 60, **options})

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, **{"timeout": 60, **({} if body is None else {"json": body}), **options})

    def events(self, path: str, body: Any) -> list[Any]:
        """The data of all events of a stream, as JSON where it is some."""
        with httpx.stream("POST", self.url + path, json=body, timeout=60) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def idle(self) -> bool:
        """Nothing runs, waits, or is held."""
        engine, admission = self.llm.engine, self.server.admission
        pool = engine.scheduler.pool
        return (
            self.thread.idle
            and len(engine.scheduler) == 0
            and pool.num_free == pool.num_blocks
            and not self.thread.processor.has_unfinished
            and admission.waiting == admission.running == admission.tokens == 0
        )


def wait_for(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    """Waits until something is true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def running_server(model: Any, *, engine: dict[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    """Serves a model: an LLM, or a folder with settings for the `engine`. Checks at the end that nothing was left behind."""
    llm = model if isinstance(model, LLM) else LLM(str(model), **{"num_blocks_override": 256, **(engine or {})})
    server_settings = ServerSettings(**{"port": 0, "disable_log_stats": True, **settings})
    thread = EngineThread(llm.engine, llm.tokenizer)
    app = make_app(thread, server_settings)
    sock = listen(server_settings)
    http = HTTPServer(uvicorn_config(app, server_settings), app.state.server)
    thread.start()
    listener = threading.Thread(target=http.run, kwargs={"sockets": [sock]}, daemon=True)
    listener.start()
    wait_for(lambda: http.started)
    keys = server_settings.api_key
    scheme = "https" if server_settings.ssl_certfile else "http"
    running = Running(f"{scheme}://127.0.0.1:{sock.getsockname()[1]}", llm, thread, app.state.server, http)
    running.key = keys[0].get_secret_value() if keys else "none"
    try:
        yield running
        if thread.alive:
            wait_for(running.idle)
    finally:
        for client in running._open:
            client.close()
        http.should_exit = True
        listener.join(30)
        thread.stop()
        sock.close()
        llm.shutdown()
        assert not listener.is_alive(), "the server did not stop"
