"""Which format a checkpoint is in: what its settings say, checked against what is installed and what the user expects."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from octavo.errors import CheckpointError, ConfigError, OctavoError
from octavo.quant.config import QuantConfig, QuantSource, TensorInfo

logger = logging.getLogger(__name__)

# Last name parts that only quantised layers have: a folder that holds one and is taken for a float model would be garbage.
QUANT_SUFFIXES = frozenset(
    [
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
        "scaled_zeros",
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_zero_point",
        "weight_g_idx",
        "weight_shape",
        "input_scale",
        "input_zero_point",
        "B",
        "s",
    ]
)


def detect_format(
    sources: Sequence[QuantSource],
    tensors: Mapping[str, TensorInfo],
    formats: Mapping[str, type[QuantConfig]],
    wanted: str | None,
    notes: Sequence[str] = (),
    float_too: bool = False,
) -> QuantConfig | None:
    """The checkpoint's format with its settings, or None for a float model.

    The first source that names or suggests a format is believed; settings of later ones that contradict it are reported.
    `wanted` is what the user said it must be, or with `float_too` will be; `notes` on missing plugins are quoted where the
    format has no owner. Raises ConfigError for a mix-up (with both values and where each came from), CheckpointError for a
    format that nobody provides.
    """
    candidates = set(formats.values())
    packed = sorted(name for name in tensors if name.rpartition(".")[2] in QUANT_SUFFIXES)
    owner: type[QuantConfig] | None = None
    source: QuantSource | None = None
    found: QuantSource | None = None
    for found in sources:
        source = found
        if _method(source) is not None:
            owner, source = _owner(source, formats, wanted, notes)
            break
        owner = _only_claim(source, tensors, candidates)
        if owner is not None:
            break
    else:
        source = found = None
        if packed:
            owner = _only_claim(None, tensors, candidates)
    if owner is None:
        if packed:
            places = ", ".join(s.where for s in sources) or "config.json, quantize_config.json, quant_config.json"
            raise CheckpointError(
                "the checkpoint holds quantised tensors, but no installed format recognises them",
                tensor=packed[0],
                found=f"settings looked for in: {places}; installed formats: {_installed(formats)}",
                hint="; ".join(notes) or "install the plugin for this format",
            )
        if wanted is not None and not float_too:
            raise ConfigError(
                f"--quantization {wanted} was given, but the checkpoint is not quantised: no quantization settings in its "
                "config files and no packed tensors"
            )
        return None
    evidence = f"the checkpoint's is '{owner.name}' ({source.where if source else 'seen from its tensors'})"
    if wanted is not None and formats.get(wanted.lower()) is not owner:
        raise ConfigError(
            f"--quantization says '{wanted}', but {evidence}; leave the option out to follow the checkpoint"
        )
    if source is None:
        source = QuantSource(owner.infer(tensors), "tensors")
        logger.warning("no quantization settings found; from the tensors: %s %s", owner.name, dict(source.raw))
    config = owner.parse(source)
    if config.unread_keys:
        logger.warning("%s: settings that are not understood: %s", source.where, ", ".join(config.unread_keys))
    for other in sources:
        if other is not found:
            _report_contradictions(owner, config, source, other)
    return config


def _method(source: QuantSource) -> str | None:
    method = source.raw.get("quant_method", source.raw.get("quant_algo"))
    return None if method is None else str(method).lower()


def _owner(
    source: QuantSource, formats: Mapping[str, type[QuantConfig]], wanted: str | None, notes: Sequence[str]
) -> tuple[type[QuantConfig], QuantSource]:
    """The format that settings name, and the settings in its own words."""

    def owner_of(source: QuantSource) -> type[QuantConfig]:
        method = str(_method(source))
        if method not in formats:
            raise _unknown(method, source, formats, wanted, notes)
        return formats[method]

    translated = owner_of(source).translate(source) or source
    return owner_of(translated), translated


def _only_claim(
    source: QuantSource | None, tensors: Mapping[str, TensorInfo], formats: set[type[QuantConfig]]
) -> type[QuantConfig] | None:
    claims = sorted((f for f in formats if f.detect(source, tensors)), key=lambda f: f.name)
    if len(claims) > 1:
        names = " and ".join(f.name for f in claims)
        raise CheckpointError(
            f"more than one format recognises this checkpoint: {names}",
            file=source.where if source else None,
            hint="add quant_method to the settings in config.json",
        )
    return claims[0] if claims else None


def _unknown(
    method: str,
    source: QuantSource,
    formats: Mapping[str, type[QuantConfig]],
    wanted: str | None,
    notes: Sequence[str],
) -> OctavoError:
    if wanted is not None and wanted.lower() != method:
        return ConfigError(f"--quantization says '{wanted}', but the checkpoint's is '{method}' ({source.where})")
    return CheckpointError(
        f"no installed plugin reads quantization format '{method}'",
        file=source.where,
        found=f"installed formats: {_installed(formats)}",
        hint="; ".join(notes) or "install the plugin that brings it; `octavo plugins` lists what is here",
    )


def _installed(formats: Mapping[str, type[QuantConfig]]) -> str:
    return ", ".join(sorted({f.name for f in formats.values()})) or "none"


def _report_contradictions(
    owner: type[QuantConfig], config: QuantConfig, source: QuantSource, other: QuantSource
) -> None:
    try:
        values = owner.parse(other)
    except CheckpointError:
        return
    for field in values.model_fields_set & config.model_fields_set:
        mine, theirs = getattr(config, field), getattr(values, field)
        if mine != theirs:
            logger.warning(
                "%s says %s = %r, %s says %r: the first counts", source.where, field, mine, other.where, theirs
            )
