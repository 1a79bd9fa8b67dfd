"""Layers of each AWQ layout, written out word by word: what the layout table of the README says, as numbers.

The ramp 0, 1, ... 7 reads differently in every order, so no wrong order of nibbles can pass; codes and zeros vary apart
from each other, so that a mistake in one is not undone by the same mistake in the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import Golden


def goldens() -> list[Golden]:
    return [_gemm(), _gemm_symmetric(), _gemv(), *_interleaved()]


def _words(rows: list[list[int]], dtype: torch.dtype) -> Tensor:
    """Words written as unsigned hexadecimal, as the signed integers that files store."""
    limit = 2 ** (8 * dtype.itemsize - 1)
    return torch.tensor([[word - 2 * limit if word >= limit else word for word in row] for row in rows], dtype=dtype)


def _gemm() -> Golden:
    """K = 4, N = 8, g = 2: one word a row, for codes and for zeros."""
    return Golden(
        {"quant_method": "awq", "bits": 4, "group_size": 2, "zero_point": True, "version": "gemm"},
        {
            "qweight": _words([[0x00000000], [0x75316420], [0x75316420], [0xFDB9ECA8]], torch.int32),
            "qzeros": _words([[0x75316420], [0x88888888]], torch.int32),
            "scales": torch.tensor([[1.0] * 8, [0.5, 1, 2, 4, 8, 16, 32, 64]], dtype=torch.float16),
        },
        # columns: codes 0 with zeros 0..7; codes 0..7 with the same zeros; codes 0..7 and 8..15 with zeros 8
        torch.tensor(
            [
                [0, 0, -4, 0],
                [-1, 0, -7, 1],
                [-2, 0, -12, 4],
                [-3, 0, -20, 12],
                [-4, 0, -32, 32],
                [-5, 0, -48, 80],
                [-6, 0, -64, 192],
                [-7, 0, -64, 448],
            ],
            dtype=torch.float32,
        ),
    )


def _gemm_symmetric() -> Golden:
    """K = 2, N = 8, one group over all inputs, zero_point false: every zero is 8."""
    return Golden(
        {"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": False, "version": "gemm"},
        {
            "qweight": _words([[0x75316420], [0xF289E38C]], torch.int32),
            "qzeros": _words([[0x88888888]], torch.int32),
            "scales": torch.tensor([[0.5] * 8], dtype=torch.bfloat16),
        },
        torch.tensor([[-4, 2], [-3.5, 0.5], [-3, 0], [-2.5, 0], [-2, -2.5], [-1.5, -3], [-1, 3], [-0.5, 3.5]]),
    )


def _gemv() -> Golden:
    """K = 64, N = 8, g = 32: 8 words a row; 2 zeros and 2 scales a row, padded to 4 words and 32 scales."""
    up, down = 0x76543210, 0x89ABCDEF
    scales = torch.zeros(8, 32, dtype=torch.float16)
    scales[:, 0], scales[:, 1] = 0.5, torch.arange(1, 9)
    ramp = torch.arange(8).repeat(4).float()  # 0..7 four times
    return Golden(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemv"},
        {
            "qweight": _words([[up] * 4 + [down] * 4] * 8, torch.int32),
            # zeros of row n: n in the first group, 15 - n in the second
            "qzeros": _words([[((15 - n) << 4) + n, 0, 0, 0] for n in range(8)], torch.int32),
            "scales": scales,
        },
        torch.stack([torch.cat([(ramp - n) * 0.5, (15 - ramp - (15 - n)) * (n + 1)]) for n in range(8)]),
    )


def _interleaved() -> list[Golden]:
    """K = 64, N = 8, g = 64: two rows of 64 words, each for 4 outputs; scales and zeros padded from 1 to 16 rows.

    Outputs 0 and 4 have the codes k // 4, outputs 1 and 5 the codes k % 16, the others their own number throughout.
    """
    quarter = [0x6420] * 4 + [0x7531] * 4 + [0xECA8] * 4 + [0xFDB9] * 4
    modulo = [0x8080, 0x9191, 0xA2A2, 0xB3B3, 0xC4C4, 0xD5D5, 0xE6E6, 0xF7F7] * 2
    words = [[*quarter, *modulo, *[0x2222] * 16, *[0x3333] * 16], [*quarter, *modulo, *[0x6666] * 16, *[0x7777] * 16]]
    scales, scaled_zeros = torch.zeros(16, 8, dtype=torch.float16), torch.zeros(16, 8, dtype=torch.float16)
    scales[0] = torch.tensor([1, 2, 4, 8, 1, 2, 4, 8])
    scaled_zeros[0] = torch.tensor([-0.0, -2, -8, -24, -4, -10, -24, -56])  # -(scale * zero), the zero of output n is n
    k = torch.arange(64).float()
    codes = [k // 4, k % 16, k * 0 + 2, k * 0 + 3, k // 4, k % 16, k * 0 + 6, k * 0 + 7]
    weight = torch.stack([(row - n) * 2 ** (n % 4) for n, row in enumerate(codes)])
    common = {"qweight": _words(words, torch.int16), "scales": scales}
    settings = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
    return [
        Golden({**settings, "version": "gemv_fast"}, {**common, "qzeros": scaled_zeros}, weight),
        Golden({**settings, "backend": "llm-awq"}, {**common, "scaled_zeros": scaled_zeros}, weight),
    ]
