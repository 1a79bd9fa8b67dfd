"""The conformance kit on every kernel of the plugin, each instruction set forced in turn."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.testing import AttentionBackendSuite, LinearMethodSuite
from octavo_cpu.attention import NativeAttention
from octavo_cpu.linear import W8A8, FloatInputs, Int8Inputs
from octavo_cpu.native import native

ISAS = native().isas() if native() else []


def test_the_native_module_is_built_where_there_is_a_compiler() -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler here: octavo serves without these kernels")
    assert ISAS, "octavo-cpu was installed without its native module"


class _OnEachInstructionSet:
    @pytest.fixture(autouse=True, params=ISAS)
    def _isa(self, request: Any) -> Iterator[None]:
        before, threads = native().isa(), native().threads()
        native().set_isa(request.param)
        native().set_threads(2)
        yield
        native().set_isa(before)
        native().set_threads(threads)


class TestFloatInputs(_OnEachInstructionSet, LinearMethodSuite):
    method = FloatInputs


class TestInt8Inputs(_OnEachInstructionSet, LinearMethodSuite):
    method = Int8Inputs
    activations = "int8"


class TestW8A8(_OnEachInstructionSet, LinearMethodSuite):
    method = W8A8


class TestAttention(_OnEachInstructionSet, AttentionBackendSuite):
    backend = NativeAttention
