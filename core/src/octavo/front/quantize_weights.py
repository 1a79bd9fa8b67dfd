"""`octavo quantize`: makes a quantised checkpoint from a float one, layer by layer.

Calibration text runs through the decoder; each group of linears is given to its method with what was seen of its input, and
what follows sees the result. Finished layers are kept, so that a killed run goes on where it was; the checkpoint is written
beside its place at the end, read back, and renamed: a destination that exists is complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import octavo
from octavo.config import EngineConfig
from octavo.errors import CheckpointError, ConfigError
from octavo.front.auto_bits import choose_bits
from octavo.front.convert import Rewriting, check_free, check_space, format_named
from octavo.front.kv_calibration import default_text, kv_cache_scheme, kv_scales, read_text, samples
from octavo.front.llm import registry_for, tokenizer_for
from octavo.front.quantize_group import GroupQuantizer
from octavo.front.quantize_report import print_errors
from octavo.front.recipe import Assignment, Recipe
from octavo.front.work_folder import LayerResult, WorkFolder
from octavo.model.checkpoint import open_checkpoint
from octavo.model.layerwise import ROLES, LayerwiseModel, Replacement
from octavo.model.loader import blaming, progress, stored_vector
from octavo.model.plan import LinearGroup, ModelPlan
from octavo.quant.calibration import one_thread
from octavo.quant.config import LayerFacts, QuantConfig, QuantSource
from octavo.quant.kv_scales import kv_scale_tensors
from octavo.quant.weight import FLOAT, LinearLayer, QuantizedWeight

logger = logging.getLogger(__name__)

_LEAST_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Calibration:
    """Which text is run: a file or None for what comes with Python, how many pieces of how many tokens, drawn by a seed.

    `skip`: tokens at the start of each piece that are computed, but not counted.
    """

    text: str | None = None
    num_samples: int = 128
    max_length: int = 512
    seed: int = 0
    skip: int = 0


@dataclass(frozen=True, slots=True)
class QuantizeSettings:
    """What else a run is told. `auto_bits`: average bits a weight, and the numbers of bits to choose from."""

    max_shard_size: int = 5 * 10**9
    activation_memory: int = 4 * 2**30
    restart: bool = False
    auto_bits: tuple[float, tuple[int, ...]] | None = None


def quantize_weights(
    config: EngineConfig, destination: str, recipe: Recipe, calibration: Calibration, settings: QuantizeSettings
) -> int:
    """Writes `config.model`, quantised as the recipe says, into a new folder; prints a table and returns the exit code.

    Raises ConfigError for settings that cannot work and for text or inputs that are none, CheckpointError for what the format
    cannot hold: as far as headers show it, before anything is computed.
    """
    start = time.monotonic()
    place = Path(destination).expanduser().resolve()
    check_free(place)
    registry = registry_for(config)
    with closing(open_checkpoint(config.model, registry.checkpoint_readers)) as checkpoint, torch.inference_mode():
        plan = ModelPlan.of(config, registry, checkpoint)
        plan.check_complete()
        assignment = Assignment.of(recipe, plan)
        job = _Job(plan, recipe, assignment, format_named(assignment.target, registry), calibration, settings)
        with one_thread():
            if settings.auto_bits is not None:
                bits = choose_bits(plan, recipe, assignment, *settings.auto_bits, job.tokens)
                assignment = job.assignment = Assignment.of(recipe, plan, bits)
            job.check(place.parent)
        with one_thread(), WorkFolder(place, job.description(), restart=settings.restart) as work:
            if work.resumed:
                logger.info("going on with what %s holds", work.path)
            try:
                results = job.run(work)
                size = job.write(work, results, place)
            except OSError as error:
                if error.filename is not None:
                    raise
                raise CheckpointError(
                    f"cannot write the new checkpoint: {error.strerror}",
                    file=str(place),
                    hint=f"finished layers are kept in {work.path}: make room and run the same command again",
                ) from None
            work.remove()
    print_errors(job.table(results), config.disable_progress)
    before = sum(info.num_bytes for info in checkpoint.tensors.values())
    print(
        f"{place}: {len(assignment.quantizers)} layers quantised to {assignment.target}, {before:,} bytes -> {size:,} bytes "
        f"in {time.monotonic() - start:.1f} s"
    )
    return 0


@dataclass(slots=True)
class _Job:
    """One quantisation."""

    plan: ModelPlan
    recipe: Recipe
    assignment: Assignment
    kind: type[QuantConfig]
    calibration: Calibration
    settings: QuantizeSettings
    _tokens: Tensor | None = field(default=None)

    @property
    def groups(self) -> GroupQuantizer:
        """What quantises single groups."""
        return GroupQuantizer(self.plan, self.assignment)

    # --- before anything is computed

    def check(self, folder: Path) -> None:
        """Raises what can be known to fail from headers alone; `folder` is written into."""
        quantised = [layer for layer in self.assignment.quantizers if not self._stored_is_float(layer)]
        if quantised:
            logger.warning(
                "%d layers are quantised already, %s for one: they are quantised again, which loses more",
                len(quantised),
                quantised[0].name,
            )
        kept = [layer for layer in self._layers() if layer not in self.assignment.quantizers]
        if (other := next((layer for layer in kept if not self._stored_is_float(layer)), None)) is not None:
            raise CheckpointError(
                f"{other.name} is quantised in the checkpoint's own format, and would not be in the new one",
                file=str(self.plan.checkpoint.path),
                hint="let the recipe quantise it as well, or begin with the float model",
            )
        names = [self.plan.layer_names(index) for index in range(self.plan.config.num_layers)]
        if (divisor := next((one.divisor for one in names if one.divisor is not None), None)) is not None:
            raise CheckpointError("the activation's output is divided by a stored tensor", tensor=divisor)
        with blaming(f"format '{self.kind.name}' cannot describe the new checkpoint"):
            self.kind.for_weights(self.assignment.target, self._facts())
        work = sum(layer.in_features * layer.out_features for layer in self.assignment.quantizers)
        check_space(folder, self._rewriting(None, {}).planned_bytes + work)

    def _facts(self) -> dict[LinearLayer, LayerFacts]:
        facts = {}
        for layer in self._layers():
            quantizer = self.assignment.quantizers.get(layer)
            if quantizer is None:
                facts[layer] = LayerFacts(FLOAT)
            else:
                facts[layer] = LayerFacts(quantizer.spec(layer), quantizer.options.symmetric, quantizer.scale_dtype)
        return facts

    def _layers(self) -> list[LinearLayer]:
        layers = [layer for group in self.plan.groups for layer in group.layers]
        return layers if self.plan.head is not None else [*layers, self.plan.tied_head]

    def _stored_is_float(self, layer: LinearLayer) -> bool:
        tied = layer == self.plan.tied_head and self.plan.head is None
        return self.plan.stored_spec(self.plan.embedding if tied else layer).is_float

    @property
    def _calibrates(self) -> bool:
        quantizers = self.assignment.quantizers.values()
        return bool(self.recipe.kv_scales or self.assignment.smooth) or any(q.calibrates for q in quantizers)

    @property
    def tokens(self) -> Tensor:
        """The token ids that are run, (pieces, length)."""
        if self._tokens is None:
            one = self.calibration
            text = default_text() if one.text is None else read_text(one.text)
            tokenizer = tokenizer_for(self.plan.settings, self.plan.registry)
            length = min(one.max_length, self.plan.config.max_positions)
            pieces = samples(tokenizer, text, one.num_samples, length, one.seed)
            found = sum(map(len, pieces))
            wanted = one.num_samples * length
            if found < min(_LEAST_TOKENS, wanted):
                raise ConfigError(
                    f"--calibration: the text has {found} tokens, too few to calibrate with; give {_LEAST_TOKENS} or more"
                )
            if found < wanted:
                logger.warning("calibration: the text gives %d tokens of the %d that were asked for", found, wanted)
            if one.skip >= len(pieces[0]):
                raise ConfigError(f"--skip-tokens {one.skip}: pieces of the text have {len(pieces[0])} tokens")
            self._tokens = torch.tensor(pieces)
        return self._tokens

    def description(self) -> dict[str, Any]:
        """All that decides the result's bytes, as JSON."""
        headers = sorted((n, str(i.dtype), list(i.shape)) for n, i in self.plan.checkpoint.tensors.items())
        files = {info.file for info in self.plan.checkpoint.tensors.values()}
        stats = sorted((Path(file).name, Path(file).stat().st_size, Path(file).stat().st_mtime_ns) for file in files)
        model = hashlib.sha256(json.dumps([headers, stats, self.plan.checkpoint.config], default=str).encode())
        text = hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest() if self._calibrates else None
        return {
            "model": model.hexdigest(),
            "recipe": self.recipe.model_dump(mode="json"),
            "methods": {
                layer.name: f"{q.name} {q.options.model_dump(mode='json')}"
                for layer, q in self.assignment.quantizers.items()
            },
            "format": self.assignment.target,
            "calibration": text,
            "skip_tokens": self.calibration.skip,
            "dtype": str(self.plan.dtype),
            "device": self.plan.registry.platform.device,
            "octavo": octavo.__version__,
            "torch": torch.__version__,
        }

    # --- computing

    def run(self, work: WorkFolder) -> list[LayerResult]:
        """All decoder layers, and the head if it is wanted; finished ones are read back and computed again with."""
        plan, layers = self.plan, self.plan.config.num_layers
        model = self._model(work.path) if self._calibrates else None
        total = sum(layer.in_features * layer.out_features for layer in self.assignment.quantizers)
        results = []
        with progress("quantising", total, plan.settings.disable_progress) as advance:
            for index in range(layers):
                done = work.load(index) if work.has(index) else None
                result = self._layer(index, model, done, advance)
                if done is None:
                    work.save(index, result)
                results.append(replace(result, replacements={}))  # read back when they are written
            head = plan.head or plan.tied_head
            if head in self.assignment.quantizers:
                if not work.has(layers):
                    work.save(layers, self._head(head, model, advance))
                results.append(replace(work.load(layers), replacements={}))
        return results

    def _model(self, folder: Path) -> LayerwiseModel:
        plan, config = self.plan, self.plan.config
        quantizers = set(self.assignment.quantizers.values())
        floating = any(not q.propagates or "cross" in q.needs for q in quantizers if q.calibrates)
        quantised = any(q.propagates for q in quantizers if q.calibrates) or not floating
        width = max(config.hidden_size, config.intermediate_size, config.heads * config.head_dim) + config.hidden_size
        needed = self.tokens.numel() * width * plan.dtype.itemsize * (floating + quantised)
        on_disk = needed > self.settings.activation_memory
        if on_disk:
            check_space(folder, needed)
        return LayerwiseModel(
            plan,
            self.tokens,
            quantised=quantised,
            floating=floating,
            skip=self.calibration.skip,
            folder=folder / "activations" if on_disk else None,
            keep_largest=self.recipe.kv_scales is not None,
        )

    def _layer(
        self, index: int, model: LayerwiseModel | None, done: LayerResult | None, advance: Callable[[int], object]
    ) -> LayerResult:
        result = LayerResult() if done is None else done
        groups = self.plan.layer_names(index).linears
        if model is None:
            if done is None:
                for role in ROLES:
                    self.groups.quantize(groups[role], {}, {}, result, None, None)
                    advance(self._weights(groups[role]))
            return result
        floats = model.open_layer(index)
        for role in ROLES:
            group = groups[role]
            needs = self.groups.needs(group) if done is None else {}
            stats = model.collect(role, group.layers[0].in_features, needs, group.label)
            if done is None:
                absorbing = self.groups.absorbing(index, role, group, result)
                norm = model.norm(index, role)
                self.groups.quantize(group, floats, stats, result, absorbing, None if norm is None else norm[1])
            model.install(role, [result.replacements.get(m, Replacement(floats[m])) for m in group.layers])
            advance(self._weights(group))
        largest = model.close_layer()
        if done is None and self.recipe.kv_scales is not None:
            result.largest = largest
        return result

    def _weights(self, group: LinearGroup) -> int:
        """How many weights of a group are quantised."""
        return sum(m.in_features * m.out_features for m in group.layers if m in self.assignment.quantizers)

    def _head(self, layer: LinearLayer, model: LayerwiseModel | None, advance: Callable[[int], object]) -> LayerResult:
        result, group = LayerResult(), LinearGroup(layer.name, (layer,))
        stats = {}
        if model is not None:
            norm = stored_vector(self.plan, f"{self.plan.prefix}norm.weight", layer.in_features)
            stats = model.collect_head(norm, self.groups.needs(group), group.label)
        self.groups.quantize(group, {}, stats, result, None, None)
        advance(layer.in_features * layer.out_features)
        return result

    # --- writing

    def write(self, work: WorkFolder, results: Sequence[LayerResult], place: Path) -> int:
        """Writes the checkpoint beside its place, reads it back, and renames it; returns the bytes of its tensors."""
        plan, layers = self.plan, self.plan.config.num_layers
        places = {plan.head or plan.tied_head: layers}
        read: dict[int, dict[LinearLayer, QuantizedWeight]] = {}
        replaced: dict[str, Tensor] = {}

        def weight(layer: LinearLayer) -> QuantizedWeight:
            index = places[layer]
            if index not in read:
                read.clear()  # one decoder layer at a time
                done = work.load(index)
                head = {one: r.weight for one, r in done.replacements.items()}
                read[index] = self.groups.folded(index, done)[0] if index < layers else head
            return read[index][layer]

        for index in range(layers):
            weights, norms = self.groups.folded(index, work.load(index))
            places |= dict.fromkeys(weights, index)
            replaced |= norms
            for layer, kept in weights.items():
                if layer not in self.assignment.quantizers:
                    like = plan.checkpoint.tensors[f"{layer.name}.weight"].dtype
                    replaced[f"{layer.name}.weight"] = kept.codes.to(like)
                    if kept.bias is not None:
                        replaced[f"{layer.name}.bias"] = kept.bias.to(like)
            if self.recipe.kv_scales is not None:
                largest = {side: one[None] for side, one in results[index].largest.items()}
                (scales,) = kv_scales(largest, self.recipe.kv_scales == "head")
                replaced |= kv_scale_tensors(plan.layer_names(index).attention, scales)
        rewriting = self._rewriting(weight, replaced)
        check_space(place.parent, rewriting.planned_bytes)
        partial = work.path / "result"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        with progress("writing", rewriting.work, plan.settings.disable_progress) as advance:
            written = self._with_kv(rewriting.settings(self.assignment.target, advance))
            size = rewriting.write(partial, written, self.settings.max_shard_size, advance)
            rewriting.verify(partial, written)
        partial.rename(place)
        return size

    def _rewriting(
        self, weights: Callable[[LinearLayer], QuantizedWeight] | None, replaced: Mapping[str, Tensor]
    ) -> Rewriting:
        plan = self.plan
        packed = {layer: quantizer.spec(layer) for layer, quantizer in self.assignment.quantizers.items()}
        suffixes = {"weight", "bias", *(() if plan.quant is None else plan.quant.suffixes)}
        owned = {f"{layer.name}.{suffix}" for layer in packed for suffix in suffixes}
        tensors = plan.checkpoint.without(plan.settings.ignore_tensors)
        return Rewriting(
            plan,
            self.kind,
            tuple(layer for layer in self._layers() if layer not in packed),
            packed,
            {name: info for name, info in tensors.items() if name not in owned},
            weights,
            replaced,
            {"tie_word_embeddings": False} if plan.head is None and plan.tied_head in packed else {},
        )

    def _with_kv(self, settings: QuantConfig) -> QuantConfig:
        """The settings, asking for the quantised KV cache where they have a word for it."""
        if self.recipe.kv_scales is None:
            return settings
        told = settings.settings()
        if told.get("quant_method") != "compressed-tensors":
            logger.warning("%s has no word for KV caches: serve it with --kv-cache-dtype fp8", self.kind.name)
            return settings
        scheme = kv_cache_scheme(self.recipe.kv_scales == "head")
        return type(settings).parse(QuantSource({**told, "kv_cache_scheme": scheme}, "the new settings"))

    def table(self, results: Sequence[LayerResult]) -> list[dict[str, float]]:
        """Relative output errors by role for each decoder layer, the head's last."""
        rows = []
        for index, result in enumerate(results):
            if index == self.plan.config.num_layers:
                rows.append({"lm_head": next(iter(result.errors.values()))})
                continue
            groups = self.plan.layer_names(index).linears
            labels = {group.label: group.label.rpartition(".")[2] for group in groups.values()}
            rows.append({labels[label]: error for label, error in result.errors.items()})
        return rows
