"""Structured output through the engine: whatever shares its batch or its memory, an output is what was asked, or an error."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structured_support import ToyCompiler
from support import VOCAB_SIZE, make_hostile, registry, scripted_llm

from octavo import (
    LLM,
    ConfigError,
    GrammarSpec,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
)
from octavo.engine.grammar import MAX_SPEC_BYTES
from octavo.front import grammars as grammars_module
from octavo.front.grammars import Grammars
from octavo.testing import tiny_model
from octavo.testing.models import IM_END

DIGITS = {"regex": "[0-9]{20}"}
CHOICE = {"choice": ["yes", "no"]}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("structured"))


def llm_of(folder: Path, **settings: Any) -> LLM:
    defaults = {"num_blocks_override": 256, "disable_progress": True, "self_test": False}
    return make_hostile(LLM(str(folder), **{**defaults, **settings}))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with llm_of(folder) as made:
        yield made


def asked(structured: dict[str, Any] | None, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 100, "structured_outputs": structured, **params})


def one(llm: LLM, structured: dict[str, Any], prompt: str = "Say", **params: Any) -> Any:
    (output,) = llm.generate([prompt], asked(structured, **params))
    return output.outputs[0]


# --- what comes out


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_outputs_are_what_was_asked(llm: LLM, temperature: float) -> None:
    for seed in range(4):
        options = {"temperature": temperature, "seed": seed}
        digits = one(llm, DIGITS, **options)
        assert re.fullmatch("[0-9]{20}", digits.text)
        assert (digits.finish_reason, digits.token_ids[-1]) == ("stop", IM_END)
        assert one(llm, CHOICE, **options).text in ("yes", "no")
        person = one(llm, {"json": PERSON, "disable_any_whitespace": True}, **options)
        if person.finish_reason == "stop":
            assert json.loads(person.text).keys() == {"name", "age"}
        assert one(llm, {"grammar": 'root ::= "a" [bc]{3}'}, **options).text[:1] == "a"


def test_settings_as_text_and_vllms_names() -> None:
    as_text = SamplingParams(structured_outputs='{"json": {"type": "integer"}}')  # type: ignore[arg-type]
    given = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "integer"}))
    assert as_text == given
    assert given.structured_outputs is not None
    assert given.structured_outputs.spec == GrammarSpec("json", '{"type": "integer"}')


def test_unicode_spread_over_tokens(llm: LLM) -> None:
    assert one(llm, {"choice": ["日本", "é🌶"]}).text in ("日本", "é🌶")


def test_sequences_of_one_request_are_constrained_apart(llm: LLM) -> None:
    (output,) = llm.generate(["Say"], asked({"regex": "[a-z]{12}"}, n=6, temperature=1.0, seed=3))
    texts = [completion.text for completion in output.outputs]
    assert all(re.fullmatch("[a-z]{12}", text) for text in texts)
    assert len(set(texts)) > 1


def test_logprobs_are_of_the_raw_logits(llm: LLM) -> None:
    free = one(llm, None, logprobs=1, max_tokens=1)  # type: ignore[arg-type]
    held = one(llm, DIGITS, logprobs=1)
    top_free, top_held = (max(out.logprobs[0].values(), key=lambda lp: lp.logprob) for out in (free, held))
    assert top_free.logprob == top_held.logprob
    assert held.logprobs[0][held.token_ids[0]].rank >= 1


# --- batches and memory


def test_v38_masks_go_to_their_own_requests(llm: LLM, folder: Path) -> None:
    wanted: list[tuple[str, dict[str, Any] | None]] = [
        ("A", DIGITS),
        ("B" * 30, None),
        ("C", CHOICE),
        ("D" * 9, DIGITS),
    ]
    params = [asked(structured, max_tokens=40) for _, structured in wanted]
    alone = [llm.generate([prompt], p)[0].outputs[0] for (prompt, _), p in zip(wanted, params, strict=True)]
    for settings in (
        {},
        {"num_blocks_override": 6, "block_size": 16},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    ):
        with llm_of(folder, **settings) as small:
            together = [o.outputs[0] for o in small.generate([prompt for prompt, _ in wanted], params)]
            preempted = small.stats().scheduler.num_preemptions
        assert [o.token_ids for o in together] == [o.token_ids for o in alone]
        assert bool(preempted) == ("block_size" in settings)
    assert all(re.fullmatch("[0-9]{20}", alone[i].text) for i in (0, 3))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_leaves_constrained_outputs_as_they_are(llm: LLM, folder: Path, mode: str) -> None:
    params = [asked({"regex": f"[a-{chr(101 + i)}]{{50}}"}, temperature=0.9, seed=i) for i in range(5)]
    prompts = [f"{i} " * 5 for i in range(5)]
    expected = [llm.generate([p], q)[0].outputs[0].text for p, q in zip(prompts, params, strict=True)]
    space = {"swap_space": 0.01} if mode == "swap" else {}
    with llm_of(folder, num_blocks_override=12, preemption_mode=mode, **space) as small:
        found = [o.outputs[0].text for o in small.generate(prompts, params)]
        counts = small.stats().scheduler
    assert found == expected
    assert counts.num_preemptions
    assert bool(counts.num_swaps) == (mode == "swap")


def test_forks_go_on_alike_under_pressure(llm: LLM, folder: Path) -> None:
    params = asked({"regex": "[a-f]{40}"}, n=4, temperature=1.0, seed=5)
    (expected,) = llm.generate(["Say"], params)
    with llm_of(folder, num_blocks_override=9) as small:
        (found,) = small.generate(["Say"], params)
        assert small.stats().scheduler.num_preemptions
    assert [c.text for c in found.outputs] == [c.text for c in expected.outputs]


def test_many_grammars_in_one_batch(llm: LLM) -> None:
    params = [asked({"regex": f"{i:03}-[a-z]{{{i % 7 + 1}}}"}, temperature=1.0, seed=i) for i in range(60)]
    outputs = llm.generate([f"{i}" for i in range(60)], params)
    assert all(re.fullmatch(f"{i:03}-[a-z]{{{i % 7 + 1}}}", o.outputs[0].text) for i, o in enumerate(outputs))


# --- ends, and what else alters logits


def test_ignore_eos_goes_on_as_long_as_the_grammar_can(llm: LLM) -> None:
    assert one(llm, {"regex": "a{1,9}"}, ignore_eos=True).text == "a" * 9
    assert one(llm, {"regex": "a*"}, ignore_eos=True, max_tokens=12).finish_reason == "length"


def test_min_tokens_yields_to_the_grammar(llm: LLM) -> None:
    favours_the_end = {"logit_bias": {IM_END: 100.0}}
    assert one(llm, {"regex": "a{2,9}"}, **favours_the_end).text == "aa"
    assert one(llm, {"regex": "a{2,9}"}, min_tokens=5, **favours_the_end).text == "aaaaa"
    assert one(llm, {"regex": "a{2,9}"}, min_tokens=50, **favours_the_end).text == "a" * 9


def test_stops_and_max_tokens_cut(llm: LLM) -> None:
    cut = one(llm, {"regex": "abcdefgh"}, stop=["ef"])
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("abcd", "stop", "ef")
    token = one(llm, {"regex": "abcdefgh"}, stop_token_ids=[ord("d")])
    assert (token.text, token.stop_reason) == ("abc", ord("d"))
    short = one(llm, {"regex": "abcdefgh"}, max_tokens=3)
    assert (short.text, short.finish_reason) == ("abc", "length")


def test_other_settings_choose_within_the_grammar(llm: LLM) -> None:
    assert one(llm, {"regex": "[a-z]{4}"}, logit_bias={ord("q"): 100.0, ord("!"): 100.0}).text == "qqqq"
    assert one(llm, {"regex": "[a-z]{4}"}, allowed_token_ids=[ord("x"), ord("!"), IM_END]).text == "xxxx"
    assert one(llm, {"regex": "[xy]{2}"}, bad_words=["x"]).text == "yy"
    one(
        llm,
        {"regex": "[a-z]{30}"},
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=2.0,
        top_k=3,
        min_p=0.1,
    )


def test_nothing_left_ends_the_request_and_no_other(llm: LLM) -> None:
    stuck, fine = llm.generate(
        ["a", "b"], [asked({"regex": "[a-z]{4}"}, allowed_token_ids=[ord("!")]), asked({"regex": "[a-z]{4}"})]
    )
    assert stuck.outputs[0].finish_reason == "error"
    assert "leave no token" in str(stuck.outputs[0].stop_reason)
    assert re.fullmatch("[a-z]{4}", fine.outputs[0].text)


# --- refusals


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["a"]}, "regex, choice are"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"json": "{"}, "not JSON"),
        ({"json": "[1]"}, "JSON object"),
        ({"json": 3}, "json"),
        ({"json_object": False}, "exactly one"),
        ({"regx": "a"}, "unknown field of structured_outputs 'regx'"),
        ({"regex": "a" * (MAX_SPEC_BYTES + 1)}, "bytes"),
        ({"json": "[" * 100_000}, "not JSON"),
        ({"json": json.loads('{"items":' * 80 + "true" + "}" * 80)}, "levels deep"),
        ({"json": {"const": float("nan")}}, "not JSON"),
        ({"regex": "\ud800"}, "no text"),
        ({"regex": "a", "whitespace_pattern": ""}, "whitespace_pattern"),
    ],
)
def test_v36_bad_settings_are_refused_where_they_enter(given: dict[str, Any], word: str) -> None:
    with pytest.raises(RequestError, match=re.escape(word)) as error:
        SamplingParams(structured_outputs=given)  # type: ignore[arg-type]
    assert error.value.param == "structured_outputs"
    assert len(str(error.value)) < 1000


def test_v36_bad_grammars_leave_the_engine_as_it_was(llm: LLM) -> None:
    for bad in ({"regex": "("}, {"json": {"properties": {"a": {"type": "nope"}}}}, {"grammar": "start: nowhere"}):
        with pytest.raises(RequestError) as error:
            llm.generate(["a", "b"], asked(bad))
        assert error.value.param == "structured_outputs"
        assert len(llm.engine.scheduler) == 0
    with pytest.raises(RequestError, match="#/properties/a"):
        one(llm, {"json": {"properties": {"a": {"type": "nope"}}}})
    assert one(llm, CHOICE).text in ("yes", "no")


def test_v36_the_engine_never_runs_such_a_request_unconstrained(llm: LLM) -> None:
    with pytest.raises(RequestError, match="must be compiled"):
        llm.engine.add_request("x", [1], asked(CHOICE))
    assert not llm.engine.has_unfinished


def test_without_a_plugin_the_refusal_says_which(folder: Path) -> None:
    bare = replace(registry(), grammar_compilers={})
    with llm_of(folder, registry=bare) as llm, pytest.raises(RequestError, match="octavo-guided"):
        one(llm, CHOICE)
    with pytest.raises(ConfigError, match="structured-outputs-backend nope"):
        llm_of(folder, structured_outputs_backend="nope")


def test_a_model_without_an_end_is_refused(llm: LLM) -> None:
    grammar = llm._processor.grammars.compile(StructuredOutputsParams(regex="a"))
    engine = llm.engine
    known, engine.model_info = engine.model_info, replace(engine.model_info, end_token_ids=frozenset())
    try:
        with pytest.raises(RequestError, match="end token"):
            engine.add_request("x", [1], asked({"regex": "a"}), grammar=grammar)
    finally:
        engine.model_info = known


# --- plugins that misbehave, and the cache


def toy_llm(folder: Path) -> LLM:
    return llm_of(folder, registry=replace(registry(), grammar_compilers={"toy": ToyCompiler}))


def test_a_matcher_that_fails_ends_its_request_alone(folder: Path) -> None:
    with toy_llm(folder) as llm:
        params = [asked({"regex": text}) for text in ("failing", "fine", "stuck")]
        failing, fine, stuck = (o.outputs[0] for o in llm.generate(["a", "b", "c"], params))
        assert (failing.finish_reason, failing.text) == ("error", "fa")
        assert "the matcher broke" in failing.stop_reason
        assert (fine.finish_reason, fine.text) == ("stop", "fine")
        assert (stuck.finish_reason, stuck.text) == ("error", "")
        assert "allows no token" in stuck.stop_reason
        with pytest.raises(RequestError, match="KeyError"):
            one(llm, {"regex": "bug"})


def test_a_scripted_model_and_its_history(tmp_path: Path) -> None:
    script = [*b'{"a": 1}', IM_END]
    installed = replace(registry(), grammar_compilers={"toy": ToyCompiler})
    assert installed.grammar_compilers
    with scripted_llm(tmp_path, {(1, 2): script}, max_num_batched_tokens=256) as llm:
        params = asked({"json": {"type": "object"}})
        assert llm.generate([[1, 2]], params)[0].outputs[0].text == '{"a": 1}'


def grammars_of(llm: LLM) -> Grammars:
    return Grammars({"toy": ToyCompiler}, llm.tokenizer, VOCAB_SIZE)


def test_two_threads_compile_the_same_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(ToyCompiler, "gate", gate)
    made = grammars_of(llm)
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(made.compile, StructuredOutputsParams(regex=text)) for text in ("a", "a", "bug", "bug")]
        gate.set()
        assert results[0].result(30) is not results[1].result(30)
        assert all(isinstance(r.exception(30), RequestError) for r in results[2:])
    compiler = made._compiler
    assert isinstance(compiler, ToyCompiler)
    assert compiler.compiled.count("a") == 1
    assert not made._in_work


def test_v37_the_cache_is_bounded_in_bytes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "CACHE_BYTES", 1_000_000)
    made = grammars_of(llm)
    for number in range(10_000):
        made.compile(StructuredOutputsParams(regex=f"r{number}"))
        assert made.num_bytes <= 1_000_000
    assert 0 < len(made._kept) < 20
    compiler = made._compiler
    assert isinstance(compiler, ToyCompiler)
    made.compile(StructuredOutputsParams(regex="r9999"))
    assert len(compiler.compiled) == 10_000
    made.compile(StructuredOutputsParams(regex="r0"))
    assert len(compiler.compiled) == 10_001
