"""What the server refuses, how it says so, and that it serves on afterwards: V20 to V24, V33, V46, V47, S01, S02, S04, S05."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_support import Running, running_server
from support import scripted_llm

from octavo.server import fields as field_notices
from octavo.testing import tiny_model

HELLO = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tiny_model(tmp_path_factory.mktemp("errors") / "tiny", max_position_embeddings=64)
    with running_server(folder, max_prompts_per_request=4, max_num_queued_reqs=512) as running:
        yield running


def refused(server: Running, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error of a request that must be refused; the server must answer the next one."""
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200
    return error


@pytest.mark.parametrize(
    "prompt", ["", [""], [], [[]], ["a", ""], [[1], []], None, 5, {}, [1, "a"], [[1, "a"]], [1.5], True]
)
def test_v21_empty_and_odd_prompts(server: Running, prompt: Any) -> None:
    assert refused(server, COMPLETIONS, {"prompt": prompt})["param"] == "prompt"


def test_v21_whitespace_is_a_prompt(server: Running) -> None:
    assert server.post(COMPLETIONS, {"prompt": " ", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("messages", [[], None, "hello", ["hello"], [[]], [{}], [{"role": "user"}]])
def test_v21_messages_that_are_none(server: Running, messages: Any) -> None:
    assert refused(server, CHAT, {"messages": messages})["param"].startswith("messages")


@pytest.mark.parametrize(
    "messages",
    [
        [*HELLO, {"role": "assistant", "content": ""}, *HELLO],
        [*HELLO, *HELLO],
        [{"role": "user", "name": "ann", "content": "hi"}],
        [{"role": "developer", "content": "be brief"}, *HELLO],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "user", "content": []}, *HELLO],
        [
            *HELLO,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ],
    ],
)
def test_v22_shapes_that_openai_accepts(server: Running, messages: Any) -> None:
    assert server.post(CHAT, {"messages": messages, "max_tokens": 1, "truncate_prompt_tokens": -1}).status_code == 200


def test_v22_what_becomes_of_them(server: Running) -> None:
    def rendered(messages: Any) -> str:
        ids = server.post("/tokenize", {"messages": messages}).json()["tokens"]
        return server.post("/detokenize", {"tokens": ids}).json()["prompt"]

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\nab<|im_end|>" in rendered([{"role": "user", "content": parts}])
    assert "system\nbe brief<|im_end|>" in rendered([{"role": "developer", "content": "be brief"}])
    assert "None" not in rendered([*HELLO, {"role": "assistant", "content": None, "refusal": "no"}])


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user", "content": None}, "messages[1]"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "audio"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[1].content[0].text"),
        ({"role": "assistant", "content": "", "tool_calls": [5]}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages[1].tool_calls[0].function"),
    ],
)
def test_v22_others_are_refused_by_place(server: Running, message: Any, param: str) -> None:
    assert refused(server, CHAT, {"messages": [*HELLO, message]})["param"] == param


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}},
        {"type": "input_image", "image_url": "http://127.0.0.1:1/x"},
        {"type": "file", "file": {"file_id": "x"}},
    ],
)
def test_s05_nothing_is_fetched(server: Running, part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refused(server, CHAT, {"messages": [{"role": "user", "content": [part]}]})
    assert "not supported" in error["message"]


def test_v23_limits_are_caps(server: Running) -> None:
    def ask(prompt: str, **fields: Any) -> Any:
        return server.post(COMPLETIONS, {"prompt": prompt, "ignore_eos": True, **fields}).json()

    fifty = "x" * 50
    assert ask(fifty, max_tokens=20)["usage"]["completion_tokens"] == 14
    assert ask(fifty, max_tokens=20)["choices"][0]["finish_reason"] == "length"
    assert ask("x")["usage"]["completion_tokens"] == 16
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
    prompt = server.post(CHAT, body).json()["usage"]
    assert prompt["total_tokens"] == 64
    for limit in (0, -1):
        assert refused(server, COMPLETIONS, {"prompt": "x", "max_tokens": limit})["param"] == "max_tokens"
    error = refused(server, COMPLETIONS, {"prompt": "x" * 64})
    assert "64" in error["message"]
    assert error["param"] == "prompt"


def test_v23_two_names_that_differ(server: Running) -> None:
    error = refused(server, CHAT, {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4})
    assert error["param"] == "max_completion_tokens"
    same = {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 3}
    assert server.post(CHAT, same).json()["usage"]["completion_tokens"] <= 3


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_v24_unknown_fields_are_told_of(server: Running, path: str, caplog: pytest.LogCaptureFixture) -> None:
    text = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "a"}, RESPONSES: {"input": "a"}}[path]
    field_notices._known.clear()
    with caplog.at_level(logging.WARNING, "octavo.server.fields"):
        for _ in range(2):
            answer = server.post(path, {**text, "temprature": 0, "x\ny\u20ac": 1})
            assert answer.status_code == 200
    notices = answer.headers["x-octavo-warnings"]
    assert "unknown field 'temprature' is ignored; did you mean 'temperature'?" in notices
    assert "\\n" in notices
    assert sum("temprature" in record.message for record in caplog.records) == 1
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_v24_known_fields_without_effect_are_told_of(server: Running) -> None:
    answer = server.post(CHAT, {"messages": HELLO, "max_tokens": 1, "user": "ann", "metadata": {"a": "b"}})
    assert answer.headers["x-octavo-warnings"] == "'user' has no effect, 'metadata' has no effect"
    assert "x-octavo-warnings" not in server.post(CHAT, {"messages": HELLO, "max_tokens": 1}).headers


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (COMPLETIONS, {"best_of": 3}, 400),
        (COMPLETIONS, {"best_of": 1}, 200),
        (COMPLETIONS, {"suffix": "x"}, 400),
        (COMPLETIONS, {"suffix": None}, 200),
        (COMPLETIONS, {"use_beam_search": True}, 400),
        (COMPLETIONS, {"prompt_embeds": "gASVAAAA"}, 400),
        (CHAT, {"functions": [{"name": "f"}]}, 400),
        (CHAT, {"modalities": ["text", "audio"]}, 400),
        (CHAT, {"modalities": ["text"]}, 200),
        (CHAT, {"logits_processors": ["os.system"]}, 400),
    ],
)
def test_v24_s04_what_others_support_is_refused_not_ignored(
    server: Running, path: str, fields: dict[str, Any], status: int
) -> None:
    text = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    answer = server.post(path, {**text, "max_tokens": 1, **fields})
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["param"] == next(iter(fields))


