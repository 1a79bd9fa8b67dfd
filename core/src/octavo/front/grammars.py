"""Compiling what requests ask of their outputs: which plugin does it, and what is kept.

Compiling takes from a millisecond to seconds, so a server does it on a thread that nobody waits for but the request itself;
what `OutputProcessor.add_request` then needs is at hand.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from octavo.engine.grammar import GrammarCompiler, GrammarMatcher, GrammarSpec, StructuredOutputsParams
from octavo.errors import ConfigError, OctavoError, RequestError, ask
from octavo.front.tokenizer import Tokenizer

CACHE_BYTES = 64 * 1024 * 1024
"""Estimated size of the compiled grammars that are kept, by last use."""
_PARAM = "structured_outputs"


class Grammars:
    """Compiles grammars with the installed plugin and keeps them. Threads may share it.

    `choice` is the compiler's name, or "auto". It is looked for, and made, when the first request needs it.
    """

    def __init__(
        self,
        compilers: Mapping[str, type[GrammarCompiler]],
        tokenizer: Tokenizer,
        vocab_size: int,
        choice: str = "auto",
        notes: Sequence[str] = (),
    ) -> None:
        if choice != "auto" and choice not in compilers:
            known = ", ".join(sorted(compilers)) or "none"
            raise ConfigError(f"--structured-outputs-backend {choice}: no such plugin; installed: {known}")
        self._compilers, self._choice, self._notes = compilers, choice, notes
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._making, self._lock = threading.Lock(), threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._kept: OrderedDict[GrammarSpec, tuple[GrammarMatcher, int]] = OrderedDict()
        self._in_work: dict[GrammarSpec, Future[GrammarMatcher]] = {}
        self.num_bytes = 0
        """Estimated size of what is kept."""

    def compile(self, params: StructuredOutputsParams) -> GrammarMatcher:
        """A matcher of one's own for a new output. Raises RequestError for what cannot be honoured.

        Two threads that want the same at once compile it once.
        """
        spec = params.spec
        compiler = self._ready()
        with self._lock:
            if (kept := self._kept.get(spec)) is not None:
                self._kept.move_to_end(spec)
                return kept[0].fork()
            others = self._in_work.get(spec)
            if others is None:
                result = self._in_work[spec] = Future[GrammarMatcher]()
        if others is not None:
            return others.result().fork()
        try:
            matcher = _compile(compiler, spec)
        except BaseException as error:
            with self._lock:
                del self._in_work[spec]
            result.set_exception(error)
            raise
        self._keep(spec, matcher, compiler.num_bytes(spec))
        result.set_result(matcher)
        return matcher.fork()

    def _keep(self, spec: GrammarSpec, matcher: GrammarMatcher, size: int) -> None:
        with self._lock:
            del self._in_work[spec]
            self._kept[spec] = (matcher, size)
            self.num_bytes += size
            while self.num_bytes > CACHE_BYTES and len(self._kept) > 1:
                _, (_, old) = self._kept.popitem(last=False)
                self.num_bytes -= old

    def _ready(self) -> GrammarCompiler:
        """The compiler, made now if nobody needed it before."""
        with self._making:
            if self._compiler is None:
                self._compiler = self._chosen()(self._tokenizer.hf_tokenizer, self._vocab_size)
            return self._compiler

    def _chosen(self) -> type[GrammarCompiler]:
        if not self._compilers:
            notes = "".join(f"; {note}" for note in self._notes)
            raise RequestError(
                f"structured outputs need a plugin that compiles grammars, and none is installed; octavo-guided is one{notes}",
                param=_PARAM,
            )
        asked = self._compilers.values() if self._choice == "auto" else [self._compilers[self._choice]]
        reasons = []
        for compiler in sorted(asked, key=lambda c: -c.rank):
            reason = ask(compiler.why_not, self._tokenizer.hf_tokenizer)
            if reason is None:
                return compiler
            reasons.append(f"{compiler.name}: {reason}")
        raise RequestError(f"structured outputs are not possible with this model: {'; '.join(reasons)}", param=_PARAM)


def _compile(compiler: GrammarCompiler, spec: GrammarSpec) -> GrammarMatcher:
    try:
        return compiler.compile(spec)
    except OctavoError:
        raise
    except Exception as error:  # a plugin's bug must not pass for one of the engine
        raise RequestError(f"{spec.kind} cannot be compiled: {type(error).__name__}: {error}", param=_PARAM) from error
