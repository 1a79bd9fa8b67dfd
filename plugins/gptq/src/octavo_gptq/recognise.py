"""Recognising a folder that does not say what it is, from setting names and from the headers of all tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from octavo import CheckpointError, QuantSource, TensorInfo
from octavo_gptq.packing import BITS, REFUSED, foreign_tensors

_SETTINGS = frozenset(["desc_act", "sym", "damp_percent", "true_sequential", "is_marlin_format", "static_groups"])
_FORMATS = frozenset(["gptq", "gptq_v2", *REFUSED])
_AWQ = frozenset(["zero_point", "w_bit", "q_group_size", "version"])


def detect(source: QuantSource | None, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a folder without quant_method is GPTQ. Settings of both families count for it only with its tensors."""
    kinds = {_kind(stored) for stored in _packed_modules(tensors)}
    if source is not None and _says_gptq(source.raw):
        return kinds == {"gptq"} or ("awq" not in kinds and not _AWQ & set(source.raw))
    return bool(kinds) and kinds <= {"gptq", "refused"}


def infer(tensors: Mapping[str, TensorInfo]) -> Mapping[str, Any]:
    """Bits follow from the headers (of qzeros, which need no sizes of the model); all else from each layer's tensors."""
    modules = _packed_modules(tensors)
    for stored in modules:
        if (other := foreign_tensors(set(stored))) is not None:
            info = next(iter(stored.values()))
            raise CheckpointError(f"gptq: the tensors are {other[0]}", file=info.file, tensor=info.name, hint=other[1])
    kinds = {_kind(stored) for stored in modules}
    if kinds != {"gptq"}:
        raise CheckpointError(
            "gptq: the tensors do not say that they are GPTQ",
            found=f"{len(modules)} packed layer(s)",
            hint="put the settings into config.json: quantization_config, with quant_method, bits and group_size",
        )
    widths = {_bits(stored) for stored in modules}
    return {"bits": widths.pop()} if len(widths) == 1 else {}


def _says_gptq(settings: Mapping[str, Any]) -> bool:
    if "method" in settings:
        return str(settings["method"]).lower() == "gptq"
    named = {str(settings.get(key)).lower() for key in ("checkpoint_format", "format")}
    return bool(_SETTINGS & set(settings) or _FORMATS & named)


def _packed_modules(tensors: Mapping[str, TensorInfo]) -> list[dict[str, TensorInfo]]:
    """Headers by suffix of all modules that hold packed codes."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = info
    return [stored for stored in modules.values() if "qweight" in stored or {"B", "s"} <= stored.keys()]


def _bits(stored: Mapping[str, TensorInfo]) -> int | None:
    """Bits of a code, from qzeros (G, N * bits / 32) beside scales (G, N)."""
    qzeros, scales = stored["qzeros"], stored["scales"]
    bits, rest = divmod(32 * qzeros.shape[1], scales.shape[1])
    return bits if rest == 0 and bits in BITS else None


def _kind(stored: Mapping[str, TensorInfo]) -> str:
    """ "gptq" or "awq" beyond doubt, "refused" for a layout that only ever calls itself GPTQ, "unknown" for all else."""
    if "qweight" not in stored:
        return "refused"
    parts = [stored.get(name) for name in ("qweight", "qzeros", "scales")]
    qweight, qzeros, scales = (part if part is not None and len(part.shape) == 2 else None for part in parts)
    if qweight is None or scales is None or 0 in qweight.shape or 0 in scales.shape:
        return "unknown"
    if qweight.dtype == torch.int16 and 4 * qweight.shape[0] == scales.shape[1]:
        return "awq"
    if qweight.dtype != torch.int32:
        return "unknown"
    in_order = "g_idx" not in stored
    if in_order and (8 * qweight.shape[1] == scales.shape[1] or qweight.shape[0] == scales.shape[0]):
        # the latter fits GPTQ as well, but its groups would be of 32 / bits inputs, which no writer makes
        return "awq"
    if qzeros is None or qzeros.dtype != torch.int32 or qzeros.shape[0] != scales.shape[0]:
        return "unknown"
    if qweight.shape[1] != scales.shape[1] or (bits := _bits(stored)) is None:
        return "unknown"
    inputs = 32 * qweight.shape[0] // bits
    return "gptq" if inputs >= scales.shape[0] else "unknown"
