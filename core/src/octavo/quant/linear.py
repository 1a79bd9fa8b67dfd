"""The contract of a linear kernel, and how one is chosen for each layer.

A kernel answers a `LinearRequest` with None ("I can") or a sentence ("I can't, because"). The answers, kept as a
`Selection`, are what `octavo inspect` prints; nothing else decides. Two methods live here: `Dense`, for plain weights, and
`Reference`, which runs any `QuantizedWeight` and is what every other kernel is measured against.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError, NoKernelError, ask
from octavo.platforms import Platform
from octavo.product import row_product
from octavo.quant.activation import dequantize_inputs, quantize_inputs, why_not_quantize
from octavo.quant.weight import CODES, ActivationSpec, QuantizedWeight, WeightSpec


@dataclass(frozen=True, slots=True)
class LinearRequest:
    """A layer that needs a kernel. `layer` may name fused members: "model.layers.0.self_attn.q_proj|k_proj|v_proj".

    With `spec.act_order` the groups may be of unequal size: a slice for tensor parallelism holds parts of groups.
    """

    layer: str
    spec: WeightSpec
    in_features: int
    out_features: int
    has_bias: bool
    dtype: torch.dtype  # of input and output
    platform: Platform
    shares_weight: bool = False  # another module keeps the float weight as it is (a tied head): a copy takes memory
    activations: str = (
        "float"  # --cpu-activations: "int8" or "auto" let a kernel quantise inputs that the spec leaves float
    )


class LinearMethod(nn.Module):
    """A kernel for linear layers. An instance is one prepared layer; it keeps no state between calls.

    `rank` orders candidates: 0 reference, 10 portable, 20 vendor library, 30 tuned for this chip. Negative ranks run only
    when a user asks by name. `batch_invariant` promises, on a CPU, the same bits for a row whatever the number of rows and its
    place among them.
    """

    name: ClassVar[str]
    rank: ClassVar[int]
    batch_invariant: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def why_not(cls, request: LinearRequest) -> str | None:
        """None if this kernel computes the request exactly as specified, else a sentence for the user. Never raises.

        Probes that the operations it needs really exist in this build, so that a refusal never comes later.
        """

    @classmethod
    def inputs_as(cls, request: LinearRequest) -> ActivationSpec | None:
        """How it quantises inputs that the spec of a request it accepts leaves in float; None where it computes with them.

        Only a request whose `activations` allow it may be answered so; the result must then be exact for such inputs.
        """
        return None

    @classmethod
    def planned_bytes(cls, request: LinearRequest) -> int:
        """Bytes of memory that a prepared layer will take, for plans: here a byte for each code, 2 for each scale and zero."""
        shape = request.out_features, request.in_features
        return math.prod(shape) + math.prod(request.spec.num_groups(*shape)) * (1 + request.spec.has_zeros) * 2

    @abstractmethod
    def __init__(self, weight: QuantizedWeight, request: LinearRequest) -> None:
        """Prepares the layer on the device where `weight` is: repacks it once. `weight` may be freed afterwards."""
        super().__init__()

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x (tokens, in_features), any strides -> (tokens, out_features). Row i depends on row i of x only."""


def resident_bytes(method: nn.Module) -> int:
    """Bytes of memory that a prepared layer keeps."""
    tensors = [*method.parameters(), *method.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors)


