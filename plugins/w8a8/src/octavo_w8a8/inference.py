"""Settings of packed weights from headers alone: possible because what a layer reads is what another one writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo import CheckpointError, TensorInfo
from octavo_w8a8.packing import num_words

_WRITERS = {"o_proj": "q_proj", "down_proj": "up_proj"}  # siblings whose outputs are as many as the layer's inputs


def infer(tensors: Mapping[str, TensorInfo]) -> Mapping[str, Any]:
    """Settings of a folder that holds `weight_packed` and says nothing; inputs are taken to be plain, as with words they are.

    Raises CheckpointError where not exactly one width of codes and one group size fit all layers.
    """
    modules = {n.removesuffix(".weight_packed"): i for n, i in tensors.items() if n.endswith(".weight_packed")}
    bits = set(range(2, 9))
    groups: set[int] = set()
    for module, info in modules.items():
        inputs = _inputs(module, tensors)
        scale = tensors.get(f"{module}.weight_scale")
        if inputs is None or scale is None or len(info.shape) != 2 or len(scale.shape) != 2 or not scale.shape[1]:
            bits.clear()
            break
        groups.add(-1 if scale.shape[1] == 1 else -(-inputs // scale.shape[1]))
        # 7 bits in the old packing and 8 bits take equally many words, and headers cannot tell them apart
        bits &= {b for b in bits if info.shape[1] in (num_words(inputs, b, True), num_words(inputs, b, False))}
    if len(bits) != 1 or len(groups) != 1:
        raise CheckpointError(
            "compressed-tensors: the settings cannot be told from the tensors",
            expected="one num_bits and one group_size that fit all layers",
            found=f"num_bits {sorted(bits) or 'none'}, group sizes {sorted(groups) or 'none'}",
            hint="put the settings into config.json: quantization_config, with quant_method and config_groups",
        )
    weights: dict[str, Any] = {"num_bits": bits.pop(), "type": "int", "group_size": groups.pop()}
    weights["symmetric"] = not any(f"{module}.weight_zero_point" in tensors for module in modules)
    return {"format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def _inputs(module: str, tensors: Mapping[str, TensorInfo]) -> int | None:
    """The layer's in_features, from what feeds it: another layer of its block, or the hidden state that a norm scales."""
    parent, _, last = module.rpartition(".")
    if (writer := _WRITERS.get(last)) is not None:
        names = [f"{parent}.{writer}.weight_packed", f"{parent}.{writer}.weight"]
        return next((tensors[name].shape[0] for name in names if name in tensors), None)
    return next(
        (info.shape[0] for name, info in tensors.items() if name.endswith("norm.weight") and _is_hidden(name)), None
    )


def _is_hidden(name: str) -> bool:
    """Whether a norm is of the hidden state, not of a head."""
    return not name.endswith(("q_norm.weight", "k_norm.weight"))
