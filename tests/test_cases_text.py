"""Cases V27, V28, V30, V31 through the whole front end: a scripted model says exact tokens, the text must be exact too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support import scripted_llm

from octavo import SamplingParams
from octavo.front.output_processor import TextDelta

WORDS = ("DEF", "HI", "AB", "EF", "GH", "\ufffd", " world")  # single bytes are tokens anyway
WORD = {word: 259 + i for i, word in enumerate(WORDS)} | {"G": ord("G"), "J": ord("J")}
END = 257


def utf8(text: str) -> list[int]:
    return list(text.encode())


def run(
    folder: Path, prompt: Sequence[int], output: Sequence[int], **params: object
) -> tuple[list[str], TextDelta, list[int]]:
    """The deltas of a scripted answer, its last delta, and the non-streaming text's tokens; both ways must agree."""
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 200, **params})
    scripts = {tuple(prompt): list(output)}
    deltas = list(scripted_llm(folder, scripts, words=WORDS).stream({"prompt_token_ids": list(prompt)}, sampling))
    (whole,) = scripted_llm(folder, scripts, words=WORDS).generate({"prompt_token_ids": list(prompt)}, sampling)
    completion = whole.outputs[0]
    last = deltas[-1]
    assert "".join(d.text for d in deltas) == completion.text == last.completion.text
    assert completion.token_ids == last.completion.token_ids
    assert (completion.finish_reason, completion.stop_reason) == (
        last.completion.finish_reason,
        last.completion.stop_reason,
    )
    return [d.text for d in deltas], last, completion.token_ids


# --- V27


@pytest.mark.parametrize("text", ["🌶️ hot", "日本語", "e\u0301 combined", "👩‍👩‍👧", "a\ufffdb", "plain"])
def test_v27_characters_split_over_tokens(tmp_path: Path, text: str) -> None:
    deltas, last, _ = run(tmp_path, [65], utf8(text))
    assert last.completion.text == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_v27_stop_by_length_inside_a_character(tmp_path: Path, cut: int) -> None:
    _, last, tokens = run(tmp_path, [65], utf8("ab🌶"), max_tokens=2 + cut)
    assert last.completion.text == "ab\ufffd"
    assert last.completion.finish_reason == "length"
    assert len(tokens) == 2 + cut


def test_v27_bytes_that_never_become_valid(tmp_path: Path) -> None:
    deltas, last, _ = run(tmp_path, [65], [0x80] * 60 + utf8("ok"))
    assert last.completion.text == "\ufffd" * 60 + "ok"
    waiting = longest = 0
    for delta in deltas:
        waiting = 0 if delta else waiting + 1
        longest = max(longest, waiting)
    assert longest <= 10, "what is held back is bounded"


def test_v27_a_token_that_is_the_replacement_character(tmp_path: Path) -> None:
    _, last, _ = run(tmp_path, [65], [*utf8("x"), WORD["\ufffd"], *utf8("y")])
    assert last.completion.text == "x\ufffdy"


# --- V28


def test_v28_prompt_that_ends_inside_a_character(tmp_path: Path) -> None:
    prompt = utf8("Hello world 🌶")[:-2]
    deltas, last, _ = run(tmp_path, prompt, utf8("🌶")[-2:] + utf8("!"))
    assert next(d for d in deltas if d) in ("🌶", "🌶!")
    assert last.completion.text == "🌶!"


def test_v28_the_missing_bytes_never_come(tmp_path: Path) -> None:
    _, last, _ = run(tmp_path, utf8("Hello 🌶")[:-2], utf8("abc"))
    assert last.completion.text in ("\ufffdabc", "abc")


# --- V30


def test_v30_stop_over_token_borders(tmp_path: Path) -> None:
    tokens = [*utf8("ABC"), WORD["DEF"], WORD["G"], WORD["HI"], WORD["J"], *utf8("K")]
    deltas, last, out = run(tmp_path, [65], tokens, stop=["DEFGHIJ"])
    assert last.completion.text == "ABC"
    assert not any(set(d) & set("DEFGHIJ") for d in deltas)
    assert (last.completion.finish_reason, last.completion.stop_reason) == ("stop", "DEFGHIJ")
    assert out == tokens[:-1]


