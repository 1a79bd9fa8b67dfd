"""Rounding that makes up for itself: the error of each column of a weight is carried into the columns still to come (GPTQ).

It minimises tr((W - Q) H (W - Q)^T), the squared error of a linear's outputs over calibration inputs with the Gram matrix H,
over weights Q that codes and scales can express. `_Problem` is GPTQ (Frantar et al., arXiv 2210.17323) in blocked form;
`_Refinement` improves its result, one column and one scale at a time. Matrices are factorised in fp64; the rest may be fp32,
which gives the same loss to seven digits in two thirds of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from octavo.quant.calibration import parallel_map
from octavo.quant.quantizer import stored_scales

Order = Literal["none", "importance", "group"]
_OUTPUTS = 1024  # rounded at once: what fits a cache; a fixed number, so that threads change nothing
_LEAF = 16  # columns that are rounded one by one before their errors go on as one product
_CANDIDATES = 9


@dataclass(frozen=True, slots=True)
class Rounding:
    """How to round: unsigned codes of `bits`, in groups of `group_size` inputs (-1: all), scales stored as `scale_dtype`.

    `symmetric`: zeros are the codes' midpoint. `order` is that of rounding: as the inputs lie; by "importance", the largest of
    H's diagonal first, groups formed in that order (act-order); or by importance inside groups and of groups, which leaves
    groups as they lie. `static_groups`: groups and their scales are those of the weight as it came, whatever the order.
    `search`: scales are chosen for the error that they cause, not by the range. `sweeps` is how often the result is refined.
    `damp` is added to H's diagonal, times its mean. `shift` times the change of the inputs (`cross`) is made up for as well.
    `precision` is what codes are computed in.
    """

    bits: int
    symmetric: bool
    group_size: int
    scale_dtype: torch.dtype = torch.float16
    order: Order = "none"
    static_groups: bool = False
    search: bool = True
    sweeps: int = 2
    damp: float = 0.01
    shift: float = 0.0
    precision: torch.dtype = torch.float32

    @property
    def high(self) -> int:
        """The largest code."""
        return int(2**self.bits) - 1


@dataclass(frozen=True, slots=True)
class Rounded:
    """`codes` (out, in) uint8, `scales` (out, G) as stored, `zeros` (out, G) fp32, `group_index` (in,) int32 or None.

    `damp` is what H took to be factorised, None where nothing sufficed and all was rounded to nearest.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_index: Tensor | None
    damp: float | None


def compensated_rounding(weight: Tensor, gram: Tensor, rounding: Rounding, cross: Tensor | None = None) -> Rounded:
    """Rounds a weight (out, in) for inputs with the Gram matrix `gram` (in, in); `cross` as in `InputStatistics`.

    Any positive semidefinite Gram matrix will do. Damping grows tenfold where it cannot be factorised; where that does not
    help either, each weight is rounded to nearest. Inputs that were always 0 neither give nor take errors.
    """
    inputs = weight.shape[1]
    size = inputs if rounding.group_size == -1 else rounding.group_size
    matrix = gram.double().clone()
    diagonal = matrix.diagonal()
    living = diagonal > 0
    diagonal[~living] = diagonal[living].min() if bool(living.any()) else 1.0
    order = rounding_order(diagonal, size, rounding.order)
    matrix = matrix[order][:, order]
    diagonal, damp = matrix.diagonal().clone(), rounding.damp
    factor: Tensor | None = None
    while factor is None and damp <= max(1.0, rounding.damp):
        matrix.diagonal().copy_(diagonal + damp * diagonal.mean())
        factor = inverse_factor(matrix)
        if factor is None:
            damp = max(damp, 1e-6) * 10
    target = weight.double()
    if factor is None:
        matrix = factor = torch.eye(inputs, dtype=torch.float64, device=gram.device)
    elif cross is not None and rounding.shift:
        change = (target @ cross.double())[:, order]
        target = target.clone()
        target[:, order] += rounding.shift * (change @ factor.T) @ factor
    problem = _Problem(rounding, size, order, matrix, factor)
    parts = list(parallel_map(problem.solve, torch.split(target.to(rounding.precision), _OUTPUTS)))
    codes, scales, zeros = (torch.cat(tensors, 1).T.contiguous() for tensors in zip(*parts, strict=True))
    return Rounded(
        codes.to(torch.uint8),
        scales.to(rounding.scale_dtype),
        zeros.float(),
        None if problem.as_they_lie or size >= inputs else problem.group_index.to(torch.int32),
        None if problem.is_plain else damp,
    )


def inverse_factor(matrix: Tensor) -> Tensor | None:
    """The upper triangular U with U^T U = matrix^-1, None where the matrix is not positive definite.

    With the rows in reverse, matrix = R R^T for an upper triangular R, whose inverse is U: no inverse is ever factorised.
    """
    lower, failed = torch.linalg.cholesky_ex(matrix.flip(0, 1))
    if int(failed) or not bool(torch.isfinite(lower).all()):
        return None
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
    return inverse


