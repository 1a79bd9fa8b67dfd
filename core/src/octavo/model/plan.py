"""What a checkpoint is, judged by its headers: format, layers, kernels, bytes. Loading follows it, `inspect` prints it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import filter as matching

import torch

from octavo.config import EngineConfig
from octavo.errors import CheckpointError, ConfigError
from octavo.model.architectures import DecoderConfig, declared_dtype, decoder_config
from octavo.model.checkpoint import Checkpoint
from octavo.plugins import Registry
from octavo.quant.config import QuantConfig, TensorInfo
from octavo.quant.detection import detect_format
from octavo.quant.linear import DenseMethod, LinearRequest, ReferenceMethod, Selection, select_linear
from octavo.quant.online import check_schemes, online_scheme, online_spec
from octavo.quant.quantizer import rounded_spec
from octavo.quant.weight import CODES, FLOAT, LinearLayer, WeightSpec

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


@dataclass(frozen=True, slots=True)
class LinearReport:
    """One line of the kernel table. `num_bytes` is what the layer takes in memory, or in the file for a plan."""

    layer: str
    spec: str
    kernel: str
    num_bytes: int
    refusals: tuple[tuple[str, str], ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linears that share an input, computed as one where their weights allow: "...self_attn.q_proj|k_proj|v_proj"."""

    label: str
    layers: tuple[LinearLayer, ...]

    @classmethod
    def of(cls, module: str, sizes: Mapping[str, int], in_features: int) -> LinearGroup:
        layers = tuple(LinearLayer(f"{module}.{name}", in_features, size) for name, size in sizes.items())
        return cls(f"{module}.{'|'.join(sizes)}", layers)


@dataclass(frozen=True, slots=True)
class LayerNames:
    """One decoder layer as the checkpoint spells it: linears and norms by their role in `DecoderLayer`.

    `divisor` is the stored tensor (intermediate,) by which the activation's output is divided, if there is one.
    """

    linears: dict[str, LinearGroup]
    norms: dict[str, tuple[str, int]]  # (tensor name, size)
    attention: str
    mlp: str
    divisor: str | None = None

    @classmethod
    def of(cls, config: DecoderConfig, prefix: str, index: int) -> LayerNames:
        layer = f"{prefix}layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        linears = {
            "qkv": LinearGroup.of(attention, {"q_proj": query, "k_proj": key, "v_proj": key}, hidden),
            "o": LinearGroup.of(attention, {"o_proj": hidden}, query),
            "gate_up": LinearGroup.of(mlp, {"gate_proj": inner, "up_proj": inner}, hidden),
            "down": LinearGroup.of(mlp, {"down_proj": hidden}, inner),
        }
        norms = {
            "input_norm": (f"{layer}.input_layernorm.weight", hidden),
            "post_attention_norm": (f"{layer}.post_attention_layernorm.weight", hidden),
        }
        if config.qk_norm:
            norms["q_norm"] = (f"{attention}.q_norm.weight", config.head_dim)
            norms["k_norm"] = (f"{attention}.k_norm.weight", config.head_dim)
        return cls(linears, norms, attention, mlp)


