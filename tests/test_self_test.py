"""The check at start: a kernel that computes something else never serves anyone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import registry
from torch import Tensor

from octavo import LLM, LinearMethod, LinearRequest, NoKernelError, Platform, QuantizedWeight, round_to_nearest
from octavo import WeightSpec as Spec
from octavo.quant.linear import ReferenceMethod
from octavo.quant.self_test import self_test
from octavo.testing import tiny_model

pytestmark = pytest.mark.usefixtures("core_kernels")
CPU = Platform("cpu", "x86_64", frozenset(), 1)
INT4 = Spec("uint4", (1, 32), has_zeros=True)


class Tuned(ReferenceMethod):
    name = "tuned"
    rank = 30

    @classmethod
    def why_not(cls, request: LinearRequest) -> str | None:
        return "only uint4" if request.spec.code != "uint4" else super().why_not(request)


class WrongTail(Tuned):
    """Forgets what does not fill its tile of 16 outputs."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).clone()
        y[:, y.shape[1] // 16 * 16 :] = 0
        return y


class WrongZeros(Tuned):
    def __init__(self, weight: QuantizedWeight, request: LinearRequest) -> None:
        assert weight.zeros is not None
        super().__init__(replace(weight, zeros=weight.zeros + 1), request)


class NotANumber(Tuned):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.nan


class WrongType(Tuned):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).double()


class Slightly(Tuned):
    """One part in a thousand, as of a scale kept in a narrow type."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.001


class WrongSingleRow(Tuned):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.01 if len(x) == 1 else 1.0)


class WrongRest(Tuned):
    """Forgets the rows that do not fill its tile of 16."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).clone()
        if len(x) > 16:
            y[len(x) // 16 * 16 :] = 0
        return y


class WrongMiddle(Tuned):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).clone()
        y[:, y.shape[1] // 2] += 0.1
        return y


class NoNumberForZeros(Tuned):
    """Divides by the largest input."""

    def forward(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(1, keepdim=True)
        return super().forward(x / largest) * largest


class WrongBeyond128Inputs(Tuned):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.where(torch.arange(x.shape[1]) < 128, x, 0))


def prepared(kind: type[LinearMethod], out_features: int = 72) -> tuple[LinearMethod, QuantizedWeight, LinearRequest]:
    weight = round_to_nearest(torch.randn(out_features, 96, generator=torch.Generator().manual_seed(1)), INT4)
    request = LinearRequest("model.layers.7.mlp.up_proj", INT4, 96, out_features, False, torch.float32, CPU)
    return kind(weight, request), weight, request


@pytest.mark.parametrize("out_features", [1, 31, 72, 200])
def test_a_right_kernel_passes(out_features: int) -> None:
    self_test(*prepared(Tuned, out_features))


WRONG = [WrongTail, WrongZeros, NotANumber, WrongType, Slightly, WrongSingleRow, WrongRest, NoNumberForZeros]


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_kernel_is_named_with_layer_and_error(kind: type[LinearMethod]) -> None:
    with pytest.raises(NoKernelError) as caught:
        self_test(*prepared(kind))
    text = str(caught.value)
    assert all(part in text for part in ("'tuned'", "model.layers.7.mlp.up_proj", "uint4 g32", "--no-self-test"))


def test_the_middle_of_a_large_layer_is_compared_too() -> None:
    with pytest.raises(NoKernelError, match=r"output 250 of row 0"):
        self_test(*prepared(WrongMiddle, 500))


@pytest.mark.parametrize("shape", [(1, -1), (-1, -1), (1, 32), (128, 128), (48, 32)])
def test_groups_that_lie_across_the_compared_outputs(shape: tuple[int, int]) -> None:
    spec = Spec("int8", shape)
    weight = round_to_nearest(torch.randn(500, 96, generator=torch.Generator().manual_seed(1)), spec)
    request = LinearRequest("model.layers.7.mlp.up_proj", spec, 96, 500, False, torch.float32, CPU)
    self_test(ReferenceMethod(weight, request), weight, request)


def test_each_length_of_input_is_tested(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, intermediate_size=160)
    broken = replace(registry(), linear_methods=(*registry().linear_methods, WrongBeyond128Inputs))
    with pytest.raises(NoKernelError, match=r"failed its self-test on model\.layers\.0\.mlp\.down_proj"):
        LLM(str(folder), registry=broken, quantize_weights="int4", num_blocks_override=8)


def test_the_engine_refuses_to_start_unless_told(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    broken = replace(registry(), linear_methods=(*registry().linear_methods, WrongZeros))
    settings = {"quantize_weights": "int4", "num_blocks_override": 8}
    with pytest.raises(NoKernelError, match=r"failed its self-test on model\.layers\.0"):
        LLM(str(folder), registry=broken, **settings)
    with LLM(str(folder), registry=broken, self_test=False, **settings) as llm:
        assert "tuned" in {report.kernel for report in llm.engine.model_info.linears}


def test_each_kind_of_layer_is_tested_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = []
    monkeypatch.setattr("octavo.model.loader.self_test", lambda method, weight, request: tested.append(request.layer))
    installed = replace(registry(), linear_methods=(*registry().linear_methods, Tuned))
    schemes = "int4,*.down_proj=float,lm_head=int4"
    with LLM(str(tiny_model(tmp_path)), registry=installed, quantize_weights=schemes, num_blocks_override=8) as llm:
        kinds = {(report.kernel, report.spec) for report in llm.engine.model_info.linears if report.kernel == "tuned"}
    assert len(tested) == len(kinds)