def rounding_order(diagonal: Tensor, size: int, order: Order) -> Tensor:
    """The order (in,) in which columns are rounded. Ties keep the order of the inputs."""
    if order == "none":
        return torch.arange(len(diagonal), device=diagonal.device)
    if order == "importance":
        return torch.argsort(diagonal, descending=True, stable=True)
    groups = -(-len(diagonal) // size)
    padded = torch.full((groups * size,), -1.0, dtype=diagonal.dtype, device=diagonal.device)
    padded[: len(diagonal)] = diagonal
    tiles = padded.view(groups, size)
    inner = torch.argsort(tiles, dim=1, descending=True, stable=True)
    inner += torch.arange(groups, device=inner.device)[:, None] * size
    if len(diagonal) % size:  # a short group stays last, so that groups still begin at multiples of the size
        outer = torch.argsort(tiles[:-1].amax(1), descending=True, stable=True)
        outer = torch.cat((outer, outer.new_tensor([groups - 1])))
    else:
        outer = torch.argsort(tiles.amax(1), descending=True, stable=True)
    found = inner[outer].flatten()
    return found[found < len(diagonal)]


class _Problem:
    """One Gram matrix, damped and in the order of rounding, for all outputs. Matrices of weights are (in, out) here."""

    def __init__(self, rounding: Rounding, size: int, order: Tensor, gram: Tensor, factor: Tensor) -> None:
        self.rounding, self.size, self.order = rounding, size, order
        self.gram, self.factor = gram.to(rounding.precision), factor.to(rounding.precision)
        self.is_plain = gram is factor
        self.importance = (
            factor.diagonal().square().reciprocal().to(rounding.precision)
        )  # what an error of 1 in a column costs in the end
        inputs = torch.arange(len(order), device=order.device)
        self.as_they_lie = rounding.static_groups or rounding.order != "importance"
        self.group_index = torch.empty_like(order)
        self.group_index[order] = (order if self.as_they_lie else inputs) // size
        self.inverse = torch.empty_like(order)
        self.inverse[order] = inputs

    def solve(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """weight (out, in) -> codes (in, out), scales and zeros (G, out), all in `precision`."""
        target = weight.T.contiguous()
        groups = -(-len(target) // self.size)
        scales = target.new_ones(groups, target.shape[1])
        zeros = torch.zeros_like(scales)
        if self.rounding.static_groups:
            importance = self.importance[self.inverse]
            for group, rows in enumerate(self._groups()):
                scales[group], zeros[group] = _parameters(target[rows], importance[rows], self.rounding)
        codes = self._round(target[self.order], scales, zeros)[self.inverse]
        if self.rounding.sweeps and not self.is_plain:
            _Refinement(self, target, codes, scales, zeros).run(self.rounding.sweeps)
        return codes, scales, zeros

    def _groups(self) -> Iterator[slice]:
        for start in range(0, len(self.order), self.size):
            yield slice(start, min(start + self.size, len(self.order)))

    def _round(self, rest: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Codes, columns in the order of rounding. `rest` becomes the errors; scales and zeros are filled in unless static."""
        codes = torch.empty_like(rest)
        index = self.group_index[self.order].tolist()
        static, high = self.rounding.static_groups, self.rounding.high
        steps = self.factor.diagonal().tolist()

        def rows(start: int, stop: int) -> None:
            if not static and start % self.size == 0 and stop - start <= self.size:
                group, whole = index[start], slice(start, min(start + self.size, len(rest)))
                if whole.stop == stop:
                    found = _parameters(rest[whole], self.importance[whole], self.rounding)
                    scales[group], zeros[group] = found
            if (middle := _split(start, stop, self.size)) is None:
                for row in range(start, stop):
                    scale, zero = scales[index[row]], zeros[index[row]]
                    code = torch.div(rest[row], scale, out=codes[row]).round_().add_(zero).clamp_(0, high)
                    rest[row].sub_((code - zero).mul_(scale)).div_(steps[row])
                    if row + 1 < stop:
                        rest[row + 1 : stop].addr_(self.factor[row, row + 1 : stop], rest[row], alpha=-1)
                return
            rows(start, middle)
            rest[middle:stop].addmm_(self.factor[start:middle, middle:stop].T, rest[start:middle], alpha=-1)
            rows(middle, stop)

        rows(0, len(rest))
        return codes


def _split(start: int, stop: int, size: int) -> int | None:
    """Where to halve a range of columns, at the bound of a group if it holds several; None: it is small enough."""
    if (groups := -(-(stop - start) // size)) > 1:
        return start + size * (groups // 2)
    return None if stop - start <= _LEAF else start + (stop - start) // 2


def _parameters(weight: Tensor, importance: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Scales and zeros (out,) of one group (rows, out), whose rows matter by `importance` (rows,). The range includes 0."""
    high, middle = rounding.high, float(2 ** (rounding.bits - 1))
    low, top = weight.amin(0).clamp(max=0), weight.amax(0).clamp(min=0)
    if rounding.symmetric:
        top = torch.maximum(-low, top)
        low = -top

    def shrunk(part: float) -> tuple[Tensor, Tensor]:
        scale = stored_scales(part * (top - low) / high, rounding.scale_dtype).to(weight)
        if rounding.symmetric:
            return scale, torch.full_like(scale, middle)
        return scale, torch.round(-part * low / scale).clamp(0, high)

    def steps(scale: Tensor, zero: Tensor) -> Tensor:
        return torch.round(weight / scale).add_(zero).clamp_(0, high).sub_(zero)

    best, zeros = shrunk(1.0)
    if not rounding.search:
        return best, zeros

    loss = torch.full_like(best, torch.inf)

    def consider(scale: Tensor, zero: Tensor) -> None:
        nonlocal best, zeros, loss
        found = importance @ steps(scale, zero).mul_(scale).sub_(weight).square_()
        better = found < loss
        best, zeros = torch.where(better, scale, best), torch.where(better, zero, zeros)
        loss = torch.where(better, found, loss)

    widest = high / (high - 1) if rounding.symmetric else 1.0  # then the midpoint's larger side loses nothing
    lowest = 1 - 1.3 / rounding.bits
    for number in range(_CANDIDATES):
        consider(*shrunk(widest - (widest - lowest) * number / (_CANDIDATES - 1)))
    x = steps(best, zeros)
    square, product = importance @ (x * x), importance @ (x * weight)
    fitted = torch.where((square > 0) & (product > 0), product / square, best)
    consider(stored_scales(fitted, rounding.scale_dtype).to(weight), zeros)
    return best, zeros


class _Refinement:
    """Descent on tr((W - Q) H (W - Q)^T), one code and one scale at a time; never a step upwards. Changes codes and scales."""

    def __init__(self, problem: _Problem, target: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> None:
        by_group = torch.argsort(problem.group_index, stable=True)
        rows = problem.inverse[by_group]
        self.gram = problem.gram[rows][:, rows]
        self.by_group, self.size, self.rounding = by_group, problem.size, problem.rounding
        self.target, self.codes = target[by_group], codes
        self.x = codes[by_group] - zeros[problem.group_index[by_group]]
        self.scales, self.zeros = scales, zeros

    def run(self, sweeps: int) -> None:
        group = torch.arange(len(self.x), device=self.x.device) // self.size
        for _ in range(sweeps):
            self.values = self.x * self.scales[group]
            self.slope = self.gram @ (self.target - self.values)
            self._descend(0, len(self.x))
        self.codes[self.by_group] = self.x + self.zeros[group]

    def _descend(self, start: int, stop: int) -> None:
        """Improves the columns start..stop, whole groups, and leaves in `values` by how much they changed."""
        if stop - start <= self.size:
            self._improve(start, stop)
            return
        middle = _split(start, stop, self.size)
        assert middle is not None
        self._descend(start, middle)
        self.slope[middle:stop].addmm_(self.gram[middle:stop, start:middle], self.values[start:middle], alpha=-1)
        self._descend(middle, stop)

    def _improve(self, start: int, stop: int) -> None:
        """One group: its codes in turn, then its scale."""
        group, rows = start // self.size, slice(start, stop)
        gram, x, values = self.gram[rows, rows], self.x[rows], self.values[rows]
        before, slope = values.clone(), self.slope[rows].clone()
        scale, zero = self.scales[group], self.zeros[group]
        lowest, highest = -zero, self.rounding.high - zero
        steps = gram.diagonal().tolist()

        def codes(first: int, last: int) -> None:
            """`values` becomes by how much they changed."""
            if last - first > _LEAF:
                middle = (first + last) // 2
                codes(first, middle)
                slope[middle:last].addmm_(gram[middle:last, first:middle], values[first:middle], alpha=-1)
                codes(middle, last)
                return
            for row in range(first, last):
                ideal = slope[row].div(steps[row]).add_(values[row]).div_(scale)
                torch.maximum(torch.minimum(ideal.round_(), highest, out=ideal), lowest, out=x[row])
                torch.sub(x[row] * scale, values[row], out=values[row])
                if row + 1 < last:
                    slope[row + 1 : last].addr_(gram[row, row + 1 : last], values[row], alpha=-1)

        codes(0, stop - start)
        rest = self.slope[rows] - gram @ values
        curvature = (x * (gram @ x)).sum(0)
        gain = (x * rest).sum(0)
        fitted = scale + gain / torch.where(curvature > 0, curvature, 1.0)
        fitted = stored_scales(fitted, self.rounding.scale_dtype).to(scale)
        step = fitted - scale
        scale = torch.where((curvature > 0) & (fitted > 0) & (step * (2 * gain - step * curvature) > 0), fitted, scale)
        self.scales[group] = scale
        torch.sub(x * scale, before, out=values)
