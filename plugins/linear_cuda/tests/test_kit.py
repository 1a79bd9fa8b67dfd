"""The conformance kit on both methods, under Triton's interpreter, which takes some 50 ms for a small product.

So each class looks at one of `every` layers of the kit, with one of three numbers of rows: types, shapes and bias come in
turn, because `every` is prime. Tiles are of several sizes, with and without a split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import islice
from typing import Any, ClassVar

import pytest

pytest.importorskip("triton")

from octavo import LinearRequest, Platform
from octavo.testing import CommandSuite, LinearMethodSuite, gpu
from octavo_linear_cuda import w8a8, weight_only
from octavo_linear_cuda.tune import Tune
from octavo_linear_cuda.tuning import Tile, Work


def tile_of(work: Work, platform: Platform) -> Tile:
    """Few large tiles, because the interpreter's time is one by operation."""
    rows = next((rows for rows in (8, 16, 64) if work.rows <= rows), 64)
    return Tile(128, rows, 2 if work.rows in (2, 17) else 1, 4, 1)


def with_fewer_rows(cell: Any, most: int) -> Any:
    """The kit's cell, with one of three of its numbers of rows, of those up to `most`."""
    kind = type(cell)
    rows = property(lambda self: [r for r in kind.rows.__get__(self) if r <= most][self.turn % 3 :: 3])
    fewer = type(kind.__name__, (kind,), {"__slots__": (), "__str__": kind.__str__, "rows": rows})
    return fewer(**{field.name: getattr(cell, field.name) for field in fields(cell)})


class WeightOnly(weight_only.WeightOnly):
    """Asked as on a GPU; its kernels run where the tensors lie."""

    @classmethod
    def why_not(cls, request: LinearRequest) -> str | None:
        return super().why_not(replace(request, platform=gpu((9, 0))))


class W8A8(w8a8.W8A8):
    """Likewise."""

    @classmethod
    def why_not(cls, request: LinearRequest) -> str | None:
        return super().why_not(replace(request, platform=gpu((9, 0))))


class _Some:
    every: ClassVar[int]
    first: ClassVar[int] = 0
    sampled: ClassVar[int]
    most_rows: ClassVar[int] = 130

    @pytest.fixture(autouse=True)
    def _tiles(self, interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (weight_only, w8a8):
            monkeypatch.setattr(module, "tile_for", tile_of)

    def _accepted(self, cells: Iterable[Any]) -> Iterator[Any]:
        some = islice(super()._accepted(cells), self.first, None, self.every)  # type: ignore[misc]
        return ((with_fewer_rows(cell, self.most_rows), *others) for cell, *others in some)

    def _samples(self) -> list[Any]:
        return super()._samples()[:: self.sampled]  # type: ignore[misc]


class TestWeightOnly(_Some, LinearMethodSuite):
    method = WeightOnly
    every, sampled = 17, 61


@pytest.mark.slow
class TestWeightOnlyElsewhere(_Some, LinearMethodSuite):
    method = WeightOnly
    every, first, sampled = 7, 5, 41


class TestW8A8(_Some, LinearMethodSuite):
    method = W8A8
    every, sampled = 5, 29
    most_rows = 17  # each row is quantised by a program of its own


class TestWeightOnlyOnAGPU(LinearMethodSuite):
    device = "cuda"
    method = weight_only.WeightOnly


class TestW8A8OnAGPU(LinearMethodSuite):
    device = "cuda"
    method = w8a8.W8A8


class TestTune(CommandSuite):
    command = Tune
