"""AWQ: scales inputs so that the weights that matter lose less in rounding, then narrows each group's range.

Lin et al., "AWQ: Activation-aware Weight Quantization", arXiv 2306.00978. Losses are computed from the Gram matrix of the
inputs: for X (tokens, in) and an error E (out, in) of the weight, ||X E^T||^2 = tr(E X^T X E^T), whose cost does not depend
on the number of tokens. All linears that read an input share its scales, quantised or not: the driver sees to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from octavo import (
    CalibratedGroup,
    LinearLayer,
    QuantizedGroup,
    QuantizedWeight,
    Quantizer,
    QuantizerOptions,
    Rounding,
    WeightSpec,
    compensated_rounding,
    gram_loss,
    parallel_map,
    stored_scales,
)

_HIGHEST, _MIDDLE = 15, 8
_ROWS = 256  # outputs at once: what stays in a cache; a fixed number, so that threads change nothing
_SEARCHED = 256  # outputs that the search looks at, evenly spread: as good as all
_SMALLEST = 1e-4  # divisor before it is centred
_Exponents = tuple[float, float]


class AWQOptions(QuantizerOptions):
    """What can be set of AWQ."""

    bits: Literal[4] = Field(4, description="Bits of a code; the format has only 4.")
    search: Literal["none", "inputs", "duo", "both"] = Field(
        "duo",
        description="Which scales x^a / w^b are tried, of inputs x and weights w: a alone; b = 1 - a; or both, in finer steps.",
    )
    clip: bool = Field(True, description="Search a narrower range for each group.")
    rounding: Literal["nearest", "compensated"] = Field(
        "nearest",
        description="compensated: errors of rounding are made up for by what is rounded later, as GPTQ does.",
    )
    propagate: bool = Field(True, description="Calibrate with inputs that come through the layers already quantised.")


class AWQQuantizer(Quantizer):
    """Activation-aware scaling and clipping, then rounding to nearest: 4 bits in groups."""

    name = "awq"
    target = "awq"
    Options = AWQOptions
    needs = frozenset({"gram"})
    options: AWQOptions

    def __init__(self, options: QuantizerOptions, layers: Sequence[LinearLayer]) -> None:
        super().__init__(options, layers)
        self.propagates = self.options.propagate

    def spec(self, layer: LinearLayer) -> WeightSpec:
        return WeightSpec("uint4", (1, self.group_size), has_zeros=True)

    def quantize(self, group: CalibratedGroup) -> QuantizedGroup:
        seen = group.statistics()
        weight = torch.cat(group.weights)
        assert seen.gram is not None
        largest = seen.gram.diagonal().max()
        if seen.tokens == 0 or not bool(largest > 0):
            made = self._made(group, *self._rounded(weight, None))
            return QuantizedGroup(made, notes=("its inputs were never active: rounded to nearest",))
        gram = (seen.gram / largest).float()
        divisor = None
        if group.producers is not None and self.options.search != "none":
            divisor = _Search(self, group, weight, gram).best()
        if divisor is not None:
            weight, gram = weight * divisor, gram / torch.outer(divisor, divisor)
        if self.options.rounding == "compensated":
            found = compensated_rounding(weight, gram, self._compensation)
            return QuantizedGroup(self._made(group, found.codes, found.scales, found.zeros), divisor)
        blocks = self._blocks(gram) if self.options.clip else None
        parts = parallel_map(lambda rows: self._rounded(rows, blocks), torch.split(weight, _ROWS))
        codes, scales, zeros = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return QuantizedGroup(self._made(group, codes, scales, zeros), divisor)

    @property
    def _compensation(self) -> Rounding:
        return Rounding(4, self.options.symmetric, self.group_size, self.scale_dtype, "group", search=self.options.clip)

    def _made(
        self, group: CalibratedGroup, codes: Tensor, scales: Tensor, zeros: Tensor
    ) -> tuple[QuantizedWeight, ...]:
        sizes = [layer.out_features for layer in group.layers]
        parts = zip(group.layers, *(torch.split(whole, sizes) for whole in (codes, scales, zeros)), strict=True)
        return tuple(QuantizedWeight(self.spec(layer), *(part.contiguous() for part in rest)) for layer, *rest in parts)

    # --- rounding

    def tiles(self, weight: Tensor) -> Tensor:
        """weight (out, in) -> (out, groups, inputs of a group)."""
        size = weight.shape[1] if self.group_size == -1 else self.group_size
        return weight.view(len(weight), -1, size)

    def _blocks(self, gram: Tensor) -> Tensor:
        """The Gram matrices (groups, size, size) of each group's inputs alone."""
        size = len(gram) if self.group_size == -1 else self.group_size
        return torch.stack([gram[i : i + size, i : i + size] for i in range(0, len(gram), size)])

    def grid(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Scales, as they are stored, and zeros of groups that range from `low` <= 0 to `high` >= 0."""
        if self.options.symmetric:
            scales = stored_scales(torch.maximum(-low / _MIDDLE, high / (_HIGHEST - _MIDDLE)), self.scale_dtype)
            return scales, torch.full_like(scales, _MIDDLE, dtype=torch.float32)
        scales = stored_scales((high - low) / _HIGHEST, self.scale_dtype)
        return scales, torch.round(-low / scales.float()).clamp_(0, _HIGHEST)

    def fake(self, tiles: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """What `tiles` become by rounding to nearest."""
        wide, shift = scales.float()[..., None], zeros[..., None]
        return torch.round(tiles / wide).add_(shift).clamp_(0, _HIGHEST).sub_(shift).mul_(wide)

    def _rounded(self, weight: Tensor, blocks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Codes (rows, in) uint8, scales and zeros (rows, groups), by ranges narrowed as `blocks` say."""
        tiles = self.tiles(weight)
        low, high = tiles.amin(-1).clamp_(max=0), tiles.amax(-1).clamp_(min=0)
        scales, zeros = self.grid(low, high)
        if blocks is not None:
            best = torch.full_like(low, float("inf"))
            for share in _SHARES:
                tried = self.grid(low * share, high * share)
                error = self.fake(tiles, *tried).sub_(tiles)
                loss = (torch.einsum("ngk,gkj->ngj", error, blocks) * error).sum(-1)
                better = loss < best
                best = torch.where(better, loss, best)
                scales, zeros = torch.where(better, tried[0], scales), torch.where(better, tried[1], zeros)
        codes = torch.round(tiles / scales.float()[..., None]).add_(zeros[..., None]).clamp_(0, _HIGHEST)
        return codes.flatten(1).to(torch.uint8), scales, zeros


_SHARES = tuple(1 - step / 20 for step in range(9))
"""Of a group's range, what is tried."""


class _Search:
    """The search for the divisor of one group's input."""

    def __init__(self, method: AWQQuantizer, group: CalibratedGroup, weight: Tensor, gram: Tensor) -> None:
        self.method, self.group, self.gram = method, group, gram
        self.weight = weight[:: max(1, len(weight) // _SEARCHED)]
        tiles = method.tiles(weight).abs()
        shares = tiles / tiles.amax(-1, keepdim=True).clamp(min=1e-12)
        self.inputs = self._tied(group.statistics().mean_abs)
        self.weights = self._tied(shares.flatten(1).mean(0))
        self._losses: dict[_Exponents, float] = {}

    def _tied(self, values: Tensor) -> Tensor:
        """The mean of each channel and of those that must share its divisor."""
        producers = self.group.producers
        assert producers is not None
        producers = producers.to(values.device)
        total = torch.zeros(len(values), device=values.device)
        count = total.index_add(0, producers, torch.ones_like(values))
        return (total.index_add(0, producers, values) / count.clamp(min=1))[producers]

    def divisor(self, exponents: _Exponents) -> Tensor:
        """inputs^a / weights^b, its largest and smallest value the inverse of each other."""
        a, b = exponents
        raw = (self.inputs.clamp(min=1e-12) ** a / self.weights.clamp(min=1e-6) ** b).clamp(min=_SMALLEST)
        raw = torch.where(self.inputs > 0, raw, raw[self.inputs > 0].min())  # a channel that was never active
        return self.group.storable(raw / (raw.max() * raw.min()).sqrt())

    def loss(self, exponents: _Exponents) -> float:
        """What rounding to nearest would lose."""
        if exponents not in self._losses:
            divisor = None if exponents == (0.0, 0.0) else self.divisor(exponents)

            def part(rows: Tensor) -> float:
                tiles = self.method.tiles(rows if divisor is None else rows * divisor)
                grid = self.method.grid(tiles.amin(-1).clamp_(max=0), tiles.amax(-1).clamp_(min=0))
                made = self.method.fake(tiles, *grid).flatten(1)
                return float(gram_loss((made if divisor is None else made / divisor) - rows, self.gram))

            self._losses[exponents] = sum(parallel_map(part, torch.split(self.weight, _ROWS)))
        return self._losses[exponents]

    def best(self) -> Tensor | None:
        """The divisor that loses least; None where none does better than no divisor."""
        kind = self.method.options.search
        if kind == "both":
            found = self._descend()
        else:
            steps = [step / 20 for step in range(20)]
            tried = [(a, 1 - a if kind == "duo" else 0.0) for a in steps]
            found = min([(0.0, 0.0), *tried], key=self.loss)
        return None if found == (0.0, 0.0) else self.divisor(found)

    def _descend(self) -> _Exponents:
        """From the best of a few, to the best neighbour while one is better, in steps that halve."""
        starts = [(0.0, 0.0), *((a / 4, b / 4) for a, b in ((1, 1), (2, 2), (3, 1), (1, 3), (3, 3)))]
        found = min(starts, key=self.loss)
        for step, rounds in ((1 / 8, 2), (1 / 16, 1)):
            for _ in range(rounds):
                a, b = found
                near = [(a + step, b), (a - step, b), (a, b + step), (a, b - step)]
                best = min([found, *(n for n in near if min(n) >= 0)], key=self.loss)
                if best == found:
                    break
                found = best
        return found
