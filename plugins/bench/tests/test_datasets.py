"""Prompts: as long as asked for, the same for the same seed, and refused with the line that is wrong."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import pytest

from octavo import ConfigError
from octavo.testing import tiny_tokenizer
from octavo_bench import datasets
from octavo_bench.datasets import RoughTokens, Sample
from octavo_bench.tokens import Tokens


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder)
    return Tokens(folder)


def draw(tokens: Tokens, *arguments: str, seed: int = 0) -> list[Sample]:
    parser = argparse.ArgumentParser()
    datasets.add_arguments(parser)
    options = parser.parse_args(["--num-prompts", "20", *arguments])
    options.seed = seed
    return datasets.samples(options, tokens)


@pytest.mark.parametrize("rough", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [
        ("--dataset-name", "random", "--random-input-len", "40", "--random-range-ratio", "0.5"),
        ("--dataset-name", "prefix_repetition"),
        ("--dataset-name", "sonnet"),
    ],
)
def test_the_same_seed_draws_the_same(tokens: Tokens, arguments: tuple[str, ...], rough: bool) -> None:
    counter = RoughTokens() if rough else tokens
    assert draw(counter, *arguments) == draw(counter, *arguments)
    assert draw(counter, *arguments) != draw(counter, *arguments, seed=1)


@pytest.mark.parametrize("rough", [False, True])
def test_random_lengths(tokens: Tokens, rough: bool) -> None:
    counter = RoughTokens() if rough else tokens
    fixed = draw(counter, "--random-input-len", "33", "--random-output-len", "9")
    assert {(s.prompt_tokens, s.output_tokens) for s in fixed} == {(33, 9)}
    assert {counter.count(s.prompt) for s in fixed} == {33}
    assert len({s.prompt for s in fixed}) == 20
    spread = draw(counter, "--random-input-len", "40", "--random-output-len", "10", "--random-range-ratio", "0.5")
    assert all(20 <= s.prompt_tokens <= 60 and 5 <= s.output_tokens <= 15 for s in spread)
    assert len({s.prompt_tokens for s in spread}) > 5
    overridden = draw(counter, "--input-len", "12", "--output-len", "3")
    assert {(s.prompt_tokens, s.output_tokens) for s in overridden} == {(12, 3)}


def test_a_random_prefix_is_shared(tokens: Tokens) -> None:
    found = draw(tokens, "--random-input-len", "10", "--random-prefix-len", "30")
    assert len({s.prompt[:30] for s in found}) == 1
    assert {s.prompt_tokens for s in found} == {40}


def test_prefixes_are_repeated_equally(tokens: Tokens) -> None:
    lengths = ("--prefix-repetition-prefix-len", "30", "--prefix-repetition-suffix-len", "10")
    found = draw(tokens, "--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "4", *lengths)
    assert sorted(Counter(s.prompt[:30] for s in found).values()) == [5] * 4
    assert {s.prompt_tokens for s in found} == {40}
    with pytest.raises(ConfigError, match="--num-prompts 20 is less than --prefix-repetition-num-prefixes 21"):
        draw(tokens, "--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "21")


@pytest.mark.parametrize("rough", [False, True])
def test_sonnet_is_prose_with_a_shared_beginning(tokens: Tokens, rough: bool) -> None:
    counter = RoughTokens() if rough else tokens
    found = draw(counter, "--dataset-name", "sonnet", "--sonnet-input-len", "300", "--sonnet-prefix-len", "100")
    assert all(295 <= s.prompt_tokens <= 300 for s in found)
    assert len({s.prompt[:100] for s in found}) == 1
    assert len({s.prompt for s in found}) == 20
    assert " the " in found[0].prompt
    with pytest.raises(ConfigError, match="--sonnet-prefix-len 200 is more than the prompt, 50"):
        draw(counter, "--dataset-name", "sonnet", "--input-len", "50")


def test_a_file_of_ones_own(tokens: Tokens, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"number {i}", "output_tokens": i + 1}) + "\n\n" for i in range(3)))
    arguments = ("--dataset-name", "custom", "--dataset-path", str(file))
    found = draw(tokens, *arguments)
    assert sorted(Counter(s.prompt for s in found).values()) == [6, 7, 7]
    assert {s.output_tokens for s in found} == {256}
    ordered = draw(tokens, *arguments, "--disable-shuffle", "--custom-output-len", "-1", "--num-prompts", "4")
    assert [(s.prompt, s.output_tokens) for s in ordered] == [
        ("number 0", 1),
        ("number 1", 2),
        ("number 2", 3),
        ("number 0", 1),
    ]
    assert {s.prompt_tokens for s in draw(tokens, *arguments, "--input-len", "3")} == {3}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file has no lines"),
        ("{]\n", "line 1: not JSON"),
        ('{"prompt": "a", "output_tokens": 1}\n[]\n', "line 2: expected an object with 'prompt'"),
        ('{"prompt": ""}\n', "line 1: expected an object with 'prompt'"),
        ('{"prompt": "a"}\n', "line 1: --custom-output-len -1 needs 'output_tokens'"),
        ("\xff", "cannot read the file"),
    ],
)
def test_a_bad_file_names_the_line(tokens: Tokens, tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=message):
        draw(tokens, "--dataset-name", "custom", "--dataset-path", str(file), "--custom-output-len", "-1")
    with pytest.raises(ConfigError, match="needs --dataset-path FILE"):
        draw(tokens, "--dataset-name", "custom")


def test_a_missing_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read tokenizer.json"):
        Tokens(tmp_path)
