"""The command line: finds commands, parses, runs one, and turns errors into sentences and exit codes.

Parsing imports neither torch nor transformers, so `octavo --help` answers at once; each command imports what it needs.
Errors meant for people are printed without a traceback and end with their exit code. Core's commands are the other files
here; they come in through the hook `octavo_commands`, as those of plugins do.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from octavo import __version__
from octavo.command import Command
from octavo.errors import OctavoError, PluginError
from octavo.platforms import Platform
from octavo.plugins import discover, installed_entry_points


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    try:
        options = build_parser(arguments).parse_args(arguments)
        debug = options.debug
        logging.basicConfig(
            level=logging.DEBUG if debug else logging.INFO,
            format="%(levelname)s %(message)s",
            stream=sys.stderr,
        )
        logging.captureWarnings(True)
        return int(options.run_command(options))
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("octavo: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.filename is not None:
            print(f"octavo: {str(error.filename)[:500]}: {error.strerror}", file=sys.stderr)
            return 2
        what = f"{type(error).__name__}: {error}"
        print(f"octavo: internal error: {what}; run with --debug for the traceback", file=sys.stderr)
        return 1


def build_parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser that these arguments need: of the command that they begin with, or of all."""
    parser = argparse.ArgumentParser(prog="octavo", description="Serves large language models from paged KV memory.")
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    listed = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, kind in _commands(arguments).items():
        sub = listed.add_parser(name, help=kind.help, description=kind.help, formatter_class=argparse.HelpFormatter)
        sub.add_argument("--debug", action="store_true", help="Log everything.")
        if not arguments or arguments[0] == name:
            command = kind()
            try:
                command.add_arguments(sub)
            except Exception as error:
                where = f"{kind.__module__}.{kind.__qualname__}"
                raise PluginError(
                    f"command {name}: {where}.add_arguments failed: {type(error).__name__}: {error}"
                ) from error
            sub.set_defaults(run_command=command.run)
    return parser


def _commands(arguments: Sequence[str]) -> Mapping[str, type[Command]]:
    """Core's commands, and those of plugins unless one of core's is meant: `octavo serve` imports no plugin for its name."""
    platform, hook = Platform.detect("cpu"), ("octavo_commands",)
    core = [point for point in installed_entry_points() if point.name == "core"]
    own = discover(platform, entry_points=core, only=hook).commands
    if arguments and arguments[0] in own:
        return own
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--disable-plugins", default=os.environ.get("OCTAVO_DISABLE_PLUGINS", ""))
    disabled = early.parse_known_args(arguments)[0].disable_plugins
    return discover(platform, disable=[name for name in disabled.split(",") if name], only=hook).commands
