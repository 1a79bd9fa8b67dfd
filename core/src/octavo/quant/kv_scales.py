"""Calibrated scales of the KV cache in a checkpoint: all names under which tools have stored them, read and checked once.

They belong to no weight format: the same names lie beside fp8, int8 and unquantised weights. A checkpoint that holds some
must hold them for every layer, and each must be a positive number; whether a KV format uses them is its own affair. What
octavo calibrates itself is written in the first spelling, compressed-tensors'.
Sources: the remapping table of vLLM's loader, AutoFP8, compressed-tensors, ModelOpt, Quark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.quant.config import TensorInfo

KV_SCALE_FILE = "kv_cache_scales.json"
"""The side file of vLLM up to 0.6, {"kv_cache": {"scaling_factor": {"0": {"0": 0.0123, ...}}}}: by rank, then layer."""

_SIDE_FILE_DTYPE = "float8_e4m3fn"
_BOTH = ("kv_scale",)
_SPELLINGS = (
    "{}_scale",
    "{}_proj.output_scale",
    "{}_proj.{}_scale",
    "qkv_proj.{}_scale",
    "qkqkv_proj.{}_scale",  # a renaming in one tool that hit its own result
    "{}_cache.scale",
    "attn.{}_scale",
    "mla_attn.{}_scale",
)
_UNUSED = ("prob_output_scale", "q.scale", *(spelling.replace("{}", "q") for spelling in _SPELLINGS))
"""Scales of queries and probabilities: for kernels that compute attention itself in fp8."""
_ZERO_POINTS = tuple(
    spelling.replace("{}", side).replace("scale", "zero_point") for spelling in _SPELLINGS for side in "qkv"
)
_NO_SCALE = "a KV scale is not a positive number"


@dataclass(frozen=True, slots=True)
class KVScales:
    """One layer's scales: stored = K / k, and V / v. Each fp32, () for the whole tensor or (kv_heads,)."""

    k: Tensor
    v: Tensor


def looks_like_kv_scale(name: str) -> bool:
    """Whether a tensor that nobody read may belong to a KV cache, under whatever name: then it must not be dropped."""
    module, _, last = name.rpartition(".")
    known = {tail.replace("{}", side).rpartition(".")[2] for tail in (*_SPELLINGS, *_BOTH, *_UNUSED) for side in "kvq"}
    known |= {tail.rpartition(".")[2] for tail in _ZERO_POINTS}
    return last in known - {"scale"} or ("attn" in module and last.endswith(("scale", "scales", "zero_point")))