@dataclass(slots=True)
class ModelPlan:
    """What loading a checkpoint will do. Made from headers; `linears` and bytes are filled by `plan_model`."""

    checkpoint: Checkpoint
    config: DecoderConfig
    quant: QuantConfig | None
    dtype: torch.dtype
    settings: EngineConfig
    registry: Registry
    prefix: str = "model."  # what all tensor names but the head's begin with
    linears: list[LinearReport] = field(default_factory=list)
    embedding_bytes: int = 0
    other_bytes: int = 0  # norms and whatever else there is
    resident_bytes: int = 0  # an estimate: floats in the compute type, a byte for each code

    @classmethod
    def of(cls, settings: EngineConfig, registry: Registry, checkpoint: Checkpoint) -> ModelPlan:
        """Reads the settings of a checkpoint; raises CheckpointError or ConfigError for what they get wrong."""
        quant = detect_format(
            checkpoint.quant_sources,
            checkpoint.without(settings.ignore_tensors),
            registry.quant_configs,
            settings.quantization,
            registry.failure_notes(),
            float_too=bool(settings.quantize_weights),
        )
        check_schemes(settings.online_schemes.values(), registry.quant_configs)
        config = decoder_config(checkpoint.config, registry.architectures)
        if settings.dtype != "auto":
            dtype = DTYPES[settings.dtype]
        elif registry.platform.device == "cpu":
            dtype = torch.float32
        else:
            dtype = DTYPES[declared_dtype(checkpoint.config) or "bfloat16"]
        ends = [name for name in checkpoint.modules if name.rpartition(".")[2] == "embed_tokens"]
        prefix = ends[0].removesuffix("embed_tokens") if len(ends) == 1 else "model."
        return cls(checkpoint, config, quant, dtype, settings, registry, prefix)

    @property
    def stored_bytes(self) -> int:
        return self.embedding_bytes + self.other_bytes + sum(report.num_bytes for report in self.linears)

    @property
    def kv_cache(self) -> str | None:
        """How the checkpoint wants K and V stored; None where it does not say."""
        return None if self.quant is None else self.quant.kv_cache

    @property
    def embedding(self) -> LinearLayer:
        """The embedding, as the linear layer whose weight has its shape."""
        return LinearLayer(f"{self.prefix}embed_tokens", self.config.hidden_size, self.config.vocab_size)

    @property
    def tied_head(self) -> LinearLayer:
        """The head that an embedding serves as."""
        return LinearLayer("lm_head", self.config.hidden_size, self.config.vocab_size)

    @property
    def head(self) -> LinearLayer | None:
        """The stored output head; None where the embedding serves as one."""
        modules = ("lm_head", f"{self.prefix.removesuffix('model.')}lm_head", f"{self.prefix}lm_head")
        name = next((module for module in modules if self.checkpoint.stored(module)), None)
        return None if name is None else LinearLayer(name, self.config.hidden_size, self.config.vocab_size)

    @property
    def groups(self) -> list[LinearGroup]:
        """All linears, the stored head last."""
        groups = [g for i in range(self.config.num_layers) for g in self.layer_names(i).linears.values()]
        return groups if (head := self.head) is None else [*groups, LinearGroup(head.name, (head,))]

    def layer_names(self, index: int) -> LayerNames:
        names = LayerNames.of(self.config, self.prefix, index)
        tails = () if self.quant is None else self.quant.activation_scales
        divisors = [name for tail in tails if (name := f"{names.mlp}.{tail}") in self.checkpoint.tensors]
        return replace(names, divisor=divisors[0]) if divisors else names

    @property
    def vectors(self) -> dict[str, int]:
        """Sizes, by tensor name, of all that is neither a linear nor the embedding."""
        sizes = {f"{self.prefix}norm.weight": self.config.hidden_size}
        for names in map(self.layer_names, range(self.config.num_layers)):
            sizes |= dict(names.norms.values())
            if names.divisor is not None:
                sizes[names.divisor] = self.config.intermediate_size
        return sizes

    def is_divisor(self, name: str) -> bool:
        """Whether a tensor is one by which an activation's output is divided."""
        return self.quant is not None and name.endswith(tuple(f".{tail}" for tail in self.quant.activation_scales))

    def spec(self, layer: LinearLayer) -> WeightSpec:
        """What a layer's weight will be: as stored, or as it is quantised at load."""
        stored = self.stored_spec(layer)
        wanted = self.online_spec(layer) if stored.is_float else None
        return stored if wanted is None else rounded_spec(wanted)

    def online_spec(self, layer: LinearLayer) -> WeightSpec | None:
        """What `--quantize-weights` makes of a layer that is stored as floats; None: it stays."""
        if (scheme := self._online_scheme(layer)) is None:
            return None
        spec = online_spec(layer, scheme, self.registry.quant_configs)
        return replace(spec, activation=None) if spec is not None and layer == self.embedding else spec

    def _online_scheme(self, layer: LinearLayer) -> str | None:
        return online_scheme(layer, self._short_name(layer), self.settings.online_schemes)

    def _short_name(self, layer: LinearLayer) -> str:
        """A layer's name as it is in a model that is not part of another: "layers.0.mlp.up_proj", "lm_head"."""
        return "lm_head" if layer == self.head else layer.name.removeprefix(self.prefix)

    def stored_spec(self, layer: LinearLayer) -> WeightSpec:
        """What is stored for a layer; raises CheckpointError where it is neither quantised nor plain."""
        stored = self.checkpoint.stored(layer.name)
        if layer == self.embedding and "bias" in stored:
            raise CheckpointError("an embedding has no bias", file=stored["bias"].file, tensor=stored["bias"].name)
        if self.quant is not None and (spec := self.quant.spec_for(layer, stored)) is not None:
            if layer == self.embedding and (spec.activation is not None or spec.code not in CODES):
                one = next(iter(stored.values()))
                raise CheckpointError(
                    f"{layer.name}: rows of {spec} cannot be looked up", file=one.file, tensor=one.name
                )
            return spec
        info = stored.get("weight")
        if info is None:
            raise CheckpointError("a tensor that the model needs is missing", tensor=f"{layer.name}.weight")
        self.check_plain(info, (layer.out_features, layer.in_features))
        if (bias := stored.get("bias")) is not None:
            self.check_plain(bias, (layer.out_features,))
        return FLOAT

    def read_suffixes(self, layer: LinearLayer) -> list[str]:
        """Last name parts of the tensors that loading reads for a layer; raises what `stored_spec` raises."""
        plain = self.quant is None or self.stored_spec(layer).is_float
        suffixes = ("weight", "bias") if self.quant is None or plain else self.quant.suffixes
        return [suffix for suffix in suffixes if suffix in self.checkpoint.stored(layer.name)]

    @staticmethod
    def check_plain(info: TensorInfo, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError unless a tensor holds unquantised numbers in a shape that config.json implies."""
        float8 = info.dtype.is_floating_point and info.dtype.itemsize == 1
        if info.shape != shape or not info.dtype.is_floating_point or float8:
            raise CheckpointError(
                "a plain tensor does not have the shape and type that config.json implies",
                file=info.file,
                tensor=info.name,
                expected=f"{shape}, floating",
                found=f"{info.shape}, {info.dtype}",
                hint="it is stored as float8, but no scales are" if float8 else None,
            )

    def check_complete(self) -> None:
        """Raises one CheckpointError that lists all tensors that the model needs and the file lacks."""
        tensors, missing = self.checkpoint.tensors, []
        names = [f"{self.prefix}norm.weight"]
        if not self.checkpoint.stored(self.embedding.name):
            names.append(f"{self.embedding.name}.weight")
        for index in range(self.config.num_layers):
            layer = self.layer_names(index)
            names += [name for name, _ in layer.norms.values()]
            for linear in (member for group in layer.linears.values() for member in group.layers):
                if not self.checkpoint.stored(linear.name).keys() - {"bias"}:
                    missing.append(f"{linear.name}.weight")
                if linear.name.rpartition(".")[2] in self.config.biases:
                    names.append(f"{linear.name}.bias")
        if self.head is None and not self.config.tie_word_embeddings:
            names.append("lm_head.weight")
        missing += [name for name in names if name not in tensors]
        if missing:
            shown = ", ".join(sorted(missing)[:8]) + (f", and {len(missing) - 8} more" if len(missing) > 8 else "")
            shape = (self.config.vocab_size, self.config.hidden_size)
            embedding = f"{self.embedding.name}.weight"
            alike = [n for n, t in tensors.items() if t.shape == shape and n != embedding] if self.head is None else []
            raise CheckpointError(
                f"{len(missing)} tensor(s) that the model needs are missing",
                file=str(self.checkpoint.path),
                found=shown,
                hint=f"{alike[0]} has the shape of a head; octavo looks for lm_head.weight" if alike else None,
            )

    def parts(self, group: LinearGroup) -> list[LinearGroup]:
        """The group as one, or each member by itself where their specs differ."""
        if len({self.spec(layer) for layer in group.layers}) == 1:
            return [group]
        return [LinearGroup(layer.name, (layer,)) for layer in group.layers]

    def planned_request(self, group: LinearGroup) -> LinearRequest:
        """What a group whose members have one spec will ask of a kernel."""
        has_bias = any("bias" in self.checkpoint.stored(layer.name) for layer in group.layers)
        return self.request(group.label, self.spec(group.layers[0]), group.layers, has_bias)

    def request(
        self, label: str, spec: WeightSpec, layers: Sequence[LinearLayer], has_bias: bool, shares_weight: bool = False
    ) -> LinearRequest:
        return LinearRequest(
            label,
            spec,
            layers[0].in_features,
            sum(layer.out_features for layer in layers),
            has_bias,
            self.dtype,
            self.registry.platform,
            shares_weight,
            self.settings.cpu_activations,
        )

    def select(self, request: LinearRequest) -> Selection:
        """The kernel for a layer; raises NoKernelError with all reasons, ConfigError for an impossible wish."""
        return select_linear(
            request,
            self.registry.linear_methods,
            self.settings.linear_kernels,
            self.registry.select_linear,
            self.registry.failure_notes(),
        )

    def fill(self) -> None:
        """Chooses kernels by the headers' specs and counts bytes."""
        for group in self.groups:
            parts = self.parts(group)
            for part in parts:
                self._report(part, "not fused: members are stored differently" if len(parts) > 1 else "")
        embedding = self.spec(self.embedding)
        if self.head is None:  # its bytes in the file are the embedding's
            own = self.online_spec(self.tied_head) if self.stored_spec(self.embedding).is_float else None
            spec = embedding if own is None else rounded_spec(own)
            request = self.request(self.tied_head.name, spec, [self.tied_head], False, shares_weight=spec == embedding)
            choice = self.select(request)
            self.linears.append(
                LinearReport(self.tied_head.name, str(spec), choice.method.name, 0, choice.refusals, "the embedding")
            )
            self.resident_bytes += choice.method.planned_bytes(request) if spec != embedding else 0
        kernel = DenseMethod if embedding.is_float else ReferenceMethod  # they keep a weight as the embedding does
        self.resident_bytes += kernel.planned_bytes(self.request("", embedding, [self.embedding], False))
        listed = {layer.name for group in self.groups for layer in group.layers} | {self.embedding.name}
        others = [info for name, info in self.checkpoint.tensors.items() if name.rpartition(".")[0] not in listed]
        self.other_bytes = sum(info.num_bytes for info in others)
        self.resident_bytes += sum(math.prod(info.shape) * self.dtype.itemsize for info in others)
        self.embedding_bytes = self.checkpoint.stored_bytes(self.embedding.name)
        self.check_settings(self.linears)

    def check_settings(self, linears: Sequence[LinearReport]) -> None:
        """Reports settings that change nothing: a format that none of `linears` is in, patterns that match nothing."""
        if self.quant is not None and self.kv_cache is None and all(report.spec == str(FLOAT) for report in linears):
            text = f"the settings say that the checkpoint is '{self.quant.name}', but not one layer is quantised"
            if self.settings.quantization is not None:
                raise ConfigError(f"--quantization {self.settings.quantization} was given and {text}")
            logger.warning("%s: %s", self.checkpoint.path, text)
        layers = [name for group in self.groups for name in (group.label, *(layer.name for layer in group.layers))]
        stored = self._float_layers() if self.settings.quantize_weights else []
        floats = [name for layer in stored for name in (layer.name, self._short_name(layer))]
        if left := [layer for layer in stored if self._online_scheme(layer) and self.online_spec(layer) is None]:
            logger.warning(
                "--quantize-weights: '%s' cannot hold %s (%d inputs, %d outputs), it stays as it is%s",
                self._online_scheme(left[0]),
                left[0].name,
                left[0].in_features,
                left[0].out_features,
                f", and {len(left) - 1} other layer(s)" if len(left) > 1 else "",
            )
        for option, patterns, names in (
            ("linear-kernels", self.settings.linear_kernels, [*layers, "lm_head"]),
            ("quantize-weights", filter(None, self.settings.quantize_weights), floats),
            ("ignore-tensors", self.settings.ignore_tensors, list(self.checkpoint.tensors)),
        ):
            for pattern in patterns:
                if not matching(names, pattern):
                    logger.warning("--%s: nothing matches the pattern '%s'", option, pattern)

    def _float_layers(self) -> list[LinearLayer]:
        """The layers that `--quantize-weights` may change: those that are stored as floats, and a tied head."""
        layers = [*(layer for group in self.groups for layer in group.layers), self.embedding]
        floats = [layer for layer in layers if self.stored_spec(layer).is_float]
        return [*floats, self.tied_head] if self.head is None and self.embedding in floats else floats

    def _report(self, group: LinearGroup, note: str) -> None:
        request = self.planned_request(group)
        choice = self.select(request)
        self.resident_bytes += choice.method.planned_bytes(request)
        num_bytes = sum(self.checkpoint.stored_bytes(layer.name) for layer in group.layers)
        report = LinearReport(group.label, str(request.spec), choice.method.name, num_bytes, choice.refusals, note)
        self.linears.append(report)


def plan_model(settings: EngineConfig, registry: Registry, checkpoint: Checkpoint) -> ModelPlan:
    """What loading would do, from headers alone; raises what loading would raise for anything that headers show."""
    plan = ModelPlan.of(settings, registry, checkpoint)
    plan.check_complete()
    plan.fill()
    return plan


def end_token_ids(checkpoint: Checkpoint, vocab_size: int) -> frozenset[int]:
    """All end tokens that config.json and generation_config.json name; what is no token is reported."""
    config = checkpoint.config
    stated: list[object] = []
    for source in (config, config.get("text_config"), checkpoint.json("generation_config.json")):
        value = source.get("eos_token_id") if isinstance(source, dict) else None
        stated += value if isinstance(value, list) else [] if value is None else [value]
    found = [value for value in stated if type(value) is int and 0 <= value < vocab_size]
    if unusable := [repr(value) for value in stated if value not in found]:
        logger.warning("eos_token_id: not a token of the model: %s", ", ".join(unusable))
    return frozenset(found)
