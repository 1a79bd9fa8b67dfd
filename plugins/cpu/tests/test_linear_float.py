"""Linear layers on float inputs, on every instruction set: against fp64, under hostile memory, bit for bit in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from octavo_cpu import _native

INTEGERS = {"u2": 2, "u4": 4, "u8": 8}
FLOATS = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
}
CODES = [
    "u2",
    "u4",
    "u8",
    "e4m3",
    "e5m2",
    "bf16",
    "f16",
    "f32",
]  # in the order of kernels.h


SCALES = {"bf16": (5, torch.bfloat16), "f16": (6, torch.float16), "f32": (7, torch.float32)}


@pytest.fixture(autouse=True, params=_native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before, threads = _native.isa(), _native.threads()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)
    _native.set_threads(threads)


def by_block(tables: torch.Tensor) -> torch.Tensor:
    """(groups, padded out) -> (blocks of 16 outputs, groups, 16)."""
    return tables.view(len(tables), -1, 16).transpose(0, 1).contiguous()


class Layer:
    """A random weight of one kind, packed; and the same in fp64."""

    def __init__(
        self,
        code: str,
        in_features: int,
        out_features: int,
        group: int = 0,
        zeros: str = "offsets",  # or "bytes", "one"
        bias: bool = False,
        permuted: bool = False,
        scaled: bool = True,
        scale: str = "f32",
    ) -> None:
        rng = np.random.default_rng(in_features * 1000 + out_features)
        bits = INTEGERS.get(code, 0)
        unit = 32 // bits if bits else 1
        group = group or in_features
        order = rng.permutation(in_features) if permuted else np.arange(in_features)
        source: list[int] = []
        starts = [0]
        groups = [order[i : i + group] for i in range(0, in_features, group)]
        for members in groups:
            source += [*members, *[-1] * (-len(members) % unit)]
            starts.append(len(source))
        trivial = source[:in_features] == list(range(in_features)) and all(i < 0 for i in source[in_features:])
        padded_out = -(-out_features // 16) * 16
        count = len(groups)
        shape = (count, padded_out)
        scale_code, dtype = SCALES[scale]
        self.scales = torch.from_numpy(rng.uniform(0.5, 1.5, shape)).to(dtype).float().numpy()
        self.offsets = np.zeros(shape, np.float32)
        zero, whole = 0, np.zeros(shape)
        if bits:
            codes = torch.from_numpy(rng.integers(0, 2**bits, (out_features, in_features), dtype=np.uint8))
            values = codes.double()
            if zeros == "offsets":
                self.offsets = (self.scales * rng.uniform(0, 2**bits, shape)).astype(np.float32)
            elif zeros == "bytes":
                whole = rng.integers(0, 2**bits, shape)
                self.offsets = (self.scales * whole).astype(np.float32)
            elif zeros == "one":
                zero = 2 ** (bits - 1)
        else:
            codes = torch.from_numpy(rng.standard_normal((out_features, in_features)).astype(np.float32))
            codes = codes.to(FLOATS[code])
            values = codes.double()
            if not scaled:
                self.scales[:] = 1
        self.values = values
        self.scales[:, out_features:] = 0
        self.offsets[:, out_features:] = 0
        self.bias = rng.standard_normal(padded_out).astype(np.float32) if bias else None
        group_of = np.empty(in_features, np.int64)
        for g, members in enumerate(groups):
            group_of[members] = g
        dense = (values.numpy() - zero) * self.scales.T.astype(np.float64)[:out_features][:, group_of]
        self.dense = dense - self.offsets.T.astype(np.float64)[:out_features][:, group_of]
        # What rounding is relative to: terms before anything cancels.
        self.sizes = np.abs((values.numpy() - zero) * self.scales.T[:out_features][:, group_of])
        self.sizes += np.abs(self.offsets.T[:out_features][:, group_of])
        self.in_features, self.out_features = in_features, out_features
        self.source = None if trivial else np.array(source, np.int32)
        self.starts = np.array(starts, np.int32)
        index = CODES.index(code)
        raw = torch.full(
            (_native.packed_bytes(index, len(source), out_features) + 128,),
            255,
            dtype=torch.uint8,
        )
        self.codes = raw[-raw.data_ptr() % 64 :]
        address = 0 if self.source is None else self.source.ctypes.data
        kept = codes.contiguous()
        _native.pack(
            index,
            kept.data_ptr(),
            in_features,
            out_features,
            len(source),
            address,
            self.codes.data_ptr(),
        )
        has_scales = bool(bits) or scaled
        tables = (self.scales, dtype), (whole, torch.uint8), (self.offsets, torch.float32)
        self.stored = [by_block(torch.from_numpy(table).to(kind)) for table, kind in tables]
        self.native = _native.Weight(
            index, in_features, out_features, len(source), count, self.starts.ctypes.data, address,
            self.codes.data_ptr(), scale_code, self.stored[0].data_ptr() if has_scales else 0,
            self.stored[1].data_ptr() if zeros == "bytes" and bits else 0,
            self.stored[2].data_ptr() if zeros == "offsets" and bits else 0,
            0 if self.bias is None else self.bias.ctypes.data, bool(zero), zero,
        )  # fmt: skip

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The result for rows of x, from memory with NaN all around, into memory that must stay untouched all around."""
        rows = len(x)
        hostile = torch.full((rows + 2, self.in_features + 5), float("nan"))
        hostile[1:-1, 2:-3] = x
        out = torch.full((rows + 2, self.out_features + 7), 12345.0)
        _native.linear(
            self.native,
            None,
            hostile[1:, 2:].data_ptr(),
            hostile.stride(0),
            rows,
            out[1:, 3:].data_ptr(),
            out.stride(0),
        )
        result = out[1:-1, 3:-4].clone()
        out[1:-1, 3:-4] = 12345.0
        assert bool((out == 12345.0).all()), "written beyond the output"
        return result

    def check(self, x: torch.Tensor) -> None:
        found = self.run(x).double().numpy()
        exact = x.double().numpy() @ self.dense.T
        bound = np.abs(x.double().numpy()) @ self.sizes.T
        if self.bias is not None:
            exact += self.bias[: self.out_features]
            bound += np.abs(self.bias[: self.out_features])
        np.testing.assert_array_less(np.abs(found - exact), 2e-6 * bound + 1e-30)