def holds_kv_scales(attention: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether an attention module has a scale of K or V, by the names of its tensors."""
    return any(f"{attention}.{tail}" in tensors for side in "kv" for tail in _spellings(side))


def unit_kv_scales(num_layers: int) -> tuple[KVScales, ...]:
    """Scales of 1 for every layer."""
    one = torch.ones(())
    return (KVScales(one, one),) * num_layers


def kv_scale_tensors(attention: str, scales: KVScales) -> dict[str, Tensor]:
    """One layer's scales as compressed-tensors stores them: fp32 (1,), or (kv_heads, 1, 1) for a scale per head."""
    shaped = {side: getattr(scales, side).reshape(-1) for side in "kv"}
    return {
        f"{attention}.{side}_scale": (scale if scale.numel() == 1 else scale[:, None, None]).float().contiguous()
        for side, scale in shaped.items()
    }


def kv_scale_names(attention: str, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """All tensors of one attention module that `read_kv_scales` reads."""
    tails = [*(tail for side in "kv" for tail in _spellings(side)), *_UNUSED, *_ZERO_POINTS]
    return [name for tail in dict.fromkeys(tails) if (name := f"{attention}.{tail}") in tensors]


def read_kv_scales(
    attention: str, kv_heads: int, tensors: Mapping[str, TensorInfo], read: Callable[[str], Tensor]
) -> KVScales | None:
    """One layer's scales, None where it has none; where only one of K and V has a scale, it serves both.

    Raises CheckpointError that names file and tensor where a scale is no positive number, where spellings disagree, where
    shapes fit neither a tensor nor its heads, and where a zero point is not 0.
    """
    values = {name: read(name) for name in kv_scale_names(attention, tensors)}
    for name in (f"{attention}.{tail}" for tail in _ZERO_POINTS):
        if name in values and bool((values[name].float() != 0).any()):
            raise CheckpointError(
                "KV caches with zero points are not supported", file=tensors[name].file, tensor=name, expected="0"
            )
    sides = {}
    for side in "kv":
        spelled = (f"{attention}.{tail}" for tail in _spellings(side))
        sides[side] = _one_scale({name: values[name] for name in spelled if name in values}, kv_heads, tensors)
    one = sides["v"] if sides["k"] is None else sides["k"]
    if one is None:
        return None
    return KVScales(*(one if scale is None else scale for scale in sides.values()))


def complete_kv_scales(
    modules: Sequence[str], scales: Sequence[KVScales | None], tensors: Mapping[str, TensorInfo]
) -> tuple[KVScales, ...]:
    """The scales of all layers, or none; raises CheckpointError where only some layers have them."""
    found = tuple(one for one in scales if one is not None)
    if found and len(found) < len(modules):
        without = next(module for module, one in zip(modules, scales, strict=True) if one is None)
        names = [(module, name) for module in modules for name in kv_scale_names(module, tensors)]
        tails = dict.fromkeys(f"*{name.removeprefix(module)}" for module, name in names)
        raise CheckpointError(
            "only some layers have KV scales",
            file=tensors[names[0][1]].file if names else KV_SCALE_FILE,
            tensor=names[0][1] if names else None,
            expected=f"scales of all {len(modules)} layers, or of none",
            found=f"{len(found)}; none for {without}",
            hint=f"--ignore-tensors '{','.join(tails)}' leaves them out" if names else None,
        )
    return found


def scales_from_file(content: Mapping[str, Any], num_layers: int, file: str = KV_SCALE_FILE) -> list[KVScales | None]:
    """The layers' scales by the side file's `content`, each for both K and V; raises CheckpointError for what it gets wrong."""
    cache = content.get("kv_cache")
    dtype = cache.get("dtype", _SIDE_FILE_DTYPE) if isinstance(cache, Mapping) else _SIDE_FILE_DTYPE
    if dtype != _SIDE_FILE_DTYPE:
        raise CheckpointError("the KV scales are for another type", file=file, expected=_SIDE_FILE_DTYPE, found=dtype)
    ranks = cache.get("scaling_factor") if isinstance(cache, Mapping) else None
    if not content:
        return [None] * num_layers
    if not isinstance(ranks, Mapping) or not all(isinstance(layers, Mapping) for layers in ranks.values()):
        raise CheckpointError(
            "expected the KV scales by rank and layer",
            file=file,
            expected="kv_cache.scaling_factor.RANK.LAYER",
        )
    if len({tuple(sorted(layers.items())) for layers in ranks.values()}) > 1:
        raise CheckpointError("the KV scales of the ranks differ: each is for a part of the heads only", file=file)
    layers: Mapping[str, Any] = next(iter(ranks.values()), {})
    if unknown := [name for name in layers if name not in {str(index) for index in range(num_layers)}]:
        raise CheckpointError(
            f"KV scales of a layer that the model of {num_layers} layers does not have",
            file=file,
            found=unknown[0],
        )
    found: list[KVScales | None] = []
    for value in (layers.get(str(index)) for index in range(num_layers)):
        if value is not None and (type(value) not in (int, float) or not 0 < value < float("inf")):
            raise CheckpointError(_NO_SCALE, file=file, expected="more than 0", found=value)
        scale = None if value is None else torch.tensor(float(value))
        found.append(None if scale is None else KVScales(scale, scale))
    return found


def _spellings(side: str) -> list[str]:
    return [spelling.replace("{}", side) for spelling in _SPELLINGS] + [*_BOTH]


def _one_scale(values: Mapping[str, Tensor], kv_heads: int, tensors: Mapping[str, TensorInfo]) -> Tensor | None:
    """The scale that all spellings agree on; None where there is none."""
    found: Tensor | None = None
    for name, value in values.items():
        scale = value.float().flatten()
        place = {"file": tensors[name].file, "tensor": name}
        if not value.dtype.is_floating_point:
            raise CheckpointError(_NO_SCALE, **place, expected="a floating type", found=value.dtype)
        if scale.numel() not in (1, kv_heads):
            raise CheckpointError(
                "a KV scale fits neither the tensor nor its heads",
                **place,
                expected=f"1 or {kv_heads} numbers",
                found=scale.numel(),
            )
        usable = torch.isfinite(scale) & (scale > 0)
        if not bool(usable.all()):
            raise CheckpointError(
                _NO_SCALE,
                **place,
                expected="more than 0",
                found=float(scale[~usable][0]),
                hint="the calibration failed; leave the scales out with --ignore-tensors, or calibrate again",
            )
        scale = scale.reshape(()) if scale.numel() == 1 else scale
        if found is not None and not torch.equal(found, scale):
            raise CheckpointError(f"two KV scales of one tensor differ: {next(iter(values))} and {name}", **place)
        found = scale
    return found
