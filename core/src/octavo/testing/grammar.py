"""The suite for grammar compilers: masks allow what the grammar does and nothing else, and nothing is half honoured."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.engine.grammar import GrammarCompiler, GrammarMatcher, StructuredOutputsParams
from octavo.errors import RequestError
from octavo.front.tokenizer import Tokenizer
from octavo.testing.models import SPECIAL_TOKENS, tiny_tokenizer
from octavo.testing.suite import Suite

VOCAB_SIZE = 300
"""The model's; the tokenizer has fewer tokens, and some of these are words that can be spelt by bytes as well."""
_WORDS = ('{"', '":', "yes", "no", "12", " {", '"}', "é")
_CLOSING = frozenset(b'"}]0123456789')
_NUM_TOKENS = 256 + len(SPECIAL_TOKENS) + len(_WORDS)

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_LIST = {"type": "array", "items": {"enum": ["a", "é", None]}, "minItems": 1, "maxItems": 3}
_Case = tuple[dict[str, Any], Sequence[str], Sequence[str], Callable[[str], bool]]
CASES: Sequence[_Case] = (
    (
        {"json": _PERSON},
        ['{"name": "Zoë", "age": 7}', '{"name":"","age":150}'],
        [
            '{"name": "x"}',
            '{"name": "x", "age": 151}',
            '{"name": "x", "age": 7, "b": 1}',
            "[]",
            "",
            '{"name": "x", "age": 7',
        ],
        lambda text: json.loads(text).keys() == {"name", "age"} and 0 <= json.loads(text)["age"] <= 150,
    ),
    (
        {"json": _LIST},
        ['["a"]', '["é", null, "a"]'],
        ["[]", '["a", "a", "a", "a"]', '["b"]'],
        lambda text: 1 <= len(json.loads(text)) <= 3 and set(json.loads(text)) <= {"a", "é", None},
    ),
    (
        {
            "json": json.dumps(
                {"$ref": "#/$defs/n", "$defs": {"n": {"type": ["integer", "null"], "maximum": 99, "minimum": 0}}}
            )
        },
        ["7", "null"],
        ["100", '"7"', "nul", "07"],
        lambda text: json.loads(text) is None or 0 <= json.loads(text) <= 99,
    ),
    (
        {"regex": "[0-9]{3}-(a|é)+"},
        ["123-aé"],
        ["123-", "12-a", "123-ab"],
        lambda text: re.fullmatch("[0-9]{3}-(a|é)+", text) is not None,
    ),
    (
        {"choice": ["yes", "no", "no way", "“é”"]},
        ["yes", "no", "no way", "“é”"],
        ["y", "nope", ""],
        lambda text: text in ("yes", "no", "no way", "“é”"),
    ),
    (
        {"json_object": True},
        ["{}", '{"a": [1.5e3, {"b": null}]}'],
        ["[]", "1", '{"a"}'],
        lambda text: isinstance(json.loads(text), dict),
    ),
    (
        {
            "json": {"type": "object", "properties": {"a": {"const": 1}}},
            "disable_additional_properties": True,
            "disable_any_whitespace": True,
        },
        ["{}", '{"a":1}'],
        ['{"a": 1}', '{"b":1}'],
        lambda text: text in ("{}", '{"a":1}'),
    ),
)
REFUSED: Sequence[dict[str, Any]] = (
    {"regex": "("},
    {"json": {"type": "nope"}},
    {"json": {"$ref": "#/$defs/nowhere"}},
    {"json": {"type": "string", "pattern": "("}},
    {"json": {"type": "string", "pattern": "\\q"}},
    {"json": {"type": "object", "properties": {"a": {"$ref": "other.json"}}}},
)


@cache
def _tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizer(Path(folder), _WORDS)
        return Tokenizer(folder)


