"""What a command of the command line is, and settings as its flags.

Core's own commands and those of plugins are the same kind of class and come in through the same hook. Nothing here imports
torch: the help lists every command without it.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from octavo.config import EngineConfig
from octavo.errors import ConfigError


class Command(ABC):
    """One command of `octavo`: its flags, and what it does with them.

    `name` is what users type, lower-case; `help` is one sentence for the list of commands. Importing the class must be cheap,
    because the help imports every command: `run` imports what it needs.
    """

    name: str
    help: str

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares flags and arguments; called only where this command is used. `--debug` is there already."""

    @abstractmethod
    def run(self, options: argparse.Namespace) -> int:
        """Does it and returns the exit code. An OctavoError is printed without a traceback and ends with its own."""


def add_engine_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the model, `--config FILE` and a flag for each engine setting; `engine_config` reads them back."""
    parser.add_argument("model_path", metavar="MODEL", nargs="?", help="Folder of the model.")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings.")
    add_settings(parser.add_argument_group("engine"), EngineConfig)


def engine_config(options: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The settings that the flags of `add_engine_settings`, the environment and the file give, in this order.

    `defaults` hold where none of them says anything. Raises ConfigError that names the setting and where its value came from.
    """
    values = {name: getattr(options, name) for name in EngineConfig.model_fields if hasattr(options, name)}
    path = getattr(options, "model_path", None)
    if path is not None and values.setdefault("model", path) != path:
        raise ConfigError(f"two models are named: {path}, and --model {values['model']}")
    config = EngineConfig.load(values, getattr(options, "config", None))
    unsaid = {name: value for name, value in defaults.items() if name not in config.model_fields_set}
    return EngineConfig(**{**config.model_dump(exclude_unset=True), **unsaid}) if unsaid else config


def add_settings(
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
        if name == "stop" or name == "bad_words" or extra.get("repeat"):
            options["action"] = "append"
        group.add_argument(*flags, **options)


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Of these settings, those that the command line gives."""
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def _help(field: FieldInfo, default: Any) -> str:
    text = (field.description or "").replace("%", "%%")
    default = field.default if default is None else default
    if not field.is_required() and default not in (None, (), {}) and "Default" not in text:
        text += f" Default: {default}."
    return text


def _choices(annotation: Any) -> list[str]:
    values = get_args(annotation)
    return list(values) if values and all(isinstance(v, str) for v in values) else []
