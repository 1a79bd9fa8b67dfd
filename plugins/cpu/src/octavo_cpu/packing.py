"""From octavo's canonical weight to the layout of csrc/kernels.h: unsigned codes, groups cut into padded segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo import QuantizedWeight, WeightSpec, weight_segments
from octavo_cpu.native import lasting, native

LANES = 16
U2, U4, U8, E4M3, E5M2, BF16, F16, F32 = range(8)
BITS = (2, 4, 8, 8, 8, 16, 16, 32)
_FLOATS = {torch.bfloat16: BF16, torch.float16: F16, torch.float32: F32, torch.float64: F32}
_PLAIN = {BF16: torch.bfloat16, F16: torch.float16, F32: torch.float32}


def packed_code(spec: WeightSpec) -> int | None:
    """How the codes of a quantised weight are packed: in 2, 4 or 8 bits; None for codes that these kernels do not know."""
    if spec.code in ("fp8_e4m3", "fp8_e5m2"):
        return E4M3 if spec.code == "fp8_e4m3" else E5M2
    kind, bits = spec.code.rstrip("0123456789"), spec.code.lstrip("uint")
    if kind not in ("int", "uint") or not bits.isdigit() or not 1 <= int(bits) <= 8:
        return None
    return U2 if int(bits) <= 2 else U4 if int(bits) <= 4 else U8


@dataclass(slots=True)
class Packed:
    """A packed weight: `handle` for the native side, `tensors` by name, which must live as long."""

    handle: Any
    tensors: dict[str, Tensor]


def pack(weight: QuantizedWeight, most: int | None = None) -> Packed:
    """Packs a weight, its inputs in segments of at most `most` (None: whole groups)."""
    spec, size, out = weight.spec, weight.in_features, weight.out_features
    code = _FLOATS[weight.codes.dtype] if spec.is_float else packed_code(spec)
    assert code is not None
    codes, zero = weight.codes, None
    zeros = weight.zeros
    if code <= U8:
        codes, shift = _unsigned(codes, spec, code)
        zero = _constant_zero(zeros, shift)
        if zero is None and zeros is not None:
            zeros = zeros.float() + shift
    elif code in _PLAIN:
        codes = codes.to(_PLAIN[code])
    segments = weight_segments(weight, most or size) if size else []
    starts, source, padded_in = _layout(segments, 32 // BITS[code] if code <= U8 else 1, size)
    packed = lasting(native().packed_bytes(code, padded_in, out))
    tensors = {"codes": packed, "starts": starts}
    if source is not None:
        tensors["source"] = source
    codes = codes.contiguous()
    native().pack(code, codes.data_ptr(), size, out, padded_in, _address(source), packed.data_ptr())
    scale_code = F32
    if weight.scales is not None:
        groups = _groups(weight, segments)
        scale_code, scales = _smallest(weight.scales)
        tensors["scales"] = _by_block(_by_row(weight, scales)[:, groups])
        if zero is None and zeros is not None:
            zeros = _by_row(weight, zeros.float())[:, groups]
            whole = zeros.clamp(0, 255).to(torch.uint8)
            if code <= U8 and torch.equal(whole.float(), zeros):
                tensors["zeros"] = _by_block(whole)
            else:
                tensors["offsets"] = _by_block(_by_row(weight, scales.float())[:, groups] * zeros)
    if weight.bias is not None:
        tensors["bias"] = _by_block(weight.bias.float()[:, None])
    handle = native().Weight(
        code,
        size,
        out,
        padded_in,
        len(segments),
        *(_address(tensors.get(name)) for name in ("starts", "source", "codes")),
        scale_code,
        *(_address(tensors.get(name)) for name in ("scales", "zeros", "offsets", "bias")),
        bool(zero),
        zero or 0,
    )
    return Packed(handle, tensors)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _unsigned(codes: Tensor, spec: WeightSpec, code: int) -> tuple[Tensor, int]:
    """Codes as uint8, and what was added to them."""
    if codes.dtype == torch.uint8:
        return codes, 0
    shift = 128 if code == U8 else 1 << (int(spec.code.lstrip("uint")) - 1)
    return (codes.view(torch.uint8) ^ 128 if code == U8 else (codes + shift).to(torch.uint8)), shift


def _constant_zero(zeros: Tensor | None, shift: int) -> int | None:
    """The one zero of all (shifted) codes, if it is a whole number that fits a byte."""
    if zeros is None:
        return shift
    first = float(zeros.flatten()[0]) + shift
    same = first == int(first) and 0 <= first < 256 and bool((zeros == zeros.flatten()[0]).all())
    return int(first) if same else None


def _layout(segments: list[Tensor], unit: int, size: int) -> tuple[Tensor, Tensor | None, int]:
    """Where each segment starts once padded to whole units, which input lies where (None: in its place), and the length."""
    parts, starts = [], [0]
    for segment in segments:
        rest = -len(segment) % unit
        parts.append(torch.cat([segment, segment.new_full((rest,), -1)]) if rest else segment)
        starts.append(starts[-1] + len(parts[-1]))
    source = torch.cat(parts).to(torch.int32) if parts else torch.zeros(0, dtype=torch.int32)
    plain = torch.equal(source[:size], torch.arange(size, dtype=torch.int32)) and bool((source[size:] < 0).all())
    return torch.tensor(starts, dtype=torch.int32), None if plain else source, starts[-1]


def _groups(weight: QuantizedWeight, segments: list[Tensor]) -> Tensor:
    """The group of each segment."""
    firsts = torch.stack([segment[0] for segment in segments]) if segments else torch.zeros(0, dtype=torch.long)
    if weight.group_index is not None:
        return weight.group_index.long()[firsts]
    group = weight.spec.group_shape[1]
    return torch.zeros_like(firsts) if group == -1 else firsts // group


def _by_row(weight: QuantizedWeight, groups: Tensor) -> Tensor:
    """(G_out, G_in) -> (out_features, G_in)."""
    out_group = weight.spec.group_shape[0]
    if groups.shape[0] == 1:
        return groups.expand(weight.out_features, -1)
    return groups.repeat_interleave(out_group, dim=0)[: weight.out_features] if out_group > 1 else groups


def _smallest(scales: Tensor) -> tuple[int, Tensor]:
    """Scales in the least room that holds them exactly."""
    wide = scales.float()
    for dtype in (torch.float16, torch.bfloat16):
        narrow = wide.to(dtype)
        if torch.equal(narrow.float(), wide):
            return _FLOATS[dtype], narrow
    return F32, wide


def _by_block(by_row: Tensor) -> Tensor:
    """(out_features, n) -> (blocks of LANES outputs, n, LANES), zeros behind."""
    rest = -by_row.shape[0] % LANES
    padded = torch.nn.functional.pad(by_row, (0, 0, 0, rest))
    return padded.view(-1, LANES, by_row.shape[1]).transpose(1, 2).contiguous()
