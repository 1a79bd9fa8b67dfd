"""From a checkpoint to a decoder, one layer at a time: read, canonicalise, fuse, choose a kernel, prepare, forget.

Modules are built from their weights, so nothing uninitialised can ever compute, and peak memory is the final size plus one
layer. Every tensor of the file is accounted for.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.config import EngineConfig
from octavo.errors import CheckpointError, OctavoError, PluginError, ask
from octavo.model.checkpoint import Checkpoint
from octavo.model.decoder import Decoder, DecoderLayer, SeparateLinears
from octavo.model.embedding import Embedding
from octavo.model.ops import FusedOps
from octavo.model.plan import LinearGroup, LinearReport, ModelPlan
from octavo.model.rope import RotaryEmbedding
from octavo.plugins import Registry
from octavo.quant.detection import QUANT_SUFFIXES
from octavo.quant.kv_scales import (
    KV_SCALE_FILE,
    KVScales,
    complete_kv_scales,
    looks_like_kv_scale,
    read_kv_scales,
    scales_from_file,
)
from octavo.quant.linear import (
    DenseMethod,
    DequantizedMethod,
    LinearMethod,
    LinearRequest,
    ReferenceMethod,
    resident_bytes,
)
from octavo.quant.online import quantize_online
from octavo.quant.self_test import self_test
from octavo.quant.weight import LinearLayer, QuantizedWeight

logger = logging.getLogger(__name__)

_OWN_METHODS = (DenseMethod, ReferenceMethod, DequantizedMethod)


@dataclass(slots=True)
class LoadedModel:
    """A decoder ready to run, and how it came to be. `linears` is the kernel table.

    `kv_scales` are the checkpoint's calibrated scales by layer, empty where it holds none.
    """

    decoder: Decoder
    plan: ModelPlan
    linears: list[LinearReport]
    kv_scales: tuple[KVScales, ...] = ()


def load_model(settings: EngineConfig, registry: Registry, checkpoint: Checkpoint) -> LoadedModel:
    """Loads all weights; raises CheckpointError, NoKernelError or ConfigError, each naming the tensor or layer."""
    plan = ModelPlan.of(settings, registry, checkpoint)
    plan.check_complete()
    config = plan.config
    ops = _choose_ops(registry, plan.dtype)
    loader = _Loader(plan, ops)
    with torch.inference_mode(), progress("loading layers", config.num_layers, settings.disable_progress) as advance:
        embedding = loader.embedding()
        layers = []
        for index in range(config.num_layers):
            layers.append(loader.layer(index))
            advance()
        final_norm = loader.vector(f"{plan.prefix}norm.weight", config.hidden_size)
        head = loader.head(embedding)
        kv_scales = load_kv_scales(plan)
        account(plan, checkpoint.unread(settings.ignore_tensors))
        plan.check_settings(loader.reports)
        _tell_slow(loader.reports, registry, settings.linear_kernels)
        positions = min(settings.max_model_len or config.max_positions, config.max_positions)
        rope = RotaryEmbedding(config.rope, positions, registry.platform.device)
        decoder = Decoder(config, embedding, layers, final_norm, head, ops, rope)
    checkpoint.close()
    return LoadedModel(decoder, plan, loader.reports, kv_scales)


def _tell_slow(linears: Sequence[LinearReport], registry: Registry, wishes: Mapping[str, str]) -> None:
    """Says once that quantised layers run on the reference kernel, unless the user asked for it."""
    slow = [report for report in linears if report.kernel == ReferenceMethod.name]
    if slow and ReferenceMethod.name not in wishes.values():
        remedy = "octavo inspect says why no other took them"
        if registry.platform.device == "cpu" and not any(
            p.name == "cpu" and p.state == "loaded" for p in registry.plugins
        ):
            remedy = "octavo-cpu (plugins/cpu), which is not in use here, has native ones"
        logger.warning("%d layer(s) run on the reference kernel, which is exact and slow; %s", len(slow), remedy)


@dataclass(slots=True)
class _Loader:
    """The parts of a decoder, read and prepared as its plan says."""

    plan: ModelPlan
    ops: FusedOps
    reports: list[LinearReport] = field(default_factory=list)
    tested: set[object] = field(default_factory=set)  # kinds of prepared layers that passed the self-test

    @property
    def _device(self) -> str:
        return self.plan.registry.platform.device

    def vector(self, name: str, size: int) -> Tensor:
        """A norm or a divisor in the compute type, on the device; checked."""
        return stored_vector(self.plan, name, size).to(self._device, self.plan.dtype)

    def weight(self, layer: LinearLayer) -> QuantizedWeight:
        """A layer's weight in canonical form, checked; quantised if the settings want it."""
        return self._rounded(layer, stored_weight(self.plan, layer))

    def _rounded(self, layer: LinearLayer, weight: QuantizedWeight) -> QuantizedWeight:
        if weight.spec.is_float and (spec := self.plan.online_spec(layer)) is not None:
            return quantize_online(weight, spec)
        return weight

    def linear(self, group: LinearGroup) -> nn.Module:
        """The prepared module of a group: one kernel where the weights can be stacked, else one a member."""
        weights = [self.weight(layer) for layer in group.layers]
        refusals = [weights[0].why_not_concat(other) for other in weights[1:]]
        reason = next((r for r in refusals if r is not None), None)
        if reason is None:
            first, *others = weights
            return self._prepare(group.label, group.layers, first.concat(others) if others else first)
        parts = [
            self._prepare(layer.name, [layer], weight, f"not fused: {reason}")
            for layer, weight in zip(group.layers, weights, strict=True)
        ]
        return SeparateLinears(parts)

    def _prepare(
        self, label: str, layers: Sequence[LinearLayer], weight: QuantizedWeight, note: str = "", shares: bool = False
    ) -> nn.Module:
        request = self.plan.request(label, weight.spec, layers, weight.bias is not None, shares)
        choice = self.plan.select(request)
        with blaming(f"kernel '{choice.method.name}' cannot prepare {label} ({weight.spec})"):
            weight = weight.to(self._device)
            method = choice.method(weight, request).eval()
            self._test(method, weight, request)
        self.reports.append(
            LinearReport(label, str(weight.spec), method.name, resident_bytes(method), choice.refusals, note)
        )
        return method

    def layer(self, index: int) -> DecoderLayer:
        names = self.plan.layer_names(index)
        parts: dict[str, Any] = {role: self.vector(name, size) for role, (name, size) in names.norms.items()}
        parts |= {role: self.linear(group) for role, group in names.linears.items()}
        inner = self.plan.config.intermediate_size
        scale = None if names.divisor is None else self.vector(names.divisor, inner)
        return DecoderLayer(self.plan.config, index, self.ops, **parts, activation_scale=scale)

    def _test(self, method: LinearMethod, weight: QuantizedWeight, request: LinearRequest) -> None:
        """The self-test, once for each kernel, kind of weight and length of input; core's own methods need none."""
        kind = (type(method), request.spec, request.in_features, request.has_bias)
        if self.plan.settings.self_test and kind not in self.tested and type(method) not in _OWN_METHODS:
            self_test(method, weight, request)
            self.tested.add(kind)

    def embedding(self) -> Embedding:
        return self.ops.embedding(self.weight(self.plan.embedding).to(self._device), self.plan.dtype)

    def head(self, embedding: Embedding) -> nn.Module:
        """The output head: a stored one, whatever config.json says, else the embedding."""
        layer = self.plan.head
        if layer is None:
            return self._tied_head(embedding)
        stored = stored_weight(self.plan, layer)
        if stored.spec.is_float and stored.bias is None and self._is_embedding(stored.codes, embedding):
            return self._tied_head(embedding)
        if self.plan.config.tie_word_embeddings:
            logger.warning(
                "config.json says that the head is tied, but %s differs from the embedding: it is used", layer.name
            )
        return self._prepare(layer.name, [layer], self._rounded(layer, stored))

    def _is_embedding(self, head: Tensor, embedding: Embedding) -> bool:
        """Whether a stored head holds the embedding's numbers."""
        table = embedding.weight.codes
        if not embedding.weight.spec.is_float:
            if not self.plan.stored_spec(self.plan.embedding).is_float:
                return False
            table = self.plan.checkpoint.read(f"{self.plan.embedding.name}.weight")
        return torch.equal(head.to(table), table)

    def _tied_head(self, embedding: Embedding) -> nn.Module:
        layer, weight = self.plan.head or self.plan.tied_head, embedding.weight
        spec = self.plan.online_spec(layer)
        if spec is not None and spec != weight.spec and self.plan.stored_spec(self.plan.embedding).is_float:
            weight = quantize_online(stored_weight(self.plan, self.plan.embedding), spec)
        method = self._prepare(layer.name, [layer], weight, "the embedding", shares=weight is embedding.weight)
        mine = {buffer.data_ptr() for buffer in method.buffers()}
        if any(buffer.data_ptr() in mine for buffer in embedding.buffers()):
            self.reports[-1] = replace(self.reports[-1], num_bytes=0)
        return method


