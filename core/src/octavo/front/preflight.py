"""The questions that loading asks of a checkpoint, asked one by one: each refusal becomes a finding, and the next is asked."""

from __future__ import annotations

from octavo.front.lint import Finding, Findings, odd_numbers
from octavo.model.loader import load_kv_scales, stored_vector, stored_weight
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
    readable = set()
    for layer in layers:
        if plan.checkpoint.stored(layer.name).keys() - {"bias"}:  # others are missing, which was told
            with findings.catching("layer", layer.name):
                plan.spec(layer)
                readable.add(layer)
    for name, size in plan.vectors.items():
        if (info := plan.checkpoint.tensors.get(name)) is not None:
            with findings.catching("layer", name.rpartition(".")[0]):
                plan.check_plain(info, (size,))
    for group in plan.groups:
        if readable.issuperset(group.layers):
            for part in plan.parts(group):
                with findings.catching("kernel", part.label):
                    plan.select(plan.planned_request(part))
    return [layer for layer in layers if layer in readable]


def unread(plan: ModelPlan, layers: list[LinearLayer]) -> list[str]:
    """Tensors that loading would not read. Those of layers that are not as they should be are not counted."""
    used = set(plan.vectors)
    good = set(layers)
    for layer in [plan.embedding, *(layer for group in plan.groups for layer in group.layers)]:
        suffixes = plan.read_suffixes(layer) if layer in good else plan.checkpoint.stored(layer.name)
        used |= {f"{layer.name}.{suffix}" for suffix in suffixes}
    for names in map(plan.layer_names, range(plan.config.num_layers)):
        used |= set(kv_scale_names(names.attention, plan.checkpoint.tensors))
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
    for name, size in plan.vectors.items():
        info = tensors.get(name)
        if info is not None and info.shape == (size,) and findings.afford(info.num_bytes):
            with findings.catching("values", name.rpartition(".")[0]):
                stored_vector(plan, name, size)
    last = plan.config.num_layers - 1
    chosen = {
        layer
        for index in {0, last // 2, last}
        for group in plan.layer_names(index).linears.values()
        for layer in group.layers
    }
    numbers = 0
    for layer in sorted(chosen.intersection(readable), key=lambda layer: layer.in_features * layer.out_features):
        if numbers < _ENOUGH and findings.afford(plan.checkpoint.stored_bytes(layer.name), _RESERVE):
            numbers += layer.in_features * layer.out_features
            with findings.catching("values", layer.name):
                findings.add(*odd_numbers(layer, stored_weight(plan, layer)))
