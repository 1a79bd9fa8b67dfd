"""What a quantisation has done so far, on disk beside its destination: after a kill, the same command goes on from there.

`manifest.json` says what the job is; whatever would change a byte of the result is in it. Each finished decoder layer is one
safetensors file, written beside its place and renamed.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from octavo.errors import ConfigError
from octavo.model.layerwise import Replacement
from octavo.quant.weight import ActivationSpec, LinearLayer, QuantizedWeight, WeightSpec

_PARTS = tuple(part.name for part in fields(QuantizedWeight) if part.name != "spec")


@dataclass(slots=True)
class LayerResult:
    """What became of one decoder layer's linears. `errors` are relative, by group label; `largest` is K's and V's."""

    replacements: dict[LinearLayer, Replacement] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    largest: dict[str, Tensor] = field(default_factory=dict)


class WorkFolder:
    """The folder of one job, locked while it is used."""

    def __init__(self, place: Path, job: Mapping[str, Any], *, restart: bool) -> None:
        """Opens or makes the folder that belongs to the destination `place`.

        Raises ConfigError where another process uses it, or where it belongs to another job; with `restart` that one's
        results are thrown away.
        """
        self.path = place.with_name(f".{place.name}.quantising")
        self.path.mkdir(exist_ok=True)
        self._lock = (self.path / "lock").open("wb")
        try:
            self.resumed = self._take(place, dict(job), restart)
        except BaseException:
            self._lock.close()
            raise

    def _take(self, place: Path, job: dict[str, Any], restart: bool) -> bool:
        """Whether there are finished layers of this job."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{place}: another process is writing it") from None
        found = self._manifest()
        if found is not None and found != job and not restart:
            different = sorted(key for key in {*found, *job} if found.get(key) != job.get(key))
            raise ConfigError(
                f"{self.path} holds an unfinished quantisation with another {', '.join(different)}: finish that one with "
                "its own options, or say --restart to throw it away"
            )
        if found != job or restart:
            self._clear()
            self._write("manifest.json", json.dumps(job, indent=2).encode())
        return any(self.path.glob("layer-*.safetensors"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()

    def remove(self) -> None:
        """Ends the job: the folder is no longer needed."""
        shutil.rmtree(self.path, ignore_errors=True)

    def has(self, index: int) -> bool:
        """Whether a layer is finished."""
        return self._file(index).exists()

    def save(self, index: int, result: LayerResult) -> None:
        """Keeps a finished layer."""
        tensors: dict[str, Tensor] = {f"largest:{side}": one for side, one in result.largest.items()}
        specs: dict[str, Any] = {}
        for layer, one in result.replacements.items():
            specs[layer.name] = [layer.in_features, layer.out_features, asdict(one.weight.spec)]
            parts = {part: getattr(one.weight, part) for part in _PARTS} | {"divisor": one.divisor}
            tensors |= {f"{layer.name}:{part}": tensor for part, tensor in parts.items() if tensor is not None}
        told = {"specs": specs, "errors": result.errors, "notes": result.notes}
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        self._write(
            self._file(index).name, save(copies, metadata={key: json.dumps(value) for key, value in told.items()})
        )

    def load(self, index: int) -> LayerResult:
        """A finished layer; raises ConfigError where its file is damaged."""
        file = self._file(index)
        try:
            with safe_open(str(file), framework="pt") as opened:
                told = {key: json.loads(value) for key, value in opened.metadata().items()}
                tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigError(f"{file}: a finished layer cannot be read again ({error}): say --restart") from None
        replacements = {}
        for name, (inputs, outputs, spec) in told["specs"].items():
            parts = {part: tensors.get(f"{name}:{part}") for part in _PARTS}
            weight = QuantizedWeight(_spec(spec), **parts)  # type: ignore[arg-type]
            replacements[LinearLayer(name, inputs, outputs)] = Replacement(weight, tensors.get(f"{name}:divisor"))
        largest = {side: tensors[f"largest:{side}"] for side in "kv" if f"largest:{side}" in tensors}
        return LayerResult(replacements, told["errors"], told["notes"], largest)

    def _file(self, index: int) -> Path:
        return self.path / f"layer-{index:05}.safetensors"

    def _manifest(self) -> dict[str, Any] | None:
        try:
            found = json.loads((self.path / "manifest.json").read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _write(self, name: str, data: bytes) -> None:
        partial = self.path / f"{name}.part"
        partial.write_bytes(data)
        partial.rename(self.path / name)

    def _clear(self) -> None:
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()


def _spec(values: dict[str, Any]) -> WeightSpec:
    activation = values.pop("activation")
    group_out, group_in = values.pop("group_shape")
    return WeightSpec(
        group_shape=(group_out, group_in),
        activation=None if activation is None else ActivationSpec(**activation),
        **values,
    )
