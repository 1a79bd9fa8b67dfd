"""10,000 damaged checkpoints: each is refused by an error of octavo's, or computes what the healthy one does.

A failure names format, kind of damage and seed; `judge(Subject.build(...), *damage(subject, kind, seed))` repeats it.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fuzz_support import (
    DAMAGE,
    FOLDERS,
    VALUES,
    Subject,
    bounded,
    change_header,
    damage,
    described,
    excuse,
    json_bytes,
    judge,
    load,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load as parse

from octavo import OctavoError

SHARDED = ("float", "awq")
COUNTS = {
    (name, kind): count
    for name in FOLDERS
    for kind, count in {
        "flipped_settings": 110 if name not in ("gguf", "bin") else 0,
        "changed_settings": 330 if name not in ("gguf", "bin") else 0,
        "flipped_header": {"gguf": 700, "bin": 300}.get(name, 100),
        "changed_header": {"gguf": 470, "bin": 0}.get(name, 130),
        "changed_index": 60 if name in SHARDED else 0,
    }.items()
    if count
}
BATCH = 110
"""Inputs of one test, so that a failure comes early and workers share the load."""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Subject]]:
    """Healthy folders by name, each made once."""
    made: dict[str, Subject] = {}

    def get(name: str) -> Subject:
        if name not in made:
            made[name] = Subject.build(name, tmp_path_factory.mktemp("fuzz") / name)
        return made[name]

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # thousands of warnings that nobody reads
    yield get
    logging.disable(before)


def complaints(subject: Subject, kind: str, seeds: range) -> list[str]:
    """What went wrong, by seed; counts of refusals are of no interest, those of `judge` returning None are."""
    found = []
    for seed in seeds:
        file, content = damage(subject, kind, seed)
        wrong = judge(subject, file, content)
        if wrong is not None:
            found.append(f"{subject.name}, {kind}, seed {seed}, {file}: {wrong[:300]}")
    return found


def test_there_are_ten_thousand_inputs() -> None:
    assert sum(COUNTS.values()) >= 10_000
    assert {kind for _, kind in COUNTS} == set(DAMAGE)
    assert {name for name, _ in COUNTS} == set(FOLDERS)


@pytest.mark.parametrize(
    ("name", "kind", "start", "stop"),
    [
        (name, kind, start, min(start + BATCH, count))
        for (name, kind), count in COUNTS.items()
        for start in range(0, count, BATCH)
    ],
)
def test_damage_is_refused_or_changes_nothing(
    subject: Callable[[str], Subject], name: str, kind: str, start: int, stop: int
) -> None:
    assert complaints(subject(name), kind, range(start, stop)) == []


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the parts of a JSON value are, itself left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from paths(inner, (*path, key))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.sampled_from(VALUES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("name", [name for name in FOLDERS if name not in ("gguf", "bin")])
def test_settings_of_any_value(subject: Callable[[str], Subject], name: str) -> None:
    """Values that hypothesis makes up, in any place of any settings file, or beside it under any name."""
    healthy = subject(name)
    places = [(file, path) for file in healthy.settings_files for path in paths(json.loads(healthy.healthy[file]))]

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(place=st.sampled_from(places), value=JSON_VALUES, beside=st.none() | st.text(max_size=8))
    def check(place: tuple[str, tuple[Any, ...]], value: Any, beside: str | None) -> None:
        file, path = place
        changed = json.loads(healthy.healthy[file])
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1] if beside is None or isinstance(holder, list) else beside] = value
        assert judge(healthy, file, json_bytes(changed)) is None

    check()


# --- the judge itself


def test_inputs_are_the_same_for_the_same_seed_and_differ_between_seeds(subject: Callable[[str], Subject]) -> None:
    healthy = subject("awq")
    for kind in DAMAGE:
        inputs = [damage(healthy, kind, seed) for seed in range(20)]
        assert inputs == [damage(healthy, kind, seed) for seed in range(20)]
        assert len(set(inputs)) > 10
        assert any(content != healthy.healthy[file] for file, content in inputs)


@pytest.mark.parametrize("name", [name for name in FOLDERS if name != "bin"])
def test_some_damage_is_refused_and_some_is_harmless(subject: Callable[[str], Subject], name: str) -> None:
    """But for pickles, which zip files hold with a checksum."""
    healthy, outcomes = subject(name), Counter[str]()
    for kind in DAMAGE:
        for seed in range(12 if (name, kind) in COUNTS else 0):
            file, content = damage(healthy, kind, seed)
            healthy.with_file(file, content)
            try:
                load(healthy.folder)
            except OctavoError:
                outcomes["refused"] += 1
            else:
                outcomes["loaded"] += 1
            healthy.with_file(file, healthy.healthy[file])
    assert min(outcomes["refused"], outcomes["loaded"]) > 2, outcomes


def test_a_changed_payload_is_seen(subject: Callable[[str], Subject]) -> None:
    healthy = subject("gptq")
    content = bytearray(healthy.healthy["model.safetensors"])
    content[-40] ^= 1
    assert judge(healthy, "model.safetensors", bytes(content)) == "loaded, and computes something else"
    assert judge(healthy, "model.safetensors", healthy.healthy["model.safetensors"]) is None


def test_only_what_is_named_is_excused(subject: Callable[[str], Subject]) -> None:
    healthy = subject("gptq_ordered")
    config = json.loads(healthy.healthy["config.json"])
    for key, value, excused in (("rope_theta", 5.0, True), ("rms_norm_eps", 0.5, True), ("vocab_size", 64, False)):
        found = excuse(healthy, "config.json", json_bytes({**config, key: value}))
        assert (found is not None) == excused, key
    changed = json_bytes({**config, "rope_theta": 5.0})
    assert judge(healthy, "config.json", changed) is None
    for name in ("gptq", "gptq_ordered"):  # symmetric and not
        raw = json.loads(subject(name).healthy["config.json"])
        raw["quantization_config"]["checkpoint_format"] = "other"
        assert (excuse(subject(name), "config.json", json_bytes(raw)) is not None) == (name == "gptq_ordered")


def test_descriptions_of_damaged_files_are_empty() -> None:
    for content in (b"", b"{", b"\xff" * 20, b"[1]", (3).to_bytes(8, "little") + b"{}}"):
        assert described("model.safetensors", content) == {}
        assert content.startswith(b"[") or described("config.json", content) == {}


def test_bounds_hold() -> None:
    with pytest.raises(MemoryError), bounded():
        bytearray(2**33)
    assert len(bytearray(2**20)) == 2**20


def test_sound_files_come_out_of_header_changes(subject: Callable[[str], Subject]) -> None:
    """Some changes leave a file that safetensors reads: else only its own checks would be tested."""
    healthy, sound = subject("ct_tokens"), 0
    for seed in range(100):
        try:
            parse(change_header(random.Random(seed), healthy.healthy["model.safetensors"]))
            sound += 1
        except (SafetensorError, KeyError, ValueError, OverflowError):
            pass
    assert 30 < sound < 90
