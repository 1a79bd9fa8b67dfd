"""Counting and drawing tokens with the model's own tokenizer, read from a folder, without torch or transformers."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from octavo import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Tokens:
    """A tokenizer.json. Text is counted without the special tokens that a server may add."""

    def __init__(self, folder: str | Path) -> None:
        from tokenizers import Tokenizer

        path = Path(folder).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise ConfigError(f"--tokenizer {folder}: cannot read {path.name}: {error}") from None
        self._plain: list[int] = []

    @property
    def num_special(self) -> int:
        """Special tokens that a server adds to a prompt, such as BOS."""
        return len(self._tokenizer.encode("a").ids) - len(self.encode("a"))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def random_text(self, length: int, random: Random) -> str:
        """Text of random tokens that counts exactly `length` tokens, or as near as this tokenizer allows."""
        ids = random.choices(self._vocabulary(), k=length)
        text = best = self.decode(ids)
        for _ in range(10):
            ids = self.encode(text)  # neighbours merge into other tokens
            if abs(len(ids) - length) < abs(self.count(best) - length):
                best = text
            if len(ids) == length:
                return text
            ids = ids[:length] + random.choices(self._vocabulary(), k=max(length - len(ids), 0))
            text = self.decode(ids)
        return best

    def cut(self, text: str, length: int) -> str:
        """The beginning of a text, at most `length` tokens."""
        ids = self.encode(text)
        return text if len(ids) <= length else self.decode(ids[:length])

    def _vocabulary(self) -> list[int]:
        """Tokens that stand for whole printable characters: others would not survive the way through text."""
        if not self._plain:
            special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
            ids = [i for i in range(self._tokenizer.get_vocab_size()) if i not in special]
            texts = self._tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
            self._plain = [i for i, text in zip(ids, texts, strict=True) if text and all(map(_printable, text))]
        return self._plain


def _printable(character: str) -> bool:
    return character == " " or (character != "\ufffd" and unicodedata.category(character)[0] not in "CZ")
