"""The elementwise kernels against float64: strided rows, odd sizes, hostile neighbours, the same bits on any threads."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

native = pytest.importorskip("octavo_cpu._native")

ROWS = [1, 2, 5, 37]
NAN = float("nan")
CODES = {"u2": 0, "u4": 1, "u8": 2, "e4m3": 3, "e5m2": 4, "bf16": 5, "f16": 6, "f32": 7}
STORED = {0: torch.float32, 1: torch.float16, 2: torch.bfloat16}


@pytest.fixture(autouse=True, params=native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs each test on one instruction set."""
    before, threads = native.isa(), native.threads()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)
    native.set_threads(threads)


def strided(values: Tensor, extra: int = 5) -> Tensor:
    """A view of the same numbers, with NaN before, between and after its rows."""
    rows, size = values.shape
    memory = torch.full((rows + 2, size + extra), NAN)
    memory[1:-1, 2 : 2 + size] = values
    return memory[1:-1, 2 : 2 + size]


class Output:
    """Room for (rows, size) numbers between canaries."""

    def __init__(self, rows: int, size: int) -> None:
        self.memory = torch.full((rows * size + 64,), 7.0)
        self.values = self.memory[32 : 32 + rows * size].view(rows, size)
        self.values.fill_(NAN)

    @property
    def address(self) -> int:
        return self.values.data_ptr()

    def checked(self) -> Tensor:
        assert (self.memory[:32] == 7).all()
        assert (self.memory[32 + self.values.numel() :] == 7).all()
        return self.values.clone()


def same_for_all_threads(run: object) -> Tensor:
    """What run() gives on 1 thread, after checking that 2 and 3 give the same bits."""
    assert callable(run)
    found = []
    for threads in (1, 2, 3):
        native.set_threads(threads)
        found.append(run())
    for other in found[1:]:
        assert torch.equal(found[0].view(torch.int32), other.view(torch.int32))
    result: Tensor = found[0]
    return result


def close(found: Tensor, wanted: Tensor, relative: float) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=relative, atol=1e-30)


@pytest.mark.parametrize("size", [1, 3, 16, 17, 64, 172, 576])
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm(rows: int, size: int) -> None:
    x, weight = strided(torch.randn(rows, size)), torch.randn(size)

    def run() -> Tensor:
        out = Output(rows, size)
        native.rms_norm(x.data_ptr(), x.stride(0), rows, 1, 0, size, weight.data_ptr(), 1e-5, out.address)
        return out.checked()

    found = same_for_all_threads(run)
    wide = x.double()
    close(found, wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double(), 1e-6)
    alone = Output(1, size)
    native.rms_norm(x[-1:].data_ptr(), size, 1, 1, 0, size, weight.data_ptr(), 1e-5, alone.address)
    assert torch.equal(alone.checked()[0], found[-1])


@pytest.mark.parametrize("size", [5, 64, 80])
def test_rms_norm_of_heads(size: int) -> None:
    heads, rows = 3, 4
    x, weight = strided(torch.randn(rows, heads * size)), torch.randn(size)

    def run() -> Tensor:
        out = Output(rows, heads * size)
        native.rms_norm(x.data_ptr(), x.stride(0), rows, heads, size, size, weight.data_ptr(), 1e-6, out.address)
        return out.checked()

    wide = x.double().view(rows, heads, size)
    wanted = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    close(same_for_all_threads(run), wanted.view(rows, -1), 1e-6)


@pytest.mark.parametrize("size", [1, 17, 576])
@pytest.mark.parametrize("rows", ROWS)
def test_add_rms_norm(rows: int, size: int) -> None:
    x, residual, weight = strided(torch.randn(rows, size)), strided(torch.randn(rows, size), 9), torch.randn(size)

    def run() -> Tensor:
        out, total = Output(rows, size), Output(rows, size)
        native.add_rms_norm(
            *(x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), rows, size),
            *(weight.data_ptr(), 1e-5, out.address, total.address),
        )
        assert torch.equal(total.checked(), x + residual)
        return out.checked()

    wide = (x + residual).double()
    wanted = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    close(same_for_all_threads(run), wanted, 1e-6)


def test_a_row_without_numbers_spoils_no_other() -> None:
    x, weight = torch.randn(5, 40), torch.ones(40)
    x[2, 7], x[3, 1] = NAN, math.inf
    out = Output(5, 40)
    native.rms_norm(x.data_ptr(), 40, 5, 1, 0, 40, weight.data_ptr(), 1e-5, out.address)
    found = out.checked()
    assert found[2].isnan().all()
    assert found[3, 1].isnan()
    assert found[[0, 1, 4]].isfinite().all()


