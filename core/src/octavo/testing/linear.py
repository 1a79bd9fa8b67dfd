"""The conformance suite of linear kernels: what a `LinearMethod` accepts it must compute, and the rest it must refuse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from octavo.platforms import Platform
from octavo.quant.linear import LinearMethod, LinearRequest
from octavo.quant.oracle import expected_product
from octavo.quant.weight import QuantizedWeight
from octavo.testing.linear_cells import (
    DTYPES,
    WeightCell,
    activation_cells,
    inputs,
    nonsense,
    weight_cells,
)
from octavo.testing.suite import Suite, deviation, expect_none_wrong, refusal, same_bits
from octavo.testing.weights import FIELDS

Job = tuple[WeightCell, torch.dtype, bool]
"""A weight, the compute type, and whether the layer has a bias."""


class LinearMethodSuite(Suite):
    """Set `method` to the `LinearMethod` under test.

    `activations` is what requests say of inputs that specs leave in float. Layers that the method refuses are skipped;
    `expected_product` states the tolerance for the others. A method may declare `batch_invariant = True`, which promises the
    same bits for a row whatever the number of rows: on a CPU the suite demands it.
    """

    method: ClassVar[type[LinearMethod]]
    activations: ClassVar[str] = "float"
    _subject = "method"

    def test_name_and_rank(self) -> None:
        assert isinstance(self.method.name, str), "name must be a string"
        assert self.method.name == self.method.name.strip().lower() != "", (
            "name must be lower case, without spaces around"
        )
        assert not set(self.method.name) & set(" ,=?*|"), "name must be usable in --linear-kernels"
        assert isinstance(self.method.rank, int), "rank must be an integer"

    def test_refuses_what_has_no_meaning(self) -> None:
        requests = list(nonsense(self._platform))
        accepted = [f"accepts {request}" for request in requests if refusal(self.method, request) is None]
        expect_none_wrong(accepted, len(requests))

    def test_accepts_a_layer(self) -> None:
        assert next(self._accepted([*weight_cells(), *activation_cells()]), None), "refuses every layer of the kit"

    def test_product_of_float_inputs(self) -> None:
        self._sweep(weight_cells())

    def test_product_of_quantised_inputs(self) -> None:
        self._sweep(activation_cells())

    def test_strided_inputs(self) -> None:
        wrong, jobs = [], self._samples()
        for job in jobs:
            layer, x = self._layer(job), self._inputs(job, 9)
            plain = layer(x)
            width = x.shape[1]
            strided = {
                "columns of a wider tensor": torch.cat([x + 1, x, x - 1], dim=1)[:, width : 2 * width],
                "every second row": x.repeat_interleave(2, dim=0)[::2],
                "transposed": x.t().contiguous().t(),
                "one row, repeated with stride 0": x[4:5].expand(9, width),
            }
            for name, view in strided.items():
                want = plain[4:5].expand_as(plain) if "repeated" in name else plain
                found = layer(view)
                if (reason := deviation(found, want, self._spread(job, view))) is not None:
                    wrong.append(f"{describe(job)}, {name}: {reason}")
        expect_none_wrong(wrong, 4 * len(jobs))

    def test_no_rows(self) -> None:
        for job in self._samples():
            cell, dtype, _ = job
            found = self._layer(job)(torch.empty(0, cell.in_features, dtype=dtype, device=self.device))
            assert found.shape == (0, cell.out_features), f"{describe(job)}: no rows gave {tuple(found.shape)}"
            assert found.dtype == dtype, f"{describe(job)}: no rows gave {found.dtype}"

    def test_a_row_ignores_its_neighbours(self) -> None:
        wrong, jobs = [], self._samples()
        for job in jobs:
            layer, x = self._layer(job), self._inputs(job, 9)
            plain = layer(x)
            for value in (float("nan"), float("inf"), torch.finfo(x.dtype).max, 0.0):
                changed = x.clone()
                changed[[0, 1, 2, 4, 5, 7, 8]] = value
                if not same_bits(layer(changed)[[3, 6]], plain[[3, 6]]):
                    wrong.append(f"{describe(job)}: rows 3 and 6 change when all others are {value}")
        expect_none_wrong(wrong, 4 * len(jobs))

    def test_a_row_alone_equals_the_row_in_a_batch(self) -> None:
        exact = self.method.batch_invariant and self.device == "cpu"
        wrong, jobs = [], self._samples()
        for job in jobs:
            layer, x = self._layer(job), self._inputs(job, 64)
            batch, spread = layer(x), self._spread(job, x)
            for row in (0, 5, 6, 63):
                alone = layer(x[row : row + 1])[0]
                reason = deviation(alone, batch[row], spread[row])
                if reason is None and exact and not same_bits(alone, batch[row]):
                    reason = "other bits, although the method declares batch_invariant"
                if reason is not None:
                    wrong.append(f"{describe(job)}: row {row} of 64: {reason}")
            for first, rows in ((0, 2), (5, 3), (1, 7), (40, 16), (3, 17), (13, 50)) if exact else ():
                if not same_bits(layer(x[first : first + rows]), batch[first : first + rows]):
                    wrong.append(
                        f"{describe(job)}: {rows} rows of 64: other bits, although batch_invariant is declared"
                    )
        expect_none_wrong(wrong, 4 * len(jobs))

    def test_keeps_no_state(self) -> None:
        wrong, jobs = [], self._samples()
        for job in jobs:
            layer, other = self._layer(job), self._layer(job, seed=7)
            given = [self._inputs(job, rows, seed) for rows, seed in ((8, 1), (8, 2), (1, 3), (8, 2), (8, 1))]
            expected = [self._layer(job)(x) for x in given]
            results = []
            for x in given:
                results.append(layer(x))
                other(x)
            for number, (found, fresh) in enumerate(zip(results, expected, strict=True)):
                if not same_bits(found, fresh):
                    wrong.append(
                        f"{describe(job)}: call {number + 1} gives, or keeps, another result than a first call"
                    )
        expect_none_wrong(wrong, len(jobs))

    def test_modifies_nothing(self) -> None:
        wrong, jobs = [], self._samples()
        for job in jobs:
            weight, untouched = self._weight(job), self._weight(job)
            x = self._inputs(job, 9)
            before = x.clone()
            layer = self.method(weight, self._request(job))
            with torch.inference_mode():
                layer(x)
            if not same_bits(x, before):
                wrong.append(f"{describe(job)}: the input was modified")
            for name in FIELDS:
                now, then = getattr(weight, name), getattr(untouched, name)
                if then is not None and not same_bits(now, then):
                    wrong.append(f"{describe(job)}: {name} of the weight was modified")
        expect_none_wrong(wrong, 2 * len(jobs))

    @property
    def _platform(self) -> Platform:
        return _platform(self.device)

    def _accepted(self, cells: Iterable[WeightCell]) -> Iterator[Job]:
        """All cells in all types that the method does not refuse, every other one with a bias."""
        for cell in cells:
            for number, dtype in enumerate(DTYPES):
                bias = (cell.turn + number) % 2 == 1
                if refusal(self.method, self._request((cell, dtype, bias))) is None:
                    yield cell, dtype, bias

    def _samples(self) -> list[Job]:
        """A few accepted jobs for each spec: the largest and the smallest shape, types and bias in turn."""
        by_spec: dict[object, list[Job]] = {}
        for job in self._accepted([*weight_cells(), *activation_cells()]):
            by_spec.setdefault((job[0].spec, job[0].balanced), []).append(job)
        picked = []
        for number, jobs in enumerate(by_spec.values()):
            picked += [jobs[number % min(6, len(jobs))], jobs[-1 - number % min(6, len(jobs))], jobs[len(jobs) // 2]]
        return picked

    def _weight(self, job: Job, seed: int = 0) -> QuantizedWeight:
        cell, _, bias = job
        weight = cell.weight(self.device, seed)
        return weight if bias else replace(weight, bias=None)

    def _layer(self, job: Job, seed: int = 0) -> _Runner:
        return _Runner(self.method(self._weight(job, seed), self._request(job)))

    def _inputs(self, job: Job, rows: int, seed: int = 1) -> Tensor:
        return inputs(rows, job[0].in_features, job[1], self.device, seed)

    def _expected(self, job: Job, x: Tensor) -> tuple[Tensor, Tensor]:
        cell, dtype, bias = job
        inputs_as = self.method.inputs_as(self._request(job))
        return expected_product(x, _untouched(cell, self.device), bias, dtype, inputs_as)

    def _request(self, job: Job) -> LinearRequest:
        return replace(job[0].request(job[1], job[2], self._platform), activations=self.activations)

    def _spread(self, job: Job, x: Tensor) -> Tensor:
        """How far two right results for x may be apart."""
        return 2 * self._expected(job, x)[1]

    def _sweep(self, cells: Iterable[WeightCell]) -> None:
        wrong, tried = [], 0
        for job in self._accepted(cells):
            layer, x = self._layer(job), self._inputs(job, job[0].rows[-1])
            product, tolerance = self._expected(job, x)
            for rows in job[0].rows:
                tried += 1
                found = layer(x[:rows])
                reason = deviation(found, product[:rows], tolerance[:rows])
                if reason is None and found.dtype != job[1]:
                    reason = f"result is {found.dtype}"
                if reason is not None:
                    wrong.append(f"{describe(job)}, {rows} rows: {reason}")
        expect_none_wrong(wrong, tried)


class _Runner:
    """A prepared layer, called as the engine calls it."""

    def __init__(self, layer: LinearMethod) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            result: Tensor = self.layer(x)
        return result


@lru_cache(maxsize=1)
def _untouched(cell: WeightCell, device: str) -> QuantizedWeight:
    """The cell's weight for the oracle, which no method ever holds."""
    return cell.weight(device)


@cache
def _platform(device: str) -> Platform:
    return Platform.detect(device)


def describe(job: Job) -> str:
    cell, dtype, bias = job
    return f"{cell}, {str(dtype).removeprefix('torch.')}{', bias' if bias else ''}"
