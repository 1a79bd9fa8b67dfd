"""The canonical form of a linear layer's weight: the one value between checkpoint formats and kernels.

A format turns its tensors into a `QuantizedWeight`; a kernel turns a `QuantizedWeight` into its own layout. Slicing for
tensor parallelism, fusing q|k|v, conversion between formats and the reference result are written once, here. Nothing in
this file knows how bits lie in a file or in a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Code:
    """A number format of single elements: storage type and the closed range of values."""

    dtype: torch.dtype
    low: float
    high: float


CODES: dict[str, Code] = {
    **{f"uint{bits}": Code(torch.uint8, 0, 2**bits - 1) for bits in range(1, 9)},
    **{f"int{bits}": Code(torch.int8, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in range(2, 9)},
    "fp8_e4m3": Code(torch.float8_e4m3fn, -448.0, 448.0),
    "fp8_e5m2": Code(torch.float8_e5m2, -57344.0, 57344.0),
}
"""The codes that core knows. "float" (a plain weight) is not in the table: any floating type stores it."""


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """How the input of a linear layer is quantised before the product.

    `granularity` is "per_token", "per_tensor" or "per_group" (of `group_size` inputs); `dynamic` scales are computed from the
    input itself, static ones are stored with the weight. Kernels that quantise inputs on their own may do so
    "per_weight_group": for each token and group of the weight, inputs in the order of groups, groups cut at `group_size`.
    """

    code: str
    granularity: str = "per_token"
    dynamic: bool = True
    symmetric: bool = True
    group_size: int = -1

    def __str__(self) -> str:
        cut = f"g{self.group_size}"
        group = {"per_group": cut, "per_weight_group": f"by group <= {self.group_size}"}.get(
            self.granularity, self.granularity
        )
        return f"{self.code} {group}{'' if self.dynamic else ' static'}{'' if self.symmetric else ' asym'}"


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """What the numbers of a weight mean: hashable, printable, the value that kernels match on.

    `group_shape` is (out, in) elements that share one scale; -1 means all. (1, 128) is group-wise, (1, -1) per output
    channel, (-1, -1) per tensor, (128, 128) block-wise. `activation` is None for floating input (W4A16).
    """

    code: str
    group_shape: tuple[int, int] = (1, -1)
    has_zeros: bool = False
    act_order: bool = False
    activation: ActivationSpec | None = None

    @property
    def is_float(self) -> bool:
        """True for a plain, unquantised weight."""
        return self.code == "float"

    def num_groups(self, out_features: int, in_features: int) -> tuple[int, int]:
        """(G_out, G_in): how many groups of weights share a scale, along each dimension."""
        return _num_groups(out_features, self.group_shape[0]), _num_groups(in_features, self.group_shape[1])

    def __str__(self) -> str:
        if self.is_float:
            return f"float x {self.activation}" if self.activation else "float"
        out, inner = self.group_shape
        if (out, inner) == (-1, -1):
            group = "tensor"
        elif out == 1:
            group = "channel" if inner == -1 else f"g{inner}"
        else:
            group = f"{out}x{inner}"
        flags = f"{' asym' if self.has_zeros else ''}{' act_order' if self.act_order else ''}"
        return f"{self.code} {group}{flags}{f' x {self.activation}' if self.activation else ''}"


FLOAT = WeightSpec("float", (-1, -1))


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer of the model, by the name its tensors have in the checkpoint: y (out) = W (out, in) x (in)."""

    name: str
    in_features: int
    out_features: int


