"""What the stored tensors of one layer hold, told from their headers and checked against the scheme that explains them.

The kind of storage follows from the tensors alone: words (`weight_packed`), or `weight` in int8 or fp8. Width, granularity
and treatment of inputs follow from the scheme, and every shape must agree with it. A preset's name is weaker than a shape:
W8A16 meant one scale per channel in 2025 and groups of 128 in 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from octavo import CheckpointError, LinearLayer, TensorInfo, WeightSpec
from octavo_w8a8.checks import FLOATS, missing
from octavo_w8a8.packing import num_words
from octavo_w8a8.schemes import QuantArgs, Scheme

INTEGERS = (torch.int8, torch.int32, torch.int64)
_FLOAT_ZEROS = (*FLOATS, torch.float8_e4m3fn)
_QPARAMS = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale", "input_zero_point")
_FOREIGN = {
    "weight_global_scale": "scales of scales (NVFP4)",
    "input_global_scale": "scales of scales (NVFP4)",
    "meta": "2:4 sparsity (marlin-24)",
    "bitmask": "sparsity by bitmask",
    "compressed": "sparsity by bitmask",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """How to read a layer: its spec, the width of a code, and whether codes lie in words."""

    spec: WeightSpec
    weights: QuantArgs
    inputs: QuantArgs | None
    packed: bool


def is_quantised(layer: LinearLayer, stored: Mapping[str, TensorInfo]) -> bool:
    """Whether a layer's tensors are quantised; raises CheckpointError where they are so only in part, or not readable."""
    for name, what in _FOREIGN.items():
        if name in stored:
            raise _error(layer, stored[name], f"holds {name}: {what} is not supported")
    qparams = [name for name in _QPARAMS if name in stored]
    if "weight_packed" in stored:
        if "weight" in stored:
            raise _error(layer, stored["weight"], "holds both weight and weight_packed")
        _check_matrix(layer, stored["weight_packed"])
        return True
    if "weight" not in stored:
        if qparams:
            raise missing(layer, "weight", stored[qparams[0]], "nor is there a weight_packed")
        return False
    weight = stored["weight"]
    if weight.dtype in (torch.int8, torch.float8_e4m3fn):
        _check_matrix(layer, weight)
        return True
    if qparams:
        raise _error(
            layer,
            weight,
            f"is stored as {weight.dtype} beside {qparams[0]}",
            expected="int8, float8_e4m3fn or a weight_packed; or no scales",
            found=f"{weight.shape} of {weight.dtype}",
            hint="plain weights with scales (fakequant) are a half-finished export: save the model compressed"
            if weight.dtype in FLOATS
            else None,
        )
    return False


def examine(layer: LinearLayer, stored: Mapping[str, TensorInfo], scheme: Scheme) -> Stored:
    """How to read a quantised layer; raises CheckpointError that names the tensor which contradicts the scheme."""
    weights = scheme.weights
    assert weights is not None
    packed = "weight_packed" in stored
    weight = stored["weight_packed" if packed else "weight"]
    kind = "float" if weight.dtype == torch.float8_e4m3fn else "int"
    if weights.type != kind:
        raise _error(
            layer,
            weight,
            f"is stored as {weight.dtype}, its settings say {weights.code}",
            expected=f"type '{weights.type}' in the settings",
            found=f"type '{kind}' in the tensors",
        )
    if packed:
        _check_words(layer, weight, weights)
    else:
        _check_shape(layer, weight, (layer.out_features, layer.in_features))
    if "weight_scale" not in stored:
        raise missing(layer, "weight_scale", weight)
    group = _granularity(layer, stored["weight_scale"], scheme)
    g_idx = _check_order(layer, stored, weights, group)
    has_zeros = _check_zeros(layer, stored, weights, packs_zeros(packed, group))
    if (shape := stored.get("weight_shape")) is not None:
        _check_shape(layer, shape, (2,), (torch.int64, torch.int32))
    _check_inputs(layer, stored, scheme.input_activations)
    code = f"uint{weights.num_bits}" if packed else weights.code
    inputs = scheme.input_activations
    activation = None if inputs is None else inputs.activation()
    spec = WeightSpec(code, group, packed or has_zeros, g_idx, activation)
    return Stored(spec, weights, inputs, packed)


