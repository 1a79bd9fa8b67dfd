"""How AWQ files lay out 4-bit codes: pure functions between stored tensors and plain arrays, one class for each layout.

K = in_features, N = out_features, g = group size, G = K / g. Words are bit patterns: one whose top nibble is 8 or more
reads as a negative integer, which shifting and masking do not mind. Nothing here knows settings, layer names or files.
Sources: AutoAWQ `awq/modules/linear/{gemm,gemv,gemv_fast}.py`, llm-awq `awq/quantize/qmodule.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

GEMM_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""gemm: the nibble (bits 4i .. 4i+3) of a word that holds value 0, 1, ... 7. The ramp 0..7 is the word 0x75316420."""
SEQUENTIAL = (0, 1, 2, 3, 4, 5, 6, 7)
MIDPOINT = 8.0
"""The zero of symmetric weights."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Header(Protocol):
    """Type and shape of a stored tensor."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def unpack_words(words: Tensor, order: Sequence[int], dim: int) -> Tensor:
    """int32 words (.., W, ..) -> uint8 values (.., 8W, ..) along `dim`: value j of a word is its nibble order[j]."""
    values = [((words >> 4 * nibble) & 15).to(torch.uint8) for nibble in order]
    return torch.stack(values, dim + 1).flatten(dim, dim + 1)


def pack_words(values: Tensor, order: Sequence[int], dim: int) -> Tensor:
    """The inverse of `unpack_words`; `values` in 0..15, their number along `dim` a multiple of 8."""
    parts = torch.unflatten(values, dim, (-1, 8)).unbind(dim + 1)
    words = torch.zeros(parts[0].shape, dtype=torch.int32, device=values.device)
    for nibble, part in zip(order, parts, strict=True):
        words |= part.to(torch.int32) << 4 * nibble
    return words


def unpack_interleaved(words: Tensor) -> Tensor:
    """int16 words (N/4, K) -> uint8 codes (N, K).

    With n = 4m + r and k = 64j + 32h + 8a + 2b + c, the code (n, k) is nibble a of word (m, 64j + 16r + 8h + 2b + c).
    """
    tiles = torch.unflatten(words, 1, (-1, 4, 2, 4, 2))  # m, j, r, h, b, c
    values = [((tiles >> 4 * nibble) & 15).to(torch.uint8) for nibble in range(4)]
    return torch.stack(values, 4).transpose(1, 2).reshape(4 * words.shape[0], words.shape[1])  # m, r, j, h, a, b, c