def inputs(rows: int, features: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rows).standard_normal((rows, features)).astype(np.float32))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    ("in_features", "out_features"),
    [(1, 1), (3, 17), (17, 3), (172, 40), (576, 97), (1100, 33)],
)
def test_matches_fp64(code: str, in_features: int, out_features: int) -> None:
    layer = Layer(code, in_features, out_features, group=128, bias=True)
    for rows in (1, 2, 3, 5, 8, 12, 13, 16, 17, 70):
        layer.check(inputs(rows, in_features))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("group", [32, 40, 0])
def test_groups(code: str, group: int) -> None:
    layer = Layer(code, 700, 48, group=group)
    for rows in (1, 7, 30):
        layer.check(inputs(rows, 700))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("group", [32, 50])
def test_permuted_inputs(code: str, group: int) -> None:
    layer = Layer(code, 330, 48, group=group, permuted=True)
    for rows in (1, 2, 6, 40):
        layer.check(inputs(rows, 330))


@pytest.mark.parametrize("scale", ["f16", "bf16"])
@pytest.mark.parametrize("code", INTEGERS)
def test_zeros_are_bytes_and_scales_of_16_bits(code: str, scale: str) -> None:
    layer = Layer(code, 532, 70, group=64, zeros="bytes", scale=scale, bias=True, permuted=scale == "f16")
    x = inputs(40, 532)
    for rows in (1, 7, 16, 40):
        layer.check(x[:rows])
        assert torch.equal(layer.run(x[:rows]), layer.run(x)[:rows])


@pytest.mark.parametrize("code", list(INTEGERS))
@pytest.mark.parametrize("zeros", ["none", "one"])
def test_one_zero_is_exact(code: str, zeros: str) -> None:
    layer = Layer(code, 520, 48, group=64, zeros=zeros)
    for rows in (1, 2, 9, 20):
        layer.check(inputs(rows, 520))


@pytest.mark.parametrize("code", list(FLOATS))
def test_plain_weights_without_scales(code: str) -> None:
    layer = Layer(code, 1000, 48, scaled=False)
    for rows in (1, 2, 9, 20):
        layer.check(inputs(rows, 1000))