@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (64, 16), (128, 64), (80, 40), (7, 3), (6, 1), (40, 10)])
@pytest.mark.parametrize("rows", ROWS)
def test_rotate(rows: int, head_dim: int, half: int) -> None:
    heads = 3
    x = strided(torch.randn(rows, heads * head_dim))
    cos, sin = strided(torch.randn(rows, half)), strided(torch.randn(rows, half))

    def run() -> Tensor:
        out = Output(rows, heads * head_dim)
        native.rotate(
            *(x.data_ptr(), x.stride(0), rows, heads, head_dim, half, cos.data_ptr(), sin.data_ptr()),
            *(cos.stride(0), out.address),
        )
        return out.checked()

    whole = x.reshape(rows, heads, head_dim)
    left, right, rest = whole[..., :half], whole[..., half : 2 * half], whole[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    wanted = torch.cat((left * c - right * s, right * c + left * s, rest), dim=-1).view(rows, -1)
    assert torch.equal(same_for_all_threads(run), wanted)  # each product and sum rounded, as in torch


def gate(x: Tensor, activation: int) -> Tensor:
    """In float64."""
    if activation == 0:
        return x / (1 + torch.exp(-x))
    if activation == 1:
        return x * 0.5 * torch.special.erfc(-x * math.sqrt(0.5))
    return x / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("activation", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 17, 172, 1536])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("divided", [False, True])
def test_gated(rows: int, size: int, activation: int, divided: bool) -> None:
    x = strided(torch.randn(rows, 2 * size) * 3)
    divisor = torch.rand(size) + 0.5

    def run() -> Tensor:
        out = Output(rows, size)
        native.gated(
            x.data_ptr(), x.stride(0), rows, size, activation, divisor.data_ptr() if divided else 0, out.address
        )
        return out.checked()

    left, up = x.double().chunk(2, dim=-1)
    wanted = gate(left, activation) * up / (divisor.double() if divided else 1)
    torch.testing.assert_close(same_for_all_threads(run).double(), wanted, rtol=4e-6, atol=1e-9)


@pytest.mark.parametrize("activation", [0, 1, 2])
def test_gated_at_the_edges(activation: int) -> None:
    values = torch.tensor([0.0, -0.0, 1e-30, 88.0, -88.0, 200.0, -200.0, 1e30, -1e30, math.inf, -math.inf, NAN, 5.0])
    x = torch.cat((values, torch.ones(13)))[None].contiguous()
    out = Output(1, 13)
    native.gated(x.data_ptr(), 26, 1, 13, activation, 0, out.address)
    found = out.checked()[0]
    assert found[[0, 1]].eq(0).all()
    assert found[[3, 5, 7, 9]].equal(values[[3, 5, 7, 9]])
    assert found[[4, 6, 8]].abs().max() < 1e-30
    assert found[[10, 11]].isnan().all()
    assert found[12] == pytest.approx(gate(torch.tensor(5.0, dtype=torch.float64), activation).item(), rel=1e-6)


@pytest.mark.parametrize("storage", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 17, 32, 576])
@pytest.mark.parametrize("rows", ROWS)
def test_gather(rows: int, size: int, storage: int) -> None:
    table = torch.full((50, size + 3), NAN, dtype=STORED[storage])
    table[:, :size] = torch.randn(50, size).to(STORED[storage])
    indices = torch.randint(50, (rows,))

    def run() -> Tensor:
        out = Output(rows, size)
        native.gather(table.data_ptr(), storage, size + 3, size, indices.data_ptr(), rows, out.address)
        return out.checked()

    assert torch.equal(same_for_all_threads(run), table[indices, :size].float())


