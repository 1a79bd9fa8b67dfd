"""Products in the tiles that the plugin ships, at odd numbers of rows, and how codes are packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from octavo import ActivationSpec, CheckpointError, LinearMethod, LinearRequest, QuantizedWeight, WeightSpec
from octavo.testing import gpu, random_weight
from octavo_linear_cuda.packing import Codes, codes_of, layout_of, packed
from octavo_linear_cuda.tuning import Tile
from octavo_linear_cuda.w8a8 import W8A8
from octavo_linear_cuda.weight_only import WeightOnly

pytestmark = pytest.mark.usefixtures("interpreted")
H100 = gpu((9, 0))
INT4 = WeightSpec("uint4", (1, 32), has_zeros=True)
INT8 = WeightSpec("int8", activation=ActivationSpec("int8", symmetric=False))


def made(
    spec: WeightSpec, outputs: int, inputs: int, dtype: torch.dtype = torch.float32
) -> tuple[QuantizedWeight, LinearMethod]:
    weight = random_weight(spec, outputs, inputs, torch.Generator().manual_seed(3))
    weight = replace(weight, bias=torch.randn(outputs, generator=torch.Generator().manual_seed(4)))
    request = LinearRequest("a.layer", spec, inputs, outputs, True, dtype, H100)
    return weight, (WeightOnly if spec.activation is None else W8A8)(weight, request)


def rows_of(number: int, inputs: int) -> torch.Tensor:
    return torch.randn(number, inputs, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("rows", [1, 3, 17, 70])
def test_the_shipped_tiles_multiply_odd_numbers_of_rows(rows: int) -> None:
    weight, layer = made(INT4, 130, 160)
    x = rows_of(rows, 160)
    torch.testing.assert_close(layer(x), x @ weight.dequantize().t() + weight.bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("spec", "inputs"), [(INT4, 1100), (INT8, 1100), (replace(INT8, group_shape=(1, 32)), 160)])
def test_parts_of_the_inputs_add_up_in_one_order(spec: WeightSpec, inputs: int) -> None:
    _, layer = made(spec, 40, inputs)
    x = rows_of(3, inputs)
    results = []
    for splits in (1, 2, 5, 5):
        results.append(torch.empty(3, 40))
        layer.multiply(x, results[-1], Tile(128, 8, splits, 4, 1))
    assert torch.equal(results[2], results[3])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-5)


def test_fp32_inputs_keep_their_precision() -> None:
    """One weight of 1 an output: the result is the input, to the last bit."""
    codes = torch.eye(128, dtype=torch.int8)
    weight = QuantizedWeight(WeightSpec("int8"), codes, torch.ones(128, 1))
    layer = WeightOnly(weight, LinearRequest("a.layer", weight.spec, 128, 128, False, torch.float32, H100))
    x = rows_of(2, 128) * torch.logspace(-20, 20, 128)
    assert torch.equal(layer(x), x)


def test_words_of_4_bits_hold_what_the_module_says() -> None:
    """Input k of output n lies in word (k % 32) // 2 of its block, its slab's nibble in the low half where k is even."""
    weight = random_weight(WeightSpec("uint4", (1, 128), has_zeros=True), 5, 256, torch.Generator().manual_seed(0))
    layout = layout_of(weight, Codes(4))
    words = packed(weight, Codes(4), layout)["codes"]
    assert words is not None
    assert (layout.slab, layout.blocks, words.shape) == (32, 2, (2, 128, 16))
    for n, k in ((0, 0), (0, 1), (3, 31), (4, 32), (2, 127), (1, 128), (4, 255)):
        word = int(words[k // 128, n, k % 32 // 2])
        assert word >> (16 * (k % 2) + 4 * (k % 128 // 32)) & 15 == int(weight.codes[n, k])


@pytest.mark.parametrize("code", ["uint2", "uint3", "uint4", "uint8", "int8", "fp8_e4m3"])
def test_packed_weights_are_as_small_as_their_bits(code: str) -> None:
    spec = WeightSpec(code, (1, 256), has_zeros=code.startswith("u"))
    weight = random_weight(
        spec, 128, 4096, torch.Generator().manual_seed(0), zeros="integer", scale_dtype=torch.float16
    )
    layer = WeightOnly(weight, LinearRequest("a.layer", spec, 4096, 128, False, torch.float16, H100))
    held = sum(buffer.numel() * buffer.element_size() for buffer in layer.buffers())
    codes = codes_of(spec)
    assert codes is not None
    assert held == 128 * 4096 * codes.bits // 8 + 128 * 16 * 2 * (1 + spec.has_zeros)
    assert held == WeightOnly.planned_bytes(LinearRequest("a.layer", spec, 4096, 128, False, torch.float16, H100))


def test_weights_that_are_no_numbers_are_refused() -> None:
    codes = torch.full((8, 32), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = QuantizedWeight(WeightSpec("fp8_e4m3"), codes, torch.ones(8, 1))
    with pytest.raises(CheckpointError, match=r"a\.layer: weights are NaN"):
        WeightOnly(weight, LinearRequest("a.layer", weight.spec, 32, 8, False, torch.float16, H100))


def test_rows_of_nan_give_nan_and_no_others() -> None:
    _, layer = made(INT8, 40, 96)
    x = rows_of(3, 96)
    x[1, 7] = torch.nan
    assert layer(x).isnan().any(dim=1).tolist() == [False, True, False]
    assert bool(layer(x)[1].isnan().all())


@pytest.mark.parametrize(
    ("method", "change", "said"),
    [
        (WeightOnly, {"platform": gpu((7, 5))}, "needs compute capability 8.0 or newer, this GPU has 7.5"),
        (WeightOnly, {"spec": INT8}, "leaves inputs unquantised"),
        (WeightOnly, {"dtype": torch.float64}, "not in float64"),
        (
            W8A8,
            {"platform": gpu((8, 0)), "spec": WeightSpec("fp8_e4m3", activation=ActivationSpec("fp8_e4m3"))},
            "8.9 or newer",
        ),
        (W8A8, {"spec": INT8, "in_features": 65_536}, "sums in int32, which holds 65535 inputs"),
        (W8A8, {"spec": replace(INT8, group_shape=(1, 48))}, "groups of multiples of 32"),
        (W8A8, {}, "inputs are quantised"),
    ],
)
def test_refusals_say_why(method: type[LinearMethod], change: dict[str, object], said: str) -> None:
    request = LinearRequest("a.layer", INT4, 128, 128, False, torch.bfloat16, H100)
    assert said in str(method.why_not(replace(request, **change)))  # type: ignore[arg-type]


def test_a_gpu_without_fp8_serves_fp8_weights_by_dequantising() -> None:
    request = LinearRequest("a.layer", WeightSpec("fp8_e4m3"), 128, 128, False, torch.bfloat16, gpu((8, 0)))
    assert WeightOnly.why_not(request) is None
