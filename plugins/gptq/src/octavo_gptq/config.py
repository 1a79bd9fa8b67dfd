"""The settings of GPTQ checkpoints, and the checks that tensors and settings tell the same story.

Tensors are believed before settings: shapes show the width of codes and the number of groups, `g_idx` the order of inputs,
and the zeros of a symmetric file which of the two conventions it follows. What tensors cannot show is taken from the
settings; what both say must agree, or the layer is refused with both facts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, field_validator
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
from octavo_gptq import auto_round, headers, packing, reading, recognise, writing
from octavo_gptq.packing import REFUSED, WORDS
from octavo_gptq.reading import Notices
from octavo_gptq.rules import FUSED, Rule, excluded, overriding

_HARMLESS = {
    "how the file was made": """
        act_group_aware adapter amp auto_forward_data_parallel autoround_version batch_size block_name_to_quantize
        cache_block_outputs calibration damp_auto_increment damp_percent dataset enable_minmax_tuning
        enable_norm_bias_tuning enable_quanted_input failsafe fallback gradient_accumulate_steps hessian iters
        low_gpu_mem_usage lr max_input_length minmax_lr mock_quantization model_file_base_name model_name_or_path
        model_seqlen module_name_preceding_first_block mse nsamples offload_to_disk pack_impl pad_token_id parallel_packing
        rotation scale_dtype seqlen static_groups super_bits super_group_size tokenizer true_sequential v2 v2_alpha
        v2_memory_device vram_strategy""",
    "what another loader should do": """
        cache_examples_on_gpu disable_exllama exllama_config max_batch_size use_cuda_fp16 use_exllama backend
        is_bitblas_format""",
}
_OVERRIDABLE = ("bits", "group_size", "sym", "desc_act", "checkpoint_format", "pack_dtype")


class GPTQConfig(QuantConfig):
    """GPTQ: codes of 2, 3, 4 or 8 bits in groups along the inputs, each with a scale and a zero.

    Writers: AutoGPTQ, GPTQModel, auto-round, optimum, GPTQ-for-LLaMa. Paper: Frantar et al., "GPTQ", arXiv 2210.17323.
    """

    name = "gptq"
    method_names = ("gptq_marlin", "marlin", *auto_round.METHODS)
    aliases_of: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "bits": ("w_bit",),
        "group_size": ("q_group_size",),
        "checkpoint_format": ("format",),
    }
    ignored_keys = frozenset(key for keys in _HARMLESS.values() for key in keys.split())
    suffixes = ("qweight", "qzeros", "scales", "g_idx", "bias")
    targets = ("gptq", "gptq_v2")

    bits: Literal[2, 3, 4, 8] | None = None
    """None: each layer's shape shows it."""
    group_size: int | None = None
    """Inputs that share a scale; -1 for all of a layer, None to take it from the number of rows of scales."""
    sym: bool | None = None
    """Whether zeros are 2^(bits - 1) throughout; None: the zeros show it."""
    desc_act: bool | None = None
    """Informational: the contents of g_idx decide. True: a layer without g_idx cannot be read."""
    checkpoint_format: Literal["gptq", "gptq_v2"] | None = None
    """How zeros are stored: less one ("gptq", also meant by None) or as they are."""
    pack_dtype: Literal["int8", "int16", "int32", "int64"] = "int32"
    dynamic: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Patterns of layer names, and the settings that differ there."""
    lm_head: bool = False
    """Informational, like the next: whether a layer is quantised is decided by its tensors."""
    modules_in_block_to_quantize: tuple[str, ...] | None = None
    is_marlin_format: bool = False
    method: Literal["gptq", "gptq_marlin"] | None = None
    """GPTQModel's second spelling of quant_method."""
    provider: str | None = None
    meta: dict[str, Any] | None = None
    """How the file was made; `quantizer` names the writer."""
    _rules: tuple[Rule, ...] = PrivateAttr(default=())
    _unread_in_rules: tuple[str, ...] = PrivateAttr(default=())
    _notices: Notices = PrivateAttr(default_factory=Notices)

    @field_validator("group_size")
    @classmethod
    def _check_group_size(cls, value: int | None) -> int | None:
        if value is not None and value != -1 and value < 1:
            raise ValueError("must be -1 (one group over all inputs) or positive")
        return value

    @field_validator("checkpoint_format", mode="before")
    @classmethod
    def _check_checkpoint_format(cls, value: object) -> object:
        if isinstance(value, str) and value in REFUSED:
            raise ValueError(f"{value} is not read: {REFUSED[value]}")
        return value

    @field_validator("is_marlin_format")
    @classmethod
    def _check_marlin(cls, value: bool) -> bool:
        if value:
            raise ValueError(f"marlin is not read: {REFUSED['marlin']}")
        return value

    @field_validator("pack_dtype", mode="before")
    @classmethod
    def _check_pack_dtype(cls, value: object) -> object:
        return value.removeprefix("torch.") if isinstance(value, str) else value

    @field_validator("dynamic", mode="before")
    @classmethod
    def _check_dynamic(cls, value: object) -> object:
        if isinstance(value, Mapping):  # a refusal needs no settings: {}, null and false are written
            return {key: {} if settings in (None, False) else settings for key, settings in value.items()}
        return value

    @field_validator("modules_in_block_to_quantize", mode="before")
    @classmethod
    def _flatten_modules(cls, value: object) -> object:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(n for item in value for n in (item if isinstance(item, list | tuple) else (item,)))
        return value

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._rules = tuple(self._rule(key, settings) for key, settings in self.dynamic.items())

    def _rule(self, key: str, settings: Mapping[str, Any]) -> Rule:
        where = f"dynamic: {key}"
        own = type(self).parse(QuantSource({k: v for k, v in settings.items() if k != "dynamic"}, where))
        values = {name: getattr(own, name) for name in own.model_fields_set if name in _OVERRIDABLE}
        others = sorted({*own.unread_keys, *(own.model_fields_set - set(_OVERRIDABLE)), *({"dynamic"} & set(settings))})
        self._unread_in_rules = (*self._unread_in_rules, *(f"{where}: {name}" for name in others))
        try:
            return Rule.of(key, values)
        except ValueError as error:
            raise CheckpointError(f"gptq: {where} cannot be used: {error}") from None

    @classmethod
    def goldens(cls) -> Sequence[Golden]:
        from octavo_gptq.goldens import goldens

        return goldens()

    # --- settings

    @classmethod
    def translate(cls, source: QuantSource) -> QuantSource | None:
        if str(source.raw.get("quant_method")).lower() not in auto_round.METHODS:
            return None
        packed_as = auto_round.packing(source)
        if packed_as == "awq":
            return auto_round.as_awq(source)
        return auto_round.as_compressed_tensors(source) if packed_as == "compressed-tensors" else None

    @classmethod
    def parse(cls, source: QuantSource) -> Self:
        method = str(source.raw.get("quant_method", "gptq")).lower()
        if method in auto_round.METHODS:
            source = auto_round.as_gptq(source)
        if method == "marlin":
            raise CheckpointError("gptq: quant_method marlin is not read", file=source.where, hint=REFUSED["marlin"])
        raw = dict(source.raw)
        if (zero_point := raw.pop("zero_point", None)) is not None:
            if not isinstance(zero_point, bool) or raw.get("sym", not zero_point) not in (None, not zero_point):
                raise CheckpointError(
                    "gptq: zero_point is true or false, and the opposite of sym",
                    file=source.where,
                    found=f"sym = {raw.get('sym')!r}, zero_point = {zero_point!r}",
                )
            raw["sym"] = not zero_point
        try:
            config = super().parse(QuantSource(raw, source.where))
        except CheckpointError as error:
            if error.file == source.where:
                raise
            raise CheckpointError(f"gptq: cannot use setting 'dynamic'\n{error}", file=source.where) from None
        config._unread_keys = (*config._unread_keys, *config._unread_in_rules)
        return config

    def settings(self) -> dict[str, Any]:
        values = self.model_dump(mode="json", exclude_defaults=True)
        if not self.dynamic:
            values.pop("dynamic", None)
        return {"quant_method": "gptq", **values, "lm_head": self.lm_head, "pack_dtype": self.pack_dtype}

    def for_layer(self, layer: str) -> Self:
        """The settings of one layer: these, and what the first rule that matches its name changes."""
        changes = overriding(self._rules, layer)
        return self.model_copy(update=dict(changes)) if changes else self

    # --- recognising

    @classmethod
    def detect(cls, source: QuantSource | None, tensors: Mapping[str, TensorInfo]) -> bool:
        return recognise.detect(source, tensors)

    @classmethod
    def infer(cls, tensors: Mapping[str, TensorInfo]) -> Mapping[str, Any]:
        return recognise.infer(tensors)

    # --- checking headers

    def spec_for(self, layer: LinearLayer, stored: Mapping[str, TensorInfo]) -> WeightSpec | None:
        headers.refuse_other_layouts(layer, stored)
        quantised = "qweight" in stored
        self._report_lists(layer, quantised, "weight" in stored)
        if not quantised:
            if orphans := [name for name in ("qzeros", "scales", "g_idx") if name in stored]:
                raise headers.missing(layer, "qweight", stored[orphans[0]])
            return None
        own = self.for_layer(layer.name)
        word = WORDS[own.pack_dtype]
        bits = headers.width(layer, stored, own.bits, word)
        headers.check(layer, stored, bits, word)
        rows = stored["scales"].shape[0]
        if "g_idx" not in stored and own.desc_act and rows > 1:
            hint = "set desc_act to false if the inputs lie in their own order"
            raise headers.missing(layer, "g_idx", stored["qweight"], f"desc_act is true, so the order is lost; {hint}")
        act_order = "g_idx" in stored and rows > 1 and own.desc_act is not False
        group = own._group(layer, rows, stored["scales"].file)
        return WeightSpec(f"uint{bits}", (1, group), has_zeros=True, act_order=act_order)

    def _group(self, layer: LinearLayer, rows: int, file: str | None = None) -> int:
        """The layer's group size, -1 for one group; raises CheckpointError where settings and scales disagree."""
        inputs, size = layer.in_features, self.group_size
        if size is not None and size != -1 and -(-inputs // size) == rows:
            return -1 if rows == 1 else size
        implied = headers.group_size(inputs, rows)
        if size is not None and size != -1:
            raise CheckpointError(
                f"{layer.name}: group_size in the settings contradicts the scales",
                file=file,
                tensor=f"{layer.name}.scales",
                expected=f"group_size {size}, which is {-(-inputs // size)} rows for {inputs} inputs",
                found=f"{rows} rows, which is group_size {implied or 'unknown'}",
                hint=None if implied is None else f"set group_size to {implied} if the file is intact",
            )
        if implied is None:
            raise CheckpointError(
                f"{layer.name}: the number of groups implies no group_size, and the settings say {size or 'none'}",
                file=file,
                tensor=f"{layer.name}.scales",
                found=f"{rows} rows for {inputs} inputs",
                hint="set group_size in the quantization settings",
            )
        if size == -1 and rows > 1:
            text = "%s: group_size is -1, but scales have %d rows: read in groups of %d inputs, and so all such layers"
            self._notices.once("group_size", text, layer.name, rows, implied)
        return implied

    def _report_lists(self, layer: LinearLayer, quantised: bool, plain: bool) -> None:
        """Tells once for each list of the settings that a layer contradicts it. Lists decide nothing."""
        name, listed = layer.name, self.modules_in_block_to_quantize
        text = "%s: %s, but it is stored %s: the tensors decide, here and in all layers"
        stored = "quantised" if quantised else "plain"
        if quantised and excluded(self._rules, name):
            self._notices.once("dynamic", text, name, "dynamic says that it is not quantised", stored)
        last = name.rpartition(".")[2]
        if last == "lm_head":
            stated = "lm_head" in self.model_fields_set and not overriding(self._rules, name)
            if stated and self.lm_head != quantised and (quantised or plain):
                self._notices.once("lm_head", text, name, f"lm_head is {self.lm_head}".lower(), stored)
        elif listed is not None and any(part.isdigit() for part in name.split(".")):
            members = {m for item in listed for m in (item, *FUSED.get(item.rpartition(".")[2], ()))}
            fused = {whole for whole, parts in FUSED.items() if last in parts}
            named = any(member in name for member in members) or bool(fused & {m.rpartition(".")[2] for m in members})
            if named != quantised and (quantised or plain):
                says = f"modules_in_block_to_quantize {'names' if named else 'does not name'} it"
                self._notices.once("modules", text, name, says, stored)

    # --- bits

    def canonicalise(self, layer: LinearLayer, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        own, qweight, scales = self.for_layer(layer.name), tensors["qweight"], tensors["scales"]
        bits = packing.bits_of(qweight.shape[0], layer.in_features, qweight.dtype)
        assert bits is not None, "spec_for has checked the shape"
        group = own._group(layer, scales.shape[0])
        order = reading.order(layer, tensors.get("g_idx"), scales.shape[0], self._notices)
        zeros = reading.zeros(own, layer, tensors["qzeros"], bits, self._notices)
        codes = packing.unpack(qweight.T, bits)
        if own.sym is False:
            reading.question_label(own, layer, codes, zeros, bits, self._notices)
        return QuantizedWeight(
            WeightSpec(f"uint{bits}", (1, group), has_zeros=True, act_order=order is not None),
            codes,
            scales.T.contiguous(),
            zeros.T.float().contiguous(),
            order,
            bias=tensors.get("bias"),
        ).without_trivial_order()

    def serialise(self, layer: LinearLayer, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Packs a weight. Zeros follow `checkpoint_format`, and g_idx is always written: some readers demand it."""
        weight.check(layer)
        try:
            return writing.pack_layer(self.for_layer(layer.name), layer, weight)
        except ValueError as error:
            raise CheckpointError(f"{layer.name}: GPTQ cannot hold this weight: {error}") from None

    # --- making checkpoints

    @classmethod
    def online_spec(cls, layer: LinearLayer) -> WeightSpec | None:
        return writing.online_spec(layer)

    @classmethod
    def for_weights(cls, target: str, layers: Mapping[LinearLayer, LayerFacts]) -> Self:
        return cls(**writing.settings_for(target, layers))
