"""Logprobs in the shapes of the OpenAI API, which chat and completions have different ones of."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Sequence
from typing import Any

from octavo.front.outputs import Logprob, LogprobsByToken
from octavo.front.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_LOWEST = -9999.0
"""What stands for minus infinity, which JSON does not have."""


class TokenNames:
    """The text and the bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._hf = tokenizer.hf_tokenizer
        self._special = set(self._hf.all_special_ids)
        decoder = repr(getattr(getattr(self._hf, "backend_tokenizer", None), "decoder", ""))
        self._byte_level = _byte_values() if "ByteLevel" in decoder else {}

    def bytes_of(self, token: int, text: str) -> list[int]:
        """The bytes of a token, also of one that is part of a character, whose text alone is U+FFFD."""
        if "\ufffd" in text:
            piece = self._hf.convert_ids_to_tokens(token) or ""
            if match := _BYTE.fullmatch(piece):
                return [int(match[1], 16)]
            if self._byte_level and all(c in self._byte_level for c in piece):
                return [self._byte_level[c] for c in piece]
        return list(text.encode("utf-8", "replace"))

    def chat(
        self, token_ids: Sequence[int], logprobs: Sequence[LogprobsByToken], top: int, as_ids: bool
    ) -> dict[str, Any]:
        """The `logprobs` of a chat choice."""
        content = []
        for token, by_token in zip(token_ids, logprobs, strict=True):
            entry = self._entry(token, by_token[token], as_ids)
            entry["top_logprobs"] = [self._entry(t, lp, as_ids) for t, lp in likeliest(by_token, top)]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: Logprob, as_ids: bool) -> dict[str, Any]:
        text = logprob.decoded_token or ""
        name = f"token_id:{token}" if as_ids else text
        return {"token": name, "logprob": number(logprob.logprob), "bytes": self.bytes_of(token, text)}

    def completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[LogprobsByToken | None],
        top: int,
        as_ids: bool,
        place: TextPlace,
    ) -> dict[str, Any]:
        """The `logprobs` of a completion choice; `place` is where its text is, and moves on."""
        tokens: list[str] = []
        chosen: list[float | None] = []
        best: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, by_token in zip(token_ids, logprobs, strict=True):
            text = (by_token[token].decoded_token if by_token else self._hf.decode([token])) or ""
            tokens.append(f"token_id:{token}" if as_ids else text)
            offsets.append(place.characters)
            if not (place.skip_special and token in self._special):
                place.add(bytes(self.bytes_of(token, text)))
            if by_token is None:
                chosen.append(None)
                best.append(None)
                continue
            chosen.append(number(by_token[token].logprob))
            pairs = likeliest(by_token, top) or [(token, by_token[token])]
            named = [(f"token_id:{t}" if as_ids else lp.decoded_token or "", number(lp.logprob)) for t, lp in pairs]
            best.append(dict(reversed(named)))  # of equal names, as of two parts of characters, the likeliest counts
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": best, "text_offset": offsets}


class TextPlace:
    """How many characters of a text come before the next token, counted by the tokens' bytes."""

    def __init__(self, skip_special: bool) -> None:
        self.characters = 0
        self.skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: bytes) -> None:
        """Moves on by a token. A character that it leaves unfinished counts once it is complete."""
        self.characters += len(self._decoder.decode(token))


def likeliest(by_token: LogprobsByToken, top: int) -> list[tuple[int, Logprob]]:
    """The `top` likeliest of a position (-1: all), likeliest first."""
    ranked = sorted(by_token.items(), key=lambda item: item[1].rank or 0)
    return ranked if top < 0 else ranked[:top]


def prompt_logprobs(logprobs: Sequence[LogprobsByToken | None]) -> list[dict[str, Any] | None]:
    """Prompt logprobs as vLLM shows them: by token id, None for the first."""
    return [None if by_token is None else _prompt_position(by_token) for by_token in logprobs]


def _prompt_position(by_token: LogprobsByToken) -> dict[str, Any]:
    return {
        str(token): {"logprob": number(lp.logprob), "rank": lp.rank, "decoded_token": lp.decoded_token}
        for token, lp in by_token.items()
    }


def number(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return logprob if math.isfinite(logprob) else _LOWEST


def _byte_values() -> dict[str, int]:
    """Of the printable character that stands for each byte in byte-level vocabularies (the table of GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