@pytest.mark.parametrize(("code", "bits"), [("e4m3", 8), ("e5m2", 8), ("bf16", 16), ("f16", 16)])
def test_every_float_code_is_its_value(code: str, bits: int) -> None:
    every = torch.arange(2**bits, dtype=torch.int32).to(torch.uint8 if bits == 8 else torch.uint16)
    layer = Layer(code, 2, 2**bits, scaled=False)
    codes = torch.stack([every, torch.zeros_like(every)], 1).contiguous()
    _native.pack(CODES.index(code), codes.data_ptr(), 2, 2**bits, 2, 0, layer.codes.data_ptr())
    expected = every.view(FLOATS[code]).float()
    for rows in (1, 4):
        found = layer.run(torch.tensor([[1.0, 0.0]]).repeat(rows, 1))
        for row in found:
            assert torch.equal(row.isnan(), expected.isnan())
            assert torch.equal(row.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("code", ["u2", "u4", "u8"])
def test_huge_zeros_with_tiny_scales(code: str) -> None:
    layer = Layer(code, 256, 32, group=64)
    layer.stored[0] *= 1e-12
    layer.stored[2][:] = 1.25  # scale * a zero of about 1e12
    x = inputs(9, 256)
    exact = -1.25 * x.double().sum(1, keepdim=True)
    for rows in (1, 2, 9):
        error = (layer.run(x[:rows]).double() - exact[:rows]).abs()
        assert float((error / x[:rows].abs().sum(1, keepdim=True)).max()) < 1e-6


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    ("in_features", "group", "permuted"),
    [(576, 128, False), (530, 64, False), (288, 32, True)],
)
def test_bits_of_a_row_depend_on_it_alone(code: str, in_features: int, group: int, permuted: bool) -> None:
    layer = Layer(code, in_features, 92, group=group, permuted=permuted, bias=True)
    x = inputs(70, in_features)
    _native.set_threads(1)
    alone = torch.cat([layer.run(x[i : i + 1]) for i in range(70)])
    for threads in (1, 2, 3):
        _native.set_threads(threads)
        for first, last in [
            (0, 1),
            (0, 2),
            (1, 4),
            (3, 7),
            (2, 7),
            (5, 17),
            (1, 14),
            (0, 16),
            (0, 24),
            (0, 70),
        ]:
            assert torch.equal(layer.run(x[first:last]), alone[first:last]), (
                threads,
                first,
                last,
            )


def test_rows_beyond_one_block() -> None:
    layer = Layer("u4", 40, 33, group=20)
    x = inputs(1100, 40)
    _native.set_threads(2)
    layer.check(x)
    assert torch.equal(layer.run(x)[1023:1040], layer.run(x[1023:1040]))


@pytest.mark.parametrize("code", CODES)
def test_rows_a_power_of_two_apart(code: str) -> None:
    layer = Layer(code, 1024, 33, group=128)
    x = inputs(20, 1024)
    out = torch.empty(20, 33)
    _native.linear(layer.native, None, x.data_ptr(), 1024, 20, out.data_ptr(), 33)
    assert torch.equal(out, layer.run(x))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_stays_in_its_row(code: str, poison: float) -> None:
    layer = Layer(code, 172, 40, group=128)
    for rows in (1, 2, 5, 13, 31):
        x = inputs(rows, 172)
        clean = layer.run(x)
        for row in {0, rows // 2, rows - 1}:
            spoilt = x.clone()
            spoilt[row, 171] = poison
            found = layer.run(spoilt)
            assert not bool(found[row].isfinite().any())
            keep = torch.arange(rows) != row
            assert torch.equal(found[keep], clean[keep])


def test_nan_codes_stay_in_their_output() -> None:
    for code, nan in [("e4m3", 0x7F), ("e4m3", 0xFF), ("e5m2", 0x7E)]:
        layer = Layer(code, 40, 33, group=20)
        layer.codes[16 * 5 + 3] = nan  # block 0, input 5, lane 3
        for rows in (1, 2, 9):
            found = layer.run(inputs(rows, 40))
            assert bool(found[:, 3].isnan().all())
            assert not bool(found[:, torch.arange(33) != 3].isnan().any())


def test_no_rows_and_no_inputs_of_others() -> None:
    layer = Layer("u4", 40, 33)
    assert layer.run(torch.empty(0, 40)).shape == (0, 33)
