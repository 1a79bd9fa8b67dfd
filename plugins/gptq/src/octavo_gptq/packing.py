"""How GPTQ files lay out codes and zeros: pure functions between stored tensors and plain arrays.

K = in_features, N = out_features, b = bits, G = groups. Words are bit patterns, whatever their sign. All widths share one
rule: value i is bits b*i .. b*i + b - 1 of the number that a column of `qweight` (along K) or a row of `qzeros` (along N)
makes when its words are joined, the first the lowest. So a value of 3 bits may straddle two words, and the width of the
words changes nothing. Nothing here knows settings, layer names or files.
Sources: AutoGPTQ `nn_modules/qlinear/qlinear_cuda.py`, GPTQModel `nn_modules/qlinear/__init__.py`.
"""

from __future__ import annotations

from math import gcd
from typing import Protocol

import torch
from torch import Tensor

BITS = (2, 3, 4, 8)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
WORDS = {"int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64}
"""Types of word by the name that the setting `pack_dtype` has for them."""
_SIZED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Header(Protocol):
    """Type and shape of a stored tensor."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def unpack(words: Tensor, bits: int) -> Tensor:
    """Words (rows, W) of any integer type -> uint8 values (rows, 8 * itemsize * W / bits), each row a stream of its own.

    The shortest run of whole bytes that holds whole values (2 values of 4 bits, 8 of 3) becomes one integer with a byte
    for each value; its bits are then spread by halves, all runs at once. `bits` is 8 or at most 4: wider values would meet
    while they move.
    """
    stream = _reinterpret(words, torch.uint8)
    values, run = _run(bits)
    if values == 1:
        return stream
    if run == 1:
        spread = stream.to(_SIZED[values])
    else:
        parts = torch.unflatten(stream, 1, (-1, run)).to(_SIZED[values])
        spread = parts[..., 0].clone()
        for byte in range(1, run):
            spread |= parts[..., byte] << 8 * byte
    half = values // 2
    while half:
        spread |= spread << half * (8 - bits)
        spread &= _fields(half * bits, 8 * half, values)
        half //= 2
    return _reinterpret(spread, torch.uint8)


def pack(values: Tensor, bits: int, word: torch.dtype) -> Tensor:
    """The inverse of `unpack`: uint8 values (rows, n), each below 2 ** bits, -> words; n * bits fills whole words."""
    count, run = _run(bits)
    if count == 1:
        return _reinterpret(values, word)
    joined = _reinterpret(values, _SIZED[count]).clone()
    half = 1
    while half < count:
        joined |= joined >> half * (8 - bits)
        joined &= _fields(2 * half * bits, 16 * half, count)
        half *= 2
    parts = joined.unsqueeze(-1).view(torch.uint8)
    return _reinterpret(parts[..., :run].flatten(1), word)


def _reinterpret(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of each row as elements of another size. A row of one element may have any stride, hence the way round."""
    return matrix.contiguous().view(-1).view(dtype).view(matrix.shape[0], -1)


def _run(bits: int) -> tuple[int, int]:
    """How many values and bytes the shortest run of whole bytes holds."""
    return 8 // gcd(bits, 8), bits // gcd(bits, 8)


def _fields(width: int, distance: int, values: int) -> int:
    """A mask of `values` bytes: the low `width` bits of every `distance` bits."""
    return sum(((1 << width) - 1) << at for at in range(0, 8 * values, distance))


def stored_zeros(zeros: Tensor, bits: int, shifted: bool) -> Tensor:
    """Zeros uint8 as they are stored: less one in v1 (`shifted`), modulo 2 ** bits."""
    return (zeros - 1) & (2**bits - 1) if shifted else zeros


def true_zeros(stored: Tensor, bits: int, shifted: bool) -> Tensor:
    """The inverse of `stored_zeros`: each field alone, so that no carry reaches its neighbour."""
    return (stored + 1) & (2**bits - 1) if shifted else stored


def flooded_words(qzeros: Tensor, bits: int) -> int:
    """How many words of int32 `qzeros` end in two or more fields of ones, as a zero of 0 packed without a mask leaves them.

    Old writers stored 0 - 1 as 0xFFFFFFFF shifted to its place, which sets all higher fields of the word.
    """
    if qzeros.dtype != torch.int32:
        return 0
    return int(((qzeros < 0) & (qzeros >= -(1 << (32 - 2 * bits)))).sum())


def bits_of(rows: int, in_features: int, word: torch.dtype) -> int | None:
    """The width of codes of which `in_features` fill that many words, None where it is none that GPTQ has."""
    bits, rest = divmod(8 * word.itemsize * rows, max(in_features, 1))
    return bits if rest == 0 and bits in BITS else None


def foreign_layout(in_features: int, out_features: int, qweight: Header) -> tuple[str, str] | None:
    """What else a qweight of this shape is, and what to do about it; None where it is nothing known."""
    inputs, outputs, shape = in_features, out_features, tuple(qweight.shape)
    if qweight.dtype == torch.int32 and shape == (inputs, outputs // 8):
        return "AWQ gemm, whose qweight is (K, N / 8)", "set quant_method to awq"
    if qweight.dtype == torch.int32 and shape == (outputs, inputs // 8):
        return "AWQ gemv, whose qweight is (N, K / 8)", "set quant_method to awq and version to gemv"
    if qweight.dtype == torch.int16 and shape == (outputs // 4, inputs):
        return "AWQ gemv_fast, whose qweight is (N / 4, K)", "set quant_method to awq and version to gemv_fast"
    if qweight.dtype == torch.int32 and shape == (inputs // 16, 2 * outputs):
        return "Marlin tiles, whose qweight is (K / 16, 2 N)", REFUSED["marlin"]
    if qweight.dtype == torch.int8 and len(shape) == 2 and shape[0] == outputs:
        return "BitBLAS, whose qweight is int8 (N, K * bits / 8)", REFUSED["bitblas"]
    return None


def foreign_tensors(names: set[str]) -> tuple[str, str] | None:
    """The layout, if it is another one, that a layer with tensors of these names is in, and what to do about it."""
    if {"trellis", "suh"} & names:
        return "EXL3", REFUSED["exl3"]
    if "B" in names and names & {"s_channel", "s_group"}:
        return "QQQ", REFUSED["qqq"]
    if {"B", "s"} <= names:
        return "Marlin, whose tensors are B and s", REFUSED["marlin"]
    if {"qweight", "zeros"} <= names and "qzeros" not in names:
        return "the first GPTQ files (IST Quant3Linear, or BitBLAS), whose zeros are real numbers", _AGAIN
    return None


_AGAIN = "export the model again with checkpoint_format gptq or gptq_v2"
REFUSED = {
    "marlin": f"its weights lie in the tiles of one GPU kernel: {_AGAIN}",
    "bitblas": f"its weights lie in the tiles of one GPU kernel: {_AGAIN}",
    "qqq": f"its weights lie in the tiles of one GPU kernel and its inputs are quantised: {_AGAIN}",
    "exl3": "it is a trellis code, not GPTQ: use a loader made for EXL3, or another export of the model",
    "gptq_p": f"it stores codes in bit planes: {_AGAIN}",
}
"""Values of checkpoint_format that name a layout which is refused, and what to do about each."""
