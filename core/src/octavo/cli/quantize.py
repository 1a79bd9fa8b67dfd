"""`octavo quantize` makes quantised checkpoints, `octavo eval` says what that costs."""

from __future__ import annotations

import argparse
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from octavo.cli.checkpoints import add_shard_size, shard_size
from octavo.command import Command, add_settings, given
from octavo.config import EngineConfig, HumanInt, describe
from octavo.errors import ConfigError

_SETTINGS = (
    "tokenizer",
    "dtype",
    "device",
    "linear_kernels",
    "ignore_tensors",
    "disable_plugins",
    "disable_progress",
)
_NOT_IN_EVAL = frozenset(
    [
        "model",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "num_blocks_override",
        "kv_cache_memory_bytes",
        "kv_cache_memory_utilization",
        "enable_prefix_caching",
        "swap_space",
        "preemption_mode",
        "scheduling_policy",
        "max_logprobs",
        "max_num_sequences_per_request",
        "seed",
    ]
)
_SAMPLES, _KV_SAMPLES = 128, 16


class Quantize(Command):
    """Makes a quantised checkpoint of a float one, or calibrates the scales of an fp8 KV cache."""

    name = "quantize"
    help = (
        "Make a quantised checkpoint of a float one, with text that runs through it layer by layer; or calibrate the scales of "
        "an fp8 KV cache. A run that was stopped goes on when the same command is given again."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("source", metavar="MODEL", nargs="?", help="Folder or file of the model.")
        parser.add_argument("--method", metavar="NAME", help="How: awq, gptq, rtn or what else is installed.")
        parser.add_argument("--recipe", metavar="FILE", help="YAML file that says which layer is quantised how.")
        parser.add_argument("--to", metavar="FORMAT", help="Format to write. Default: the method's own.")
        parser.add_argument("--bits", type=int, metavar="N", help="Bits of a code. Default: the method's.")
        parser.add_argument("--group-size", type=int, metavar="N", help="Inputs that share a scale; -1: all.")
        parser.add_argument(
            "--set", action="append", default=[], metavar="NAME=VALUE", help="An option of the method; may be repeated."
        )
        parser.add_argument("--list-methods", action="store_true", help="List the methods and their options, and stop.")
        parser.add_argument(
            "--auto-bits",
            type=float,
            metavar="AVERAGE",
            help="Choose bits for each group of layers by measured sensitivity, AVERAGE bits a weight in all, scales included.",
        )
        parser.add_argument(
            "--auto-bits-choices", default="3,4,8", metavar="N,...", help="Bits to choose from. Default: 3,4,8."
        )
        parser.add_argument(
            "--kv-scales-only", action="store_true", help="Make scales of K and V, leave weights alone."
        )
        parser.add_argument(
            "--out",
            metavar="PLACE",
            help="Folder to write: a new one, or an empty one. With --kv-scales-only, X.safetensors is a file of scales.",
        )
        parser.add_argument(
            "--calibration", metavar="FILE", help="Text to run; pydoc: the help topics of Python. Default: pydoc."
        )
        parser.add_argument(
            "--num-samples",
            type=int,
            metavar="N",
            help=f"Pieces of the text, drawn at random. Default: {_SAMPLES}; for KV scales {_KV_SAMPLES}.",
        )
        for flag, default, text in (
            ("--max-length", 512, "Tokens in each piece."),
            ("--seed", 0, "Seed of the draw."),
            ("--skip-tokens", 0, "Tokens at the start of each piece that are computed, but not counted."),
        ):
            parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} Default: {default}.")
        parser.add_argument(
            "--activation-memory",
            default="4GiB",
            metavar="SIZE",
            help="Bytes of activations in memory; if there are more, they lie on disk. Default: 4GiB.",
        )
        parser.add_argument("--restart", action="store_true", help="Throw away what an unfinished run left.")
        parser.add_argument(
            "--kv-scales-granularity",
            choices=["tensor", "head"],
            default="tensor",
            help="One scale for a layer's K and one for its V, or one for each KV head. Default: tensor.",
        )
        add_shard_size(parser)
        add_settings(parser, EngineConfig, only=frozenset(_SETTINGS))

    def run(self, options: argparse.Namespace) -> int:
        if options.list_methods:
            from octavo.front.quantize_report import list_methods

            return list_methods(EngineConfig.load({"model": "-", **given(options, *_SETTINGS)}))
        for name in ("source", "out"):
            if getattr(options, name) is None:
                raise ConfigError(f"{'MODEL' if name == 'source' else '--out'} is missing")
        _check_least(options, num_samples=1, max_length=1, skip_tokens=0)
        config = EngineConfig.load({"model": options.source, **given(options, *_SETTINGS)})
        text = None if options.calibration == "pydoc" else options.calibration
        if options.kv_scales_only:
            return self._kv(options, config, text)

        from octavo.front.quantize_weights import Calibration, QuantizeSettings, quantize_weights

        return quantize_weights(
            config,
            options.out,
            _recipe(options),
            Calibration(text, options.num_samples or _SAMPLES, options.max_length, options.seed, options.skip_tokens),
            QuantizeSettings(
                shard_size(options),
                _bytes(options, "activation_memory"),
                options.restart,
                None if options.auto_bits is None else (options.auto_bits, _choices(options.auto_bits_choices)),
            ),
        )

    @staticmethod
    def _kv(options: argparse.Namespace, config: EngineConfig, text: str | None) -> int:
        from octavo.front.quantize import quantize_kv

        given_too = [n for n in ("method", "recipe", "to", "bits", "group_size", "auto_bits") if getattr(options, n)]
        if given_too:
            raise ConfigError(
                f"--kv-scales-only leaves weights alone: --{given_too[0].replace('_', '-')} has no meaning"
            )
        return quantize_kv(
            config,
            options.out,
            calibration=text,
            num_samples=options.num_samples or _KV_SAMPLES,
            max_length=options.max_length,
            seed=options.seed,
            per_head=options.kv_scales_granularity == "head",
            max_shard_size=shard_size(options),
        )


