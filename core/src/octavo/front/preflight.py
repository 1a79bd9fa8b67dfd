"""The questions that loading asks of a checkpoint, asked one by one: each refusal becomes a finding, and the next is asked."""

from __future__ import annotations

import torch

from octavo.front.lint import Finding, Findings, odd_numbers
from octavo.model.loader import load_kv_scales, stored_weight
from octavo.model.plan import ModelPlan
from octavo.quant.kv_scales import KVScales, kv_scale_names, read_kv_scales
from octavo.quant.weight import LinearLayer

_RESERVE = 4 * 2**20
"""Bytes kept back from the sample of weights, for norms and scales of the KV cache."""
_ENOUGH = 4_000_000
"""Weights after which no further layer is sampled: to unpack them takes longer than to read them."""


# --- what headers show


def check_headers(plan: ModelPlan, findings: Findings) -> list[LinearLayer]:
    """Asks for each layer's spec and kernel; returns the layers whose tensors are as they should be."""
    with findings.catching("tensors"):
        plan.check_complete()
    layers = [plan.embedding, *(layer for group in plan.groups for layer in group.layers)]
    specs = {}
    for layer in layers:
        if plan.checkpoint.stored(layer.name).keys() - {"bias"}:  # others are missing, which was told
            with findings.catching("layer", layer.name):
                plan.stored_spec(layer)
                specs[layer] = plan.spec(layer)
    for name, size in _norms(plan):
        if (info := plan.checkpoint.tensors.get(name)) is not None:
            with findings.catching("layer", name.rpartition(".")[0]):
                plan.check_plain(info, (size,))
    for group in plan.groups:
        if all(layer in specs for layer in group.layers):
            alike = len({specs[layer] for layer in group.layers}) == 1
            for label, members in (
                [(group.label, group.layers)] if alike else [(one.name, (one,)) for one in group.layers]
            ):
                with findings.catching("kernel", label):
                    biased = any("bias" in plan.checkpoint.stored(layer.name) for layer in members)
                    plan.select(plan.request(label, specs[members[0]], members, biased))
    return list(specs)


def _norms(plan: ModelPlan) -> list[tuple[str, int]]:
    layers = (plan.layer_names(index) for index in range(plan.config.num_layers))
    norms = [norm for layer in layers for norm in layer.norms.values()]
    return [*norms, (f"{plan.prefix}norm.weight", plan.config.hidden_size)]


def unread(plan: ModelPlan, layers: list[LinearLayer]) -> list[str]:
    """Tensors that loading would not read. Those of layers that are not as they should be are not counted."""
    suffixes = ("weight", "bias", *(() if plan.quant is None else plan.quant.suffixes))
    used = {name for name, _ in _norms(plan)}
    good = set(layers)
    for layer in [plan.embedding, *(layer for group in plan.groups for layer in group.layers)]:
        if layer in good:
            read = ("weight", "bias") if plan.stored_spec(layer).is_float else suffixes
            used |= {f"{layer.name}.{suffix}" for suffix in read}
        else:
            used |= {info.name for info in plan.checkpoint.stored(layer.name).values()}
    for names in (plan.layer_names(index) for index in range(plan.config.num_layers)):
        used |= set(kv_scale_names(names.attention, plan.checkpoint.tensors))
        if plan.quant is not None:
            used |= {f"{names.mlp}.{tail}" for tail in plan.quant.activation_scales}
    return [name for name in plan.checkpoint.unread(plan.settings.ignore_tensors) if name not in used]


# --- what small tensors and a few layers show


def check_kv_scales(plan: ModelPlan, findings: Findings) -> bool:
    """Each layer's scales on their own, then all together; returns whether there are any."""
    tensors = plan.checkpoint.without(plan.settings.ignore_tensors)
    modules = [plan.layer_names(index).attention for index in range(plan.config.num_layers)]
    sizes = [tensors[name].num_bytes for module in modules for name in kv_scale_names(module, tensors)]
    if not findings.afford(2 * sum(sizes), _RESERVE):
        found = f"{sum(sizes)} bytes"
        findings.add(Finding("warning", "kv_scales", "the KV scales are too large to be examined", found=found))
        return True
    before = len(findings.found)
    scales: tuple[KVScales, ...] = ()
    for module in modules:
        with findings.catching("kv_scales", module):
            read_kv_scales(module, plan.config.kv_heads, tensors, plan.checkpoint.read)
    if len(findings.found) == before:
        with findings.catching("kv_scales"):
            scales = load_kv_scales(plan)
    return bool(scales)


def sample(plan: ModelPlan, readable: list[LinearLayer], findings: Findings) -> None:
    """Norms, and linears of the first, the middle and the last layer, small ones first, as far as reading is allowed."""
    tensors = plan.checkpoint.tensors
    for name, size in _norms(plan):
        info = tensors.get(name)
        if info is None or info.shape != (size,) or not findings.afford(info.num_bytes):
            continue
        if not bool(torch.isfinite(plan.checkpoint.read(name).float()).all()):
            text = "a tensor holds values that are NaN or infinite"
            findings.add(Finding("error", "values", text, file=info.file, tensor=name))
    last = plan.config.num_layers - 1
    chosen = {
        layer
        for index in {0, last // 2, last}
        for group in plan.layer_names(index).linears.values()
        for layer in group.layers
    }
    stored = {layer: plan.checkpoint.stored(layer.name).values() for layer in readable if layer in chosen}
    numbers = 0
    for layer in sorted(stored, key=lambda layer: layer.in_features * layer.out_features):
        if numbers < _ENOUGH and findings.afford(sum(info.num_bytes for info in stored[layer]), _RESERVE):
            numbers += layer.in_features * layer.out_features
            with findings.catching("values", layer.name):
                findings.add(*odd_numbers(layer, stored_weight(plan, layer)))