class DenseMethod(LinearMethod):
    """A plain matrix product in the compute type, by torch. `weight` is (in, out); its memory is transposed if that is free."""

    name = "dense"
    rank = 10
    batch_invariant = True

    @classmethod
    def why_not(cls, request: LinearRequest) -> str | None:
        if not request.spec.is_float or request.spec.activation is not None:
            return "only for plain weights and inputs"
        return None

    @classmethod
    def planned_bytes(cls, request: LinearRequest) -> int:
        return request.out_features * request.in_features * request.dtype.itemsize

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: QuantizedWeight, request: LinearRequest) -> None:
        super().__init__(weight, request)
        dense = weight.dequantize(request.dtype).t()
        keeps = request.shares_weight or request.platform.device != "cpu"
        self.register_buffer("weight", dense if keeps else dense.contiguous())
        self.register_buffer("bias", None if weight.bias is None else weight.bias.to(request.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return row_product(x, self.weight, self.bias)


class ReferenceMethod(LinearMethod):
    """Dequantises in each call, then multiplies: runs every weight of the canonical form, on every device, slowly.

    Where inputs are quantised it multiplies, in fp32, the numbers that the codes of both sides stand for.
    """

    name = "reference"
    rank = 0
    batch_invariant = True

    @classmethod
    def why_not(cls, request: LinearRequest) -> str | None:
        if not request.spec.is_float and request.spec.code not in CODES:
            return f"does not know the code '{request.spec.code}'; the plugin that brings it must bring a kernel"
        return None if request.spec.activation is None else why_not_quantize(request.spec.activation)

    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    group_index: Tensor | None
    input_scale: Tensor | None
    input_zero: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: QuantizedWeight, request: LinearRequest) -> None:
        super().__init__(weight, request)
        self._spec, self._dtype = weight.spec, request.dtype
        for field in ("codes", "scales", "zeros", "group_index", "input_scale", "input_zero", "bias"):
            self.register_buffer(field, getattr(weight, field))

    def forward(self, x: Tensor) -> Tensor:
        weight = QuantizedWeight(self._spec, self.codes, self.scales, self.zeros, self.group_index)
        dtype = self._dtype
        if (activation := self._spec.activation) is not None:
            x = dequantize_inputs(*quantize_inputs(x, activation, self.input_scale, self.input_zero), activation)
            dtype = torch.float32
        bias = None if self.bias is None else self.bias.to(dtype)
        return row_product(x, weight.dequantize(dtype).t(), bias).to(self._dtype)


class DequantizedMethod(DenseMethod):
    """Dequantises once, at load: fast products for the memory of a float model. Chosen only by name."""

    name = "dequantized"
    rank = -1

    @classmethod
    def why_not(cls, request: LinearRequest) -> str | None:
        if request.spec.activation is not None:
            return f"leaves inputs unquantised, the layer wants {request.spec.activation}"
        return ReferenceMethod.why_not(request)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which kernel a layer got, and what each kernel of higher rank (or asked for by name) said against it."""

    layer: str
    spec: WeightSpec
    method: type[LinearMethod]
    refusals: tuple[tuple[str, str], ...]  # (kernel name, reason)


SelectHook = Callable[[LinearRequest, Sequence[type[LinearMethod]]], type[LinearMethod] | None]


def select_linear(
    request: LinearRequest,
    methods: Sequence[type[LinearMethod]],
    wanted: Mapping[str, str] | None = None,
    hook: SelectHook | None = None,
    notes: Sequence[str] = (),
) -> Selection:
    """Chooses the willing method of the highest rank.

    `wanted` maps layer patterns to a kernel name, first match wins; a trailing "?" turns the demand into a wish. `hook` may
    pick another of the willing candidates. `notes` (failed plugins, say) are appended to the error when nothing is willing.
    Raises NoKernelError with every reason, or ConfigError for a wanted kernel that is unknown or refuses.
    """
    ranked = sorted(methods, key=lambda m: -m.rank)
    refusals: list[tuple[str, str]] = []
    if (name := _wanted_kernel(request.layer, wanted or {})) is not None:
        required = not name.endswith("?")
        match = next((m for m in ranked if m.name == name.rstrip("?")), None)
        known = ", ".join(m.name for m in ranked)
        reason = f"no such kernel; installed: {known}" if match is None else ask(match.why_not, request)
        if match is not None and reason is None:
            return Selection(request.layer, request.spec, match, ())
        if required:
            raise ConfigError(
                f"--linear-kernels asks for '{name}' on {request.layer} ({request.spec}): {reason}. "
                f"Write '{name}?' to use it only where it can run."
            )
        refusals.append((name.rstrip("?"), str(reason)))
    candidates = []
    for method in ranked:
        if method.rank < 0:
            continue
        reason = ask(method.why_not, request)
        if reason is None:
            candidates.append(method)
        elif not candidates:
            refusals.append((method.name, reason))
    if not candidates:
        lines = [f"  {kernel}: {reason}" for kernel, reason in refusals] + [f"  {note}" for note in notes]
        raise NoKernelError("\n".join([f"no kernel can run {request.layer} ({request.spec}):", *lines]))
    choice = (hook(request, candidates) if hook else None) or candidates[0]
    return Selection(request.layer, request.spec, choice, tuple(refusals))


def _wanted_kernel(layer: str, wanted: Mapping[str, str]) -> str | None:
    """The kernel named by the first pattern that matches the layer, or any member of a fused one."""
    head, _, last = layer.rpartition(".")
    names = [layer, *(f"{head}.{member}" for member in last.split("|"))]
    for pattern, kernel in wanted.items():
        if any(fnmatchcase(name, pattern) for name in names):
            return kernel
    return None