def _num_groups(size: int, group: int) -> int:
    return 1 if group == -1 else -(-size // group)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """One layer's weight as plain arrays: weight[n, k] = scales[n, g(k)] * (codes[n, k] - zeros[n, g(k)]).

    Shapes, with (G_out, G_in) the number of groups along each dimension (a last group may be short):
    `codes` (out_features, in_features), one element per code, never packed; `scales` (G_out, G_in), float, None only for
    float weights; `zeros` as `scales`, real-valued, None when symmetric around code 0; `group_index` (in_features,) the
    group of each input (`g_idx`), None when it is k // group; `input_scale`, `input_zero` () or (1,), static activation
    parameters; `bias` (out_features,). Unsigned symmetric formats carry their midpoint as constant zeros.
    """

    spec: WeightSpec
    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    group_index: Tensor | None = None
    input_scale: Tensor | None = None
    input_zero: Tensor | None = None
    bias: Tensor | None = None

    @classmethod
    def from_float(cls, weight: Tensor, bias: Tensor | None = None) -> QuantizedWeight:
        """Wraps an unquantised weight (out_features, in_features)."""
        return cls(FLOAT, weight, bias=bias)

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    @property
    def is_symmetric(self) -> bool:
        """Whether the range of each group is centred on 0: no zeros, or the code's midpoint in every group that counts."""
        code = CODES.get(self.spec.code)
        if self.zeros is None or self.scales is None or code is None:
            return self.zeros is None
        middle = (code.low + code.high + 1) // 2
        return bool(((self.zeros == middle) | (self.scales == 0)).all())

    def check(self, layer: LinearLayer) -> None:
        """Raises CheckpointError when shapes, dtypes or values break the contract; every load passes through here."""

        def expect(what: str, expected: object, found: object) -> None:
            if expected != found:
                raise CheckpointError(f"{layer.name}: {what} does not fit the layer", expected=expected, found=found)

        expect("shape of the codes", (layer.out_features, layer.in_features), tuple(self.codes.shape))
        if self.bias is not None:
            expect("shape of the bias", (layer.out_features,), tuple(self.bias.shape))
        floats = {"bias": self.bias, "input_scale": self.input_scale, "input_zero": self.input_zero}
        if self.spec.is_float:
            expect("type of the weight", True, self.codes.dtype.is_floating_point)
            floats["weight"] = self.codes
        else:
            groups = self.spec.num_groups(*self.codes.shape)
            if self.group_index is not None and self.scales is not None:
                groups = (groups[0], self.scales.shape[1])
            expect("shape of the scales", groups, None if self.scales is None else tuple(self.scales.shape))
            expect("presence of zeros", self.spec.has_zeros, self.zeros is not None)
            if self.zeros is not None:
                expect("shape of the zeros", groups, tuple(self.zeros.shape))
            expect("presence of group_index", self.spec.act_order, self.group_index is not None)
            if self.group_index is not None:
                expect("shape of group_index", (layer.in_features,), tuple(self.group_index.shape))
                low, high = int(self.group_index.min()), int(self.group_index.max())
                expect(f"range of group_index ({low}..{high})", True, low >= 0 and high < groups[1])
            if (code := CODES.get(self.spec.code)) is not None:
                expect("type of the codes", code.dtype, self.codes.dtype)
                if code.dtype in (torch.uint8, torch.int8) and self.codes.numel():
                    low, high = int(self.codes.min()), int(self.codes.max())
                    expect(f"range of the codes ({low}..{high})", True, code.low <= low and high <= code.high)
            floats |= {"scales": self.scales, "zeros": self.zeros}
        for name, tensor in floats.items():
            if tensor is not None and not bool((finite := torch.isfinite(tensor.float())).all()):
                bad = int((~finite).sum())
                raise CheckpointError(
                    f"{layer.name}: {name} holds {bad} value(s) that are NaN or infinite",
                    expected="finite numbers",
                    hint="the file is damaged or was written by a failed quantisation; export the model again",
                )

    def to(self, device: str) -> QuantizedWeight:
        """The same weight with all its tensors on a device."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), Tensor):
                moved[field.name] = value.to(device)
        return replace(self, **moved)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (out_features, in_features) that the codes stand for, computed in fp32, then rounded to `dtype`."""
        if self.spec.is_float:
            return self.codes.to(dtype)
        assert self.scales is not None
        value = self.codes.to(torch.float32)
        if self.zeros is not None:
            value = value - self._expand(self.zeros)
        return (value * self._expand(self.scales)).to(dtype)

    def _expand(self, groups: Tensor) -> Tensor:
        """Repeats a (G_out, G_in) tensor to fp32 of (out_features or 1, in_features or 1)."""
        groups = groups.to(torch.float32)
        out_group, in_group = self.spec.group_shape
        if self.group_index is not None:
            groups = groups[:, self.group_index.long()]
        elif groups.shape[1] > 1:
            groups = groups.repeat_interleave(in_group, dim=1)[:, : self.in_features]
        if groups.shape[0] > 1 and out_group != 1:
            groups = groups.repeat_interleave(out_group, dim=0)[: self.out_features]
        return groups

    def without_trivial_order(self) -> QuantizedWeight:
        """The same weight without a `group_index` that only says k // group, as writers store it for every layer."""
        if self.group_index is None or self.scales is None:
            return self
        group = self.spec.group_shape[1]
        plain = torch.arange(self.in_features, device=self.codes.device)
        plain = torch.zeros_like(plain) if group == -1 else plain // group
        if not torch.equal(self.group_index.long(), plain):
            return self
        return replace(self, spec=replace(self.spec, act_order=False), group_index=None)

    def slice_out(self, start: int, stop: int) -> QuantizedWeight:
        """Outputs start..stop (column-parallel): exact for any bounds; blocks that are cut become per-row scales."""
        whole = self if start % max(self.spec.group_shape[0], 1) == 0 else self._with_row_scales()
        out_group = whole.spec.group_shape[0]
        rows = slice(None) if out_group == -1 else slice(start // out_group, _num_groups(stop, out_group))
        return replace(
            whole,
            codes=whole.codes[start:stop],
            scales=None if whole.scales is None else whole.scales[rows],
            zeros=None if whole.zeros is None else whole.zeros[rows],
            bias=None if whole.bias is None else whole.bias[start:stop],
        )

    def slice_in(self, start: int, stop: int) -> QuantizedWeight:
        """Inputs start..stop (row-parallel), without bias unless start is 0, so that the parts' outputs sum to the whole.

        Groups that straddle a bound are shared by both sides: the part then carries an explicit `group_index`.
        """
        part = replace(self, codes=self.codes[:, start:stop].contiguous(), bias=self.bias if start == 0 else None)
        if self.scales is None or (self.scales.shape[1] == 1 and self.group_index is None):
            return part
        if self.group_index is not None:
            return replace(part, group_index=self.group_index[start:stop].clone())
        group = self.spec.group_shape[1]
        first, last = start // group, _num_groups(stop, group)
        part = replace(
            part,
            scales=self.scales[:, first:last],
            zeros=None if self.zeros is None else self.zeros[:, first:last],
        )
        if start % group == 0:
            return part
        index = torch.arange(start, stop, device=self.codes.device, dtype=torch.int32) // group - first
        return replace(part, spec=replace(self.spec, act_order=True), group_index=index)

    def why_not_concat(self, other: QuantizedWeight) -> str | None:
        """Why `other` cannot be stacked below this weight without changing a number, or None if it can."""
        if self.in_features != other.in_features:
            return f"in_features differ: {self.in_features} and {other.in_features}"
        mine, theirs = replace(self.spec, group_shape=(1, 1)), replace(other.spec, group_shape=(1, 1))
        if mine != theirs or self.spec.group_shape[1] != other.spec.group_shape[1]:
            return f"specs differ: {self.spec} and {other.spec}"
        if self.spec.is_float and self.codes.dtype != other.codes.dtype:
            return f"types differ: {self.codes.dtype} and {other.codes.dtype}"
        for name in ("group_index", "input_scale", "input_zero"):
            left, right = getattr(self, name), getattr(other, name)
            if (left is None) != (right is None) or (left is not None and not torch.equal(left, right)):
                return f"{name} differs"
        return None

    def concat(self, others: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Stacks weights along the outputs (q|k|v, gate|up); raises ValueError where `why_not_concat` gives a reason."""
        parts = [self, *others]
        for other in others:
            if (reason := self.why_not_concat(other)) is not None:
                raise ValueError(f"cannot concatenate: {reason}")
        if not self.spec.is_float:
            out_group = self.spec.group_shape[0]
            aligned = out_group > 0 and all(p.out_features % out_group == 0 for p in parts[:-1])
            if not (aligned and all(p.spec == self.spec for p in parts)):
                parts = [p._with_row_scales() for p in parts]

        def stack(tensors: Sequence[Tensor | None]) -> Tensor | None:
            present = [t for t in tensors if t is not None]
            return torch.cat(present) if present else None

        biases: list[Tensor | None] = [p.bias for p in parts]
        if any(b is not None for b in biases):  # a member without bias gets zeros
            like = next(b for b in biases if b is not None)
            biases = [like.new_zeros(p.out_features) if b is None else b for p, b in zip(parts, biases, strict=True)]
        return replace(
            parts[0],
            codes=torch.cat([p.codes for p in parts]),
            scales=stack([p.scales for p in parts]),
            zeros=stack([p.zeros for p in parts]),
            bias=stack(biases),
        )

    def _with_row_scales(self) -> QuantizedWeight:
        """The same weight with one row of scales for each output: exact, and sliceable anywhere."""
        out_group = self.spec.group_shape[0]
        if out_group == 1 or self.scales is None:
            return self
        repeat = self.out_features if out_group == -1 else out_group

        def rows(t: Tensor) -> Tensor:
            return t.repeat_interleave(repeat, dim=0)[: self.out_features]

        return replace(
            self,
            spec=replace(self.spec, group_shape=(1, self.spec.group_shape[1])),
            scales=rows(self.scales),
            zeros=None if self.zeros is None else rows(self.zeros),
        )
