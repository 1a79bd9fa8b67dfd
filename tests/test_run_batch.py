"""`octavo run-batch`: every line an answer or an error of its own, through the server's handlers, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.errors import RequestError
from octavo.server.batch import BatchResult, post, run_batch
from octavo.testing import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("batch") / "model")


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"I am {custom_id}"}], "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def complete(custom_id: str, prompt: Any = "once", **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    return {record["custom_id"]: record for record in read(path)}


def command(model: Path, source: Path, target: Path, *more: str) -> int:
    settings = ["--num-blocks-override", "128", "--served-model-name", "tiny"]
    return main(["run-batch", str(model), "-i", str(source), "-o", str(target), *settings, *more])


def test_chats_and_completions_are_answered(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [chat(f"c{i}") for i in range(6)] + [complete(f"p{i}", [1 + i, 2, 3]) for i in range(6)]
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    assert command(model, source, target) == 0
    found = by_id(target)
    assert found.keys() == {line["custom_id"] for line in lines}
    for custom_id, record in found.items():
        assert record["error"] is None
        assert record["id"].startswith("batch_req_")
        assert record["response"]["status_code"] == 200
        assert record["response"]["request_id"]
        body = record["response"]["body"]
        assert body["object"] == ("chat.completion" if custom_id[0] == "c" else "text_completion")
        assert body["usage"]["completion_tokens"] <= (4 if custom_id[0] == "c" else 3)
    assert "12 answered, 0 failed, 0 had an answer before" in capsys.readouterr().err


def test_a_bad_line_stops_no_other(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        complete("good"),
        "this is no JSON",
        '["neither"]',
        {**complete("get"), "method": "GET"},
        {**complete("where"), "url": "/v1/embeddings"},
        {**complete("no-body"), "body": 5},
        {"method": "POST"},
        complete("good"),
        complete("streams", stream=True),
        complete("too-hot", temperature=-1),
        complete("elsewhere", model="other"),
        complete("empty", []),
        "",
        complete("last"),
    ]
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    assert command(model, source, target) == 1
    records = read(target)
    assert len(records) == 13
    good = [r["custom_id"] for r in records if r["response"] and r["response"]["status_code"] == 200]
    assert sorted(good) == ["good", "last"]
    refused = {r["custom_id"]: r["response"]["status_code"] for r in records if r["response"]}
    assert (refused["too-hot"], refused["elsewhere"], refused["empty"]) == (400, 404, 400)
    messages = Counter(r["error"]["message"] for r in records if r["error"])
    for expected in (
        "line 2 is not JSON",
        "line 3: expected a JSON object",
        "line 4: method must be 'POST', got 'GET'",
        "line 5: url must be one of",
        "line 6: body must be an object, got int",
        "line 7: custom_id must be a string",
        "line 8: custom_id 'good' is that of an earlier line",
        "line 9: a batch cannot stream",
    ):
        assert sum(count for message, count in messages.items() if message.startswith(expected)) == 1, expected
    assert "2 answered, 11 failed" in capsys.readouterr().err


def test_a_batch_is_resumed_where_it_stopped(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [complete(f"p{i}", [5 + i, 9]) for i in range(4)] + [complete("bad", temperature=-1)]
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    assert command(model, source, target) == 1
    whole = by_id(target)
    kept = [json.dumps(whole[name]) for name in ("p0", "p2", "bad")]
    target.write_text("\n".join(kept) + '\n{"id": "torn", "custom_id": "p1", "resp')
    assert command(model, source, target) == 2
    assert "is there already: go on with --resume" in capsys.readouterr().err
    write(source, *lines[:4], complete("bad"))
    assert command(model, source, target, "--resume") == 0
    found = by_id(target)
    assert len(read(target)) == 5
    assert found["p0"] == whole["p0"], "an answer that was there is not made again"
    assert found["bad"]["response"]["status_code"] == 200
    texts = {name: record["response"]["body"]["choices"][0]["text"] for name, record in found.items()}
    assert all(texts[f"p{i}"] == whole[f"p{i}"]["response"]["body"]["choices"][0]["text"] for i in range(4))
    assert "3 answered, 0 failed, 2 had an answer before" in capsys.readouterr().err


def test_files_that_are_not_there(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(model, tmp_path / "none.jsonl", tmp_path / "out.jsonl") == 2
    assert "none.jsonl: No such file" in capsys.readouterr().err
    source = write(tmp_path / "in.jsonl", complete("a"))
    assert command(model, source, tmp_path / "no" / "out.jsonl") == 2
    assert "there is no folder" in capsys.readouterr().err
    assert command(model, source, tmp_path / "out.jsonl", "--max-in-flight", "0") == 2
    assert not (tmp_path / "out.jsonl").exists()


# --- against apps that misbehave


async def _answer(send: Any, status: int, body: Any, **headers: str) -> None:
    listed = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def batch(app: Any, tmp_path: Path, *lines: Any, **options: Any) -> tuple[BatchResult, list[dict[str, Any]]]:
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    result = asyncio.run(run_batch(app, source, target, **{"max_in_flight": 2, **options}))
    return result, read(target)


def test_a_full_queue_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = Counter[str]()

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        tries[body["prompt"]] += 1
        if tries[body["prompt"]] < 3:
            await _answer(send, 429, {"error": {"message": "full"}}, retry_after="0")
        else:
            await _answer(send, 200, {"usage": {"completion_tokens": 2}}, x_request_id="r")

    result, records = batch(app, tmp_path, *(complete(f"p{i}", f"prompt {i}") for i in range(5)))
    assert (result.answered, result.failed, result.output_tokens) == (5, 0, 10)
    assert set(tries.values()) == {3}
    assert {r["response"]["request_id"] for r in records} == {"r"}


def test_no_more_are_under_way_than_allowed(tmp_path: Path) -> None:
    running = most = 0

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        await _answer(send, 200, {})

    seen: list[int] = []
    result, _ = batch(
        app,
        tmp_path,
        *(complete(f"p{i}") for i in range(20)),
        max_in_flight=3,
        progress=lambda r: seen.append(r.answered),
    )
    assert (most, result.answered) == (3, 20)
    assert seen == list(range(1, 21))


def test_an_app_that_raises_or_talks_nonsense_fails_its_line_alone(tmp_path: Path) -> None:
    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        prompt = json.loads((await receive())["body"])["prompt"]
        if prompt == "raise":
            raise RuntimeError("boom")
        if prompt == "nonsense":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"<html>"})
            return
        await _answer(send, 200, {})

    result, records = batch(app, tmp_path, complete("a", "raise"), complete("b", "nonsense"), complete("c"))
    found = {r["custom_id"]: r["error"] for r in records}
    assert (result.answered, result.failed) == (1, 2)
    assert found["a"] == {"code": "server_error", "message": "line 1: RuntimeError: boom"}
    assert found["b"]["message"].startswith("line 2: JSONDecodeError")
    assert found["c"] is None


def test_what_an_app_is_asked() -> None:
    asked: dict[str, Any] = {}

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        asked.update(scope)
        asked["body"] = (await receive())["body"]
        await _answer(send, 201, {"a": 1}, x_y="z")

    status, headers, raw = asyncio.run(post(app, "/v1/x", b"{}", {"Authorization": "Bearer k"}))
    assert (status, headers["x-y"], json.loads(raw)) == (201, "z", {"a": 1})
    assert (asked["method"], asked["path"], asked["body"]) == ("POST", "/v1/x", b"{}")
    assert (b"authorization", b"Bearer k") in asked["headers"]


def test_existing_output_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("precious\n")
    with pytest.raises(RequestError, match="--resume"):
        batch(None, tmp_path, complete("a"))
    assert (tmp_path / "out.jsonl").read_text() == "precious\n"
