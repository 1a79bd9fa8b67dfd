"""Conversations and completions in a terminal: a prompt, streamed answers, and commands that begin with a slash."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from rich.console import Console

from octavo.errors import OctavoError, RequestError
from octavo.front.speaker import Answer, Speaker, checked

HELP = """\
/help              this list
/reset             forget the conversation; the system prompt stays
/system [TEXT]     set the system prompt, or show it
/set [NAME VALUE]  set a sampling parameter such as temperature 0.2, or show what is set; VALUE none takes it back
/history           show the conversation
/undo              take back the last question and its answer
/exit              leave, as Ctrl-D does; Ctrl-C stops an answer"""


class Terminal:
    """One user's session. `read` asks for a line and raises EOFError at the end; the default is the terminal itself."""

    def __init__(
        self,
        speaker: Speaker,
        values: Mapping[str, Any],
        *,
        system: str | None = None,
        console: Console | None = None,
        read: Callable[[str], str] | None = None,
    ) -> None:
        self.speaker, self.values, self.system = speaker, checked(values), system
        self.messages: list[dict[str, str]] = []
        self.console = console or Console(highlight=False)
        self.failed = False
        self._read = read or _reader()

    def chat(self) -> int:
        """Talks until the user leaves. Returns 1 where an answer failed and nobody was there to see it."""
        self._note(f"{self.speaker.label}; /help lists the commands")
        while (line := self._line()) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    break
            elif line:
                self.ask(line)
        return int(self.failed and not sys.stdin.isatty())

    def ask(self, text: str) -> None:
        """Sends a message, shows the answer, and keeps both unless nothing came."""
        question = {"role": "user", "content": text}
        answer = Answer()
        self._show(self.speaker.chat([*self._conversation(), question], self.values, answer), answer)
        if answer.text:
            self.messages += [question, {"role": "assistant", "content": answer.text}]

    def complete(self) -> int:
        """Continues each line until the user leaves."""
        self._note(f"{self.speaker.label}; each line is continued on its own; /set and /exit work as in chat")
        while (line := self._line()) is not None:
            if line.startswith(("/set", "/exit", "/help")):
                if not self._command(line):
                    break
            elif line:
                self.continue_(line)
        return int(self.failed and not sys.stdin.isatty())

    def continue_(self, prompt: str) -> None:
        """Shows the continuation of one text."""
        answer = Answer()
        self._show(self.speaker.complete(prompt, self.values, answer), answer)

    def _conversation(self) -> list[dict[str, str]]:
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.messages

    def _show(self, pieces: Iterator[str], answer: Answer) -> None:
        try:
            for piece in pieces:
                self.console.out(printable(piece), end="", highlight=False)
                self.console.file.flush()
        except KeyboardInterrupt:
            answer.finish_reason = "interruption"
        except OctavoError as error:
            self.failed = True
            if answer.text:
                self.console.out()
            self._note(f"error: {error}", style="red")
            return
        finally:
            close = getattr(pieces, "close", None)
            if close is not None:
                close()
        self.console.out()
        self._note(answer.summary())

    def _line(self) -> str | None:
        try:
            return self._read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return None

    def _note(self, text: str, style: str = "dim") -> None:
        """What is about the answer and not part of it: on stderr where the answers go into a file or pipe."""
        target = self.console if self.console.is_terminal else Console(stderr=True, highlight=False)
        target.print(printable(text), style=style, markup=False, soft_wrap=True)

    def _command(self, line: str) -> bool:
        """Runs a slash command; False ends the session."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit"):
            return False
        if name == "/help":
            self._note(HELP)
        elif name == "/reset":
            self.messages.clear()
            self._note("the conversation is forgotten")
        elif name == "/system":
            if rest:
                self.system = rest
            self._note(f"system prompt: {self.system or 'none'}")
        elif name == "/history":
            for message in self._conversation():
                self._note(f"{message['role']}: {message['content']}")
        elif name == "/undo":
            del self.messages[-2:]
            self._note(f"{len(self.messages) // 2} questions are left")
        elif name == "/set":
            self._set(rest)
        else:
            self._note(f"no command {name}; /help lists them", style="red")
        return True

    def _set(self, rest: str) -> None:
        name, _, text = rest.replace("=", " ").partition(" ")
        name, text = name.strip().replace("-", "_"), text.strip()
        if name and text:
            changed = {k: v for k, v in self.values.items() if k != name}
            if text != "none":
                changed[name] = _value(text)
            try:
                self.values = checked(changed)
            except RequestError as error:
                self._note(f"error: {error}", style="red")
                return
        elif name:
            self._note(f"{name}: {self.values.get(name, 'not set')}")
            return
        self._note(", ".join(f"{k} {v}" for k, v in self.values.items()) or "nothing is set: the defaults hold")


def _value(text: str) -> Any:
    """Numbers and lists as JSON has them, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def printable(text: str) -> str:
    """Text without control characters, which could move the cursor, rename the window or worse."""
    return "".join(c if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) else "\ufffd" for c in text)


def _reader() -> Callable[[str], str]:
    """Lines with editing and a history, which is kept in memory only; without a terminal, lines of stdin."""
    if not sys.stdin.isatty():

        def read(_: str) -> str:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line

        return read
    with suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing
    return input
