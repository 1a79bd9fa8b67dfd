"""The conformance kit: suites that a plugin subclasses, and fixtures for tests without downloads.

`class TestMine(LinearMethodSuite): method = MyMethod` in a test file is a whole conformance test. Needs pytest, which the
extra `octavo[testing]` installs.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from octavo.testing.aot import CompiledKernel, compiled_kernels, compiling, gpu, why_no_compiler

__all__ = [
    "AttentionBackendSuite",
    "CommandSuite",
    "CompiledKernel",
    "GrammarCompilerSuite",
    "KVFormatSuite",
    "LinearMethodSuite",
    "QuantConfigSuite",
    "QuantizerSuite",
    "ScriptedModel",
    "ToolParserSuite",
    "compiled_kernels",
    "compiling",
    "failures_of",
    "gpu",
    "hostile",
    "random_weight",
    "run_suites",
    "suites_for",
    "tiny_config",
    "tiny_model",
    "tiny_tokenizer",
    "why_no_compiler",
]
_AHEAD_OF_TIME = ("CompiledKernel", "compiled_kernels", "compiling", "gpu", "why_no_compiler")


def __getattr__(name: str) -> Any:
    if name in _AHEAD_OF_TIME:  # a program too, which python -m starts: not imported before
        return getattr(import_module("octavo.testing.aot"), name)
    raise AttributeError(f"module 'octavo.testing' has no attribute '{name}'")
