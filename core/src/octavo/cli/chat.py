"""`octavo chat` and `octavo complete`: a model, or a server, in the terminal."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.cli.generate import add_sampling, sampling_values
from octavo.command import Command, add_engine_settings, engine_config
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.front.terminal import Terminal

_DEFAULT_URL = "http://localhost:8000/v1"
_CHAT_DEFAULTS = {"temperature": 0.7, "max_tokens": 1024}
_COMPLETE_DEFAULTS = {"temperature": 0.0, "max_tokens": 128}


class Chat(Command):
    """A conversation in the terminal."""

    name = "chat"
    help = "Talk with a model: in this process, where MODEL is given, else with the server at --url."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_speaker(parser)
        parser.add_argument("--system-prompt", metavar="TEXT", help="System prompt; /system changes it.")
        parser.add_argument("--quick", metavar="MESSAGE", help="Send one message, print the answer, and leave.")
        add_sampling(parser, _CHAT_DEFAULTS)

    def run(self, options: argparse.Namespace) -> int:
        terminal = _terminal(options, _CHAT_DEFAULTS, options.system_prompt)
        try:
            if options.quick is None:
                return terminal.chat()
            terminal.ask(options.quick)
            return int(terminal.failed)
        finally:
            terminal.speaker.close()


class Complete(Command):
    """Continuations in the terminal."""

    name = "complete"
    help = "Continue texts, line by line: in this process, where MODEL is given, else with the server at --url."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_speaker(parser)
        parser.add_argument("--quick", metavar="TEXT", help="Continue one text, print it, and leave.")
        add_sampling(parser, _COMPLETE_DEFAULTS)

    def run(self, options: argparse.Namespace) -> int:
        terminal = _terminal(options, _COMPLETE_DEFAULTS, None)
        try:
            if options.quick is None:
                return terminal.complete()
            terminal.continue_(options.quick)
            return int(terminal.failed)
        finally:
            terminal.speaker.close()


def _add_speaker(parser: argparse.ArgumentParser) -> None:
    add_engine_settings(parser)
    server = parser.add_argument_group("server")
    server.add_argument("--url", help=f"A server with OpenAI's API. Default, where no MODEL is given: {_DEFAULT_URL}.")
    server.add_argument(
        "--model-name", metavar="NAME", help="Model to ask the server for. Default: the first it lists."
    )
    server.add_argument("--api-key", metavar="KEY", help="Key of the server. Default: $OPENAI_API_KEY.")


def _terminal(options: argparse.Namespace, defaults: Mapping[str, Any], system: str | None) -> Terminal:
    from octavo.front.speaker import LocalSpeaker, RemoteSpeaker
    from octavo.front.terminal import Terminal

    values = sampling_values(options)
    local = options.model_path is not None or hasattr(options, "model") or options.config is not None
    if local and options.url is not None:
        raise ConfigError(f"--url {options.url} and a model to load are both given; leave one of them out")
    if not local:
        key = options.api_key or os.environ.get("OPENAI_API_KEY")
        return Terminal(RemoteSpeaker(options.url or _DEFAULT_URL, options.model_name, key), values, system=system)
    if other := [n for n in ("model_name", "api_key") if getattr(options, n) is not None]:
        raise ConfigError(f"--{other[0].replace('_', '-')} is for a server, but {options.model_path} is loaded here")
    return Terminal(LocalSpeaker(engine_config(options)), {**defaults, **values}, system=system)
