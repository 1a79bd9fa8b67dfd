"""The command line: `octavo generate | inspect | doctor | convert | quantize | plugins | check-plugin`.

Parsing imports neither torch nor transformers, so `octavo --help` answers at once; each command imports what it needs.
Errors meant for people are printed without a traceback and end with their exit code.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from octavo import __version__
from octavo.config import EngineConfig, HumanInt, describe
from octavo.errors import ConfigError, OctavoError, RequestError

_SAMPLING_DEFAULTS = {"temperature": 0.0, "max_tokens": 128}
"""Where the command differs from `SamplingParams`, which are vLLM's: reproducible, and more than a glimpse."""
_QUANTIZE_SETTINGS = frozenset(
    ["tokenizer", "dtype", "device", "linear_kernels", "ignore_tensors", "disable_plugins", "disable_progress"]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    parser = build_parser()
    options = vars(parser.parse_args(arguments))
    debug = options.pop("debug")
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO,
        format="%(levelname)s %(message)s",
        stream=sys.stderr,
    )
    logging.captureWarnings(True)
    command = options.pop("command")
    options.pop("name", None)
    try:
        return int(command(options))
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


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="octavo", description="Serves large language models from paged KV memory.")
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="name")

    def command(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, formatter_class=argparse.HelpFormatter)
        sub.add_argument("--debug", action="store_true", help="Log everything.")
        sub.set_defaults(command=function)
        return sub

    generate = command("generate", _generate, "Complete prompts with a model, streaming the text.")
    _add_engine_settings(generate)
    generate.add_argument("--prompt", action="append", help="A prompt; may be repeated. Default: lines of stdin.")
    generate.add_argument("--file", help="File with one prompt a line ('-': stdin).")
    generate.add_argument(
        "--chat", action="store_true", help="Send each prompt as a user's message through the template."
    )
    generate.add_argument("--json", action="store_true", help="Print one JSON object for each output instead of text.")
    from octavo.engine.sampling_params import SamplingParams

    _add_settings(
        generate.add_argument_group("sampling"),
        SamplingParams,
        skip=frozenset(["seed", "logit_bias"]),
        prefix="sampling_",
        defaults=_SAMPLING_DEFAULTS,
    )

    inspect = command(
        "inspect", _inspect, "Show what would run: each layer's scheme and kernel, and the KV memory plan."
    )
    _add_engine_settings(inspect)
    inspect.add_argument("--json", action="store_true", help="Print JSON.")
    inspect.add_argument("--all", action="store_true", help="Show every layer, not one line for layers alike.")

    doctor = command(
        "doctor",
        _doctor,
        "Say whether a model would load and fit, what would run, and what looks wrong with it. Reads settings, headers and "
        "at most 32 MiB more. Exit code: 0 if it would load and fit, 1 if not (or if it is not there), 2 for bad settings.",
    )
    _add_engine_settings(doctor)
    doctor.add_argument("--json", action="store_true", help="Print one JSON object: verdict, findings, plan.")
    doctor.add_argument("--strict", action="store_true", help="Exit with 1 for warnings too.")

    convert = command("convert", _convert, "Write a quantised model in another format, without changing a number.")
    convert.add_argument("source", metavar="SRC", help="Folder or file of the model.")
    convert.add_argument("destination", metavar="DST", help="Folder to write: a new one, or an empty one.")
    convert.add_argument("--to", required=True, metavar="FORMAT", help="awq, gptq or what else the plugins write.")
    convert.add_argument("--max-shard-size", default="5g", metavar="SIZE", help="Bytes of a file. Default: 5g.")
    _add_settings(convert, EngineConfig, only=frozenset(["ignore_tensors", "disable_plugins", "disable_progress"]))

    quantize = command(
        "quantize",
        _quantize,
        "Calibrate the scales of an fp8 KV cache with real text. Weights are quantised by --quantize-weights while they load.",
    )
    quantize.add_argument("source", metavar="MODEL", help="Folder or file of the model.")
    quantize.add_argument("--kv-scales-only", action="store_true", help="Make scales of K and V, leave weights alone.")
    quantize.add_argument(
        "--out", required=True, metavar="PLACE", help="X.safetensors: a file of scales; else a folder, the whole model."
    )
    quantize.add_argument("--calibration", metavar="FILE", help="Text to run. Default: the help topics of Python.")
    for flag, default, text in (
        ("--num-samples", 16, "Pieces of the text to run, drawn at random."),
        ("--max-length", 512, "Tokens in each piece."),
        ("--seed", 0, "Seed of the draw."),
    ):
        quantize.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} Default: {default}.")
    quantize.add_argument(
        "--kv-scales-granularity",
        choices=["tensor", "head"],
        default="tensor",
        help="One scale for a layer's K and one for its V, or one for each KV head. Default: tensor.",
    )
    quantize.add_argument("--max-shard-size", default="5g", metavar="SIZE", help="Bytes of a file. Default: 5g.")
    _add_settings(quantize, EngineConfig, only=_QUANTIZE_SETTINGS)

    plugins = command("plugins", _plugins, "List installed plugins, what they fill, and why any failed.")
    plugins.add_argument("-v", "--verbose", action="store_true", help="Show tracebacks of failed plugins.")
    plugins.add_argument("--json", action="store_true", help="Print JSON.")
    _add_settings(plugins, EngineConfig, only=frozenset(["disable_plugins", "strict_plugins", "device"]))

    check = command("check-plugin", _check_plugin, "Prove a plugin against the reference with the conformance kit.")
    check.add_argument("plugin", help="Name of the plugin, as `octavo plugins` lists it.")
    check.add_argument("-v", "--verbose", action="store_true", help="Show each test.")
    _add_settings(check, EngineConfig, only=frozenset(["device"]))
    return parser


