"""What the formats check alike: headers of a layer's tensors, codes and scales worth believing; and what was told already."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo import CheckpointError, LinearLayer, TensorInfo

logger = logging.getLogger(__name__)

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""Types of stored scales."""
_NAN = 0x7F  # the magnitude bits of both NaN codes of e4m3fn, 0x7F and 0xFF


class Notices:
    """What was already told of one checkpoint; no part of its settings, so all are equal."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Notices)

    __hash__ = None  # type: ignore[assignment]

    def once(self, text: str) -> None:
        """Logs a warning unless the same one was logged."""
        if text not in self._told:
            self._told.add(text)
            logger.warning(text)


def missing(layer: LinearLayer, suffix: str, beside: TensorInfo, hint: str | None = None) -> CheckpointError:
    """The error for a tensor that must accompany another one."""
    return CheckpointError(
        f"{layer.name}: {suffix} is missing beside {beside.name.rpartition('.')[2]}",
        file=beside.file or None,
        tensor=f"{layer.name}.{suffix}",
        hint=hint,
    )


def useless(layer: LinearLayer, info: TensorInfo, reason: str, hint: str | None = None) -> CheckpointError:
    """The error for a tensor that contradicts the settings or the format."""
    suffix = info.name.rpartition(".")[2]
    return CheckpointError(
        f"{layer.name}: {suffix} is stored, but {reason}", file=info.file, tensor=info.name, hint=hint
    )


def expect(
    layer: LinearLayer, info: TensorInfo, types: Sequence[torch.dtype], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Raises CheckpointError unless a tensor has one of these types and one of these shapes."""
    if info.dtype in types and info.shape in shapes:
        return
    sizes = f"{layer.in_features} inputs and {layer.out_features} outputs"
    raise CheckpointError(
        f"{layer.name}: {info.name.rpartition('.')[2]} does not fit a layer of {sizes}",
        file=info.file,
        tensor=info.name,
        expected=f"{' or '.join(map(str, shapes))} of {' or '.join(map(str, types))}",
        found=f"{info.shape} of {info.dtype}",
    )


def check_scales(layer: LinearLayer, suffix: str, scales: Tensor, codes: Tensor, group: tuple[int, int]) -> None:
    """Raises CheckpointError for scales (G_out, G_in) that no quantiser writes.

    These are negative ones, those that are not finite, and 0 for codes that are not 0. `codes` (out, in) share a scale in
    blocks of `group` (out, in), -1 for all.
    """
    wide = scales.to(torch.float32)
    bad, what = ~(torch.isfinite(wide) & (wide >= 0)), "negative, NaN or infinite"
    if not bool(bad.any()) and bool((zero := wide == 0).any()):
        for dim, size in enumerate(group):
            if size > 1 and zero.shape[dim] > 1:
                zero = zero.repeat_interleave(size, dim).narrow(dim, 0, codes.shape[dim])
        bad, what = zero & (codes.to(torch.float32) != 0), "0 although their codes are not"
    if bool(bad.any()):
        raise CheckpointError(
            f"{layer.name}: {suffix} holds scales that are {what}",
            tensor=f"{layer.name}.{suffix}",
            expected="positive numbers",
            found=f"{int(bad.sum())} wrong of {bad.numel()}",
            hint="the file is damaged or was written by a failed quantisation; export the model again",
        )


def check_input_scale(layer: LinearLayer, suffix: str, scale: Tensor) -> None:
    """Raises CheckpointError unless a static scale of inputs is a positive, finite number."""
    if not bool(((scale > 0) & torch.isfinite(scale)).all()):
        raise CheckpointError(
            f"{layer.name}: {suffix} is no scale",
            tensor=f"{layer.name}.{suffix}",
            expected="a positive number",
            found=scale.flatten().tolist(),
            hint="the calibration never ran this layer, or the file is damaged",
        )


def refuse_nan(layer: LinearLayer, codes: Tensor) -> None:
    """Raises CheckpointError for codes of float8_e4m3fn that are NaN."""
    if bad := int(((codes.view(torch.uint8) & _NAN) == _NAN).sum()):
        raise CheckpointError(
            f"{layer.name}: weight holds {bad} code(s) that are NaN",
            tensor=f"{layer.name}.weight",
            expected="no byte 0x7F or 0xFF, which are NaN in float8_e4m3fn",
            hint="the file is damaged, or its weights overflowed when they were cast; export the model again",
        )
