"""Running suites from code: the classes of a plugin are put under test without a test file, as `octavo check-plugin` does."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from octavo.plugins import Registry
from octavo.testing.attention import AttentionBackendSuite
from octavo.testing.commands import CommandSuite
from octavo.testing.grammar import GrammarCompilerSuite
from octavo.testing.kv_format import KVFormatSuite
from octavo.testing.linear import LinearMethodSuite
from octavo.testing.quant import QuantConfigSuite
from octavo.testing.quantizer import QuantizerSuite
from octavo.testing.suite import Suite
from octavo.testing.tools import ToolParserSuite

_SUITES: Mapping[str, tuple[type[Suite], str]] = {
    "octavo_quant_configs": (QuantConfigSuite, "config"),
    "octavo_linear_methods": (LinearMethodSuite, "method"),
    "octavo_attention_backends": (AttentionBackendSuite, "backend"),
    "octavo_kv_formats": (KVFormatSuite, "format"),
    "octavo_commands": (CommandSuite, "command"),
    "octavo_grammar_compilers": (GrammarCompilerSuite, "compiler"),
    "octavo_tool_parsers": (ToolParserSuite, "parser"),
    "octavo_quantizers": (QuantizerSuite, "quantizer"),
}
_MODULE = "octavo_suites_under_check"


def suites_for(registry: Registry, plugin_name: str) -> dict[str, type]:
    """A test class, by name, for each contribution of a plugin that there is a suite for.

    Raises PluginError where no plugin of that name is loaded. Empty for a plugin that brings none of these.
    """
    suites: dict[str, type] = {}
    contributed = registry.contributed_by(plugin_name)
    for hook, (suite, attribute) in _SUITES.items():
        for subject in contributed.get(hook, ()):
            name = f"Test{subject.__name__}"
            while name in suites:
                name += "_"
            suites[name] = type(name, (suite,), {attribute: subject, "device": registry.platform.device})
    return suites


def run_suites(suites: Mapping[str, type], verbose: bool = False, extra_args: Sequence[str] = ()) -> int:
    """Runs test classes with pytest in this process, prints one line for each, and returns pytest's exit code (0: all passed).

    Neither the configuration, conftest files nor plugins of the folder around are used, and nothing is written there.
    `verbose` shows each test; failures are always shown. Without any suite there is nothing to prove: the code is pytest's 5.
    """
    if not suites:
        print("nothing to check: the plugin brings nothing that there is a suite for")
        return int(pytest.ExitCode.NO_TESTS_COLLECTED)
    tally = _Tally()
    code = _run(suites, [tally], ["-v" if verbose else "-q", *extra_args])
    width = max((len(name) for name in suites), default=0)
    for name in suites:
        passed, failed, skipped = (tally.names(name, outcome) for outcome in ("passed", "failed", "skipped"))
        verdict = "FAILED" if failed else "passed" if passed else "skipped" if skipped else "not run"
        print(f"{name:<{width}}  {verdict}  {len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped")
    return code


def failures_of(suite_class: type, tests: Sequence[str] = ()) -> list[str]:
    """Names of the tests of a suite class that fail, run in silence; `tests` names the only ones to run.

    Raises RuntimeError where pytest finds no such test, or cannot run.
    """
    tally, name = _Tally(), suite_class.__name__
    with redirect_stdout(StringIO()) as output, redirect_stderr(output):
        code = _run({name: suite_class}, [tally], [], [f"::{name}::{test}" for test in tests])
    failures = tally.names(name, "failed")
    if code != bool(failures):
        raise RuntimeError(f"pytest could not run {name}:\n{output.getvalue()}")
    return failures


class _Tally:
    """A pytest plugin that keeps the outcome of each test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

    def names(self, suite: str, outcome: str) -> list[str]:
        split = [(node.split("::"), found) for node, found in self.outcomes.items()]
        return [parts[-1] for parts, found in split if parts[-2] == suite and found == outcome]


def _run(
    suites: Mapping[str, type], plugins: Sequence[object], arguments: Sequence[str], parts: Sequence[str] = ()
) -> int:
    """Runs pytest on a file that imports the suites, or on the given parts of it, and returns its exit code."""
    with tempfile.TemporaryDirectory() as name, _offered(suites), _bare_environment():
        folder = Path(name)
        (folder / "pytest.ini").write_text(f"[pytest]\npython_classes = {' '.join(suites)}\n")
        test = folder / f"test_{folder.name}.py"  # a name of its own: pytest keeps test modules by name
        test.write_text(f"from {_MODULE} import *\n")
        options = ["-c", str(folder / "pytest.ini"), "--rootdir", name, "--noconftest", "--import-mode=importlib"]
        options += ["-p", "no:cacheprovider", "--tb=short", "--no-header"]
        targets = [f"{test}{part}" for part in parts or ("",)]
        return int(pytest.main([*options, *arguments, *targets], plugins=list(plugins)))


@contextmanager
def _offered(suites: Mapping[str, type]) -> Iterator[None]:
    """Makes the classes importable, for as long as pytest collects and runs them."""
    before = sys.modules.get(_MODULE)
    module = ModuleType(_MODULE)
    vars(module).update(suites)
    sys.modules[_MODULE] = module
    try:
        yield
    finally:
        del sys.modules[_MODULE]
        if before is not None:
            sys.modules[_MODULE] = before


@contextmanager
def _bare_environment() -> Iterator[None]:
    """Keeps pytest from installed plugins and from options in the environment."""
    before = dict(os.environ)
    for variable in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(variable, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
