"""AWQ checkpoints for octavo: 4-bit weights in groups, in the four layouts that AWQ tools have written.

This plugin knows how such files lie on disk and nothing about kernels. `config` holds the settings and the checks,
`layouts` the bits, `goldens` a few layers written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo import hookimpl

if TYPE_CHECKING:
    from octavo import QuantConfig, Quantizer

octavo_api = (1, 0)


@hookimpl
def octavo_quant_configs() -> Sequence[type[QuantConfig]]:
    from octavo_awq.config import AWQConfig

    return [AWQConfig]


@hookimpl
def octavo_quantizers() -> Sequence[type[Quantizer]]:
    from octavo_awq.quantizer import AWQQuantizer

    return [AWQQuantizer]
