"""Between the stored tensors of a layer and its canonical weight, in both directions.

Words become unsigned codes with zeros, as AWQ and GPTQ have them: code = q + 2**(bits - 1) for a signed q, and the zero is
the midpoint where the scheme is symmetric. Bytes stay signed. Scales keep their type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from octavo import CheckpointError, LinearLayer, QuantizedWeight, WeightSpec
from octavo_w8a8.checks import FLOATS, check_input_scale, refuse_nan
from octavo_w8a8.packing import fits, num_words, pack, unpack
from octavo_w8a8.schemes import QuantArgs, Scheme
from octavo_w8a8.stored import Stored, group_shape, packs_zeros

_OLD_PACKING = "the old packing keeps codes whole in words, the new one is a bitstream"


def read(layer: LinearLayer, stored: Stored, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    """The canonical weight of tensors that `examine` accepted; raises CheckpointError for contents that contradict them."""
    spec = stored.spec
    if (shape := tensors.get("weight_shape")) is not None:
        expected = [layer.out_features, layer.in_features]
        if shape.tolist() != expected:
            raise CheckpointError(
                f"{layer.name}: weight_shape does not fit the layer",
                tensor=f"{layer.name}.weight_shape",
                expected=expected,
                found=shape.tolist(),
            )
    dense = True
    if stored.packed:
        dense = _is_dense(layer, tensors["weight_packed"], stored.weights.num_bits)
        codes = unpack(tensors["weight_packed"], stored.weights.num_bits, layer.in_features, dense)
    else:
        codes = tensors["weight"]
        if codes.dtype == torch.float8_e4m3fn:
            refuse_nan(layer, codes)
    scales = tensors["weight_scale"]
    scales = scales.reshape(1, 1) if spec.group_shape == (-1, -1) else scales
    zeros = _read_zeros(layer, stored, tensors, scales, dense)
    index = tensors.get("weight_g_idx") if spec.act_order else None
    if index is not None and bool((index == -1).all()):  # how writers fill an order that was never set
        spec, index = replace(spec, act_order=False), None
    input_scale, input_zero = _read_inputs(layer, stored.inputs, tensors)
    return QuantizedWeight(spec, codes, scales, zeros, index, input_scale, input_zero, tensors.get("bias"))


def _is_dense(layer: LinearLayer, words: Tensor, bits: int) -> bool:
    """Which packing words are in: columns tell, and where they are the same, the bits that a packing leaves unused."""
    count = layer.in_features
    if 32 % bits == 0 or count <= 32 // bits:
        return True
    if num_words(count, bits, True) != num_words(count, bits, False):
        return words.shape[1] == num_words(count, bits, True)
    dense, padded = (fits(words, bits, count, packing) for packing in (True, False))
    if dense != padded:
        return dense
    if dense and torch.equal(unpack(words, bits, count, True), unpack(words, bits, count, False)):
        return True
    raise CheckpointError(
        f"{layer.name}: {count} codes of {bits} bits take equally many words in both packings, and "
        f"{'both fit' if dense else 'neither fits'} these words",
        tensor=f"{layer.name}.weight_packed",
        found=f"{tuple(words.shape)}; {_OLD_PACKING}",
        hint="save the model again, with 2, 4 or 8 bits" if dense else "the file is damaged; export the model again",
    )


def _read_zeros(
    layer: LinearLayer, stored: Stored, tensors: Mapping[str, Tensor], scales: Tensor, dense: bool
) -> Tensor | None:
    """Canonical zeros, as `scales`; raises CheckpointError where a symmetric scheme has zero points other than 0."""
    bits, points = stored.weights.num_bits, tensors.get("weight_zero_point")
    middle = 2.0 ** (bits - 1) if stored.packed else 0.0
    zeros = None
    if points is not None:
        # a symmetric file may hold plain zeros; with one output, they and words have the same shape
        plain = (
            stored.weights.symmetric
            and points.shape == scales.shape
            and (layer.out_features > 1 or not bool(points.to(torch.float32).any()))
        )
        if packs_zeros(stored.packed, stored.spec.group_shape) and not plain:
            zeros = _unpack_zeros(layer, points, bits, dense)
        else:
            zeros = points.to(torch.float32).reshape(scales.shape) + middle
        if stored.weights.symmetric and not bool((zeros == middle).all()):
            raise CheckpointError(
                f"{layer.name}: the settings say symmetric, the stored zero points are not",
                tensor=f"{layer.name}.weight_zero_point",
                expected="0 everywhere",
                found=f"{float(zeros.min()) - middle:g} to {float(zeros.max()) - middle:g}",
                hint="set symmetric to false in the settings if the file is intact",
            )
    if not stored.spec.has_zeros:
        return None
    return torch.full(scales.shape, middle, dtype=torch.float32) if zeros is None else zeros


def _unpack_zeros(layer: LinearLayer, points: Tensor, bits: int, dense: bool) -> Tensor:
    rows = num_words(layer.out_features, bits, dense)
    if points.shape[0] != rows or points.dtype != torch.int32:
        raise CheckpointError(
            f"{layer.name}: weight_zero_point is packed in another way than weight_packed",
            tensor=f"{layer.name}.weight_zero_point",
            expected=f"{rows} rows of torch.int32",
            found=f"{points.shape[0]} rows of {points.dtype}; {_OLD_PACKING}",
        )
    return unpack(points.T, bits, layer.out_features, dense).T.to(torch.float32).contiguous()


def _read_inputs(
    layer: LinearLayer, inputs: QuantArgs | None, tensors: Mapping[str, Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Static scale and zero of the inputs."""
    if inputs is None or inputs.dynamic:
        return None, None
    zero = tensors.get("input_zero_point")
    if inputs.symmetric and zero is not None:
        if bool((zero.to(torch.float32) != 0).any()):
            raise CheckpointError(
                f"{layer.name}: the settings say that inputs are symmetric, the stored zero point is not 0",
                tensor=f"{layer.name}.input_zero_point",
                expected=0,
                found=zero.tolist(),
            )
        zero = None
    check_input_scale(layer, "input_scale", tensors["input_scale"])
    return tensors["input_scale"], zero


