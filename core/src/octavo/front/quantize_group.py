"""One group of linears through its methods, and the divisors that they chose into what makes the group's input."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.errors import PluginError
from octavo.front.recipe import Assignment
from octavo.front.work_folder import LayerResult
from octavo.model.layerwise import ROLES, Replacement, divide_rows, producers
from octavo.model.loader import blaming, stored_vector, stored_weight
from octavo.model.plan import LinearGroup, ModelPlan
from octavo.quant.calibration import InputStatistics, gram_loss
from octavo.quant.quantizer import CalibratedGroup, Quantizer
from octavo.quant.weight import FLOAT, LinearLayer, QuantizedWeight

logger = logging.getLogger(__name__)

_SMALLEST = 1e-5  # divisor of a channel that was hardly ever active


@dataclass(frozen=True, slots=True)
class GroupQuantizer:
    """Quantises the groups of one model as an assignment says."""

    plan: ModelPlan
    assignment: Assignment

    def needs(self, group: LinearGroup) -> dict[str, frozenset[str]]:
        """What the group's methods want to know, by whose inputs they want; the error figure wants the Gram matrix."""
        needs: dict[str, frozenset[str]] = {}
        for layer in group.layers:
            if (quantizer := self.assignment.quantizers.get(layer)) is not None:
                stream = _stream(quantizer)
                needs[stream] = needs.get(stream, frozenset({"gram"})) | quantizer.needs
        return needs

    def absorbing(self, index: int, role: str, group: LinearGroup, result: LayerResult) -> Tensor | None:
        """`producers` of a role, None where a divisor could not be absorbed exactly, or not by all that read the input."""
        methods = {self.assignment.quantizers[m] for m in group.layers if m in self.assignment.quantizers}
        if len(methods) != 1:
            return None
        if role in ("o", "down"):
            made = result.replacements.get(self._producer(index, role))
            if made is not None and not made.weight.spec.is_float and made.weight.spec.group_shape[0] != 1:
                return None  # its rows have no scales of their own
        return producers(self.plan, role)

    def _producer(self, index: int, role: str) -> LinearLayer:
        """The linear whose outputs become the input of a role."""
        groups = self.plan.layer_names(index).linears
        return groups["qkv"].layers[2] if role == "o" else groups["gate_up"].layers[1]

    def quantize(
        self,
        group: LinearGroup,
        floats: Mapping[LinearLayer, QuantizedWeight],
        stats: Mapping[str, InputStatistics],
        result: LayerResult,
        absorbing: Tensor | None,
        norm: Tensor | None,
    ) -> None:
        """Quantises a group's members, each by its method, and adds what came of it to `result`."""
        by_method: dict[Quantizer, list[LinearLayer]] = {}
        for layer in group.layers:
            if (quantizer := self.assignment.quantizers.get(layer)) is not None:
                by_method.setdefault(quantizer, []).append(layer)
        lost = all_ = 0.0
        for quantizer, layers in by_method.items():
            weights = [floats[layer] if layer in floats else self._float_weight(layer) for layer in layers]
            inputs = stats.get(_stream(quantizer)) if quantizer.calibrates else None
            seen = CalibratedGroup(tuple(layers), tuple(w.codes for w in weights), inputs, absorbing, norm)
            made, divisor = self._made(quantizer, seen, stats, group, result)
            for layer, before, after in zip(layers, weights, made, strict=True):
                one = result.replacements[layer] = Replacement(replace(after, bias=before.bias), divisor)
                gram = next((s.gram for s in stats.values()), None)
                error = one.effective() - before.codes
                lost += _size(error, gram)
                all_ += _size(before.codes, gram)
            if divisor is not None:
                for layer in [m for m in group.layers if m not in self.assignment.quantizers]:
                    kept = floats[layer]
                    result.replacements[layer] = Replacement(replace(kept, codes=kept.codes * divisor), divisor)
        if by_method:
            result.errors[group.label] = lost / all_ if all_ else 0.0

    def _made(
        self,
        quantizer: Quantizer,
        group: CalibratedGroup,
        stats: Mapping[str, InputStatistics],
        whole: LinearGroup,
        result: LayerResult,
    ) -> tuple[tuple[QuantizedWeight, ...], Tensor | None]:
        """The method's weights and the whole divisor, checked."""
        divisor: Tensor | None = None
        alpha = self.assignment.smooth.get(group.layers[0])
        if alpha is not None and group.norm is not None and group.producers is not None:
            weights = torch.cat(group.weights)
            divisor = group.storable(_smoothing(next(iter(stats.values())).largest, weights.abs().amax(0), alpha))
            group = replace(
                group,
                weights=tuple(weight * divisor for weight in group.weights),
                inputs=None if group.inputs is None else group.inputs.divided(divisor),
                norm=(group.norm.float() / divisor).to(group.norm.dtype),
            )
        with blaming(f"method '{quantizer.name}' failed on {whole.label}"):
            made = quantizer.quantize(group)
        for layer, weight in zip(group.layers, made.weights, strict=True):
            if weight.spec != quantizer.spec(layer):
                raise PluginError(
                    f"method '{quantizer.name}' made {weight.spec} of {layer.name}, and had announced {quantizer.spec(layer)}"
                )
            weight.check(layer)
        for note in made.notes:
            logger.warning("%s: %s", whole.label, note)
            result.notes.append(f"{whole.label}: {note}")
        if made.divisor is not None:
            divisor = made.divisor if divisor is None else divisor * made.divisor
        return made.weights, divisor

    def _float_weight(self, layer: LinearLayer) -> QuantizedWeight:
        tied = layer == self.plan.tied_head and self.plan.head is None
        stored = stored_weight(self.plan, self.plan.embedding if tied else layer)
        plain = QuantizedWeight(FLOAT, stored.dequantize(), bias=stored.bias)
        return plain.to(self.plan.registry.platform.device)

    def folded(self, index: int, result: LayerResult) -> tuple[dict[LinearLayer, QuantizedWeight], dict[str, Tensor]]:
        """One decoder layer's weights as they are stored, and its norms: divisors are in what makes the divided input."""
        weights = {layer: one.weight for layer, one in result.replacements.items()}
        norms: dict[str, Tensor] = {}
        names = self.plan.layer_names(index)
        for role in ROLES:
            members = [m for m in names.linears[role].layers if m in result.replacements]
            divisor = result.replacements[members[0]].divisor if members else None
            if divisor is None:
                continue
            if role in ("qkv", "gate_up"):
                name, size = names.norms["input_norm" if role == "qkv" else "post_attention_norm"]
                norm = stored_vector(self.plan, name, size)
                norms[name] = (norm.float() / divisor.cpu()).to(norm.dtype)
                continue
            before = self._producer(index, role)
            made = weights.get(before) or stored_weight(self.plan, before)
            rows = torch.ones(before.out_features)
            rows[producers(self.plan, role)] = divisor.cpu()
            weights[before] = divide_rows(made.to("cpu"), rows)
        return weights, norms


def _stream(quantizer: Quantizer) -> str:
    return "quantised" if quantizer.propagates else "floating"


def _size(weight: Tensor, gram: Tensor | None) -> float:
    """||X W^T||^2, or ||W||^2 without inputs."""
    return float(weight.double().square().sum() if gram is None else gram_loss(weight, gram.float()))


def _smoothing(largest: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """SmoothQuant's divisor, largest^alpha / weights^(1 - alpha); 1 where either is 0. Xiao et al., arXiv 2211.10438."""
    divisor = largest.clamp(min=_SMALLEST) ** alpha / weights.clamp(min=_SMALLEST) ** (1 - alpha)
    return torch.where((largest > 0) & (weights > 0), divisor.clamp(min=_SMALLEST), 1.0)
