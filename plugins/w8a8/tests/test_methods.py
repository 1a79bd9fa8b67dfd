"""The integer kernel: exact sums, what it refuses, and the traps that int8 kernels have fallen into."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import octavo_w8a8
from octavo import (
    LLM,
    ActivationSpec,
    CheckpointError,
    CompletionOutput,
    LinearRequest,
    Platform,
    QuantizedWeight,
    SamplingParams,
    WeightSpec,
)
from octavo.testing import random_weight, tiny_model
from octavo_w8a8 import methods
from octavo_w8a8.fp8 import FP8Config
from octavo_w8a8.int8 import SPEC, W8A8Int8Config
from octavo_w8a8.methods import Int8Method, Int8WeightMethod, chunked, int_mm, int_mm_padded, is_exact, product_for

CPU = Platform.detect("cpu")
DYNAMIC, DYNAMIC_ASYMMETRIC = ActivationSpec("int8"), ActivationSpec("int8", symmetric=False)
STATIC = ActivationSpec("int8", "per_tensor", dynamic=False)
STATIC_ASYMMETRIC = replace(STATIC, symmetric=False)
ALL = (DYNAMIC, DYNAMIC_ASYMMETRIC, STATIC, STATIC_ASYMMETRIC)
SHAPES = ((1, 1, 1), (3, 97, 33), (17, 1024, 8), (5, 1025, 40), (24, 3001, 16))


def request_for(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> LinearRequest:
    bias = weight.bias is not None
    return LinearRequest("layer", weight.spec, weight.in_features, weight.out_features, bias, dtype, CPU)


def prepare(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Int8Method:
    assert Int8Method.why_not(request_for(weight, dtype)) is None
    return Int8Method(weight, request_for(weight, dtype))


def make(activation: ActivationSpec, rows: int = 40, columns: int = 96, group: int = 1) -> QuantizedWeight:
    spec = WeightSpec("int8", (group, -1), activation=activation)
    generator = torch.Generator().manual_seed(rows + columns)
    weight = random_weight(spec, rows, columns, generator, zeros="integer")
    return replace(weight, bias=torch.randn(rows, generator=generator))


def integers(rows: int, columns: int, low: int = -128, high: int = 127, seed: int = 0) -> Tensor:
    return torch.randint(low, high + 1, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.int8)


def expected(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The formula of this kernel's docstring in int64 and float64, with inputs quantised here and not by octavo."""
    activation, wide = weight.spec.activation, x.double()
    assert activation is not None
    assert weight.scales is not None
    zero = torch.zeros(len(x), 1, dtype=torch.float64)
    if not activation.dynamic:
        assert weight.input_scale is not None
        scale = weight.input_scale.double().reshape(1, 1).expand(len(x), 1)
        zero = zero if weight.input_zero is None else zero + weight.input_zero.double()
    elif activation.symmetric:
        scale = wide.abs().amax(1, keepdim=True) / 127
    else:
        low, high = wide.amin(1, keepdim=True).clamp(max=0), wide.amax(1, keepdim=True).clamp(min=0)
        scale = (high - low) / 255
        zero = (-128 - low / scale.clamp(min=1e-300)).round()
    scale = torch.where(scale > 0, scale, 1.0)
    zero = torch.where(torch.isfinite(zero), zero, 0.0)
    codes = (wide / scale + zero).round().clamp(-128, 127).long()
    sums = codes @ weight.codes.long().t() - zero.long() * weight.codes.long().sum(1)
    result = scale * weight.scales.double().reshape(1, -1) * sums
    return result if weight.bias is None else result + weight.bias.double()


def powers_of_two(activation: ActivationSpec) -> QuantizedWeight:
    """A weight whose scales change no bits, so that a result is exact or wrong."""
    weight = make(activation)
    assert weight.scales is not None
    static = None if activation.dynamic else torch.tensor([0.25])
    zero = None if activation.symmetric or activation.dynamic else torch.tensor([-37.0])
    return replace(weight, scales=torch.full_like(weight.scales, 0.5), bias=None, input_scale=static, input_zero=zero)


