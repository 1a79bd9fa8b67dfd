"""The settings of AWQ checkpoints, and the checks that tensors and settings tell the same story.

The label in the settings is never trusted alone: shapes and types of the tensors show which layout a file has, and a
contradiction is refused with both facts. Converting by guess would turn a wrong label into wrong numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import field_validator
from torch import Tensor

from octavo import (
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
from octavo_awq.layouts import FLOATS, LAYOUTS, MIDPOINT, Layout, looks_like_gptq, looks_like_marlin

_GEMM_BY_ANOTHER_NAME = ("exllama", "ipex")  # kernels that users asked AutoAWQ for; the files are gemm
_HARMLESS = {
    # transformers writes GPTQ's defaults, sym among them, beside AWQ's settings
    "how the file was made": """
        act_group_aware amp autoround_version batch_size block_name_to_quantize cache_block_outputs damp_auto_increment
        damp_percent data_type dataset desc_act enable_minmax_tuning enable_quanted_input gradient_accumulate_steps
        iters low_gpu_mem_usage lr max_input_length meta minmax_lr model_seqlen module_name_preceding_first_block mse
        nsamples pad_token_id provider scale_dtype seqlen static_groups sym tokenizer true_sequential""",
    "what another loader should do": "do_fuse exllama_config fuse_max_seq_len modules_to_fuse",
    "what the tensors say themselves": "modules_in_block_to_quantize pack_dtype to_quant_block_names",
}
_TAKES = "uint4 with integer zeros of 0..15, in groups of consecutive inputs of one output, inputs in order"
_MARLIN = "its weights lie in the tiles of one GPU kernel: export the model again with version gemm"


class AWQConfig(QuantConfig):
    """AWQ: 4-bit codes in groups along the inputs, each with a scale and a zero.

    Writers: AutoAWQ, GPTQModel, auto-round, llm-awq. Paper: Lin et al., "AWQ", arXiv 2306.00978.
    """

    name = "awq"
    method_names = ("awq_marlin", "auto_awq")  # other kernels for the same files
    aliases_of: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "bits": ("w_bit",),
        "group_size": ("q_group_size",),
        "version": ("format", "checkpoint_format"),
    }
    ignored_keys = frozenset(key for keys in _HARMLESS.values() for key in keys.split())
    suffixes = ("qweight", "qzeros", "scaled_zeros", "scales", "bias")
    activation_scales = ("act.scales", "act_fn.scales")
    targets = ("awq",)

    bits: Literal[4] = 4
    group_size: int | None = None
    """Inputs that share a scale; -1 for all of a layer, None to take it from the shape of each layer's scales."""
    zero_point: bool = True
    """False: symmetric, the zero is 8 whether or not zeros are stored."""
    version: Literal["gemm", "gemv", "gemv_fast", "llm-awq"] = "gemm"
    backend: str | None = None
    """"llm-awq" means version llm-awq, any other value names a kernel."""
    method: Literal["awq", "awq_marlin", "auto_awq"] | None = None
    """GPTQModel's second spelling of quant_method."""
    modules_to_not_convert: tuple[str, ...] | None = None
    """Informational: whether a layer is quantised is decided by its tensors."""
    lm_head: bool | None = None
    """Informational too; other loaders leave a quantised head unread unless it is true."""

    @field_validator("group_size")
    @classmethod
    def _check_group_size(cls, value: int | None) -> int | None:
        if value is not None and value != -1 and value < 1:
            raise ValueError("must be -1 (one group over all inputs) or positive")
        return value

    @field_validator("version", mode="before")
    @classmethod
    def _check_version(cls, value: object) -> object:
        version = value.lower() if isinstance(value, str) else value
        if version == "marlin":
            raise ValueError(_MARLIN)
        return "gemm" if version in _GEMM_BY_ANOTHER_NAME else version

    @property
    def layout(self) -> Layout:
        """Where the settings say that codes lie."""
        return LAYOUTS["llm-awq" if self.backend == "llm-awq" else self.version]

    @classmethod
    def goldens(cls) -> Sequence[Golden]:
        from octavo_awq.goldens import goldens

        return goldens()

    # --- recognising

    @classmethod
    def detect(cls, source: QuantSource | None, tensors: Mapping[str, TensorInfo]) -> bool:
        found = _common_layouts(tensors)
        if source is not None and _says_awq(source.raw):
            return found != {"gptq"}
        return len(found) == 1 and found != {"gptq"}

    @classmethod
    def infer(cls, tensors: Mapping[str, TensorInfo]) -> Mapping[str, Any]:
        found = _common_layouts(tensors)
        if len(found) != 1 or found == {"gptq"}:
            shown = ", ".join(sorted(found)) or "no layout that all layers share"
            hint = "put the settings into config.json: quantization_config, with quant_method and version"
            raise CheckpointError("awq: the layout cannot be told from the tensors", found=shown, hint=hint)
        zeros = any("qzeros" in stored or "scaled_zeros" in stored for stored in _packed_modules(tensors))
        return {"bits": 4, "version": found.pop(), "zero_point": zeros}  # group_size follows from each layer's scales

    # --- checking headers

    def spec_for(self, layer: LinearLayer, stored: Mapping[str, TensorInfo]) -> WeightSpec | None:
        if "qweight" not in stored:
            if orphans := [s for s in ("scales", "qzeros", "scaled_zeros") if s in stored]:
                raise _missing(layer, "qweight", stored[orphans[0]])
            return None
        layout, qweight = self.layout, stored["qweight"]
        if "scales" not in stored:
            raise _missing(layer, "scales", qweight)
        scales = stored["scales"]
        self._check_layout(layer, stored)
        zeros_name = next((name for name in layout.zeros_names if name in stored), None)
        if zeros_name is None and (self.zero_point or not layout.zeros_optional):
            hint = "a symmetric model without zeros needs zero_point: false" if layout.zeros_optional else None
            raise _missing(layer, layout.zeros_names[0], qweight, hint)
        group = self._group(layer, scales)
        types = ((layout.word,), FLOATS, layout.zeros_types)
        shapes = layout.shapes(layer.in_features, layer.out_features, group)
        for name, dtypes, shape in zip(("qweight", "scales", zeros_name), types, shapes, strict=True):
            if name is not None and (stored[name].dtype not in dtypes or stored[name].shape != shape):
                info = stored[name]
                raise CheckpointError(
                    f"{layer.name}: {name} is not what AWQ {layout.name} implies for {layer.in_features} inputs, "
                    f"{layer.out_features} outputs and group_size {group}",
                    file=info.file,
                    tensor=info.name,
                    expected=f"{shape} of {' or '.join(map(str, dtypes))}",
                    found=f"{info.shape} of {info.dtype}",
                )
        for name in set(self.suffixes) & set(stored) - {"qweight", "scales", zeros_name, "bias"}:
            info = stored[name]
            raise CheckpointError(
                f"{layer.name}: AWQ {layout.name} has no use for {name}", file=info.file, tensor=info.name
            )
        return self._spec(layer, group)

    def _check_layout(self, layer: LinearLayer, stored: Mapping[str, TensorInfo]) -> None:
        """Raises CheckpointError where the tensors lie in another layout than the settings say."""
        qweight, scales = stored["qweight"], stored["scales"]
        sizes = layer.in_features, layer.out_features
        fits = [layout.name for layout in LAYOUTS.values() if layout.sizes(qweight, scales) == sizes]
        if "g_idx" not in stored and self.layout.name in fits:
            return
        if "g_idx" in stored or (looks_like_gptq(qweight, scales) and layer.out_features == scales.shape[1]):
            found, hint = "GPTQ, whose qweight is (K * bits / 32, N)", "set quant_method to gptq"
        elif looks_like_marlin(qweight, scales):
            found, hint = "Marlin tiles, whose qweight is (K / 16, 2 N)", _MARLIN
        elif fits:
            instead = ' instead of "backend": "llm-awq"' if self.backend == "llm-awq" else ""
            found, hint = f"AWQ {fits[0]}", f'set "version": "{fits[0]}" in the quantization settings{instead}'
        else:
            return  # damaged, or another model's: the comparison of shapes will name the tensor
        raise CheckpointError(
            f"{layer.name}: the settings say AWQ {self.layout.name}, the tensors lie as {found}",
            file=qweight.file,
            tensor=qweight.name,
            expected=f"{self.layout.shapes(*sizes, sizes[0])[0]} of {self.layout.word} for K = {sizes[0]}, N = {sizes[1]}",
            found=f"{qweight.shape} of {qweight.dtype} with scales {scales.shape}",
            hint=hint,
        )

    def _group(self, layer: LinearLayer, scales: TensorInfo | Tensor) -> int:
        """The layer's group size: what the settings say, or else what the shape of its scales implies."""
        layout, inputs, shape = self.layout, layer.in_features, tuple(scales.shape)
        implied = layout.group_size(inputs, scales) if len(shape) == 2 else None
        group = inputs if self.group_size == -1 else self.group_size or implied
        tensor = f"{layer.name}.scales"
        if group is None:
            raise CheckpointError(
                f"{layer.name}: the settings hold no group_size, and the shape of the scales implies none",
                tensor=tensor,
                found=f"{shape} for {inputs} inputs",
                hint="add group_size to the quantization settings",
            )
        if (reason := layout.why_not(inputs, layer.out_features, group)) is not None:
            raise CheckpointError(
                f"{layer.name}: AWQ {layout.name} cannot store this layer: {reason}",
                tensor=f"{layer.name}.qweight",
                hint="export the model again with this layer left out",
            )
        if implied not in (None, group) and shape != layout.shapes(inputs, layer.out_features, group)[1]:
            raise CheckpointError(
                f"{layer.name}: group_size in the settings contradicts the scales",
                tensor=tensor,
                expected=f"group_size {self.group_size}",
                found=f"{shape}, which is group_size {implied} for {inputs} inputs",
                hint=f"set group_size to {implied} if the file is intact",
            )
        return group

    def _spec(self, layer: LinearLayer, group: int) -> WeightSpec:
        whole = self.group_size == -1 or (self.group_size is None and group == layer.in_features)
        return WeightSpec("uint4", (1, -1 if whole else group), has_zeros=True)

    # --- bits

    def canonicalise(self, layer: LinearLayer, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        layout, group = self.layout, self._group(layer, tensors["scales"])
        stored = next((tensors[name] for name in layout.zeros_names if name in tensors), None)
        try:
            codes, scales, zeros = layout.unpack(
                tensors["qweight"], tensors["scales"], stored, layer.in_features // group
            )
        except ValueError as error:
            raise CheckpointError(
                f"{layer.name}: damaged, or its settings are wrong: {error}",
                tensor=f"{layer.name}.scales",
                found=f"read as AWQ {layout.name} with group_size {group}",
            ) from None
        if not self.zero_point and (found := _asymmetry(scales, zeros)) is not None:
            raise CheckpointError(
                f"{layer.name}: the settings say zero_point: false (symmetric), the stored zeros are not",
                tensor=f"{layer.name}.{layout.zeros_names[0]}",
                expected="8 everywhere",
                found=found,
                hint="set zero_point to true if the file is intact",
            )
        return QuantizedWeight(self._spec(layer, group), codes, scales, zeros, bias=tensors.get("bias"))

    def serialise(self, layer: LinearLayer, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Packs a weight; zeros are written even where they are all 8, for readers that ignore zero_point: false."""
        weight.check(layer)
        layout = self.layout
        try:
            group = self._group_to_write(layer, weight.spec)
            assert weight.scales is not None
            assert weight.zeros is not None
            if weight.scales.dtype not in FLOATS:
                raise ValueError(f"its scales are of {weight.scales.dtype}")
            if not self.zero_point and (found := _asymmetry(weight.scales, weight.zeros)) is not None:
                raise ValueError(f"the settings say zero_point: false, which means zeros of 8, but it has {found}")
            qweight, scales, zeros = layout.pack(weight.codes, weight.scales, weight.zeros, group)
        except ValueError as error:
            raise CheckpointError(f"{layer.name}: AWQ {layout.name} cannot hold this weight: {error}") from None
        tensors = {"qweight": qweight, layout.zeros_names[0]: zeros, "scales": scales}
        return tensors if weight.bias is None else tensors | {"bias": weight.bias}

    def _group_to_write(self, layer: LinearLayer, spec: WeightSpec) -> int:
        """The group size of a weight that these settings can describe; raises ValueError with a sentence for others."""
        if spec != WeightSpec("uint4", (1, spec.group_shape[1]), has_zeros=True):
            raise ValueError(f"it is {spec}; AWQ is uint4 with zeros, in groups of consecutive inputs of one output")
        inputs = layer.in_features
        group = inputs if spec.group_shape[1] == -1 else spec.group_shape[1]
        if self.group_size is not None and group != (inputs if self.group_size == -1 else self.group_size):
            raise ValueError(f"its groups are of {group} inputs, the settings say group_size {self.group_size}")
        if (reason := self.layout.why_not(inputs, layer.out_features, group)) is not None:
            raise ValueError(reason)
        return group

    # --- making checkpoints

    @classmethod
    def online_spec(cls, layer: LinearLayer) -> WeightSpec | None:
        """uint4 with zeros, in the largest usual groups that divide the inputs; None for a layer that gemm cannot store."""
        group = next((size for size in (128, 64, 32) if layer.in_features % size == 0), None)
        if group is None or LAYOUTS["gemm"].why_not(layer.in_features, layer.out_features, group) is not None:
            return None
        return WeightSpec("uint4", (1, group), has_zeros=True)

    @classmethod
    def for_weights(cls, target: str, layers: Mapping[LinearLayer, LayerFacts]) -> Self:
        """Settings of a gemm file. zero_point is true for symmetric weights as well: every reader knows zeros of 8."""
        packed = {layer: facts for layer, facts in layers.items() if not facts.spec.is_float}
        for layer, facts in packed.items():
            if (reason := _why_not_writable(layer, facts)) is not None:
                raise CheckpointError(
                    f"{layer.name}: AWQ gemm cannot hold this weight: {reason}", expected=_TAKES, found=facts.spec
                )
        whole = all(facts.spec.group_shape[1] == -1 for facts in packed.values())
        groups: dict[int, str] = {}
        for layer, facts in packed.items():
            size = facts.spec.group_shape[1]
            groups.setdefault(layer.in_features if size == -1 and not whole else size, layer.name)
        if len(groups) > 1:
            (first, one), (second, other), *_ = groups.items()
            raise CheckpointError(
                f"{other}: AWQ has one group size for all layers",
                expected=f"groups of {first} inputs, as {one} has",
                found=f"groups of {second}",
            )
        names = tuple(layer.name for layer, facts in layers.items() if facts.spec.is_float)
        head = any(layer.name.rpartition(".")[2] == "lm_head" for layer in packed)
        return cls(
            group_size=next(iter(groups), None), modules_to_not_convert=names or None, lm_head=True if head else None
        )

    def settings(self) -> dict[str, Any]:
        return {"quant_method": self.name, **self.model_dump(mode="json", exclude_none=True)}


def _why_not_writable(layer: LinearLayer, facts: LayerFacts) -> str | None:
    """Why gemm cannot store a layer of which the specification is known, None if it can."""
    spec = facts.spec
    if layer.name.rpartition(".")[2] == "embed_tokens":
        return "embeddings are plain in AWQ"
    if spec != WeightSpec("uint4", (1, spec.group_shape[1]), has_zeros=True):
        return f"it is {spec}"
    if facts.scale_dtype not in FLOATS:
        return f"its scales are {facts.scale_dtype}"
    group = layer.in_features if spec.group_shape[1] == -1 else spec.group_shape[1]
    return LAYOUTS["gemm"].why_not(layer.in_features, layer.out_features, group)


def _asymmetry(scales: Tensor, zeros: Tensor) -> str | None:
    """The zeros that count (a scale of 0 makes any zero do) where they are not all 8, in words; None where they are."""
    counted = zeros[scales != 0]
    if bool((counted == MIDPOINT).all()):
        return None
    return f"zeros from {counted.min():g} to {counted.max():g}"


def _missing(layer: LinearLayer, name: str, other: TensorInfo, hint: str | None = None) -> CheckpointError:
    return CheckpointError(
        f"{layer.name}: {name} is missing beside {other.name.rpartition('.')[2]}",
        file=other.file,
        tensor=f"{layer.name}.{name}",
        hint=hint,
    )


def _says_awq(settings: Mapping[str, Any]) -> bool:
    """Whether settings without quant_method are AWQ's: the old file of AutoAWQ, or GPTQModel's `method`."""
    if "method" in settings:
        return str(settings["method"]).lower() in (AWQConfig.name, *AWQConfig.method_names)
    version = str(settings.get("version")).lower()
    return "w_bit" in settings or "zero_point" in settings or version in (*LAYOUTS, "marlin")


def _packed_modules(tensors: Mapping[str, TensorInfo]) -> Iterable[dict[str, TensorInfo]]:
    """Headers by suffix of all modules that hold a qweight."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = info
    return [stored for stored in modules.values() if "qweight" in stored]


def _common_layouts(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """The layouts, "gptq" among them, that fit every packed module as far as headers tell without the model's sizes."""
    fits = [_possible_layouts(stored) for stored in _packed_modules(tensors)]
    return set.intersection(*fits) if fits else set()


def _possible_layouts(stored: Mapping[str, TensorInfo]) -> set[str]:
    if "g_idx" in stored:
        return {"gptq"}
    if "scales" not in stored:
        return set()
    qweight, scales = stored["qweight"], stored["scales"]
    found = {"gptq"} if looks_like_gptq(qweight, scales) else set()
    for layout in LAYOUTS.values():
        sizes = layout.sizes(qweight, scales)
        if sizes is None or (layout.group_size(sizes[0], scales) or 1) == 1:
            continue  # a group of one input is never real: a gemv file read as gemm
        if layout.zeros_names[0] in stored or (layout.zeros_optional and "scaled_zeros" not in stored):
            found.add(layout.name)
    return found
