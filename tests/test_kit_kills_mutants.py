"""Proof that the conformance kit bites: each mutant has one mistake, and a suite must name it."""

from __future__ import annotations

import kit_mutants_compute  # noqa: F401  registers its mutants
import kit_mutants_storage  # noqa: F401
import pytest
from kit_subjects import MUTANTS, ByteKV, Fp8KV, Int8Method, NibbleConfig, PagedToy, Small

from octavo.testing import AttentionBackendSuite, KVFormatSuite, LinearMethodSuite, QuantConfigSuite, failures_of


def suite_of(suite, attribute, subject):
    return type(f"Test{subject.__name__}", (suite,), {attribute: subject})


@pytest.mark.parametrize(("suite", "attribute", "mutant", "test"), MUTANTS, ids=[m[2].__name__ for m in MUTANTS])
def test_mutant_is_killed(suite, attribute, mutant, test):
    assert failures_of(suite_of(suite, attribute, mutant), [test]) == [test], f"{mutant.__name__} survives {test}"


@pytest.mark.parametrize(
    ("suite", "attribute", "original"),
    [
        (LinearMethodSuite, "method", Small),
        (LinearMethodSuite, "method", Int8Method),
        (AttentionBackendSuite, "backend", PagedToy),
        (KVFormatSuite, "format", Fp8KV),
        (KVFormatSuite, "format", ByteKV),
        (QuantConfigSuite, "config", NibbleConfig),
    ],
)
def test_original_survives(suite, attribute, original):
    assert failures_of(suite_of(suite, attribute, original)) == []
