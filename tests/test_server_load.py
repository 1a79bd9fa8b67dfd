"""Clients that leave, queues that fill, engines that stop, and servers that are told to: V39, V42, V43, S01."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_support import Running, running_server, wait_for
from support import scripted_llm

from octavo import LLM, RequestError
from octavo.engine.sampling_params import SamplingParams
from octavo.server.admission import Admission
from octavo.server.engine_thread import EngineThread
from octavo.server.errors import APIError
from octavo.server.generation import Chunk, EngineRequest, EngineUnavailable, Generation, GenerationFailed

LONG = [65] * 400
SCRIPTS = {(n,): LONG for n in range(1, 40)}
COMPLETIONS = "/v1/completions"


def scripted(tmp_path: Path, **settings: Any) -> LLM:
    return scripted_llm(tmp_path / "m", SCRIPTS, num_blocks_override=256, **settings)


def slow_down(llm: LLM, seconds: float) -> None:
    """Makes each step take at least so long."""
    step = llm.engine.step

    def slow() -> Any:
        time.sleep(seconds)
        return step()

    llm.engine.step = slow  # type: ignore[method-assign]


def send(server: Running, body: bytes, until: bytes | None = None) -> socket.socket:
    """Sends a completion over a socket of its own; with `until`, reads up to there."""
    port = int(server.url.rpartition(":")[2])
    sock = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    got = b""
    while until is not None and until not in got:
        got += sock.recv(65536)
    return sock


# --- V39: clients that leave


@pytest.mark.parametrize("fields", ['"n": 1', '"n": 3, "temperature": 1'])
@pytest.mark.parametrize(("stream", "until"), [("true", b"data: "), ("true", None), ("false", None)])
def test_v39_leaving_frees_everything_within_two_steps(
    tmp_path: Path, fields: str, stream: str, until: bytes | None
) -> None:
    llm = scripted(tmp_path)
    slow_down(llm, 0.02)
    with running_server(llm) as server:
        body = f'{{"prompt": [1], "max_tokens": 400, "stream": {stream}, {fields}}}'.encode()
        sock = send(server, body, until)
        wait_for(lambda: len(llm.engine.scheduler.running) > 0)
        closed_at: list[int] = []
        abort = server.thread._abort

        def noting(requests: Any) -> None:
            closed_at.append(llm.engine.scheduler.stats.num_steps)
            abort(requests)

        server.thread._abort = noting  # type: ignore[method-assign]
        before = llm.engine.scheduler.stats.num_steps
        sock.close()
        wait_for(server.idle)
        assert len(closed_at) == 1
        assert llm.engine.scheduler.stats.num_steps - closed_at[0] <= 2
        assert llm.engine.scheduler.stats.num_steps - before < 100, "it ran on for long after its client had left"


def test_v39_leaving_while_queued(tmp_path: Path) -> None:
    llm = scripted(tmp_path, max_num_seqs=1)
    slow_down(llm, 0.01)
    with running_server(llm) as server:
        first = send(server, b'{"prompt": [1], "max_tokens": 400, "stream": true}', b"data: ")
        queued = send(server, b'{"prompt": [2], "max_tokens": 400, "stream": true}')
        wait_for(lambda: llm.engine.scheduler.num_waiting == 1)
        queued.close()
        wait_for(lambda: llm.engine.scheduler.num_waiting == 0)
        assert len(llm.engine.scheduler.running) == 1
        first.close()


def test_v39_no_abort_after_a_normal_end(tmp_path: Path) -> None:
    llm = scripted_llm(tmp_path / "m", {(1,): [65, 66]})
    with running_server(llm) as server:
        aborted: list[Any] = []
        server.thread._abort = aborted.append  # type: ignore[method-assign]
        for stream in ("true", "false"):
            sock = send(
                server, f'{{"prompt": [1], "stream": {stream}}}'.encode(), b"[DONE]" if stream == "true" else b"usage"
            )
            sock.close()
        wait_for(server.idle)
        assert not aborted


def test_v39_nothing_is_pending_after_two_hundred_requests(tmp_path: Path) -> None:
    llm = scripted(tmp_path)
    with running_server(llm) as server:

        async def one(client: httpx.AsyncClient, number: int) -> None:
            body = {"prompt": [1 + number % 39], "max_tokens": 3 + number % 30, "stream": number % 2 == 0, "n": 1}
            if number % 5 == 0:  # leaves early
                with pytest.raises((httpx.ReadTimeout, httpx.ReadError, asyncio.TimeoutError)):
                    async with asyncio.timeout(0.02):
                        await client.post(server.url + COMPLETIONS, json={**body, "max_tokens": 400})
            elif number % 7 == 0:
                assert (await client.post(server.url + COMPLETIONS, json={"prompt": []})).status_code == 400
            else:
                assert (await client.post(server.url + COMPLETIONS, json=body)).status_code == 200

        async def all_of_them() -> None:
            async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=16)) as client:
                await asyncio.gather(*(one(client, number) for number in range(200)))

        slow_down(llm, 0.001)
        asyncio.run(all_of_them())
        wait_for(server.idle)
        assert not server.thread._running


# --- S01 and admission


def test_s01_the_queue_is_bounded_by_requests(tmp_path: Path) -> None:
    llm = scripted(tmp_path, max_num_seqs=2)
    slow_down(llm, 0.01)
    with running_server(llm, max_num_queued_reqs=2) as server:
        socks = [send(server, f'{{"prompt": [{i}], "max_tokens": 400, "stream": true}}'.encode()) for i in (1, 2, 3, 4)]
        wait_for(lambda: len(llm.engine.scheduler) == 4)
        wait_for(lambda: server.server.admission.running == 2)
        answer = server.post(COMPLETIONS, {"prompt": [5], "max_tokens": 1})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_requests"
        with pytest.raises(openai.RateLimitError):
            server.client().completions.create(model="m", prompt=[5], stream=True)
        for sock in socks:
            sock.close()
        wait_for(server.idle)
        assert server.post(COMPLETIONS, {"prompt": [5], "max_tokens": 1}).status_code == 200


def test_s01_cost_is_counted_before_anything_is_copied(tmp_path: Path) -> None:
    with running_server(scripted(tmp_path, max_num_seqs=4), max_num_queued_reqs=10) as server:
        answer = server.post(COMPLETIONS, {"prompt": [[1], [2], [3]], "n": 5, "temperature": 1})
        assert answer.status_code == 400
        assert "15 sequences" in answer.json()["error"]["message"]


def test_the_queue_is_bounded_by_tokens() -> None:
    admission = Admission(seats=1, max_sequences=10, max_tokens=100, engine_waits=lambda: False)
    first, second = admission.enter(1), admission.enter(1)
    admission.take_tokens(first, 150)  # nothing else waits
    with pytest.raises(APIError, match="150 prompt tokens wait") as error:
        admission.take_tokens(second, 1)
    assert (error.value.status, error.value.code) == (429, "queue_tokens")
    first.started(1, 150)
    admission.take_tokens(second, 60)
    assert (admission.waiting, admission.tokens, admission.running) == (1, 60, 1)
    for ticket in (first, first, second):
        ticket.close()
    assert (admission.waiting, admission.tokens, admission.running) == (0, 0, 0)


def test_free_seats_need_no_place_in_the_queue() -> None:
    waits = [False]
    admission = Admission(seats=3, max_sequences=0, max_tokens=100, engine_waits=lambda: waits[0])
    tickets = [admission.enter(2), admission.enter(1)]
    with pytest.raises(APIError):
        admission.enter(1)
    tickets[0].close()
    waits[0] = True  # memory is short: seats that are free are of no use
    with pytest.raises(APIError):
        admission.enter(1)
    waits[0] = False
    tickets.append(admission.enter(1))


# --- V43: health


def test_v43_busy_but_progressing_is_healthy(tmp_path: Path) -> None:
    llm = scripted(tmp_path)
    slow_down(llm, 0.01)
    with running_server(llm, health_timeout=5) as server:
        socks = [send(server, f'{{"prompt": [{i}], "max_tokens": 400}}'.encode()) for i in range(1, 20)]
        wait_for(lambda: len(llm.engine.scheduler.running) > 5)
        for _ in range(20):
            assert server.get("/health").status_code == 200
            assert server.get("/ready").status_code == 200
        for sock in socks:
            sock.close()


def test_v43_stuck_is_not_healthy_and_may_recover(tmp_path: Path) -> None:
    llm = scripted(tmp_path)
    gate, step = threading.Event(), llm.engine.step

    def stuck() -> Any:
        gate.wait(60)
        return step()

    llm.engine.step = stuck  # type: ignore[method-assign]
    with running_server(llm, health_timeout=0.2) as server:
        assert server.get("/health").status_code == 200, "idle is healthy"
        sock = send(server, b'{"prompt": [1], "max_tokens": 5}')
        wait_for(lambda: server.get("/health").status_code == 503)
        assert server.get("/health").json()["error"]["code"] == "engine_stalled"
        assert server.get("/ready").status_code == 503
        gate.set()
        wait_for(lambda: server.get("/health").status_code == 200)
        sock.close()


def test_v43_a_dead_engine_is_told_at_once(tmp_path: Path) -> None:
    llm = scripted(tmp_path)

    def broken() -> Any:
        raise MemoryError("no memory is left")

    llm.engine.step = broken  # type: ignore[method-assign]
    with running_server(llm) as server:
        sdk = server.client()
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="MemoryError"):
                sdk.completions.create(model="m", prompt=[1])
            assert server.get("/health").status_code == 200
        with pytest.raises(openai.InternalServerError):
            sdk.completions.create(model="m", prompt=[1])
        wait_for(lambda: server.get("/health").status_code == 503)
        assert server.get("/health").json()["error"]["code"] == "engine_dead"
        with pytest.raises(openai.InternalServerError) as error:
            sdk.completions.create(model="m", prompt=[1])
        assert error.value.status_code == 503


def test_a_step_that_fails_once_ends_its_requests_and_no_more(tmp_path: Path) -> None:
    llm = scripted(tmp_path)
    step, failures = llm.engine.step, [1]

    def failing_once() -> Any:
        if failures:
            failures.pop()
            raise RuntimeError("once")
        return step()

    llm.engine.step = failing_once  # type: ignore[method-assign]
    with running_server(llm) as server:
        assert server.post(COMPLETIONS, {"prompt": [1], "max_tokens": 3}).status_code == 500
        assert server.post(COMPLETIONS, {"prompt": [1], "max_tokens": 3}).json()["choices"][0]["text"] == "AAA"


# --- draining


def drain(server: Running) -> None:
    server.http.handle_exit(15, None)


def test_a_drain_lets_running_requests_end(tmp_path: Path) -> None:
    llm = scripted(tmp_path)
    slow_down(llm, 0.005)
    with running_server(llm) as server:
        stream = server.client().completions.create(model="m", prompt=[1], max_tokens=100, stream=True)
        texts = [next(iter(stream)).choices[0].text]
        drain(server)
        texts += [event.choices[0].text for event in stream]
        assert "".join(texts) == "A" * 100
        with pytest.raises(httpx.TransportError):
            server.get("/health")


@pytest.mark.parametrize("twice", [False, True])
def test_v42_what_does_not_end_in_time_ends_with_an_error(tmp_path: Path, twice: bool) -> None:
    llm = scripted(tmp_path)
    slow_down(llm, 0.05)
    with running_server(llm, shutdown_timeout=60 if twice else 0.3) as server:
        stream = server.client().completions.create(model="m", prompt=[1], max_tokens=400, stream=True)
        next(iter(stream))
        drain(server)
        wait_for(lambda: not server.http.servers or not server.http.servers[0].is_serving())
        if twice:
            drain(server)
        with pytest.raises(openai.APIError, match="shutting down") as error:
            list(stream)
        assert error.value.type == "service_unavailable_error"


def test_while_it_drains_new_work_is_refused(tmp_path: Path) -> None:
    with running_server(scripted(tmp_path)) as server:
        server.server.draining = True
        assert server.post(COMPLETIONS, {"prompt": [1]}).status_code == 503
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 503
        server.server.draining = False


# --- the engine's thread, without HTTP


def on_thread(tmp_path: Path, work: Callable[[EngineThread], Any], **settings: Any) -> Any:
    llm = scripted(tmp_path, **settings)
    thread = EngineThread(llm.engine, llm.tokenizer)
    thread.start()
    try:
        return asyncio.run(work(thread))
    finally:
        thread.stop()
        assert not thread.alive
        llm.shutdown()


def request(number: int, name: str = "r", **params: Any) -> EngineRequest:
    return EngineRequest(f"{name}-{number}", [number], SamplingParams(**{"temperature": 0, "max_tokens": 20, **params}))


def test_a_call_is_taken_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    async def work(thread: EngineThread) -> None:
        with pytest.raises(RequestError, match="prompt 1:") as error:
            await thread.submit([request(1), EngineRequest("x", [999], SamplingParams())], stream=True)
        assert error.value.param == "prompt"
        assert await thread.call(lambda engine: len(engine.scheduler)) == 0

    on_thread(tmp_path, work)


def test_v48_equal_ids_meet_a_refusal(tmp_path: Path) -> None:
    async def work(thread: EngineThread) -> None:
        first = await thread.submit([request(1, max_tokens=400)], stream=True)
        with pytest.raises(RequestError, match="in use"):
            await thread.submit([request(1)], stream=True)
        first.close()

    on_thread(tmp_path, work)


def test_what_is_not_taken_is_merged(tmp_path: Path) -> None:
    async def work(thread: EngineThread) -> None:
        generation = await thread.submit([request(1), request(2)], stream=True)
        while not generation.finished:
            await asyncio.sleep(0.01)
        chunks = await generation.take()
        assert [(c.prompt_index, c.text, len(c.token_ids), c.finish_reason) for c in chunks] == [
            (0, "A" * 20, 20, "length"),
            (1, "A" * 20, 20, "length"),
        ]
        assert await generation.take() == []

    on_thread(tmp_path, work)


def test_v48_an_observer_that_fails_affects_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def on_added(self, request: Any) -> None:
            raise ValueError("no")

        on_finished = on_step = lambda self, *_: 1 / 0

    async def work(thread: EngineThread) -> None:
        thread.observers.append(Broken())
        for _ in range(2):
            (output,) = await (await thread.submit([request(1)], stream=False)).wait()
            assert output.outputs[0].text == "A" * 20

    on_thread(tmp_path, work)
    assert len([r for r in caplog.records if "no request is affected" in r.message]) == 1


def test_functions_run_between_steps(tmp_path: Path) -> None:
    async def work(thread: EngineThread) -> None:
        name = await thread.call(lambda engine: threading.current_thread().name)
        assert name == "octavo-engine"
        with pytest.raises(ZeroDivisionError):
            await thread.call(lambda engine: 1 / 0)
        assert thread.call_soon(lambda engine: engine.has_unfinished).result(30) is False

    on_thread(tmp_path, work)


def test_after_the_end_everything_is_refused(tmp_path: Path) -> None:
    async def work(thread: EngineThread) -> None:
        running = await thread.submit([request(1, max_tokens=400)], stream=False)
        await asyncio.get_running_loop().run_in_executor(None, thread.stop)
        with pytest.raises((EngineUnavailable, GenerationFailed)):
            await running.wait()
        with pytest.raises(EngineUnavailable):
            await thread.submit([request(1)], stream=True)
        with pytest.raises(EngineUnavailable):
            await thread.call(lambda engine: 1)
        thread.stop()

    on_thread(tmp_path, work)


def test_v47_text_before_an_error_is_given_before_it() -> None:
    """Also where both are there when a slow client asks."""

    async def run() -> None:
        generation = Generation([request(1)], stream=True, abort=lambda: None)
        generation.feed(Chunk(0, 0, "AB", [65, 66], None))
        generation.feed(Chunk(0, 0, "", [], None, "error", "the memory is on fire"))
        (chunk,) = await generation.take()
        assert (chunk.text, chunk.finish_reason, chunk.stop_reason) == ("AB", None, None)
        with pytest.raises(GenerationFailed, match="on fire"):
            await generation.take()

    asyncio.run(run())
