"""The elementwise kernels against torch's, on parts of wider rows, in odd sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo import FusedOps, Platform, QuantizedWeight, Registry, discover

pytest.importorskip("triton")

from octavo_paged_attn_cuda.ops import TritonOps
from octavo_paged_attn_cuda.support import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="kernels are not interpreted here")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = TritonOps()


@pytest.fixture(scope="module")
def torch_ops() -> FusedOps:
    """Core's own, by the door that every plugin comes through."""
    registry: Registry = discover(Platform.detect("cpu"))
    return next(ops for ops in registry.fused_ops if ops.name == "torch")()


def strided(*shape: int, dtype: torch.dtype) -> Tensor:
    """Random numbers with NaN between the rows."""
    memory = torch.full((shape[0], *shape[1:-1], shape[-1]), float("nan"), dtype=dtype)
    wide = torch.cat([torch.randn(shape).to(dtype).flatten(1), memory.flatten(1)[:, :7]], dim=1)
    return wide[:, : memory[0].numel()].unflatten(1, shape[1:])


def close(found: Tensor, wanted: Tensor, ulps: float) -> None:
    assert found.dtype == wanted.dtype
    error = ulps * torch.finfo(wanted.dtype).eps
    torch.testing.assert_close(found, wanted, rtol=error, atol=error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 17), (2, 576), (3, 5, 80), (1, 3, 64)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, torch_ops: FusedOps) -> None:
    torch.manual_seed(0)
    x, weight = strided(*shape, dtype=dtype), torch.randn(shape[-1]).to(dtype)
    close(OPS.rms_norm(x, weight, 1e-5), torch_ops.rms_norm(x, weight, 1e-5), 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(dtype: torch.dtype, torch_ops: FusedOps) -> None:
    torch.manual_seed(0)
    x, residual = (strided(3, 90, dtype=dtype) for _ in range(2))
    weight = torch.randn(90).to(dtype)
    found, wanted = (ops.add_rms_norm(x, residual, weight, 1e-5) for ops in (OPS, torch_ops))
    close(found[0], wanted[0], 4)
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "head_dim", "half"), [(3, 64, 32), (1, 80, 16), (40, 128, 64), (2, 24, 5)])
def test_rotate(heads: int, head_dim: int, half: int, dtype: torch.dtype, torch_ops: FusedOps) -> None:
    torch.manual_seed(0)
    x, angles = strided(2, heads, head_dim, dtype=dtype), torch.randn(2, half)
    cos, sin = angles.cos(), angles.sin()
    exact = torch_ops.rotate(x.float(), cos, sin).to(dtype)
    close(OPS.rotate(x, cos, sin), exact, 2)
    assert torch.equal(OPS.rotate(x, cos, sin)[..., 2 * half :], x[..., 2 * half :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("divides", [False, True])
def test_gated(activation: str, divides: bool, dtype: torch.dtype, torch_ops: FusedOps) -> None:
    torch.manual_seed(0)
    size = 1100 if divides else 33
    x = strided(2, 2 * size, dtype=dtype)
    divisor = torch.rand(size).to(dtype) + 0.5 if divides else None
    close(OPS.gated(x, activation, divisor), torch_ops.gated(x, activation, divisor), 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_tables(dtype: torch.dtype) -> None:
    table, indices = torch.randn(7, 33).to(dtype), torch.tensor([6, 0, 0, 3])
    assert torch.equal(OPS.gather(table, indices), table[indices])
    embedding = OPS.embedding(QuantizedWeight.from_float(table), torch.float32)
    assert torch.equal(embedding(indices), table[indices].float())
    bytes_ = torch.randn(7, 5).to(torch.float8_e5m2)
    assert torch.equal(OPS.gather(bytes_, indices).float(), bytes_.float()[indices])


def test_no_rows() -> None:
    empty = torch.empty(0, 4, 16)
    assert OPS.rms_norm(empty, torch.ones(16), 1e-5).shape == (0, 4, 16)
    assert OPS.rotate(empty, torch.empty(0, 8), torch.empty(0, 8)).shape == (0, 4, 16)
    assert OPS.gated(torch.empty(0, 32), "silu").shape == (0, 16)
    assert OPS.gather(torch.ones(2, 3), torch.empty(0, dtype=torch.int64)).shape == (0, 3)