def pack_interleaved(codes: Tensor) -> Tensor:
    """The inverse of `unpack_interleaved`."""
    tiles = torch.unflatten(torch.unflatten(codes, 1, (-1, 2, 4, 4, 2)), 0, (-1, 4))  # m, r, j, h, a, b, c
    parts = tiles.transpose(1, 2).unbind(4)
    words = torch.zeros(parts[0].shape, dtype=torch.int16, device=codes.device)
    for nibble, part in enumerate(parts):
        words |= part.to(torch.int16) << 4 * nibble
    return words.reshape(codes.shape[0] // 4, codes.shape[1])


def padded_words(in_features: int, group: int) -> int | None:
    """Words that hold one row's zeros in the gemv layouts, padding included; None for a group size without a rule.

    AutoAWQ calls it `calculate_zeros_width`. Eight times as many scales are stored.
    """
    multiple = 1 if group >= 128 else {64: 2, 32: 4}.get(group)
    if multiple is None:
        return None
    words = -(-(in_features // group) // 8)
    return -(-words // multiple) * multiple


class Layout(ABC):
    """One way to store codes (N, K), scales (N, G) and zeros (N, G) of a layer as three tensors."""

    name: ClassVar[str]
    word: ClassVar[torch.dtype] = torch.int32
    zeros_names: ClassVar[tuple[str, ...]] = ("qzeros",)
    """Names of the tensor of zeros: the first one is written, all are read."""
    zeros_types: ClassVar[tuple[torch.dtype, ...]] = (torch.int32,)
    zeros_optional: ClassVar[bool] = True
    """Whether a symmetric file may leave the zeros out."""

    @abstractmethod
    def sizes(self, qweight: Header, scales: Header) -> tuple[int, int] | None:
        """(K, N) of a layer whose tensors have these headers, None where they do not fit this layout."""

    @abstractmethod
    def shapes(self, in_features: int, out_features: int, group: int) -> tuple[tuple[int, int], ...]:
        """Shapes of qweight, scales and zeros."""

    @abstractmethod
    def group_size(self, in_features: int, scales: Header) -> int | None:
        """The group size that the shape of the scales implies, None where it implies none."""

    def why_not(self, in_features: int, out_features: int, group: int) -> str | None:
        """Why this layout cannot store such a layer, or None if it can."""
        if out_features % 8:
            return f"out_features {out_features} is not a multiple of 8"
        if in_features % group:
            return f"in_features {in_features} is not a multiple of group_size {group}"
        return None

    @abstractmethod
    def unpack(
        self, qweight: Tensor, scales: Tensor, zeros: Tensor | None, num_groups: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Codes uint8 (N, K), scales (N, G) as stored, zeros fp32 (N, G); raises ValueError with a sentence."""

    @abstractmethod
    def pack(self, codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
        """qweight, scales and zeros to store; raises ValueError with a sentence where they cannot hold the numbers."""


class Gemm(Layout):
    """What nearly all AWQ files use: 8 neighbouring outputs to a word, in an order of its own, inputs as rows."""

    name = "gemm"

    def sizes(self, qweight: Header, scales: Header) -> tuple[int, int] | None:
        if not _matrices(torch.int32, qweight, scales) or scales.shape[1] != 8 * qweight.shape[1]:
            return None
        return qweight.shape[0], scales.shape[1]

    def shapes(self, in_features: int, out_features: int, group: int) -> tuple[tuple[int, int], ...]:
        groups, words = in_features // group, out_features // 8
        return (in_features, words), (groups, out_features), (groups, words)

    def group_size(self, in_features: int, scales: Header) -> int | None:
        rows = scales.shape[0]
        return None if rows == 0 or in_features % rows else in_features // rows

    def unpack(
        self, qweight: Tensor, scales: Tensor, zeros: Tensor | None, num_groups: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        codes = unpack_words(qweight.T.contiguous(), GEMM_ORDER, 0)
        scales = scales.T.contiguous()
        return codes, scales, _midpoints(scales) if zeros is None else unpack_words(zeros.T, GEMM_ORDER, 0).float()

    def pack(self, codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
        words = pack_words(codes, GEMM_ORDER, 0), pack_words(_nibbles(zeros), GEMM_ORDER, 0)
        return words[0].T.contiguous(), scales.T.contiguous(), words[1].T.contiguous()


class Gemv(Layout):
    """8 neighbouring inputs to a word, the first in the lowest bits, outputs as rows; scales and zeros padded by 0."""

    name = "gemv"

    def sizes(self, qweight: Header, scales: Header) -> tuple[int, int] | None:
        if not _matrices(torch.int32, qweight, scales) or scales.shape[0] != qweight.shape[0]:
            return None
        return 8 * qweight.shape[1], qweight.shape[0]

    def shapes(self, in_features: int, out_features: int, group: int) -> tuple[tuple[int, int], ...]:
        width = padded_words(in_features, group) or 0
        return (out_features, in_features // 8), (out_features, 8 * width), (out_features, width)

    def group_size(self, in_features: int, scales: Header) -> int | None:
        return _group_from_padding(in_features, scales.shape[1])

    def why_not(self, in_features: int, out_features: int, group: int) -> str | None:
        if in_features % 8:
            return f"in_features {in_features} is not a multiple of 8"
        return super().why_not(in_features, out_features, group) or _no_padding_rule(in_features, group)

    def unpack(
        self, qweight: Tensor, scales: Tensor, zeros: Tensor | None, num_groups: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        codes = unpack_words(qweight, SEQUENTIAL, 1)
        scales = _without_padding(scales, num_groups)
        if zeros is None:
            return codes, scales, _midpoints(scales)
        return codes, scales, unpack_words(zeros, SEQUENTIAL, 1)[:, :num_groups].float()

    def pack(self, codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
        zeros = _pad(_nibbles(zeros), codes.shape[1], group)
        padded = _pad(scales, codes.shape[1], group)
        _without_padding(padded, scales.shape[1])  # a file that could not be read again must not be written
        return pack_words(codes, SEQUENTIAL, 1), padded, pack_words(zeros, SEQUENTIAL, 1)


class GemvFast(Layout):
    """4 codes to an int16 word, interleaved for a GPU kernel; zeros stored as -(scale * zero), a real number."""

    name = "gemv_fast"
    word = torch.int16
    zeros_names = ("qzeros", "scaled_zeros")
    zeros_types = FLOATS
    zeros_optional = False

    def sizes(self, qweight: Header, scales: Header) -> tuple[int, int] | None:
        if not _matrices(torch.int16, qweight, scales) or scales.shape[1] != 4 * qweight.shape[0]:
            return None
        return qweight.shape[1], scales.shape[1]

    def shapes(self, in_features: int, out_features: int, group: int) -> tuple[tuple[int, int], ...]:
        rows = 8 * (padded_words(in_features, group) or 0)
        return (out_features // 4, in_features), (rows, out_features), (rows, out_features)

    def group_size(self, in_features: int, scales: Header) -> int | None:
        return _group_from_padding(in_features, scales.shape[0])

    def why_not(self, in_features: int, out_features: int, group: int) -> str | None:
        if in_features % 64:
            return f"in_features {in_features} is not a multiple of 64"
        return super().why_not(in_features, out_features, group) or _no_padding_rule(in_features, group)

    def unpack(
        self, qweight: Tensor, scales: Tensor, zeros: Tensor | None, num_groups: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        if zeros is None:
            raise ValueError(f"{self.zeros_names[0]} is missing")
        scales = _without_padding(scales.T, num_groups)
        shift = -zeros[:num_groups].T.float()
        if bool(((scales == 0) & (shift != 0)).any()):
            raise ValueError(f"a scale is 0 where its {self.zeros_names[0]} is not")
        # where both are 0 any zero would do: -0.0 or 0.0 keeps the sign, so that packing gives back the same bits
        return unpack_interleaved(qweight), scales, torch.where(scales == 0, shift, shift / scales.float()).contiguous()

    def pack(self, codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
        scaled = -(scales.float() * zeros.float()).to(scales.dtype)
        if not bool(torch.isfinite(scaled).all()):
            raise ValueError(f"scale * zero exceeds the range of {scales.dtype}")
        padded = _pad(scales, codes.shape[1], group)
        _without_padding(padded, scales.shape[1])
        return pack_interleaved(codes), padded.T.contiguous(), _pad(scaled, codes.shape[1], group).T.contiguous()


class LlmAwq(GemvFast):
    """As gemv_fast; llm-awq calls the tensor of zeros by another name."""

    name = "llm-awq"
    zeros_names = ("scaled_zeros", "qzeros")


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (Gemm(), Gemv(), GemvFast(), LlmAwq())}


def looks_like_gptq(qweight: Header, scales: Header) -> bool:
    """Whether qweight is (K * bits / 32, N): a column for each output, as no AWQ layout has."""
    return _matrices(torch.int32, qweight, scales) and qweight.shape[1] == scales.shape[1]


def looks_like_marlin(qweight: Header, scales: Header) -> bool:
    """Whether qweight is (K / 16, 2 N): tiles of the Marlin kernel."""
    return _matrices(torch.int32, qweight, scales) and qweight.shape[1] == 2 * scales.shape[1]


def _matrices(word: torch.dtype, qweight: Header, scales: Header) -> bool:
    return qweight.dtype == word and len(qweight.shape) == len(scales.shape) == 2


def _midpoints(scales: Tensor) -> Tensor:
    return torch.full_like(scales, MIDPOINT, dtype=torch.float32)


def _nibbles(zeros: Tensor) -> Tensor:
    """Zeros as uint8; raises ValueError where they are not integers in 0..15."""
    wrong = zeros[(zeros < 0) | (zeros > 15) | (zeros != zeros.round())]
    if wrong.numel():
        raise ValueError(f"zeros must be integers in 0..15, {wrong.numel()} are not, {wrong[0]:g} among them")
    return zeros.to(torch.uint8)


def _group_from_padding(in_features: int, num_scales: int) -> int | None:
    """The group size of 32, 64 and 128, all that the kernels of these layouts know, whose padded scales fit.

    At most one does: the padded widths are 4, 2 and 1 times ceil(in_features / 1024) words.
    """
    known = [group for group in (32, 64, 128) if in_features % group == 0]
    return next((group for group in known if 8 * (padded_words(in_features, group) or 0) == num_scales), None)


def _pad(values: Tensor, in_features: int, group: int) -> Tensor:
    """(N, G) -> (N, 8 * padded words), filled up with 0."""
    return F.pad(values, (0, 8 * (padded_words(in_features, group) or 0) - values.shape[1]))


def _without_padding(scales: Tensor, num_groups: int) -> Tensor:
    """The used part of padded scales (N, 8 * words); raises ValueError where the padding betrays a wrong group size.

    The shape alone cannot show it: 1024 inputs have 8 columns for a group size of 128 and of 1024.
    """
    if bool((scales[:, num_groups:] != 0).any()):
        raise ValueError(f"scales beyond the {num_groups} groups are not 0, so group_size is smaller")
    if num_groups > 1 and not bool(scales[:, num_groups - 1].any()):
        raise ValueError(f"scales of the last of {num_groups} groups are all 0, as padding is, so group_size is larger")
    return scales[:, :num_groups].contiguous()


def _no_padding_rule(in_features: int, group: int) -> str | None:
    if padded_words(in_features, group) is None:
        return f"its padding is defined for group_size 32, 64 and 128 or more, not {group}"
    return None
