"""A stranger's plugin, end to end: built wheels in a fresh virtual environment, nothing of this repository on its path."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "third_party_plugin"

MAKE_MODEL = """
from pathlib import Path
from octavo.testing import tiny_model
from octavo_rowwise.rowwise import SPEC, RowwiseConfig

tiny_model(Path("model"), quantize=(RowwiseConfig(), SPEC), settings={"quant_method": "int8-rowwise"})
"""


@dataclass(frozen=True)
class Stranger:
    """A virtual environment of its own, and a folder to work in."""

    environment: Path
    folder: Path

    def run(self, program: str, *arguments: str | Path) -> str:
        """Runs a program of the environment; returns what it prints, fails with all of it unless the exit code is 0."""
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "OCTAVO"))}
        command = [str(self.environment / "bin" / program), *map(str, arguments)]
        run = subprocess.run(command, cwd=self.folder, env=variables, capture_output=True, text=True)
        assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout}\n{run.stderr}"
        return run.stdout

    def pip(self, *arguments: str | Path) -> None:
        self.run("python", "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)

    def octavo(self, *arguments: str) -> str:
        return self.run("octavo", *arguments)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    folder = tmp_path_factory.mktemp("stranger")
    wheels, constraints = folder / "wheels", ROOT / "constraints.txt"
    (torch,) = [line for line in constraints.read_text().splitlines() if line.startswith("torch==")]
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    stranger = Stranger(folder / "venv", folder)
    stranger.pip("wheel", "--no-deps", "--wheel-dir", wheels, ROOT / "core", EXAMPLE)
    core, plugin = sorted(wheels.iterdir(), key=lambda wheel: len(wheel.name))
    stranger.pip("install", "--no-compile", "--constraint", constraints, torch)
    stranger.pip("install", "--no-compile", "--constraint", constraints, f"{core}[testing]", plugin)
    stranger.run("python", "-c", MAKE_MODEL)
    yield stranger
    shutil.rmtree(folder / "venv")  # a gigabyte, which pytest would keep


def test_it_is_found(stranger: Stranger) -> None:
    plugins = {plugin["name"]: plugin for plugin in json.loads(stranger.octavo("plugins", "--json"))}
    assert set(plugins) == {"core", "rowwise"}
    rowwise = plugins["rowwise"]
    assert (rowwise["distribution"], rowwise["version"], rowwise["state"]) == ("octavo-rowwise", "1.4.0", "loaded")
    assert rowwise["hooks"] == ["octavo_linear_methods", "octavo_quant_configs"]


def test_octavo_is_the_wheel(stranger: Stranger) -> None:
    where = Path(stranger.run("python", "-c", "import octavo; print(octavo.__file__)").strip())
    assert stranger.environment in where.parents
    assert (where.parent / "py.typed").exists()


def test_it_passes_the_check(stranger: Stranger) -> None:
    verdicts = [
        line.split()[:2] for line in stranger.octavo("check-plugin", "rowwise").splitlines() if "failed," in line
    ]
    assert verdicts == [["TestRowwiseConfig", "passed"], ["TestRowwiseMethod", "passed"]]


def test_its_own_tests_pass(stranger: Stranger) -> None:
    shutil.copytree(EXAMPLE / "tests", stranger.folder / "tests")
    assert " passed" in stranger.run("python", "-m", "pytest", "-q", "tests")


def test_its_kernel_is_chosen_for_its_format(stranger: Stranger) -> None:
    plan = json.loads(stranger.octavo("inspect", "model", "--json"))
    assert plan["format"] == "int8-rowwise"
    kernels = {linear["layer"].rpartition(".")[2]: (linear["spec"], linear["kernel"]) for linear in plan["linears"]}
    assert kernels.pop("lm_head") == ("float", "dense")
    assert set(kernels.values()) == {("int8 channel", "rowwise")}
    assert len(plan["linears"]) == 4 * 2 + 1


def test_it_generates_what_the_reference_does(stranger: Stranger) -> None:
    def tokens(*options: str) -> Any:
        generated = stranger.octavo("generate", "model", "--prompt", "Hello", "--ignore-eos", "--json", *options)
        return json.loads(generated)["token_ids"]

    found = tokens("--quantization", "int8-rowwise", "--linear-kernels", "*_proj=rowwise")
    assert len(found) == 128
    assert found == tokens("--linear-kernels", "*_proj=reference") == tokens()
