"""What the headers of one layer's tensors must be, and sentences about what they are instead."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from octavo import CheckpointError, LinearLayer, TensorInfo
from octavo_gptq import packing

_USUAL_GROUPS = (16, 32, 64, 128, 256, 512, 1024)


def refuse_other_layouts(layer: LinearLayer, stored: Mapping[str, TensorInfo]) -> None:
    """Raises CheckpointError where names of tensors show a layout that only calls itself GPTQ."""
    if (other := packing.foreign_tensors(set(stored))) is not None:
        found, hint = other
        info = next(iter(stored.values()))
        raise CheckpointError(
            f"{layer.name}: the settings say GPTQ, the tensors are {found}",
            file=info.file,
            expected="qweight, qzeros, scales, g_idx",
            found=", ".join(sorted(stored)),
            hint=hint,
        )


def missing(layer: LinearLayer, name: str, other: TensorInfo, hint: str | None = None) -> CheckpointError:
    """The error for a tensor that is not there beside `other`."""
    return CheckpointError(
        f"{layer.name}: {name} is missing beside {other.name.rpartition('.')[2]}",
        file=other.file,
        tensor=f"{layer.name}.{name}",
        hint=hint,
    )


def width(layer: LinearLayer, stored: Mapping[str, TensorInfo], stated: int | None, word: torch.dtype) -> int:
    """Bits of a code, which the shape of qweight shows; raises CheckpointError where it shows something else."""
    qweight, inputs, outputs = stored["qweight"], layer.in_features, layer.out_features
    matrix = len(qweight.shape) == 2 and qweight.dtype == word and qweight.shape[1] == outputs
    shown = packing.bits_of(qweight.shape[0], inputs, word) if matrix else None
    if shown is not None and shown == (stated or shown):
        return shown
    known = stated or 4
    expected = f"({inputs * known / (8 * word.itemsize):g}, {outputs}) of {word} for {known} bits"
    found = f"{qweight.shape} of {qweight.dtype}"
    text, hint = f"{layer.name}: qweight does not fit {inputs} inputs and {outputs} outputs", None
    if stated is not None and inputs * stated % (8 * word.itemsize):
        text = f"{layer.name}: {inputs} inputs of {stated} bits do not fill whole words of {8 * word.itemsize} bits"
    elif shown is not None:
        text = f"{layer.name}: bits in the settings contradict the shape of qweight"
        expected, found = f"bits {stated}, so {expected}", f"{found}, which is {shown} bits"
        hint = f"set bits to {shown}, for this layer in dynamic, if the file is intact"
    elif (other := packing.foreign_layout(inputs, outputs, qweight)) is not None:
        text, hint = f"{layer.name}: the settings say GPTQ, the tensors lie as {other[0]}", other[1]
    elif qweight.dtype != word and qweight.dtype in packing.WORDS.values():
        hint = f'set "pack_dtype": "{str(qweight.dtype).removeprefix("torch.")}" if the file is intact'
    raise CheckpointError(text, file=qweight.file, tensor=qweight.name, expected=expected, found=found, hint=hint)


def check(layer: LinearLayer, stored: Mapping[str, TensorInfo], bits: int, word: torch.dtype) -> None:
    """Raises CheckpointError where a tensor is missing or is not what qweight and the layer imply."""
    inputs, outputs, size = layer.in_features, layer.out_features, 8 * word.itemsize
    for name in ("scales", "qzeros"):
        if name not in stored:
            raise missing(layer, name, stored["qweight"])
    if outputs * bits % size:
        raise CheckpointError(
            f"{layer.name}: {outputs} outputs of {bits} bits do not fill whole words of {size} bits",
            file=stored["qzeros"].file,
            tensor=stored["qzeros"].name,
            found=str(stored["qzeros"].shape),
            hint="export the model again with this layer left out",
        )
    if stored["qzeros"].dtype.is_floating_point:
        raise CheckpointError(
            f"{layer.name}: zeros are stored as real numbers, as the first versions of GPTQ-for-LLaMa did",
            file=stored["qzeros"].file,
            tensor=stored["qzeros"].name,
            expected=str(word),
            found=str(stored["qzeros"].dtype),
            hint="export the model again with a current tool",
        )
    groups = stored["scales"].shape[0] if stored["scales"].shape else 0
    expected: dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]] = {
        "scales": (packing.FLOATS, (groups, outputs)),
        "qzeros": ((word,), (groups, outputs * bits // size)),
        "g_idx": ((torch.int32,), (inputs,)),
        "bias": (packing.FLOATS, (outputs,)),
    }
    for name, (types, shape) in expected.items():
        info = stored.get(name)
        if info is not None and (info.dtype not in types or info.shape != shape or not 1 <= groups <= inputs):
            raise CheckpointError(
                f"{layer.name}: {name} is not what GPTQ implies for {inputs} inputs, {outputs} outputs and {bits} bits",
                file=info.file,
                tensor=info.name,
                expected=f"{shape} of {' or '.join(map(str, types))}",
                found=f"{info.shape} of {info.dtype}",
            )


def group_size(inputs: int, groups: int) -> int | None:
    """The group size that a number of groups implies, -1 for one; None where it is not certain."""
    if groups == 1:
        return -1
    fits = {size for size in _USUAL_GROUPS if -(-inputs // size) == groups}
    if groups > 0 and inputs % groups == 0:
        fits.add(inputs // groups)  # 192 inputs in 2 groups: 96 and 96, or 128 and 64
    return fits.pop() if len(fits) == 1 else None