class Eval(Command):
    """Scores models on a text."""

    name = "eval"
    help = (
        "Score a model on a text: perplexity, size, speed. Of several models, the others are compared with the first: KL "
        "divergence, agreement on the most likely token, and the error after each layer."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("models", metavar="MODEL", nargs="+", help="Folders of models; the float one first.")
        parser.add_argument(
            "--text", metavar="FILE", help="Text to score; pydoc: Python's help topics. Default: pydoc."
        )
        for flag, default, text in (
            ("--windows", 12, "Windows of the text, from its start."),
            ("--window", 1024, "Tokens of a window."),
        ):
            parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} Default: {default}.")
        parser.add_argument("--plot", metavar="FILE", help="Draw the error after each layer, as PNG.")
        parser.add_argument("--json", action="store_true", help="Print JSON.")
        add_settings(parser, EngineConfig, skip=_NOT_IN_EVAL)

    def run(self, options: argparse.Namespace) -> int:
        from octavo.front.evaluate import evaluate

        _check_least(options, windows=1, window=2)
        settings = given(options, *(name for name in EngineConfig.model_fields if name not in _NOT_IN_EVAL))
        configs = [EngineConfig.load({"model": model, **settings}) for model in options.models]
        text = None if options.text == "pydoc" else options.text
        if options.plot is not None and len(configs) == 1:
            raise ConfigError("--plot compares models with the first: name two or more")
        return evaluate(configs, text, options.windows, options.window, options.plot, options.json)


def _recipe(options: argparse.Namespace) -> Any:
    """The recipe that the flags name, or that they are."""
    from octavo.front.recipe import Recipe, read_recipe

    if (options.method is None) == (options.recipe is None):
        raise ConfigError(
            "say how to quantise, by --method NAME or by --recipe FILE (--list-methods lists methods); scales of the KV cache "
            "alone are made by --kv-scales-only"
        )
    values = dict(_option(text) for text in options.set)
    values |= {name: value for name in ("bits", "group_size") if (value := getattr(options, name)) is not None}
    if options.recipe is None:
        return Recipe.load({"rules": [{"method": options.method, **values}], "to": options.to}, "--method")
    if values:
        raise ConfigError(f"{next(iter(values))}: with --recipe, options of methods stand in the recipe")
    recipe = read_recipe(options.recipe)
    return recipe if options.to is None else recipe.model_copy(update={"to": options.to})


def _option(text: str) -> tuple[str, Any]:
    import yaml

    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: expected NAME=VALUE")
    try:
        return name.strip().replace("-", "_"), yaml.safe_load(value)
    except yaml.YAMLError:
        return name.strip().replace("-", "_"), value


def _choices(text: str) -> tuple[int, ...]:
    try:
        choices = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(f"--auto-bits-choices {text}: expected numbers such as 3,4,8") from None
    return choices


def _check_least(options: argparse.Namespace, **least: int) -> None:
    for name, limit in least.items():
        value = getattr(options, name)
        if value is not None and value < limit:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected {limit} or more")


def _bytes(options: argparse.Namespace, name: str) -> int:
    try:
        return TypeAdapter(Annotated[HumanInt, Field(ge=0)]).validate_python(getattr(options, name))
    except ValidationError as error:
        raise ConfigError(f"--{name.replace('_', '-')}: {describe(error, 'size')}") from None
