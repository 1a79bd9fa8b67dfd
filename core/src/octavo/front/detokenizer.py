"""Turns token ids into text as they come. No tokenizer is imported: whoever has one hands in its `decode`.

Text is not a sum over tokens: a character may be spread over several, and a leading space depends on what came before. So
a window of the last tokens is decoded again for each new one. Two families of tokenizers show an unfinished character in
different ways. Byte-level BPE gives one U+FFFD for it. Byte fallback (SentencePiece) gives one U+FFFD for each byte of the
whole run of byte tokens, even for characters of the run that were good before, until the run is valid again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_UNFINISHED = 3  # a character has at most 4 bytes: this many tokens, or U+FFFD, may wait for the rest of it
_WINDOW = 8  # tokens; enough for a good character and an unfinished one
_LONG_WINDOW = 16  # only garbage, and characters of which each shares a token with the next, get here


class Detokenizer:
    """The text of one sequence: everything that `add` returned, then what `flush` returns.

    Held back are only U+FFFD at the end, as more bytes may turn them into a character: those of up to 3 tokens, or the
    last 3 of more. `decode` is the tokenizer's, with special tokens skipped or not as the request has it, and without
    clean_up_tokenization_spaces. The prompt gives context and is not echoed; only a character that it leaves unfinished
    is part of the output, if there is any.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = ""  # the beginning of the window's text, which is out
        self._num_held = 0  # tokens since nothing was held back
        prompt = list(prompt_token_ids[-_LONG_WINDOW:])
        ends = range(len(prompt), max(0, len(prompt) - _UNFINISHED - 1), -1)
        context = next((end for end in ends if self._shorten(prompt[:end])), max(0, len(prompt) - _WINDOW))
        for token_id in prompt[context:]:
            self.add(token_id)
        self._has_output = False

    def add(self, token_id: int) -> str:
        """The text that has become certain, often none. An id that the tokenizer does not know has no text."""
        self._has_output = True
        self._window.append(token_id)
        text = self._text(self._window)
        if text is None:
            self._window.pop()
            return ""
        self._num_held += 1
        finished = not text.endswith(_REPLACEMENT)
        hopeless = self._num_held > _UNFINISHED
        if finished or hopeless:
            text = self._leave_spoiled(text)
        certain = len(text.rstrip(_REPLACEMENT))
        if hopeless:
            certain = max(certain, len(text) - _UNFINISHED)
        new = text[len(self._shown) : certain]
        if new:
            self._shown = text[:certain]
        if not finished:
            if len(self._window) > _LONG_WINDOW:
                self._window = self._window[-_WINDOW:]
                held, text = len(text) - len(self._shown), self._decode(self._window)
                self._shown = text[: max(0, len(text) - held)]
            return new
        if not new and text and self._num_held == 1:
            self._window.pop()  # a token without text: it is no context for what follows
        self._num_held = 0
        if len(self._window) > _WINDOW and not self._shorten(self._window) and not text:
            del self._window[0]
        return new

    def flush(self) -> str:
        """The text that was held back, once no more tokens come."""
        if not self._num_held or not self._has_output:
            return ""
        text = self._leave_spoiled(self._decode(self._window))
        new = text[len(self._shown) :]
        self._shown, self._num_held = text, 0
        return new

    def _text(self, token_ids: list[int]) -> str | None:
        """None where an id is unknown: a model's vocabulary may be larger than its tokenizer's."""
        try:
            return self._decode(token_ids)
        except Exception:  # there is no error that tokenizers agree on
            return None

    def _leave_spoiled(self, text: str) -> str:
        """The window's text; if bytes held back are garbage and spoil good ones of their run, the window leaves those."""
        if text.startswith(self._shown):
            return text
        self._window, self._shown = self._window[-self._num_held :], ""
        return self._decode(self._window)

    def _shorten(self, token_ids: list[int]) -> bool:
        """Makes the shortest end of `token_ids` with a finished text the window, all of it out; False if there is none."""
        for size in range(1, min(_WINDOW, len(token_ids)) + 1):
            text = self._text(token_ids[-size:])
            if text and not text.endswith(_REPLACEMENT):
                self._window, self._shown = token_ids[-size:], text
                return True
        return False
