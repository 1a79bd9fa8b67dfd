"""Layers of each format and kind of storage, written out: what the tables of the README say, as numbers.

Codes that count up read differently in every order, so that no wrong order of bits can pass; codes, zeros and scales vary
apart from each other. Floats in e4m3 are sign, 4 bits of exponent (bias 7), 3 of mantissa: 0x38 is 1, each step of 8
doubles, 0x7E is 448, 0x01 is 2^-9.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo import Golden


def goldens() -> list[Golden]:
    return [
        _packed_4_bits(),
        _packed_3_bits(),
        _packed_with_tail(),
        _packed_in_order(),
        _int8_dynamic(),
        _int8_static(),
        _fp8_per_tensor(),
        _fp8_blocks(),
    ]


def optional_zeros() -> list[Golden]:
    """Asymmetric layers. Apart from the others because a file may leave zero points out, and then means other numbers."""
    return [_packed_asymmetric(), _int8_asymmetric()]


def words(rows: list[list[int]]) -> Tensor:
    """Words written as unsigned hexadecimal, as the signed integers that files store."""
    return torch.tensor([[word - 2**32 if word >= 2**31 else word for word in row] for row in rows], dtype=torch.int32)


def settings(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """`quantization_config` with one group for all linear layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "version": "0.19.0",
    }


_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def _packed_4_bits() -> Golden:
    """K = 16, N = 2, g = 8. Signed codes -8..7 are the words 0x76543210, 0xFEDCBA98: code = q + 8, inputs from low bits up."""
    return Golden(
        settings("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}),
        {
            "weight_packed": words([[0x76543210, 0xFEDCBA98], [0x89ABCDEF, 0x01234567]]),
            "weight_scale": torch.tensor([[1, 0.5], [0.25, 2]], dtype=torch.bfloat16),
            "weight_shape": torch.tensor([2, 16]),
        },
        torch.tensor(
            [
                [-8, -7, -6, -5, -4, -3, -2, -1, 0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5],
                [1.75, 1.5, 1.25, 1, 0.75, 0.5, 0.25, 0, -2, -4, -6, -8, -10, -12, -14, -16],
            ]
        ),
    )


def _packed_3_bits() -> Golden:
    """K = 32, N = 1, one scale: three words are one bitstream of 96 bits; codes 10 and 21 straddle words."""
    return Golden(
        settings("pack-quantized", {"num_bits": 3, "type": "int", "strategy": "channel"}),
        {
            "weight_packed": words([[0x88FAC688, 0xC688FAC6, 0xFAC688FA]]),
            "weight_scale": torch.tensor([[0.5]], dtype=torch.float16),
            "weight_shape": torch.tensor([1, 32]),
        },
        torch.tensor([[-2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5] * 4]),
    )


def _packed_with_tail() -> Golden:
    """K = 12, N = 2: the bits behind the last code are 0, not the code of 0 (8)."""
    return Golden(
        settings("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "tensor"}),
        {
            "weight_packed": words([[0x88888888, 0x00008888], [0x76543210, 0x0000BA98]]),
            "weight_scale": torch.tensor([0.5]),
            "weight_shape": torch.tensor([2, 12]),
        },
        torch.tensor([[0.0] * 12, [-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5]]),
    )


def _packed_in_order() -> Golden:
    """K = 4, N = 1, g = 2, 8 bits: inputs 1 and 2 are group 0, inputs 0 and 3 group 1."""
    return Golden(
        settings("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 2, "actorder": "group"}),
        {
            "weight_packed": words([[0xFF807F00]]),  # -128, -1, 0, 127
            "weight_scale": torch.tensor([[0.5, 0.25]]),
            "weight_shape": torch.tensor([1, 4]),
            "weight_g_idx": torch.tensor([1, 0, 0, 1], dtype=torch.int32),
        },
        torch.tensor([[-32, -0.5, 0, 31.75]]),
    )


def _packed_asymmetric() -> Golden:
    """K = 2, N = 12, g = 1: zero points lie along the outputs, one word for 8 of them, in their own order."""
    n = torch.arange(12).float()
    return Golden(
        settings("pack-quantized", {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 1}),
        {
            "weight_packed": words([[0x98]] * 12),  # codes 8 and 9 everywhere: 0 and 1
            "weight_scale": torch.tensor([[1.0, 0.5]] * 12, dtype=torch.float16),
            "weight_shape": torch.tensor([12, 2]),
            "weight_zero_point": words([[0x76543210, 0x88888888], [0x0000BA98, 0x00008888]]),
        },
        torch.stack([8 - n, torch.full((12,), 0.5)], 1),
    )


def _int8_dynamic() -> Golden:
    """K = 4, N = 2: bytes as they are, scales of absmax / 127.5 for each output."""
    scales = torch.tensor([[0.0078125], [0.00048828125]])
    return Golden(
        settings("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, _TOKEN),
        {
            "weight": torch.tensor([[-127, 32, 64, 115], [64, -127, 96, 32]], dtype=torch.int8),
            "weight_scale": scales,
            "bias": torch.tensor([1.0, -2.0]),
        },
        torch.tensor([[-127.0, 32, 64, 115], [64, -127, 96, 32]]) * scales,
    )


def _int8_static() -> Golden:
    """K = 3, N = 2: one scale for all weights; inputs are static and asymmetric, with a scale and a zero point of their own."""
    inputs = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor", "dynamic": False}
    return Golden(
        settings("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}, inputs),
        {
            "weight": torch.tensor([[-128, 1, 2], [3, 4, 127]], dtype=torch.int8),
            "weight_scale": torch.tensor([0.5], dtype=torch.float16),
            "input_scale": torch.tensor([0.25], dtype=torch.float16),
            "input_zero_point": torch.tensor([-64], dtype=torch.int8),
        },
        torch.tensor([[-64, 0.5, 1], [1.5, 2, 63.5]]),
    )


def _int8_asymmetric() -> Golden:
    """K = 2, N = 2: the zero points of weights are bytes, shaped as the scales."""
    return Golden(
        settings("int-quantized", {"num_bits": 8, "symmetric": False, "strategy": "channel"}, _TOKEN),
        {
            "weight": torch.tensor([[-128, 127], [5, 6]], dtype=torch.int8),
            "weight_scale": torch.tensor([[0.5], [2.0]]),
            "weight_zero_point": torch.tensor([[-28], [7]], dtype=torch.int8),
        },
        torch.tensor([[-50, 77.5], [-4, -2]]),
    )


def _fp8_per_tensor() -> Golden:
    """K = 3, N = 2: float8_e4m3fn, one scale for all weights and a static one for the inputs."""
    weight = torch.tensor([[448.0, -1.5, 0.0], [0.001953125, 2.0, -448.0]])
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    return Golden(
        settings("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, inputs),
        {
            "weight": weight.to(torch.float8_e4m3fn),
            "weight_scale": torch.tensor([0.5], dtype=torch.bfloat16),
            "input_scale": torch.tensor([0.125], dtype=torch.bfloat16),
        },
        weight / 2,
    )


def _fp8_blocks() -> Golden:
    """K = 4, N = 4 in blocks of 2 outputs and 2 inputs, inputs scaled in groups of 2 as they come."""
    weight = torch.arange(1.0, 17).reshape(4, 4)
    scales = torch.tensor([[1.0, 2.0], [4.0, 0.5]])
    blocks = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [2, 2]}
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 2, "dynamic": True}
    return Golden(
        settings("float-quantized", blocks, inputs),
        {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": scales},
        weight * scales.repeat_interleave(2, 0).repeat_interleave(2, 1),
    )


# --- fp8 and w8a8_int8

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
