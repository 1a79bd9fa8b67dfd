"""What the stored order of inputs and the stored zeros of a layer mean, and what must be told about them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo import CheckpointError, LinearLayer
from octavo_gptq import packing, writing

if TYPE_CHECKING:
    from octavo_gptq.config import GPTQConfig

logger = logging.getLogger(__name__)


class Notices:
    """What was already told of one checkpoint; no part of its settings, so all are equal."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Notices)

    __hash__ = None  # type: ignore[assignment]

    def once(self, topic: str, text: str, *arguments: object) -> None:
        """Logs a warning unless one on the same topic was logged."""
        if topic not in self._told:
            self._told.add(topic)
            logger.warning(text, *arguments)


def order(layer: LinearLayer, g_idx: Tensor | None, groups: int, notices: Notices) -> Tensor | None:
    """The group of each input, None where there is one group or no order is stored; negative ones count from the end."""
    if g_idx is None:
        return None
    low, high = int(g_idx.min()), int(g_idx.max())
    if groups > 1 and low == high in (0, -1):  # what tools write for "no order"
        text = "%s: g_idx is %d for all inputs of %d groups, which means none: groups lie in order, here and elsewhere"
        notices.once("g_idx", text, layer.name, low, groups)
        return None
    if low < -groups or high >= groups:
        raise CheckpointError(
            f"{layer.name}: g_idx names groups that have no scales",
            tensor=f"{layer.name}.g_idx",
            expected=f"0 to {groups - 1}",
            found=f"{low} to {high}",
            hint="the file is damaged; export the model again",
        )
    if groups == 1:
        return None
    return torch.where(g_idx < 0, g_idx + groups, g_idx) if low < 0 else g_idx


def zeros(config: GPTQConfig, layer: LinearLayer, qzeros: Tensor, bits: int, notices: Notices) -> Tensor:
    """True zeros uint8 (G, N) under the settings of a layer.

    Zeros of a symmetric file are 2 ** (bits - 1) by construction, so that what is stored shows the convention, whatever the
    label says. Asymmetric ones follow the label. Raises CheckpointError where a symmetric file holds others.
    """
    stored, middle = packing.unpack(qzeros, bits), 2 ** (bits - 1)
    low, high = int(stored.min()), int(stored.max())
    label = config.checkpoint_format
    v2 = label == "gptq_v2"
    if config.sym is not False and low == high in (middle - 1, middle):
        if (low == middle) != v2:
            says, lies = label or "nothing, which means gptq", "gptq" if v2 else "gptq_v2"
            text = (
                "%s: checkpoint_format says %s, zeros are stored as %s does (%d): symmetric, so read as they are stored"
            )
            notices.once("checkpoint_format", text, layer.name, says, lies, low)
        return torch.full_like(stored, middle)
    if config.sym or (config.sym is None and label is None):
        told = "the settings say sym: true" if config.sym else "the settings say neither sym nor checkpoint_format"
        raise CheckpointError(
            f"{layer.name}: {told}, and the stored zeros are not those of a symmetric file",
            tensor=f"{layer.name}.qzeros",
            expected=f"{middle - 1} (gptq) or {middle} (gptq_v2) everywhere",
            found=f"zeros from {low} to {high}",
            hint='if the file is intact, set "sym": false, and "checkpoint_format" to "gptq" or "gptq_v2" as its writer does',
        )
    careful = v2 or writing.packs_zeros_well(config.provider, config.meta)
    if not careful and (flooded := packing.flooded_words(qzeros, bits)):
        text = (
            "%s: asymmetric, of an old or unknown writer, and %d of %d words of zeros look as if a zero of 0 had been "
            "packed over its neighbours: such weights cannot be repaired; if output is poor, export the model again"
        )
        notices.once("writer", text, layer.name, flooded, qzeros.numel())
    return packing.true_zeros(stored, bits, shifted=not v2)


def question_label(
    config: GPTQConfig, layer: LinearLayer, codes: Tensor, zeros: Tensor, bits: int, notices: Notices
) -> None:
    """Tells once where weights are centred one step beside 0, as they are under the wrong `checkpoint_format`.

    Weights of real layers lie within a tenth of a step around 0 where a step is coarse, so not with 8 bits.
    """
    if bits == 8 or codes.numel() < 4096:
        return
    offset = float(codes.sum(dtype=torch.int64)) / codes.numel() - float(zeros.float().mean())
    if 0.7 < abs(offset) < 1.3:
        text = "%s: weights are centred %+.2f steps beside 0: if output is poor, checkpoint_format may be %s instead"
        other = "gptq" if config.checkpoint_format == "gptq_v2" else "gptq_v2"
        notices.once("label", text, layer.name, offset, other)