def _check_words(layer: LinearLayer, info: TensorInfo, weights: QuantArgs) -> None:
    """Columns of `weight_packed` against num_bits, in either packing."""
    inputs, bits = layer.in_features, weights.num_bits
    shapes = {(layer.out_features, num_words(inputs, bits, dense)) for dense in (True, False)}
    if info.dtype == torch.int32 and info.shape in shapes:
        return
    fits = [b for b in range(2, 9) if info.shape == (layer.out_features, num_words(inputs, b))]
    hint = f"the columns are those of num_bits {fits[0]}" if fits and fits[0] != bits else None
    raise _error(
        layer,
        info,
        f"is not what num_bits {bits} implies for {inputs} inputs and {layer.out_features} outputs",
        expected=f"{' or '.join(map(str, sorted(shapes)))} of torch.int32",
        found=f"{info.shape} of {info.dtype}",
        hint=hint,
    )


def scale_shapes(layer: LinearLayer, args: QuantArgs) -> list[tuple[int, ...]]:
    """Shapes that the scales of a weight may have; the first is the one that is written."""
    rows, columns = layer.out_features, layer.in_features
    if args.strategy == "tensor":
        return [(1,), (), (1, 1)]
    if args.strategy == "channel":
        return [(rows, 1)]
    high, wide = (1, args.group_size or 1) if args.strategy == "group" else args.block_structure or (1, 1)
    return [(-(-rows // high), -(-columns // wide))]


def group_shape(layer: LinearLayer, args: QuantArgs) -> tuple[int, int]:
    """Elements that share a scale, in the canonical words."""
    if args.strategy == "block":
        return args.block_structure or (1, 1)
    if args.strategy == "tensor":
        return (-1, -1)
    whole = args.strategy == "channel" or (args.group_size or 1) >= layer.in_features
    return (1, -1 if whole else args.group_size or 1)


def _granularity(layer: LinearLayer, scale: TensorInfo, scheme: Scheme) -> tuple[int, int]:
    """Which elements share a scale: what the scheme says, if the shape agrees, or for a preset what the shape says."""
    args, shape = scheme.weights, scale.shape
    assert args is not None
    expected = scale_shapes(layer, args)
    if scale.dtype in FLOATS:
        if shape in expected:
            return group_shape(layer, args)
        implied = _implied(layer, shape)
        if scheme.preset is not None and implied is not None:
            return implied
    else:
        implied = None
    said = f"{args.strategy}{f' of {args.group_size}' if args.strategy == 'group' else ''}"
    words = {(-1, -1): "strategy tensor", (1, -1): "strategy channel"}
    hint = None if implied is None else words.get(implied, f"group_size {implied[1]}")
    raise _error(
        layer,
        scale,
        f"is not what strategy {said} implies for {layer.in_features} inputs and {layer.out_features} outputs",
        expected=f"{' or '.join(map(str, expected))} of {', '.join(map(str, FLOATS))}",
        found=f"{shape} of {scale.dtype}",
        hint=hint and f"the shape is that of {hint}: correct the settings if the file is intact",
    )


def _implied(layer: LinearLayer, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The granularity that a shape of scales stands for by itself."""
    if shape in ((), (1,)):
        return (-1, -1)
    if len(shape) != 2 or shape[0] != layer.out_features or shape[1] == 0 or layer.in_features % shape[1]:
        return None
    return (1, -1 if shape[1] == 1 else layer.in_features // shape[1])


def _check_order(
    layer: LinearLayer, stored: Mapping[str, TensorInfo], weights: QuantArgs, group: tuple[int, int]
) -> bool:
    """Whether groups may follow `weight_g_idx`; its content can still say that they do not."""
    if (info := stored.get("weight_g_idx")) is not None:
        _check_shape(layer, info, (layer.in_features,), (torch.int32, torch.int64))
        return group[1] != -1 and group[0] == 1
    if weights.actorder and group[1] != -1:
        raise missing(
            layer, "weight_g_idx", stored["weight_scale"], "the settings say actorder: group, whose groups it lists"
        )
    return False


def packs_zeros(packed: bool, group: tuple[int, int]) -> bool:
    """Whether zero points lie in words: they do where weights do, except for the single one of strategy tensor."""
    return packed and group[0] != -1


def _check_zeros(layer: LinearLayer, stored: Mapping[str, TensorInfo], weights: QuantArgs, in_words: bool) -> bool:
    """Whether the layer has zero points that count; those of a symmetric one must turn out to be 0."""
    info = stored.get("weight_zero_point")
    if info is None:
        return False  # an asymmetric file may leave zero points out where they are all 0
    scale = stored["weight_scale"].shape
    if weights.type == "float":
        _check_shape(layer, info, scale, (*INTEGERS, *_FLOAT_ZEROS))
    elif not in_words:
        _check_shape(layer, info, scale, INTEGERS)
    elif info.shape != scale or info.dtype not in INTEGERS or not weights.symmetric:
        rows = {num_words(layer.out_features, weights.num_bits, dense) for dense in (True, False)}
        if info.dtype != torch.int32 or info.shape not in {(n, scale[1]) for n in rows}:
            shapes = " or ".join(str((n, scale[1])) for n in sorted(rows))
            raise _error(
                layer,
                info,
                f"is not what num_bits {weights.num_bits} implies for {layer.out_features} outputs",
                expected=f"{shapes} of torch.int32",
                found=f"{info.shape} of {info.dtype}",
            )
    return not weights.symmetric


def _check_inputs(layer: LinearLayer, stored: Mapping[str, TensorInfo], inputs: QuantArgs | None) -> None:
    scale, zero = stored.get("input_scale"), stored.get("input_zero_point")
    if inputs is None and (scale or zero):
        raise _error(
            layer,
            scale or zero,
            "has static parameters for its inputs, but the settings say that inputs are not quantised",
            expected="no input_scale, or input_activations in the settings",
        )
    is_float = inputs is not None and inputs.type == "float"
    for info, types in ((scale, FLOATS), (zero, (*INTEGERS, *_FLOAT_ZEROS) if is_float else INTEGERS)):
        if info is not None and (info.shape not in ((), (1,)) or info.dtype not in types):
            _check_shape(layer, info, (1,), types)
    if inputs is None or inputs.dynamic:
        return  # parameters that calibration left behind mean nothing where they are computed anew
    if scale is None:
        raise missing(layer, "input_scale", stored["weight_scale"], "the settings say that inputs have static scales")
    if not inputs.symmetric and zero is None:
        raise missing(layer, "input_zero_point", scale, "the settings say that inputs are asymmetric")


def _check_matrix(layer: LinearLayer, info: TensorInfo) -> None:
    if len(info.shape) != 2:
        raise _error(
            layer,
            info,
            "is not a matrix",
            expected="two dimensions",
            found=f"{info.shape}",
            hint="several experts in one tensor are not supported" if len(info.shape) == 3 else None,
        )


def _check_shape(
    layer: LinearLayer, info: TensorInfo, shape: tuple[int, ...], types: tuple[torch.dtype, ...] = ()
) -> None:
    if info.shape != shape or (types and info.dtype not in types):
        wanted = f" of {' or '.join(map(str, types))}" if types else ""
        raise _error(
            layer,
            info,
            "does not have the shape and type that its layer and scales imply",
            expected=f"{shape}{wanted}",
            found=f"{info.shape} of {info.dtype}",
        )


def _error(layer: LinearLayer, info: TensorInfo | None, what: str, **facts: object) -> CheckpointError:
    assert info is not None
    suffix = info.name.rpartition(".")[2]
    hint = facts.pop("hint", None)
    return CheckpointError(
        f"{layer.name}: {suffix} {what}" if not what.startswith(("holds", "has")) else f"{layer.name} {what}",
        file=info.file or None,
        tensor=info.name,
        expected=facts.get("expected"),
        found=facts.get("found"),
        hint=None if hint is None else str(hint),
    )
