"""What streams say, piece by piece, with a model that says what the test wants: V25 to V28, V30, V31, V34 and V35 over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from server_support import Running, running_server
from support import scripted_llm

from octavo.testing import tiny_model

PROMPT = "say"
WORDS = ("DEF", "HI", " a", " b", " c", " d")  # of one character are the bytes
FIRST_WORD = 259


def ids(*words: str) -> list[int]:
    return [FIRST_WORD + WORDS.index(word) if word in WORDS else ord(word) for word in words]


def serving(tmp_path: Path, said: Sequence[int], **settings: Any) -> Any:
    llm = scripted_llm(tmp_path / "m", {tuple(PROMPT.encode()): said}, words=WORDS)
    return running_server(llm, **settings)


def stream(server: Running, **fields: Any) -> tuple[list[Any], list[Any]]:
    """The choices of all events of a completion, and the events without any; checks the order of both."""
    events = server.events("/v1/completions", {"prompt": PROMPT, "stream": True, "max_tokens": 64, **fields})
    assert events[-1] == "[DONE]"
    told = [bool(event["choices"]) for event in events[:-1]]
    assert told == sorted(told, reverse=True), "an event without choices comes before one with some"
    return [c for e in events[:-1] for c in e["choices"]], [e for e in events[:-1] if not e["choices"]]


def whole(server: Running, **fields: Any) -> Any:
    return server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 64, **fields}).json()


# --- V25: usage and ends


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("fields", [{}, {"n": 2, "temperature": 1}, {"stop": "c"}])
def test_v25_usage_comes_once_and_only_when_asked(
    tmp_path: Path, options: dict[str, bool] | None, fields: dict[str, Any]
) -> None:
    with serving(tmp_path, ids(" a", " b", " c", " d")) as server:
        choices, rest = stream(server, stream_options=options, **fields)
        for index in range(fields.get("n", 1)):
            ends = [c["finish_reason"] for c in choices if c["index"] == index and c["finish_reason"]]
            assert ends == ["stop"]
        if options == {"include_usage": True}:
            (last,) = rest
            assert last["usage"] == whole(server, **fields)["usage"] | {
                "prompt_tokens_details": last["usage"]["prompt_tokens_details"]
            }
        else:
            assert not rest


def test_v25_usage_is_null_before_the_end(tmp_path: Path) -> None:
    with serving(tmp_path, ids(" a", " b")) as server:
        body = {"prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}}
        events = server.events("/v1/completions", body)[:-1]
        assert [e["usage"] is None for e in events] == [True] * (len(events) - 1) + [False]
        plain = server.events("/v1/completions", {"prompt": PROMPT, "stream": True})[:-1]
        assert all("usage" not in e for e in plain)
        body["stream_options"]["continuous_usage_stats"] = True
        counts = [e["usage"]["completion_tokens"] for e in server.events("/v1/completions", body)[:-1]]
        assert counts == sorted(counts)
        assert counts[-1] == 3


def test_v25_stream_options_need_a_stream(tmp_path: Path) -> None:
    with serving(tmp_path, ids(" a")) as server:
        answer = server.post("/v1/completions", {"prompt": PROMPT, "stream_options": {"include_usage": True}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")


def test_v25_usage_can_be_forced(tmp_path: Path) -> None:
    with serving(tmp_path, ids(" a"), enable_force_include_usage=True) as server:
        assert len(stream(server)[1]) == 1
        chat = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 1}
        assert server.post("/v1/chat/completions", chat).status_code == 200


# --- V26: no empty pieces, and what belongs together stays together


@pytest.mark.parametrize("logprobs", [None, 1])
def test_v26_a_stop_list_holds_nothing_back_without_need(tmp_path: Path, logprobs: int | None) -> None:
    with serving(tmp_path, ids(" a", " b", " c", " d")) as server:
        choices, _ = stream(server, stop=["zzzzzzzz"], logprobs=logprobs)
        assert "".join(c["text"] for c in choices) == " a b c d"
        assert all(c["text"] or c["finish_reason"] for c in choices)
        if logprobs is not None:
            for choice in choices:
                words = [token for token in choice["logprobs"]["tokens"] if not token.startswith("<|")]
                assert "".join(words) == choice["text"]
            offsets = [o for c in choices for o in c["logprobs"]["text_offset"]]
            assert offsets == [0, 2, 4, 6, 8]


def test_v26_text_that_waits_takes_its_tokens_along(tmp_path: Path) -> None:
    with serving(tmp_path, ids("DEF", "G", "HI", " a")) as server:
        choices, _ = stream(server, stop=["DEFGHIJ"], logprobs=0)
        first = next(c for c in choices if c["text"])
        assert first["text"] == "DEFGHI a"
        assert first["logprobs"]["tokens"] == ["DEF", "G", "HI", " a"]


# --- V27, V28: characters in pieces


@pytest.mark.parametrize("text", ["a🌶b", "🌶🌶", "é", "漢字", "👩‍👩‍👧"])
def test_v27_pieces_add_up_to_the_whole(tmp_path: Path, text: str) -> None:
    with serving(tmp_path, list(text.encode())) as server:
        choices, _ = stream(server)
        assert "".join(c["text"] for c in choices) == whole(server)["choices"][0]["text"] == text
        assert not any("\ufffd" in c["text"] for c in choices)


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_v27_an_end_inside_a_character_is_told_alike(tmp_path: Path, cut: int) -> None:
    with serving(tmp_path, list("🌶".encode())) as server:
        choices, _ = stream(server, max_tokens=cut)
        expected = whole(server, max_tokens=cut)["choices"][0]
        assert "".join(c["text"] for c in choices) == expected["text"]
        assert choices[-1]["finish_reason"] == expected["finish_reason"] == "length"


def test_v28_the_prompt_is_not_echoed_where_it_ends_inside_a_character(tmp_path: Path) -> None:
    prompt = list("Hello world 🌶".encode())
    llm = scripted_llm(tmp_path / "m", {tuple(prompt[:-2]): prompt[-2:]})
    with running_server(llm) as server:
        events = server.events("/v1/completions", {"prompt": prompt[:-2], "stream": True})
        assert "".join(c["text"] for e in events[:-1] for c in e["choices"]) == "🌶"


# --- V30, V31: stops


def test_v30_nothing_of_a_stop_is_streamed(tmp_path: Path) -> None:
    with serving(tmp_path, ids(" a", "DEF", "G", "HI", "J", " b")) as server:
        for fields, text in (({}, " a"), ({"include_stop_str_in_output": True}, " aDEFGHIJ")):
            choices, _ = stream(server, stop="DEFGHIJ", **fields)
            assert "".join(c["text"] for c in choices) == text
            assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "DEFGHIJ")


@pytest.mark.parametrize("stop", [["x"] * 65, ["y" * 1025], [""]])
def test_v30_stops_are_bounded(tmp_path: Path, stop: list[str]) -> None:
    with serving(tmp_path, ids(" a")) as server:
        answer = server.post("/v1/completions", {"prompt": PROMPT, "stop": stop})
        assert answer.status_code == 400
        assert "stop" in answer.json()["error"]["message"]


def test_v31_special_tokens_stop(tmp_path: Path) -> None:
    with serving(tmp_path, [*ids(" a"), 256, *ids(" b")]) as server:
        choices, _ = stream(server, stop="<|im_start|>")
        assert ("".join(c["text"] for c in choices), choices[-1]["stop_reason"]) == (" a", "<|im_start|>")


def test_v31_min_tokens_holds_off_all_ends(tmp_path: Path) -> None:
    """The scripted model forces its end token, which is masked: the next likeliest are the lowest ids."""
    with serving(tmp_path, ids(" a", " b", " c", " d")) as server:
        body = {"prompt": PROMPT, "stop": [" a"], "min_tokens": 3, "max_tokens": 4, "ignore_eos": True}
        assert server.post("/v1/completions", body).json()["choices"][0]["text"] == " a b c d"


# --- V34, V35: logprobs


def test_v34_chat_and_completions_have_their_own_shapes(tmp_path: Path) -> None:
    prompt = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    folder = tmp_path / "m"
    llm = scripted_llm(folder, {tuple(PROMPT.encode()): [0xC3, 0xA9]}, words=WORDS)
    chat_ids = llm.tokenizer.encode(prompt)
    llm.engine.executor.runner.model.scripts[tuple(chat_ids)] = (0xC3, 0xA9)
    with running_server(llm) as server:
        given = whole(server, logprobs=1)["choices"][0]["logprobs"]
        assert set(given) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
        assert given["text_offset"] == [0, 0, 1]
        chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
        for top in (None, 0, 2):
            body = chat | ({} if top is None else {"top_logprobs": top})
            content = server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
            assert [entry["bytes"] for entry in content[:2]] == [[0xC3], [0xA9]]
            assert [len(entry["top_logprobs"]) for entry in content] == [top or 0] * 3
        sdk = server.client()
        parsed = sdk.chat.completions.create(model="m", **chat)
        assert [entry.bytes for entry in parsed.choices[0].logprobs.content[:2]] == [[0xC3], [0xA9]]
        events = server.events("/v1/chat/completions", chat | {"stream": True})
        streamed = [
            e for event in events[:-1] for c in event["choices"] for e in (c["logprobs"] or {}).get("content", [])
        ]
        assert streamed == server.post("/v1/chat/completions", chat).json()["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": PROMPT, "logprobs": 21}, "logprobs"),
        ("/v1/completions", {"prompt": PROMPT, "logprobs": 10**6}, "logprobs"),
        ("/v1/completions", {"prompt": PROMPT, "logprobs": -2}, "logprobs"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 1}, "top_logprobs"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 10**6},
            "logprobs",
        ),
        ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_v34_caps_are_enforced(tmp_path: Path, path: str, fields: dict[str, Any], param: str) -> None:
    with serving(tmp_path, ids(" a")) as server:
        answer = server.post(path, fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_v34_the_chosen_token_is_there_even_outside_the_top(tmp_path: Path) -> None:
    with running_server(tiny_model(tmp_path / "tiny")) as server:
        body = {
            "prompt": "hello",
            "logprobs": 1,
            "temperature": 2,
            "seed": 3,
            "max_tokens": 24,
            "return_token_ids": True,
        }
        choice = server.post("/v1/completions", body).json()["choices"][0]
        logprobs = choice["logprobs"]
        assert all(len(top) == 1 for top in logprobs["top_logprobs"])
        outside = [
            i for i, top in enumerate(logprobs["top_logprobs"]) if logprobs["token_logprobs"][i] < min(top.values())
        ]
        assert outside, "temperature 2 always took the likeliest token"
        assert len(logprobs["tokens"]) == len(choice["token_ids"]) == 24


def test_v35_prompt_logprobs_do_not_depend_on_the_prefix_cache(tmp_path: Path) -> None:
    engine = {"max_num_batched_tokens": 7, "max_num_seqs": 4}
    prompt = "forty tokens, more or less, as they come"
    body = {"prompt": prompt, "prompt_logprobs": 2, "max_tokens": 2, "temperature": 0}
    with running_server(tiny_model(tmp_path / "tiny"), engine=engine) as server:
        server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        answers = [server.post("/v1/completions", body).json()["choices"][0] for _ in range(3)]
        assert len(answers[0]["prompt_logprobs"]) == len(prompt)
        assert answers[0] == answers[1] == answers[2]


# --- V19: neighbours


def test_v19_each_request_equals_its_solo_run_in_any_company(tmp_path: Path) -> None:
    import asyncio

    shapes: list[dict[str, Any]] = [
        {"repetition_penalty": 2.0},
        {},
        {"frequency_penalty": 1.5, "presence_penalty": 1.0},
        {"temperature": 1, "seed": 5, "top_k": 9},
        {"bad_words": ["o"], "max_tokens": 3},
        {"logit_bias": {"101": 5}},
    ]
    with running_server(tiny_model(tmp_path / "tiny")) as server:
        bodies = [{"prompt": f"p{i}", "temperature": 0, "max_tokens": 12, **shape} for i, shape in enumerate(shapes)]
        alone = [server.post("/v1/completions", body).json()["choices"][0]["text"] for body in bodies]

        async def together(order: list[int]) -> None:
            async with server.async_client() as sdk:
                calls = [sdk.completions.create(model="tiny", **{"prompt": "x"}, extra_body=bodies[i]) for i in order]
                answers = await asyncio.gather(*calls)
            assert [a.choices[0].text for a in answers] == [alone[i] for i in order]

        asyncio.run(together([0, 1, 2, 3, 4, 5]))
        asyncio.run(together([5, 3, 1, 4, 2, 0, 0, 1]))
