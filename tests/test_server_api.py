"""The OpenAI API as the official SDK sees it: every endpoint, every field, streaming and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_support import Running, running_server
from support import scripted_llm

from octavo import LLM, SamplingParams, __version__
from octavo.testing import tiny_model

GREEDY = {"temperature": 0, "max_tokens": 8, "model": "tiny"}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tiny_model(tmp_path_factory.mktemp("api") / "tiny")
    with running_server(folder, engine={"scheduling_policy": "priority"}) as running:
        yield running


@pytest.fixture(scope="module")
def sdk(server: Running) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def offline(server: Running) -> Iterator[LLM]:
    """The same model without a server."""
    with LLM(server.llm.config.model, num_blocks_override=64) as llm:
        yield llm


def complete(sdk: openai.OpenAI, prompt: Any = "hello", **fields: Any) -> Any:
    known = {"extra_body": fields.pop("extra", {})}
    return sdk.completions.create(prompt=prompt, **{**GREEDY, **fields}, **known)


def test_models_and_version(server: Running, sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "octavo")
    assert model.max_model_len == 512
    assert sdk.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError) as error:
        sdk.models.retrieve("other")
    assert error.value.code == "model_not_found"
    assert server.get("/version").json() == {"version": __version__}


def test_a_completion_equals_the_python_api(server: Running, sdk: openai.OpenAI) -> None:
    answer = complete(sdk)
    (choice,) = answer.choices
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "tiny"
    assert (choice.index, choice.logprobs, choice.finish_reason) == (0, None, "length")
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 5,
        "completion_tokens": 8,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert choice.text == complete(sdk, [104, 101, 108, 108, 111]).choices[0].text


def test_streamed_pieces_add_up(sdk: openai.OpenAI) -> None:
    whole = complete(sdk).choices[0].text
    events = list(complete(sdk, stream=True))
    assert "".join(e.choices[0].text for e in events) == whole
    assert len({e.id for e in events}) == 1
    assert [e.choices[0].finish_reason for e in events if e.choices[0].finish_reason] == ["length"]


def test_prompt_lists_and_n(sdk: openai.OpenAI) -> None:
    prompts = ["one", "two", "three"]
    answer = complete(sdk, prompts, n=2, temperature=1, seed=7)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert answer.usage.prompt_tokens == 3 + 3 + 5
    assert answer.usage.completion_tokens == 48
    alone = complete(sdk, "two", n=2, temperature=1, seed=7)
    assert [c.text for c in answer.choices[2:4]] == [c.text for c in alone.choices]
    assert alone.choices[0].text != alone.choices[1].text
    texts: dict[int, str] = {}
    for event in complete(sdk, prompts, n=2, temperature=1, seed=7, stream=True):
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert [texts[i] for i in range(6)] == [c.text for c in answer.choices]
    ids = complete(sdk, [[1, 2, 3], [4, 5]])
    assert len(ids.choices) == 2


def test_sampling_fields_take_effect(sdk: openai.OpenAI) -> None:
    plain = complete(sdk, extra={"return_token_ids": True}).choices[0].token_ids
    assert len(plain) == 8
    allowed = complete(sdk, extra={"allowed_token_ids": [65, 66]}).choices[0].text
    assert set(allowed) <= {"A", "B"}
    assert complete(sdk, logit_bias={"90": 100}).choices[0].text == "Z" * 8
    assert complete(sdk, extra={"top_k": 1}, temperature=5).choices[0].text == complete(sdk).choices[0].text
    assert complete(sdk, extra={"min_p": 1.0}, temperature=5).choices[0].text == complete(sdk).choices[0].text
    seeded = [complete(sdk, temperature=2, seed=seed, max_tokens=24).choices[0].text for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    stopped = complete(sdk, logit_bias={"90": 100}, stop="ZZ")
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason, stopped.choices[0].stop_reason) == (
        "",
        "stop",
        "ZZ",
    )
    late = complete(
        sdk, logit_bias={"90": 100}, stop=["ZZ"], extra={"min_tokens": 5, "include_stop_str_in_output": True}
    )
    assert late.choices[0].text == "ZZZZZZ"
    by_id = complete(sdk, logit_bias={"90": 100}, extra={"stop_token_ids": [90]})
    assert (by_id.choices[0].text, by_id.choices[0].stop_reason) == ("", 90)


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.9},
        {"frequency_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"bad_words": ["a", "o", "e"]},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "seed": 11},
        {"logit_bias": {"65": 4.5, "66": -100}},
        {"min_tokens": 20, "stop": ["o"], "ignore_eos": True},
        {"temperature": 1.5, "seed": -5, "n": 3},
    ],
    ids=lambda params: "-".join(params),
)
def test_fields_mean_what_they_mean_in_python(sdk: openai.OpenAI, offline: LLM, params: dict[str, Any]) -> None:
    (expected,) = offline.generate("hello", SamplingParams(**{"temperature": 0, "max_tokens": 32, **params}))
    answer = complete(sdk, max_tokens=32, extra={"return_token_ids": True, **params})
    assert [c.token_ids for c in answer.choices] == [c.token_ids for c in expected.outputs]
    assert [c.text for c in answer.choices] == [c.text for c in expected.outputs]


def test_ends_and_special_tokens(sdk: openai.OpenAI) -> None:
    end = {"257": 100}
    assert complete(sdk, logit_bias=end).choices[0].finish_reason == "stop"
    shown = complete(sdk, logit_bias=end, extra={"ignore_eos": True, "skip_special_tokens": False}).choices[0]
    assert (shown.text, shown.finish_reason) == ("<|im_end|>" * 8, "length")
    assert complete(sdk, logit_bias=end, extra={"ignore_eos": True}).choices[0].text == ""


def test_echo_and_its_logprobs(sdk: openai.OpenAI) -> None:
    text = complete(sdk).choices[0].text
    assert complete(sdk, echo=True).choices[0].text == "hello" + text
    assert complete(sdk, [104, 105], echo=True).choices[0].text.startswith("hi")
    choice = complete(sdk, echo=True, logprobs=1).choices[0]
    assert len(choice.logprobs.tokens) == 5 + 8
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value is not None for value in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset[:6] == [0, 1, 2, 3, 4, 5]
    scored = complete(sdk, echo=True, logprobs=0, max_tokens=0)
    assert scored.choices[0].text == "hello"
    assert scored.choices[0].logprobs.token_logprobs == choice.logprobs.token_logprobs[:5]
    assert scored.usage.completion_tokens == 0
    streamed = "".join(e.choices[0].text for e in complete(sdk, echo=True, stream=True))
    assert streamed == "hello" + text
    events = list(complete(sdk, echo=True, logprobs=1, stream=True))
    assert [n for e in events for n in e.choices[0].logprobs.tokens] == choice.logprobs.tokens
    assert [n for e in events for n in e.choices[0].logprobs.text_offset] == choice.logprobs.text_offset
    only = list(complete(sdk, echo=True, max_tokens=0, stream=True))
    assert "".join(e.choices[0].text for e in only) == "hello"


def test_prompt_logprobs_and_token_ids(sdk: openai.OpenAI) -> None:
    choice = complete(sdk, extra={"prompt_logprobs": 1, "return_token_ids": True}).choices[0]
    assert choice.prompt_token_ids == list(b"hello")
    assert choice.prompt_logprobs[0] is None
    assert str(ord("e")) in choice.prompt_logprobs[1]
    assert set(choice.prompt_logprobs[1][str(ord("e"))]) == {"logprob", "rank", "decoded_token"}
    events = list(complete(sdk, stream=True, extra={"prompt_logprobs": 1, "return_token_ids": True}))
    assert events[0].choices[0].prompt_token_ids == list(b"hello")
    assert events[0].choices[0].prompt_logprobs == choice.prompt_logprobs
    assert [t for e in events for t in e.choices[0].token_ids] == choice.token_ids
    named = complete(sdk, logprobs=0, extra={"return_tokens_as_token_ids": True}).choices[0]
    assert named.logprobs.tokens[0] == f"token_id:{choice.token_ids[0]}"


def test_truncation(sdk: openai.OpenAI) -> None:
    long = complete(sdk, "x" * 600 + "hello", extra={"truncate_prompt_tokens": 5})
    assert (long.choices[0].text, long.usage.prompt_tokens) == (complete(sdk).choices[0].text, 5)
    assert complete(sdk, "x" * 600, extra={"truncate_prompt_tokens": -1}, max_tokens=1).usage.prompt_tokens == 511


def test_priority_and_cached_tokens(sdk: openai.OpenAI) -> None:
    prompt = "a prompt that is longer than two blocks of sixteen tokens"
    first = complete(sdk, prompt, extra={"priority": 3}).usage
    again = complete(sdk, prompt, extra={"priority": -3}).usage
    assert first.prompt_tokens_details.cached_tokens == 0
    assert again.prompt_tokens_details.cached_tokens == 48
    assert complete(sdk, prompt, extra={"cache_salt": "mine"}).usage.prompt_tokens_details.cached_tokens == 0
    assert complete(sdk, prompt, extra={"cache_salt": "mine"}).usage.prompt_tokens_details.cached_tokens == 48


def test_reset_prefix_cache(server: Running, sdk: openai.OpenAI) -> None:
    prompt = "another prompt that is longer than two blocks"
    complete(sdk, prompt)
    assert complete(sdk, prompt).usage.prompt_tokens_details.cached_tokens == 32
    assert server.post("/reset_prefix_cache").status_code == 200
    assert complete(sdk, prompt).usage.prompt_tokens_details.cached_tokens == 0


# --- chat


def chat(sdk: openai.OpenAI, messages: Any = HELLO, **fields: Any) -> Any:
    known = {"extra_body": fields.pop("extra", {})}
    return sdk.chat.completions.create(messages=messages, **{**GREEDY, **fields}, **known)


def test_chat(sdk: openai.OpenAI) -> None:
    answer = chat(sdk)
    (choice,) = answer.choices
    assert (answer.object, answer.id[:9]) == ("chat.completion", "chatcmpl-")
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.refusal is None
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert choice.message.content == complete(sdk, prompt).choices[0].text
    assert answer.usage.completion_tokens == 8
    events = list(chat(sdk, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in events) == choice.message.content
    assert [e.choices[0].finish_reason for e in events if e.choices[0].finish_reason] == ["length"]
    assert {e.object for e in events} == {"chat.completion.chunk"}


def test_chat_n_and_both_names_of_the_limit(sdk: openai.OpenAI) -> None:
    answer = chat(sdk, n=3, temperature=1, seed=1, max_tokens=None, max_completion_tokens=4)
    assert len({c.message.content for c in answer.choices}) > 1
    assert answer.usage.completion_tokens == 12
    texts = ["", "", ""]
    for event in chat(sdk, n=3, temperature=1, seed=1, max_tokens=4, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in answer.choices]


def test_chat_continues_the_final_message(sdk: openai.OpenAI) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The answer"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    answer = chat(sdk, messages, extra=extra)
    assert bytes(answer.prompt_token_ids[-10:]) == b"The answer"
    echoed = chat(sdk, messages, extra={**extra, "echo": True})
    assert echoed.choices[0].message.content == "The answer" + answer.choices[0].message.content
    streamed = chat(sdk, messages, stream=True, extra={**extra, "echo": True})
    assert "".join(e.choices[0].delta.content or "" for e in streamed) == echoed.choices[0].message.content


def test_chat_prompt_logprobs_and_ids_in_a_stream(sdk: openai.OpenAI) -> None:
    extra = {"prompt_logprobs": 0, "return_token_ids": True}
    whole = chat(sdk, extra=extra)
    events = list(chat(sdk, stream=True, extra=extra))
    assert events[0].prompt_token_ids == whole.prompt_token_ids
    assert events[0].prompt_logprobs == whole.prompt_logprobs
    assert [t for e in events for t in getattr(e.choices[0], "token_ids", None) or []] == whole.choices[0].token_ids


# --- responses


def test_responses(sdk: openai.OpenAI) -> None:
    expected = chat(sdk).choices[0].message.content
    answer = sdk.responses.create(model="tiny", input="hello", temperature=0, max_output_tokens=8)
    assert answer.output_text == expected
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.input_tokens + 8 == answer.usage.total_tokens
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]}]
    assert sdk.responses.create(model="tiny", input=parts, temperature=0, max_output_tokens=8).output_text == expected
    told = sdk.responses.create(
        model="tiny", input="hello", instructions="be brief", temperature=0, max_output_tokens=8
    )
    with_system = chat(sdk, [{"role": "system", "content": "be brief"}, *HELLO])
    assert told.output_text == with_system.choices[0].message.content


def test_responses_stream(sdk: openai.OpenAI) -> None:
    with sdk.responses.stream(
        model="tiny", input="hello", temperature=0, max_output_tokens=8, include=["message.output_text.logprobs"]
    ) as stream:
        events = list(stream)
    final = events[-1].response
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == final.output_text == chat(sdk).choices[0].message.content
    assert sum(len(event.logprobs) for event in deltas) <= 8
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": []}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
    ],
)
def test_responses_that_are_not_served(sdk: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        sdk.responses.create(**{"model": "tiny", "input": "hello", **fields})
    assert error.value.param == param


# --- tokenizing, and the rest


def test_tokenize_and_back(server: Running) -> None:
    answer = server.post("/tokenize", {"prompt": "héllo", "return_token_strs": True}).json()
    assert answer["tokens"] == list("héllo".encode())
    assert (answer["count"], answer["max_model_len"], len(answer["token_strs"])) == (6, 512, 6)
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "héllo"}
    rendered = server.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": rendered}).json()["prompt"]
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    for bad in ({}, {"prompt": "a", "messages": HELLO}):
        assert server.post("/tokenize", bad).status_code == 400
    assert server.post("/detokenize", {"tokens": [288]}).status_code == 400
    assert server.post("/detokenize", {"tokens": [-1]}).status_code == 400


def test_request_ids_are_echoed(server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert server.post("/v1/completions", body, headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = server.post("/v1/completions", body).headers["x-request-id"]
    assert len(made) == 32
    ugly = server.post("/v1/completions", body, headers={"X-Request-Id": "a b" * 100}).headers["x-request-id"]
    assert ugly != "a b" * 100
    assert server.get("/nowhere", headers={"X-Request-Id": "mine-2"}).headers["x-request-id"] == "mine-2"


def test_generation_config_is_the_default(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 257, "temperature": 0.0, "max_new_tokens": 3, "do_sample": False}))
    body = {"prompt": "hello"}
    with running_server(folder) as server:
        first, second = (server.post("/v1/completions", body).json() for _ in range(2))
        assert first["usage"]["completion_tokens"] == 3
        assert first["choices"][0]["text"] == second["choices"][0]["text"]
        assert server.post("/v1/completions", {**body, "max_tokens": 5}).json()["usage"]["completion_tokens"] == 5
    with running_server(folder, generation_config="vllm") as server:
        answer = server.post("/v1/completions", {**body, "ignore_eos": True}).json()
        assert answer["usage"]["completion_tokens"] == 16
    with running_server(folder, override_generation_config='{"max_new_tokens": 4, "top_k": 1}') as server:
        assert server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 4


def test_served_names(tmp_path: Path) -> None:
    llm = scripted_llm(tmp_path / "m", {(1,): [65, 66]})
    with running_server(llm, served_model_name=("gpt-x", "alias")) as server:
        sdk = server.client()
        assert [model.id for model in sdk.models.list()] == ["gpt-x", "alias"]
        answer = sdk.completions.create(model="alias", prompt=[1])
        assert (answer.model, answer.choices[0].text) == ("alias", "AB")
        assert server.post("/v1/completions", {"prompt": [1]}).json()["model"] == "gpt-x"
        with pytest.raises(openai.NotFoundError):
            sdk.completions.create(model="m", prompt=[1])
