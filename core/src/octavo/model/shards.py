"""Writes safetensors files one tensor at a time, so that a model larger than memory can be written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.model.checkpoint import SAFETENSORS_DTYPES

_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_ENTRY_BYTES = 200
"""Room for all that a header says of a tensor besides its name."""
_ALIGNMENT = 8


class ShardWriter:
    """The weights of a new model folder: shards of at most `max_shard_size` bytes, or one tensor, and their index.

    A header stands before the data, and is known after them: room is left for one entry for each of `names`, which are all
    that may come, and the rest is filled with spaces, as the format allows. Tensors whose size would put the next one at an
    odd address wait for the end of their shard; they are small.
    """

    def __init__(self, folder: Path, names: Iterable[str], max_shard_size: int) -> None:
        room = sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names) + _ENTRY_BYTES
        self._folder, self._room, self._limit = folder, room + -room % _ALIGNMENT, max_shard_size
        self._shard_of: dict[str, int] = {}
        self._count = 0
        self._file: BinaryIO | None = None
        self._header: dict[str, Any] = {}
        self._waiting: list[tuple[str, Tensor]] = []
        self._position = self._size = 0  # of the data written to this shard; of all data that it will hold
        self.total_size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor; raises CheckpointError for a name that was written before and for a type without a name."""
        if name in self._shard_of:
            raise CheckpointError("two tensors would have one name", tensor=name)
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"safetensors has no name for {tensor.dtype}", tensor=name)
        size = tensor.numel() * tensor.itemsize
        if self._file is None or (self._size and 8 + self._room + self._size + size > self._limit):
            self._end_shard()
            self._count += 1
            self._file = self._part(self._count).open("wb")
            self._file.write(bytes(8 + self._room))
        self._shard_of[name] = self._count
        self._size += size
        self.total_size += size
        if size % _ALIGNMENT:
            self._waiting.append((name, tensor))
        else:
            self._write(name, tensor)

    def finish(self) -> None:
        """Ends the last shard, gives all of them their names and writes the index where there are several."""
        self._end_shard()
        numbers = range(1, self._count + 1)
        files = {number: f"model-{number:05}-of-{self._count:05}.safetensors" for number in numbers}
        if self._count == 1:
            files = {1: "model.safetensors"}
        for number, file in files.items():
            self._part(number).rename(self._folder / file)
        if self._count > 1:
            weight_map = {name: files[number] for name, number in self._shard_of.items()}
            index = {"metadata": {"total_size": self.total_size}, "weight_map": weight_map}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _part(self, number: int) -> Path:
        return self._folder / f"model-{number:05}.part"

    def _write(self, name: str, tensor: Tensor) -> None:
        assert self._file is not None
        end = self._position + tensor.numel() * tensor.itemsize
        entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [self._position, end]}
        self._header[name], self._position = entry, end
        self._file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)

    def _end_shard(self) -> None:
        if self._file is None:
            return
        for name, tensor in sorted(self._waiting, key=lambda waiting: -waiting[1].itemsize):
            self._write(name, tensor)
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._header}, separators=(",", ":")).encode()
        assert len(header) <= self._room
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file, self._header, self._waiting, self._position, self._size = None, {}, [], 0, 0
