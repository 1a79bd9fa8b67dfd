"""Layers of each kind of GPTQ file, written out word by word: what the layout table of the README says, as numbers.

Codes differ along the inputs and zeros along the outputs, so that no wrong order of fields can pass, and apart from each
other, so that a mistake in one is not undone by the same mistake in the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo import Golden


def goldens() -> list[Golden]:
    return [
        _asymmetric("gptq"),
        _asymmetric("gptq_v2"),
        _act_order(),
        _two_bits(),
        _three_bits(),
        _eight_bits(),
        _ragged(),
        _short_words(),
    ]


def _words(rows: list[list[int]], dtype: torch.dtype = torch.int32) -> Tensor:
    """Words written as unsigned hexadecimal, as the signed integers that files store."""
    limit = 2 ** (8 * dtype.itemsize - 1)
    return torch.tensor([[word - 2 * limit if word >= limit else word for word in row] for row in rows], dtype=dtype)


def _settings(bits: int, group_size: int, sym: bool, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": sym, **others}


def _g_idx(*groups: int) -> Tensor:
    return torch.tensor(groups, dtype=torch.int32)


def _asymmetric(version: str) -> Golden:
    """4 bits, K = 16, N = 8, g = 8: zeros n in the first group, 15 - n in the second; v1 stores each less one, 0 as 15."""
    up, high, down = 0x76543210, 0xFEDCBA98, 0x01234567
    zeros = [[0x6543210F], [0x789ABCDE]] if version == "gptq" else [[0x76543210], [0x89ABCDEF]]
    first = [[0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0]] * 4
    scales = [2.0 ** (n - 4) for n in range(8)]
    rows = [
        [float(code - n) for code in first[n]] + [(code - (15 - n)) * scales[n] for code in range(8, 16)]
        for n in range(8)
    ]
    return Golden(
        _settings(4, 8, False, desc_act=False, checkpoint_format=version),
        {
            "qweight": _words([[up, down] * 4, [high] * 8]),
            "qzeros": _words(zeros),
            "scales": torch.tensor([[1.0] * 8, scales], dtype=torch.float16),
            "g_idx": _g_idx(*[0] * 8, *[1] * 8),
        },
        torch.tensor(rows),
    )


def _act_order() -> Golden:
    """4 bits, K = 16, N = 8, g = 8, symmetric: odd inputs are of the first group, even ones of the second."""
    rows = [[(k - 8) * (1.0 if k % 2 else n + 2.0) for k in range(16)] for n in range(8)]
    return Golden(
        _settings(4, 8, True, desc_act=True, checkpoint_format="gptq"),
        {
            "qweight": _words([[0x76543210] * 8, [0xFEDCBA98] * 8]),
            "qzeros": _words([[0x77777777], [0x77777777]]),
            "scales": torch.tensor([[1.0] * 8, [n + 2.0 for n in range(8)]], dtype=torch.bfloat16),
            "g_idx": _g_idx(*[1, 0] * 8),
        },
        torch.tensor(rows),
    )


def _two_bits() -> Golden:
    """2 bits, K = N = 16, one group, symmetric, v2: zeros are 2, stored as they are."""
    ramp = torch.tensor([-2.0, -1, 0, 1] * 4)
    return Golden(
        _settings(2, -1, True, desc_act=False, format="gptq_v2"),
        {
            "qweight": _words([[0xE4E4E4E4] * 16]),
            "qzeros": _words([[0xAAAAAAAA]]),
            "scales": torch.arange(1.0, 17)[None],
            "g_idx": _g_idx(*[0] * 16),
        },
        torch.stack([ramp * (n + 1) for n in range(16)]),
    )


def _three_bits() -> Golden:
    """3 bits, K = N = 32, one group, symmetric: codes k % 8, the 11th and the 22nd of which straddle words."""
    ramp = torch.tensor([-4.0, -3, -2, -1, 0, 1, 2, 3] * 4)
    return Golden(
        _settings(3, -1, True, desc_act=False, checkpoint_format="gptq"),
        {
            "qweight": _words([[0x88FAC688] * 32, [0xC688FAC6] * 32, [0xFAC688FA] * 32]),
            "qzeros": _words([[0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D]]),
            "scales": torch.arange(1.0, 33)[None].half(),
            "g_idx": _g_idx(*[0] * 32),
        },
        torch.stack([ramp * (n + 1) for n in range(32)]),
    )


def _eight_bits() -> Golden:
    """8 bits, K = N = 4, one group, symmetric: zeros are 128, stored as 127."""
    codes = torch.tensor([0.0, 7, 14, 21])
    return Golden(
        _settings(8, -1, True, desc_act=False, checkpoint_format="gptq"),
        {
            "qweight": _words([[0x150E0700] * 4]),
            "qzeros": _words([[0x7F7F7F7F]]),
            "scales": torch.tensor([[1.0, 2, 3, 4]], dtype=torch.float16),
            "g_idx": _g_idx(0, 0, 0, 0),
        },
        torch.stack([(codes - 128) * (n + 1) for n in range(4)]),
    )


def _ragged() -> Golden:
    """4 bits, K = 24, N = 8, g = 16: the second group has 8 inputs. Asymmetric, v2, with bias."""
    up, down = 0x76543210, 0x89ABCDEF
    rows = [
        [float(k % 8 if k < 8 else 15 - k % 8) - n for k in range(16)] + [(k - (15 - n)) * 4.0 for k in range(8)]
        for n in range(8)
    ]
    return Golden(
        _settings(4, 16, False, checkpoint_format="gptq_v2"),
        {
            "qweight": _words([[up] * 8, [down] * 8, [up] * 8]),
            "qzeros": _words([[0x76543210], [0x89ABCDEF]]),
            "scales": torch.tensor([[1.0] * 8, [4.0] * 8], dtype=torch.float16),
            "g_idx": _g_idx(*[0] * 16, *[1] * 8),
            "bias": torch.arange(8.0).half(),
        },
        torch.tensor(rows),
    )


def _short_words() -> Golden:
    """The same stream in words of 16 bits: 4 bits, K = 8, N = 4, one group, symmetric."""
    codes = torch.arange(8.0)
    return Golden(
        _settings(4, -1, True, checkpoint_format="gptq", pack_dtype="int16"),
        {
            "qweight": _words([[0x3210] * 4, [0x7654] * 4], torch.int16),
            "qzeros": _words([[0x7777]], torch.int16),
            "scales": torch.tensor([[1.0, 2, 3, 4]], dtype=torch.float16),
            "g_idx": _g_idx(*[0] * 8),
        },
        torch.stack([(codes - 8) * (n + 1) for n in range(4)]),
    )
