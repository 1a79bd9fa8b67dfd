"""The front door beyond single texts: several callers of one LLM, contained failures, tokenizer folders, lifetime."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import registry, scripted_llm
from transformers import AutoTokenizer

from octavo import LLM, CheckpointError, ConfigError, EngineConfig, RequestError, SamplingParams
from octavo.engine.step_graph import EagerStep
from octavo.front.output_processor import TextDelta
from octavo.front.tokenizer import Tokenizer
from octavo.testing import tiny_model, tiny_tokenizer

SCRIPTS = {(1,): list(b"first"), (2,): list(b"second!"), (3,): list(b"third one")}
GREEDY = SamplingParams(temperature=0, max_tokens=20)


def ids(*prompt: int) -> dict[str, Any]:
    return {"prompt_token_ids": list(prompt)}


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return scripted_llm(tmp_path, SCRIPTS)


def text(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def is_idle(llm: LLM) -> bool:
    idle = not llm.engine.has_unfinished and not llm._processor.has_unfinished and not llm._mail
    return idle and llm.stats().num_free_blocks == llm.stats().num_blocks


# --- several callers


def test_a_stream_loses_nothing_to_another_call(llm: LLM) -> None:
    stream = llm.stream([ids(1), ids(2)], GREEDY)
    before = [next(stream)]
    (output,) = llm.generate(ids(3), GREEDY)
    assert output.outputs[0].text == "third one"
    deltas = before + list(stream)
    for request_id, expected in (("0", "first"), ("1", "second!")):
        mine = [d for d in deltas if d.output.request_id == request_id]
        assert text(mine) == expected
        assert [d.finished for d in mine] == [False] * (len(mine) - 1) + [True]
    assert is_idle(llm)


def test_streams_in_turns(llm: LLM) -> None:
    streams = {"first": llm.stream(ids(1), GREEDY), "third one": llm.stream(ids(3), GREEDY)}
    found: dict[str, list[TextDelta]] = {expected: [] for expected in streams}
    for _ in range(20):
        for expected, stream in streams.items():
            found[expected] += [delta] if (delta := next(stream, None)) else []
    assert {expected: text(deltas) for expected, deltas in found.items()} == {e: e for e in streams}
    assert is_idle(llm)


def test_a_stream_submits_at_once_and_aborts_when_it_goes(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.stream("", GREEDY)
    unused = llm.stream(ids(1), GREEDY)
    begun = llm.stream(ids(2), GREEDY)
    next(begun)
    assert len(llm.engine.scheduler) == 2
    del unused, begun
    gc.collect()
    assert is_idle(llm)


def test_an_interrupted_generate_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.front.llm._progress.__call__", interrupt)
    with pytest.raises(KeyboardInterrupt):  # which keeps the traceback, and the iterator in it, alive
        llm.generate([ids(1), ids(2)], GREEDY)
    assert is_idle(llm)


# --- contained failures


def test_text_that_cannot_be_made_ends_only_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = llm.tokenizer.decode

    def fragile(token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if list(token_ids) == [ord("c")]:
            raise RuntimeError("no text for that")
        return decode(token_ids, skip_special_tokens)

    monkeypatch.setattr(llm.tokenizer, "decode", fragile)
    params = [GREEDY, GREEDY.model_copy(update={"logprobs": 1}), GREEDY]
    outputs = llm.generate([ids(1), ids(2), ids(3)], params)
    assert [o.outputs[0].finish_reason for o in outputs] == ["stop", "error", "stop"]
    assert outputs[1].outputs[0].stop_reason == "RuntimeError: no text for that"
    assert [o.outputs[0].text for o in outputs] == ["first", "se", "third one"]
    assert all(o.finished and o.metrics.finished_time for o in outputs)
    assert is_idle(llm)


@pytest.mark.parametrize("after", [0, 2])
def test_requests_aborted_at_the_engine_are_closed(llm: LLM, after: int) -> None:
    stream = llm.stream([ids(1), ids(3)], GREEDY)
    deltas = [next(stream) for _ in range(after)]
    llm.engine.abort("0")
    deltas += list(stream)
    last = {d.output.request_id: d for d in deltas}
    assert last["0"].completion.finish_reason == "abort"
    assert last["0"].finished
    assert last["1"].completion.text == "third one"
    assert is_idle(llm)


def test_a_request_of_several_outputs_fails_as_a_whole(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1, max_tokens=5)
    deltas = list(llm.stream([ids(9, 9), ids(1)], [params, GREEDY]))
    failed = [d for d in deltas if d.output.request_id == "0"]
    assert sorted(d.sequence_index for d in failed if d.finished) == [0, 1, 2]
    assert all("no script" in str(d.completion.stop_reason) for d in failed)
    assert text([d for d in deltas if d.output.request_id == "1"]) == "first"
    assert is_idle(llm)


@pytest.mark.parametrize(
    "messages", [None, 5, "hi", {"role": "user"}, [None], [["x"]], [{"role": "user", "content": "\ud83c"}]]
)
def test_messages_that_are_none(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(messages, GREEDY)
    assert caught.value.param == "messages"
    assert is_idle(llm)


# --- lifetime and settings


def test_a_bad_tokenizer_costs_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("octavo.front.llm.Engine", lambda *_: pytest.fail("the engine was started"))
    with pytest.raises(CheckpointError, match="tokenizer"):
        LLM(str(folder), registry=registry())


def test_an_engine_config_admits_no_settings_beside_it(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path))
    with pytest.raises(ConfigError, match=r"block_size, quantization"):
        LLM(config, block_size=4, quantization="awq")


def test_names_of_vllm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = str(tiny_model(tmp_path))
    settings = {"registry": registry(), "num_blocks_override": 8}
    with caplog.at_level(logging.WARNING):
        llm = LLM(folder, trust_remote_code=False, enforce_eager=True, disable_log_stats=False, **settings)
    assert [r.getMessage() for r in caplog.records if "ignored" in r.getMessage()] == [
        "ignored, for they mean nothing here: trust_remote_code, disable_log_stats"
    ]
    assert isinstance(llm.engine.executor.runner.graph, EagerStep)  # type: ignore[attr-defined]
    assert llm.get_tokenizer() is llm.tokenizer.hf_tokenizer
    with pytest.raises(ConfigError, match="trust_remote_code"):
        LLM(folder, trust_remote_code=True, **settings)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization.*kv_cache_memory_utilization"):
        LLM(folder, gpu_memory_utilization=0.9, **settings)


def test_leaving_the_context_shuts_down(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(llm.engine, "shutdown", lambda: calls.append("down"))
    with llm as same:
        assert same is llm
    assert calls == ["down"]


def test_max_logprobs_may_be_all() -> None:
    assert EngineConfig(model="m", max_logprobs=-1).max_logprobs == -1
    with pytest.raises(ConfigError, match="max_logprobs"):
        EngineConfig(model="m", max_logprobs=-2)


# --- tokenizer folders

ADDED = {"content": "<|tool|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
END = {"content": "<|im_end|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def write(folder: Path, name: str, **changes: Any) -> None:
    file = folder / name
    content = json.loads(file.read_text()) if file.exists() else {}
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def plain(folder: Path) -> None:
    pass


def special_token_only_in_the_settings(folder: Path) -> None:
    write(folder, "tokenizer_config.json", added_tokens_decoder={"259": {**ADDED, "special": True}})


def end_only_in_the_map(folder: Path) -> None:
    write(folder, "tokenizer_config.json", eos_token=None)
    write(folder, "special_tokens_map.json", eos_token=END)


def end_as_an_object(folder: Path) -> None:
    write(folder, "tokenizer_config.json", eos_token={"__type": "AddedToken", **END})


def no_settings(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()


def beginning_is_added(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    start = {"id": "<|im_start|>", "ids": [256], "tokens": ["<|im_start|>"]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": start},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    write(folder, "tokenizer_config.json", bos_token="<|im_start|>", add_bos_token=True)


def template_in_its_own_file(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")


def several_templates(folder: Path) -> None:
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "<{{ messages[0].content }}>"}]
    write(folder, "tokenizer_config.json", chat_template=named)


VARIANTS = [
    plain,
    special_token_only_in_the_settings,
    end_only_in_the_map,
    end_as_an_object,
    no_settings,
    beginning_is_added,
    template_in_its_own_file,
    several_templates,
]


@pytest.mark.parametrize("change", VARIANTS, ids=lambda function: function.__name__)
def test_tokenizer_folders_mean_what_transformers_says(tmp_path: Path, change: Any) -> None:
    tiny_tokenizer(tmp_path)
    change(tmp_path)
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    sample = "a<|im_start|>b<|im_end|> <|tool|>é 🌶"
    assert ours.encode(sample) == theirs.encode(sample)
    assert ours.encode_plain(sample) == theirs.encode(sample, add_special_tokens=False)
    for skip in (True, False):
        assert ours.decode(ours.encode(sample), skip) == theirs.decode(theirs.encode(sample), skip_special_tokens=skip)
    assert ours.end_token_ids == ({theirs.eos_token_id} if theirs.eos_token_id is not None else set())
    assert ours.special_id("<|tool|>") == theirs.get_added_vocab().get("<|tool|>")
    messages = [{"role": "user", "content": "hi"}]
    if theirs.chat_template is None:
        with pytest.raises(RequestError, match="chat template"):
            ours.chat(messages)
    else:
        said = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.chat(messages) == theirs.encode(said, add_special_tokens=False)


def test_variants_are_not_alike(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    special_token_only_in_the_settings(tmp_path)
    assert Tokenizer(tmp_path).special_id("<|tool|>") == 259
    end_only_in_the_map(tmp_path)
    write(tmp_path, "tokenizer_config.json", added_tokens_decoder=None)
    assert Tokenizer(tmp_path).end_token_ids == {257}


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_tokenizer(tmp_path / "model")
    assert Tokenizer("~/model").encode("a") == [97]


@pytest.mark.parametrize("bad", ["half \ud83c a pair", 5, None, b"bytes"])
def test_text_that_is_none(tmp_path: Path, bad: Any) -> None:
    tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    with pytest.raises(RequestError) as caught:
        tokenizer.encode(bad)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError) as caught:
        tokenizer.bad_word_ids(["\ud83c"])
    assert caught.value.param == "bad_words"


def test_priorities_are_one_integer_a_prompt(tmp_path: Path) -> None:
    llm = LLM(str(tiny_model(tmp_path)), registry=registry(), num_blocks_override=32, scheduling_policy="priority")
    for priority in (5, [1], [1, "x"], [None, 2]):
        with pytest.raises(RequestError, match="priority"):
            llm.generate(["a", "b"], GREEDY, priority=priority)
        assert not llm.engine.has_unfinished
    assert len(llm.generate(["a", "b"], GREEDY, priority=[1, 0])) == 2


def test_all_logprobs_where_the_engine_allows_them(tmp_path: Path) -> None:
    llm = LLM(str(tiny_model(tmp_path)), registry=registry(), num_blocks_override=32, max_logprobs=-1)
    (output,) = llm.generate("a", SamplingParams(temperature=0, max_tokens=1, logprobs=-1))
    assert output.outputs[0].logprobs is not None
    assert len(output.outputs[0].logprobs[0]) == 288


def test_a_path_of_any_length_is_no_folder() -> None:
    with pytest.raises(ConfigError, match="no such model folder"):
        LLM("x" * 5000)


# --- what scripts written for vLLM do


def test_a_path_and_a_torch_type_are_settings_too(tmp_path: Path) -> None:
    llm = LLM(tiny_model(tmp_path), dtype=torch.bfloat16, registry=registry(), num_blocks_override=8)
    assert llm.engine.executor.runner.kv.layers[0].key.dtype is torch.bfloat16


def test_get_tokenizer_is_the_hugging_face_one(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer("hi")["input_ids"] == list(b"hi")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    assert llm.tokenizer.encode(text) == llm.tokenizer.chat([{"role": "user", "content": "x"}])


def test_chat_options_take_effect_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    llm = LLM(tiny_model(tmp_path), registry=registry(), num_blocks_override=32)
    messages = [{"role": "user", "content": "hi"}]
    one = SamplingParams(temperature=0, max_tokens=1)
    lengths = [
        len(llm.chat(messages, one, **options)[0].prompt_token_ids)
        for options in ({}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"anything": 1}})
    ]
    assert lengths[1] < lengths[0] == lengths[2]
    with pytest.raises(TypeError, match="foo"):
        llm.chat(messages, one, foo=1)


def test_content_in_text_parts(llm: LLM) -> None:
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    plain = llm.tokenizer.chat([{"role": "user", "content": "Hi there"}])
    assert llm.tokenizer.chat([{"role": "user", "content": parts}]) == plain
    with pytest.raises(RequestError, match="image_url"):
        llm.tokenizer.chat([{"role": "user", "content": [{"type": "image_url"}]}])


def test_nothing_is_generated_after_shutdown(llm: LLM) -> None:
    with llm:
        pass
    with pytest.raises(ConfigError, match="shut down"):
        llm.generate(ids(1), GREEDY)


def test_priority_needs_its_policy(llm: LLM) -> None:
    with pytest.raises(RequestError, match="scheduling-policy"):
        llm.generate(ids(1), GREEDY, priority=[1])
