"""Who may come in, and with how much: S03, S06, S07, S09, S10, S11, CORS, TLS."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_support import Running, running_server
from starlette.routing import BaseRoute, Route
from support import scripted_llm

from octavo import LLM, ConfigError, EngineConfig, RequestError
from octavo.front.tokenizer import Tokenizer
from octavo.server.app import make_app
from octavo.server.engine_thread import EngineThread
from octavo.server.gate import OPEN_PATHS
from octavo.server.prompts import Prompter
from octavo.server.settings import ServerSettings
from octavo.testing import tiny_model, tiny_tokenizer

COMPLETIONS, KEY = "/v1/completions", "sk-secret-1"
LONG_PROMPT = list(range(1, 40))


def scripted(tmp_path: Path, **settings: Any) -> LLM:
    return scripted_llm(tmp_path / "m", {(1,): [65] * 50, tuple(LONG_PROMPT): [66]}, **settings)


# --- S07: the key


def routes_of(routes: list[BaseRoute]) -> list[tuple[str, str]]:
    """Method and path of each route, those of included routers too."""
    found = []
    for route in routes:
        inner = getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", None)
        if inner:
            found += routes_of(list(inner))
        elif isinstance(route, Route):
            found += [(method, route.path) for method in route.methods or ()]
    return found


def test_s07_every_route_but_the_probes_and_the_page_needs_the_key(tmp_path: Path) -> None:
    with running_server(scripted(tmp_path), api_key=KEY) as server:
        app = server.http.config.app
        listed = set(routes_of(app.routes)) | {("GET", "/nowhere"), ("GET", "/openapi.json"), ("GET", "/docs")}
        assert {
            ("POST", COMPLETIONS),
            ("GET", "/metrics"),
            ("GET", "/health"),
            ("POST", "/reset_prefix_cache"),
        } <= listed
        for method, path in sorted(listed):
            path = re.sub(r"\{.*?\}", "x", path)
            answer = httpx.request(method, server.url + path, timeout=60)
            if path in OPEN_PATHS and method in ("GET", "HEAD"):
                assert answer.status_code != 401, path
            else:
                assert answer.status_code == 401, f"{method} {path} is served without a key"
                assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/v1//models",
        "/v1/models/",
        "/%76%31/models",
        "/v1%2Fmodels",
        "/health/",
        "//health",
        "/health/../v1/models",
        "/health%2F..%2Fv1%2Fmodels",
        "/health;/v1/models",
        "/HEALTH",
        "/health%20",
        "/health%00",
        "/health?x=/v1/models",
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "TRACE", "CONNECTX"])
def test_s07_no_spelling_gets_past(keyed: Running, path: str, method: str) -> None:
    port = int(keyed.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        status = int(sock.recv(65536).split()[1])
    if path.startswith("/health?") and method in ("GET", "HEAD"):
        assert status in (200, 405)
    else:
        assert status == 401


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running_server(scripted(tmp_path_factory.mktemp("keyed")), api_key=KEY) as server:
        yield server


@pytest.mark.parametrize("header", ["", KEY, f"Basic {KEY}", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"])
def test_s07_wrong_keys(keyed: Running, header: str) -> None:
    answer = keyed.get("/v1/models", headers={"Authorization": header})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert KEY not in answer.text


def test_s07_the_right_key(keyed: Running) -> None:
    for header in (f"Bearer {KEY}", f"bearer  {KEY}"):
        assert keyed.get("/v1/models", headers={"Authorization": header}).status_code == 200
    assert keyed.client().models.list().data
    with pytest.raises(openai.AuthenticationError) as error:
        keyed.client(api_key="other").models.list()
    assert error.value.type == "authentication_error"
    assert keyed.get("/health").status_code == keyed.get("/ready").status_code == keyed.get("/").status_code == 200


def test_a_route_that_is_added_later_is_closed_too(tmp_path: Path) -> None:
    llm = scripted(tmp_path)
    app = make_app(EngineThread(llm.engine, llm.tokenizer), ServerSettings(api_key=KEY, disable_log_stats=True))
    app.add_api_route("/v2/health", lambda: "secret")

    async def ask() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return (await client.get("/v2/health")).status_code

    assert asyncio.run(ask()) == 401


@pytest.mark.parametrize("keys", ["", ",", ("a", "")])
def test_empty_keys_are_refused(keys: Any) -> None:
    with pytest.raises(ConfigError, match="api_key"):
        ServerSettings(api_key=keys)


# --- S09: sizes and pace


def test_s09_bodies_and_headers_have_limits(tmp_path: Path) -> None:
    with running_server(scripted(tmp_path), max_body_bytes=100_000, body_timeout=0.3) as server:
        stream = server.client().completions.create(model="m", prompt=[1], max_tokens=50, stream=True)
        large = b'{"prompt": "' + b"x" * 200_000 + b'"}'
        json_type = {"Content-Type": "application/json"}
        for content in (large, iter([large[:90_000], large[90_000:]])):  # with a length, and in chunks without one
            answer = httpx.post(server.url + COMPLETIONS, content=content, headers=json_type, timeout=60)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert server.post(COMPLETIONS, {"prompt": "x" * 90_000}).status_code == 400
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nX-Large: " + b"x" * 70_000)
            answered = b""
            while more := sock.recv(65536):
                answered += more
        assert b" 431 " in answered.splitlines()[0]
        assert set(json.loads(answered.partition(b"\r\n\r\n")[2])) == {"error"}
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(b"NONSENSE\r\n\r\n")
            assert b" 400 " in sock.recv(65536).splitlines()[0]
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n"
            sock.sendall(head + b'{"prompt"')
            assert b" 408 " in sock.recv(65536).splitlines()[0]
        assert "".join(event.choices[0].text for event in stream) == "A" * 50


def test_s09_what_is_too_long_by_its_characters_is_not_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(scripted(tmp_path)) as server:
        tried: list[int] = []
        encode = Tokenizer.encode
        monkeypatch.setattr(Tokenizer, "encode", lambda self, text: tried.append(len(text)) or encode(self, text))
        most = server.server.prompter.max_characters
        answer = server.post(COMPLETIONS, {"prompt": "x" * (most + 1)})
        assert answer.status_code == 400
        assert f"{most + 1} characters" in answer.json()["error"]["message"]
        assert not tried
        chat = {"messages": [{"role": "user", "content": "x" * (most + 1)}]}
        assert server.post("/v1/chat/completions", chat).json()["error"]["param"] == "messages"


# --- S06: templates


@pytest.mark.parametrize(
    "kwargs",
    [
        {"chat_template": "{{ 1 }}"},
        {"tokenize": True},
        {"messages": []},
        {"conversation": []},
        {"tools": [{}]},
        {"add_generation_prompt": False},
        {"return_dict": True},
        {"tokenizer_kwargs": {}},
        {"self": 1},
    ],
)
def test_s06_clients_bring_no_template_and_no_arguments(keyed: Running, kwargs: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": kwargs}
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = keyed.post(path, body, headers={"Authorization": f"Bearer {KEY}"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")


def test_s06_a_template_beside_them_is_an_unknown_field(keyed: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 7 * 6 }}"}
    answer = keyed.post("/tokenize", body, headers={"Authorization": f"Bearer {KEY}"})
    assert "chat_template" in answer.headers["x-octavo-warnings"]
    assert bytes(answer.json()["tokens"][1:5]) == b"user"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(99) %}{% endfor %}{% endfor %}{% endfor %}",
            "took",
        ),
        ("{{ 'a' * 10**5 }}", "characters"),
        ("{{ messages.__class__.__mro__ }}", "refuses"),
        ("{{ range(10**9) | list }}", "refuses"),
    ],
)
def test_s06_templates_have_limits(tmp_path: Path, template: str, said: str) -> None:
    tiny_tokenizer(tmp_path)
    prompter = Prompter(Tokenizer(tmp_path), 100, template, 0.3)
    for _ in range(2):  # the thread that was interrupted serves on
        with pytest.raises(RequestError, match=said) as error:
            asyncio.run(prompter.chat([{"role": "user", "content": "x"}]))
        assert error.value.param == "messages"
    assert asyncio.run(prompter.encode("abc")) == [97, 98, 99]
    prompter.close()


def test_s06_interrupts_hit_nobody_else(tmp_path: Path) -> None:
    """Jobs that end just when their time is up: what was meant for them must not reach the next."""
    tiny_tokenizer(tmp_path)
    prompter = Prompter(Tokenizer(tmp_path), 100, "{{ messages[0].content }}", 1e-9)
    overruns: list[str] = []

    async def many() -> None:
        async def one(number: int) -> None:
            try:
                assert await prompter.chat([{"role": "user", "content": "x"}]) == [120]
            except RequestError as error:
                overruns.append(str(error))
            assert await prompter.encode(f"{number}") == list(f"{number}".encode())

        await asyncio.gather(*(one(number) for number in range(300)))

    asyncio.run(many())
    assert all("took" in text for text in overruns)
    prompter.close()


# --- S10: logs


def test_s10_logs_hold_no_secret_and_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = ServerSettings(api_key=KEY, enable_log_requests=True)
    assert KEY not in repr(settings) + str(settings) + settings.model_dump_json()
    with (
        caplog.at_level(logging.DEBUG),
        running_server(scripted(tmp_path), api_key=KEY, enable_log_requests=True) as server,
    ):
        auth = {"Authorization": f"Bearer {KEY}"}
        body = {"prompt": "my diary", "max_tokens": 2, "stop": ["dear diary"], "guided_regex": None}
        server.post(COMPLETIONS, body, headers=auth)
        chat = {"messages": [{"role": "user", "content": "my diary"}], "max_tokens": 1}
        server.post("/v1/chat/completions", chat, headers=auth)
        refusals = [
            server.post(COMPLETIONS, {"prompt": "my diary" * 500}, headers=auth),
            server.post("/v1/chat/completions", {"messages": [{"role": "my diary"}]}, headers={}),
        ]
    logged = "\n".join(
        record.getMessage() + str(record.exc_text or "")
        for record in caplog.records
        if record.name.startswith("octavo")
    )
    assert KEY not in logged
    assert "diary" not in logged
    assert all("diary" not in answer.text for answer in refusals)
    lines = [json.loads(line.partition("request ")[2]) for line in logged.splitlines() if line.startswith("request {")]
    assert [line["path"] for line in lines] == [COMPLETIONS, "/v1/chat/completions"]
    assert lines[0]["prompt_tokens"] == [8]


# --- S11: tenants


def test_s11_keys_are_tenants_of_the_prefix_cache(tmp_path: Path) -> None:
    with running_server(scripted(tmp_path), api_key=("a-key", "b-key")) as server:

        def cached(key: str, **fields: Any) -> int:
            body = {"prompt": LONG_PROMPT, "max_tokens": 1, **fields}
            answer = server.post(COMPLETIONS, body, headers={"Authorization": f"Bearer {key}"})
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("a-key") == 0
        assert cached("a-key") == 32
        assert cached("b-key") == 0, "another tenant learns what was sent"
        assert cached("b-key") == 32
        assert cached("a-key", cache_salt="x") == 0
        assert cached("b-key", cache_salt="x") == 0, "a salt that both know joins them"
        assert cached("a-key", cache_salt="x") == 32


@pytest.mark.parametrize("salt", ["", "x" * 1025, 5, [1]])
def test_salts_are_short_texts(keyed: Running, salt: Any) -> None:
    answer = keyed.post(COMPLETIONS, {"prompt": [1], "cache_salt": salt}, headers={"Authorization": f"Bearer {KEY}"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")


# --- V29: one tokenizer, many threads


def test_v29_a_tokenizer_is_shared_by_threads(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    prompter = Prompter(Tokenizer(tmp_path), 4096, None, 5)

    async def one(number: int) -> None:
        text = f"text {number} é" * (1 + number % 7)
        assert await prompter.encode(text) == list(text.encode())
        chat = await prompter.chat([{"role": "user", "content": text}])
        assert await prompter.decode(chat) == f"user\n{text}\nassistant\n"

    async def many() -> None:
        await asyncio.gather(*(one(number) for number in range(1000)))

    asyncio.run(many())
    prompter.close()


def test_v32_chat_adds_no_second_bos(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"bos_token": "<|endoftext|>", "add_bos_token": True}
    settings["chat_template"] = "{{ bos_token }}" + settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    messages = [{"role": "user", "content": "hi"}]
    with running_server(folder) as server:
        ids = server.post("/tokenize", {"messages": messages}).json()["tokens"]
        assert ids.count(258) == 1
        assert ids[0] == 258
        body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
        assert server.post("/v1/chat/completions", body).json()["prompt_token_ids"] == ids
        assert server.llm.tokenizer.chat(messages) == ids


# --- CORS and TLS


def test_cors_is_off_unless_asked_for(tmp_path: Path) -> None:
    ask = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
    llm = scripted(tmp_path)
    with running_server(llm) as server:
        answer = httpx.options(server.url + COMPLETIONS, headers=ask)
        assert "access-control-allow-origin" not in answer.headers
    with running_server(scripted(tmp_path / "b"), allowed_origins='["http://elsewhere"]', api_key=KEY) as server:
        answer = httpx.options(server.url + COMPLETIONS, headers=ask)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "http://elsewhere")
        other = httpx.options(server.url + COMPLETIONS, headers={**ask, "Origin": "http://evil"})
        assert "access-control-allow-origin" not in other.headers
        real = server.post(COMPLETIONS, {"prompt": [1]}, headers={"Origin": "http://elsewhere"})
        assert real.status_code == 401, "CORS opens no door"


def test_tls_files(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not here")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    with running_server(scripted(tmp_path), ssl_keyfile=str(key), ssl_certfile=str(certificate)) as server:
        assert server.url.startswith("https:")
        trust = ssl.create_default_context(cafile=str(certificate))
        answer = httpx.post(server.url + COMPLETIONS, json={"prompt": [1], "max_tokens": 3}, verify=trust, timeout=60)
        assert answer.json()["choices"][0]["text"] == "AAA"
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")
    with pytest.raises(ConfigError, match="belong together"):
        ServerSettings(ssl_keyfile="x")


def test_settings_share_a_file_with_the_engines(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 9000\nmax-num-seqs: 7\napi-key: [one, two]\n")
    server, engine = ServerSettings.model_fields, EngineConfig.model_fields
    settings = ServerSettings.load({}, file, {"OCTAVO_HOST": "::1", "OCTAVO_SEED": "3"}, others=engine)
    config = EngineConfig.load({"model": "m"}, file, {"OCTAVO_HOST": "::1", "OCTAVO_SEED": "3"}, others=server)
    assert (settings.port, settings.host, [k.get_secret_value() for k in settings.api_key]) == (
        9000,
        "::1",
        ["one", "two"],
    )
    assert (config.max_num_seqs, config.seed) == (7, 3)
    with pytest.raises(ConfigError, match="unknown setting 'prot'"):
        ServerSettings.load({"prot": 1}, None, {})
