"""Checkpoints with 8-bit weights and inputs for octavo, in three families, and the kernels that multiply them as integers.

`compressed_tensors` reads and writes what llm-compressor makes: W8A8 in int8 and fp8, and integers of 2 to 8 bits in words. Its
parts: `schemes` and `matching` (settings), `stored` (headers), `codes` and `packing` (bits), `inference` (settings told from
tensors), `export` (settings to write). `fp8` and `int8` are neighbours that store the same tensors under other settings.
`checks` is what all three share, `goldens` are layers written out, `methods` the kernels, `quantizer` what
makes W8A8 weights from float ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo import hookimpl

if TYPE_CHECKING:
    from octavo import LinearMethod, Platform, QuantConfig, Quantizer

octavo_api = (1, 0)


@hookimpl
def octavo_quant_configs() -> Sequence[type[QuantConfig]]:
    from octavo_w8a8.compressed_tensors import CompressedTensorsConfig
    from octavo_w8a8.fp8 import FP8Config
    from octavo_w8a8.int8 import W8A8Int8Config

    return [CompressedTensorsConfig, FP8Config, W8A8Int8Config]


@hookimpl
def octavo_linear_methods(platform: Platform) -> Sequence[type[LinearMethod]]:
    from octavo_w8a8.methods import Int8Method, Int8WeightMethod

    return [Int8Method, Int8WeightMethod]


@hookimpl
def octavo_quantizers() -> Sequence[type[Quantizer]]:
    from octavo_w8a8.quantizer import W8A8Quantizer

    return [W8A8Quantizer]
