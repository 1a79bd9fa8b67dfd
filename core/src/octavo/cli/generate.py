"""`octavo generate`: prompts in, text out, in this process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.command import Command, add_engine_settings, add_settings, engine_config
from octavo.errors import RequestError

SAMPLING_DEFAULTS = {"temperature": 0.0, "max_tokens": 128}
"""Where the commands differ from `SamplingParams`, which are vLLM's: reproducible, and more than a glimpse."""


class Generate(Command):
    """Completes prompts with a model, streaming the text."""

    name = "generate"
    help = "Complete prompts with a model, streaming the text."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_engine_settings(parser)
        parser.add_argument("--prompt", action="append", help="A prompt; may be repeated. Default: lines of stdin.")
        parser.add_argument("--file", help="File with one prompt a line ('-': stdin).")
        parser.add_argument(
            "--chat", action="store_true", help="Send each prompt as a user's message through the template."
        )
        parser.add_argument(
            "--json", action="store_true", help="Print one JSON object for each output instead of text."
        )
        add_sampling(parser)

    def run(self, options: argparse.Namespace) -> int:
        from octavo.engine.sampling_params import SamplingParams
        from octavo.front.commands import generate

        prompts = list(options.prompt or [])
        if options.file is not None or not prompts:
            prompts += _read_prompts(options.file or "-")
        if not prompts:
            raise RequestError("no prompt: give --prompt, --file, or lines on stdin", param="prompt")
        if any("\ud800" <= c <= "\udfff" for prompt in prompts for c in prompt):  # how Python keeps other bytes
            raise RequestError("a prompt is not UTF-8 text", param="prompt")
        params = SamplingParams(**{**SAMPLING_DEFAULTS, **sampling_values(options)})
        return generate(engine_config(options), prompts, params, chat=options.chat, as_json=options.json)


def add_sampling(parser: argparse.ArgumentParser, defaults: Mapping[str, Any] = SAMPLING_DEFAULTS) -> None:
    """Adds a flag for each sampling parameter; `sampling_values` reads back what is given. `defaults` are shown."""
    from octavo.engine.sampling_params import SamplingParams

    add_settings(
        parser.add_argument_group("sampling"),
        SamplingParams,
        skip=frozenset(["seed", "logit_bias"]),
        prefix="sampling_",
        defaults=defaults,
    )


def sampling_values(options: argparse.Namespace) -> dict[str, Any]:
    """What the flags of `add_sampling` give, by parameter."""
    values = {k.removeprefix("sampling_"): v for k, v in vars(options).items() if k.startswith("sampling_")}
    for name, value in values.items():
        if isinstance(value, str) and name.endswith("token_ids"):
            values[name] = [item for item in value.split(",") if item]
        elif value == "none":
            values[name] = None
    return values


def _read_prompts(file: str) -> list[str]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        source = "stdin" if file == "-" else f"--file {file}"
        raise RequestError(f"{source}: cannot read prompts: {error}", param="prompt") from None
    return [line for line in text.splitlines() if line.strip()]
