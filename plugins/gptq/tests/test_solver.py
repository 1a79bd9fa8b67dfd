"""The blocked solver against GPTQ as the textbook has it: float64, column by column, with an explicit inverse."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo import Rounded, Rounding, compensated_rounding

_PLAIN = Rounding(4, True, 8, search=False, sweeps=0, precision=torch.float64)


def problem(outputs: int = 6, inputs: int = 24, seed: int = 0, tokens: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """weight, gram and cross of inputs that hang together, channels of different size."""
    random = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=random, dtype=torch.float64)
    sizes = torch.rand(inputs, generator=random, dtype=torch.float64) * 3
    x = torch.randn(tokens, inputs, generator=random, dtype=torch.float64) @ mixing * sizes.exp()
    change = 0.1 * torch.randn(tokens, inputs, generator=random, dtype=torch.float64) * x.abs()
    return torch.randn(outputs, inputs, generator=random), x.T @ x, change.T @ x


def decode(rounded: Rounded, size: int) -> Tensor:
    index = rounded.group_index
    if index is None:
        index = torch.arange(rounded.codes.shape[1]) // (rounded.codes.shape[1] if size == -1 else size)
    scales, zeros = rounded.scales.double()[:, index.long()], rounded.zeros.double()[:, index.long()]
    return (rounded.codes.double() - zeros) * scales


def loss(weight: Tensor, rounded: Rounded, gram: Tensor, size: int) -> float:
    error = weight.double() - decode(rounded, size)
    return float(((error @ gram) * error).sum())


class Textbook:
    """One output at a time, one column at a time, each step as its formula says."""

    def __init__(self, weight: Tensor, gram: Tensor, rounding: Rounding, cross: Tensor) -> None:
        self.r, self.inputs = rounding, weight.shape[1]
        self.size = self.inputs if rounding.group_size == -1 else rounding.group_size
        diagonal = gram.diagonal().tolist()
        self.order = self._order(diagonal)
        gram = gram + rounding.damp * sum(diagonal) / len(diagonal) * torch.eye(self.inputs, dtype=torch.float64)
        target = weight.double() + rounding.shift * weight.double() @ cross @ torch.linalg.inv(gram)
        by_position = rounding.order == "importance" and not rounding.static_groups
        self.group_of = {column: (at if by_position else column) // self.size for at, column in enumerate(self.order)}
        self.costs = self._costs(gram)
        self.codes = torch.zeros(weight.shape, dtype=torch.int64)
        self.scales = torch.zeros(len(weight), -(-self.inputs // self.size), dtype=torch.float64)
        self.zeros = torch.zeros_like(self.scales)
        for row in range(len(weight)):
            self._round(row, target[row].clone(), gram)
            for _ in range(rounding.sweeps):
                self._improve(row, target[row], gram)

    def _order(self, diagonal: list[float]) -> list[int]:
        columns = list(range(self.inputs))
        if self.r.order == "none":
            return columns
        if self.r.order == "importance":
            return sorted(columns, key=lambda column: -diagonal[column])
        groups = [columns[at : at + self.size] for at in range(0, self.inputs, self.size)]
        groups = [sorted(group, key=lambda column: -diagonal[column]) for group in groups]
        short = [groups.pop()] if len(groups[-1]) < self.size else []
        groups.sort(key=lambda group: -diagonal[group[0]])
        return [column for group in groups + short for column in group]

    def _costs(self, gram: Tensor) -> dict[int, float]:
        """What an error of 1 in a column costs once all later columns have made up for it as well as they can."""
        inverse, costs = torch.linalg.inv(gram), {}
        for column in self.order:
            costs[column] = 1 / float(inverse[column, column])
            inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        return costs

    def _members(self, group: int) -> list[int]:
        return [column for column in self.order if self.group_of[column] == group]

    def _round(self, row: int, w: Tensor, gram: Tensor) -> None:
        inverse, known = torch.linalg.inv(gram), set()
        if self.r.static_groups:
            for group in set(self.group_of.values()):
                self._parameters(row, group, w)
                known.add(group)
        for column in self.order:
            group = self.group_of[column]
            if group not in known:
                self._parameters(row, group, w)
                known.add(group)
            scale, zero = self.scales[row, group], self.zeros[row, group]
            code = self._code(w[column], scale, zero)
            self.codes[row, column] = int(code)
            error = w[column] - scale * (code - zero)
            w -= error / inverse[column, column] * inverse[column]
            inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]

    def _code(self, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return (torch.round(w / scale) + zero).clamp(0, 2**self.r.bits - 1)

    def _stored(self, scale: Tensor) -> Tensor:
        stored = scale.to(self.r.scale_dtype).double()
        return stored if stored > 0 else torch.ones_like(stored)

    def _parameters(self, row: int, group: int, w: Tensor) -> None:
        columns = self._members(group)
        part, costs = w[columns], torch.tensor([self.costs[column] for column in columns], dtype=torch.float64)
        top, low = max(0.0, float(part.max())), min(0.0, float(part.min()))
        if self.r.symmetric:
            low, top = -max(top, -low), max(top, -low)
        high = 2**self.r.bits - 1

        def candidate(shrink: float) -> tuple[Tensor, Tensor]:
            scale = self._stored(torch.tensor(shrink * (top - low) / high, dtype=torch.float64))
            zero = torch.tensor(float(2 ** (self.r.bits - 1)), dtype=torch.float64)
            return scale, zero if self.r.symmetric else torch.round(-shrink * low / scale).clamp(0, high)

        def cost(scale: Tensor, zero: Tensor) -> float:
            return float((costs * (scale * (self._code(part, scale, zero) - zero) - part) ** 2).sum())

        best = candidate(1.0)
        if self.r.search:
            first, last = high / (high - 1) if self.r.symmetric else 1.0, 1 - 1.3 / self.r.bits
            best = min((candidate(first - (first - last) * i / 8) for i in range(9)), key=lambda pair: cost(*pair))
            x = self._code(part, *best) - best[1]
            if float((costs * x * x).sum()) > 0 and float((costs * x * part).sum()) > 0:
                fitted = self._stored((costs * x * part).sum() / (costs * x * x).sum())
                best = min((best, (fitted, best[1])), key=lambda pair: cost(*pair))
        self.scales[row, group], self.zeros[row, group] = best

    def _loss(self, row: int, target: Tensor, gram: Tensor) -> float:
        groups = torch.tensor([self.group_of[column] for column in range(self.inputs)])
        x = self.codes[row].double() - self.zeros[row, groups]
        error = target - x * self.scales[row, groups]
        return float(error @ gram @ error)

    def _improve(self, row: int, target: Tensor, gram: Tensor) -> None:
        """Tries all codes of each column, then scales about the best real-valued one of each group."""
        for group in range(self.scales.shape[1]):
            columns = sorted(self._members(group))
            for column in columns:
                losses = []
                for code in range(2**self.r.bits):
                    self.codes[row, column] = code
                    losses.append(self._loss(row, target, gram))
                self.codes[row, column] = min(range(len(losses)), key=losses.__getitem__)
            before = self.scales[row, group].clone()
            x = torch.zeros(self.inputs, dtype=torch.float64)
            x[columns] = self.codes[row, columns].double() - self.zeros[row, group]
            now = self._loss(row, target, gram)
            if float(curvature := x @ gram @ x) > 0:
                groups = torch.tensor([self.group_of[column] for column in range(self.inputs)])
                error = target - (self.codes[row].double() - self.zeros[row, groups]) * self.scales[row, groups]
                fitted = before + x @ gram @ error / curvature
                if fitted > 0:
                    self.scales[row, group] = self._stored(fitted)
                    if not self._loss(row, target, gram) < now:
                        self.scales[row, group] = before


def expect_textbook(weight: Tensor, gram: Tensor, rounding: Rounding, cross: Tensor) -> None:
    rounding = replace(rounding, precision=torch.float64)
    found, book = compensated_rounding(weight, gram, rounding, cross), Textbook(weight, gram, rounding, cross)
    wrong = (found.codes.long() != book.codes).nonzero().tolist()
    assert not wrong, f"{len(wrong)} codes differ with {rounding}, first at {wrong[0]}"
    assert torch.equal(found.scales.double(), book.scales)
    assert torch.equal(found.zeros.double(), book.zeros)
    index = torch.tensor([book.group_of[column] for column in range(weight.shape[1])])
    stored = found.group_index
    assert torch.equal(index, torch.arange(len(index)) // book.size if stored is None else stored.long())


_OPTIONS = list(product((2, 3, 4, 8), (True, False), ("none", "importance", "group"), (True, False), (True, False)))


@pytest.mark.parametrize(("bits", "symmetric", "order", "static", "search"), _OPTIONS)
def test_codes_are_the_textbook_s(bits: int, symmetric: bool, order: str, static: bool, search: bool) -> None:
    weight, gram, cross = problem(4, 22, seed=bits)
    rounding = Rounding(bits, symmetric, 8, torch.float32, order, static, search, sweeps=0)  # type: ignore[arg-type]
    expect_textbook(weight, gram, rounding, cross)
    expect_textbook(weight, gram, replace(rounding, shift=0.5, damp=0.1), cross)


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from((2, 3, 4)),
    symmetric=st.booleans(),
    order=st.sampled_from(("none", "importance", "group")),
    static=st.booleans(),
    search=st.booleans(),
    sweeps=st.integers(0, 2),
    inputs=st.integers(1, 40),
    size=st.sampled_from((-1, 1, 5, 8, 16)),
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
    seed=st.integers(0, 1000),
)
def test_all_options_together(bits, symmetric, order, static, search, sweeps, inputs, size, dtype, seed) -> None:
    weight, gram, cross = problem(2, inputs, seed)
    expect_textbook(
        weight, gram, Rounding(bits, symmetric, size, dtype, order, static, search, sweeps, shift=0.25), cross
    )


def test_sizes_beyond_one_block_and_several_threads_worth_of_outputs() -> None:
    weight, gram, cross = problem(3, 150, seed=3, tokens=400)
    many = weight.repeat(700, 1)
    rounding = Rounding(4, True, 32, order="group")
    once, often = (compensated_rounding(w, gram, rounding, cross) for w in (weight, many))
    assert torch.equal(often.codes[:3], once.codes)
    expect_textbook(weight, gram, replace(rounding, sweeps=0), cross)


def test_refinement_never_makes_it_worse() -> None:
    weight, gram, _ = problem(32, 64, seed=5, tokens=300)
    for symmetric, size, bits in product((True, False), (-1, 16), (2, 4, 8)):
        damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(64, dtype=torch.float64)
        losses = [
            loss(weight, compensated_rounding(weight, gram, Rounding(bits, symmetric, size, sweeps=n)), damped, size)
            for n in range(5)
        ]
        assert losses == sorted(losses, reverse=True), f"{bits} bits, group {size}: {losses}"
        assert losses[-1] < losses[0]


def test_single_precision_loses_nothing() -> None:
    weight, gram, _ = problem(64, 96, seed=6, tokens=400)
    for symmetric, size in product((True, False), (-1, 32)):
        rounding = Rounding(4, symmetric, size, order="group")
        exact = loss(weight, compensated_rounding(weight, gram, replace(rounding, precision=torch.float64)), gram, size)
        single = loss(weight, compensated_rounding(weight, gram, rounding), gram, size)
        assert abs(single / exact - 1) < 0.01


def test_published_example() -> None:
    """Two rows, three bits, four tokens: worked out with AutoGPTQ."""
    weight = torch.tensor([[0.9, -0.35, 0.2, 0.5], [-0.6, 0.8, 0.1, -0.25]])
    x = torch.tensor([[1, 2, 0, 1], [0, 1, 1, -1], [2, 1, -1, 0], [1, 0, 3, 1]], dtype=torch.float64)
    channel = Rounding(3, True, -1, torch.float32, search=False, sweeps=0, precision=torch.float64)
    for order in ("none", "importance"):
        found = compensated_rounding(weight, 2 * x.T @ x, replace(channel, order=order))
        assert found.codes.tolist() == [[7, 3, 5, 6], [1, 7, 4, 4]]
        torch.testing.assert_close(found.scales.flatten(), torch.tensor([0.257143, 0.228571]), atol=1e-6, rtol=0)
    pairs = replace(channel, symmetric=False, group_size=2)
    assert compensated_rounding(weight, 2 * x.T @ x, pairs).codes.tolist() == [[7, 0, 3, 7], [0, 7, 7, 0]]
    ordered = compensated_rounding(weight, 2 * x.T @ x, replace(pairs, order="importance"))
    assert ordered.codes.tolist() == [[7, 0, 2, 7], [0, 7, 7, 0]]
    assert ordered.group_index is not None
    assert ordered.group_index.tolist() == [0, 1, 0, 1]


def test_q28_symmetric_range_reaches_the_largest_of_positive_weights() -> None:
    weight = torch.tensor([[0.1, 0.2, 0.5, 1.0]])
    for search in (False, True):
        found = compensated_rounding(weight, torch.eye(4).double(), Rounding(4, True, -1, search=search, sweeps=0))
        assert abs(float(decode(found, -1)[0, 3]) - 1.0) < 0.08, "clipped at 7/15 of the range"
        assert found.zeros.tolist() == [[8.0]]


def test_inputs_that_were_never_active_neither_give_nor_take_errors() -> None:
    weight, gram, _ = problem(4, 16)
    gram[3], gram[:, 3] = 0, 0
    found = compensated_rounding(weight, gram, replace(_PLAIN, group_size=-1))
    others = [column for column in range(16) if column != 3]
    without = compensated_rounding(weight, gram, replace(_PLAIN, group_size=-1))
    assert torch.equal(found.codes[:, others], without.codes[:, others])
    nearest = (weight[:, 3:4] / found.scales).round() + 8
    assert torch.equal(found.codes[:, 3:4].float(), nearest.clamp(0, 15)), "the weight of a silent input is not its own"


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_q59_singular_matrices_round_and_say_what_damping_it_took(rank: int) -> None:
    weight, _, _ = problem(4, 16)
    x = torch.randn(rank, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = compensated_rounding(weight, x.T @ x, replace(_PLAIN, damp=0.0, sweeps=1))
    assert bool(torch.isfinite(decode(found, 8)).all())
    assert found.damp is not None
    assert (found.damp > 0) == (rank > 0)  # no input at all: nothing to make up for, and nothing singular


def test_q59_a_matrix_that_no_damping_helps_is_rounded_to_nearest() -> None:
    weight, _, _ = problem(4, 16)
    found = compensated_rounding(
        weight, torch.full((16, 16), torch.nan, dtype=torch.float64), replace(_PLAIN, sweeps=2)
    )
    plain = compensated_rounding(weight, torch.eye(16, dtype=torch.float64), _PLAIN)
    assert found.damp is None
    assert torch.equal(found.codes, plain.codes)
    assert torch.equal(found.scales, plain.scales)


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_of_zeros_and_tiny_or_huge_weights_stay_finite(symmetric: bool) -> None:
    weight, gram, _ = problem(4, 16)
    weight[0, :8], weight[1] = 0, 1e-30
    weight[2] *= 1e6
    for dtype in (torch.float16, torch.float32):
        found = compensated_rounding(weight, gram, Rounding(4, symmetric, 8, dtype))
        assert bool(torch.isfinite(found.scales).all() & (found.scales > 0).all())
        assert decode(found, 8)[0, :8].abs().max() <= weight[0].abs().max()
        assert bool((found.codes <= 15).all())
