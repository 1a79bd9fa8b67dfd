"""Layers of the fp8 and w8a8_int8 formats, written out byte by byte.

e4m3 is sign, 4 bits of exponent (bias 7), 3 of mantissa: 0x38 is 1, each step of 8 doubles, 0x7E is 448, 0x01 is 2^-9.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import Golden

_TINY = 2.0**-9


def fp8_goldens() -> list[Golden]:
    return [_per_tensor(), _per_tensor_static(), _per_channel(), _blocks()]


def int8_goldens() -> list[Golden]:
    """Two outputs, three inputs, the whole range of codes."""
    return [
        Golden(
            {"quant_method": "w8a8_int8", "is_dynamic": True},
            {
                "weight": torch.tensor([[-128, -1, 127], [0, 64, -3]], dtype=torch.int8),
                "weight_scale": torch.tensor([[0.5], [2.0]], dtype=torch.bfloat16),
                "bias": torch.tensor([1.0, -1.0], dtype=torch.bfloat16),
            },
            torch.tensor([[-64, -0.5, 63.5], [0, 128, -6]]),
        )
    ]


def _codes(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.uint8).view(torch.float8_e4m3fn)


def _per_tensor() -> Golden:
    """AutoFP8, activation_scheme dynamic: one scale, a scalar."""
    return Golden(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]},
        {"weight": _codes([[0x38, 0xB8, 0x7E], [0x01, 0x00, 0x40]]), "weight_scale": torch.tensor(0.5)},
        torch.tensor([[0.5, -0.5, 224], [_TINY / 2, 0, 1]]),
    )


def _per_tensor_static() -> Golden:
    """Static: the inputs have one stored scale. ModelOpt writes the same tensors under settings of its own."""
    return Golden(
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        {
            "weight": _codes([[0x3C, 0x30], [0xFE, 0x08], [0x78, 0x80]]),
            "weight_scale": torch.tensor([0.25]),
            "input_scale": torch.tensor([0.125]),
        },
        torch.tensor([[0.375, 0.125], [-112, 2.0**-8], [64, -0.0]]),
    )


def _per_channel() -> Golden:
    return Golden(
        {"quant_method": "w8a8_fp8"},
        {
            "weight": _codes([[0x38, 0x39, 0x3A], [0x48, 0xC8, 0x47]]),
            "weight_scale": torch.tensor([[1.0], [0.5]], dtype=torch.bfloat16),
            "bias": torch.tensor([0.5, -2.0], dtype=torch.bfloat16),
        },
        torch.tensor([[1, 1.125, 1.25], [2, -2, 1.875]]),
    )


def _blocks() -> Golden:
    """DeepSeek's layout with blocks of 2 x 3 in place of 128 x 128; the last row and the last column are cut short."""
    return Golden(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [2, 3], "fmt": "e4m3"},
        {
            "weight": _codes([[0x38, 0x40, 0x48, 0x38], [0x30, 0xB0, 0x28, 0x40], [0x38, 0x39, 0x3A, 0xB8]]),
            "weight_scale_inv": torch.tensor([[1.0, 10.0], [100.0, 1000.0]]),  # multiplied, despite the name
        },
        torch.tensor([[1, 2, 4, 10], [0.5, -0.5, 0.25, 20], [100, 112.5, 125, -1000]]),
    )
