"""Inputs that are quantised before a product: codes, scales and zeros by hand, and what the reference makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo import ActivationSpec, LinearRequest, Platform, QuantizedWeight, WeightSpec, quantize_inputs
from octavo.quant.activation import dequantize_inputs, why_not_quantize
from octavo.quant.linear import DequantizedMethod, ReferenceMethod
from octavo.testing import LinearMethodSuite

CPU = Platform("cpu", "x86_64", frozenset(), 1)
TOKEN, ASYMMETRIC = ActivationSpec("int8"), ActivationSpec("int8", symmetric=False)
STATIC = ActivationSpec("int8", "per_tensor", dynamic=False)
X = torch.tensor([[2.0, -1.0, 0.5, 3.0]])


class TestReference(LinearMethodSuite):
    method = ReferenceMethod


def test_symmetric_per_token() -> None:
    codes, scales, zeros = quantize_inputs(X, TOKEN)
    assert codes.tolist() == [[85, -42, 21, 127]]
    assert scales.item() == pytest.approx(3 / 127)
    assert zeros is None
    assert codes.dtype == torch.int8


def test_asymmetric_per_token() -> None:
    codes, scales, zeros = quantize_inputs(X, ASYMMETRIC)
    assert zeros is not None
    assert (scales.item(), zeros.item()) == (pytest.approx(4 / 255), -64)
    assert codes.tolist() == [[63, -128, -32, 127]]


def test_static_with_a_zero_point() -> None:
    activation = replace(STATIC, symmetric=False)
    codes, scales, zeros = quantize_inputs(X, activation, torch.tensor([0.02]), torch.tensor([-20], dtype=torch.int8))
    assert codes.tolist() == [[80, -70, 5, 127]], "the last one saturates"
    assert dequantize_inputs(codes, scales, zeros, activation)[0, :3].tolist() == pytest.approx([2.0, -1.0, 0.5])


def test_groups_with_a_short_last_one() -> None:
    activation = ActivationSpec("fp8_e4m3", "per_group", group_size=3)
    codes, scales, _ = quantize_inputs(X, activation)
    assert codes.shape == X.shape
    assert scales.tolist() == [pytest.approx([2 / 448, 3 / 448])]
    back = dequantize_inputs(codes, scales, None, activation)
    assert (back - X).abs().max() < 0.07


@pytest.mark.parametrize("activation", [TOKEN, ASYMMETRIC, STATIC, ActivationSpec("fp8_e4m3")], ids=str)
def test_q32_rows_of_zeros_and_of_no_numbers(activation: ActivationSpec) -> None:
    x = torch.stack([torch.zeros(8), torch.full((8,), torch.nan), torch.arange(8.0)])
    codes, scales, zeros = quantize_inputs(x, activation, torch.tensor(0.06))
    back = dequantize_inputs(codes, scales, zeros, activation)
    assert not back[0].any()
    assert torch.isnan(back[1]).all(), "what is no number must not become one"
    assert (back[2] - x[2]).abs().max() < 0.3


def test_no_rows() -> None:
    for activation in (TOKEN, ASYMMETRIC, ActivationSpec("fp8_e4m3", "per_group", group_size=4)):
        codes, scales, _ = quantize_inputs(torch.empty(0, 8), activation)
        assert (codes.shape, len(scales)) == ((0, 8), 0)


@pytest.mark.parametrize(
    ("activation", "words"),
    [
        (ActivationSpec("uint4"), "uint4"),
        (ActivationSpec("int8", "per_channel"), "per_channel"),
        (ActivationSpec("int8", "per_tensor"), "neighbours"),
        (ActivationSpec("int8", dynamic=False), "static"),
        (ActivationSpec("int8", "per_group"), "groups of -1"),
        (ActivationSpec("fp8_e4m3", symmetric=False), "asymmetric"),
    ],
)
def test_what_has_no_meaning_is_refused(activation: ActivationSpec, words: str) -> None:
    spec = WeightSpec("int8", (1, -1), activation=activation)
    request = LinearRequest("layer", spec, 8, 8, False, torch.float32, CPU)
    assert words in str(why_not_quantize(activation))
    assert words in str(ReferenceMethod.why_not(request))


def test_dequantised_once_leaves_inputs_alone() -> None:
    request = LinearRequest("layer", WeightSpec("int8", (1, -1), activation=TOKEN), 8, 8, False, torch.float32, CPU)
    assert "leaves inputs unquantised" in str(DequantizedMethod.why_not(request))


def test_worked_example_of_a_product() -> None:
    """W = [[-1, .25, .5, .9], [.02, -.04, .03, .01]] in int8 by absmax / 127.5, on X: 3810 and 16854 times the scales."""
    codes = torch.tensor([[-127, 32, 64, 115], [64, -127, 96, 32]], dtype=torch.int8)
    scales = torch.tensor([[1 / 127.5], [0.04 / 127.5]])
    spec = WeightSpec("int8", (1, -1), activation=TOKEN)
    request = LinearRequest("layer", spec, 4, 2, False, torch.float32, CPU)
    (y,) = ReferenceMethod(QuantizedWeight(spec, codes, scales), request)(X)
    assert y.tolist() == pytest.approx([0.70588, 0.12490], abs=2e-5)
