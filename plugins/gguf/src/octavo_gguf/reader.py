"""GGUF files as a container of tensors under Hugging Face's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo import CheckpointError, CheckpointReader, ConfigError, TensorInfo
from octavo_gguf.header import Header, StoredTensor, read_header
from octavo_gguf.model_config import ModelConfig
from octavo_gguf.names import PERMUTED, PLAIN_TYPES, module_names

_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFReader(CheckpointReader):
    """A `.gguf` file, or a folder that holds one model in that form, in one file or in numbered splits.

    A tensor of numbers keeps "weight" or "bias" as its last name part. One of blocks has its block type there,
    "model.layers.0.self_attn.q_proj.q4_1", and is uint8 (out_features, bytes of a row). Rows of q and k that llama.cpp's
    converter reordered are put back. Tensors that have no name in Hugging Face's models keep GGUF's.
    """

    name = "gguf"

    @classmethod
    def claims(cls, path: Path) -> bool:
        if path.is_file():
            return path.suffix == ".gguf"
        others = (file for pattern in _OTHER_WEIGHTS for file in path.glob(pattern))
        return path.is_dir() and any(path.glob("*.gguf")) and not any(others)

    def __init__(self, path: Path) -> None:
        files = _files_of_model(path)
        self._file = str(files[0])
        headers = [read_header(file) for file in files]
        self._metadata = headers[0].metadata
        stored = _merged(headers)
        self._model = ModelConfig(self._file, self._metadata, stored)
        modules = module_names(self._model.architecture, self._model.num_layers)
        self._factors = self._rope_factors(stored.pop(_ROPE_FACTORS, None))
        self._stored: dict[str, StoredTensor] = {}
        self._config = self._model.as_dict(self._factors)
        for tensor in stored.values():
            module, _, last = tensor.name.rpartition(".")
            if tensor.type not in PLAIN_TYPES:
                last = tensor.type.name.lower() if last == "weight" else f"{last}.{tensor.type.name.lower()}"
            name = ".".join(part for part in (modules.get(module, module), last) if part)
            if (other := self._stored.setdefault(name, tensor)) is not tensor:
                raise CheckpointError(
                    "two tensors of the file mean the same",
                    file=str(tensor.file),
                    tensor=name,
                    found=f"{other.name} and {tensor.name}",
                )
        self._tensors = {name: _info(name, tensor) for name, tensor in self._stored.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        tensor = self._stored[name]
        data = _read(tensor)
        heads = self._permuted_heads(tensor.name)
        if heads is None:
            return data
        rows = data.shape[0]
        if rows % (2 * heads):
            raise CheckpointError(
                f"{rows} rows are no pairs for each of {heads} heads", file=str(tensor.file), tensor=name
            )
        pairs = data.reshape(heads, rows // heads // 2, 2, *data.shape[1:])
        return pairs.transpose(1, 2).reshape(data.shape)

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def tokenizer(self) -> Any:
        """The tokenizer that the file describes, chat template included; raises CheckpointError where there is none."""
        from octavo_gguf.tokenizer import build_tokenizer

        return build_tokenizer(self._file, self._metadata)

    def _permuted_heads(self, name: str) -> int | None:
        """How many heads the converter reordered in this tensor; None where it did not."""
        if self._model.architecture not in PERMUTED or not (found := re.search(r"\.attn_([qk])\.", name)):
            return None
        return self._model.heads[found[1] == "k"]

    def _rope_factors(self, tensor: StoredTensor | None) -> list[float] | None:
        if tensor is None:
            return None
        if tensor.type not in PLAIN_TYPES or len(tensor.shape) != 1 or tensor.shape[0] > 2**16:
            raise CheckpointError(
                "the rotary factors are no row of numbers", file=self._file, tensor=tensor.name, found=tensor.shape
            )
        return [float(factor) for factor in _read(tensor).tolist()]


def _files_of_model(path: Path) -> list[Path]:
    """The files of the one model that a path means; raises ConfigError where it could mean several."""
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        models = {match["stem"] if (match := _SPLIT.fullmatch(file.name)) else file.name for file in files}
        if len(models) > 1:
            raise ConfigError(
                f"{path} holds more than one GGUF model: {', '.join(file.name for file in files)}. Give the path of "
                "one file (of a split model, its first)"
            )
        path = files[0]
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split["count"])
    have = {file.name for file in path.parent.glob("*.gguf")}
    names = [f"{split['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    others = sorted(name for name in have - set(names) if (m := _SPLIT.fullmatch(name)) and m["stem"] == split["stem"])
    missing = [name for name in names if name not in have]
    if missing or others or not count:
        raise CheckpointError(
            f"the model's {count} files are not all here",
            file=str(path),
            found=f"missing: {', '.join(missing[:8]) or 'none'}; of another number of files: {', '.join(others) or 'none'}",
            hint="fetch the missing files; remove those of another split",
        )
    return [path.parent / name for name in names]


def _merged(headers: list[Header]) -> dict[str, StoredTensor]:
    """Tensors of all files by name; raises CheckpointError where the files do not belong together."""
    stored: dict[str, StoredTensor] = {}
    for number, header in enumerate(headers):
        told = header.metadata.get("split.no", number), header.metadata.get("split.count", len(headers))
        if told != (number, len(headers)) and not (len(headers) == 1 and told[1] in (0, 1)):
            raise CheckpointError(
                "the file is part of a split model and lies in the wrong place or alone",
                file=str(header.file),
                expected=f"part {number} of {len(headers)}, by the file names",
                found=f"split.no {told[0]}, split.count {told[1]}",
            )
        for tensor in header.tensors:
            if tensor.name in stored:
                raise CheckpointError(
                    "two files hold the same tensor",
                    file=str(header.file),
                    tensor=tensor.name,
                    found=stored[tensor.name].file,
                )
            stored[tensor.name] = tensor
    count = headers[0].metadata.get("split.tensors.count", len(stored))
    if count != len(stored):
        raise CheckpointError(
            "the files do not hold all tensors of the model",
            file=str(headers[0].file),
            expected=count,
            found=len(stored),
        )
    return stored


def _info(name: str, tensor: StoredTensor) -> TensorInfo:
    plain = PLAIN_TYPES.get(tensor.type)
    shape = tensor.row_bytes if plain is None else tensor.shape
    return TensorInfo(name, plain or torch.uint8, shape, str(tensor.file))


def _read(tensor: StoredTensor) -> Tensor:
    """A tensor's data as `_info` describes it, in memory of its own; the header has been checked against the file."""
    try:
        data = np.fromfile(tensor.file, np.uint8, tensor.num_bytes, offset=tensor.start)
    except OSError as error:
        raise CheckpointError(f"cannot read a tensor: {error}", file=str(tensor.file), tensor=tensor.name) from None
    if len(data) != tensor.num_bytes:
        raise CheckpointError(
            "the file has become shorter since it was opened",
            file=str(tensor.file),
            tensor=tensor.name,
            expected=f"{tensor.num_bytes} bytes",
            found=len(data),
        )
    info = _info(tensor.name, tensor)
    return torch.from_numpy(data).view(info.dtype).reshape(info.shape)