# --- settings as flags


def _add_engine_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_path", metavar="MODEL", nargs="?", help="Folder of the model.")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings.")
    _add_settings(parser.add_argument_group("engine"), EngineConfig)


def _add_settings(
    group: Any,
    model: type[BaseModel],
    *,
    only: frozenset[str] | None = None,
    skip: frozenset[str] = frozenset(),
    prefix: str = "",
    defaults: Mapping[str, Any] = {},
) -> None:
    """Adds one flag for each field of a settings model; absent flags leave no trace, so that other sources count."""
    for name, field in model.model_fields.items():
        if name in skip or (only is not None and name not in only):
            continue
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        flags = [f"--{name.replace('_', '-')}"]
        if short := extra.get("short"):
            flags.append(str(short))
        flags += [str(flag) for flag in (extra.get("flags") or [])]  # type: ignore[union-attr]
        options: dict[str, Any] = {
            "dest": prefix + name,
            "default": argparse.SUPPRESS,
            "help": _help(field, defaults.get(name)),
        }
        choices = _choices(field.annotation)
        if field.annotation is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif choices:
            options["choices"] = choices
        else:
            options["metavar"] = name.rpartition("_")[2].upper()
        if bare := extra.get("bare"):
            options |= {"nargs": "?", "const": bare}
        if name == "stop" or name == "bad_words":
            options["action"] = "append"
        group.add_argument(*flags, **options)


def _help(field: FieldInfo, default: Any) -> str:
    text = (field.description or "").replace("%", "%%")
    default = field.default if default is None else default
    if not field.is_required() and default not in (None, (), {}) and "Default" not in text:
        text += f" Default: {default}."
    return text


def _choices(annotation: Any) -> list[str]:
    values = get_args(annotation)
    return list(values) if values and all(isinstance(v, str) for v in values) else []


def _engine_config(options: dict[str, Any]) -> EngineConfig:
    values = {name: options[name] for name in EngineConfig.model_fields if name in options}
    path = options.get("model_path")
    if path is not None and values.setdefault("model", path) != path:
        raise ConfigError(f"two models are named: {path}, and --model {values['model']}")
    return EngineConfig.load(values, options.get("config"))


