"""`octavo serve` as a process: it starts, serves, says what is wrong, and ends in good order. V42, V46, S08."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from octavo.cli import main
from octavo.testing import tiny_model

BLOCKS = ("--num-gpu-blocks-override", "64")


@contextmanager
def served(
    arguments: Sequence[str], module: Sequence[str] = ("octavo.cli", "serve")
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its URL."""
    command = [sys.executable, "-m", *module, *arguments, "--port", "0", *BLOCKS]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        said, found = "", None
        while found is None:
            line = process.stderr.readline()
            assert line, f"it ended: {said}"
            said += line
            found = re.search(r"is served at (\S+)\n", line)
        process.said = said  # type: ignore[attr-defined]
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("process") / "tiny")


def test_the_module_under_vllms_name(folder: Path) -> None:
    arguments = ["--model", str(folder), "--dtype", "auto", "--api-key", "sk-hidden", "--served-model-name", "a,b"]
    with served(arguments, ("octavo.entrypoints.openai.api_server",)) as (process, url):
        assert "sk-hidden" not in process.said  # type: ignore[attr-defined]
        assert "api_key=" in process.said  # type: ignore[attr-defined]
        auth = {"Authorization": "Bearer sk-hidden"}
        assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 401
        models = httpx.get(f"{url}/v1/models", headers=auth, timeout=60).json()["data"]
        assert [model["id"] for model in models] == ["a", "b"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_v42_sigterm_drains_and_a_second_one_ends_at_once(folder: Path) -> None:
    with served([str(folder)]) as (process, url):
        body = {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(60) == 0


def test_v42_nothing_is_left_after_sigkill(folder: Path) -> None:
    with served([str(folder)]) as (process, url):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if not children.exists():
            pytest.skip("the kernel lists no children of processes")
        assert children.read_text().split() == [], "one process: nothing can outlive it"
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 400}
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.kill()
            with pytest.raises(httpx.TransportError):
                list(lines)


def test_v42_interrupted_while_it_loads(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo.cli", "serve", str(folder), "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode != 0 or "served" in said
    assert "Traceback" not in said or "KeyboardInterrupt" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{tmp}/nowhere"], ["nowhere"]),
        (["{tmp}"], ["config.json"]),
        (["{model}", "--port", "{taken}"], ["--port", "cannot listen"]),
        (["{model}", "--uds", "{tmp}/no/such/dir.sock"], ["--uds"]),
        (["{model}", "--chat-template", "{tmp}/none.jinja"], ["--chat-template"]),
        (["{model}", "--ssl-keyfile", "x", "--ssl-certfile", "y"], ["--ssl-certfile"]),
        (["{model}", "--generation-config", "{tmp}/none"], ["--generation-config"]),
        (["{model}", "--override-generation-config", '{{"tempreature": 1}}'], ["tempreature"]),
        (["{model}", "--port", "70000"], ["port"]),
        (["{model}", "--model", "other"], ["two models"]),
    ],
)
def test_v46_what_is_wrong_is_said_in_a_sentence(
    folder: Path, tmp_path: Path, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {"tmp": str(tmp_path), "model": str(folder), "taken": str(taken.getsockname()[1])}
        code = main(["serve", *(argument.format(**places) for argument in arguments), *BLOCKS])
    said = capsys.readouterr().err
    assert code == 2, said
    assert "Traceback" not in said
    assert all(word in said for word in words), said


def test_s08_no_code_from_the_model_folder(folder: Path, tmp_path: Path) -> None:
    marked = tmp_path / "tiny"
    tiny_model(marked)
    marker = tmp_path / "marker"
    (marked / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n")
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        content = json.loads((marked / name).read_text())
        content["auto_map"] = {
            "AutoConfig": "evil.Evil",
            "AutoModelForCausalLM": "evil.Evil",
            "AutoTokenizer": ["evil.Evil", None],
        }
        (marked / name).write_text(json.dumps(content))
    with served([str(marked)]) as (_, url):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60).status_code == 200
    assert not marker.exists()


def test_a_unix_socket(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with served([str(folder), "--uds", str(path)]) as (process, url):
        assert url == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://x/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_s03_nothing_listens_but_what_was_asked_for(folder: Path) -> None:
    with served([str(folder)]) as (process, url):
        port = int(url.rpartition(":")[2])
        sockets = set()
        for fd in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd))
            except OSError:
                continue
            if found:
                sockets.add(found[1])
        rows = [line.split() for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]]
        listening = {row[1] for row in rows if row[9] in sockets and row[3] == "0A"}
        assert listening == {f"0100007F:{port:04X}"}, "only 127.0.0.1 and the port"
