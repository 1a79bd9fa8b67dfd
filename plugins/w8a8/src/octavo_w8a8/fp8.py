"""Checkpoints of `quant_method: fp8`: weights in float8 e4m3 with a scale for a tensor, a channel or a block.

AutoFP8, DeepSeek, transformers and ModelOpt write them. A scale multiplies in all of them, also where it is called
`weight_scale_inv`. The tensors decide what a layer is; settings that contradict them are an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator
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
from octavo_w8a8.checks import FLOATS, check_input_scale, check_scales, expect, missing, refuse_nan, useless

PER_TOKEN = ActivationSpec("fp8_e4m3")
STATIC = ActivationSpec("fp8_e4m3", "per_tensor", dynamic=False)
DEFAULT_BLOCK = (128, 128)  # of files that store blocks without saying how large; transformers assumes the same

_WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
_INPUT_SCALES = ("input_scale", "activation_scale", "act_scale")  # transformers and the first AutoFP8 name it otherwise
_SCALARS: tuple[tuple[int, ...], ...] = ((), (1,))

Size = Annotated[int, Field(gt=0)]


class FP8Config(QuantConfig):
    """float8 e4m3 weights and inputs; block-wise weights as in DeepSeek-V3 (arXiv 2412.19437, section 3.3)."""

    name = "fp8"
    method_names = ("modelopt", "modelopt_fp8", "fp8_per_channel_per_token", "w8a8_fp8")
    aliases_of: ClassVar[Mapping[str, tuple[str, ...]]] = {"ignored_layers": ("modules_to_not_convert",)}
    ignored_keys = frozenset(
        {
            *("config_groups", "exclude_modules", "expert_dtype", "group_size", "ignore"),  # the tensors say it
            *("dequantize", "modules_to_convert", "packed_modules_mapping", "producer"),  # for other loaders
        }
    )
    suffixes = ("weight", *_WEIGHT_SCALES, *_INPUT_SCALES, "bias")
    targets = ("fp8",)

    activation_scheme: Literal["dynamic", "static"] | None = None
    """None: static where the file holds a scale of the inputs."""
    weight_block_size: tuple[Size, Size] | None = None
    """(outputs, inputs) that share a scale; None for scales per tensor or channel."""
    ignored_layers: tuple[str, ...] | None = None
    """Informational: whether a layer is quantised is decided by its tensors."""
    fmt: Literal["e4m3"] | None = None
    scale_fmt: Literal["float", "ue8m0"] | None = None
    """"ue8m0": the scales are powers of two, whatever type stores them."""
    quant_algo: Literal["fp8", "fp8_per_channel_per_token"] | None = None
    """ModelOpt's name for the scheme."""
    kv_cache_scheme: Literal["static"] | None = None
    """How K and V are stored: AutoFP8 writes "static", ModelOpt an object that is read as the same."""
    kv_cache_quant_algo: Literal["fp8"] | None = None

    @field_validator("kv_cache_scheme", mode="before")
    @classmethod
    def _check_kv_cache_scheme(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        wanted = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True}
        if wrong := {key: value[key] for key, right in wanted.items() if value.get(key, right) != right}:
            raise ValueError(f"K and V can be stored in static, symmetric fp8, not with {wrong}")
        return "static"

    @property
    def kv_cache(self) -> str | None:
        return "fp8_e4m3" if self.kv_cache_scheme or self.kv_cache_quant_algo else None

    @classmethod
    def goldens(cls) -> Sequence[Golden]:
        from octavo_w8a8.goldens import fp8_goldens

        return fp8_goldens()

    # --- recognising

    @classmethod
    def detect(cls, source: QuantSource | None, tensors: Mapping[str, TensorInfo]) -> bool:
        if source is not None and not {"activation_scheme", "weight_block_size"} & set(source.raw):
            return False
        return any(_is_fp8(info) and _has_scale(name, tensors) for name, info in tensors.items())

    @classmethod
    def infer(cls, tensors: Mapping[str, TensorInfo]) -> Mapping[str, Any]:
        static = any(name.rpartition(".")[2] in _INPUT_SCALES for name in tensors)
        return {"activation_scheme": "static" if static else "dynamic"}

    @classmethod
    def translate(cls, source: QuantSource) -> QuantSource | None:
        if "config_groups" not in source.raw or "quant_algo" in source.raw:
            return None
        return replace(source, raw={**source.raw, "quant_method": "compressed-tensors"})

    # --- checking headers

    def spec_for(self, layer: LinearLayer, stored: Mapping[str, TensorInfo]) -> WeightSpec | None:
        extra = [s for s in (*_WEIGHT_SCALES, *_INPUT_SCALES) if s in stored]
        if "weight" not in stored:
            if extra:
                raise missing(layer, "weight", stored[extra[0]])
            return None
        weight = stored["weight"]
        if not extra and not _is_fp8(weight):
            return None
        shape = (layer.out_features, layer.in_features)
        expect(layer, weight, (torch.float8_e4m3fn, torch.float8_e4m3fnuz), [shape])
        names = [s for s in _WEIGHT_SCALES if s in stored]
        wanted = "weight_scale_inv" if self.weight_block_size else "weight_scale"
        if not names or (self.weight_block_size and wanted not in names):
            raise missing(layer, wanted, weight)
        if len(names) > 1:
            raise useless(layer, stored["weight_scale_inv"], "weight_scale is stored too: one of them is left over")
        group = self._group(layer, names[0], stored[names[0]])
        return WeightSpec("fp8_e4m3", group, activation=self._activation(layer, group, stored))

    def _group(self, layer: LinearLayer, suffix: str, scales: TensorInfo | Tensor) -> tuple[int, int]:
        """What shares a scale, from the shape of the scales; raises CheckpointError where they fit nothing."""
        rows, shape = layer.out_features, tuple(scales.shape)
        blocks = self.weight_block_size or DEFAULT_BLOCK
        grid = (-(-rows // blocks[0]), -(-layer.in_features // blocks[1]))
        if self.weight_block_size is not None:
            shapes: list[tuple[int, ...]] = [grid]
        else:
            shapes = [*_SCALARS, (rows, 1), (rows,)] if suffix == "weight_scale" else [*_SCALARS, grid]
        if isinstance(scales, TensorInfo):
            expect(layer, scales, (*FLOATS, torch.float8_e8m0fnu), shapes)
        if self.weight_block_size is None and shape in _SCALARS:
            return -1, -1
        return blocks if suffix == "weight_scale_inv" else (1, -1)

    def _activation(
        self, layer: LinearLayer, group: tuple[int, int], stored: Mapping[str, TensorInfo] | Mapping[str, Tensor]
    ) -> ActivationSpec:
        names = [s for s in _INPUT_SCALES if s in stored]
        static = bool(names) if self.activation_scheme is None else self.activation_scheme == "static"
        headers = {s: info for s, info in stored.items() if isinstance(info, TensorInfo)}
        if headers and static != bool(names):
            if static:
                hint = "set activation_scheme to dynamic to compute scales for each token instead"
                raise missing(layer, "input_scale", headers["weight"], hint)
            reason = "the settings say activation_scheme: dynamic"
            raise useless(layer, headers[names[0]], reason, "set activation_scheme to static if the file is intact")
        for name in names:
            if name in headers:
                expect(layer, headers[name], FLOATS, _SCALARS)
        return _activation_of(group, static)

    # --- bits

    def canonicalise(self, layer: LinearLayer, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        suffix = next((s for s in _WEIGHT_SCALES if s in tensors), "weight_scale")
        if suffix not in tensors:
            raise CheckpointError(f"{layer.name}: {suffix} is missing", tensor=f"{layer.name}.{suffix}")
        codes, scales = tensors["weight"], tensors[suffix]
        group = self._group(layer, suffix, scales)
        scales = scales.reshape(_grid(layer, group))
        if scales.dtype == torch.float8_e8m0fnu:
            scales = scales.to(torch.float32)
        if codes.dtype == torch.float8_e4m3fnuz:
            codes, scales = _from_fnuz(layer, codes, scales)
        refuse_nan(layer, codes)
        check_scales(layer, suffix, scales, codes, group)
        activation, input_scale = self._activation(layer, group, tensors), None
        if not activation.dynamic:
            name = next((s for s in _INPUT_SCALES if s in tensors), "input_scale")
            if name not in tensors:
                raise CheckpointError(f"{layer.name}: {name} is missing", tensor=f"{layer.name}.{name}")
            input_scale = tensors[name]
            check_input_scale(layer, name, input_scale)
        spec = WeightSpec("fp8_e4m3", group, activation=activation)
        return QuantizedWeight(spec, codes, scales, input_scale=input_scale, bias=tensors.get("bias"))

    def serialise(self, layer: LinearLayer, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Packs a weight; scales per tensor become scalars (shape () or that of the input's scale), per channel (out, 1)."""
        weight.check(layer)
        spec, scales = weight.spec, weight.scales
        if (reason := self._why_not_write(spec)) is not None:
            raise CheckpointError(f"{layer.name}: fp8 cannot hold this weight: {reason}")
        assert scales is not None
        if scales.dtype not in FLOATS:
            raise CheckpointError(f"{layer.name}: fp8 cannot hold this weight: its scales are of {scales.dtype}")
        refuse_nan(layer, weight.codes)
        tensors = {"weight": weight.codes.contiguous()}
        if spec.group_shape == (-1, -1):
            shape = () if weight.input_scale is None else tuple(weight.input_scale.shape)
            tensors["weight_scale"] = scales.reshape(shape)
        else:
            name = "weight_scale" if spec.group_shape == (1, -1) else "weight_scale_inv"
            tensors[name] = scales.contiguous()
        for suffix, tensor in (("input_scale", weight.input_scale), ("bias", weight.bias)):
            if tensor is not None:
                tensors[suffix] = tensor
        return tensors

    def _why_not_write(self, spec: WeightSpec) -> str | None:
        """Why these settings cannot describe a weight, or None."""
        activation, group = spec.activation, spec.group_shape
        if activation is None or spec != WeightSpec("fp8_e4m3", group, activation=activation):
            return f"it is {spec}; fp8 is fp8_e4m3 without zeros, with inputs in fp8_e4m3"
        blocks = self.weight_block_size or DEFAULT_BLOCK
        if group not in ((blocks,) if self.weight_block_size else ((-1, -1), (1, -1), blocks)):
            return f"its scales are for {group} elements, the settings say weight_block_size {self.weight_block_size}"
        if activation != _activation_of(group, not activation.dynamic):
            return f"its inputs are {activation}; here they would be {_activation_of(group, False)} or {STATIC}"
        if self.activation_scheme is not None and activation.dynamic != (self.activation_scheme == "dynamic"):
            return f"its inputs are {activation}, the settings say activation_scheme {self.activation_scheme}"
        return None

    # --- making checkpoints

    @classmethod
    def online_spec(cls, layer: LinearLayer) -> WeightSpec | None:
        return WeightSpec("fp8_e4m3", (1, -1), activation=PER_TOKEN)

    @classmethod
    def for_weights(cls, target: str, layers: Mapping[LinearLayer, LayerFacts]) -> Self:
        specs = {layer: facts.spec for layer, facts in layers.items()}
        plain = tuple(layer.name for layer, spec in specs.items() if spec.is_float and spec.activation is None)
        config = cls(ignored_layers=plain)
        for layer, spec in specs.items():
            if layer.name in plain:
                continue
            if config.activation_scheme is None and spec.activation is not None:  # the first layer decides for all
                rows, columns = spec.group_shape
                scheme: Literal["dynamic", "static"] = "dynamic" if spec.activation.dynamic else "static"
                blocks = (rows, columns) if min(rows, columns) > 0 else None
                config = cls(activation_scheme=scheme, weight_block_size=blocks, ignored_layers=plain)
            reason = config._why_not_write(spec)
            if reason is None and config.weight_block_size is None and spec.group_shape == DEFAULT_BLOCK:
                reason = "other layers have no blocks"
            if reason is not None:
                raise CheckpointError(f"{layer.name}: fp8 cannot hold this weight: {reason}")
        return config

    def settings(self) -> dict[str, Any]:
        return {"quant_method": "fp8", **self.model_dump(mode="json", exclude_none=True)}


def _is_fp8(info: TensorInfo) -> bool:
    named = info.name.rpartition(".")[2] == "weight"
    return named and info.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def _has_scale(name: str, tensors: Mapping[str, TensorInfo]) -> bool:
    module = name.rpartition(".")[0]
    return any(f"{module}.{suffix}" in tensors for suffix in _WEIGHT_SCALES)


def _grid(layer: LinearLayer, group: tuple[int, int]) -> tuple[int, int]:
    """How many scales (along the outputs, along the inputs) a layer has."""
    out_group, in_group = group
    rows = 1 if out_group == -1 else -(-layer.out_features // out_group)
    return rows, 1 if in_group == -1 else -(-layer.in_features // in_group)


def _activation_of(group: tuple[int, int], static: bool) -> ActivationSpec:
    """How inputs are quantised beside weights of this group shape: as vLLM does it, per token wherever it is dynamic."""
    if static:
        return STATIC
    return PER_TOKEN if group[1] == -1 else ActivationSpec("fp8_e4m3", "per_group", group_size=group[1])


def _from_fnuz(layer: LinearLayer, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3fnuz codes and their scales as e4m3fn ones: the same bits mean twice as much, so the scales are halved.

    0x80 is NaN in fnuz; 0x7F and 0xFF are +-240 there and NaN in fn, where nothing stands for them at half the scale.
    """
    raw = codes.view(torch.uint8)
    if bad := int((raw == 0x80).sum()):
        raise CheckpointError(
            f"{layer.name}: weight holds {bad} code(s) that are NaN in float8_e4m3fnuz (0x80)",
            tensor=f"{layer.name}.weight",
            hint="the file is damaged; export the model again",
        )
    if top := int(((raw & 0x7F) == 0x7F).sum()):
        raise CheckpointError(
            f"{layer.name}: weight holds {top} code(s) of +-240 in float8_e4m3fnuz, which float8_e4m3fn cannot hold exactly",
            tensor=f"{layer.name}.weight",
            expected="float8_e4m3fn",
            found="float8_e4m3fnuz",
            hint="export the model again in float8_e4m3fn",
        )
    return codes.view(torch.float8_e4m3fn), scales.to(torch.float32) / 2