# --- exactness


@pytest.mark.parametrize("product", [int_mm, chunked])
@pytest.mark.parametrize(("tokens", "columns", "rows"), SHAPES)
def test_products_are_exact(product: methods.Product, tokens: int, columns: int, rows: int) -> None:
    for low, high in ((-128, 127), (-128, -128), (127, 127)):
        left, right = integers(tokens, columns, low, high), integers(rows, columns, low, 127, seed=1)
        found = product(left, right)
        assert found.dtype == torch.int32
        assert torch.equal(found.long(), left.long() @ right.long().t())


def test_padding_for_cuda_changes_nothing() -> None:
    """CUDA takes more than 16 rows and multiples of 8: run here, where any size works."""
    for tokens in (0, 1, 16, 17, 25):
        left, right = integers(tokens, 97), integers(40, 97, seed=1)
        wide = torch.nn.functional.pad(right, (0, 7))
        assert torch.equal(int_mm_padded(left, wide), int_mm(left, right))
        assert torch.equal(chunked(left, wide), int_mm(left, right))


def test_padding_for_cuda_fits_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of torch's CUDA product, enforced here: rows > 16, and inner and outer sizes multiples of 8."""

    def strict(left: Tensor, right: Tensor) -> Tensor:
        assert left.shape[0] > 16
        assert left.shape[1] > 0
        assert left.shape[1] % 8 == 0
        assert right.shape[1] % 8 == 0
        return (left.long() @ right.long()).int()

    monkeypatch.setattr(torch, "_int_mm", strict)
    weight = make(DYNAMIC, rows=33, columns=97)
    on_cuda = replace(request_for(weight), platform=replace(CPU, device="cuda"))
    monkeypatch.setattr(methods, "product_for", lambda device: int_mm_padded)
    layer, x = Int8Method(weight, on_cuda), torch.randn(3, 97)
    assert torch.allclose(layer(x).double(), expected(x, weight), rtol=1e-5, atol=1e-6)
    assert sum(t.numel() * t.element_size() for t in layer.buffers()) == Int8Method.planned_bytes(on_cuda)


@pytest.mark.parametrize("activation", ALL, ids=str)
@pytest.mark.parametrize("product", [int_mm, chunked])
def test_results_are_the_formula_to_the_last_bit(
    activation: ActivationSpec, product: methods.Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "product_for", lambda device: product)
    weight = powers_of_two(activation)
    x = integers(7, 96, -127, 127).float() / 4
    x[:, 0], x[:, 1] = 31.75, -32.0 if not activation.symmetric else -31.75  # scales of exactly 1/4
    assert torch.equal(prepare(weight)(x).double(), expected(x, weight))


@pytest.mark.parametrize("activation", [DYNAMIC_ASYMMETRIC, STATIC_ASYMMETRIC], ids=str)
def test_zeros_are_subtracted_before_rounding(activation: ActivationSpec) -> None:
    """Sums beyond 2^24, whose differences fp32 would round: the correction is made in int32."""
    columns = methods.MAX_INPUTS_ASYMMETRIC
    spec = WeightSpec("int8", (-1, -1), activation=activation)
    static = {} if activation.dynamic else {"input_scale": torch.tensor([0.25]), "input_zero": torch.tensor([127.0])}
    weight = QuantizedWeight(spec, torch.full((1, columns), 127, dtype=torch.int8), torch.ones(1, 1), **static)
    x = torch.zeros(1, columns)
    x[0, 3], x[0, 4] = -63.75, -0.25  # scale 1/4, zero 127: all other codes are 127
    assert prepare(weight)(x).tolist() == [[-64 * 127.0]]


# --- traps