def test_v24_strict_fields(tmp_path: Path) -> None:
    with running_server(scripted_llm(tmp_path / "m", {(1,): [65]}), strict_fields=True) as server:
        answer = server.post(COMPLETIONS, {"prompt": [1], "sede": 1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "sede")
        assert server.post(COMPLETIONS, {"prompt": [1], "seed": 1}).status_code == 200


def test_v33_a_model_without_a_template(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with running_server(folder) as server:
        error = refused(server, CHAT, {"messages": HELLO})
        assert "--chat-template" in error["message"]
        assert str(tmp_path) not in error["message"]
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    with running_server(folder, chat_template=str(template)) as server:
        assert server.post("/tokenize", {"messages": HELLO}).json()["tokens"] == list(b"[user]hello")
        error = refused(server, CHAT, {"messages": [{"role": "system", "content": "x"}]})
        assert "no system here" in error["message"]


# --- V47: every error in the envelope, through the SDK


def test_v47_statuses_become_the_sdks_exceptions(server: Running) -> None:
    sdk = server.client()
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.completions.create(model="tiny", prompt="a", temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.completions.create(model="nope", prompt="a", stream=True)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as nowhere:
        sdk.embeddings.create(model="tiny", input="a")
    assert nowhere.value.type == "not_found_error"
    with pytest.raises(openai.BadRequestError) as wrong:
        sdk.completions.create(model="tiny", prompt="a", max_tokens="many")  # type: ignore[arg-type]
    assert wrong.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("method", "path", "content", "kind", "status"),
    [
        ("POST", COMPLETIONS, b"{", "application/json", 400),
        ("POST", COMPLETIONS, b"", "application/json", 400),
        ("POST", COMPLETIONS, b"\xff\xfe", "application/json", 400),
        ("POST", COMPLETIONS, b"[" * 100_000, "application/json", 400),
        ("POST", COMPLETIONS, b'{"prompt": NaN}', "application/json", 400),
        ("POST", COMPLETIONS, b'{"prompt": "a", "temperature": Infinity}', "application/json", 400),
        ("POST", COMPLETIONS, b'{"prompt": "\\ud800"}', "application/json", 400),
        ("POST", COMPLETIONS, b'{"prompt": "a", "model": "\\ud800"}', "application/json", 404),
        ("POST", COMPLETIONS, b'{"prompt": "a", "seed": 1e400}', "application/json", 400),
        ("POST", COMPLETIONS, b"prompt=a", "application/x-www-form-urlencoded", 400),
        ("GET", COMPLETIONS, b"", "application/json", 405),
        ("DELETE", "/v1/models", b"", "application/json", 405),
        ("GET", "/v1/nothing", b"", "application/json", 404),
        ("POST", "/", b"", "application/json", 405),
    ],
)
def test_v47_whatever_comes(server: Running, method: str, path: str, content: bytes, kind: str, status: int) -> None:
    import httpx

    answer = httpx.request(method, server.url + path, content=content, headers={"Content-Type": kind}, timeout=60)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert all(error[key] for key in ("message", "type"))


@pytest.mark.parametrize("stream", [False, True])
def test_v47_an_error_in_the_middle(tmp_path: Path, stream: bool) -> None:
    llm = scripted_llm(tmp_path / "m", {(1,): [65] * 50, (2,): [66] * 50})
    runner = llm.engine.executor.runner
    forward = runner.forward

    def failing(token_ids: Any, positions: Any, attention: Any) -> Any:
        if any(token == 65 and at >= 20 for token, at in zip(token_ids.tolist(), positions.tolist(), strict=True)):
            raise RuntimeError("the memory is on fire")
        return forward(token_ids, positions, attention)

    runner.forward = failing
    with running_server(llm) as server:
        sdk = server.client()
        good = sdk.completions.create(model="m", prompt=[2], max_tokens=40, stream=True)
        if stream:
            texts = []
            events = iter(sdk.completions.create(model="m", prompt=[1], max_tokens=40, stream=True))
            with pytest.raises(openai.APIError, match="on fire") as error:
                texts.extend(event.choices[0].text for event in events)
            assert "".join(texts) == "A" * 20
            assert (error.value.type, error.value.code) == ("server_error", "generation_failed")
        else:
            with pytest.raises(openai.InternalServerError, match="on fire"):
                sdk.completions.create(model="m", prompt=[1], max_tokens=40)
        assert "".join(e.choices[0].text for e in good) == "B" * 40
        assert server.get("/health").status_code == 200


def test_v47_a_stream_ends_after_its_error(tmp_path: Path) -> None:
    llm = scripted_llm(tmp_path / "m", {(1,): [65] * 20})
    with running_server(llm) as server:
        body = {"prompt": [1], "stream": True, "max_tokens": 20, "allowed_token_ids": [5], "bad_words": ["\x05"]}
        events = server.events(COMPLETIONS, body)
        assert set(events[-1]) == {"error"}
        assert "[DONE]" not in events
        sent = server.events(RESPONSES.replace("responses", "completions"), {"prompt": [1], "stream": True})
        assert sent[-1] == "[DONE]"


# --- S01, S02: counts and ids


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"n": 10**6}, "n"),
        (COMPLETIONS, {"n": 0}, "n"),
        (COMPLETIONS, {"n": 2, "temperature": 0}, None),
        (COMPLETIONS, {"prompt": ["a"] * 5}, "prompt"),
        (COMPLETIONS, {"prompt": [[1]] * 5}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 4, "n": 10**5}, "n"),
        (COMPLETIONS, {"stop": ["a"] * 1000}, None),
        (COMPLETIONS, {"logprobs": 10**9}, "logprobs"),
        (CHAT, {"n": 10**18}, "n"),
        (CHAT, {"logprobs": True, "top_logprobs": 10**9}, "logprobs"),
    ],
)
def test_s01_counts_are_capped(server: Running, path: str, fields: dict[str, Any], param: str | None) -> None:
    text = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    error = refused(server, path, {**text, **fields})
    assert param is None or error["param"] == param


