"""The contract of a checkpoint format: how to recognise it, and how its tensors become a `QuantizedWeight` and back.

A format is one pydantic model (its settings as found in the model folder) with a few methods. It never computes a product
and never sees a kernel. Which layers are quantised is decided by the tensors that the file holds, never by lists of names:
six tools have six rules for such lists, and the tensors agree with all of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.quant.weight import LinearLayer, QuantizedWeight, WeightSpec


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the header of its file declares it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class QuantSource:
    """Quantization settings found in a model folder, and where: "config.json: quantization_config"."""

    raw: Mapping[str, Any]
    where: str


@dataclass(frozen=True, slots=True)
class Golden:
    """A tiny layer of a format, written out: documentation that the kit also checks.

    `settings` is what the model folder would say, `tensors` the stored tensors by suffix, `weight` (out, in) the numbers that
    they stand for. At least one golden of a format must not read the same backwards. `read_only` marks a kind of file that
    the format reads and never writes.
    """

    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    weight: Tensor
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What a format must know of a layer before it writes settings for it.

    `symmetric`: the zeros are absent or all the code's midpoint. `scale_dtype` is the type in which the scales were stored.
    """

    spec: WeightSpec
    symmetric: bool = True
    scale_dtype: torch.dtype | None = None


class QuantConfig(BaseModel):
    """One checkpoint format. Subclasses declare fields for the settings that change numbers, and fill the methods.

    A setting may have several spellings: `aliases_of` lists them per field. `ignored_keys` are settings known not to
    matter for loading. Any other key that the folder holds is reported once, never dropped in silence.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    """What `--quantization` and `quant_method` call the format."""
    method_names: ClassVar[tuple[str, ...]] = ()
    """Further spellings of `name` that users or writers use."""
    aliases_of: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    ignored_keys: ClassVar[frozenset[str]] = frozenset()
    suffixes: ClassVar[tuple[str, ...]]
    """Last name parts of all tensors that the format may store for a linear layer, bias included."""
    activation_scales: ClassVar[tuple[str, ...]] = ()
    """Names, relative to an MLP block, of a tensor (intermediate,) by which the activation's output is divided."""
    targets: ClassVar[tuple[str, ...]] = ()
    """Names that `octavo convert --to` accepts for this format."""
    _unread_keys: tuple[str, ...] = PrivateAttr(default=())

    @property
    def unread_keys(self) -> tuple[str, ...]:
        """Keys of the settings that no field reads and that are not known to be harmless."""
        return self._unread_keys

    @classmethod
    def goldens(cls) -> Sequence[Golden]:
        """Layers written out bit by bit: the format's documentation and test oracle. The kit demands at least one."""
        return ()

    @classmethod
    def detect(cls, source: QuantSource | None, tensors: Mapping[str, TensorInfo]) -> bool:
        """Whether a folder without `quant_method` is of this format, judged by setting names and by all tensor headers.

        `source` is None where the folder holds no settings at all. Must not read tensor data.
        """
        return False

    @classmethod
    def translate(cls, source: QuantSource) -> QuantSource | None:
        """The settings in the words of another format, `quant_method` included, where a tool wrote that format's files under
        one of this one's names; None: they are this format's own.
        """
        return None

    @classmethod
    def infer(cls, tensors: Mapping[str, TensorInfo]) -> Mapping[str, Any]:
        """Settings deduced from the tensor headers alone, for a folder without any; raises CheckpointError if undecidable."""
        raise CheckpointError(f"{cls.name}: this format cannot be inferred from tensors alone")

    @classmethod
    def parse(cls, source: QuantSource) -> Self:
        """Reads settings, in any spelling; raises CheckpointError that names key, value and file."""
        values: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        remaining = dict(source.raw)
        remaining.pop("quant_method", None)
        for field in cls.model_fields:
            for spelling in (field, *cls.aliases_of.get(field, ())):
                if spelling not in remaining:
                    continue
                value = remaining.pop(spelling)
                if isinstance(value, str):
                    value = value.lower()
                if value is not None and values.get(field) is not None and values[field] != value:
                    raise CheckpointError(
                        f"{cls.name}: two spellings of one setting disagree",
                        file=source.where,
                        found=f"{spelled[field]} = {values[field]!r}, {spelling} = {value!r}",
                    )
                if value is not None:
                    values[field], spelled[field] = value, spelling
        try:
            config = cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            field = str(first["loc"][0]) if first["loc"] else "?"
            raise CheckpointError(
                f"{cls.name}: cannot use setting '{spelled.get(field, field)}': {first['msg']}",
                file=source.where,
                found=repr(first.get("input")),
            ) from None
        config._unread_keys = tuple(sorted(k for k in remaining if k not in cls.ignored_keys))
        return config

    @property
    def kv_cache(self) -> str | None:
        """How the checkpoint wants K and V stored, "fp8_e4m3" say; None where its settings do not mention it."""
        return None

    @abstractmethod
    def spec_for(self, layer: LinearLayer, stored: Mapping[str, TensorInfo]) -> WeightSpec | None:
        """What the layer's numbers mean, from the headers of its tensors by suffix; None where it is stored unquantised.

        Tensors of the format that are there only in part are an error, not None.

        Verifies shapes and types against layer and settings; raises CheckpointError that names the tensor. `act_order` may
        be declared here and dropped by `canonicalise` once the values show that it is trivial.
        """

    @abstractmethod
    def canonicalise(self, layer: LinearLayer, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """Unpacks the stored tensors (by suffix) of a layer for which `spec_for` gave a spec."""

    @abstractmethod
    def serialise(self, layer: LinearLayer, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Packs a weight into this format's tensors by suffix: the exact inverse of `canonicalise`.

        Raises CheckpointError that names the layer where the format cannot hold these numbers.
        """

    # --- making checkpoints; a format that is only read leaves these alone

    @classmethod
    def online_spec(cls, layer: LinearLayer) -> WeightSpec | None:
        """What `--quantize-weights` makes of a float layer, by rounding to nearest; None where it leaves the layer as it is."""
        return None

    @classmethod
    def for_weights(cls, target: str, layers: Mapping[LinearLayer, LayerFacts]) -> Self:
        """Settings under which `serialise` writes these layers, float ones included, as the format `target`.

        Raises CheckpointError that names a layer which the format cannot hold.
        """
        raise CheckpointError(f"{cls.name}: this format cannot be written")

    def settings(self) -> dict[str, Any]:
        """`quantization_config` for config.json: `parse` of it gives an equal value."""
        raise CheckpointError(f"{self.name}: this format cannot be written")