@pytest.mark.parametrize("activation", ALL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_q32_rows_of_zeros_give_the_bias(activation: ActivationSpec, dtype: torch.dtype) -> None:
    """A scale of 0, from padding, divides nothing."""
    weight = make(activation)
    assert weight.bias is not None
    x = torch.zeros(4, 96, dtype=dtype)
    x[2] = 1
    found = prepare(weight, dtype)(x)
    assert bool(torch.isfinite(found).all())
    assert torch.equal(found[[0, 1, 3]], weight.bias.to(dtype).expand(3, -1))


def test_q32_constant_rows_have_a_range() -> None:
    """Asymmetric scales from the plain minimum and maximum would be 0 here; 0 belongs to the range."""
    weight = replace(make(DYNAMIC_ASYMMETRIC), bias=None)
    for value in (3.0, -3.0):
        x = torch.full((2, 96), value)
        found = prepare(weight)(x)
        assert torch.allclose(found.double(), x.double() @ weight.dequantize().double().t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero", [-128.0, -37.0, 0.0, 127.0])
def test_q33_static_asymmetric_inputs_with_bias(zero: float, dtype: torch.dtype) -> None:
    """The stored zero is folded once, and not into, or instead of, the bias."""
    weight = make(STATIC_ASYMMETRIC)
    weight = replace(weight, input_scale=torch.tensor([0.0317]), input_zero=torch.tensor([zero]))
    x = (torch.randn(9, 96, generator=torch.Generator().manual_seed(2)) - zero / 60).to(dtype)
    for candidate in (weight, replace(weight, bias=None), replace(weight, input_zero=None)):
        found, right = prepare(candidate, dtype)(x), expected(x, candidate)
        assert torch.allclose(found.double(), right, rtol=torch.finfo(dtype).eps * 4, atol=1e-4)


def test_q45_scales_per_tensor_of_fused_members() -> None:
    parts = [make(DYNAMIC, rows=rows, group=-1) for rows in (40, 8, 24)]
    fused = parts[0].concat(parts[1:])
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(3))
    alone = torch.cat([prepare(part)(x) for part in parts], dim=1)
    assert torch.equal(prepare(fused)(x), alone)


def test_scales_for_blocks_of_outputs() -> None:
    weight = make(DYNAMIC, rows=40, group=16)
    assert weight.scales is not None
    assert weight.scales.shape == (3, 1)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(3))
    rows = replace(weight, scales=weight.scales.repeat_interleave(16, 0)[:40], spec=make(DYNAMIC).spec)
    assert torch.equal(prepare(weight)(x), prepare(rows)(x))


@pytest.mark.parametrize("activation", ALL, ids=str)
def test_a_row_has_the_same_bits_in_every_batch(activation: ActivationSpec) -> None:
    layer, x = prepare(make(activation)), torch.randn(130, 96, generator=torch.Generator().manual_seed(4))
    whole = layer(x)
    for rows in (1, 2, 3, 7, 16, 17, 64):
        assert torch.equal(layer(x[:rows]), whole[:rows])


@pytest.mark.parametrize("activation", ALL[:2], ids=str)
def test_inputs_that_are_nan_are_not_hidden(activation: ActivationSpec) -> None:
    x = torch.ones(3, 96)
    x[1, 7] = float("nan")
    found = prepare(make(activation))(x)
    assert torch.isnan(found).all(1).tolist() == [False, True, False]
    assert bool(torch.isfinite(found[[0, 2]]).all())


def test_a_zero_that_is_no_code_is_refused_by_name() -> None:
    for value in (0.5, 128.0, -129.0):
        weight = replace(make(STATIC_ASYMMETRIC), input_zero=torch.tensor([value]))
        with pytest.raises(CheckpointError, match="layer: the zero of its inputs is no int8 code"):
            Int8Method(weight, request_for(weight))


# --- choosing