@pytest.mark.parametrize("bad", [-1, 288, 2**31, 2**63, -(2**63), 10**40])
@pytest.mark.parametrize("where", ["prompt", "prompts", "logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_s02_ids_outside_the_vocabulary(server: Running, bad: int, where: str) -> None:
    body: dict[str, Any] = {"prompt": "a", "min_tokens": 1}
    match where:
        case "prompt":
            body["prompt"] = [1, bad]
        case "prompts":
            body["prompt"] = [[1], [2, bad]]
        case "logit_bias":
            body["logit_bias"] = {str(bad): 1}
        case _:
            body[where] = [bad]
    error = refused(server, COMPLETIONS, body)
    assert error["param"] == where.rstrip("s" if where == "prompts" else "")
    assert str(bad) in error["message"]


@pytest.mark.parametrize("key", ["a", "1.5", "", "0x10", "--1"])
def test_s02_biases_for_what_is_no_id(server: Running, key: str) -> None:
    assert refused(server, COMPLETIONS, {"prompt": "a", "logit_bias": {key: 1}})["param"] == "logit_bias"


@pytest.mark.parametrize("temperature", [1e-4, 1e-10, 1e-40, 0, -0.0])
def test_v20_small_temperatures_are_greedy(server: Running, temperature: float) -> None:
    bodies = ({"prompt": "hello", "temperature": t, "max_tokens": 6} for t in (temperature, 0))
    first, second = (server.post(COMPLETIONS, body).json()["choices"][0]["text"] for body in bodies)
    assert first == second


def test_v20_negative_temperatures_are_refused(server: Running) -> None:
    assert refused(server, COMPLETIONS, {"prompt": "a", "temperature": -0.1})["param"] == "temperature"


def test_priority_needs_its_policy(server: Running) -> None:
    assert refused(server, COMPLETIONS, {"prompt": "a", "priority": 1})["param"] == "priority"
    assert server.post(COMPLETIONS, {"prompt": "a", "priority": 0, "max_tokens": 1}).status_code == 200
