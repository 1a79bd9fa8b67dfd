"""From a checkpoint to a decoder, one layer at a time: read, canonicalise, fuse, choose a kernel, prepare, forget.

Modules are built from their weights, so nothing uninitialised can ever compute, and peak memory is the final size plus one
layer. Every tensor of the file is accounted for.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.config import EngineConfig
from octavo.errors import CheckpointError, OctavoError, PluginError, ask
from octavo.model.checkpoint import Checkpoint
from octavo.model.decoder import Decoder, DecoderLayer, SeparateLinears
from octavo.model.ops import FusedOps
from octavo.model.plan import LinearGroup, LinearReport, ModelPlan
from octavo.model.rope import RotaryEmbedding
from octavo.plugins import Registry
from octavo.quant.detection import QUANT_SUFFIXES
from octavo.quant.linear import resident_bytes
from octavo.quant.weight import LinearLayer, QuantizedWeight

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedModel:
    """A decoder ready to run, and how it came to be. `linears` is the kernel table."""

    decoder: Decoder
    plan: ModelPlan
    linears: list[LinearReport]


def load_model(settings: EngineConfig, registry: Registry, checkpoint: Checkpoint) -> LoadedModel:
    """Loads all weights; raises CheckpointError, NoKernelError or ConfigError, each naming the tensor or layer."""
    plan = ModelPlan.of(settings, registry, checkpoint)
    plan.check_complete()
    config = plan.config
    ops = _choose_ops(registry, plan.dtype)
    loader = _Loader(plan, ops)
    with torch.inference_mode(), _progress(config.num_layers, settings.disable_progress) as advance:
        embedding = loader.tensor(f"{plan.prefix}embed_tokens.weight", (config.vocab_size, config.hidden_size))
        layers = []
        for index in range(config.num_layers):
            layers.append(loader.layer(index))
            advance()
        final_norm = loader.tensor(f"{plan.prefix}norm.weight", (config.hidden_size,))
        head = loader.head(embedding)
        loader.account()
        plan.check_settings(loader.reports)
        positions = min(settings.max_model_len or config.max_positions, config.max_positions)
        rope = RotaryEmbedding(config.rope, positions, registry.platform.device)
        decoder = Decoder(config, embedding, layers, final_norm, head, ops, rope)
    checkpoint.close()
    return LoadedModel(decoder, plan, loader.reports)


@dataclass(slots=True)
class _Loader:
    """The parts of a decoder, read and prepared as its plan says."""

    plan: ModelPlan
    ops: FusedOps
    reports: list[LinearReport] = field(default_factory=list)

    @property
    def _device(self) -> str:
        return self.plan.registry.platform.device

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A plain tensor in the compute type, on the device; checked for shape, type and finiteness."""
        tensor = self.plan.checkpoint.read(name)
        info = self.plan.checkpoint.tensors[name]
        self.plan.check_plain(info, shape)
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError("a tensor holds values that are NaN or infinite", file=info.file, tensor=name)
        return tensor.to(self._device, self.plan.dtype)

    def weight(self, layer: LinearLayer) -> QuantizedWeight:
        """A layer's weight in canonical form, checked."""
        checkpoint, quant = self.plan.checkpoint, self.plan.quant
        stored = checkpoint.stored(layer.name)
        spec = self.plan.spec(layer)
        suffixes = ("weight", "bias") if spec.is_float or quant is None else quant.suffixes
        tensors = {name: checkpoint.read(f"{layer.name}.{name}") for name in suffixes if name in stored}
        try:
            if spec.is_float or quant is None:
                weight = QuantizedWeight.from_float(tensors["weight"], tensors.get("bias"))
            else:
                with _blaming(f"format '{quant.name}' cannot read {layer.name}"):
                    weight = quant.canonicalise(layer, tensors)
            weight.check(layer)
            weight = weight.without_trivial_order()
        except CheckpointError as error:
            if error.file is not None:
                raise
            raise CheckpointError(f"{error}\n  file: {next(iter(stored.values())).file}") from None
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

    def _prepare(self, label: str, layers: Sequence[LinearLayer], weight: QuantizedWeight, note: str = "") -> nn.Module:
        request = self.plan.request(label, weight.spec, layers, weight.bias is not None)
        choice = self.plan.select(request)
        with _blaming(f"kernel '{choice.method.name}' cannot prepare {label} ({weight.spec})"):
            method = choice.method(weight.to(self._device), request).eval()
        self.reports.append(
            LinearReport(label, str(weight.spec), method.name, resident_bytes(method), choice.refusals, note)
        )
        return method

    def layer(self, index: int) -> DecoderLayer:
        names = self.plan.layer_names(index)
        parts: dict[str, Any] = {role: self.tensor(name, (size,)) for role, (name, size) in names.norms.items()}
        parts |= {role: self.linear(group) for role, group in names.linears.items()}
        scale = None
        if self.plan.quant is not None:
            tails = [f"{names.mlp}.{tail}" for tail in self.plan.quant.activation_scales]
            stored = next((name for name in tails if name in self.plan.checkpoint.tensors), None)
            scale = None if stored is None else self.tensor(stored, (self.plan.config.intermediate_size,))
        return DecoderLayer(self.plan.config, index, self.ops, **parts, activation_scale=scale)

    def head(self, embedding: Tensor) -> nn.Module:
        """The output head: a stored one, whatever config.json says, else the embedding."""
        config = self.plan.config
        layer = self.plan.head
        if layer is None:
            return self._tied_head(LinearLayer("lm_head", config.hidden_size, config.vocab_size), embedding)
        weight = self.weight(layer)
        if weight.spec.is_float and weight.bias is None and torch.equal(weight.codes.to(embedding), embedding):
            return self._tied_head(layer, embedding)
        if config.tie_word_embeddings:
            logger.warning(
                "config.json says that the head is tied, but %s differs from the embedding: it is used", layer.name
            )
        return self._prepare(layer.name, [layer], weight)

    def _tied_head(self, layer: LinearLayer, embedding: Tensor) -> nn.Module:
        method = self._prepare(layer.name, [layer], QuantizedWeight.from_float(embedding), "the embedding")
        if any(buffer.data_ptr() == embedding.data_ptr() for buffer in method.buffers()):
            self.reports[-1] = replace(self.reports[-1], num_bytes=0)
        return method

    def account(self) -> None:
        """Complains about tensors that nobody read: an error where they look quantised, else one warning."""
        unread = self.plan.checkpoint.unread(self.plan.settings.ignore_tensors)
        quantised = [name for name in unread if name.rpartition(".")[2] in QUANT_SUFFIXES]
        if quantised:
            raise CheckpointError(
                f"{len(quantised)} tensor(s) of quantised data are not used: the model would compute something else",
                file=str(self.plan.checkpoint.path),
                found=", ".join(quantised[:8]) + (" ..." if len(quantised) > 8 else ""),
                hint=f"if they may be left out, say --ignore-tensors '*.{quantised[0].rpartition('.')[2]}'",
            )
        if unread:
            shown = ", ".join(unread[:8]) + (" ..." if len(unread) > 8 else "")
            logger.warning("%d tensor(s) of the checkpoint are not used: %s", len(unread), shown)


@contextmanager
def _blaming(what: str) -> Iterator[None]:
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
def _progress(total: int, disable: bool) -> Iterator[Callable[[], object]]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=disable or not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("loading layers", total=total)
        yield lambda: progress.advance(task)
