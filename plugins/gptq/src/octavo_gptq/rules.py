"""Settings of single layers: GPTQModel's `dynamic`, a mapping from patterns of names to overrides.

A key is "+:" or nothing before a pattern whose layers get other settings, "-:" before one whose layers are not quantised.
Patterns are regular expressions, anchored at the start of the layer's full name only. Refusals come first, then the first
pattern that matches, in the order of the file; GPTQModel and vLLM agree on that for the files that GPTQModel writes.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Names of modules that hold several linears in one, as engines and a few models have them."""
_LONGEST = 1000
_MOST_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of `dynamic`: which layers, and whether they are left unquantised or get `settings` of their own."""

    pattern: re.Pattern[str]
    excludes: bool
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, key: str, settings: Mapping[str, Any]) -> Rule:
        """Raises ValueError with a sentence where the pattern is none, or might take for ever."""
        excludes = key.startswith("-:")
        return cls(compile_pattern(key.removeprefix("-:" if excludes else "+:")), excludes, settings)

    @classmethod
    def key_for(cls, layer: str, excludes: bool = False) -> str:
        """The key of a rule for one layer alone."""
        return f"{'-' if excludes else '+'}:^{re.escape(layer)}$"


def overriding(rules: Iterable[Rule], layer: str) -> Mapping[str, Any]:
    """The settings that the first rule which matches gives a layer."""
    return next((rule.settings for rule in rules if not rule.excludes and rule.pattern.match(layer)), {})


def excluded(rules: Iterable[Rule], layer: str) -> bool:
    """Whether the rules say that a layer is not quantised."""
    return any(rule.excludes and rule.pattern.match(layer) for rule in rules)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern from a model folder, which nobody vouches for; raises ValueError with a sentence.

    Python's engine cannot be interrupted, so patterns that can take exponential time (a repeated group that holds a repeat
    or an alternative) and those with many open repeats are refused. No writer's own patterns are like that.
    """
    if len(pattern) > _LONGEST:
        raise ValueError(f"the pattern has {len(pattern)} characters, more than {_LONGEST}")
    if (reason := _why_slow(pattern)) is not None:
        raise ValueError(f"the pattern '{pattern}' {reason}: matching could take for ever; write it more simply")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "possible nested set": Python's own advice to authors
            return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"'{pattern}' is no regular expression: {error}") from None


def _why_slow(pattern: str) -> str | None:
    """Why a pattern might not end in reasonable time; reads characters, so that it holds for broken patterns as well."""
    plain = re.sub(r"\\.", "x", pattern, flags=re.DOTALL)
    plain = re.sub(r"\[\^?\]?[^\]]*\]", "x", plain)  # a set is one character
    if len(re.findall(r"[*+]|\{\d*,", plain)) > _MOST_REPEATS:
        return f"has more than {_MOST_REPEATS} open repeats"
    branching = [False]  # for each open group: whether it can match one text in several ways
    for at, character in enumerate(plain):
        if character == "(":
            branching.append(False)
        elif character == ")" and len(branching) > 1:
            inner = branching.pop()
            if inner and re.match(r"[*+]|\{", plain[at + 1 :]):
                return "repeats a group that itself holds a repeat or an alternative"
            branching[-1] |= inner
        elif character in "*+{|" or (character == "?" and plain[at - 1 : at] not in ("(", "")):
            branching[-1] = True
    return None
