"""OpenAI batch files: every line a request, answered by the server's own handlers without a socket.

Source of the file format: platform.openai.com/docs/api-reference/batch (request-input and request-output objects).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from octavo.config import EngineConfig
from octavo.errors import RequestError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_LINE_CHARACTERS = 1 << 26

ASGIApp = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Any]], Callable[[MutableMapping[str, Any]], Awaitable[None]]],
    Awaitable[None],
]


@dataclass(slots=True)
class BatchResult:
    """What became of the lines of one run; `skipped` ones had an answer before."""

    answered: int = 0
    failed: int = 0
    skipped: int = 0
    output_tokens: int = 0
    elapsed_s: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        speed = self.output_tokens / max(self.elapsed_s, 1e-9)
        text = f"{self.answered} answered, {self.failed} failed, {self.skipped} had an answer before; "
        text += f"{self.output_tokens} tokens in {self.elapsed_s:.1f} s = {speed:.1f} tokens/s"
        return "\n".join([text, *(f"  {count} x {reason}" for reason, count in sorted(self.reasons.items()))])


def answer_batch(
    config: EngineConfig,
    source: Path,
    target: Path,
    *,
    resume: bool = False,
    max_in_flight: int | None = None,
    served_model_name: str | None = None,
) -> BatchResult:
    """Loads the model, answers `source` with a progress bar, and frees the model; see `run_batch`."""
    from octavo.front.llm import LLM
    from octavo.server.app import make_app
    from octavo.server.engine_thread import EngineThread
    from octavo.server.settings import ServerSettings

    total = count_lines(source)  # a file that is not there must not cost the time of loading
    _check_target(target, resume)
    in_flight = max_in_flight or 2 * config.max_num_seqs
    names = () if served_model_name is None else (served_model_name,)
    settings = ServerSettings(served_model_name=names, disable_log_stats=True, disable_fastapi_docs=True)
    with LLM(config) as llm:
        thread = EngineThread(llm.engine, llm.tokenizer)
        app = make_app(thread, settings)
        thread.start()

        async def answer() -> BatchResult:
            async with app.router.lifespan_context(app):
                with shown(total, not config.disable_progress) as progress:
                    return await run_batch(
                        app, source, target, max_in_flight=in_flight, resume=resume, progress=progress
                    )

        try:
            return asyncio.run(answer())
        finally:
            thread.stop()


async def run_batch(
    app: ASGIApp,
    source: Path,
    target: Path,
    *,
    max_in_flight: int,
    headers: Mapping[str, str] = {},
    resume: bool = False,
    progress: Callable[[BatchResult], object] = lambda result: None,
) -> BatchResult:
    """Answers each line of `source` with one line of `target`, as soon as it is done, so not in order.

    A line that cannot be answered gets an error of its own and stops nothing. With `resume`, lines whose custom_id has an
    answer in `target` are left out, and what failed there is tried again. Raises RequestError where `target` is there
    without `resume`, or a file cannot be read or written.
    """
    result, start = BatchResult(), time.monotonic()
    done = _begin(target, resume)
    gate = asyncio.Semaphore(max_in_flight)
    tasks: set[asyncio.Task[None]] = set()
    seen: set[str] = set()
    with target.open("a", encoding="utf-8") as file:

        async def answer(number: int, line: str) -> None:
            try:
                record = await _answer(app, number, line, headers, seen)
            finally:
                gate.release()
            _book(file, record, result)
            progress(result)

        try:
            for number, line in _lines(source):
                if done and _custom_id(line) in done:
                    seen.add(_custom_id(line) or "")
                    result.skipped += 1
                    continue
                await gate.acquire()
                task = asyncio.create_task(answer(number, line))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    result.elapsed_s = time.monotonic() - start
    return result


async def _answer(app: ASGIApp, number: int, line: str, headers: Mapping[str, str], seen: set[str]) -> dict[str, Any]:
    """The output record of one line. Nothing that happens to it is raised."""
    record: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": None, "response": None, "error": None}
    try:
        path, body, record["custom_id"] = _request(number, line, seen)
        while True:
            status, answered_headers, raw = await post(app, path, json.dumps(body).encode(), headers)
            if status != 429:
                break
            await asyncio.sleep(min(float(answered_headers.get("retry-after", 1)), 5))
        content = json.loads(raw)
    except RequestError as error:
        record["custom_id"] = _custom_id(line)
        record["error"] = {"code": "invalid_request", "message": str(error)}
    except Exception as error:
        record["error"] = {"code": "server_error", "message": f"line {number}: {type(error).__name__}: {error}"}
    else:
        request_id = answered_headers.get("x-request-id", "")
        record["response"] = {"status_code": status, "request_id": request_id, "body": content}
    return record


def _request(number: int, line: str, seen: set[str]) -> tuple[str, dict[str, Any], str]:
    """Path, body and custom_id of a line; raises RequestError that says what is wrong with it."""
    try:
        request = json.loads(line) if len(line) <= MAX_LINE_CHARACTERS else None
    except ValueError as error:
        raise RequestError(f"line {number} is not JSON: {error}") from None
    if not isinstance(request, dict):
        raise RequestError(f"line {number}: expected a JSON object of at most {MAX_LINE_CHARACTERS:,} characters")
    custom_id, method, url, body = (request.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestError(f"line {number}: custom_id must be a string that is not empty, got {custom_id!r}")
    if custom_id in seen:
        raise RequestError(f"line {number}: custom_id {custom_id!r} is that of an earlier line")
    seen.add(custom_id)
    if method != "POST":
        raise RequestError(f"line {number}: method must be 'POST', got {method!r}")
    if url not in ENDPOINTS:
        raise RequestError(f"line {number}: url must be one of {', '.join(ENDPOINTS)}, got {url!r}")
    if not isinstance(body, dict):
        raise RequestError(f"line {number}: body must be an object, got {type(body).__name__}")
    if body.get("stream"):
        raise RequestError(f"line {number}: a batch cannot stream; leave 'stream' out of the body")
    return url, body, custom_id


def _book(file: TextIO, record: Mapping[str, Any], result: BatchResult) -> None:
    """Writes a record at once and counts it."""
    file.write(json.dumps(record, ensure_ascii=False) + "\n")
    file.flush()
    response, error = record["response"], record["error"]
    if response is not None and response["status_code"] == 200:
        result.answered += 1
        usage = response["body"].get("usage") or {}
        result.output_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
        return
    result.failed += 1
    if error is None:
        body = response["body"] if isinstance(response["body"], dict) else {}
        error = body.get("error") or {"message": f"status {response['status_code']}"}
    reason = str(error.get("message", error))[:200]
    result.reasons[reason] = result.reasons.get(reason, 0) + 1


def _begin(target: Path, resume: bool) -> set[str]:
    """Custom ids that `target` has answers for; anything else in it, such as a torn last line, is taken out."""
    _check_target(target, resume)
    if not target.exists():
        return set()
    kept: dict[str, str] = {}
    for _, line in _lines(target):
        try:
            record = json.loads(line)
            if record["response"]["status_code"] == 200:
                kept[record["custom_id"]] = line
        except (ValueError, KeyError, TypeError):
            continue
    partial = target.with_name(target.name + ".partial")
    partial.write_text("".join(f"{line}\n" for line in kept.values()), encoding="utf-8")
    os.replace(partial, target)
    return set(kept)


def _check_target(target: Path, resume: bool) -> None:
    if not resume and target.exists() and target.stat().st_size:
        raise RequestError(f"{target} is there already: go on with --resume, or name another file", param="output_file")
    if not target.parent.is_dir():
        raise RequestError(f"{target}: there is no folder {target.parent}", param="output_file")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a file that are not blank. Bytes that are no UTF-8 reach the parser, which names the line."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.strip()


def count_lines(path: Path) -> int:
    """Lines that `run_batch` will answer; raises RequestError where the file cannot be read."""
    try:
        return sum(1 for _ in _lines(path))
    except OSError as error:
        raise RequestError(f"--input-file {path}: {error.strerror}", param="input_file") from None


def _custom_id(line: str) -> str | None:
    try:
        found = json.loads(line).get("custom_id")
    except (ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


async def post(
    app: ASGIApp, path: str, body: bytes, headers: Mapping[str, str] = {}
) -> tuple[int, dict[str, str], bytes]:
    """One POST of JSON to an ASGI app in this process: status, headers by lower-case name, body."""
    given = {"host": "batch", "content-type": "application/json", "content-length": str(len(body)), **headers}
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in given.items()],
        "client": ("127.0.0.1", 0),
        "server": ("batch", 80),
        "state": {},
    }
    sent = [{"type": "http.request", "body": body, "more_body": False}]
    status, found, parts = 500, {}, []  # type: int, dict[str, str], list[bytes]

    async def receive() -> Any:
        if sent:
            return sent.pop()
        await asyncio.Event().wait()  # the client never leaves: it is we, and cancelling ends this as well

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            found.update(
                {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]}
            )
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, found, b"".join(parts)


def shown(total: int, enabled: bool) -> Any:
    """A context with a progress bar on a terminal's stderr; entering it gives the function for `run_batch`."""
    if not (enabled and sys.stderr.isatty()):
        return nullcontext(lambda result: None)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    class Bar(Progress):
        def __enter__(self) -> Any:
            super().__enter__()
            task = self.add_task("", total=total, tokens=0, failed=0)
            return lambda result: self.update(
                task,
                completed=result.answered + result.failed + result.skipped,
                tokens=result.output_tokens,
                failed=result.failed,
            )

    return Bar(
        TextColumn("answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed, {task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
