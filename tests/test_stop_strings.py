"""Stop strings over a text that arrives in pieces: what is sent, what is held back, which one matched."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.front.stop_strings import StopChecker


def run(stops, pieces, include=False):
    """The pieces that were sent (the flushed one last) and the stop string that matched."""
    checker, sent = StopChecker(stops, include), []
    for piece in pieces:
        text, matched = checker.feed(piece)
        sent.append(text)
        if matched is not None:
            assert checker.flush() == ""
            return sent, matched
    return [*sent, checker.flush()], None


def oracle(stops, text, include):
    """Character by character: the first end of any stop string, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text, places):
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize(
    ("stops", "pieces", "sent", "matched"),
    [
        (["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J", "K"], ["ABC", "", "", "", ""], "DEFGHIJ"),
        (["FG"], ["ABCD", "EF", "GH"], ["ABCD", "E", ""], "FG"),
        (["ab", "abc"], ["x", "abc"], ["x", ""], "ab"),
        (["abc", "ab"], ["x", "a", "b", "c"], ["x", "", ""], "ab"),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], "aab"),
        (["aab"], ["aaab"], ["a"], "aab"),
        (["Hi"], ["Hi there"], [""], "Hi"),
        (["DEFGHIJ"], ["ABCDEFG", "Hx"], ["ABC", "DEFGHx", ""], None),
        (["stop"], ["do not sto"], ["do not ", "sto"], None),
        ([], ["a", "b"], ["a", "b", ""], None),
    ],
)
def test_v30_stop_strings_across_pieces(stops, pieces, sent, matched):
    assert run(stops, pieces) == (sent, matched)


@pytest.mark.parametrize("pieces", [["abcdef"], list("abcdef"), ["abc", "def"]])
def test_v30_a_stop_string_inside_another_ends_the_text_however_it_is_cut(pieces):
    sent, matched = run(["abcdef", "cd"], pieces)
    assert ("".join(sent), matched) == ("ab", "cd")


def test_v30_of_stop_strings_that_end_together_nothing_is_sent():
    assert run(["bc", "abc"], ["xa", "bc"]) == (["x", ""], "abc")


def test_v30_include_leaves_the_stop_string_and_nothing_after_it():
    assert run(["END"], ["a E", "N", "D b"], include=True) == (["a ", "", "END"], "END")


def test_v26_nothing_is_held_back_without_the_beginning_of_a_stop_string():
    assert run(["zzzzzzzz"], [" a", " b", " c", " d"]) == ([" a", " b", " c", " d", ""], None)


def test_v31_stop_strings_do_not_count_until_min_tokens_are_out():
    checker = StopChecker(["ab", "abc"])
    assert checker.feed("xab", check=False) == ("x", None)  # "ab" is let pass, though it may begin "abc"
    assert checker.feed("x") == ("abx", None)
    assert checker.feed("ab") == ("", "ab")


def test_v31_a_stop_string_that_is_completed_after_min_tokens_counts():
    checker = StopChecker(["<end>"])
    assert checker.feed("x<e", check=False) == ("x", None)
    assert checker.feed("nd>") == ("", "<end>")


def test_v31_a_stop_string_let_pass_is_not_held_back():
    checker = StopChecker(["ab"])
    assert checker.feed("xab", check=False) == ("xab", None)
    assert checker.flush() == ""


def test_flush_empties():
    checker = StopChecker(["ab"])
    checker.feed("a")
    assert (checker.flush(), checker.flush()) == ("a", "")


LETTERS = st.text("abc", max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@settings(deadline=None)
@given(STOPS, LETTERS, st.lists(st.integers(0, 12)), st.booleans())
def test_v30_the_cuts_of_a_text_do_not_matter(stops, text, places, include):
    sent, matched = run(stops, cut(text, places), include)
    assert ("".join(sent), matched) == oracle(stops, text, include)


@settings(deadline=None)
@given(STOPS, LETTERS, st.lists(st.integers(0, 12)))
def test_v26_only_the_longest_beginning_of_a_stop_string_is_held_back(stops, text, places):
    checker, fed, sent = StopChecker(stops), "", ""
    for piece in cut(text, places):
        new, matched = checker.feed(piece)
        fed, sent = fed + piece, sent + new
        if matched is not None:
            return
        held = fed[len(sent) :]
        beginnings = {stop[:size] for stop in stops for size in range(1, len(stop))}
        assert held == max((tail for tail in beginnings if fed.endswith(tail)), key=len, default="")


@settings(deadline=None)
@given(STOPS, LETTERS, LETTERS)
def test_v31_text_let_pass_is_sent_whatever_it_holds(stops, early, late):
    checker = StopChecker(stops)
    first, matched = checker.feed(early, check=False)
    assert matched is None
    second, matched = checker.feed(late)
    sent = first + second + checker.flush()
    if matched is None:
        assert sent == early + late
    else:
        assert (early + late).startswith(sent + matched)
        assert len(sent + matched) > len(early)
