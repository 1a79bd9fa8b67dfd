"""A grammar compiler for tests: what it allows is one text, byte by byte. Some texts make it misbehave."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from octavo import GrammarCompiler, GrammarMatcher, GrammarSpec
from octavo.server.tools.hermes import HermesParser


class Toy(GrammarMatcher):
    """Allows one text, byte by byte."""

    def __init__(self, text: bytes, done: int = 0) -> None:
        self.text, self.done = text, done

    def accept(self, token_id: int) -> bool:
        self.done += 1
        return self.text[self.done - 1 : self.done] == bytes([token_id])

    def fill_mask(self, bitmask: np.ndarray) -> None:
        bitmask[:] = 0
        if not self.may_end():
            token = self.text[self.done]
            bitmask[token // 32] = np.int64(1 << token % 32).astype(np.int32)

    def may_end(self) -> bool:
        return self.done >= len(self.text)

    def fork(self) -> GrammarMatcher:
        return type(self)(self.text, self.done)


class Failing(Toy):
    def fill_mask(self, bitmask: np.ndarray) -> None:
        if self.done == 2:
            raise OSError("the matcher broke")
        super().fill_mask(bitmask)


class Stuck(Toy):
    def fill_mask(self, bitmask: np.ndarray) -> None:
        bitmask[:] = 0


class ToyCompiler(GrammarCompiler):
    name = "toy"
    compiled: list[str]
    gate: threading.Event | None = None

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.compiled = []

    def compile(self, spec: GrammarSpec) -> GrammarMatcher:
        self.compiled.append(spec.text)
        if self.gate is not None:
            self.gate.wait(30)
        if spec.text == "bug":
            raise KeyError("oops")
        kinds = {"failing": Failing, "stuck": Stuck}
        return kinds.get(spec.text, Toy)(spec.text.encode())


class ToyParser(HermesParser):
    """Hermes' format under another name."""

    name = "toy"