def stored_vector(plan: ModelPlan, name: str, size: int) -> Tensor:
    """A norm, or a divisor of the activation's output, (size,) as the checkpoint holds it, checked."""
    tensor, info = plan.checkpoint.read(name), plan.checkpoint.tensors[name]
    plan.check_plain(info, (size,))
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError("a tensor holds values that are NaN or infinite", file=info.file, tensor=name)
    if plan.is_divisor(name) and not bool(tensor.to(plan.dtype).all()):
        raise CheckpointError("the output of an activation would be divided by 0", file=info.file, tensor=name)
    return tensor


def stored_weight(plan: ModelPlan, layer: LinearLayer) -> QuantizedWeight:
    """A layer's weight in canonical form as the checkpoint holds it, checked."""
    checkpoint, quant = plan.checkpoint, plan.quant
    spec = plan.stored_spec(layer)
    tensors = {suffix: checkpoint.read(f"{layer.name}.{suffix}") for suffix in plan.read_suffixes(layer)}
    try:
        if spec.is_float or quant is None:
            weight = QuantizedWeight.from_float(tensors["weight"], tensors.get("bias"))
        else:
            with blaming(f"format '{quant.name}' cannot read {layer.name}"):
                weight = quant.canonicalise(layer, tensors)
        weight.check(layer)
        weight = weight.without_trivial_order()
    except CheckpointError as error:
        if error.file is not None:
            raise
        raise CheckpointError(f"{error}\n  file: {next(iter(checkpoint.stored(layer.name).values())).file}") from None
    return weight


