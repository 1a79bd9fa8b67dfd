"""From bytes to times: events however they are cut, and which token came when."""

from __future__ import annotations

import json
from random import Random

import pytest

from octavo_bench.recorder import EventParser, Recorder, RequestResult, StreamError, share_tokens


def events(*chunks: bytes) -> list[bytes]:
    parser = EventParser()
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.end()


STREAM = (
    b": keep-alive\r\n\r\ndata: one\r\n\r\nevent: x\r\nid: 5\r\ndata:two\r\ndata:  three\r\n\r\n"
    b":\n\ndata: four\n\ndata: five\r\r"
)
EXPECTED = [b"one", b"two\n three", b"four", b"five"]


def test_events_of_all_line_endings_with_comments() -> None:
    assert events(STREAM) == EXPECTED


@pytest.mark.parametrize("at", range(len(STREAM) + 1))
def test_one_cut_anywhere_changes_nothing(at: int) -> None:
    assert events(STREAM[:at], STREAM[at:]) == EXPECTED


def test_any_cuts_change_nothing() -> None:
    random = Random(0)
    assert events(*(STREAM[i : i + 1] for i in range(len(STREAM)))) == EXPECTED
    for _ in range(300):
        cuts = sorted(random.choices(range(len(STREAM)), k=random.randrange(6)))
        assert events(*(STREAM[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True))) == EXPECTED


def test_a_last_event_without_its_blank_line_counts() -> None:
    assert events(b"data: a\n\ndata: b") == [b"a", b"b"]
    assert events(b"data: a\n\ndata: b\n") == [b"a", b"b"]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo_bench.recorder.MAX_EVENT_BYTES", 100)
    with pytest.raises(StreamError, match="more than 100 bytes"):
        events(b"data: " + b"x" * 200)


def text(piece: str, **more: object) -> bytes:
    return json.dumps({"choices": [{"text": piece, "finish_reason": None}], **more}).encode()


def chat(**delta: object) -> bytes:
    return json.dumps({"choices": [{"delta": delta, "finish_reason": None}]}).encode()


END = json.dumps({"choices": [{"text": "", "finish_reason": "stop"}]}).encode()


def usage(prompt: int, output: int) -> bytes:
    return json.dumps({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}).encode()


def record(*timed: tuple[bytes, float], start: float = 10.0, count=None) -> RequestResult:
    result = RequestResult(3, start)
    recorder = Recorder(result, count)
    for data, now in timed:
        recorder.event(data, now)
    recorder.finish()
    return result


def test_v49_the_first_token_is_no_inter_token_latency() -> None:
    result = record(
        (text("a"), 10.5), (text("b"), 10.6), (text("c"), 10.9), (END, 11.0), (usage(5, 3), 11.5), (b"[DONE]", 11.6)
    )
    assert result.success
    assert (result.prompt_tokens, result.output_tokens, result.text) == (5, 3, "abc")
    assert result.ttft == pytest.approx(0.5)
    assert result.itls == pytest.approx([0.1, 0.3])
    assert result.tpot == pytest.approx(0.5 / 2), "to the end of the answer, as vLLM counts"
    assert result.latency == pytest.approx(1.0), "usage and [DONE] are no part of the answer"


def test_tokens_that_come_together_share_their_wait() -> None:
    result = record((text("ab"), 11.0), (text("cdef"), 11.4), (text("g"), 11.5), (usage(5, 7), 11.5), (b"[DONE]", 11.5))
    assert result.chunk_tokens == [2, 4, 1]
    assert result.itls == pytest.approx([0.1] * 5)
    assert result.tpot == pytest.approx(0.1), "those of the first chunk took no further time"


def test_a_tokenizer_says_how_tokens_lie_in_chunks() -> None:
    timed = ((text("one two "), 11.0), (text("three "), 12.0), (text("four five six "), 15.0), (usage(1, 6), 15.0))
    result = record(*timed, (b"[DONE]", 15.0), count=lambda t: len(t.split()))
    assert result.chunk_tokens == [2, 1, 3]
    assert result.itls == pytest.approx([1.0, 1.0, 1.0, 1.0])


def test_usage_in_every_chunk_wins() -> None:
    timed = [(text("x" * 9, usage={"completion_tokens": 1}), 11.0), (text("y", usage={"completion_tokens": 4}), 14.0)]
    result = record(*timed, (usage(2, 4), 14.0), (b"[DONE]", 14.0), count=len)
    assert result.chunk_tokens == [1, 3]
    assert result.itls == pytest.approx([1.0] * 3)


def test_without_usage_the_tokenizer_counts_and_without_both_the_chunks() -> None:
    timed = ((text("a b c "), 11.0), (text("d "), 12.0), (END, 12.0))
    assert record(*timed, count=lambda t: len(t.split())).output_tokens == 4
    found = record(*timed)
    assert (found.output_tokens, found.prompt_tokens) == (2, 3)


def test_the_role_of_an_answer_is_no_token() -> None:
    result = record(
        (chat(role="assistant", content=""), 10.1),
        (chat(content="hi"), 10.7),
        (chat(content=" you"), 10.9),
        (END, 10.9),
    )
    assert result.ttft == pytest.approx(0.7)
    assert result.itls == pytest.approx([0.2])


def test_reasoning_and_tool_calls_are_output() -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": "{}"}}
    result = record((chat(reasoning_content="hm"), 10.2), (chat(tool_calls=[call]), 10.4), (END, 10.5))
    assert result.text == "hmf{}"
    assert result.ttft == pytest.approx(0.2)


def test_tokens_without_text_have_the_time_of_their_events() -> None:
    result = record((text(""), 10.3), (text(""), 10.4), (END, 10.5), (usage(4, 3), 10.5))
    assert (result.output_tokens, result.ttft) == (3, pytest.approx(0.3))
    assert result.success


def test_an_answer_of_no_tokens_succeeds_without_times() -> None:
    result = record((END, 10.5), (usage(4, 0), 10.5), (b"[DONE]", 10.5))
    assert result.success
    assert (result.ttft, result.tpot, result.itls, result.latency) == (None, None, [], 0.5)


def test_one_token_has_no_tpot() -> None:
    assert record((text("a"), 10.5), (END, 10.5), (usage(1, 1), 10.5)).tpot is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"nonsense", "no JSON object"),
        (b"[1]", "no JSON object"),
        (b'{"error": {"message": "out of\\nmemory", "code": 500}}', "error in the stream: out of memory"),
        (b'{"error": "plain"}', "error in the stream: plain"),
    ],
)
def test_v47_errors_in_the_stream_fail_the_request(data: bytes, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        record((text("a"), 10.1), (data, 10.2))


def test_v49_a_cut_stream_is_a_failure() -> None:
    with pytest.raises(StreamError, match="cut off"):
        record((text("a"), 10.1), (text("b"), 10.2))


@pytest.mark.parametrize("seed", range(20))
def test_shares_add_up(seed: int) -> None:
    random = Random(seed)
    weights = [random.randrange(0, 30) for _ in range(random.randrange(1, 12))]
    total = random.randrange(1, 200)
    shares = share_tokens(total, weights)
    assert min(shares) >= 1
    assert sum(shares) == max(total, len(weights))
