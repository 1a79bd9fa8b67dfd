"""The HTTP application: routes, middleware, and what runs beside them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from octavo import __version__
from octavo.server.chat import chat_routes
from octavo.server.completions import completion_routes
from octavo.server.core import Server, make_server
from octavo.server.engine_thread import EngineThread
from octavo.server.errors import install_error_handlers
from octavo.server.fields import HEADER
from octavo.server.gate import Gate
from octavo.server.operations import operation_routes
from octavo.server.operators import install as install_operators
from octavo.server.responses import responses_routes
from octavo.server.settings import ServerSettings


def make_app(thread: EngineThread, settings: ServerSettings) -> FastAPI:
    """An application over an engine thread that has not started yet; `app.state.server` holds its parts."""
    server = make_server(thread, settings)
    docs = None if settings.disable_fastapi_docs else "/docs"
    app = FastAPI(
        title="octavo",
        version=__version__,
        description="An OpenAI-compatible server.",
        lifespan=_lifespan,
        openapi_url=None if settings.disable_fastapi_docs else "/openapi.json",
        docs_url=docs,
        redoc_url=None,
        root_path=settings.root_path,
    )
    app.state.server = server
    for routes in (completion_routes, chat_routes, responses_routes, operation_routes):
        app.include_router(routes(server))
    install_operators(app, thread, settings, thread.engine.config)
    install_error_handlers(app)
    app.add_middleware(Gate, server=server)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_credentials=settings.allow_credentials,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            expose_headers=["X-Request-Id", "Retry-After", HEADER],
        )
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    server: Server = app.state.server
    tasks = [asyncio.ensure_future(work()) for work in server.background]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    server.prompter.close()
