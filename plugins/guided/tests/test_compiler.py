"""What the plugin adds to llguidance: refusals that say where, bounds, and tokenizers as models have them."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from octavo import GrammarMatcher, RequestError, StructuredOutputsParams
from octavo.testing import GrammarCompilerSuite, failures_of, tiny_tokenizer
from octavo_guided.compiler import GuidanceCompiler, Matcher
from octavo_guided.schema import close_objects, locate


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder)
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GuidanceCompiler:
    return GuidanceCompiler(tokenizer, 288)


def start(compiler: GuidanceCompiler, **asked: Any) -> GrammarMatcher:
    return compiler.compile(StructuredOutputsParams(**asked).spec)


def fits(matcher: GrammarMatcher, text: str) -> bool:
    return all(matcher.accept(token) for token in text.encode()) and matcher.may_end()


def bits(matcher: GrammarMatcher, size: int = 288) -> list[int]:
    words = np.zeros((size + 31) // 32, np.int32)
    matcher.fill_mask(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


# --- refusals


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"json": {"properties": {"a": {"items": {"type": "nope"}}}}}, ["#/properties/a/items", "nope"]),
        ({"json": {"$defs": {"x": {"not": {}}}, "$ref": "#/$defs/x"}}, ["#/$defs/x", "not"]),
        (
            {"json": {"properties": {"a/b": {"anyOf": [{}, {"format": "nope"}]}}}},
            ["#/properties/a~1b/anyOf/1", "format"],
        ),
        ({"json": {"prefixItems": [{}, {"pattern": "("}]}}, ["#/prefixItems/1", "unclosed group"]),
        ({"json": {"type": "array", "uniqueItems": True}}, ["uniqueItems"]),
        ({"json": {"if": {}, "then": {}}}, ["if"]),
        ({"json": {"$ref": "http://somewhere/x.json"}}, ["http://somewhere/x.json"]),
        ({"json": {"$ref": "#/$defs/x"}}, ["/$defs/x"]),
        ({"json": False}, ["false"]),
        ({"json": {"minLength": 5, "maxLength": 3, "type": "string"}}, ["minLength (5)"]),
        ({"json": {"oneOf": [{"type": "integer"}, {"minimum": 3}]}}, ["oneOf"]),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, ["x-guidance"]),
        ({"regex": "("}, ["regex", "unclosed group"]),
        ({"regex": r"(?=a)a"}, ["look-around"]),
        ({"regex": r"(a)\1"}, ["backreferences"]),
        ({"regex": "[^\\x00-\\U0010FFFF]"}, ["no text"]),
        ({"grammar": "start: nowhere"}, ["grammar", "nowhere"]),
        ({"grammar": 'start: start "a"'}, ["no text"]),
        ({"grammar": "root ::= ("}, ["grammar"]),
        ({"grammar": "root ::= " + "(" * 20_000}, ["grammar"]),
        ({"grammar": ""}, ["grammar"]),
    ],
)
def test_v36_refusals_say_what_and_where(compiler: GuidanceCompiler, asked: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RequestError) as error:
        start(compiler, **asked)
    assert error.value.param == "structured_outputs"
    assert len(str(error.value)) < 800
    for word in words:
        assert word in str(error.value)


def test_an_error_message_costs_a_second_at_most(compiler: GuidanceCompiler) -> None:
    both: Any = {"type": "object"}
    for i in range(12):
        both = {"allOf": [{"anyOf": [both, {"required": [f"a{i}"]}]}, {"anyOf": [both, {"required": [f"b{i}"]}]}]}
    started = time.monotonic()
    locate({"properties": {str(i): both for i in range(20)}}, "schema too large")
    assert time.monotonic() - started < 30


# --- v37: hostile grammars end, and what compiles can be walked


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "((((a{1,60}){1,60}){1,60}){1,60}){1,60}"},
        {"regex": "(.{1,1000}){1,1000}"},
        {"regex": "(a|aa)+b"},
        {"regex": "[ab]*a[ab]{200}"},
        {"regex": "(" * 50_000 + "a" + ")" * 50_000},
        {"regex": "a{1000000}"},
        {"json": {"const": "b" * 100_000}},
        {"grammar": '%llguidance {"no_forcing": false}\\nstart: "' + "a" * 100_000 + '"'},
        {"json": {"type": "string", "maxLength": 1_000_000}},
        {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}},
        {"json": {"$ref": "#"}},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        {"json": {"enum": [f"value {i}" for i in range(9_000)]}},
        {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1_000)}}},
        {"grammar": "start: a\na: a a | /[a-z]/"},
    ],
    ids=lambda asked: str(asked)[:30],
)
def test_v37_hostile_grammars_are_refused_or_run(compiler: GuidanceCompiler, asked: dict[str, Any]) -> None:
    with suppress(RequestError):
        matcher = start(compiler, **asked)
        for _ in range(30):
            allowed = bits(matcher)
            if not allowed or not matcher.accept(allowed[-1]):
                break
    assert fits(start(compiler, regex="ab"), "ab")


def test_text_that_must_come_costs_no_more_than_other_text(compiler: GuidanceCompiler) -> None:
    """A search for all text that is forced would take as long for each token as the text is."""
    matcher = start(compiler, json={"const": "b" * 100_000})
    started = time.process_time()
    assert all(bits(matcher) and matcher.accept(token) for token in b'"' + b"b" * 2_999)
    assert time.process_time() - started < 60


def test_objects_of_many_optional_properties(compiler: GuidanceCompiler) -> None:
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1_500)}}
    assert fits(start(compiler, json=many), '{"p0": "", "p1499": "x"}')


def test_whitespace_is_bounded_or_as_asked(compiler: GuidanceCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    for asked, good, bad in (
        ({}, ['{"a":1}', '{\n  "a" : 1}', "{" + " " * 64 + '"a":1}'], ["{" + " " * 65 + '"a":1}', '{"a":\u00a01}']),
        ({"disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}']),
        ({"whitespace_pattern": " ?"}, ['{"a": 1}', '{"a":1}'], ['{"a":  1}', '{"a":\n1}']),
    ):
        for expected, texts in ((True, good), (False, bad)):
            assert [fits(start(compiler, json=schema, **asked), text) for text in texts] == [expected] * len(texts), (
                asked
            )


def test_order_of_properties_is_the_schemas(compiler: GuidanceCompiler) -> None:
    schema = {"type": "object", "properties": {k: {"const": 1} for k in "ba"}, "required": ["a", "b"]}
    assert fits(start(compiler, json=schema), '{"b": 1, "a": 1}')
    assert not fits(start(compiler, json=schema), '{"a": 1, "b": 1}')


def test_closing_objects_changes_nothing_else() -> None:
    inner = {"type": "object", "properties": {"x": {"anyOf": [{"properties": {}}, {"type": "string"}]}}}
    schema = {
        "type": ["object", "null"],
        "properties": {"p": inner},
        "$defs": {"d": {"type": "object", "additionalProperties": True}},
    }
    before = json.dumps(schema)
    closed = close_objects(schema)
    assert json.dumps(schema) == before
    assert closed["additionalProperties"] is False
    assert closed["properties"]["p"]["additionalProperties"] is False
    assert closed["properties"]["p"]["properties"]["x"]["anyOf"] == [
        {"properties": {}, "additionalProperties": False},
        {"type": "string"},
    ]
    assert closed["$defs"]["d"]["additionalProperties"] is True
    assert close_objects(True) is True


# --- structural tags

TAG = {"begin": "<f=a>", "end": "</f>"}
INTEGER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
OLDER = {"type": "structural_tag", "structures": [{**TAG, "schema": INTEGER}], "triggers": ["<f"]}
NEWER = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [{**TAG, "content": {"type": "json_schema", "json_schema": INTEGER}}],
    },
}


@pytest.mark.parametrize("value", [OLDER, NEWER, json.dumps(OLDER)], ids=["older", "newer", "text"])
def test_structural_tags(compiler: GuidanceCompiler, value: Any) -> None:
    for text, expected in (
        ("plain é", True),
        ('see <f=a>{"n": 1}</f> and <f=a>{"n": 2}</f>', True),
        ("<f=b>", False),
        ('<f=a>{"n": "x"}</f>', False),
        ('<f=a>{"n": 1}', False),
    ):
        assert fits(start(compiler, structural_tag=value), text) is expected, text


@pytest.mark.parametrize(
    "value",
    [
        {"type": "other"},
        {"type": "structural_tag"},
        {"type": "structural_tag", "structures": [], "triggers": ["<"]},
        {**OLDER, "triggers": ["<g"]},
        {**OLDER, "more": 1},
        {"type": "structural_tag", "structures": [{"begin": "<f", "end": 3, "schema": {}}], "triggers": ["<f"]},
        {"type": "structural_tag", "format": {"type": "sequence"}},
        {"type": "structural_tag", "format": {**NEWER["format"], "at_least_one": True}},  # type: ignore[dict-item]
    ],
)
def test_structural_tags_that_are_refused(compiler: GuidanceCompiler, value: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structural_tag"):
        start(compiler, structural_tag=value)


def test_a_special_token_as_a_trigger(compiler: GuidanceCompiler) -> None:
    value = {
        "type": "structural_tag",
        "structures": [{"begin": "<|im_start|>", "end": "", "schema": INTEGER}],
        "triggers": ["<|im_start|>"],
    }
    matcher = start(compiler, structural_tag=value)
    assert all(matcher.accept(token) for token in [*b"hi ", 256, *b'{"n": 1}'])


# --- tokenizers


def test_vocabularies_larger_and_smaller_than_the_tokenizers(tokenizer: Any) -> None:
    for size in (400, 200):
        matcher = start(GuidanceCompiler(tokenizer, size), regex="[a-z]+")
        assert [t for t in bits(matcher, size) if t != tokenizer.eos_token_id] == list(range(ord("a"), ord("z") + 1))


def test_the_tokenizer_is_left_as_it_was(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.enable_truncation(7)
    try:
        GuidanceCompiler(tokenizer, 288)
        assert tokenizer.backend_tokenizer.truncation["max_length"] == 7
    finally:
        tokenizer.backend_tokenizer.no_truncation()


def test_a_tokenizer_without_an_end(tmp_path: Path) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer())
    assert bare.eos_token_id is None
    assert fits(start(GuidanceCompiler(bare, 288), regex="ab"), "ab")


def test_a_slow_tokenizer_is_refused_in_a_sentence() -> None:
    reason = GuidanceCompiler.why_not(object())
    assert reason == "needs a fast tokenizer, this is a object"
    assert GuidanceCompiler.why_not(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))) is None


# --- the suite kills what is wrong


class EverythingGoes(Matcher):
    def mask(self) -> None:
        self.words.fill(-1)


class AddsBits(Matcher):
    def fill_mask(self, bitmask: Any) -> None:
        self.mask()
        bitmask |= self.words[: len(bitmask)]


class SharesState(Matcher):
    def fork(self) -> GrammarMatcher:
        return self


class EndsAnywhere(Matcher):
    def may_end(self) -> bool:
        return True


class NeedsMasks(Matcher):
    """Takes tokens only after masks."""

    asked = False

    def mask(self) -> None:
        super().mask()
        self.asked = True

    def accept(self, token_id: int) -> bool:
        asked, self.asked = self.asked, False
        return asked and super().accept(token_id)


class Lenient(GuidanceCompiler):
    """Leaves out what it cannot honour."""

    def compile(self, spec: Any) -> GrammarMatcher:
        try:
            return super().compile(spec)
        except RequestError:
            return super().compile(StructuredOutputsParams(regex=".*").spec)


def _with(matcher: type[Matcher]) -> type[GuidanceCompiler]:
    class Mutant(GuidanceCompiler):
        def compile(self, spec: Any) -> GrammarMatcher:
            good = super().compile(spec)
            assert isinstance(good, Matcher)
            return matcher(good.matcher, len(good.words))

    return Mutant


@pytest.mark.parametrize(
    "mutant",
    [*map(_with, (EverythingGoes, AddsBits, SharesState, EndsAnywhere, NeedsMasks)), Lenient],
    ids=["everything", "bits", "forks", "ends", "masks", "lenient"],
)
def test_the_suite_kills(mutant: type[GuidanceCompiler]) -> None:
    assert failures_of(type("TestMutant", (GrammarCompilerSuite,), {"compiler": mutant}))


def test_s12_nothing_is_written_to_disk(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    compiler = GuidanceCompiler(tokenizer, 288)
    for number in range(100):
        assert fits(start(compiler, json={"const": number}), str(number))
    assert list(tmp_path.iterdir()) == []
