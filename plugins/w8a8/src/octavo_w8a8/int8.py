"""Checkpoints of SGLang's `w8a8_int8`: int8 weights with a scale for each output, inputs quantised token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
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
from octavo_w8a8.checks import FLOATS, check_scales, expect, missing, useless

SPEC = WeightSpec("int8", (1, -1), activation=ActivationSpec("int8"))


class W8A8Int8Config(QuantConfig):
    """int8, one scheme only: weight[n, k] = weight_scale[n] * weight[n, k], inputs dynamic per token and symmetric."""

    name = "w8a8_int8"
    aliases_of: ClassVar[Mapping[str, tuple[str, ...]]] = {"ignored_layers": ("modules_to_not_convert", "ignore")}
    ignored_keys = frozenset(("packed_modules_mapping",))
    suffixes = ("weight", "weight_scale", "weight_zero_point", "input_scale", "bias")
    targets = ("w8a8_int8",)

    is_dynamic: bool = True
    """SGLang's own setting. Its kernels for CPUs and GPUs are dynamic whatever it says, and so is this format."""
    activation_scheme: Literal["dynamic"] | None = None
    ignored_layers: tuple[str, ...] | None = None
    """Informational: whether a layer is quantised is decided by its tensors."""

    @classmethod
    def goldens(cls) -> Sequence[Golden]:
        from octavo_w8a8.goldens import int8_goldens

        return int8_goldens()

    @classmethod
    def detect(cls, source: QuantSource | None, tensors: Mapping[str, TensorInfo]) -> bool:
        if source is not None and not {"is_dynamic", "activation_scheme"} & set(source.raw):
            return False
        found = {tuple(name.rpartition(".")[::2]): info for name, info in tensors.items()}
        if source is None and any(s in ("weight_packed", "input_scale", "weight_zero_point") for _, s in found):
            return False  # some other scheme, which must say what it is
        return any(
            suffix == "weight" and info.dtype == torch.int8 and (module, "weight_scale") in found
            for (module, suffix), info in found.items()
        )

    @classmethod
    def infer(cls, tensors: Mapping[str, TensorInfo]) -> Mapping[str, Any]:
        return {"is_dynamic": True}

    @classmethod
    def translate(cls, source: QuantSource) -> QuantSource | None:
        if "config_groups" not in source.raw:
            return None
        return replace(source, raw={**source.raw, "quant_method": "compressed-tensors"})

    def spec_for(self, layer: LinearLayer, stored: Mapping[str, TensorInfo]) -> WeightSpec | None:
        extra = [s for s in ("weight_scale", "weight_zero_point", "input_scale") if s in stored]
        if "weight" not in stored:
            if extra:
                raise missing(layer, "weight", stored[extra[0]])
            return None
        weight, rows = stored["weight"], layer.out_features
        if not extra and weight.dtype != torch.int8:
            return None
        expect(layer, weight, (torch.int8,), [(rows, layer.in_features)])
        if "weight_scale" not in stored:
            raise missing(layer, "weight_scale", weight)
        expect(layer, stored["weight_scale"], FLOATS, [(rows, 1), (rows,)])
        if "weight_zero_point" in stored:
            expect(layer, stored["weight_zero_point"], (torch.int8,), [(rows, 1), (rows,)])
        if "input_scale" in stored:
            hint = "a static checkpoint is compressed-tensors': set quant_method to that, with its config_groups"
            raise useless(layer, stored["input_scale"], "w8a8_int8 computes the scales of inputs for each token", hint)
        return SPEC

    def canonicalise(self, layer: LinearLayer, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        codes, scales = tensors["weight"], tensors["weight_scale"].reshape(layer.out_features, 1)
        check_scales(layer, "weight_scale", scales, codes, (1, -1))
        zeros = tensors.get("weight_zero_point")
        if zeros is not None and bool(zeros.any()):
            raise CheckpointError(
                f"{layer.name}: the weight is asymmetric, w8a8_int8 is symmetric",
                tensor=f"{layer.name}.weight_zero_point",
                expected="0 everywhere, or no such tensor",
                found=f"zeros from {int(zeros.min())} to {int(zeros.max())}",
                hint="quantise the weights again with symmetric: true",
            )
        return QuantizedWeight(SPEC, codes, scales, bias=tensors.get("bias"))

    def serialise(self, layer: LinearLayer, weight: QuantizedWeight) -> dict[str, Tensor]:
        weight.check(layer)
        if weight.spec != SPEC or weight.scales is None:
            raise CheckpointError(f"{layer.name}: w8a8_int8 cannot hold this weight: it is {weight.spec}, not {SPEC}")
        if weight.scales.dtype not in FLOATS:
            raise CheckpointError(f"{layer.name}: w8a8_int8 cannot hold scales of {weight.scales.dtype}")
        tensors = {"weight": weight.codes.contiguous(), "weight_scale": weight.scales.contiguous()}
        return tensors if weight.bias is None else tensors | {"bias": weight.bias}

    @classmethod
    def online_spec(cls, layer: LinearLayer) -> WeightSpec | None:
        return SPEC

    @classmethod
    def for_weights(cls, target: str, layers: Mapping[LinearLayer, LayerFacts]) -> Self:
        plain = []
        for layer, facts in layers.items():
            if facts.spec.is_float and facts.spec.activation is None:
                plain.append(layer.name)
            elif facts.spec != SPEC:
                raise CheckpointError(
                    f"{layer.name}: w8a8_int8 cannot hold this weight: it is {facts.spec}, not {SPEC}"
                )
        return cls(ignored_layers=tuple(plain))

    def settings(self) -> dict[str, Any]:
        return {"quant_method": self.name, **self.model_dump(mode="json", exclude_none=True)}
