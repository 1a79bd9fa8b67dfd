"""`octavo chat` and `octavo complete`: what a session shows, keeps and sends, with a model here and with a server."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support import scripted_llm

from octavo.cli import main
from octavo.errors import ConfigError, OctavoError, RequestError
from octavo.front.speaker import Answer, LocalSpeaker, RemoteSpeaker, Speaker
from octavo.front.terminal import Terminal, printable
from octavo.testing import tiny_model, tiny_tokenizer


class Parrot(Speaker):
    """Answers with what it was told, a word at a time, and notes it."""

    label = "parrot"

    def __init__(self, fail_after: int | None = None) -> None:
        self.heard: list[Any] = []
        self.fail_after = fail_after
        self.closed = 0

    def chat(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        self.heard.append(([dict(m) for m in messages], dict(values)))
        return self._say(messages[-1]["content"], answer)

    def complete(self, prompt: str, values: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        self.heard.append((prompt, dict(values)))
        return self._say(prompt, answer)

    def _say(self, text: str, answer: Answer) -> Iterator[str]:
        try:
            for i, word in enumerate(text.split()):
                if i == self.fail_after:
                    raise RequestError("the parrot died")
                if word == "stop!":
                    raise KeyboardInterrupt
                answer.add(f"{word} ")
                answer.output_tokens = i + 1
                yield f"{word} "
        finally:
            self.closed += 1

    def close(self) -> None:
        pass


def session(
    speaker: Speaker, *lines: str, chat: bool = True, system: str | None = None, values: Mapping[str, Any] = {}
) -> tuple[str, Terminal]:
    """What a terminal shows while a user types these lines."""
    waiting = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system=None, width=200, highlight=False)
    terminal = Terminal(speaker, values, system=system, console=console, read=read)
    terminal.chat() if chat else terminal.complete()
    return screen.getvalue(), terminal


def test_a_conversation_is_kept() -> None:
    parrot = Parrot()
    shown, terminal = session(parrot, "hello there", "", "and again", "/history", system="be kind")
    assert "hello there \n2 tokens, " in shown
    assert "tokens/s" in shown
    asked, _ = parrot.heard[1]
    assert [m["role"] for m in asked] == ["system", "user", "assistant", "user"]
    assert [m["content"] for m in asked] == ["be kind", "hello there", "hello there ", "and again"]
    assert "assistant: and again" in shown
    assert len(terminal.messages) == 4


def test_commands() -> None:
    parrot = Parrot()
    lines = ["/help", "/system be brief", "one", "/undo", "two", "/reset", "three", "/nonsense", "/exit", "never"]
    shown, _ = session(parrot, *lines)
    assert "/history" in shown
    assert "no command /nonsense" in shown
    contents = [[m["content"] for m in asked] for asked, _ in parrot.heard]
    assert contents == [["be brief", "one"], ["be brief", "two"], ["be brief", "three"]]


def test_settings_are_checked_and_sent() -> None:
    parrot = Parrot()
    lines = ["/set temperature 0.25", "/set stop END", "a", "/set temperature -3", "/set nonsense 5", "b"]
    lines += ["/set temperature none", "/set top-k=7", "c", "/set", "/set stop"]
    shown, _ = session(parrot, *lines, values={"max_tokens": 9})
    assert [values for _, values in parrot.heard] == [
        {"max_tokens": 9, "temperature": 0.25, "stop": ("END",)},
        {"max_tokens": 9, "temperature": 0.25, "stop": ("END",)},
        {"max_tokens": 9, "stop": ("END",), "top_k": 7},
    ]
    assert "sampling parameter 'temperature'" in shown
    assert "unknown sampling parameter 'nonsense'" in shown
    assert shown.splitlines()[-1] == "stop: ('END',)"


def test_an_interrupted_answer_is_kept_as_far_as_it_came() -> None:
    parrot = Parrot()
    shown, terminal = session(parrot, "one two stop! three", "four")
    assert "ended by interruption" in shown
    assert [m["content"] for m in terminal.messages] == ["one two stop! three", "one two ", "four", "four "]
    assert parrot.closed == 2


def test_a_failed_answer_ends_no_session() -> None:
    shown, terminal = session(Parrot(fail_after=1), "one two", "three")
    assert "error: the parrot died" in shown
    assert terminal.failed
    assert [m["content"] for m in terminal.messages[2:]] == ["three", "three "]


def test_answers_cannot_move_the_cursor() -> None:
    shown, _ = session(Parrot(), "\x1b[2Jgone \x07bell \x9b3A")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown.replace("\x1b[0m", ""))
    assert printable("a\tb\nc\r\x00é👩‍💻") == "a\tb\nc\ufffd\ufffdé👩‍💻"


def test_complete_continues_each_line_alone() -> None:
    parrot = Parrot()
    shown, _ = session(parrot, "once upon", "/set top_k 3", "a time", "/etc/passwd", "/exit", "no", chat=False)
    assert parrot.heard == [("once upon", {}), ("a time", {"top_k": 3}), ("/etc/passwd", {"top_k": 3})]
    assert "once upon \n" in shown


# --- a model in this process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_chat_in_process(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--num-blocks-override", "64", "--max-tokens", "5", "--temperature", "0", "--ignore-eos"]
    assert main(["chat", str(folder), "--quick", "hello", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip()
    assert "5 tokens, " in captured.err
    assert "ended by length" in captured.err
    assert main(["complete", str(folder), "--quick", "hello", *arguments]) == 0
    assert "prompt 5 tokens" in capsys.readouterr().err


def test_chat_reads_lines_where_there_is_no_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n/reset\ntwo\n"))
    assert main(["chat", str(folder), "--num-blocks-override", "64", "--max-tokens", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("tokens") >= 2
    assert "the conversation is forgotten" in captured.err
    assert "forgotten" not in captured.out
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 2000 + "\n"))
    assert main(["chat", str(folder), "--num-blocks-override", "64"]) == 1, "a prompt that is too long"
    assert "limit is 512" in capsys.readouterr().err


def test_a_local_answer_is_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(b"ping")
    llm = scripted_llm(tmp_path, {tuple(prompt): [*b"pong pong", 257]})
    monkeypatch.setattr("octavo.front.speaker.LLM", lambda config: llm)
    speaker = LocalSpeaker(llm.config)
    answer = Answer()
    text = "".join(speaker.complete("ping", {"temperature": 0, "max_tokens": 20}, answer))
    assert text == answer.text == "pong pong"
    assert (answer.prompt_tokens, answer.output_tokens, answer.finish_reason) == (4, 10, "stop")
    pieces = speaker.complete("ping", {"temperature": 0, "max_tokens": 20}, Answer())
    next(pieces)
    pieces.close()
    assert not llm.engine.has_unfinished, "leaving an answer stops it"
    speaker.close()


# --- a server


class _Handler(BaseHTTPRequestHandler):
    """Answers from `answers` by path; keeps what was asked in `asked`."""

    answers: dict[str, tuple[int, bytes]]
    asked: list[tuple[str, Any, dict[str, str]]]

    def do_GET(self) -> None:
        self._send(None)

    def do_POST(self) -> None:
        self._send(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _send(self, body: Any) -> None:
        self.asked.append((self.path, body, {k.lower(): v for k, v in self.headers.items()}))
        status, content = self.answers[self.path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


STREAM = b"".join(
    b"data: " + json.dumps(event).encode() + b"\r\n\r\n"
    for event in (
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "Hi "}}]},
        {"choices": [{"delta": {"content": "you"}}]},
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 2}},
    )
)
DONE = b"data: [DONE]\n\n"


@pytest.fixture
def server() -> Iterator[tuple[str, type[_Handler]]]:
    handler = type("Handler", (_Handler,), {"answers": {}, "asked": []})
    handler.answers["/v1/models"] = (200, b'{"data": [{"id": "first"}, {"id": "second"}]}')
    listening = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{listening.server_address[1]}/v1", handler
    listening.shutdown()
    thread.join()
    listening.server_close()


def test_chat_with_a_server(
    server: tuple[str, type[_Handler]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = server
    handler.answers["/v1/chat/completions"] = (200, b": hello\n\n" + STREAM + DONE)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    arguments = ["--url", url, "--system-prompt", "be kind", "--temperature", "0.5"]
    assert main(["chat", *arguments, "--quick", "hello"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hi you\n"
    assert "2 tokens, " in captured.err
    assert "prompt 11 tokens, ended by length" in captured.err
    _, body, headers = handler.asked[-1]
    assert body == {
        "model": "first",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}],
        "temperature": 0.5,
    }
    assert headers["authorization"] == "Bearer secret"


def test_complete_with_a_server_by_name(server: tuple[str, type[_Handler]], capsys: pytest.CaptureFixture[str]) -> None:
    url, handler = server
    event = b'data: {"choices": [{"text": "more", "finish_reason": "stop"}]}\n\n'
    handler.answers["/v1/completions"] = (200, event + DONE)
    assert main(["complete", "--url", url, "--model-name", "second", "--quick", "once", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out == "more\n"
    assert [(path, body["model"], body["prompt"]) for path, body, _ in handler.asked] == [
        ("/v1/completions", "second", "once")
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, b'{"error": {"message": "no such model"}}'), "answered 404: no such model"),
        ((502, b"<html>"), "answered 502: <html>"),
        ((200, b'data: {"error": {"message": "out of memory"}}\n\n'), "out of memory"),
        ((200, STREAM), "closed the stream before its end"),
        ((200, b"data: nonsense\n\n"), "is no JSON object"),
    ],
)
def test_v47_what_a_server_says_is_shown(
    server: tuple[str, type[_Handler]], answer: tuple[int, bytes], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = server
    handler.answers["/v1/chat/completions"] = answer
    assert main(["chat", "--url", url, "--quick", "hello"]) == 1
    assert message in capsys.readouterr().err


def test_unusable_places_are_told(server: tuple[str, type[_Handler]], folder: Path) -> None:
    url, handler = server
    handler.answers["/v1/models"] = (200, b'{"data": []}')
    with pytest.raises(ConfigError, match="lists no model"):
        RemoteSpeaker(url)
    handler.answers["/v1/models"] = (200, b"[]")
    with pytest.raises(OctavoError, match="the list of models"):
        RemoteSpeaker(url)
    with pytest.raises(ConfigError, match="expected an address"):
        RemoteSpeaker("localhost:8000")
    with pytest.raises(ConfigError, match="is the server running"):
        RemoteSpeaker("http://127.0.0.1:9/v1")
    assert main(["chat", str(folder), "--url", url]) == 2
    assert main(["chat", str(folder), "--api-key", "x"]) == 2


def test_what_is_not_known_is_not_shown() -> None:
    answer = Answer(started=1.0, first=1.5, ended=2.5)
    assert answer.summary() == "first after 500 ms"
    answer.output_tokens, answer.finish_reason = 5, "stop"
    assert answer.summary() == "5 tokens, 4.0 tokens/s, first after 500 ms"


def test_a_tokenizer_alone_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_tokenizer(tmp_path)
    assert main(["chat", str(tmp_path), "--quick", "hello"]) == 2
    assert "config.json" in capsys.readouterr().err
