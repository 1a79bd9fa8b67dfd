"""Fixtures: the material of other people's tools, where it is at hand."""

from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with checkpoints written by others, beside the repository or in it."""
    for folder in (_REPOSITORY.parent / "shared", _REPOSITORY / "shared"):
        if (folder / "checkpoints").is_dir():
            return folder
    pytest.skip("the folder 'shared' with foreign checkpoints is not beside the repository")
