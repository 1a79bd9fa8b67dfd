"""Routes for whoever runs the server: metrics, the kernel table, the engine's state, and a page that shows them.

All but the page read the engine from a worker thread while it steps (octavo.engine.view), so a long step delays no answer.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from dataclasses import asdict
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Query, Response
from prometheus_client.exposition import choose_encoder

from octavo import __version__
from octavo.engine.view import batch_view, block_holders, block_map, block_runs
from octavo.front.plan_report import kernel_rows
from octavo.server.metrics import Metrics, seconds_as_columns

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.server.engine_thread import EngineThread
    from octavo.server.settings import ServerSettings

MAX_CELLS, MAX_ROWS, MAX_BLOCKS_ASKED = 8192, 512, 1 << 20


def install(app: FastAPI, thread: EngineThread, settings: ServerSettings, config: EngineConfig) -> None:
    """Adds the routes to an app, and metrics to its engine thread, which has not started yet."""
    server = app.state.server
    name = server.names[0]
    metrics = Metrics(thread.engine, name, thread.stats, server.rejections)
    server.metrics = metrics
    thread.observers.append(metrics)
    if not settings.disable_log_stats:
        server.background.append(lambda: metrics.log_forever(settings.log_stats_interval))
    app.include_router(operator_routes(thread, metrics, name))


def operator_routes(thread: EngineThread, metrics: Metrics, model_name: str) -> APIRouter:
    """The routes over one engine thread."""
    router = APIRouter(tags=["operators"])
    engine = thread.engine

    @router.get("/", include_in_schema=False)
    def show_page() -> Response:
        """The page. It holds no data, so it needs no key; what it fetches does."""
        body, policy = page()
        headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
        return Response(body, media_type="text/html; charset=utf-8", headers=headers)

    @router.get("/metrics", response_class=Response)
    def read_metrics(accept: Annotated[str, Header()] = "") -> Response:
        """All metrics, in the Prometheus text format or as OpenMetrics."""
        encode, content_type = choose_encoder(accept)
        return Response(encode(metrics.registry), headers={"Content-Type": content_type})

    @router.get("/v1/octavo/kernels")
    def read_kernels() -> Response:
        """Which kernel computes each layer, and why no better one does: `rows` as printed by inspect, `linears` one by one."""
        return _json(kernels(thread, model_name))

    @router.get("/v1/octavo/stats")
    def read_stats(
        cells: Annotated[int, Query(ge=1, le=MAX_CELLS, description="Most cells of the map of KV blocks.")] = 1024,
        rows: Annotated[int, Query(ge=0, le=MAX_ROWS, description="Most running, and most waiting, requests.")] = 64,
        since: Annotated[int, Query(ge=-1, description="Second after which the history is wanted.")] = -1,
    ) -> Response:
        """The engine now, its counters, its KV blocks, its requests, and its last minutes second by second."""
        now = time.monotonic()
        stats, scheduler, config = thread.stats(), engine.scheduler, engine.config
        return _json(
            {
                "model": model_name,
                "version": __version__,
                "now": round(now - metrics.history.started, 3),
                "stalled_s": round(thread.stalled_s, 3),
                "engine": {
                    **asdict(stats),
                    "kv_usage": stats.kv_usage,
                    "prefix_hit_rate": stats.prefix_hit_rate,
                    "kv_utilization": stats.kv.utilization,
                    "kv_sharing": stats.kv.sharing,
                    "max_num_seqs": config.max_num_seqs,
                    "max_num_batched_tokens": config.max_num_batched_tokens,
                    "max_model_len": engine.model_info.max_model_len,
                },
                "requests": {"finished": dict(metrics.finished), "rejected": dict(metrics.rejections)},
                "tokens": {"prompt": metrics.prompt_tokens, "generation": metrics.generation_tokens},
                "latency": metrics.latency(now),
                "batch": asdict(batch_view(scheduler, rows)),
                "blocks": {
                    "device": asdict(block_map(scheduler.pool, cells)),
                    "host": asdict(block_map(scheduler.swap.host, cells)),
                },
                "history": seconds_as_columns(metrics, now, since),
            }
        )

    @router.get("/v1/octavo/blocks")
    def read_blocks(
        first: Annotated[int, Query(ge=0, description="First of the blocks asked for.")] = 0,
        last: Annotated[int | None, Query(ge=0, description="Last of them. Default: the first.")] = None,
        host: Annotated[bool, Query(description="Blocks of the host instead of the device's.")] = False,
        request_id: Annotated[str | None, Query(description="Ask for the blocks of this request instead.")] = None,
    ) -> Response:
        """Who holds some blocks, or which blocks a request holds, as runs of (first, number)."""
        requests = engine.scheduler.snapshot()
        if request_id is not None:
            held = [r for r in requests if request_id in (r.request_id, r.parent_id)]
            return _json({"device": block_runs(held), "host": block_runs(held, host=True)})
        end = min(first if last is None else last, first + MAX_BLOCKS_ASKED)
        return _json(
            {
                "first": first,
                "last": end,
                "holders": [asdict(h) for h in block_holders(requests, first, end, host=host)],
            }
        )

    return router


def kernels(thread: EngineThread, model_name: str) -> dict[str, Any]:
    """The kernel table of the loaded model. Sizes are bytes in memory."""
    info = thread.engine.model_info
    rows = [
        {
            "layers": label,
            "num_layers": len(reports),
            "scheme": reports[0].spec,
            "kernel": reports[0].kernel,
            "num_bytes": sum(report.num_bytes for report in reports),
            "refusals": [{"kernel": name, "why": why} for name, why in reports[0].refusals],
            "note": reports[0].note,
        }
        for label, reports in kernel_rows(info.linears)
    ]
    return {
        "model": model_name,
        "quantization": info.quantization or None,
        "dtype": info.dtype or None,
        "kv_cache_dtype": info.kv_cache_dtype or None,
        "attention": info.attention or None,
        "rows": rows,
        "linears": [asdict(report) for report in info.linears],
    }


def _json(content: Any) -> Response:
    return Response(json.dumps(content, separators=(",", ":")), media_type="application/json")


@cache
def page() -> tuple[bytes, str]:
    """The page, and a policy under which a browser runs its own script and style, and fetches from this server alone."""
    text = resources.files("octavo.server").joinpath("page/index.html").read_text(encoding="utf-8")

    def sources(tag: str) -> str:
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    policy = (
        f"default-src 'none'; script-src {sources('script')}; style-src {sources('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    return text.encode(), policy