@pytest.mark.parametrize(
    ("spec", "fact"),
    [
        (WeightSpec("int8", (1, -1)), "not quantised"),
        (WeightSpec("fp8_e4m3", (1, -1), activation=DYNAMIC), "symmetric int8 weights"),
        (WeightSpec("int8", (1, -1), has_zeros=True, activation=DYNAMIC), "symmetric int8 weights"),
        (WeightSpec("int8", (1, -1), act_order=True, activation=DYNAMIC), "symmetric int8 weights"),
        (WeightSpec("int8", (1, -1), activation=ActivationSpec("fp8_e4m3")), "fp8_e4m3 per_token"),
        (WeightSpec("int8", (1, 32), activation=DYNAMIC), "groups of 32 inputs"),
        (WeightSpec("int8", (128, 128), activation=DYNAMIC), "groups of 128 inputs"),
        (WeightSpec("int8", (1, -1), activation=ActivationSpec("int8", "per_tensor")), "dynamic per_tensor"),
        (
            WeightSpec("int8", (1, -1), activation=ActivationSpec("int8", "per_group", group_size=32)),
            "dynamic per_group",
        ),
        (WeightSpec("int8", (1, -1), activation=replace(DYNAMIC, dynamic=False)), "static per_token"),
    ],
)
def test_refusals_say_why(spec: WeightSpec, fact: str) -> None:
    reason = Int8Method.why_not(LinearRequest("layer", spec, 256, 64, False, torch.float32, CPU))
    assert reason is not None
    assert fact in reason


@pytest.mark.parametrize(("activation", "limit"), [(DYNAMIC, 131_071), (STATIC, 131_071), (STATIC_ASYMMETRIC, 65_535)])
def test_more_inputs_than_int32_holds_are_refused(activation: ActivationSpec, limit: int) -> None:
    spec = WeightSpec("int8", (1, -1), activation=activation)
    most = LinearRequest("layer", spec, limit, 64, False, torch.float32, CPU)
    assert Int8Method.why_not(most) is None
    assert str(limit) in str(Int8Method.why_not(replace(most, in_features=limit + 1)))


def test_the_largest_sum_fits_int32() -> None:
    extreme = torch.full((1, methods.MAX_INPUTS), -128, dtype=torch.int8)
    for product in (int_mm, chunked):
        assert product(extreme, extreme).tolist() == [[methods.MAX_INPUTS * 128 * 128]]


def test_a_product_that_saturates_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """x86 without VNNI multiplies pairs of int8 into int16 that saturate: right for most numbers."""

    def saturating(left: Tensor, right: Tensor) -> Tensor:
        size = 2 - left.shape[1] % 2
        pairs = left.int().reshape(left.shape[0], -1, size)
        others = right.int().t().reshape(right.shape[1], *pairs.shape[1:])
        products = (pairs[:, None] * others[None]).sum(-1).clamp(-32768, 32767)
        return products.sum(-1, dtype=torch.int32)

    small, other = integers(4, 32, -64, 64), integers(8, 32, -64, 64, seed=1)
    assert torch.equal(saturating(small, other.t()), int_mm(small, other))
    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not is_exact(int_mm, "cpu")
    monkeypatch.delattr(torch, "_int_mm")
    assert not is_exact(int_mm, "cpu")
    product_for.cache_clear()
    try:
        assert product_for("cpu") is chunked
    finally:
        product_for.cache_clear()
    monkeypatch.undo()
    assert is_exact(chunked, "cpu")


def test_planned_bytes_are_what_a_layer_keeps() -> None:
    for activation in ALL:
        weight = make(activation)
        layer, request = prepare(weight), request_for(weight)
        static = 0 if activation.dynamic else 4 * (2 - activation.symmetric)
        kept = sum(t.numel() * t.element_size() for t in layer.buffers())
        assert kept == Int8Method.planned_bytes(request) + static


def test_the_plugin_brings_its_kernel() -> None:
    assert octavo_w8a8.octavo_linear_methods(CPU) == [Int8Method, Int8WeightMethod]


# --- float inputs


