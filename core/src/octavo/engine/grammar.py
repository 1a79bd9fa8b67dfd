"""Outputs held to a schema, a regex or a grammar: what a user asks, what a plugin brings, where one output stands. No torch.

A `GrammarCompiler` turns a `GrammarSpec` into a `GrammarMatcher`, which says for one output which tokens may come next. Core
keeps the rest: limits, when an output may end, and that a matcher has seen exactly the output's tokens, so preemption, forks
and steps that are run again need no bookkeeping. Where anything goes wrong the output ends with an error; it never goes on
unconstrained.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from octavo.config import describe
from octavo.errors import OctavoError, RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo.engine.request import Request

MAX_SPEC_BYTES = 128 * 1024
MAX_SPEC_DEPTH = 64
"""Levels of a JSON schema, as it is written. References may go round, so what it describes may be deeper."""

Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
_KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an output must be, as plugins get it: hashable, limits checked.

    `text` is a JSON schema, a JSON list of strings (choice), a JSON object (structural_tag), a regex that the whole output must
    match, a grammar, or empty (json_object).
    """

    kind: Kind
    text: str
    any_whitespace: bool = True
    additional_properties: bool = True  # what a JSON schema means that does not mention them
    whitespace_pattern: str | None = None


class StructuredOutputsParams(BaseModel):
    """What an output must be; exactly one of the first six. Names and meanings are vLLM's."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    json_schema: dict[str, Any] | bool | str | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = Field(None, description="A regular expression for the whole output.")
    choice: tuple[str, ...] | None = Field(None, description="The outputs that are possible.")
    grammar: str | None = Field(None, description="A context-free grammar, in Lark's or GBNF's syntax.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    structural_tag: dict[str, Any] | str | None = Field(None, description="Free text with JSON between given tags.")
    disable_any_whitespace: bool = Field(False, description="JSON without spaces and line breaks.")
    disable_additional_properties: bool = Field(
        False, description="JSON objects have no properties beyond those that the schema names."
    )
    whitespace_pattern: str | None = Field(None, description="A regular expression for whitespace in JSON.")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise RequestError(describe(error, "field of structured_outputs"), param="structured_outputs") from None

    @model_validator(mode="after")
    def _check(self) -> StructuredOutputsParams:
        given = self._given()
        if len(given) != 1:
            found = f"{', '.join(given)} are" if given else "none is"
            raise ValueError(f"exactly one of {', '.join(_KINDS)} must be given; {found}")
        if self.choice is not None and (not self.choice or not all(self.choice)):
            raise ValueError("choice must be a list of strings that are not empty")
        if self.whitespace_pattern is not None and (self.disable_any_whitespace or not self.whitespace_pattern):
            raise ValueError("whitespace_pattern must not be empty, and not be given with disable_any_whitespace")
        self._checked_text(given[0])
        return self

    def _given(self) -> list[Kind]:
        values = {**dict(self), "json": self.json_schema, "json_object": self.json_object or None}
        return [kind for kind in _KINDS if values[kind] is not None]

    def _checked_text(self, kind: Kind) -> str:
        value = {**dict(self), "json": self.json_schema, "json_object": ""}[kind]
        if kind in ("json", "structural_tag"):
            value = _checked_json(kind, value)
        elif kind == "choice":
            value = json.dumps(value)
        try:
            size = len(str(value).encode())
        except UnicodeEncodeError as error:  # half a surrogate pair
            raise ValueError(f"{kind} is no text: {error}") from None
        if size > MAX_SPEC_BYTES:
            raise ValueError(f"{kind} has {size:,} bytes; at most {MAX_SPEC_BYTES:,} are allowed")
        return str(value)

    @property
    def spec(self) -> GrammarSpec:
        """This as plugins get it."""
        (kind,) = self._given()
        return GrammarSpec(
            kind,
            self._checked_text(kind),
            not self.disable_any_whitespace,
            not self.disable_additional_properties,
            self.whitespace_pattern,
        )


def _checked_json(kind: str, value: Any) -> str:
    """A JSON object, given as one or as text, as text that is not too deep; the order of its keys stays."""
    if isinstance(value, str):
        if len(value) > MAX_SPEC_BYTES:
            raise ValueError(f"{kind} has {len(value):,} characters; at most {MAX_SPEC_BYTES:,} are allowed")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{kind} is not JSON: {error}") from None
    if not isinstance(value, dict) and not (kind == "json" and isinstance(value, bool)):
        raise ValueError(f"{kind} must be a JSON object, found {type(value).__name__}")
    level, values = 0, [value]
    while values := [inner for outer in values for inner in _inside(outer)]:
        level += 1
        if level > MAX_SPEC_DEPTH:
            raise ValueError(f"{kind} is nested more than {MAX_SPEC_DEPTH} levels deep")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{kind} is not JSON: {error}") from None


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()


class GrammarMatcher(ABC):
    """How far one output is in its grammar. Its state is a function of the tokens that it accepted. One thread uses it."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Moves on by a token of the output; False where that may not come next, and then nothing more is asked."""

    @abstractmethod
    def fill_mask(self, bitmask: NDArray[np.int32]) -> None:
        """Writes which tokens may come next: bit t % 32 of word t // 32, for all words of `bitmask` (ceil(vocab_size / 32),).

        Each token that is set would be accepted; not all that would be must be set, but one at least where text can follow.
        Bits of end tokens are not looked at. Raises RequestError where limits are exceeded.
        """

    @abstractmethod
    def may_end(self) -> bool:
        """True where what was accepted is complete, whether or not more could follow."""

    @abstractmethod
    def fork(self) -> GrammarMatcher:
        """Another matcher with this state, independent of this one from now on. May be called from any thread."""


