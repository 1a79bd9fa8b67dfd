"""Linear layers on int8 inputs, against their definition in float64, on each instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo import ActivationSpec, quantize_inputs
from octavo_cpu import _native

CODES = {2: 0, 4: 1, 8: 2}
PER_SEGMENT, PER_TOKEN, STATIC = 0, 1, 2
CANARY = 12345.0
SCALES = {"bf16": (5, torch.bfloat16), "f16": (6, torch.float16), "f32": (7, torch.float32)}


@pytest.fixture(params=_native.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before, threads = _native.isa(), _native.threads()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)
    _native.set_threads(threads)


@dataclass
class Layer:
    """A packed weight of random codes, with the memory that it points at."""

    bits: int
    in_features: int
    out_features: int
    group: int
    zeros: bool = False  # one for each group
    as_offsets: bool = False  # zeros are given as scale * zero
    scale_code: str = "f32"
    zero: int = 0  # one for all
    bias: bool = False
    shuffled: bool = False  # act-order: which group an input belongs to is random
    seed: int = 0
    memory: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        in_features, out_features = self.in_features, self.out_features
        groups = -(-in_features // self.group)
        self.codes = rng.integers(0, 2**self.bits, (out_features, in_features), dtype=np.uint8)
        stored = torch.from_numpy(rng.uniform(0.5, 1.5, (out_features, groups))).to(SCALES[self.scale_code][1])
        self.scales = stored.float().numpy()
        zeros = (
            rng.integers(0, 2**self.bits, (out_features, groups))
            if self.zeros
            else np.full_like(self.scales, self.zero)
        )
        self.offsets = (self.scales * zeros).astype(np.float32)
        self.biases = rng.standard_normal(out_features).astype(np.float32)
        of_input = np.arange(in_features) // self.group
        if self.shuffled:
            of_input = rng.permutation(of_input)
        self.members = [np.flatnonzero(of_input == g) for g in range(groups)]

        unit = 32 // self.bits
        source, starts = [], [0]
        for inputs in self.members:
            source += [*inputs, *[-1] * (-len(inputs) % unit)]
            starts.append(len(source))
        blocks = -(-out_features // 16)
        bias = np.zeros(blocks * 16, np.float32)
        bias[:out_features] = self.biases
        scales = by_block(stored)
        zero_bytes, offsets = (
            by_block(torch.from_numpy(zeros.astype(np.uint8))),
            by_block(torch.from_numpy(self.offsets)),
        )
        kept = [np.array(starts, np.int32), np.array(source, np.int32), scales, zero_bytes, offsets, bias]
        packed = aligned(_native.packed_bytes(CODES[self.bits], len(source), out_features))
        plain = len(source) == in_features and not self.shuffled
        at_source = 0 if plain else kept[1].ctypes.data
        _native.pack(
            CODES[self.bits],
            self.codes.ctypes.data,
            in_features,
            out_features,
            len(source),
            at_source,
            packed.ctypes.data,
        )
        self.memory, self.packed, self.packed_scales = kept, packed, scales
        self.native = _native.Weight(
            CODES[self.bits], in_features, out_features, len(source), groups, kept[0].ctypes.data, at_source,
            packed.ctypes.data, SCALES[self.scale_code][0], scales.data_ptr(),
            zero_bytes.data_ptr() if self.zeros and not self.as_offsets else 0, offsets.data_ptr() if self.as_offsets else 0,
            bias.ctypes.data if self.bias else 0, not self.zeros, self.zero,
        )  # fmt: skip

    def expected(self, x: Tensor, how: How) -> Tensor:
        codes = torch.from_numpy(self.codes.astype(np.float64))
        total = torch.zeros(len(x), self.out_features, dtype=torch.float64)
        if how.kind != PER_SEGMENT:
            inputs = how.quantize(x)
        for g, members in enumerate(self.members):
            part = how.quantize(x[:, members]) if how.kind == PER_SEGMENT else inputs[:, members]
            weight = codes[:, members] * torch.from_numpy(self.scales[:, g, None].astype(np.float64))
            total += part @ (weight - torch.from_numpy(self.offsets[:, g, None].astype(np.float64))).T
        return total + torch.from_numpy(self.biases) if self.bias else total


@dataclass(frozen=True)
class How:
    kind: int
    symmetric: bool = True
    scale: float = 1.0
    zero: float = 0.0

    @property
    def native(self) -> object:
        return _native.Inputs(self.kind, self.symmetric, self.scale, self.zero)

    def quantize(self, x: Tensor) -> Tensor:
        """What the codes of x stand for, in float64."""
        static = self.kind == STATIC
        spec = ActivationSpec("int8", "per_tensor" if static else "per_token", not static, self.symmetric)
        scale, zero = torch.tensor(self.scale), torch.tensor(self.zero)
        codes, scales, zeros = quantize_inputs(x, spec, scale, zero)
        return (codes.double() - (0 if zeros is None else zeros.double())) * scales.double()


def by_block(by_row: Tensor) -> Tensor:
    """(out, groups) -> (blocks of 16 outputs, groups, 16), zeros behind."""
    padded = torch.nn.functional.pad(by_row, (0, 0, 0, -len(by_row) % 16))
    return padded.view(-1, 16, by_row.shape[1]).transpose(1, 2).contiguous()


def aligned(size: int) -> NDArray[np.uint8]:
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def run(layer: Layer, how: How, x: Tensor, threads: int = 1) -> Tensor:
    """Between rows of NaN and canaries, which must stay."""
    rows, width, room = len(x), layer.in_features + 5, layer.out_features + 3
    wide = torch.full((rows + 2, width), torch.nan)
    wide[1:-1, : layer.in_features] = x
    out = torch.full((rows + 2, room), CANARY)
    _native.set_threads(threads)
    _native.linear(layer.native, how.native, wide[1:].data_ptr(), width, rows, out[1:].data_ptr(), room)
    assert (out[[0, -1]] == CANARY).all()
    assert (out[:, layer.out_features :] == CANARY).all()
    return out[1:-1, : layer.out_features].clone()


def inputs_of(rows: int, in_features: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, in_features, generator=generator)
    return x * torch.exp(torch.randn(rows, 1, generator=generator))


def close(found: Tensor, expected: Tensor, layer: Layer) -> None:
    size = expected.abs().max() + layer.scales.max() * 2**layer.bits
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=float(size) * 4e-6)


LAYERS = [
    Layer(4, 64, 32, 64, zero=8),
    Layer(4, 576, 192, 64, zeros=True, bias=True),
    Layer(4, 256, 70, 32, zero=8, shuffled=True),
    Layer(4, 100, 17, 30, zeros=True, shuffled=True, bias=True, scale_code="f16"),
    Layer(4, 17, 3, 128, zeros=True, as_offsets=True),
    Layer(4, 1, 1, 1, zero=7, bias=True),
    Layer(4, 172, 576, 128, zeros=True, as_offsets=True, scale_code="f16"),
    Layer(2, 128, 48, 16, zeros=True, scale_code="bf16"),
    Layer(2, 83, 33, 33, zero=2, shuffled=True),
    Layer(8, 576, 172, 576, zero=128, bias=True),
    Layer(8, 51, 20, 51, zero=128),
    Layer(8, 172, 35, 32, zeros=True),
    Layer(8, 96, 16, 32, shuffled=True, zero=128),
    Layer(8, 6000, 40, 6000, zero=128),
    Layer(4, 600, 40, 300, zeros=True),
    Layer(8, 510, 40, 255, zeros=True, scale_code="f16"),
]
HOWS = [
    How(PER_SEGMENT),
    How(PER_TOKEN),
    How(PER_TOKEN, symmetric=False),
    How(STATIC, scale=0.037),
    How(STATIC, symmetric=False, scale=0.021, zero=-31.0),
]


def name(value: object) -> str:
    if isinstance(value, Layer):
        marks = "z" * value.zeros + "o" * value.as_offsets + "b" * value.bias + "s" * value.shuffled
        return f"u{value.bits}-{value.in_features}x{value.out_features}-g{value.group}{marks}"
    if isinstance(value, How):
        return ("segment", "token", "static")[value.kind] + ("" if value.symmetric else "-asym")
    return str(value)


@pytest.mark.parametrize("how", HOWS, ids=name)
@pytest.mark.parametrize("layer", LAYERS, ids=name)
def test_is_the_product_of_quantised_inputs(layer: Layer, how: How) -> None:
    for rows in (1, 2, 3, 5, 12, 13, 31):
        x = inputs_of(rows, layer.in_features)
        close(run(layer, how, x), layer.expected(x, how), layer)


@pytest.mark.parametrize("how", [How(PER_SEGMENT), How(PER_TOKEN, symmetric=False)], ids=name)
@pytest.mark.parametrize("layer", [LAYERS[1], LAYERS[3], LAYERS[8], LAYERS[9]], ids=name)
def test_bits_of_a_row_depend_on_that_row_alone(layer: Layer, how: How) -> None:
    x = inputs_of(70, layer.in_features)
    alone = torch.cat([run(layer, how, x[i : i + 1]) for i in range(70)])
    for rows in (*range(2, 28), 47, 70):
        for threads in (1, 2, 3):
            assert torch.equal(run(layer, how, x[:rows], threads), alone[:rows]), (rows, threads)
    assert torch.equal(run(layer, how, x.flip(0), 2), alone.flip(0))


@pytest.mark.parametrize("how", HOWS, ids=name)
def test_codes_of_inputs_are_octavos(how: How) -> None:
    """Seen through a weight that hands inputs on, at the edges of rounding and of the range of floats."""
    layer = Layer(8, 64, 64, 64, zero=1)
    layer.codes[:] = np.eye(64, dtype=np.uint8) + 1
    layer = identity(layer)
    rows = [torch.randn(64, generator=torch.Generator().manual_seed(i)) for i in range(40)]
    for scale in (0.037, 1.0, 2.0**-126, 3e-44, 1e36, 0.3):
        halves = (torch.arange(64) - 31.5) * 2 * scale
        rows += [
            halves,
            torch.cat([torch.tensor([127 * scale]), halves[1:]]),
            torch.nextafter(halves, torch.tensor(0.0)),
        ]
    rows += [torch.zeros(64), torch.full((64,), 1e-45), torch.full((64,), -3e38), torch.arange(64) * 1e-45]
    rows += [torch.full((64,), 2.5), torch.arange(64.0) - 64, torch.arange(64.0)]
    x = torch.stack(rows)
    expected = how.quantize(x).to(torch.float32)
    found = run(layer, how, x)
    torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)


def identity(layer: Layer) -> Layer:
    """The same with scale 1 and the codes that it now has."""
    size = layer.in_features
    _native.pack(CODES[8], layer.codes.ctypes.data, size, layer.out_features, size, 0, layer.packed.ctypes.data)
    layer.packed_scales[:] = 1
    return layer


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("how", HOWS, ids=name)
@pytest.mark.parametrize("layer", [LAYERS[1], LAYERS[3], LAYERS[9]], ids=name)
def test_what_is_not_finite_stays_in_its_row(layer: Layer, how: How, bad: float) -> None:
    x = inputs_of(15, layer.in_features)
    clean = run(layer, how, x)
    x[4, layer.in_features // 2] = bad
    found = run(layer, how, x)
    others = [i for i in range(15) if i != 4]
    assert torch.equal(found[others], clean[others])
    expected = layer.expected(x, how)[4]
    if expected.isfinite().all():  # static scales saturate
        close(found[4], expected, layer)
    else:
        assert found[4].isnan().all()


def test_extreme_codes_are_summed_exactly() -> None:
    """The largest codes and inputs side by side: sums of 16 bits would saturate."""
    for bits, zero in ((8, 128), (8, 0), (4, 8), (4, 0), (2, 0)):
        for value in (-128.0, 127.0):
            layer = Layer(bits, 4096, 16, 4096, zero=zero)
            layer.codes[:] = 2**bits - 1
            layer.codes[:, 1::3] = 0
            _native.pack(CODES[bits], layer.codes.ctypes.data, 4096, 16, 4096, 0, layer.packed.ctypes.data)
            for rows in (1, 30):
                x = torch.full((rows, 4096), value)
                how = How(STATIC)
                close(run(layer, how, x), layer.expected(x, how), layer)


def test_what_cannot_be_summed_is_refused() -> None:
    layer = Layer(8, 40000, 16, 40000, zero=128)
    with pytest.raises(ValueError, match="segment of 40000 inputs"):
        run(layer, How(PER_TOKEN), inputs_of(1, 40000))
    with pytest.raises(ValueError, match="not a whole number"):
        run(LAYERS[0], How(STATIC, symmetric=False, zero=0.5), inputs_of(1, 64))