class GrammarCompilerSuite(Suite):
    """Proves a grammar compiler: `class TestMine(GrammarCompilerSuite): compiler = MyCompiler`."""

    compiler: ClassVar[type[GrammarCompiler]]
    _subject = "compiler"
    _made: ClassVar[GrammarCompiler | None] = None

    @property
    def subject(self) -> GrammarCompiler:
        cls = type(self)
        if cls._made is None:
            assert cls.compiler.why_not(_tokenizer().hf_tokenizer) is None, "it refuses a plain byte-level tokenizer"
            cls._made = cls.compiler(_tokenizer().hf_tokenizer, VOCAB_SIZE)
        return cls._made

    def start(self, asked: dict[str, Any]) -> GrammarMatcher:
        return self.subject.compile(StructuredOutputsParams(**asked).spec)

    def test_texts_are_accepted_or_not(self) -> None:
        wrong = []
        for asked, good, bad, _ in CASES:
            for expected, texts in ((True, good), (False, bad)):
                for text in texts:
                    matcher = self.start(asked)
                    accepted = all(matcher.accept(token) for token in text.encode()) and matcher.may_end()
                    if accepted is not expected:
                        wrong.append(f"{asked}: {text!r} is {'accepted' if accepted else 'refused'}")
        assert not wrong, "\n".join(wrong)

    def test_random_walks_along_the_masks_give_what_was_asked(self) -> None:
        for asked, _, _, fits in CASES:
            for seed in range(8):
                text = self._walk(asked, Random(seed))
                assert text is None or fits(text), f"{asked} gave {text!r}"

    def _walk(self, asked: dict[str, Any], random: Random) -> str | None:
        """A text of tokens that the masks allowed; None where it did not come to an end in time."""
        matcher, tokens = self.start(asked), list[int]()
        while len(tokens) < 400:
            allowed = _set_bits(matcher)
            if matcher.may_end() and (not allowed or random.random() < 0.3):
                return _tokenizer().decode(tokens)
            assert allowed, f"{asked}: stuck after {_tokenizer().decode(tokens)!r}"
            closing = [token for token in allowed if len(tokens) > 60 and token in _CLOSING]
            tokens.append(random.choice(closing or allowed))
            assert matcher.accept(tokens[-1]), f"{asked}: token {tokens[-1]} is in the mask and is refused"
        return None

    def test_masks_hold_text_tokens_of_the_tokenizer_only(self) -> None:
        for asked, good, _, _ in CASES:
            matcher = self.start(asked)
            for token in good[0].encode():
                allowed = [t for t in _set_bits(matcher) if t != _tokenizer().hf_tokenizer.eos_token_id]
                wrong = [t for t in allowed if t >= _NUM_TOKENS or 256 <= t < 256 + len(SPECIAL_TOKENS)]
                assert not wrong, f"{asked}: special or unknown tokens {wrong} are allowed"
                assert matcher.accept(token)

    def test_every_word_of_the_mask_is_written(self) -> None:
        first, second = np.zeros(_words(), np.int32), np.full(_words(), -1, np.int32)
        for asked, *_ in CASES:
            matcher = self.start(asked)
            matcher.fill_mask(first)
            matcher.fill_mask(second)
            assert (first == second).all(), f"{asked}: bits that were set before stay set"

    def test_state_is_a_function_of_the_tokens(self) -> None:
        for asked, good, _, _ in CASES:
            once, tokens = self.start(asked), list(good[0].encode())
            for i, token in enumerate(tokens):
                again = self.start(asked)
                assert all(again.accept(t) for t in tokens[:i])  # without masks in between, as after a preemption
                assert _set_bits(again) == _set_bits(once), (
                    f"{asked}: the mask after {i} tokens depends on the calls before"
                )
                assert once.accept(token)

    def test_forks_are_independent(self) -> None:
        for asked, good, _, _ in CASES:
            tokens = list(good[-1].encode())
            parent = self.start(asked)
            for i, token in enumerate(tokens):
                before, child = _set_bits(parent), parent.fork()
                assert _set_bits(child) == before
                assert all(child.accept(t) for t in tokens[i:])
                assert child.may_end()
                assert _set_bits(parent) == before, f"{asked}: a fork's tokens reached its parent"
                assert parent.accept(token)

    def test_what_cannot_be_honoured_is_refused(self) -> None:
        for asked in REFUSED:
            with pytest.raises(RequestError) as error:
                self.start(asked)
            assert error.value.param == "structured_outputs", f"{asked}: the error names no field"

    def test_threads_may_compile_at_once(self) -> None:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda case: _set_bits(self.start(case[0])), [*CASES] * 4))
        assert found == found[: len(CASES)] * 4


def _words() -> int:
    return (VOCAB_SIZE + 31) // 32


def _set_bits(matcher: GrammarMatcher) -> list[int]:
    mask: NDArray[np.int32] = np.zeros(_words(), dtype=np.int32)
    matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    ends = [_tokenizer().hf_tokenizer.eos_token_id]
    return [int(token) for token in np.flatnonzero(bits) if token not in ends]