@pytest.mark.parametrize("group", [1, 16, -1])
def test_float_inputs_over_several_tiles(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make(DYNAMIC, group=group)
    weight = replace(weight, spec=replace(weight.spec, activation=None))
    request, x = request_for(weight), torch.randn(5, 96, generator=torch.Generator().manual_seed(3))
    assert Int8WeightMethod.why_not(request) is None
    assert weight.bias is not None
    right = x.double() @ weight.dequantize().double().t() + weight.bias.double()
    for tile in (96 * 64, 96 * 7, 5):  # all outputs at once, tiles of 7 and 1
        monkeypatch.setattr(methods, "_TILE", tile)
        layer = Int8WeightMethod(weight, request)
        assert torch.allclose(layer(x).double(), right, rtol=1e-5, atol=1e-6)
        assert sum(t.numel() * t.element_size() for t in layer.buffers()) == Int8WeightMethod.planned_bytes(request)


def test_float_inputs_are_left_to_others_where_the_numbers_differ() -> None:
    plain = LinearRequest("layer", WeightSpec("int8", (1, -1)), 96, 40, False, torch.float32, CPU)
    assert "cuda" in str(Int8WeightMethod.why_not(replace(plain, platform=replace(CPU, device="cuda"))))
    assert "int8 per_token" in str(Int8WeightMethod.why_not(replace(plain, spec=SPEC)))
    for spec in (
        WeightSpec("int8", (1, 32)),
        WeightSpec("int8", (1, -1), has_zeros=True),
        WeightSpec("int8", (1, -1), act_order=True),
        WeightSpec("uint8", (1, -1), has_zeros=True),
    ):
        assert str(spec) in str(Int8WeightMethod.why_not(replace(plain, spec=spec)))


# --- whole models


def answer(model: Path, kernel: str | None = None) -> CompletionOutput:
    llm = LLM(str(model), linear_kernels={} if kernel is None else {"*_proj": kernel})
    (request,) = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=12, logprobs=3))
    return request.outputs[0]


def near(model: Path, plain: Path) -> bool:
    """Whether a quantised model rates the two likeliest first tokens about as the float one does."""
    found, right = answer(model).logprobs, answer(plain).logprobs
    assert found is not None
    assert right is not None
    best = sorted(right[0], key=lambda token: -right[0][token].logprob)[:2]
    return all(token in found[0] and abs(found[0][token].logprob - right[0][token].logprob) < 0.6 for token in best)


def test_a_w8a8_int8_model_says_the_same_by_both_kernels(tmp_path: Path) -> None:
    config = W8A8Int8Config()
    model = tiny_model(tmp_path / "int8", quantize=(config, SPEC), settings=config.settings())
    assert answer(model).text == answer(model, "int8_torch").text == answer(model, "reference").text != ""
    assert near(model, tiny_model(tmp_path / "float"))


@pytest.mark.parametrize(
    ("raw", "group", "activation"),
    [
        ({"activation_scheme": "dynamic"}, (-1, -1), ActivationSpec("fp8_e4m3")),
        ({"activation_scheme": "dynamic"}, (1, -1), ActivationSpec("fp8_e4m3")),
        ({"activation_scheme": "static"}, (-1, -1), ActivationSpec("fp8_e4m3", "per_tensor", dynamic=False)),
        (
            {"activation_scheme": "dynamic", "weight_block_size": (32, 16)},
            (32, 16),
            ActivationSpec("fp8_e4m3", "per_group", group_size=16),
        ),
        ({"activation_scheme": "dynamic"}, (128, 128), ActivationSpec("fp8_e4m3", "per_group", group_size=128)),
    ],
)
def test_fp8_models_run_on_the_reference(
    raw: dict[str, object], group: tuple[int, int], activation: ActivationSpec, tmp_path: Path
) -> None:
    config = FP8Config.model_validate(raw)
    spec = WeightSpec("fp8_e4m3", group, activation=activation)
    model = tiny_model(tmp_path / "fp8", quantize=(config, spec), settings=config.settings())
    assert near(model, tiny_model(tmp_path / "float"))
