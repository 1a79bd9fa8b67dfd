"""The settings of compressed-tensors checkpoints, as llm-compressor writes them, and the format built from its parts.

`schemes` reads what settings say about numbers, `matching` finds the scheme of a layer, `stored` checks a layer's headers
against it, `codes` turns tensors into numbers and back. Whether a layer is quantised is decided by its tensors alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import PrivateAttr, field_validator
from torch import Tensor

from octavo import (
    ActivationSpec,
    CheckpointError,
    Golden,
    LayerFacts,
    LinearLayer,
    QuantConfig,
    QuantizedWeight,
    QuantSource,
    TensorInfo,
    WeightSpec,
)
from octavo_w8a8.checks import Notices
from octavo_w8a8.codes import read, write
from octavo_w8a8.matching import best_match, matches
from octavo_w8a8.schemes import (
    QuantArgs,
    Scheme,
    check_format,
    check_targets,
    expand_preset,
    unread_args,
    unread_scheme,
)
from octavo_w8a8.stored import Stored, examine, is_quantised


class CompressedTensorsConfig(QuantConfig):
    """compressed-tensors: int8 and fp8 weights and inputs, and integers of 2 to 8 bits packed in words.

    Writers: llm-compressor and what builds on it. Source: compressed-tensors, versions of October 2025 to 2026.
    """

    name = "compressed-tensors"
    # "sparseml", of the first files, is only claimed to be refused with a reason
    method_names = ("compressed_tensors", "llm-compressor", "w8a8", "sparseml")
    ignored_keys = frozenset(
        ["global_compression_ratio", "moe_sparsity_config", "quantization_status", "version", "run_compressed"]
    )
    suffixes = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "input_scale",
        "input_zero_point",
        "bias",
    )
    targets = ("compressed-tensors",)

    format: str | None = None
    """How tensors are stored; informational, for their types and shapes tell."""
    config_groups: Mapping[str, Scheme] = {}
    ignore: tuple[str, ...] = ()
    """Informational: whether a layer is quantised is decided by its tensors."""
    kv_cache_scheme: QuantArgs | None = None
    sparsity_config: Mapping[str, Any] | None = None
    transform_config: Mapping[str, Any] | None = None
    _notices: Notices = PrivateAttr(default_factory=Notices)

    @field_validator("format")
    @classmethod
    def _check_format(cls, value: str | None) -> str | None:
        return None if value is None else check_format(value)

    @field_validator("ignore", mode="before")
    @classmethod
    def _one_ignored(cls, raw: Any) -> Any:
        return (raw,) if isinstance(raw, str) else raw

    @field_validator("ignore")
    @classmethod
    def _check_ignore(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_targets(value)

    @field_validator("config_groups", mode="before")
    @classmethod
    def _expand(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        groups: dict[str, Any] = {}
        for name, group in raw.items():
            if isinstance(group, Mapping):
                group = {key: value for key, value in group.items() if key != "preset"}
            groups[name] = expand_preset(name, group) if isinstance(group, list | tuple | str) else group
        return groups

    @field_validator("sparsity_config")
    @classmethod
    def _check_sparsity(cls, value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if value and str(value.get("format", "dense")).lower() != "dense":
            raise ValueError(f"sparse weights (format '{value['format']}') are not supported")
        return None

    @field_validator("transform_config")
    @classmethod
    def _check_transforms(cls, value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if value and value.get("config_groups", value):
            raise ValueError("transforms of inputs and weights (Hadamard rotations and the like) are not supported")
        return None

    @classmethod
    def goldens(cls) -> Sequence[Golden]:
        from octavo_w8a8.goldens import goldens

        return goldens()

    # --- recognising

    @classmethod
    def detect(cls, source: QuantSource | None, tensors: Mapping[str, TensorInfo]) -> bool:
        if source is not None:
            return isinstance(_flat(source.raw).get("config_groups"), Mapping)
        return any(name.endswith(".weight_packed") for name in tensors)

    @classmethod
    def infer(cls, tensors: Mapping[str, TensorInfo]) -> Mapping[str, Any]:
        from octavo_w8a8.inference import infer

        return infer(tensors)

    @classmethod
    def parse(cls, source: QuantSource) -> Self:
        raw = _flat(source.raw)
        if str(raw.get("quant_method")).lower() == "sparseml":
            raise CheckpointError(
                "compressed-tensors: quant_method 'sparseml' is a forerunner of the format that is not supported",
                file=source.where,
                hint="export the model again with a current llm-compressor",
            )
        config = super().parse(QuantSource(raw, source.where))
        unread = set(config.unread_keys)
        if isinstance(kv := raw.get("kv_cache_scheme"), Mapping):
            unread.update(unread_args("kv_cache_scheme", kv))
        for name, group in (raw.get("config_groups") or {}).items():
            if isinstance(group, Mapping):
                unread.update(unread_scheme(f"config_groups.{name}", group))
        config._unread_keys = tuple(sorted(unread))
        return config

    @property
    def kv_cache(self) -> str | None:
        """ "fp8_e4m3" or "int8", from kv_cache_scheme or from a group whose targets are attention modules.

        Raises CheckpointError for dynamic or asymmetric ones, and where two schemes disagree.
        """
        schemes = {f"config_groups.{name}": group.kv for name, group in self.config_groups.items()}
        found = {"kv_cache_scheme": self.kv_cache_scheme, **schemes}
        kinds = {place: _kv_kind(place, args) for place, args in found.items() if args is not None}
        if len(set(kinds.values())) > 1:
            raise CheckpointError("compressed-tensors: two settings disagree about K and V", found=kinds)
        return next(iter(kinds.values()), None)

    # --- layers

    def spec_for(self, layer: LinearLayer, stored: Mapping[str, TensorInfo]) -> WeightSpec | None:
        examined = self._examine(layer, stored)
        return None if examined is None else examined.spec

    def canonicalise(self, layer: LinearLayer, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        headers = {
            suffix: TensorInfo(f"{layer.name}.{suffix}", tensor.dtype, tuple(tensor.shape), "")
            for suffix, tensor in tensors.items()
        }
        examined = self._examine(layer, headers)
        assert examined is not None
        return read(layer, examined, tensors)

    def serialise(self, layer: LinearLayer, weight: QuantizedWeight) -> dict[str, Tensor]:
        weight.check(layer)
        try:
            if weight.spec.is_float:
                raise ValueError("it is float")
            return write(layer, weight, self._scheme(layer))
        except ValueError as error:
            raise CheckpointError(f"{layer.name}: these settings cannot hold this weight: {error}") from None

    def _examine(self, layer: LinearLayer, stored: Mapping[str, TensorInfo]) -> Stored | None:
        meant = not matches(layer.name, self.ignore)
        if not is_quantised(layer, stored):
            if meant and "weight" in stored and (scheme := best_match(layer.name, self._schemes)) is not None:
                self._note(layer, f"is stored as plain numbers, though settings quantise {', '.join(scheme.targets)}")
            return None
        if not meant:
            self._note(layer, "is stored quantised, though settings ignore it: the tensors count")
        return examine(layer, stored, self._scheme(layer))

    @property
    def _schemes(self) -> list[Scheme]:
        return [scheme for scheme in self.config_groups.values() if scheme.weights is not None]

    def _scheme(self, layer: LinearLayer) -> Scheme:
        """The scheme that explains a quantised layer; the only one there is, where no targets name the layer."""
        schemes = self._schemes
        if (scheme := best_match(layer.name, schemes)) is not None:
            return scheme
        if len(schemes) == 1:
            self._note(
                layer, f"is named by no targets: it is read by the only scheme, of {', '.join(schemes[0].targets)}"
            )
            return schemes[0]
        raise CheckpointError(
            f"{layer.name}: it is quantised, but no entry of config_groups says how",
            expected="an entry of targets that names the layer or its class",
            found="; ".join(", ".join(scheme.targets) for scheme in schemes) or "no config_groups with weights",
        )

    def _note(self, layer: LinearLayer, text: str) -> None:
        """Tells a contradiction that changes no number, once for all layers of the same kind."""
        self._notices.once(f"compressed-tensors: {re.sub(r'[.][0-9]+(?=[.])', '.*', layer.name)} {text}")

    # --- making checkpoints

    @classmethod
    def online_spec(cls, layer: LinearLayer) -> WeightSpec | None:
        return WeightSpec("int8", (1, -1), activation=ActivationSpec("int8"))

    @classmethod
    def for_weights(cls, target: str, layers: Mapping[LinearLayer, LayerFacts]) -> Self:
        from octavo_w8a8.export import groups_for

        formats, groups, ignore = groups_for(layers)
        return cls(format=formats, config_groups=groups, ignore=ignore)

    def settings(self) -> dict[str, Any]:
        return {
            "quant_method": self.name,
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {name: group.dump() for name, group in self.config_groups.items()},
            "ignore": list(self.ignore),
            "kv_cache_scheme": self.kv_cache_scheme and self.kv_cache_scheme.dump(),
            "global_compression_ratio": None,
        }


def _flat(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings without the extra level that transformers put around them for a while."""
    inner = raw.get("quantization_config")
    return (
        {**{k: v for k, v in raw.items() if k != "quantization_config"}, **inner} if isinstance(inner, Mapping) else raw
    )


def _kv_kind(place: str, args: QuantArgs) -> str:
    """The name of a way to store K and V."""
    if args.dynamic or not args.symmetric or args.strategy not in ("tensor", "attn_head"):
        shown = f"dynamic {args.dynamic}, symmetric {args.symmetric}, strategy {args.strategy}".lower()
        raise CheckpointError(
            f"compressed-tensors: {place} stores K and V in a way that is not supported",
            expected="static and symmetric, strategy tensor or attn_head",
            found=f"{args.code}, {shown}",
        )
    return args.code
