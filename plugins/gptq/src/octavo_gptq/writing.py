"""Writing GPTQ: one layer's tensors, and the settings that describe a set of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import octavo
from octavo import CODES, CheckpointError, LayerFacts, LinearLayer, QuantizedWeight, WeightSpec
from octavo_gptq import packing
from octavo_gptq.packing import BITS, FLOATS, WORDS
from octavo_gptq.rules import Rule

if TYPE_CHECKING:
    from octavo_gptq.config import GPTQConfig

_WIDTHS = {f"{sign}int{bits}": bits for bits in BITS for sign in ("u", "")}
_CAREFUL_WRITERS = ("gptqmodel", "octavo")


def packs_zeros_well(provider: str | None, meta: Mapping[str, Any] | None) -> bool:
    """Whether the writer is known to mask a zero of 0, so that it cannot flow over its neighbours."""
    quantizers = (meta or {}).get("quantizer") or []
    named = [quantizers] if isinstance(quantizers, str) else quantizers if isinstance(quantizers, list) else []
    return provider == "auto-round" or any(str(n).lower().startswith(_CAREFUL_WRITERS) for n in named)


def pack_layer(config: GPTQConfig, layer: LinearLayer, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The stored tensors by suffix; raises ValueError with a sentence where GPTQ or the settings cannot say the numbers."""
    word = WORDS[config.pack_dtype]
    if (reason := why_not(layer, weight.spec, word)) is not None:
        raise ValueError(reason)
    bits, size = _WIDTHS[weight.spec.code], weight.spec.group_shape[1]
    if config.bits not in (None, bits):
        raise ValueError(f"its codes have {bits} bits, the settings say {config.bits}")
    scales, groups = weight.scales, _groups(layer, size)
    assert scales is not None
    if config.group_size is not None and _groups(layer, config.group_size) != groups:
        raise ValueError(f"its groups are of {size} inputs, the settings say group_size {config.group_size}")
    if scales.shape[1] != groups:
        raise ValueError(f"it has {scales.shape[1]} groups, {groups} are implied by {size} inputs a group")
    if scales.dtype not in FLOATS:
        raise ValueError(f"its scales are of {scales.dtype}")
    codes, zeros = _unsigned(weight, bits)
    symmetric = bool((zeros == 2 ** (bits - 1)).all())
    if config.sym and not symmetric:
        raise ValueError(f"the settings say sym: true, its zeros go from {int(zeros.min())} to {int(zeros.max())}")
    if not symmetric and config.sym is None and config.checkpoint_format is None:
        raise ValueError("it is not symmetric, and the settings say neither sym nor checkpoint_format")
    stored = packing.stored_zeros(zeros, bits, shifted=config.checkpoint_format != "gptq_v2")
    order = weight.group_index
    if order is None:
        order = torch.arange(layer.in_features) // (layer.in_features if size == -1 else size)
    tensors = {
        "qweight": packing.pack(codes, bits, word).T.contiguous(),
        "qzeros": packing.pack(stored.T, bits, word),
        "scales": scales.T.contiguous(),
        "g_idx": order.to(torch.int32),
    }
    return tensors if weight.bias is None else tensors | {"bias": weight.bias}


def why_not(layer: LinearLayer, spec: WeightSpec, word: torch.dtype = torch.int32) -> str | None:
    """Why GPTQ cannot hold a layer of such numbers, or None if it can."""
    bits = _WIDTHS.get(spec.code)
    if bits is None:
        return f"it is {spec}; GPTQ has integer codes of {', '.join(map(str, BITS))} bits"
    if spec.group_shape[0] != 1:
        return f"it is {spec}; GPTQ has scales for each output"
    if spec.activation is not None:
        return f"it is {spec}; GPTQ has floating inputs"
    if not spec.has_zeros and CODES[spec.code].low == 0:
        return f"it is {spec}: unsigned without zeros, so without negative weights, which GPTQ's zeros cannot say"
    size = 8 * word.itemsize
    for what, count in (("in_features", layer.in_features), ("out_features", layer.out_features)):
        if count * bits % size:
            return f"{what} {count} of {bits} bits do not fill whole words of {size} bits"
    return None


def _groups(layer: LinearLayer, size: int) -> int:
    return 1 if size == -1 else -(-layer.in_features // size)


def _unsigned(weight: QuantizedWeight, bits: int) -> tuple[Tensor, Tensor]:
    """Codes and zeros as uint8. Signed codes are moved up by half their range together with their zeros."""
    assert weight.scales is not None
    shift = 0 if CODES[weight.spec.code].low == 0 else 2 ** (bits - 1)
    zeros = (torch.zeros_like(weight.scales) if weight.zeros is None else weight.zeros).float() + shift
    if not bool(((zeros >= 0) & (zeros < 2**bits) & (zeros == zeros.round())).all()):
        raise ValueError(f"zeros must be integers in 0..{2**bits - 1}")
    codes = weight.codes if shift == 0 else (weight.codes.to(torch.int16) + shift).to(torch.uint8)
    return codes, zeros.to(torch.uint8)


def settings_for(target: str, layers: Mapping[LinearLayer, LayerFacts]) -> dict[str, Any]:
    """Settings under which these layers are written: the most frequent scheme for all, and a rule for each that differs.

    A plain layer of a block gets a rule that excludes it, because tools of the family decide by rules what to load as
    quantised. Raises CheckpointError that names the first layer which GPTQ cannot hold.
    """
    schemes: dict[str, dict[str, Any]] = {}
    plain: list[str] = []
    for layer, facts in layers.items():
        last = layer.name.rpartition(".")[2]
        if facts.spec.is_float and facts.spec.activation is None:
            plain += [layer.name] if last not in ("lm_head", "embed_tokens") else []
            continue
        reason = why_not(layer, facts.spec)
        if reason is None and last == "embed_tokens":
            reason = "no tool of the family reads a quantised embedding"
        if reason is None and facts.scale_dtype not in (None, *FLOATS):
            reason = f"its scales are of {facts.scale_dtype}"
        if reason is not None:
            raise CheckpointError(f"{layer.name}: GPTQ cannot hold this layer: {reason}")
        schemes[layer.name] = {
            "bits": _WIDTHS[facts.spec.code],
            "group_size": facts.spec.group_shape[1],
            "sym": facts.symmetric,
            "desc_act": facts.spec.act_order,
        }
    if not schemes:
        raise CheckpointError(f"{target}: there is no quantised layer to write")
    common, _ = Counter(tuple(scheme.items()) for scheme in schemes.values()).most_common(1)[0]
    shared = dict(common)
    rules: dict[str, dict[str, Any]] = {Rule.key_for(name, excludes=True): {} for name in plain}
    for name, scheme in schemes.items():
        if changes := {key: value for key, value in scheme.items() if value != shared[key]}:
            rules[Rule.key_for(name)] = changes
    return {
        **shared,
        "checkpoint_format": target,
        "dynamic": rules,
        "lm_head": any(name.rpartition(".")[2] == "lm_head" for name in schemes),
        "meta": {"quantizer": [f"octavo:{octavo.__version__}"]},
    }


def online_spec(layer: LinearLayer) -> WeightSpec | None:
    """4 bits, symmetric: `round_to_nearest` gives unsigned codes without zeros their midpoint as zeros."""
    group = next((size for size in (128, 64, 32) if layer.in_features % size == 0), -1)
    spec = WeightSpec("uint4", (1, group), has_zeros=True)
    return None if why_not(layer, spec) else replace(spec, has_zeros=False)
