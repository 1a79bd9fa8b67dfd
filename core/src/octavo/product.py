"""Matrix products whose rows do not depend on one another, bit for bit.

A BLAS chooses its kernel by the number of rows and of threads, and kernels differ in the order in which they sum. So rows are
handed to it in tiles of a few heights only, which were seen to agree on this machine: before a product of new sizes, random
rows are multiplied in tiles of each height, and only heights that give the same bits, in each place of the tile, are used.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

_HEIGHTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_HIGHER = (96, 128, 192, 256)  # tried once a product has as many rows: with wide weights that takes a while
_READING = 20  # a tile costs about as much as this many rows, beside its own: the weight is read for it
_TRIED = 256  # results that are compared for each height

_Key = tuple[object, ...]
_agreeing: dict[_Key, tuple[tuple[int, ...], Tensor]] = {}
_agreeing_all: dict[_Key, tuple[int, ...]] = {}


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., rows, in) @ weight (..., in, out) + bias (out,) -> (..., rows, out), with at most one leading dimension.

    On a CPU, each row's bits depend on that row, the weight and torch's number of threads, whatever the number of rows and the
    row's place among them. A contiguous weight is fastest for few rows. Elsewhere it is torch's own product.
    """
    if x.device.type != "cpu":
        return _multiply(x, weight, bias)
    rows = x.shape[-2]
    heights = _heights(x, weight, bias, rows)
    parts, start = [], 0
    for height in _cut(rows, heights):
        tile = x[..., start : start + height, :]
        if (missing := height - tile.shape[-2]) > 0:
            tile = F.pad(tile, (0, 0, 0, missing))
        tile = tile.contiguous()
        parts.append(_multiply(tile if tile.data_ptr() % 64 == 0 else tile.clone(), weight, bias))
        start += height
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
    return whole if start == rows else whole[..., :rows, :]


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.dim() == 3:
        return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _heights(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> tuple[int, ...]:
    """Heights of tiles that agree for such a product."""
    place = weight.data_ptr() % 64
    key = (x.dtype, weight.shape, weight.stride()[-2:], place, bias is None, torch.get_num_threads())
    if rows <= _HEIGHTS[-1]:
        found = _agreeing.get(key)
    elif (known := _agreeing_all.get(key)) is not None:
        return known
    else:
        found = None
    if found is None:
        with torch.inference_mode():
            trial = _Trial(weight, place, bias)
            if key not in _agreeing:
                _agreeing[key] = trial.largest_class()
            found = _agreeing[key]
            if rows > _HEIGHTS[-1]:
                higher = (height for height in _HIGHER if _same(trial.signature(height), found[1]))
                _agreeing_all[key] = (*found[0], *higher)
                return _agreeing_all[key]
    return found[0]


class _Trial:
    """Random numbers in the place of a product's. But for rounding their sums are 0: what is left tells the order of summing.

    Sums that were not about 0 would tell it in their last bits only, which a result of 16 bits does not have.
    """

    def __init__(self, weight: Tensor, place: int, bias: Tensor | None) -> None:
        generator, dtype = torch.Generator().manual_seed(0), weight.dtype
        size = 1 + sum((n - 1) * stride for n, stride in zip(weight.shape, weight.stride(), strict=True))
        numbers = torch.randn(size + 64, generator=generator).to(dtype)
        skipped = place // dtype.itemsize  # so that the memory is aligned alike
        self.weight = numbers[skipped:].as_strided(weight.shape, weight.stride())
        *lead, inputs, outputs = weight.shape
        rows = 8 * torch.randn(-(-_TRIED // max(outputs, 1)), *lead, 1, inputs, generator=generator).to(dtype)
        self.weight *= 8  # what is left stays above the smallest numbers of fp16
        half = (inputs - 1) // 2
        others = torch.randperm(half, generator=generator)
        self.weight[..., half : 2 * half, :] = -self.weight[..., others, :]
        self.bias = None if bias is None else -self.weight.reshape(-1, inputs, outputs)[0, 2 * half]
        cancelling = rows.clone()
        cancelling[..., half : 2 * half] = cancelling[..., others]
        cancelling[..., 2 * half] = 0 if bias is None else 1
        cancelling[..., 2 * half + 1 :] = 0
        self.rows = torch.cat([cancelling, rows])  # with one or two inputs nothing is left but the plain sums

    def signature(self, height: int) -> Tensor | None:
        """What the rows give in tiles of a height that hold nothing else; None if it depends on the place in the tile."""
        parts = []
        for row in self.rows:
            shape = (*row.shape[:-2], height, row.shape[-1])
            found = _multiply(row.expand(shape).contiguous(), self.weight, self.bias)
            if not torch.equal(found, found[..., :1, :].expand_as(found)):
                return None
            parts.append(found[..., 0, :])
        return torch.stack(parts)

    def largest_class(self) -> tuple[tuple[int, ...], Tensor]:
        """The heights that agree, and on what: of several such sets, that which costs least for one row and for many."""
        classes: list[tuple[list[int], Tensor]] = []
        for height in _HEIGHTS:
            if (found := self.signature(height)) is None:
                continue
            same = next((heights for heights, kept in classes if _same(found, kept)), None)
            if same is None:
                classes.append(([height], found))
            else:
                same.append(height)
        heights, kept = min(classes, key=lambda c: 2 * _cost(_cut(1, tuple(c[0]))) + _cost(_cut(64, tuple(c[0]))))
        return tuple(heights), kept


def _same(found: Tensor | None, kept: Tensor) -> bool:
    return found is not None and torch.equal(found, kept)


def _cost(tiles: tuple[int, ...]) -> int:
    return sum(_READING + height for height in tiles)


@lru_cache(maxsize=4096)
def _cut(rows: int, heights: tuple[int, ...]) -> tuple[int, ...]:
    """The tiles that cost least for so many rows; the last may be partly filled."""
    most = heights[-1]
    if rows > most:
        whole = (rows - 1) // most
        return (most,) * whole + _cut(rows - whole * most, heights)
    options: list[tuple[int, ...]] = [(height,) for height in heights if height >= rows]
    del options[1:]
    options += [(height, *_cut(rows - height, heights)) for height in heights if height < rows]
    return min(options, key=_cost)
