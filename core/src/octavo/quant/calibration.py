"""What calibration keeps of the inputs of a linear layer, and how much computing is shared out among threads.

All sums have one order, so that the same text gives the same bits whatever the number of threads: each sequence is multiplied
by one thread, and sequences are added in their order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")
_R = TypeVar("_R")
_BLOCK = 256  # columns of a Gram matrix that are computed at once: blocks below the diagonal are mirrored


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """An input X (tokens, in) over the calibration text, summed up.

    `gram` (in, in) fp64 is X^T X, and `cross` (in, in) fp64 (X' - X)^T X, where X' is the input in the float model; `sample`
    (rows, in) fp32 are rows of X, evenly spaced. Those three only where they were asked for. `mean_abs`, `low` and `high` (in,)
    fp32 are each channel's mean magnitude, smallest and largest value.
    """

    tokens: int
    mean_abs: Tensor
    low: Tensor
    high: Tensor
    gram: Tensor | None = None
    cross: Tensor | None = None
    sample: Tensor | None = None

    @classmethod
    def of(cls, inputs: Tensor, float_inputs: Tensor | None = None) -> InputStatistics:
        """Everything there is to know of one input (tokens, in), and of the same in the float model."""
        needs = frozenset({"gram", "cross", "sample"})
        sums = InputSums(inputs.shape[1], needs, len(inputs), str(inputs.device))
        sums.add(InputSums.terms(sums.needs, inputs, inputs if float_inputs is None else float_inputs, 1))
        return sums.statistics()

    def divided(self, divisor: Tensor) -> InputStatistics:
        """The same of X / divisor (in,)."""
        both = torch.outer(divisor, divisor).double()
        return InputStatistics(
            self.tokens,
            self.mean_abs / divisor,
            self.low / divisor,
            self.high / divisor,
            None if self.gram is None else self.gram / both,
            None if self.cross is None else self.cross / both,
            None if self.sample is None else self.sample / divisor,
        )

    @property
    def largest(self) -> Tensor:
        """Each channel's largest magnitude (in,)."""
        return torch.maximum(-self.low, self.high)


@dataclass(frozen=True, slots=True)
class SequenceSums:
    """What some sequences add to `InputSums`."""

    tokens: int
    sum_abs: Tensor
    low: Tensor
    high: Tensor
    gram: Tensor | None
    cross: Tensor | None
    sample: Tensor | None


class InputSums:
    """Adds up `InputStatistics` sequence by sequence: `terms` may run on many threads, `add` follows in order."""

    def __init__(self, in_features: int, needs: frozenset[str], rows: int = 0, device: str = "cpu") -> None:
        """`needs` as in `Quantizer.needs`; `rows` of the sample, at most."""
        self.needs, self._rows = needs, rows
        self._tokens = 0
        self._sum_abs = torch.zeros(in_features, dtype=torch.float64, device=device)
        self._low = torch.full((in_features,), float("inf"), device=device)
        self._high = torch.full((in_features,), float("-inf"), device=device)
        square = torch.zeros(in_features, in_features, dtype=torch.float64, device=device)
        self._gram = square.clone() if "gram" in needs else None
        self._cross = square if "cross" in needs else None
        self._sample: list[Tensor] = []

    @staticmethod
    def terms(needs: frozenset[str], inputs: Tensor, float_inputs: Tensor | None, every: int) -> SequenceSums:
        """One sequence's part: `inputs` (tokens, in), of which each `every`-th row may become part of the sample."""
        wide = inputs.float()
        return SequenceSums(
            len(wide),
            wide.abs().sum(0, dtype=torch.float64),
            wide.amin(0),
            wide.amax(0),
            _symmetric_product(wide) if "gram" in needs else None,
            ((float_inputs.float() - wide).T @ wide) if "cross" in needs and float_inputs is not None else None,
            wide[every // 2 :: every].clone() if "sample" in needs else None,
        )

    def add(self, terms: SequenceSums) -> None:
        """Adds a sequence."""
        self._tokens += terms.tokens
        self._sum_abs += terms.sum_abs
        torch.minimum(self._low, terms.low, out=self._low)
        torch.maximum(self._high, terms.high, out=self._high)
        for total, part in ((self._gram, terms.gram), (self._cross, terms.cross)):
            if total is not None and part is not None:
                total += part
        if terms.sample is not None:
            self._sample.append(terms.sample)

    def statistics(self) -> InputStatistics:
        """What was added, so far."""
        seen = self._tokens > 0
        sample = torch.cat(self._sample)[: self._rows] if self._sample else None
        return InputStatistics(
            self._tokens,
            (self._sum_abs / max(self._tokens, 1)).float(),
            self._low if seen else torch.zeros_like(self._low),
            self._high if seen else torch.zeros_like(self._high),
            self._gram,
            self._cross,
            sample,
        )


def _symmetric_product(x: Tensor) -> Tensor:
    """x^T x, its lower half mirrored from the upper one: half the work."""
    size = x.shape[1]
    product = torch.empty(size, size, dtype=x.dtype, device=x.device)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        product[start:stop, start:] = x[:, start:stop].T @ x[:, start:]
        product[stop:, start:stop] = product[start:stop, stop:].T
    return product


def gram_loss(weight_error: Tensor, gram: Tensor) -> Tensor:
    """||X E^T||^2 over all tokens for E (out, in) and gram X^T X (in, in): tr(E gram E^T), in the type of `gram`."""
    wide = weight_error.to(gram.dtype)
    return ((wide @ gram) * wide).sum()


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes with one thread; `parallel_map` uses as many as it had before."""
    before = torch.get_num_threads()
    _workers.append(before)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _workers.pop()


_workers: list[int] = []


def parallel_map(function: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R]:
    """function(item) for each item, in order, computed by as many threads as torch had, each of which computes alone.

    At most that many results wait to be taken.
    """
    workers = _workers[-1] if _workers else min(torch.get_num_threads(), os.cpu_count() or 1)
    if workers == 1:
        yield from map(function, items)
        return
    inference = torch.is_inference_mode_enabled()

    def work(item: _T) -> _R:
        with torch.inference_mode(inference):
            return function(item)

    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting = []
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > workers:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()