def load_kv_scales(plan: ModelPlan) -> tuple[KVScales, ...]:
    """Calibrated scales of the KV cache, one a layer; raises CheckpointError where one is bad or only some layers have them."""
    checkpoint, config = plan.checkpoint, plan.config
    tensors = checkpoint.without(plan.settings.ignore_tensors)
    modules = [plan.layer_names(index).attention for index in range(config.num_layers)]
    scales = [read_kv_scales(module, config.kv_heads, tensors, checkpoint.read) for module in modules]
    if not any(scales):
        scales = list(scales_from_file(checkpoint.json(KV_SCALE_FILE), config.num_layers))
    found = complete_kv_scales(modules, scales, tensors)
    if not found and (plan.kv_cache or "").startswith("fp8"):
        logger.warning(
            "%s: the settings ask for a KV cache in %s, but no scales of K and V are stored",
            checkpoint.path,
            plan.kv_cache,
        )
    return found


def account(plan: ModelPlan, unread: Sequence[str]) -> None:
    """Complains about tensors that nobody read: an error where they look quantised or lie in the decoder, else a warning."""
    formats = set() if plan.quant is None else {*plan.quant.suffixes} - {"weight", "bias"}
    suffixes = {suffix.lower() for suffix in QUANT_SUFFIXES | formats}
    quantised = [name for name in unread if name.rpartition(".")[2].lower() in suffixes or looks_like_kv_scale(name)]
    decoder = tuple(f"{plan.prefix}{part}." for part in ("embed_tokens", "layers", "norm"))
    lost = quantised or [name for name in unread if name.startswith(decoder)]
    if lost:
        pattern = f"*.{lost[0].rpartition('.')[2]}" if quantised else lost[0]
        raise CheckpointError(
            f"{len(lost)} tensor(s) of {'quantised data' if quantised else 'decoder layers'} are not used: the model would "
            "compute something else",
            file=str(plan.checkpoint.path),
            found=", ".join(lost[:8]) + (" ..." if len(lost) > 8 else ""),
            hint=f"if they may be left out, say --ignore-tensors '{pattern}'",
        )
    if unread:
        shown = ", ".join(unread[:8]) + (" ..." if len(unread) > 8 else "")
        logger.warning("%d tensor(s) of the checkpoint are not used: %s", len(unread), shown)


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Names plugin code that raised something of its own; errors that octavo knows pass as they are."""
    try:
        yield
    except OctavoError:
        raise
    except Exception as error:
        raise PluginError(f"{what}: {type(error).__name__}: {error}") from error


def _choose_ops(registry: Registry, dtype: torch.dtype) -> FusedOps:
    ranked = sorted(registry.fused_ops, key=lambda ops: -ops.rank)
    return next(ops for ops in ranked if ask(ops.why_not, registry.platform, dtype) is None)()


@contextmanager
def progress(what: str, total: int, disable: bool) -> Iterator[Callable[..., object]]:
    """A bar on the terminal, if there is one; yields what advances it, by 1 or as many as given."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=disable or not sys.stderr.isatty(), transient=True) as bar:
        yield partial(bar.advance, bar.add_task(what, total=total))
