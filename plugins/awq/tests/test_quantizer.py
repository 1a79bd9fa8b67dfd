"""AWQ: its losses against products with the inputs themselves, what it gains, and what may be missing or zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo import (
    CalibratedGroup,
    InputStatistics,
    LinearLayer,
    QuantizedGroup,
    WeightSpec,
    round_to_nearest,
)
from octavo_awq.quantizer import AWQOptions, AWQQuantizer, _Search

GROUP = 32


def made(inputs: int = 96, outputs: int = 80, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs (tokens, in) some of whose channels are much larger, and a weight."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(400, inputs, generator=generator) * torch.rand(inputs, generator=generator).add(0.05).pow(-1.5)
    mixing = torch.eye(inputs) + 0.1 * torch.randn(inputs, inputs, generator=generator)
    return x @ mixing, torch.randn(outputs, inputs, generator=generator) * inputs**-0.5


def group_of(x: Tensor, weight: Tensor, split: int = 48, **options: Tensor | None) -> CalibratedGroup:
    sizes = (split, len(weight) - split)
    layers = tuple(
        LinearLayer(f"layers.0.{name}", weight.shape[1], size) for name, size in zip("qk", sizes, strict=True)
    )
    stated = {"producers": torch.arange(weight.shape[1])} | options
    return CalibratedGroup(layers, weight.split(sizes), InputStatistics.of(x), **stated)


def quantizer(group: CalibratedGroup, **options: object) -> AWQQuantizer:
    return AWQQuantizer(AWQOptions(group_size=GROUP, **options), group.layers)


def effective(result: QuantizedGroup) -> Tensor:
    whole = torch.cat([weight.dequantize() for weight in result.weights])
    return whole if result.divisor is None else whole / result.divisor


def loss(x: Tensor, weight: Tensor, found: Tensor) -> float:
    """||X (W' - W)^T||^2, directly."""
    return float((x.double() @ (found.double() - weight.double()).T).square().sum())


@pytest.mark.parametrize("exponents", [(0.0, 0.0), (0.5, 0.5), (0.75, 0.25)])
def test_the_loss_of_the_search_is_the_direct_loss(exponents: tuple[float, float]) -> None:
    x, weight = made()
    group = group_of(x, weight)
    gram = group.statistics().gram
    assert gram is not None
    search = _Search(quantizer(group), group, weight, gram.float())
    divisor = search.divisor(exponents) if any(exponents) else torch.ones(weight.shape[1])
    spec = WeightSpec("uint4", (1, GROUP), has_zeros=True)
    rounded = round_to_nearest(weight * divisor, spec, torch.float16).dequantize() / divisor
    assert search.loss(exponents) == pytest.approx(loss(x, weight, rounded), rel=1e-5)


@pytest.mark.parametrize("symmetric", [False, True])
def test_scales_and_clipping_lose_less_than_rounding(symmetric: bool) -> None:
    x, weight = made()
    group = group_of(x, weight)
    losses = {}
    for search, clip in (
        ("none", False),
        ("none", True),
        ("inputs", False),
        ("duo", False),
        ("both", False),
        ("both", True),
    ):
        result = quantizer(group, search=search, clip=clip, symmetric=symmetric).quantize(group)
        losses[search, clip] = loss(x, weight, effective(result))
    assert losses["none", True] < losses["none", False]
    assert losses["both", False] <= min(losses["inputs", False], losses["duo", False]) * 1.1
    assert losses["both", True] < losses["both", False] < 0.8 * losses["none", False]


def test_compensated_rounding_loses_less_still() -> None:
    x, weight = made()
    group = group_of(x, weight)
    plain, compensated = (quantizer(group, rounding=kind).quantize(group) for kind in ("nearest", "compensated"))
    assert loss(x, weight, effective(compensated)) < 0.9 * loss(x, weight, effective(plain))
    for layer, one in zip(group.layers, compensated.weights, strict=True):
        one.check(layer)


def test_what_comes_out_is_what_was_announced() -> None:
    x, weight = made()
    group = group_of(x, weight)
    method = quantizer(group)
    result = method.quantize(group)
    for layer, one in zip(group.layers, result.weights, strict=True):
        assert one.spec == method.spec(layer)
        one.check(layer)
        assert one.scales is not None
        assert one.scales.dtype == torch.float16
    assert result.notes == ()


def test_symmetric_zeros_are_the_midpoint() -> None:
    x, weight = made()
    group = group_of(x, weight)
    result = quantizer(group, symmetric=True).quantize(group)
    assert all(bool((one.zeros == 8).all()) for one in result.weights if one.zeros is not None)


def test_inputs_that_nobody_can_divide_stay() -> None:
    x, weight = made()
    group = group_of(x, weight, producers=None)
    assert quantizer(group).quantize(group).divisor is None


def test_channels_of_one_producer_share_a_divisor() -> None:
    x, weight = made()
    producers = torch.arange(96) % 48
    group = group_of(x, weight, producers=producers)
    divisor = quantizer(group).quantize(group).divisor
    assert divisor is not None
    assert torch.equal(divisor[:48], divisor[48:])
    assert len(divisor.unique()) > 10


def test_a_norm_absorbs_the_divisor_without_rounding() -> None:
    x, weight = made()
    norm = torch.linspace(0.3, 2, 96).bfloat16()
    group = group_of(x, weight, norm=norm)
    divisor = quantizer(group).quantize(group).divisor
    assert divisor is not None
    folded = (norm.float() / divisor).bfloat16()
    assert torch.allclose(folded.float() * divisor, norm.float(), rtol=1e-6)


@pytest.mark.parametrize("dead", [slice(0, 0), slice(3, 5), slice(0, 32), slice(0, 96)], ids=str)
@pytest.mark.parametrize("zero", [slice(0, 0), slice(32, 64), slice(0, 96)], ids=str)
def test_dead_channels_and_zero_groups_stay_finite(dead: slice, zero: slice) -> None:
    x, weight = made()
    x, weight = x.clone(), weight.clone()
    x[:, dead], weight[:, zero] = 0, 0
    group = group_of(x, weight)
    result = quantizer(group).quantize(group)
    found = effective(result)
    assert bool(torch.isfinite(found).all())
    assert not found[:, zero].any()
    assert result.divisor is None or bool((torch.isfinite(result.divisor) & (result.divisor > 0)).all())
    if dead == slice(0, 96):
        assert result.notes == ("its inputs were never active: rounded to nearest",)
        spec = WeightSpec("uint4", (1, GROUP), has_zeros=True)
        assert torch.equal(found, round_to_nearest(weight, spec, torch.float16).dequantize())
    else:
        assert loss(x, weight, found) <= loss(x, weight, weight * 0)


def test_the_whole_range_counts_where_nothing_is_gained_by_less() -> None:
    """Groups whose weights all lie on the grid of 16 steps: clipping would only lose."""
    weight = (torch.arange(16.0).repeat(2) - 5).repeat(48, 3)
    x = torch.randn(300, 96, generator=torch.Generator().manual_seed(0))
    group = group_of(x, weight, split=16)
    assert torch.equal(effective(quantizer(group, search="none").quantize(group)), weight)
