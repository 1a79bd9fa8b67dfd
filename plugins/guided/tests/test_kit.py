"""The conformance kit of octavo."""

from octavo.testing import GrammarCompilerSuite
from octavo_guided.compiler import GuidanceCompiler


class TestGuidanceCompiler(GrammarCompilerSuite):
    compiler = GuidanceCompiler
