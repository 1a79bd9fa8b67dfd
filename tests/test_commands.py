"""Commands as contributions: who brings one, who owns a name, what listing them costs, and what a broken one does."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

import octavo.cli
from octavo import Command, EngineConfig, PluginError
from octavo.cli import build_parser, main
from octavo.cli.chat import Chat, Complete
from octavo.cli.checkpoints import CheckPlugin, Convert, Doctor, Inspect, Plugins
from octavo.cli.generate import Generate
from octavo.cli.quantize import Quantize
from octavo.cli.run_batch import RunBatch
from octavo.command import add_engine_settings, engine_config
from octavo.plugins import installed_entry_points
from octavo.testing import CommandSuite, failures_of

PLUGIN = """
from octavo import Command, hookimpl

octavo_api = (1, 0)

class Greet(Command):
    name = "{name}"
    help = "Say hello."

    def add_arguments(self, parser):
        {arguments}

    def run(self, options):
        print("hello", options.whom)
        return 3

@hookimpl
def octavo_commands():
    return [Greet]
"""
FLAG = 'parser.add_argument("whom", help="Who is meant.")'


class TestGenerate(CommandSuite):
    command = Generate


class TestInspect(CommandSuite):
    command = Inspect


class TestDoctor(CommandSuite):
    command = Doctor


class TestConvert(CommandSuite):
    command = Convert


class TestQuantize(CommandSuite):
    command = Quantize


class TestPlugins(CommandSuite):
    command = Plugins


class TestCheckPlugin(CommandSuite):
    command = CheckPlugin


class TestChat(CommandSuite):
    command = Chat


class TestComplete(CommandSuite):
    command = Complete


class TestRunBatch(CommandSuite):
    command = RunBatch


class Site:
    """Distributions in a folder; only they and core are discovered."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names = folder, ["core"]

    def install(self, plugin: str, name: str = "greet", arguments: str = FLAG, text: str = PLUGIN) -> None:
        (self.folder / f"toycmd_{plugin}.py").write_text(text.format(name=name, arguments=arguments))
        info = self.folder / f"dist_{plugin}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{plugin}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[octavo]\n{plugin} = toycmd_{plugin}\n")
        self.names.append(plugin)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(tmp_path)
    site = Site(tmp_path)

    def found() -> list:
        return [point for point in installed_entry_points() if point.name in site.names]

    for module in (octavo.cli, octavo.plugins):
        monkeypatch.setattr(module, "installed_entry_points", found)
    yield site
    for module in [name for name in sys.modules if name.startswith("toycmd_")]:
        del sys.modules[module]


def test_a_plugin_adds_a_command(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("greeter")
    assert main(["greet", "you"]) == 3
    assert capsys.readouterr().out == "hello you\n"
    assert "Say hello." in build_parser().format_help()
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "Say hello." in capsys.readouterr().out


def test_a_command_of_core_imports_no_other_plugin(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("greeter", text="raise SystemExit('imported')")
    assert "greet" not in build_parser(["inspect"]).format_help()
    assert main(["plugins", "--disable-plugins", "greeter"]) == 0
    assert "disabled" in capsys.readouterr().out
    assert "toycmd_greeter" not in sys.modules


def test_disabled_plugins_bring_no_command(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install("greeter")
    monkeypatch.setenv("OCTAVO_DISABLE_PLUGINS", "greeter")
    with pytest.raises(SystemExit) as end:
        main(["greet", "you"])
    assert end.value.code == 2
    assert "invalid choice: 'greet'" in capsys.readouterr().err
    assert "toycmd_greeter" not in sys.modules
    monkeypatch.delenv("OCTAVO_DISABLE_PLUGINS")
    with pytest.raises(SystemExit):
        main(["greet", "you", "--disable-plugins=greeter"])
    assert "toycmd_greeter" not in sys.modules


def test_two_owners_of_a_command_are_both_named(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install("one")
    site.install("two")
    assert main(["greet", "you"]) == 2
    error = capsys.readouterr().err
    assert "'greet' is claimed by one (dist-one 1.0) and by two (dist-two 1.0)" in error
    monkeypatch.setenv("OCTAVO_DISABLE_PLUGINS", "two")
    assert main(["greet", "you"]) == 3


def test_a_command_of_core_cannot_be_replaced(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("greeter", name="plugins")
    assert main(["plugins"]) == 2
    error = capsys.readouterr().err
    assert "'plugins' is claimed by core (octavo " in error
    assert "by greeter (dist-greeter 1.0)" in error


def test_a_failed_plugin_leaves_the_help_alone(
    site: Site, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    site.install("broken", text="import no_such_module_at_all")
    site.install("greeter")
    assert main(["greet", "you"]) == 3
    assert "plugin broken (dist-broken 1.0) failed and is left out" in caplog.text
    assert "no_such_module_at_all" in caplog.text


def test_a_command_whose_flags_fail_is_named(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("greeter", arguments="parser.nothing()")
    assert main(["greet", "you"]) == 2
    assert "command greet: toycmd_greeter.Greet.add_arguments failed: AttributeError" in capsys.readouterr().err
    assert main(["plugins"]) == 0


@pytest.mark.parametrize("missing", ['name = "{name}"', 'help = "Say hello."'])
def test_an_incomplete_command_is_a_failure(site: Site, missing: str, caplog: pytest.LogCaptureFixture) -> None:
    site.install("greeter", text=PLUGIN.replace(missing, "pass"))
    with pytest.raises(SystemExit):
        main(["greet", "you"])
    assert f"octavo_commands: Greet lacks {missing.split()[0]}" in caplog.text


def test_the_suite_refuses_what_it_should() -> None:
    class Sloppy(Command):
        name = "Sloppy_Name"
        help = "no sentence"

        def add_arguments(self, parser: argparse.ArgumentParser) -> None:
            parser.add_subparsers().add_parser("below").add_argument("--flag")

        def run(self, options: argparse.Namespace) -> int:
            return 0

    suite = type("TestSloppy", (CommandSuite,), {"command": Sloppy})
    wrong = {
        "test_name_and_help_fit_into_the_list",
        "test_every_flag_is_explained",
        "test_listing_and_parsing_are_cheap",
    }
    assert set(failures_of(suite)) == wrong, "a class in a function cannot be imported either"


def test_defaults_of_a_command_hold_where_nothing_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_engine_settings(parser)

    def read(*arguments: str) -> EngineConfig:
        return engine_config(parser.parse_args(arguments), max_num_seqs=7, seed=5)

    assert (read("m").max_num_seqs, read("m").seed, read("m").model) == (7, 5, "m")
    assert read("m", "--max-num-seqs", "3").max_num_seqs == 3
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "9")
    assert read("m").max_num_seqs == 9
    file = tmp_path / "settings.yaml"
    file.write_text("seed: 11\n")
    assert read("m", "--config", str(file)).seed == 11


def test_plugin_errors_are_errors_of_octavo() -> None:
    assert PluginError("x").exit_code == 2
