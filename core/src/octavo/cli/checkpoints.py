"""Commands about checkpoints and plugins: `octavo inspect | doctor | convert | quantize | plugins | check-plugin`."""

from __future__ import annotations

import argparse
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from octavo.command import Command, add_engine_settings, add_settings, engine_config, given
from octavo.config import EngineConfig, HumanInt, describe
from octavo.errors import ConfigError

_CONVERT_SETTINGS = ("ignore_tensors", "disable_plugins", "disable_progress")
_QUANTIZE_SETTINGS = ("tokenizer", "dtype", "device", "linear_kernels", *_CONVERT_SETTINGS)
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
        _add_shard_size(parser)
        add_settings(parser, EngineConfig, only=frozenset(_CONVERT_SETTINGS))

    def run(self, options: argparse.Namespace) -> int:
        from octavo.front.convert import convert

        config = EngineConfig.load({"model": options.source, "device": "cpu", **given(options, *_CONVERT_SETTINGS)})
        return convert(config, options.destination, options.to, _shard_size(options))


class Quantize(Command):
    """Calibrates the scales of an fp8 KV cache."""

    name = "quantize"
    help = (
        "Calibrate the scales of an fp8 KV cache with real text. Weights are quantised by --quantize-weights while they "
        "load."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("source", metavar="MODEL", help="Folder or file of the model.")
        parser.add_argument(
            "--kv-scales-only", action="store_true", help="Make scales of K and V, leave weights alone."
        )
        parser.add_argument(
            "--out",
            required=True,
            metavar="PLACE",
            help="X.safetensors: a file of scales; else a folder, the whole model.",
        )
        parser.add_argument("--calibration", metavar="FILE", help="Text to run. Default: the help topics of Python.")
        for flag, default, text in (
            ("--num-samples", 16, "Pieces of the text to run, drawn at random."),
            ("--max-length", 512, "Tokens in each piece."),
            ("--seed", 0, "Seed of the draw."),
        ):
            parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} Default: {default}.")
        parser.add_argument(
            "--kv-scales-granularity",
            choices=["tensor", "head"],
            default="tensor",
            help="One scale for a layer's K and one for its V, or one for each KV head. Default: tensor.",
        )
        _add_shard_size(parser)
        add_settings(parser, EngineConfig, only=frozenset(_QUANTIZE_SETTINGS))

    def run(self, options: argparse.Namespace) -> int:
        from octavo.front.quantize import quantize_kv

        if not options.kv_scales_only:
            raise ConfigError(
                "octavo quantize makes scales of the KV cache: say --kv-scales-only. Weights are quantised while they load, "
                "by --quantize-weights of the other commands"
            )
        if small := [name for name in ("num_samples", "max_length") if getattr(options, name) < 1]:
            raise ConfigError(f"--{small[0].replace('_', '-')} {getattr(options, small[0])}: expected 1 or more")
        return quantize_kv(
            EngineConfig.load({"model": options.source, **given(options, *_QUANTIZE_SETTINGS)}),
            options.out,
            calibration=options.calibration,
            num_samples=options.num_samples,
            max_length=options.max_length,
            seed=options.seed,
            per_head=options.kv_scales_granularity == "head",
            max_shard_size=_shard_size(options),
        )


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


def _add_shard_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-shard-size", default="5g", metavar="SIZE", help="Bytes of a file. Default: 5g.")


def _shard_size(options: argparse.Namespace) -> int:
    try:
        return TypeAdapter(Annotated[HumanInt, Field(ge=1)]).validate_python(options.max_shard_size)
    except ValidationError as error:
        raise ConfigError(f"--max-shard-size: {describe(error, 'size')}") from None
