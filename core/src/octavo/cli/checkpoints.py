"""Commands about checkpoints and plugins: `octavo inspect | doctor | convert | plugins | check-plugin`."""

from __future__ import annotations

import argparse
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from octavo.command import Command, add_engine_settings, add_settings, engine_config, given
from octavo.config import EngineConfig, HumanInt, describe
from octavo.errors import ConfigError

_CONVERT_SETTINGS = ("ignore_tensors", "disable_plugins", "disable_progress")
_PLUGIN_SETTINGS = ("disable_plugins", "strict_plugins", "device")


class Inspect(Command):
    """Shows what would run."""

    name = "inspect"
    help = "Show what would run: each layer's scheme and kernel, and the KV memory plan."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_engine_settings(parser)
        parser.add_argument("--json", action="store_true", help="Print JSON.")
        parser.add_argument("--all", action="store_true", help="Show every layer, not one line for layers alike.")

    def run(self, options: argparse.Namespace) -> int:
        from octavo.front.commands import inspect

        return inspect(engine_config(options), as_json=options.json, every_layer=options.all)


class Doctor(Command):
    """Says whether a model would load and fit."""

    name = "doctor"
    help = (
        "Say whether a model would load and fit, what would run, and what looks wrong with it. Reads settings, headers and "
        "at most 32 MiB more. Exit code: 0 if it would load and fit, 1 if not (or if it is not there), 2 for bad settings."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_engine_settings(parser)
        parser.add_argument("--json", action="store_true", help="Print one JSON object: verdict, findings, plan.")
        parser.add_argument("--strict", action="store_true", help="Exit with 1 for warnings too.")

    def run(self, options: argparse.Namespace) -> int:
        from octavo.front.doctor import doctor

        return doctor(engine_config(options), as_json=options.json, strict=options.strict)


class Convert(Command):
    """Writes a quantised model in another format."""

    name = "convert"
    help = "Write a quantised model in another format, without changing a number."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("source", metavar="SRC", help="Folder or file of the model.")
        parser.add_argument("destination", metavar="DST", help="Folder to write: a new one, or an empty one.")
        parser.add_argument("--to", required=True, metavar="FORMAT", help="awq, gptq or what else the plugins write.")
        add_shard_size(parser)
        add_settings(parser, EngineConfig, only=frozenset(_CONVERT_SETTINGS))

    def run(self, options: argparse.Namespace) -> int:
        from octavo.front.convert import convert

        config = EngineConfig.load({"model": options.source, "device": "cpu", **given(options, *_CONVERT_SETTINGS)})
        return convert(config, options.destination, options.to, shard_size(options))


class Plugins(Command):
    """Lists installed plugins."""

    name = "plugins"
    help = "List installed plugins, what they fill, and why any failed."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("-v", "--verbose", action="store_true", help="Show tracebacks of failed plugins.")
        parser.add_argument("--json", action="store_true", help="Print JSON.")
        add_settings(parser, EngineConfig, only=frozenset(_PLUGIN_SETTINGS))

    def run(self, options: argparse.Namespace) -> int:
        from octavo.front.commands import plugins

        config = EngineConfig.load({"model": "-", **given(options, *_PLUGIN_SETTINGS)})
        return plugins(config, verbose=options.verbose, as_json=options.json)


class CheckPlugin(Command):
    """Proves a plugin against the reference."""

    name = "check-plugin"
    help = "Prove a plugin against the reference with the conformance kit."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("plugin", help="Name of the plugin, as `octavo plugins` lists it.")
        parser.add_argument("-v", "--verbose", action="store_true", help="Show each test.")
        add_settings(parser, EngineConfig, only=frozenset(["device"]))

    def run(self, options: argparse.Namespace) -> int:
        from octavo.front.commands import check_plugin

        config = EngineConfig.load({"model": "-", **given(options, "device")})
        return check_plugin(config, options.plugin, verbose=options.verbose)


def add_shard_size(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that `shard_size` reads."""
    parser.add_argument("--max-shard-size", default="5g", metavar="SIZE", help="Bytes of a file. Default: 5g.")


def shard_size(options: argparse.Namespace) -> int:
    """Bytes of a file, as `add_shard_size` was told."""
    try:
        return TypeAdapter(Annotated[HumanInt, Field(ge=1)]).validate_python(options.max_shard_size)
    except ValidationError as error:
        raise ConfigError(f"--max-shard-size: {describe(error, 'size')}") from None
