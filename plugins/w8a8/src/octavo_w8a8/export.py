"""Settings for weights that are to be written: one group of layers for each scheme that occurs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from octavo import ActivationSpec, CheckpointError, LayerFacts, LinearLayer, WeightSpec
from octavo_w8a8.schemes import QuantArgs, Scheme, Strategy


def groups_for(layers: Mapping[LinearLayer, LayerFacts]) -> tuple[str, dict[str, Scheme], tuple[str, ...]]:
    """Format, `config_groups` and `ignore` that describe the layers.

    One scheme for all is said of the class Linear, several name their layers one by one. Raises CheckpointError that names a
    layer which the format cannot hold.
    """
    members: dict[Scheme, list[str]] = {}
    for layer, facts in layers.items():
        if facts.spec == WeightSpec("float", facts.spec.group_shape):
            continue
        try:
            scheme = _scheme(layer, facts)
        except ValueError as error:
            raise CheckpointError(
                f"{layer.name}: compressed-tensors cannot hold this weight: {error}", found=str(facts.spec)
            ) from None
        members.setdefault(scheme, []).append(layer.name)
    quantised = {name for names in members.values() for name in names}
    ignore = [layer.name for layer in layers if layer.name not in quantised and not _is_embedding(layer.name)]
    if not any(name.endswith("lm_head") for name in (*quantised, *ignore)):
        ignore.append("lm_head")  # a tied head is a Linear for readers
    if len(members) == 1 and not any(map(_is_embedding, quantised)):
        members = {scheme: ["Linear"] for scheme in members}
    groups = {
        f"group_{number}": scheme.model_copy(update={"targets": tuple(names)})
        for number, (scheme, names) in enumerate(members.items())
    }
    formats = {scheme.format for scheme in groups.values() if scheme.format is not None}
    return "mixed-precision" if len(formats) > 1 else next(iter(formats), "dense"), groups, tuple(ignore)


def _is_embedding(name: str) -> bool:
    return name.endswith("embed_tokens")


def _scheme(layer: LinearLayer, facts: LayerFacts) -> Scheme:
    """The scheme of one layer, without targets; raises ValueError with a sentence where there is none."""
    spec = facts.spec
    packed = spec.code.startswith("uint")
    kind: Literal["int", "float"]
    if spec.code == "fp8_e4m3":
        kind, bits, stored = "float", 8, "float-quantized"
    elif packed or spec.code.startswith("int"):
        kind, bits, stored = "int", int(spec.code.lstrip("uint")), "pack-quantized" if packed else "int-quantized"
    else:
        raise ValueError(f"it holds integers of 2 to 8 bits and fp8_e4m3, not {spec.code}")
    if packed and not spec.has_zeros:
        raise ValueError("unsigned codes need zeros: without them every weight would be positive")
    if kind == "float" and not (facts.symmetric and not spec.has_zeros):
        raise ValueError("floats have no zero points")
    strategy, size, block = _granularity(layer, spec)
    if block is not None and kind == "int":
        raise ValueError("blocks of several outputs are only written for fp8")
    weights = QuantArgs(
        num_bits=bits,
        type=kind,
        symmetric=facts.symmetric,
        strategy=strategy,
        group_size=size,
        block_structure=block,
        actorder=spec.act_order,
    )
    inputs = None if spec.activation is None else _inputs(spec.activation)
    return Scheme(targets=(), weights=weights, input_activations=inputs, format=stored)


def _granularity(layer: LinearLayer, spec: WeightSpec) -> tuple[Strategy, int | None, tuple[int, int] | None]:
    """Strategy, group_size and block_structure of a weight."""
    rows, columns = spec.group_shape
    if (rows, columns) == (-1, -1):
        return "tensor", None, None
    if rows != 1:
        block = (layer.out_features if rows == -1 else rows, layer.in_features if columns == -1 else columns)
        return "block", None, block
    if columns == -1:
        return "channel", None, None
    if layer.in_features % columns:
        raise ValueError(f"its {layer.in_features} inputs are not a multiple of its group size {columns}")
    return "group", columns, None


def _inputs(activation: ActivationSpec) -> QuantArgs:
    strategies: dict[str, Strategy] = {"per_token": "token", "per_tensor": "tensor", "per_group": "group"}
    if activation.code != "fp8_e4m3" and not activation.code.startswith("int"):
        raise ValueError(f"inputs as {activation.code} are not known to it")
    is_float = activation.code == "fp8_e4m3"
    return QuantArgs(
        num_bits=8 if is_float else int(activation.code.removeprefix("int")),
        type="float" if is_float else "int",
        symmetric=activation.symmetric,
        strategy=strategies[activation.granularity],
        group_size=activation.group_size if activation.granularity == "per_group" else None,
        dynamic=activation.dynamic,
    )
