"""octavo-guided: outputs that are what a JSON schema, a regex, a list of choices or a grammar says."""

from __future__ import annotations

from collections.abc import Sequence

from octavo import GrammarCompiler, hookimpl

octavo_api = (1, 0)


@hookimpl
def octavo_grammar_compilers() -> Sequence[type[GrammarCompiler]]:
    from octavo_guided.compiler import GuidanceCompiler

    return [GuidanceCompiler]
