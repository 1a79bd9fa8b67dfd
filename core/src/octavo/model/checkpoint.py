"""A model folder: its settings, its tensors, and an account of which tensors were read.

`Checkpoint` is what the rest of octavo sees; a `CheckpointReader` knows one container. Nothing is read but headers until
`read` is called, and every tensor that nobody asked for is on the list that `unread` returns.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.errors import CheckpointError, ConfigError
from octavo.quant.config import QuantSource, TensorInfo

logger = logging.getLogger(__name__)

# Written by old tools, computed by every model itself: reading them would change nothing.
_HARMLESS = re.compile(
    r"(rotary_emb\.inv_freq|masked_bias|attn\.bias|\.workspace|\.wf|\.max_q|\.rotary_emb\.\w+_cached)$"
)

# Written by trainers beside the weights.
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "rng_state.pth")

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


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
        """One tensor's data, on the CPU; it may be a mapping of the file."""

    def close(self) -> None:  # noqa: B027 - a container may hold nothing open
        """Lets go of files and their mappings; `tensors` stays, `read` ends."""

    def config(self) -> dict[str, Any] | None:
        """What config.json would say, for containers that carry it themselves; None: read config.json."""
        return None

    def tokenizer(self) -> Any | None:
        """The Hugging Face tokenizer, chat template included, of containers that carry it; None: read the files beside."""
        return None


