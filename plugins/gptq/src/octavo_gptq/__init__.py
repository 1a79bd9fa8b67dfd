"""GPTQ checkpoints for octavo: codes of 2, 3, 4 or 8 bits in groups along the inputs, in either order of inputs.

This plugin knows how such files lie on disk and nothing about kernels. `config` holds the settings, `rules` those of
single layers, `auto_round` that tool's spelling of both; `headers` and `recognise` check and judge headers; `packing` holds
the bits, `reading` what order and zeros mean, `writing` new files, `goldens` a few layers written out. `quantizer` makes such
weights from float ones.
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
    from octavo_gptq.config import GPTQConfig

    return [GPTQConfig]


@hookimpl
def octavo_quantizers() -> Sequence[type[Quantizer]]:
    from octavo_gptq.quantizer import GPTQQuantizer

    return [GPTQQuantizer]