def packed_case(
    code: str, in_features: int, out_features: int, zero: int | str | None
) -> tuple[object, Tensor, list[Tensor]]:
    """A packed weight with permuted inputs in two segments, what it stands for, and the memory that must stay alive."""
    bits = {"u2": 2, "u4": 4, "u8": 8, "e4m3": 8, "e5m2": 8, "bf16": 16, "f16": 16, "f32": 32}[code]
    kinds = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "f16": torch.float16}
    whole = bits <= 8 and code[0] == "u"
    unit = 32 // bits if whole else 1
    if whole:
        codes = torch.randint(1 << bits, (out_features, in_features), dtype=torch.uint8)
        numbers = codes.float()
    else:
        codes = torch.randn(out_features, in_features).to(kinds.get(code, torch.float32))
        numbers = codes.float()
    first = in_features // 2
    parts = [torch.randperm(in_features)[:first]]
    parts.append(torch.tensor(sorted(set(range(in_features)) - set(parts[0].tolist())), dtype=torch.int64))
    source, starts = [], [0]
    for part in parts:
        source += part.tolist() + [-1] * (-len(part) % unit)
        starts.append(len(source))
    padded_out = -(-out_features // 16) * 16
    scales, offsets = torch.zeros(2, padded_out), torch.zeros(2, padded_out)
    scales[:, :out_features] = torch.rand(2, out_features).half() + 0.5
    zeros = torch.randint(1 << bits if whole else 1, (2, padded_out))
    if zero == "bytes":
        offsets = scales * zeros
    elif zero is None:
        offsets[:, :out_features] = torch.randn(2, out_features)
    wanted = torch.empty(out_features, in_features, dtype=torch.float64)
    for i, part in enumerate(parts):
        scale, offset = scales[i, :out_features, None].double(), offsets[i, :out_features, None].double()
        wanted[:, part] = scale * (numbers[:, part].double() - (zero if isinstance(zero, int) else 0)) - offset
    kept = scales.half() if zero == "bytes" else scales, zeros.to(torch.uint8), offsets
    scales, zeros, offsets = (table.view(2, -1, 16).transpose(0, 1).contiguous() for table in kept)
    source_t, starts_t = torch.tensor(source, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32)
    size = native.packed_bytes(CODES[code], len(source), out_features)
    memory = torch.zeros(size + 64, dtype=torch.uint8)
    packed = memory[-memory.data_ptr() % 64 :][:size]
    native.pack(
        *(CODES[code], codes.data_ptr(), in_features, out_features, len(source)),
        *(source_t.data_ptr(), packed.data_ptr()),
    )
    weight = native.Weight(
        *(CODES[code], in_features, out_features, len(source), 2, starts_t.data_ptr(), source_t.data_ptr()),
        *(
            packed.data_ptr(),
            CODES["f16" if zero == "bytes" else "f32"],
            scales.data_ptr(),
            zeros.data_ptr() if zero == "bytes" else 0,
            offsets.data_ptr() if zero is None else 0,
            0,
            isinstance(zero, int),
            zero if isinstance(zero, int) else 0,
        ),
    )
    return weight, wanted, [codes, source_t, starts_t, memory, scales, zeros, offsets]


@pytest.mark.parametrize(
    ("code", "zero"),
    [(code, None) for code in CODES]
    + [("u2", 1), ("u4", 8), ("u8", 128)]
    + [("u2", "bytes"), ("u4", "bytes"), ("u8", "bytes")],
)
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 32), (172, 33), (17, 3)])
def test_gather_packed(code: str, in_features: int, out_features: int, zero: int | str | None) -> None:
    weight, wanted, alive = packed_case(code, in_features, out_features, zero)
    indices = torch.randint(out_features, (7,))
    indices[0] = out_features - 1

    def run() -> Tensor:
        out = Output(7, in_features)
        native.gather_packed(weight, indices.data_ptr(), 7, out.address)
        return out.checked()

    torch.testing.assert_close(same_for_all_threads(run).double(), wanted[indices], rtol=1e-6, atol=1e-4)
    assert alive


def argmax(x: Tensor) -> list[int]:
    """On 1, 2 and 3 threads."""
    found = []
    for threads in (1, 2, 3):
        native.set_threads(threads)
        out = torch.full((len(x) + 2,), -7)
        native.argmax(x.data_ptr(), x.stride(0), len(x), x.shape[1], out[1:].data_ptr())
        assert [out[0], out[-1]] == [-7, -7]
        found.append(out[1:-1].tolist())
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.mark.parametrize("size", [1, 3, 16, 17, 333, 49152])
@pytest.mark.parametrize("rows", ROWS)
def test_argmax(rows: int, size: int) -> None:
    x = strided(torch.randn(rows, size))
    assert argmax(x) == x.double().argmax(-1).tolist()


@pytest.mark.parametrize("size", [5, 16, 70])
def test_argmax_takes_the_first(size: int) -> None:
    x = torch.randint(-3, 3, (40, size)).float()
    wanted = [row.index(max(row)) for row in x.tolist()]
    assert argmax(x) == wanted
    assert argmax(torch.full((2, size), -math.inf)) == [0, 0]
    x[:, 0], x[:, 3] = -0.0, 0.0
    x[:, 1:3], x[:, 4:] = -1.0, -1.0
    assert argmax(x) == [0] * 40
    x[:, 4] = math.inf
    assert argmax(x) == [4] * 40
    x[:, 2:5] = NAN
    assert argmax(x) == [2] * 40
