"""A model folder: its settings, its tensors, and an account of which tensors were read.

`Checkpoint` is what the rest of octavo sees; a `CheckpointReader` knows one container. Nothing is read but headers until
`read` is called, and every tensor that nobody asked for is on the list that `unread` returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from octavo.quant.config import QuantSource, TensorInfo


class CheckpointReader(ABC):
    """One kind of tensor container. Opening reads headers only."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def claims(cls, path: Path) -> bool:
        """Whether `path` (a folder or file) holds this container."""

    @abstractmethod
    def __init__(self, path: Path) -> None:
        """Reads headers; raises CheckpointError for missing shards, truncated files and the like."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors, by name."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One tensor's data, on the CPU."""

    def config(self) -> dict[str, Any] | None:
        """What config.json would say, for containers that carry it themselves; None: read config.json."""
        return None


class Checkpoint:
    """An opened model folder. `config` is config.json; `quant_sources` are all quantization settings found, best first."""

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    quant_sources: Sequence[QuantSource]

    def stored(self, module: str) -> dict[str, TensorInfo]:
        """Headers of the tensors of one module, by last name part."""
        raise NotImplementedError

    def read(self, name: str) -> Tensor:
        """One tensor's data; raises CheckpointError where it is missing or damaged."""
        raise NotImplementedError


class SafetensorsReader(CheckpointReader):
    name = "safetensors"


class TorchBinReader(CheckpointReader):
    name = "bin"
