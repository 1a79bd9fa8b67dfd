"""Which float layers are quantised while they load, and to what: the setting `--quantize-weights`.

Rounding to nearest needs no calibration, so any float checkpoint can be served in int8 or int4 at once. Better numbers come
from checkpoints that were quantised with care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from octavo.errors import ConfigError
from octavo.quant.config import QuantConfig
from octavo.quant.quantizer import common_group, round_to_nearest
from octavo.quant.weight import LinearLayer, QuantizedWeight, WeightSpec

_BLOCK_NUMBERS = 1 << 22  # rounded at once: temporaries of fp32 take several times a weight's memory


SCHEMES: Mapping[str, Callable[[LinearLayer], WeightSpec | None]] = {
    "int8": lambda layer: WeightSpec("int8", (1, -1)),
    "int4": lambda layer: WeightSpec("uint4", (1, common_group([layer])), has_zeros=True),
}
"""Weight-only schemes of core's own; a format's name means what the format makes (`QuantConfig.online_spec`)."""


def check_schemes(schemes: Iterable[str], formats: Mapping[str, type[QuantConfig]]) -> None:
    """Raises ConfigError for a name that is no scheme."""
    for scheme in schemes:
        if scheme not in {*SCHEMES, "float", *formats}:
            known = ", ".join(sorted({*SCHEMES, "float", *(f.name for f in formats.values())}))
            raise ConfigError(f"--quantize-weights: no scheme '{scheme}'; known: {known}")


def online_scheme(layer: LinearLayer, short_name: str, schemes: Mapping[str, str]) -> str | None:
    """The scheme that the settings name for a layer, None if it is to stay as it is.

    `schemes` maps patterns to scheme names, the first that matches the layer's name (or its `short_name`, without the model's
    prefix) counts; the pattern "" stands for all linears of the decoder layers.
    """
    names = (layer.name, short_name)
    scheme = next((s for p, s in schemes.items() if p and any(fnmatchcase(name, p) for name in names)), None)
    if scheme is None and short_name.startswith("layers."):
        scheme = schemes.get("")
    return None if scheme == "float" else scheme


def online_spec(layer: LinearLayer, scheme: str, formats: Mapping[str, type[QuantConfig]]) -> WeightSpec | None:
    """What a float layer becomes in a scheme that `check_schemes` knows, None if the scheme cannot hold it."""
    return SCHEMES[scheme](layer) if scheme in SCHEMES else formats[scheme].online_spec(layer)


def quantize_online(weight: QuantizedWeight, spec: WeightSpec) -> QuantizedWeight:
    """A float weight rounded to `spec`, its bias kept; block by block of rows that share no scales, which saves memory."""
    rows, columns = weight.codes.shape
    step = max(1, _BLOCK_NUMBERS // columns) if spec.group_shape[0] == 1 else rows
    first, *others = (round_to_nearest(part, spec) for part in torch.split(weight.codes, step))
    return replace(first.concat(others) if others else first, bias=weight.bias)