def test_v30_stop_inside_tokens(tmp_path: Path) -> None:
    tokens = [*utf8("AB"), WORD["EF"], WORD["GH"], *utf8("Z")]
    _, last, _ = run(tmp_path, [65], tokens, stop=["FG"])
    assert last.completion.text == "ABE"


@pytest.mark.parametrize(
    ("said", "stop", "text", "matched"),
    [
        ("xxabcyy", ["ab", "abc"], "xx", "ab"),
        ("aaab!", ["aab"], "a", "aab"),
        ("ab rest", ["ab"], "", "ab"),
        ("one two", ["two", "one"], "", "one"),
        ("no stop", ["zzzzzzzz"], "no stop", None),
        ("almost zzz end", ["zzzz"], "almost zzz end", None),
        ("tail zz", ["zzz"], "tail zz", None),
    ],
)
def test_v30_matches(tmp_path: Path, said: str, stop: list[str], text: str, matched: str | None) -> None:
    _, last, _ = run(tmp_path, [65], utf8(said), stop=stop)
    assert last.completion.text == text
    assert last.completion.stop_reason == matched
    assert last.completion.finish_reason == "stop"


def test_v30_include_the_stop_string(tmp_path: Path) -> None:
    _, last, _ = run(tmp_path, [65], utf8("one. two"), stop=["."], include_stop_str_in_output=True)
    assert last.completion.text == "one."


def test_v30_nothing_is_held_back_that_begins_no_stop(tmp_path: Path) -> None:
    deltas, _, _ = run(tmp_path, [65], utf8("a b c d"), stop=["zzzzzzzz"])
    assert deltas[:7] == list("a b c d")


def test_v30_stops_are_bounded() -> None:
    with pytest.raises(ValueError, match="at most 64"):
        SamplingParams(stop=["x" * 1024] * 2000)
    with pytest.raises(ValueError, match="1 to 1024"):
        SamplingParams(stop=["x" * 1025])


# --- V31


def test_v31_special_token_as_stop_string(tmp_path: Path) -> None:
    _, last, _ = run(tmp_path, [65], [*utf8("ab"), 256, *utf8("cd")], stop=["<|im_start|>"])
    assert last.completion.text == "ab"
    assert (last.completion.finish_reason, last.completion.stop_reason) == ("stop", "<|im_start|>")


def test_v31_end_token_of_the_model(tmp_path: Path) -> None:
    _, last, tokens = run(tmp_path, [65], [*utf8("ab"), END, *utf8("cd")])
    assert last.completion.text == "ab"
    assert tokens[-1] == END
    assert (last.completion.finish_reason, last.completion.stop_reason) == ("stop", None)


def test_v31_ignore_eos_goes_on(tmp_path: Path) -> None:
    _, last, _ = run(tmp_path, [65], [*utf8("ab"), END, *utf8("cd")], ignore_eos=True, max_tokens=5)
    assert last.completion.text == "abcd"
    assert last.completion.finish_reason == "length"


def test_v31_stop_token_ids(tmp_path: Path) -> None:
    _, last, _ = run(tmp_path, [65], utf8("abXcd"), stop_token_ids=[ord("X")], ignore_eos=True)
    assert last.completion.text == "ab"
    assert last.completion.stop_reason == ord("X")


def test_v31_min_tokens_holds_off_every_kind_of_end(tmp_path: Path) -> None:
    said = [*utf8("ab"), END, *utf8("cde")]
    scripts = {(65,): said}
    llm = scripted_llm(tmp_path, scripts, words=WORDS)
    params = SamplingParams(temperature=0, min_tokens=3, max_tokens=3)
    (output,) = llm.generate({"prompt_token_ids": [65]}, params)
    assert END not in output.outputs[0].token_ids, "the end token is masked while min_tokens are not out"
    _, last, _ = run(tmp_path / "b", [65], utf8("a.b.c"), stop=["."], min_tokens=3)
    assert last.completion.text == "a.b"