def _sampling_params(options: dict[str, Any]) -> Any:
    from octavo.engine.sampling_params import SamplingParams

    values = {k.removeprefix("sampling_"): v for k, v in options.items() if k.startswith("sampling_")}
    for name, value in values.items():
        if isinstance(value, str) and name.endswith("token_ids"):
            values[name] = [item for item in value.split(",") if item]
        elif value == "none":
            values[name] = None
    return SamplingParams(**{**_SAMPLING_DEFAULTS, **values})


# --- commands


def _generate(options: dict[str, Any]) -> int:
    from octavo.front.commands import generate

    prompts = list(options["prompt"] or [])
    if options["file"] is not None or not prompts:
        prompts += _read_prompts(options["file"] or "-")
    if not prompts:
        raise RequestError("no prompt: give --prompt, --file, or lines on stdin", param="prompt")
    if any("\ud800" <= c <= "\udfff" for prompt in prompts for c in prompt):  # how Python keeps other bytes
        raise RequestError("a prompt is not UTF-8 text", param="prompt")
    return generate(
        _engine_config(options), prompts, _sampling_params(options), chat=options["chat"], as_json=options["json"]
    )


def _read_prompts(file: str) -> list[str]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        source = "stdin" if file == "-" else f"--file {file}"
        raise RequestError(f"{source}: cannot read prompts: {error}", param="prompt") from None
    return [line for line in text.splitlines() if line.strip()]


def _inspect(options: dict[str, Any]) -> int:
    from octavo.front.commands import inspect

    return inspect(_engine_config(options), as_json=options["json"], every_layer=options["all"])


def _doctor(options: dict[str, Any]) -> int:
    from octavo.front.doctor import doctor

    return doctor(_engine_config(options), as_json=options["json"], strict=options["strict"])


def _convert(options: dict[str, Any]) -> int:
    from octavo.front.convert import convert

    names = ("ignore_tensors", "disable_plugins", "disable_progress")
    given = {n: options[n] for n in names if n in options}
    config = EngineConfig.load({"model": options["source"], "device": "cpu", **given})
    return convert(config, options["destination"], options["to"], _shard_size(options))


def _shard_size(options: dict[str, Any]) -> int:
    try:
        return TypeAdapter(Annotated[HumanInt, Field(ge=1)]).validate_python(options["max_shard_size"])
    except ValidationError as error:
        raise ConfigError(f"--max-shard-size: {describe(error, 'size')}") from None


def _quantize(options: dict[str, Any]) -> int:
    from octavo.front.quantize import quantize_kv

    if not options["kv_scales_only"]:
        raise ConfigError(
            "octavo quantize makes scales of the KV cache: say --kv-scales-only. Weights are quantised while they load, by "
            "--quantize-weights of the other commands"
        )
    if small := [name for name in ("num_samples", "max_length") if options[name] < 1]:
        raise ConfigError(f"--{small[0].replace('_', '-')} {options[small[0]]}: expected 1 or more")
    given = {name: options[name] for name in _QUANTIZE_SETTINGS if name in options}
    return quantize_kv(
        EngineConfig.load({"model": options["source"], **given}),
        options["out"],
        calibration=options["calibration"],
        num_samples=options["num_samples"],
        max_length=options["max_length"],
        seed=options["seed"],
        per_head=options["kv_scales_granularity"] == "head",
        max_shard_size=_shard_size(options),
    )


def _plugins(options: dict[str, Any]) -> int:
    from octavo.front.commands import plugins

    names = ("disable_plugins", "strict_plugins", "device")
    config = EngineConfig.load({"model": "-", **{n: options[n] for n in names if n in options}})
    return plugins(config, verbose=options["verbose"], as_json=options["json"])


def _check_plugin(options: dict[str, Any]) -> int:
    from octavo.front.commands import check_plugin

    config = EngineConfig.load({"model": "-", **{n: options[n] for n in ("device",) if n in options}})
    return check_plugin(config, options["plugin"], verbose=options["verbose"])


if __name__ == "__main__":
    sys.exit(main())
