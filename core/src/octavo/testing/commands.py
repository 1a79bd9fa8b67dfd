"""The suite for commands: that the help lists them at no cost, and that every flag is explained."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import ClassVar

import pytest

from octavo.command import Command
from octavo.testing.suite import Suite

HEAVY = ("torch", "transformers", "numpy", "matplotlib", "fastapi", "uvicorn", "aiohttp")
"""What neither the help nor the parsing of a command may import."""


class CommandSuite(Suite):
    """Proves a command: `class TestMine(CommandSuite): command = MyCommand`. What the command does is not run."""

    command: ClassVar[type[Command]]
    _subject = "command"

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog=f"octavo {self.command.name}")
        parser.add_argument("--debug", action="store_true", help="Log everything.")  # as the command line does first
        self.command().add_arguments(parser)
        return parser

    def test_name_and_help_fit_into_the_list(self) -> None:
        name, text = self.command.name, self.command.help
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name), f"name {name!r}: expected lower-case words joined by -"
        assert re.fullmatch(r"\S.*\.", text), f"help {text!r}: expected a sentence on one line"

    def test_every_flag_is_explained(self) -> None:
        unexplained = [
            f"{prog}: {' or '.join(a.option_strings) or a.dest}" for prog, a in _actions(self._parser()) if not a.help
        ]
        assert not unexplained, f"flags without help: {unexplained}"

    def test_help_can_be_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as end:
            self._parser().parse_args(["--help"])
        assert end.value.code == 0
        assert capsys.readouterr().out.startswith("usage: ")

    def test_listing_and_parsing_are_cheap(self) -> None:
        module, name = self.command.__module__, self.command.__qualname__
        code = (
            f"import argparse, sys; from importlib import import_module; command = import_module({module!r}).{name}(); "
            "command.add_arguments(argparse.ArgumentParser()); "
            f"print(*sorted(set({HEAVY}) & set(sys.modules)))"
        )
        path = f"import sys; sys.path[:] = {sys.path!r}; "
        run = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert run.stdout.split() == [], f"importing {module} and adding its flags also imports {run.stdout.strip()}"


def _actions(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """All flags and arguments with the command they belong to, those of commands below included."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
        else:
            yield parser.prog, action
