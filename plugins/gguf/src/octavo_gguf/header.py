"""The front part of a GGUF file: metadata and the list of tensors, read with every count checked against the file.

The `gguf` package defines the numbers of value types and block types. Its own reader believes the counts in the file (an
array that claims 2^60 elements keeps it busy until memory ends) and takes seconds for a large vocabulary, so the front
part is read here; the tests compare both. Layout: the GGUF specification in ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from octavo import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # of tensor data, unless general.alignment says otherwise
_MAX_DIMS = 4  # ggml's
_TAIL = 4096  # bytes behind the last tensor that are looked at
_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<?",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file lists it. `shape` is (out, in), the reverse of the file's order; `start` is a byte of the file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    file: Path

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """The shape with a row of the last dimension counted in bytes."""
        elements, size = GGML_QUANT_SIZES[self.type]
        return (*self.shape[:-1], self.shape[-1] // elements * size)


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata by key, and the tensors. A float32 reads as the shortest decimal that rounds to it: 1e-05, not 9.99...e-06."""

    file: Path
    metadata: dict[str, Any]
    tensors: tuple[StoredTensor, ...]


def read_header(file: Path) -> Header:
    """Reads a file's front part; raises CheckpointError, which names the file, for whatever cannot be right in it."""
    try:
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Cursor(file, content).header()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise CheckpointError(f"cannot read the file as GGUF: {error}", file=str(file)) from None


class _Cursor:
    """A position in the file that never moves past its end."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self._file, self._content, self._size = file, content, len(content)
        self._at = 0

    def header(self) -> Header:
        self._check_version()
        num_tensors, num_keys = self._scalar("<Q"), self._scalar("<Q")
        # a key takes 8 + 4 + 1 bytes at least, a tensor 8 + 4 + 4 + 8
        self._expect_room(num_keys, 13, "metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text("a metadata key")
            if key in metadata:
                raise self._error(f"the metadata holds '{key}' twice")
            metadata[key] = self._value(key)
        self._expect_room(num_tensors, 24, "tensors")
        entries = [self._entry() for _ in range(num_tensors)]
        return Header(self._file, metadata, tuple(self._place(entries, metadata.get("general.alignment", _ALIGNMENT))))

    def _check_version(self) -> None:
        magic = self._take(4, "the magic number")
        if magic != _MAGIC:
            raise self._error("this is no GGUF file", expected=repr(_MAGIC), found=repr(magic))
        version = self._scalar("<I")
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                raise self._error(
                    "the file is big-endian; only little-endian files are read",
                    hint="convert it with the gguf package's gguf-convert-endian",
                )
            raise self._error(
                "the file is of a version that is not read",
                expected=f"version {' or '.join(map(str, _VERSIONS))}",
                found=f"version {version}",
                hint="version 1 was in use for a few days in 2023; convert the model again",
            )

    # --- values

    def _value(self, key: str) -> Any:
        kind = self._kind(key)
        if kind == GGUFValueType.STRING:
            return self._text(key)
        if kind != GGUFValueType.ARRAY:
            value = self._scalar(_SCALARS[kind])
            return float(str(np.float32(value))) if kind == GGUFValueType.FLOAT32 else value
        kind, count = self._kind(key), self._scalar("<Q")
        if kind == GGUFValueType.ARRAY:
            raise self._error(f"the metadata '{key}' is an array of arrays, which no known key is")
        if kind == GGUFValueType.STRING:
            self._expect_room(count, 8, f"elements of '{key}'")
            return [self._text(key) for _ in range(count)]
        size = struct.calcsize(_SCALARS[kind])
        self._expect_room(count, size, f"elements of '{key}'")
        return list(struct.unpack(f"<{count}{_SCALARS[kind][1]}", self._take(count * size, key)))

    def _kind(self, key: str) -> GGUFValueType:
        number = self._scalar("<I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._error(f"the metadata '{key}' has a type that does not exist", found=number) from None

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form), "a number"))
        return value

    def _text(self, what: str) -> str:
        data = self._take(self._scalar("<Q"), what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is no UTF-8 text: {error}") from None

    def _take(self, count: int, what: str) -> bytes:
        if count > self._size - self._at:
            raise self._error(
                f"the file ends inside {what}",
                expected=f"{count} bytes at {self._at}",
                found=f"{self._size - self._at}",
                hint="the file is truncated or damaged; fetch it again",
            )
        self._at += count
        return self._content[self._at - count : self._at]

    def _expect_room(self, count: int, least: int, what: str) -> None:
        """Raises CheckpointError for a count of things that the rest of the file cannot hold."""
        if count > (self._size - self._at) // least:
            raise self._error(
                f"the file claims {count} {what}, more than it has room for",
                found=f"{self._size - self._at} bytes",
                hint="the file is truncated or damaged; fetch it again",
            )

    def _error(self, message: str, **facts: Any) -> CheckpointError:
        return CheckpointError(message, file=str(self._file), **facts)

    # --- tensors

    def _entry(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        """Name, type, shape and offset of a tensor."""
        name = self._text("a tensor's name")
        count = self._scalar("<I")
        if not 1 <= count <= _MAX_DIMS:
            raise self._error(f"tensor '{name}' has {count} dimensions", expected=f"1 to {_MAX_DIMS}")
        dims = [self._scalar("<Q") for _ in range(count)]
        if not all(dims):
            raise self._error(f"tensor '{name}' has no elements", found=f"dimensions {dims}")
        number, offset = self._scalar("<I"), self._scalar("<Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            hint = "a newer gguf package may know it"
            raise self._error(f"tensor '{name}' is of type {number}, which is not known", hint=hint) from None
        return name, kind, tuple(reversed(dims)), offset

    def _place(
        self, entries: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]], alignment: object
    ) -> Iterator[StoredTensor]:
        """Tensors with their place in the file, which holds them whole."""
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise self._error("general.alignment must be a power of two from 8 up", found=repr(alignment))
        data = -(-self._at // alignment) * alignment
        seen: set[str] = set()
        end = 0  # of the tensors so far: each begins where the one before ends, rounded up
        for name, kind, shape, offset in entries:
            if name in seen:
                raise self._error(f"the file lists tensor '{name}' twice")
            seen.add(name)
            elements, size = GGML_QUANT_SIZES[kind]
            if shape[-1] % elements:
                raise self._error(
                    f"tensor '{name}' has rows of {shape[-1]} elements, which are no whole blocks of {kind.name}",
                    expected=f"a multiple of {elements}",
                )
            num_bytes = prod(shape) // elements * size
            if offset != end or data + offset + num_bytes > self._size:
                raise self._error(
                    f"tensor '{name}' does not lie where the file says",
                    expected=f"{num_bytes} bytes from {data} + {end}, after the tensor before",
                    found=f"{data} + {offset} in a file of {self._size} bytes",
                    hint="the file is truncated or damaged; fetch it again",
                )
            end += -(-num_bytes // alignment) * alignment
            yield StoredTensor(name, kind, shape, data + offset, num_bytes, self._file)
        if entries and any(self._content[data + end : data + end + _TAIL]):
            raise self._error(
                f"data follow the last tensor, '{entries[-1][0]}': the list of tensors is not that of this file",
                expected=f"the end of the file, or zeros, at {data + end}",
                found=f"a file of {self._size} bytes",
            )
