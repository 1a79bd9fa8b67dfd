"""A model folder: its settings, its tensors, and an account of which tensors were read.

`Checkpoint` is what the rest of octavo sees; a `CheckpointReader` knows one container. Nothing is read but headers until
`read` is called, and every tensor that nobody asked for is on the list that `unread` returns.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.errors import CheckpointError, ConfigError
from octavo.quant.config import QuantSource, TensorInfo

# Written by old tools, computed by every model itself: reading them would change nothing.
_HARMLESS = re.compile(
    r"(rotary_emb\.inv_freq|masked_bias|attn\.bias|\.workspace|\.wf|\.max_q|\.rotary_emb\.\w+_cached)$"
)

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
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
        """One tensor's data, on the CPU."""

    def config(self) -> dict[str, Any] | None:
        """What config.json would say, for containers that carry it themselves; None: read config.json."""
        return None


def _shards(folder: Path, index_name: str, pattern: str) -> tuple[list[Path], dict[str, str] | None]:
    """The files that hold tensors and, where there is an index, the file of each tensor."""
    index = folder / index_name
    if not index.exists():
        single = folder / index_name.removesuffix(".index.json")
        return [single] if single.exists() else sorted(folder.glob(pattern)), None
    content = _read_json(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError("the index has no usable weight_map", file=str(index))
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise CheckpointError("the index points outside the model folder", file=str(index), found=outside[0])
    if missing := [name for name in names if not (folder / name).exists()]:
        raise CheckpointError(
            f"{len(missing)} of {len(names)} files that the index names are missing",
            file=str(index),
            found=f"missing: {', '.join(missing)}",
            hint="the download is incomplete; fetch the missing files again",
        )
    return [folder / name for name in names], weight_map


class SafetensorsReader(CheckpointReader):
    """`*.safetensors`, one file or shards with an index. Data is mapped, not copied."""

    name = "safetensors"

    @classmethod
    def claims(cls, path: Path) -> bool:
        return path.is_dir() and any(path.glob("*.safetensors"))

    def __init__(self, path: Path) -> None:
        files, weight_map = _shards(path, "model.safetensors.index.json", "*.safetensors")
        self._tensors: dict[str, TensorInfo] = {}
        self._open: dict[str, Any] = {}
        for file in files:
            try:
                handle = self._open[str(file)] = safe_open(str(file), framework="pt")
                for name in handle.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - not a dict
                    if weight_map is not None and weight_map.get(name) != file.name:
                        continue  # the index decides which copy counts
                    header = handle.get_slice(name)  # type: ignore[no-untyped-call]
                    dtype = _SAFETENSORS_DTYPES.get(header.get_dtype())
                    if dtype is None:
                        raise CheckpointError(
                            "a tensor has a type that octavo does not know",
                            file=str(file),
                            tensor=name,
                            found=header.get_dtype(),
                        )
                    if (other := self._tensors.get(name)) is not None:
                        raise CheckpointError(
                            "two files hold the same tensor and no index says which counts",
                            tensor=name,
                            found=f"{other.file} and {file}",
                        )
                    self._tensors[name] = TensorInfo(name, dtype, tuple(header.get_shape()), str(file))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"cannot read the file as safetensors: {error}",
                    file=str(file),
                    hint="it is truncated or damaged; fetch or export it again",
                ) from None
        for name, file_name in (weight_map or {}).items():
            if name not in self._tensors:
                raise CheckpointError(
                    "the index names a tensor that its file does not hold", tensor=name, file=str(path / file_name)
                )

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        info = self._tensors[name]
        try:
            return self._open[info.file].get_tensor(name)  # type: ignore[no-any-return]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read a tensor: {error}", file=info.file, tensor=name) from None


class TorchBinReader(CheckpointReader):
    """`pytorch_model*.bin` and single `.pt`/`.pth` files: pickles, opened with `weights_only` so that no code in them runs."""

    name = "bin"
    _patterns = ("pytorch_model*.bin", "*.pt", "*.pth", "*.bin")

    @classmethod
    def claims(cls, path: Path) -> bool:
        return path.is_dir() and any(f for p in cls._patterns for f in path.glob(p) if f.name != "training_args.bin")

    def __init__(self, path: Path) -> None:
        pattern = next(p for p in self._patterns if any(path.glob(p)))
        files, _ = _shards(path, "pytorch_model.bin.index.json", pattern)
        self._data: dict[str, Tensor] = {}
        self._tensors: dict[str, TensorInfo] = {}
        for file in files:
            try:
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:  # torch raises many kinds for bad archives
                raise CheckpointError(
                    f"cannot read the file as torch weights: {type(error).__name__}: {str(error).splitlines()[0]}",
                    file=str(file),
                    hint="only plain tensors are read from pickles; convert the model to safetensors",
                ) from None
            if not isinstance(content, dict):
                raise CheckpointError("expected a dict of tensors", file=str(file), found=type(content).__name__)
            for name, tensor in content.items():
                if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                    self._data[name] = tensor
                    self._tensors[name] = TensorInfo(name, tensor.dtype, tuple(tensor.shape), str(file))

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        return self._data[name]


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

    def read(self, name: str) -> Tensor:
        """One tensor's data; raises CheckpointError where it is missing or damaged."""
        if name not in self.tensors:
            raise CheckpointError("a tensor that the model needs is missing", file=str(self.path), tensor=name)
        self._read.add(name)
        return self._reader.read(name)

    def unread(self, ignore: Sequence[str] = ()) -> list[str]:
        """Tensors that nobody read, without those known to be harmless and those that match a pattern of `ignore`."""
        return [
            name
            for name in self.tensors
            if name not in self._read
            and not _HARMLESS.search(name)
            and not any(fnmatchcase(name, pattern) for pattern in ignore)
        ]

    def json(self, name: str) -> dict[str, Any]:
        """A side file such as generation_config.json; empty where there is none."""
        file = self.path / name
        return _read_json(file) if file.is_file() else {}


def open_checkpoint(model: str, readers: Sequence[type[CheckpointReader]]) -> Checkpoint:
    """Opens a model folder; raises ConfigError for a path that is none, CheckpointError for one that is damaged.

    Nothing is ever fetched: `model` is a path.
    """
    path = Path(model).expanduser()
    if not path.exists():
        raise ConfigError(
            f"no such model folder: {model} (looked in {path.absolute().parent}). octavo reads local folders only; "
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
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the file as JSON: {error}", file=str(file)) from None
    if not isinstance(content, dict):
        raise CheckpointError("expected a JSON object", file=str(file), found=type(content).__name__)
    return content


def _quant_sources(path: Path, config: Mapping[str, Any]) -> list[QuantSource]:
    """All places where tools put quantization settings, in the order in which they are believed."""
    found = []
    text_config = config.get("text_config")
    for raw, where in (
        (config.get("quantization_config"), "config.json: quantization_config"),
        (text_config.get("quantization_config") if isinstance(text_config, dict) else None, "config.json: text_config"),
        (config.get("compression_config"), "config.json: compression_config"),
    ):
        if isinstance(raw, dict) and raw:
            found.append(QuantSource(raw, where))
    for name in ("hf_quant_config.json", "quantize_config.json", "quant_config.json"):
        if (path / name).is_file():
            raw = _read_json(path / name)
            found.append(QuantSource(raw.get("quantization", raw) if name.startswith("hf_") else raw, name))
    return found
