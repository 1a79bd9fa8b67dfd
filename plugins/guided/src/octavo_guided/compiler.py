"""The compiler and its matcher: llguidance behind octavo's contract."""

from __future__ import annotations

import json
import threading
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar

import llguidance
import numpy as np

from octavo import GrammarCompiler, GrammarMatcher, GrammarSpec, RequestError
from octavo_guided.schema import close_objects, error_of, locate
from octavo_guided.tags import tags_to_lark

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HEADER = "%llguidance"  # of a Lark grammar, before its options
_TRIED = 3
ANY_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Whitespace in JSON unless asked otherwise. Bounded, because models that are lost write spaces for ever."""


class GuidanceCompiler(GrammarCompiler):
    """Compiles all kinds of grammars, for fast tokenizers. What llguidance would ignore or approximate is refused."""

    name: ClassVar[str] = "guidance"

    @classmethod
    def why_not(cls, tokenizer: Any) -> str | None:
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            return f"needs a fast tokenizer, this is a {type(tokenizer).__name__}"
        return None

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.special = {
            token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        backend = copy(tokenizer.backend_tokenizer)  # the original may be in use, and truncate
        backend.no_padding()
        backend.no_truncation()
        end = tokenizer.eos_token_id
        self.tokenizer = llguidance.LLTokenizer(
            backend.to_str(),
            n_vocab=max(vocab_size, len(tokenizer)),
            eos_token=max(self.special.values(), default=0) if end is None else end,
        )
        # Work and memory of one grammar, in llguidance's units, not in time: a request fails on every machine or on none.
        self.limits = llguidance.LLParserLimits(
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200_000,
            step_max_items=100_000,
            max_items_in_row=20_000,
            max_lexer_states=50_000,
            max_grammar_size=250_000,
            verbose_errors=False,  # they would quote the schema, and who reads a log need not
        )

    def compile(self, spec: GrammarSpec) -> GrammarMatcher:
        try:
            grammar = self._grammar(spec)
            matcher = llguidance.LLMatcher(self.tokenizer, grammar, log_level=0, limits=self.limits)
        except (ValueError, RecursionError) as error:
            raise _refusal(spec, str(error)) from None
        if matcher.is_error():
            raise _refusal(spec, matcher.get_error())
        if warnings := matcher.get_grammar_warnings():
            raise _refusal(spec, "; ".join(warnings))
        first = Matcher(matcher, (self.tokenizer.vocab_size + 31) // 32)
        try:
            first.mask()
            if not first.may_end() and not first.words.any():
                raise _refusal(spec, "no text fulfils it")
            _try(first.fork())
        except RequestError as error:
            raise _refusal(spec, str(error)) from None
        return first

    def num_bytes(self, spec: GrammarSpec) -> int:
        return 200_000 + 150 * len(spec.text)

    def _grammar(self, spec: GrammarSpec) -> str:
        """The grammar in Lark's syntax."""
        match spec.kind:
            case "regex":
                (grammar,) = json.loads(llguidance.LLMatcher.grammar_from_regex(spec.text))["grammars"]
                return _unforced(grammar["lark_grammar"])
            case "choice":
                options = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(spec.text))
                return _unforced(f"start: {options}")
            case "grammar":
                return _unforced(llguidance.grammar_from("grammar", spec.text))
            case "structural_tag":
                return _unforced(tags_to_lark(json.loads(spec.text), self.special))
        schema = {"type": "object"} if spec.kind == "json_object" else json.loads(spec.text)
        if schema is False:
            raise ValueError("no value fulfils the schema false")
        schema = {} if schema is True else schema
        if "x-guidance" in schema:
            raise ValueError("x-guidance would change what the schema means")
        if not spec.additional_properties:
            schema = close_objects(schema)
        schema = {**schema, "x-guidance": _whitespace(spec)}
        return _unforced(f"start: %json {json.dumps(schema, ensure_ascii=False)}")


def _try(matcher: Matcher) -> None:
    """Takes a few steps, so that what is too complex from its beginning on is refused at once. Raises RequestError."""
    for _ in range(_TRIED):
        matcher.mask()
        tokens = np.flatnonzero(np.unpackbits(matcher.words.view(np.uint8), bitorder="little"))
        if not len(tokens) or not matcher.accept(int(tokens[-1])):
            return


def _unforced(lark: str) -> str:
    """The grammar without the search for text that must come next, which is not used and is slow where it is long."""
    options: dict[str, Any] = {}
    if lark.lstrip().startswith(_HEADER):
        lark = lark.lstrip().removeprefix(_HEADER).lstrip()
        options, end = json.JSONDecoder().raw_decode(lark)
        lark = lark[end:]
    return f"{_HEADER} {json.dumps({**options, 'no_forcing': True})}\n{lark}"


def _whitespace(spec: GrammarSpec) -> dict[str, Any]:
    if spec.whitespace_pattern is None and not spec.any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": spec.whitespace_pattern or ANY_WHITESPACE}


def _refusal(spec: GrammarSpec, message: str) -> RequestError:
    """What is wrong, and in a JSON schema where."""
    place = ""
    if spec.kind == "json":
        message = error_of(json.loads(spec.text)) or message  # without the lines of the grammar around it
        place = locate(json.loads(spec.text), message)
    what = " ".join(message.split()) or "it cannot be compiled"
    where = f"{spec.kind} at {place}" if place else spec.kind
    return RequestError(f"structured_outputs: {where}: {what[:500]}", param="structured_outputs")


class Matcher(GrammarMatcher):
    """One output's place in a grammar. Copies share what the lexer has learnt, so they cost next to nothing."""

    def __init__(self, matcher: llguidance.LLMatcher, num_words: int) -> None:
        self.matcher = matcher
        self.words = np.zeros(num_words, dtype=np.int32)

    def accept(self, token_id: int) -> bool:
        return bool(self.matcher.consume_token(token_id))

    def fill_mask(self, bitmask: NDArray[np.int32]) -> None:
        self.mask()
        bitmask[:] = self.words[: len(bitmask)]

    def mask(self) -> None:
        """Brings `words` up to date; bits beyond the model's vocabulary included."""
        self.matcher.unsafe_compute_mask_ptr(self.words.ctypes.data, self.words.nbytes)
        if self.matcher.is_error():
            reason = (self.matcher.get_error().splitlines() or ["unknown"])[0]
            if reason.startswith("NoExtension"):
                self.words.fill(0)
                return
            raise RequestError(f"structured output: the grammar exceeds its limits here: {reason}")

    def may_end(self) -> bool:
        return bool(self.matcher.is_accepting())

    def fork(self) -> Matcher:
        with _forking:
            return Matcher(self.matcher.deep_copy(), len(self.words))


_forking = threading.Lock()
