"""Compares the grammar libraries llguidance and xgrammar: what they get right, how fast, and what hostile grammars cost.

    pip install llguidance xgrammar
    python benchmarks/structured.py MODEL_FOLDER [--hostile]

Each constraint comes with texts that fulfil it and texts that do not; a library is right about a text if it accepts its
tokens and the end, or does not. `--hostile` compiles what is meant to blow up, each in a process of its own with a limit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoTokenizer

Case = tuple[str, str, Any, list[str], list[str]]  # name, kind, constraint, texts that fit, texts that do not


def _json(name: str, schema: Any, good: list[Any], bad: list[Any]) -> Case:
    return name, "json", schema, [json.dumps(v, ensure_ascii=False) for v in good], [json.dumps(v) for v in bad]


def cases() -> list[Case]:
    """Constraints with texts that decide whether a library means by them what their standards say."""
    person = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    tree = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
    }
    optional = {
        "type": "object",
        "properties": {k: {"type": "integer"} for k in "abc"},
        "required": ["b"],
        "additionalProperties": False,
    }
    return [
        _json("object", person, [{"name": "Zoë", "age": 7}], [{"name": "x"}, {"name": "x", "age": 7, "z": 1}, [], 1]),
        _json(
            "bounds",
            person,
            [{"name": "", "age": 0}, {"name": "", "age": 150}],
            [{"name": "", "age": 151}, {"name": "", "age": -1}],
        ),
        _json("optional", optional, [{"b": 1}, {"a": 1, "b": 2}, {"b": 2, "c": 3}], [{"a": 1}, {"b": 1, "d": 2}]),
        _json("recursive", tree, [{"v": 1, "next": {"v": 2, "next": None}}], [{"v": 1, "next": {"v": 2}}]),
        _json("enum", {"enum": ["a", 1, None, {"x": 2}]}, ["a", 1, None, {"x": 2}], ["b", 2, {"x": 3}]),
        _json("const", {"const": 'he said "hi"\n'}, ['he said "hi"\n'], ["he said"]),
        _json(
            "pattern", {"type": "string", "pattern": "^[a-z]{2}-\\d{3}$"}, ["ab-123"], ["ab-12", "AB-123", "ab-1234"]
        ),
        _json("unanchored", {"type": "string", "pattern": "b+"}, ["abbc", "b"], ["ac"]),
        _json("lengths", {"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["a", "abcd"]),
        _json(
            "items",
            {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
            [[True], [True, False]],
            [[], [1], [True] * 3],
        ),
        _json(
            "tuple",
            {"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}], "items": False, "minItems": 2},
            [["a", None]],
            [["a"], ["a", None, 1]],
        ),
        _json("number", {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, [0.5, 1.5, 1], [0, 1.6, -1, 2]),
        _json("multiple", {"type": "integer", "multipleOf": 5}, [5, 100, 0], [7, 13]),
        _json(
            "anyOf",
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
            ["x", [1]],
            [1, ["x"]],
        ),
        _json("oneOf", {"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["x", 1], [None, 1.5]),
        _json("allOf", {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}]}, [5, 9], [4, 10]),
        _json("format date", {"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "x"]),
        _json("format uuid", {"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
        _json("format email", {"type": "string", "format": "email"}, ["a@b.org"], ["a b"]),
        _json(
            "patternProperties",
            {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
            [{"x_a": 1}],
            [{"y": 1}, {"x_a": "s"}],
        ),
        _json(
            "additional schema",
            {"type": "object", "additionalProperties": {"type": "integer"}},
            [{"q": 1}],
            [{"q": "s"}],
        ),
        _json("true", True, [1, "a", [None], {"a": [1]}], []),
        _json("nullable", {"type": ["string", "null"]}, ["a", None], [1]),
        _json(
            "unicode",
            {
                "type": "object",
                "properties": {"ключ": {"const": "значение"}},
                "required": ["ключ"],
                "additionalProperties": False,
            },
            [{"ключ": "значение"}],
            [{"k": 1}],
        ),
        _json(
            "minProperties",
            {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
            [{"a": 1}],
            [{}, {"a": 1, "b": 2, "c": 3}],
        ),
        _json("uniqueItems", {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, [[1, 2]], [[1, 1]]),
        _json("not", {"not": {"type": "string"}}, [1], ["s"]),
        _json("if", {"if": {"type": "string"}, "then": {"minLength": 3}, "else": {"minimum": 3}}, ["abc", 3], ["a", 2]),
        ("whitespace", "json", person, ['{\n  "name": "x",\n  "age": 7\n}', '{"name":"x","age":7}'], ['{"name" "x"}']),
        (
            "escapes",
            "json",
            {"type": "string"},
            ['"\\u00e9\\n\\"\\\\"', '"é"'],
            ['"\\x"', '"a\nb"', '"\\ud800'],
        ),
        (
            "json_object",
            "json",
            {"type": "object"},
            ['{"a": {"b": [1, 2.5e-3, true, null]}}', "{}"],
            ["[]", '{"a": 01}', "{,}"],
        ),
        ("regex", "regex", r"[0-9]{3}-[a-f]+", ["123-abc"], ["123-", "12-a", "123-xyz"]),
        ("regex alternation", "regex", r"(yes|no|maybe)!?", ["yes", "no!", "maybe"], ["y", "yesno"]),
        ("regex unicode", "regex", r"[ä-ü]+|日本", ["äü", "日本"], ["a", "日"]),
        ("regex classes", "regex", r"\w+\s\d{1,3}\.", ["abc 12."], ["abc12.", "abc 1234."]),
        ("regex anchors", "regex", r"^ab$", ["ab"], ["a", "abc"]),
        ("regex lazy", "regex", r"a.*?b", ["ab", "axxb"], ["a", "ba"]),
    ]


class Guidance:
    name = "llguidance"

    def __init__(self, tokenizer: Any, vocab: int) -> None:
        import llguidance
        import llguidance.hf

        self.lib = llguidance
        self.tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab)
        self.mask = torch.zeros(1, (vocab + 31) // 32, dtype=torch.int32)
        self.eos = tokenizer.eos_token_id

    def compile(self, kind: str, constraint: Any) -> Any:
        make = self.lib.LLMatcher
        if kind == "regex":
            text = json.loads(make.grammar_from_regex(constraint))["grammars"][0]["lark_grammar"]
        else:
            text = f"start: %json {json.dumps(constraint if isinstance(constraint, dict) else {})}"
        matcher = make(self.tokenizer, f'%llguidance {{"no_forcing": true}}\n{text}', log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error().splitlines()[0])
        return matcher

    def start(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def fill(self, matcher: Any) -> None:
        matcher.unsafe_compute_mask_ptr(self.mask.data_ptr(), self.mask.numel() * 4)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.validate_tokens([token])) and bool(matcher.consume_token(token))

    def may_end(self, matcher: Any) -> bool:
        return bool(matcher.is_accepting())


class XGrammar:
    name = "xgrammar"

    def __init__(self, tokenizer: Any, vocab: int) -> None:
        import xgrammar

        self.lib = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab)
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.mask = xgrammar.allocate_token_bitmask(1, vocab)
        self.eos = tokenizer.eos_token_id

    def compile(self, kind: str, constraint: Any) -> Any:
        if kind == "regex":
            return self.compiler.compile_regex(constraint)
        return self.compiler.compile_json_schema(json.dumps(constraint), strict_mode=False)

    def start(self, compiled: Any) -> Any:
        return self.lib.GrammarMatcher(compiled)

    def fill(self, matcher: Any) -> None:
        matcher.fill_next_token_bitmask(self.mask)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token))

    def may_end(self, matcher: Any) -> bool:
        return not matcher.is_terminated() and bool(matcher.accept_token(self.eos))


def judge(library: Any, compiled: Any, tokens: list[int], times: list[float]) -> bool:
    matcher = library.start(compiled)
    for token in tokens:
        start = time.perf_counter()
        library.fill(matcher)
        times.append(time.perf_counter() - start)
        allowed = bool(library.mask[0, token // 32] >> (token % 32) & 1)
        accepted = library.accept(matcher, token)
        assert accepted or not allowed, "the mask allows what the matcher refuses"
        if not allowed:
            return False
    return library.may_end(matcher)


def compare(library: Any, tokenizer: Any) -> None:
    compile_ms: list[float] = []
    first_ms: list[float] = []
    mask_us: list[float] = []
    refused, wrong, right = [], [], 0
    for name, kind, constraint, good, bad in cases():
        start = time.perf_counter()
        try:
            compiled = library.compile(kind, constraint)
        except Exception as error:
            refused.append(f"{name}: {str(error).splitlines()[-1][:90]}")
            continue
        compile_ms.append((time.perf_counter() - start) * 1e3)
        for expected, texts in ((True, good), (False, bad)):
            for text in texts:
                times: list[float] = []
                try:
                    found = judge(library, compiled, tokenizer.encode(text, add_special_tokens=False), times)
                except AssertionError as error:
                    found = f"{error}"
                first_ms.append(times[0] * 1e3)
                mask_us += [t * 1e6 for t in times]
                if found == expected:
                    right += 1
                else:
                    wrong.append(f"{name}: {text[:60]!r} {'refused' if expected else 'accepted'} ({found})")
    print(f"\n{library.name}: {right} texts right, {len(wrong)} wrong, {len(refused)} constraints refused")
    print(f"  compile ms: median {statistics.median(compile_ms):.2f}, max {max(compile_ms):.1f}")
    print(f"  first mask ms: median {statistics.median(first_ms):.3f}, max {max(first_ms):.1f}")
    q = statistics.quantiles(mask_us, n=100)
    print(
        f"  mask us: median {statistics.median(mask_us):.0f}, p99 {q[98]:.0f}, max {max(mask_us):.0f}, n {len(mask_us)}"
    )
    for line in wrong:
        print("  wrong   ", line)
    for line in refused:
        print("  refused ", line)


def hostile() -> Iterator[tuple[str, str, Any]]:
    nested: Any = {"type": "integer"}
    for i in range(12):
        nested = {"oneOf": [nested, {"type": "array", "items": nested, "maxItems": i + 1}]}
    yield "oneOf nested 12", "json", nested
    both: Any = {"type": "object"}
    for i in range(12):
        both = {"allOf": [{"anyOf": [both, {"required": [f"a{i}"]}]}, {"anyOf": [both, {"required": [f"b{i}"]}]}]}
    yield "allOf of anyOf 12", "json", both
    deep: Any = {"type": "integer"}
    for _ in range(3000):
        deep = {"type": "array", "items": deep}
    yield "3000 deep", "json", deep
    yield (
        "5000 properties",
        "json",
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}},
    )
    yield "20000 enum", "json", {"enum": [f"value {i}" for i in range(20000)]}
    yield "maxLength 1e6", "json", {"type": "string", "maxLength": 1_000_000}
    yield "maxItems 1e6", "json", {"type": "array", "items": {"type": "integer"}, "maxItems": 1_000_000}
    yield "self reference", "json", {"$ref": "#"}
    yield (
        "mutual reference",
        "json",
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    )
    yield "remote reference", "json", {"$ref": "http://127.0.0.1:9/x.json"}
    yield "missing reference", "json", {"$ref": "#/$defs/nope"}
    yield "type nope", "json", {"type": "nope"}
    yield "pattern (", "json", {"type": "string", "pattern": "("}
    yield "pattern escape", "json", {"type": "string", "pattern": "\\q"}
    yield "lookahead", "regex", r"(?=a)b|a"
    yield "backreference", "regex", r"(a)\1"
    yield "(", "regex", "("
    yield "nested repeats", "regex", "((((a{1,60}){1,60}){1,60}){1,60}){1,60}"
    yield "(.{1,1000}){1,1000}", "regex", "(.{1,1000}){1,1000}"
    yield "(a|aa)+ b", "regex", "(a|aa)+b"
    yield "200 states", "regex", "[ab]*a[ab]{200}"
    yield "10 MB regex", "regex", "a" * 10_000_000
    yield "1e5 brackets", "regex", "(" * 100_000 + "a" + ")" * 100_000
    yield "a{1000000}", "regex", "a{1000000}"


def _attempt(library: Any, vocab: int, kind: str, constraint: Any, pipe: Any) -> None:
    import resource

    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        compiled = library.compile(kind, constraint)
        compiled_s = time.process_time() - start
        masks = _walk(library, library.start(compiled), vocab)
        outcome = f"compiled in {compiled_s:.2f} s, {len(masks)} masks, slowest {max(masks) * 1e3:.0f} ms"
    except Exception as error:
        outcome = f"refused in {time.process_time() - start:.2f} s: {str(error).splitlines()[-1][:80]!r}"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    pipe.send(f"{outcome}, +{grown} MiB")


def _walk(library: Any, matcher: Any, vocab: int) -> list[float]:
    """Seconds for each mask on a random way through the grammar."""
    generator, times = torch.Generator().manual_seed(0), []
    while len(times) < 40:
        start = time.perf_counter()
        library.fill(matcher)
        times.append(time.perf_counter() - start)
        bits = (library.mask[0][:, None] >> torch.arange(32)) & 1
        tokens = [t for t in bits.flatten()[:vocab].nonzero()[:, 0].tolist() if t != library.eos]
        if not tokens or not library.accept(
            matcher, tokens[int(torch.randint(len(tokens), (1,), generator=generator))]
        ):
            break
    return times


def survive(library: Any, vocab: int, limit_s: float) -> None:
    """Compiles each hostile grammar in a process of its own, which is killed after a while. Seconds are of the CPU."""
    print(f"\n{library.name}, hostile")
    context = multiprocessing.get_context("fork")  # a spawned one would import torch each time
    for name, kind, constraint in hostile():
        ours, theirs = context.Pipe()
        process = context.Process(target=_attempt, args=(library, vocab, kind, constraint, theirs))
        process.start()
        theirs.close()
        try:
            outcome = ours.recv() if ours.poll(limit_s) else f"STILL RUNNING after {limit_s:.0f} s"
        except EOFError:
            process.join()
            outcome = f"DIED with exit code {process.exitcode}"
        process.kill()
        process.join()
        print(f"  {name:22} {outcome}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument(
        "--compiler", choices=[Guidance.name, XGrammar.name], help="Default: both, one after the other."
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    vocab = len(tokenizer)
    for make in [m for m in (Guidance, XGrammar) if options.compiler in (None, m.name)]:
        start = time.perf_counter()
        library = make(tokenizer, vocab)
        if options.hostile:
            survive(library, vocab, 20)
        else:
            print(f"{make.name}: tokenizer of {vocab} tokens prepared in {time.perf_counter() - start:.2f} s")
            compare(library, tokenizer)


if __name__ == "__main__":
    main()