class GrammarCompiler(ABC):
    """Compiles grammars for one tokenizer. Made once, when the first request needs it; used by several threads."""

    name: ClassVar[str]
    rank: ClassVar[int] = 10  # the willing one of the highest rank is chosen, unless a setting names one

    @classmethod
    def why_not(cls, tokenizer: Any) -> str | None:
        """None if it can work with this Hugging Face tokenizer, else a sentence."""
        return None

    @abstractmethod
    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """`vocab_size` is the model's; tokens that the tokenizer does not know are never allowed."""

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> GrammarMatcher:
        """A matcher that has accepted nothing. Raises RequestError for what cannot be honoured to the letter, and says where.

        Must end within seconds, whatever it is given.
        """

    def num_bytes(self, spec: GrammarSpec) -> int:
        """About how much memory a compiled grammar takes, for the cache."""
        return 100_000 + 20 * len(spec.text)


class GrammarState:
    """The matcher of one sequence, and the rule for its end.

    An end token is possible where the text is complete. With `ignore_eos`, or before `min_tokens`, it is not as long as the
    grammar lets anything else follow; where nothing else can, the output ends all the same.
    """

    __slots__ = ("_matcher", "_num_accepted", "end_token_ids")

    def __init__(self, matcher: GrammarMatcher, end_token_ids: frozenset[int]) -> None:
        self._matcher, self._num_accepted = matcher, 0
        self.end_token_ids = end_token_ids

    def fork(self) -> GrammarState:
        other = GrammarState(self._matcher.fork(), self.end_token_ids)
        other._num_accepted = self._num_accepted
        return other

    def allowed(self, request: Request, vocab_size: int) -> NDArray[np.bool_]:
        """(vocab_size,) True for the tokens that may come next. Raises RequestError where there are none, or on any failure."""
        import numpy as np

        words = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
        try:
            self._follow(request.output_token_ids)
            self._matcher.fill_mask(words)
            complete = self._matcher.may_end()
        except OctavoError:
            raise
        except Exception as error:
            raise RequestError(f"structured output failed: {type(error).__name__}: {error}") from error
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size].view(np.bool_)
        ends = [token for token in self.end_token_ids if token < vocab_size]
        allowed[ends] = False
        held = request.params.ignore_eos or request.num_output_tokens < request.min_tokens
        if complete and not (held and allowed.any()):
            allowed[ends] = True
        elif not allowed.any():
            raise RequestError("the output cannot be completed: its grammar allows no token here")
        return allowed

    def _follow(self, output: Sequence[int]) -> None:
        for token in output[self._num_accepted :]:
            if not self._matcher.accept(token):
                raise RequestError(f"token {token} of the output does not follow its grammar")
            self._num_accepted += 1