def write(layer: LinearLayer, weight: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    """Stored tensors by suffix; raises ValueError with a sentence where the scheme cannot hold the weight."""
    args, spec = scheme.weights, weight.spec
    assert args is not None
    packed = spec.code.startswith("uint")
    if spec.code != (f"uint{args.num_bits}" if packed else args.code) or (packed and args.type == "float"):
        raise ValueError(f"it is {spec}, the settings say {args.code}")
    inputs = scheme.input_activations
    activation = None if inputs is None else inputs.activation()
    if spec.activation != activation:
        raise ValueError(f"its inputs are {spec.activation or 'plain'}, the settings say {activation or 'plain'}")
    _check_granularity(layer, spec, scheme)
    if (scales := weight.scales) is None or scales.dtype not in FLOATS:
        raise ValueError(f"its scales are {'missing' if scales is None else scales.dtype}")
    tensors: dict[str, Tensor] = {}
    if packed:
        tensors["weight_packed"] = pack(weight.codes, args.num_bits)
        _is_dense(layer, tensors["weight_packed"], args.num_bits)  # words that could not be read again are not written
        tensors["weight_shape"] = torch.tensor([layer.out_features, layer.in_features])
    else:
        tensors["weight"] = weight.codes.contiguous()
        if args.type == "float":
            refuse_nan(layer, weight.codes)
    shape = (1,) if spec.group_shape == (-1, -1) else tuple(scales.shape)
    tensors["weight_scale"] = scales.reshape(shape).contiguous()
    tensors |= _write_zeros(weight, args, packed, shape)
    if spec.act_order and weight.group_index is not None:
        tensors["weight_g_idx"] = weight.group_index.to(torch.int32).contiguous()
    elif args.actorder and spec.group_shape[1] not in (-1, layer.in_features):
        tensors["weight_g_idx"] = torch.arange(layer.in_features, dtype=torch.int32) // spec.group_shape[1]
    tensors |= _write_inputs(weight, scheme.input_activations)
    return tensors if weight.bias is None else tensors | {"bias": weight.bias.contiguous()}


def _check_granularity(layer: LinearLayer, spec: WeightSpec, scheme: Scheme) -> None:
    args = scheme.weights
    assert args is not None
    group = spec.group_shape
    if spec.act_order and (group[0] != 1 or group[1] == -1):
        raise ValueError(f"it is {spec}; an order of inputs needs groups of them")
    if spec.act_order and not args.actorder:
        raise ValueError(f"it is {spec}, the settings do not say actorder: group")
    if group[0] == 1 and group[1] > 0 and layer.in_features % group[1]:
        raise ValueError(f"its {layer.in_features} inputs are not a multiple of its group size {group[1]}")
    wanted = group_shape(layer, args)
    free = scheme.preset is not None and (group[0] == 1 or group == (-1, -1))
    same = group == wanted or (group[0] == wanted[0] == 1 and {group[1], wanted[1]} == {-1, layer.in_features})
    if not same and not free:
        raise ValueError(f"it is {spec}, the settings say groups of {wanted} (-1: all)")


def _write_zeros(weight: QuantizedWeight, args: QuantArgs, packed: bool, shape: tuple[int, ...]) -> dict[str, Tensor]:
    middle = 2 ** (args.num_bits - 1) if packed else 0
    if weight.zeros is None:
        if packed:
            raise ValueError(f"it is {weight.spec}, unsigned codes without zeros: every weight would be positive")
        return {}
    low, high = (0, 2**args.num_bits - 1) if packed else (-(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1) - 1)
    zeros = weight.zeros
    if args.type == "float":
        raise ValueError(f"it is {weight.spec}, and floats have no zero points")
    if not bool(((zeros == zeros.round()) & (zeros >= low) & (zeros <= high)).all()):
        raise ValueError(f"its zeros are not integers in {low}..{high}")
    if args.symmetric:
        if not weight.is_symmetric:
            raise ValueError(
                f"the settings say symmetric, its zeros are {zeros.min():g} to {zeros.max():g}, not {middle}"
            )
        return {}
    if not packs_zeros(packed, weight.spec.group_shape):
        return {"weight_zero_point": (zeros - middle).to(torch.int8).reshape(shape)}
    words = pack(zeros.to(torch.uint8).T.contiguous(), args.num_bits)
    return {"weight_zero_point": words.T.contiguous()}


def _write_inputs(weight: QuantizedWeight, inputs: QuantArgs | None) -> dict[str, Tensor]:
    if inputs is None or inputs.dynamic:
        return {}
    scale, zero = weight.input_scale, weight.input_zero
    if scale is None or scale.numel() != 1 or scale.dtype not in FLOATS:
        raise ValueError("its inputs have no static scale of a floating type")
    tensors = {"input_scale": scale}
    if inputs.symmetric:
        if zero is not None and bool((zero.to(torch.float32) != 0).any()):
            raise ValueError(f"the settings say that inputs are symmetric, their zero is {float(zero):g}")
        return tensors
    zero = torch.zeros(1, dtype=torch.int8) if zero is None else zero
    value = float(zero)
    if value != round(value) or not -128 <= value <= 127:
        raise ValueError(f"the zero of its inputs is {value:g}, not an integer in -128..127")
    return {**tensors, "input_zero_point": zero.to(torch.int8)}