class _ShardedReader(CheckpointReader):
    """A container that is one file, or several and maybe an index, which says whose copy of a tensor counts."""

    _single: ClassVar[str]  # the name of the one file; the index is named after it
    _patterns: ClassVar[tuple[str, ...]]  # of file names; the first that finds any decides

    @classmethod
    def _files(cls, folder: Path) -> list[Path]:
        found = ([f for f in folder.glob(pattern) if f.name not in _NOT_WEIGHTS] for pattern in cls._patterns)
        return sorted(next(filter(None, found), []))

    @classmethod
    def claims(cls, path: Path) -> bool:
        return path.is_dir() and bool(cls._files(path))

    @abstractmethod
    def _headers(self, file: Path) -> Iterator[TensorInfo]:
        """All tensors of one file, which is kept in `_open`."""

    def __init__(self, path: Path) -> None:
        self._tensors: dict[str, TensorInfo] = {}
        self._open: dict[str, Any] = {}  # by file
        files, weight_map = self._shards(path)
        for file in files:
            for info in self._headers(file):
                if weight_map is not None and weight_map.get(info.name, file.name) != file.name:
                    continue
                if (other := self._tensors.get(info.name)) is not None:
                    raise CheckpointError(
                        "two files hold the same tensor and no index says which counts",
                        tensor=info.name,
                        found=f"{other.file} and {file}",
                    )
                self._tensors[info.name] = info
        for name, file_name in (weight_map or {}).items():
            if name not in self._tensors:
                raise CheckpointError(
                    "the index names a tensor that its file does not hold", tensor=name, file=str(path / file_name)
                )

    def _shards(self, folder: Path) -> tuple[list[Path], dict[str, str] | None]:
        """The files that hold tensors and, where there is an index, the file of each tensor."""
        single, index = folder / self._single, folder / f"{self._single}.index.json"
        if not index.exists():
            return [single] if single.exists() else self._files(folder), None
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError("the index has no usable weight_map", file=str(index))
        names = sorted(set(weight_map.values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise CheckpointError("the index points outside the model folder", file=str(index), found=outside[0])
        missing = [name for name in names if not os.path.exists(folder / name)]  # unlike Path.exists, takes any text
        if missing and single.exists():
            logger.warning("%s names files that are missing (%s): %s is read instead", index, missing[0], single.name)
            return [single], None
        if missing:
            raise CheckpointError(
                f"{len(missing)} of {len(names)} files that the index names are missing",
                file=str(index),
                found=f"missing: {', '.join(missing)}",
                hint="the download is incomplete; fetch the missing files again",
            )
        return [folder / name for name in names], weight_map

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def close(self) -> None:
        self._open.clear()


class SafetensorsReader(_ShardedReader):
    """`*.safetensors`, one file or shards with an index. Data is mapped, not copied."""

    name = "safetensors"
    _single = "model.safetensors"
    _patterns = ("*.safetensors",)

    def _headers(self, file: Path) -> Iterator[TensorInfo]:
        try:
            handle = self._open[str(file)] = safe_open(str(file), framework="pt")
            for name in handle.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - not a dict
                header = handle.get_slice(name)  # type: ignore[no-untyped-call]
                # a type that torch lacks matters only to whoever reads the tensor
                dtype = SAFETENSORS_DTYPES.get(header.get_dtype(), torch.bits8)
                yield TensorInfo(name, dtype, tuple(header.get_shape()), str(file))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"cannot read the file as safetensors: {error}",
                file=str(file),
                hint="it is truncated or damaged; fetch or export it again",
            ) from None

    def read(self, name: str) -> Tensor:
        info = self._tensors[name]
        try:
            return self._open[info.file].get_tensor(name)  # type: ignore[no-any-return]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read a tensor: {error}", file=info.file, tensor=name) from None


class TorchBinReader(_ShardedReader):
    """`pytorch_model*.bin` and single `.pt`/`.pth` files: pickles, opened with `weights_only` so that no code in them runs."""

    name = "bin"
    _single = "pytorch_model.bin"
    _patterns = ("pytorch_model*.bin", "*.pt", "*.pth", "*.bin")

    def _headers(self, file: Path) -> Iterator[TensorInfo]:
        try:
            if zipped := zipfile.is_zipfile(file):
                with zipfile.ZipFile(file) as archive:
                    for part in archive.infolist():  # torch does not check that they lie where the list says
                        archive.open(part).close()
            # only the zip form, torch's since 1.6, can be mapped
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
        except Exception as error:  # torch raises many kinds for bad archives
            raise CheckpointError(
                f"cannot read the file as torch weights: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
                file=str(file),
                hint="only plain tensors are read from pickles; convert the model to safetensors",
            ) from None
        if not isinstance(content, dict):
            raise CheckpointError("expected a dict of tensors", file=str(file), found=type(content).__name__)
        plain = {n: t for n, t in content.items() if isinstance(t, Tensor) and t.layout is torch.strided}
        if others := [str(name) for name in content if name not in plain]:
            shown = ", ".join(others[:8])
            logger.warning("%s: %d entries that are no plain tensors are not used: %s", file, len(others), shown)
        self._open[str(file)] = plain
        yield from (TensorInfo(name, t.dtype, tuple(t.shape), str(file)) for name, t in plain.items())

    def read(self, name: str) -> Tensor:
        return self._open[self._tensors[name].file][name]  # type: ignore[no-any-return]


class Checkpoint:
    """An opened model folder. `config` is config.json; `quant_sources` are all quantization settings found, best first."""

    def __init__(self, path: Path, config: dict[str, Any], reader: CheckpointReader) -> None:
        self.path, self.config, self._reader = path, config, reader
        self.tensors = reader.tensors
        self.quant_sources = _quant_sources(path, config)
        self._read: set[str] = set()
        self._by_module: dict[str, dict[str, TensorInfo]] = {}
        for name, info in self.tensors.items():
            module, _, suffix = name.rpartition(".")
            self._by_module.setdefault(module, {})[suffix] = info

    def stored(self, module: str) -> dict[str, TensorInfo]:
        """Headers of the tensors of one module, by last name part."""
        return self._by_module.get(module, {})

    def stored_bytes(self, module: str) -> int:
        """Bytes of one module's tensors in the file."""
        return sum(info.num_bytes for info in self.stored(module).values())

    @property
    def modules(self) -> Collection[str]:
        """Names of all modules that hold tensors."""
        return self._by_module.keys()

    @property
    def may_hold_tokenizer(self) -> bool:
        """Whether the container is of a kind that can hold a tokenizer."""
        return type(self._reader).tokenizer is not CheckpointReader.tokenizer

    def tokenizer(self) -> Any | None:
        """The tokenizer that the container itself holds; None: it lies in files beside."""
        return self._reader.tokenizer()

    def read(self, name: str) -> Tensor:
        """One tensor's data, in memory of its own; raises CheckpointError where it is missing or damaged."""
        if name not in self.tensors:
            raise CheckpointError("a tensor that the model needs is missing", file=str(self.path), tensor=name)
        self._read.add(name)
        # a mapping would show later changes of the file, and kill the process where the file has become shorter
        return self._reader.read(name).clone()

    def close(self) -> None:
        """Lets go of the files: headers and settings stay, `read` ends."""
        self._reader.close()

    def without(self, ignore: Sequence[str]) -> dict[str, TensorInfo]:
        """Headers of all tensors but those that match a pattern of `ignore`."""
        return {n: info for n, info in self.tensors.items() if not any(fnmatchcase(n, pattern) for pattern in ignore)}

    def unread(self, ignore: Sequence[str] = ()) -> list[str]:
        """Tensors that nobody read, without those known to be harmless and those that match a pattern of `ignore`."""
        return [name for name in self.without(ignore) if name not in self._read and not _HARMLESS.search(name)]

    def json(self, name: str) -> dict[str, Any]:
        """A side file such as generation_config.json; empty where there is none."""
        file = self.path / name
        return _read_json(file) if file.is_file() else {}


def open_checkpoint(model: str, readers: Sequence[type[CheckpointReader]]) -> Checkpoint:
    """Opens a model folder; raises ConfigError for a path that is none, CheckpointError for one that is damaged.

    Nothing is ever fetched: `model` is a path.
    """
    path = Path(model).expanduser()
    if not os.path.exists(path):  # unlike Path.exists, it takes any text for an answer
        raise ConfigError(
            f"no such model folder: {model[:500]} (looked in {path.absolute().parent}). octavo reads local folders only; "
            "a model from a hub must be downloaded first"
        )
    reader = next((r for r in readers if r.claims(path)), None)
    if reader is None:
        if path.is_file():
            raise ConfigError(
                f"{model} is a file that no installed reader opens; give the folder that holds config.json"
            )
        what = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        missing = "" if (path / "config.json").exists() else " and no config.json"
        raise CheckpointError(
            f"the folder holds no weights{missing}",
            file=str(path),
            expected="*.safetensors or pytorch_model*.bin",
            found=what,
        )
    opened = reader(path)
    config = opened.config()
    if config is None:
        file = path / "config.json"
        if not file.is_file():
            raise CheckpointError("the model folder has no config.json", file=str(path))
        config = _read_json(file)
    return Checkpoint(path, config, opened)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        json.dumps(
            content, ensure_ascii=False
        ).encode()  # half of a surrogate pair is no text, and breaks what prints it
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read the file as JSON: {error}", file=str(file)) from None
    if not isinstance(content, dict):
        raise CheckpointError("expected a JSON object", file=str(file), found=type(content).__name__)
    return content


def _quant_sources(path: Path, config: Mapping[str, Any]) -> list[QuantSource]:
    """All places where tools put quantization settings, in the order in which they are believed."""
    text_config = config.get("text_config")
    sources = [
        (config.get("quantization_config"), "config.json: quantization_config"),
        (text_config.get("quantization_config") if isinstance(text_config, dict) else None, "config.json: text_config"),
        (config.get("compression_config"), "config.json: compression_config"),
    ]
    for name in ("hf_quant_config.json", "quantize_config.json", "quant_config.json"):
        if (path / name).is_file():
            content = _read_json(path / name)
            sources.append((content.get("quantization", content) if name.startswith("hf_") else content, name))
    for raw, where in sources:
        if raw is not None and not isinstance(raw, dict):
            raise CheckpointError("quantization settings must be a JSON object", file=where, found=repr(raw))
    return [QuantSource(raw, where) for raw, where in sources if raw]
