"""The conformance kit: suites that a plugin subclasses, and fixtures for tests without downloads.

`class TestMine(LinearMethodSuite): method = MyMethod` in a test file is a whole conformance test. Needs pytest, which the
extra `octavo[testing]` installs.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("pytest") is None:
    raise ImportError("octavo.testing needs pytest; install it with: pip install 'octavo[testing]'")

from octavo.testing.attention import AttentionBackendSuite
from octavo.testing.check import failures_of, run_suites, suites_for
from octavo.testing.commands import CommandSuite
from octavo.testing.grammar import GrammarCompilerSuite
from octavo.testing.kv_format import KVFormatSuite
from octavo.testing.linear import LinearMethodSuite
from octavo.testing.models import tiny_config, tiny_model, tiny_tokenizer
from octavo.testing.paging import hostile
from octavo.testing.quant import QuantConfigSuite
from octavo.testing.quantizer import QuantizerSuite
from octavo.testing.scripted import ScriptedModel
from octavo.testing.tools import ToolParserSuite
from octavo.testing.weights import random_weight

__all__ = [
    "AttentionBackendSuite",
    "CommandSuite",
    "GrammarCompilerSuite",
    "KVFormatSuite",
    "LinearMethodSuite",
    "QuantConfigSuite",
    "QuantizerSuite",
    "ScriptedModel",
    "ToolParserSuite",
    "failures_of",
    "hostile",
    "random_weight",
    "run_suites",
    "suites_for",
    "tiny_config",
    "tiny_model",
    "tiny_tokenizer",
]
