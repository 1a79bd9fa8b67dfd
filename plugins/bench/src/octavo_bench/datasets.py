"""Prompts to send: random tokens, shared prefixes, one's own file, or real prose. The same for the same seed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from octavo import ConfigError
from octavo_bench.tokens import Tokens

NAMES = ("random", "custom", "prefix_repetition", "sonnet")
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt, its tokens without those that a server adds, and how many output tokens to ask for."""

    prompt: str
    prompt_tokens: int
    output_tokens: int


class RoughTokens(Tokens):
    """Stands in where there is no tokenizer: a token is a word of three letters. Servers count exactly afterwards."""

    def __init__(self) -> None:
        self._plain = list(range(26**3))

    def encode(self, text: str) -> list[int]:
        return list(range(-(-len(text) // CHARACTERS_PER_TOKEN)))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(" " + "".join(chr(97 + i // 26**k % 26) for k in range(3)) for i in ids)

    def cut(self, text: str, length: int) -> str:
        return text[: length * CHARACTERS_PER_TOKEN]

    @property
    def num_special(self) -> int:
        return 0


def add_arguments(parser: argparse.ArgumentParser, num_prompts: int = 1000) -> None:
    """The flags of all datasets, named and valued as vLLM's. `--seed` is the engine's or the caller's."""
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset-name", choices=NAMES, default="random", help="What to send. Default: random.")
    group.add_argument("--dataset-path", metavar="FILE", help="custom: JSONL file, 'prompt' on each line.")
    group.add_argument(
        "--num-prompts", type=int, default=num_prompts, metavar="N", help=f"Requests. Default: {num_prompts}."
    )
    for flag, text in (
        ("--input-len", "Prompt tokens, whatever the dataset; overrides its own flag."),
        ("--output-len", "Output tokens, whatever the dataset; overrides its own flag."),
    ):
        group.add_argument(flag, type=int, metavar="N", help=text)
    for flag, default, text in (
        ("--random-input-len", 1024, "random: prompt tokens."),
        ("--random-output-len", 128, "random: output tokens."),
        ("--random-prefix-len", 0, "random: tokens before those, the same in all prompts."),
        ("--custom-output-len", 256, "custom: output tokens; -1: 'output_tokens' of each line."),
        ("--sonnet-input-len", 550, "sonnet: prompt tokens."),
        ("--sonnet-output-len", 150, "sonnet: output tokens."),
        ("--sonnet-prefix-len", 200, "sonnet: of these, the first ones that all prompts share."),
        ("--prefix-repetition-prefix-len", 256, "prefix_repetition: tokens of each prefix."),
        ("--prefix-repetition-suffix-len", 256, "prefix_repetition: tokens after it, new in each prompt."),
        ("--prefix-repetition-num-prefixes", 10, "prefix_repetition: different prefixes."),
        ("--prefix-repetition-output-len", 128, "prefix_repetition: output tokens."),
    ):
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} Default: {default}.")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="random: lengths are uniform between (1 - R) and (1 + R) times the given ones, 0 <= R < 1. Default: 0.",
    )
    group.add_argument("--disable-shuffle", action="store_true", help="custom: keep the order of the file.")


def samples(options: argparse.Namespace, tokens: Tokens) -> list[Sample]:
    """The prompts that the flags ask for. Raises ConfigError where a flag or the file is unusable."""
    for name, value in vars(options).items():
        if isinstance(value, int) and name.endswith(("_len", "_prompts", "_prefixes")):
            least = -1 if name == "custom_output_len" else 0 if name.endswith("prefix_len") else 1
            if value < least:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: expected {least} or more")
    if not 0 <= options.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio {options.random_range_ratio}: expected 0 <= R < 1")
    if options.dataset_path is not None and options.dataset_name != "custom":
        raise ConfigError(f"--dataset-path is for --dataset-name custom, not {options.dataset_name}")
    make = {"random": _random, "custom": _custom, "prefix_repetition": _prefixes, "sonnet": _sonnet}
    return make[options.dataset_name](options, tokens, Random(int(getattr(options, "seed", 0))))


def _random(options: argparse.Namespace, tokens: Tokens, random: Random) -> list[Sample]:
    inputs = options.input_len or options.random_input_len
    outputs = options.output_len or options.random_output_len
    ratio = options.random_range_ratio
    prefix = tokens.random_text(options.random_prefix_len, random) if options.random_prefix_len else ""

    def length(centre: int) -> int:
        return random.randint(max(round(centre * (1 - ratio)), 1), max(round(centre * (1 + ratio)), 1))

    found = []
    for _ in range(options.num_prompts):
        prompt = prefix + tokens.random_text(max(length(inputs) - tokens.num_special, 1), random)
        found.append(Sample(prompt, tokens.count(prompt), length(outputs)))
    return found


def _prefixes(options: argparse.Namespace, tokens: Tokens, random: Random) -> list[Sample]:
    """The same number of prompts for each prefix, in random order."""
    if options.num_prompts < options.prefix_repetition_num_prefixes:
        raise ConfigError(
            f"--num-prompts {options.num_prompts} is less than --prefix-repetition-num-prefixes "
            f"{options.prefix_repetition_num_prefixes}"
        )
    suffix = options.input_len or options.prefix_repetition_suffix_len
    count, outputs = options.prefix_repetition_num_prefixes, options.output_len or options.prefix_repetition_output_len
    prefixes = [tokens.random_text(options.prefix_repetition_prefix_len, random) for _ in range(count)]
    prompts = [prefixes[i % count] + tokens.random_text(suffix, random) for i in range(options.num_prompts)]
    random.shuffle(prompts)
    return [Sample(prompt, tokens.count(prompt), outputs) for prompt in prompts]


def _sonnet(options: argparse.Namespace, tokens: Tokens, random: Random) -> list[Sample]:
    """Lines of prose, the first of them shared; the prose is the language reference that comes with Python."""
    inputs = options.input_len or options.sonnet_input_len
    if options.sonnet_prefix_len > inputs:
        raise ConfigError(f"--sonnet-prefix-len {options.sonnet_prefix_len} is more than the prompt, {inputs}")
    lines = prose()
    prefix = tokens.cut(" ".join(lines), options.sonnet_prefix_len) if options.sonnet_prefix_len else ""
    found = []
    for _ in range(options.num_prompts):
        text = prefix
        while tokens.count(text) < inputs:
            text += " " + " ".join(random.choices(lines, k=8))
        text = tokens.cut(text, inputs)
        found.append(Sample(text, tokens.count(text), options.output_len or options.sonnet_output_len))
    return found


def prose() -> list[str]:
    """Sentences of at least five words from Python's own help topics."""
    from pydoc_data.topics import topics

    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    lines = [f"{sentence}." for sentence in text.split(". ") if 5 <= len(sentence.split()) <= 60]
    if not lines:
        raise ConfigError("--dataset-name sonnet: this Python has no help topics; use another dataset")
    return lines


def _custom(options: argparse.Namespace, tokens: Tokens, random: Random) -> list[Sample]:
    if options.dataset_path is None:
        raise ConfigError("--dataset-name custom needs --dataset-path FILE, a JSONL file with 'prompt' on each line")
    try:
        text = Path(options.dataset_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {options.dataset_path}: cannot read the file: {error}") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            found.append(_custom_sample(f"--dataset-path {options.dataset_path}, line {number}", line, options, tokens))
    if not found:
        raise ConfigError(f"--dataset-path {options.dataset_path}: the file has no lines")
    if not options.disable_shuffle:
        random.shuffle(found)
    return [found[i % len(found)] for i in range(options.num_prompts)]


def _custom_sample(where: str, line: str, options: argparse.Namespace, tokens: Tokens) -> Sample:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"{where}: expected an object with 'prompt', a text that is not empty")
    outputs = options.output_len or options.custom_output_len
    if outputs == -1:
        outputs = record.get("output_tokens")
        if type(outputs) is not int or outputs < 1:
            raise ConfigError(
                f"{where}: --custom-output-len -1 needs 'output_tokens', an integer above 0, got {outputs!r}"
            )
    if options.input_len:
        prompt = tokens.cut(prompt, options.input_len)
    return Sample(prompt, tokens.count(prompt), outputs)
