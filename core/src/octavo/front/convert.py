"""`octavo convert`: a quantised checkpoint in another format's words, layer by layer, without changing a number.

Each layer is canonicalised by the format that it is in and serialised by the format that it goes to; nothing is quantised
again. What the target cannot hold exactly is refused, with the layer's name. All is written into a folder beside the
destination, checked, and renamed at the end: a destination that exists is complete.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from octavo.config import EngineConfig
from octavo.errors import CheckpointError, ConfigError, PluginError
from octavo.front.llm import registry_for
from octavo.model.checkpoint import Checkpoint, open_checkpoint
from octavo.model.loader import blaming, progress, stored_weight
from octavo.model.plan import ModelPlan
from octavo.model.shards import ShardWriter
from octavo.plugins import Registry
from octavo.quant.config import LayerFacts, QuantConfig, TensorInfo
from octavo.quant.detection import QUANT_SUFFIXES
from octavo.quant.kv_scales import KV_SCALE_FILE
from octavo.quant.weight import CODES, FLOAT, LinearLayer, QuantizedWeight, WeightSpec

logger = logging.getLogger(__name__)

_SETTINGS = ("quantization_config", "compression_config")
_SIDE_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    KV_SCALE_FILE,
    "preprocessor_config.json",
    "processor_config.json",
)
_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")


def convert(config: EngineConfig, destination: str, target: str, max_shard_size: int) -> int:
    """Writes `config.model` as the format `target` into a new folder; prints one line and returns the exit code.

    Raises ConfigError for a destination in use and an unknown format, CheckpointError for what the format cannot hold.
    """
    start = time.monotonic()
    registry = registry_for(config)
    kind = format_named(target, registry)
    place = Path(destination).expanduser().resolve()
    check_free(place)
    with closing(open_checkpoint(config.model, registry.checkpoint_readers)) as checkpoint, torch.inference_mode():
        plan = ModelPlan.of(config, registry, checkpoint)
        plan.check_complete()
        job = Rewriting.of(plan, kind)
        partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
        with progress("converting", job.work, config.disable_progress) as advance:
            written = job.settings(target, advance)
            check_space(place.parent, job.planned_bytes)
            partial.mkdir()
            try:
                size = job.write(partial, written, max_shard_size, advance)
                job.verify(partial, written)
                partial.rename(place)
            except OSError as error:
                if error.filename is not None:
                    raise
                raise CheckpointError(f"cannot write the new checkpoint: {error.strerror}", file=str(place)) from None
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    before = sum(info.num_bytes for info in checkpoint.tensors.values())
    print(
        f"{place}: {len(job.packed)} layers converted to {target}, {before:,} bytes -> {size:,} bytes "
        f"in {time.monotonic() - start:.1f} s"
    )
    return 0


def format_named(target: str, registry: Registry) -> type[QuantConfig]:
    """The format that writes `target`; raises ConfigError that lists what is installed."""
    found = {name: kind for kind in registry.quant_configs.values() for name in kind.targets}
    if target not in found:
        known = ", ".join(sorted(found)) or "none"
        notes = "".join(f"; {note}" for note in registry.failure_notes())
        raise ConfigError(f"--to {target}: no installed plugin writes this format; there is: {known}{notes}")
    return found[target]


def check_free(place: Path) -> None:
    """Raises ConfigError unless `place` is a new name in a folder that exists, or an empty folder."""
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise ConfigError(f"{place} exists already: name a new folder, or remove it first")
    if not place.parent.is_dir():
        raise ConfigError(f"there is no folder {place.parent} to write into")


def check_space(folder: Path, needed: int) -> None:
    """Raises ConfigError where `needed` bytes do not fit."""
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ConfigError(f"{folder} has {free:,} bytes free, the new checkpoint needs about {needed:,}")


@dataclass(frozen=True, slots=True)
class Rewriting:
    """One checkpoint on its way. `packed` are the layers to write, `copied` the tensors that are kept as they are.

    `weights` gives the layers' new weights where they are not the stored ones; `replaced` are tensors to write in place of
    copied ones, or beside them; `updates` goes into config.json.
    """

    plan: ModelPlan
    kind: type[QuantConfig]
    floats: tuple[LinearLayer, ...]
    packed: Mapping[LinearLayer, WeightSpec]
    copied: Mapping[str, TensorInfo]
    weights: Callable[[LinearLayer], QuantizedWeight] | None = None
    replaced: Mapping[str, torch.Tensor] = field(default_factory=dict)
    updates: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: ModelPlan, kind: type[QuantConfig]) -> Rewriting:
        """Judges headers; raises CheckpointError for a checkpoint that is not quantised or that the format would change."""
        layers = [layer for group in plan.groups for layer in group.layers]
        if plan.head is None:
            layers.append(plan.tied_head)
        embedding = plan.stored_spec(plan.embedding)
        specs = {layer: plan.stored_spec(layer) for layer in layers if layer != plan.tied_head or plan.head is not None}
        packed = {layer: spec for layer, spec in {plan.embedding: embedding, **specs}.items() if not spec.is_float}
        if plan.quant is None or not packed:
            raise CheckpointError(
                "the checkpoint is not quantised: there is nothing to convert", file=str(plan.checkpoint.path)
            )
        owned = {f"{layer.name}.{suffix}" for layer in packed for suffix in plan.quant.suffixes}
        tensors = plan.checkpoint.without(plan.settings.ignore_tensors)
        copied = {name: info for name, info in tensors.items() if name not in owned}
        layer_names = [plan.layer_names(index) for index in range(plan.config.num_layers)]
        divisors = [names.divisor for names in layer_names if names.divisor is not None]
        suffixes = QUANT_SUFFIXES | {*plan.quant.suffixes} - {"weight", "bias"}
        if stray := [name for name in copied if name.rpartition(".")[2] in suffixes and name not in divisors]:
            raise CheckpointError(
                f"{len(stray)} tensor(s) of quantised data belong to no layer that octavo knows",
                tensor=stray[0],
                file=copied[stray[0]].file,
                hint=f"if they may be left out, say --ignore-tensors '*.{stray[0].rpartition('.')[2]}'",
            )
        known = {f"{names.mlp}.{tail}" for names in layer_names for tail in kind.activation_scales}
        if lost := [name for name in divisors if name in copied and name not in known]:
            raise CheckpointError(
                f"the activation's output is divided by a tensor that readers of {kind.name} do not know",
                tensor=lost[0],
                file=copied[lost[0]].file,
            )
        return cls(plan, kind, tuple(layer for layer in layers if layer not in packed), packed, copied)

    def weight(self, layer: LinearLayer) -> QuantizedWeight:
        """What is written for a layer."""
        return stored_weight(self.plan, layer) if self.weights is None else self.weights(layer)

    @property
    def work(self) -> int:
        """Bytes to read, in both passes."""
        packed = sum(self.plan.checkpoint.stored_bytes(layer.name) for layer in self.packed)
        return 2 * packed + sum(info.num_bytes for info in self.copied.values())

    @property
    def planned_bytes(self) -> int:
        """About what the new weights take: codes in their bits, scales of 2 bytes with zeros of as many, and an order."""
        total = sum(info.num_bytes for info in self.copied.values())
        for layer, spec in self.packed.items():
            shape = layer.out_features, layer.in_features
            code = CODES.get(spec.code)
            integer = code is not None and not code.dtype.is_floating_point
            bits = int(code.high - code.low).bit_length() if code is not None and integer else 8
            total += math.prod(shape) * bits // 8 + 4 * math.prod(spec.num_groups(*shape)) + 4 * layer.in_features
        return total

    def settings(self, target: str, advance: Callable[[int], object]) -> QuantConfig:
        """The first pass: what each layer is, and the settings of the format that says so."""
        facts: dict[LinearLayer, LayerFacts] = {}
        for layer in self.packed:
            weight = self.weight(layer)
            assert weight.scales is not None
            facts[layer] = LayerFacts(weight.spec, weight.is_symmetric, weight.scales.dtype)
            advance(self.plan.checkpoint.stored_bytes(layer.name))
        for layer in self.floats:
            tied = layer == self.plan.tied_head and self.plan.head is None
            facts[layer] = facts.get(self.plan.embedding, LayerFacts(FLOAT)) if tied else LayerFacts(FLOAT)
        with blaming(f"format '{self.kind.name}' cannot describe this checkpoint"):
            settings = self.kind.for_weights(target, facts)
        if settings.kv_cache != self.plan.kv_cache:
            logger.warning(
                "the checkpoint asks for K and V as %s, the new settings for %s: say --kv-cache-dtype when serving it",
                self.plan.kv_cache,
                settings.kv_cache,
            )
        return settings

    def write(self, folder: Path, settings: QuantConfig, max_shard_size: int, advance: Callable[[int], object]) -> int:
        """The second pass; returns the bytes of the new tensors. Layers are written where the source has them."""
        checkpoint = self.plan.checkpoint
        owners = {f"{layer.name}.{suffix}": layer for layer in self.packed for suffix in checkpoint.stored(layer.name)}
        names = [f"{layer.name}.{suffix}" for layer in self.packed for suffix in self.kind.suffixes]
        done: set[LinearLayer] = set()
        with ShardWriter(folder, [*names, *self.copied, *self.replaced], max_shard_size) as writer:

            def add(layer: LinearLayer) -> None:
                done.add(layer)
                weight = self.weight(layer)
                with blaming(f"format '{self.kind.name}' cannot write {layer.name} ({weight.spec})"):
                    tensors = settings.serialise(layer, weight)
                    again = settings.canonicalise(layer, tensors)
                self._expect_same(layer, weight, again)
                for suffix, tensor in tensors.items():
                    writer.add(f"{layer.name}.{suffix}", tensor)
                advance(checkpoint.stored_bytes(layer.name))

            for name, info in checkpoint.tensors.items():
                if name in self.copied:
                    writer.add(name, self.replaced[name] if name in self.replaced else checkpoint.read(name))
                    advance(info.num_bytes)
                elif (layer := owners.get(name)) is not None and layer not in done:
                    add(layer)
            for layer in [layer for layer in self.packed if layer not in done]:  # a head that was the embedding
                add(layer)
            for name in [name for name in self.replaced if name not in self.copied]:
                writer.add(name, self.replaced[name])
            writer.finish()
        self._write_side_files(folder, settings)
        return writer.total_size

    def verify(self, folder: Path, settings: QuantConfig) -> None:
        """Opens what was written as loading will: format, settings, all headers, and the first and last layer's numbers."""
        registry = self.plan.registry
        update: dict[str, Any] = {"model": str(folder), "quantization": None, "quantize_weights": {}}
        with closing(open_checkpoint(str(folder), registry.checkpoint_readers)) as checkpoint:
            plan = ModelPlan.of(self.plan.settings.model_copy(update=update), registry, checkpoint)
            if plan.quant != settings:
                raise PluginError(f"the written settings are read back as {plan.quant!r} instead of {settings!r}")
            plan.check_complete()
            layers = list(self.packed)
            for layer in layers:
                plan.stored_spec(layer)
            for layer in {layers[0], layers[-1]}:
                self._expect_same(layer, self.weight(layer), stored_weight(plan, layer))

    def _expect_same(self, layer: LinearLayer, before: QuantizedWeight, after: QuantizedWeight) -> None:
        """Raises PluginError unless two weights are the same numbers, stored in the same types."""
        after = after.without_trivial_order()
        pairs = {
            "the specification of its inputs": (before.spec.activation, after.spec.activation),
            "the type of its scales": (_dtype(before.scales), _dtype(after.scales)),
            "the type of its bias": (_dtype(before.bias), _dtype(after.bias)),
        }
        different = [what for what, (old, new) in pairs.items() if old != new]
        parts = ("codes", "scales", "zeros", "group_index", "input_scale", "input_zero", "bias")
        unequal = [name for name in parts if not _equal(getattr(before, name), getattr(after, name))]
        # to dequantise takes many times the layer's memory, and is needed only where the parts leave a doubt
        alike = before.spec == after.spec and not {*parts[:4]} & {*unequal}
        if not (alike or _equal(before.dequantize(), after.dequantize())):
            different.append("its numbers")
        checked = parts[4:] if before.spec != after.spec else [name for name in parts if name != "zeros"]
        different += [name for name in unequal if name in checked]
        if different:
            raise PluginError(
                f"{layer.name}: format '{self.kind.name}' writes {before.spec} and reads it back as {after.spec}, different "
                f"in {', '.join(different)}; nothing was written"
            )

    def _write_side_files(self, folder: Path, settings: QuantConfig) -> None:
        """config.json with the new settings, and all files beside it."""
        checkpoint = self.plan.checkpoint
        config = {key: value for key, value in checkpoint.config.items() if key not in _SETTINGS}
        if isinstance(text := config.get("text_config"), dict):
            config["text_config"] = {key: value for key, value in text.items() if key not in _SETTINGS}
        config |= {"quantization_config": settings.settings(), **self.updates}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        copy_side_files(checkpoint, folder)


def copy_side_files(checkpoint: Checkpoint, folder: Path) -> None:
    """The tokenizer, and what else belongs to the model and not to its format."""
    tokenizer = checkpoint.tokenizer()
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    patterns = _LICENCES if tokenizer is not None else (*_SIDE_FILES, *_LICENCES)
    source = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    for path in [path for pattern in patterns for path in source.glob(pattern) if path.is_file()]:
        copy = folder / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def _dtype(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _equal(old: Any, new: Any) -> bool:
    if old is None or new is None:
        return old is new
    return torch.equal(old, new) if old.dtype == new.dtype else torch.equal(old.float(), new.float())
