"""Fixtures: layers as a loader would hand them over, and the material of other people's tools, where it is at hand."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

from octavo import TensorInfo

_REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with checkpoints and decoders written by others, beside the repository or in it."""
    for folder in (_REPOSITORY.parent / "shared", _REPOSITORY / "shared"):
        if (folder / "oracle" / "decoders.py").is_file():
            return folder
    pytest.skip("the folder 'shared' with foreign checkpoints and decoders is not beside the repository")


@pytest.fixture(scope="session")
def oracle(shared: Path) -> ModuleType:
    """Independent numpy decoders: gptq."""
    spec = importlib.util.spec_from_file_location("oracle_decoders", shared / "oracle" / "decoders.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def headers() -> Callable[..., dict[str, TensorInfo]]:
    """Headers by suffix, as a checkpoint declares them, of a layer's tensors."""

    def make(tensors: Mapping[str, Tensor], layer: str = "model.layers.0.mlp.up_proj") -> dict[str, TensorInfo]:
        return {
            suffix: TensorInfo(f"{layer}.{suffix}", tensor.dtype, tuple(tensor.shape), "model.safetensors")
            for suffix, tensor in tensors.items()
        }

    return make
