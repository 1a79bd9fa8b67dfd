"""What settings say about numbers: a `QuantArgs` for a weight or an input, a `Scheme` for a group of layers.

Both are read leniently (unknown keys are reported, not refused) and refuse by name what octavo cannot compute. Source:
compressed-tensors `quantization/quant_args.py` and `quant_scheme.py`, versions of October 2025 to 2026.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from octavo import ActivationSpec

_HARMLESS_ARGS = frozenset(
    ["observer", "observer_kwargs", "zp_dtype"]
)  # how scales were found, and a type tensors show

_MOST_REPEATS = 8

Strategy = Literal["tensor", "channel", "group", "block", "token", "attn_head"]


class QuantArgs(BaseModel):
    """How one tensor is quantised: the numbers' width and kind, and which elements share a scale."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    num_bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Strategy = "tensor"
    """Where absent: tensor without a group_size, channel for -1, group for others."""
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    dynamic: bool = False
    actorder: bool = False
    """True where groups follow weight_g_idx. An order that was only used while calibrating leaves no trace in files."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        args = {key: value.lower() if isinstance(value, str) else value for key, value in raw.items()}
        args = {key: value for key, value in args.items() if value is not None}
        if args.get("strategy") == "tensor_group" or args.get("dynamic") == "local":
            raise ValueError("scales of scales (tensor_group, as NVFP4 has) are not supported")
        if str(args.get("scale_dtype", "")).endswith(("uint8", "e8m0fnu")):
            raise ValueError("scales that are powers of two (MXFP4, MXFP6, MXFP8) are not supported")
        if "strategy" not in args:
            size = args.get("group_size")
            args["strategy"] = "tensor" if size is None else "channel" if size == -1 else "group"
        if isinstance(args.get("block_structure"), str):
            args["block_structure"] = args["block_structure"].split("x")
        order = args.get("actorder")
        if isinstance(order, str):
            if order not in ("group", "dynamic", "weight", "static"):
                raise ValueError(f"actorder '{order}' is not known")
            args["actorder"] = order in ("group", "dynamic")
        return args

    @model_validator(mode="after")
    def _check(self) -> QuantArgs:
        if self.type == "float" and self.num_bits != 8:
            raise ValueError(f"floats of {self.num_bits} bits (NVFP4, MXFP4, MXFP6) are not supported")
        if not 2 <= self.num_bits <= 8:
            raise ValueError(f"num_bits must be 2 to 8, not {self.num_bits}")
        if self.strategy == "group" and (self.group_size is None or self.group_size < 1):
            raise ValueError("strategy group needs a positive group_size")
        if self.strategy == "block" and (self.block_structure is None or min(self.block_structure) < 1):
            raise ValueError("strategy block needs a block_structure of two positive numbers")
        if self.type == "float" and not self.symmetric:
            raise ValueError("floats with zero points are not supported")
        return self

    @property
    def code(self) -> str:
        """The canonical name of the numbers, signed."""
        return "fp8_e4m3" if self.type == "float" else f"int{self.num_bits}"

    def activation(self) -> ActivationSpec:
        """The canonical description of inputs that are quantised so."""
        granularity = {"token": "per_token", "tensor": "per_tensor", "group": "per_group"}[self.strategy]
        size = self.group_size if granularity == "per_group" and self.group_size is not None else -1
        return ActivationSpec(self.code, granularity, self.dynamic, self.symmetric, size)

    def dump(self) -> dict[str, Any]:
        """The object that stands in config.json."""
        return {
            "num_bits": self.num_bits,
            "type": self.type,
            "symmetric": self.symmetric,
            "strategy": self.strategy,
            "group_size": self.group_size,
            "block_structure": None if self.block_structure is None else list(self.block_structure),
            "dynamic": self.dynamic,
            "actorder": "group" if self.actorder else None,
        }


class Scheme(BaseModel):
    """One entry of `config_groups`: the layers it is meant for, and how their weights and inputs are quantised."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    targets: tuple[str, ...]
    weights: QuantArgs | None = None
    input_activations: QuantArgs | None = None
    output_activations: QuantArgs | None = None
    format: str | None = None
    preset: str | None = None
    """The name that stood for the settings. Presets have changed their meaning, so shapes of tensors overrule them."""

    @field_validator("targets", mode="before")
    @classmethod
    def _one_target(cls, raw: Any) -> Any:
        return (raw,) if isinstance(raw, str) else raw

    @field_validator("targets")
    @classmethod
    def _check_targets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_targets(value)

    @field_validator("format")
    @classmethod
    def _check_format(cls, value: str | None) -> str | None:
        return None if value is None else check_format(value)

    @model_validator(mode="after")
    def _check(self) -> Scheme:
        if self.kv is not None:
            return self
        where = ", ".join(self.targets)
        if self.output_activations is not None:
            raise ValueError(f"quantised outputs (output_activations of {where}) are only known for k_proj and v_proj")
        if self.weights is None:
            if self.input_activations is not None:
                raise ValueError(f"quantised inputs of unquantised weights ({where}) are not supported")
            return self
        if self.weights.dynamic or self.weights.strategy in ("token", "attn_head"):
            raise ValueError(f"weights cannot be dynamic, nor of strategy {self.weights.strategy} ({where})")
        if (inputs := self.input_activations) is not None:
            if inputs.strategy not in ("token", "tensor", "group"):
                raise ValueError(f"inputs cannot be quantised by {inputs.strategy} ({where})")
            if not inputs.dynamic and inputs.strategy != "tensor":
                raise ValueError(f"scales of inputs by {inputs.strategy} cannot be static ({where})")
        return self

    @property
    def kv(self) -> QuantArgs | None:
        """How K and V are stored, where the group is about them and not about linear layers."""
        if not self.targets or self.weights is not None:
            return None
        if self.input_activations is not None and all(map(_is_attention, self.targets)):
            return self.input_activations
        if self.output_activations is not None and all(map(_is_kv_proj, self.targets)):
            return self.output_activations
        return None

    def dump(self) -> dict[str, Any] | list[str]:
        """The object that stands in config.json: for a preset the list of its targets."""
        if self.preset is not None:
            return list(self.targets)
        return {
            "targets": list(self.targets),
            "weights": self.weights and self.weights.dump(),
            "input_activations": self.input_activations and self.input_activations.dump(),
            "output_activations": self.output_activations and self.output_activations.dump(),
            "format": self.format,
        }


def _is_attention(target: str) -> bool:
    """Whether a target is an attention module: "LlamaAttention" or "re:.*self_attn$"."""
    return re.search(r"(Attention|(self_|cross_)?attn)\)?\$?$", target) is not None


def _is_kv_proj(target: str) -> bool:
    """Whether a target is k_proj, v_proj or q_proj, or a pattern for several of them."""
    several = r"(\(?[kvq](\|[kvq])*\)?_proj|\[[kvq]+\]_proj|\(?[kvq]_proj(\|[kvq]_proj)*\)?)"
    return re.search(rf"(?<![A-Za-z_]){several}\$?$", target) is not None


def check_targets(value: tuple[str, ...]) -> tuple[str, ...]:
    """The same targets; raises ValueError for a pattern that is no regular expression, or might take for ever."""
    for target in value:
        if target.startswith("re:"):
            if (reason := _why_slow(target.removeprefix("re:"))) is not None:
                raise ValueError(f"'{target}' {reason}: matching could take for ever; write it more simply")
            try:
                re.compile(target.removeprefix("re:"))
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"'{target}' is no regular expression: {error}") from None
    return value


def _why_slow(pattern: str) -> str | None:
    """Why matching, which Python cannot interrupt, might not end; a model folder's patterns are nobody's in particular."""
    plain = re.sub(r"\\.", "x", pattern, flags=re.DOTALL)
    plain = re.sub(r"\[\^?\]?[^\]]*\]", "x", plain)  # a set is one character
    if len(re.findall(r"[*+]|\{\d*,", plain)) > _MOST_REPEATS:
        return f"has more than {_MOST_REPEATS} open repeats"
    branching = [False]  # for each open group: whether it can match one text in several ways
    for at, character in enumerate(plain):
        if character == "(":
            branching.append(False)
        elif character == ")" and len(branching) > 1:
            inner = branching.pop()
            if inner and re.match(r"[*+]|\{", plain[at + 1 :]):
                return "repeats a group that itself holds a repeat or an alternative"
            branching[-1] |= inner
        elif character in "*+{|" or (character == "?" and plain[at - 1 : at] not in ("(", "")):
            branching[-1] = True
    return None


def check_format(value: str) -> str:
    """The name of a storage format in lower case; raises ValueError for those whose numbers octavo cannot read."""
    value = value.lower()
    if value in FORMATS:
        return value
    if value == "marlin-24" or value.startswith("sparse"):
        raise ValueError(
            f"format '{value}' (2:4 or bitmask sparsity) is not supported: export the model without sparsity"
        )
    if value.startswith(("nvfp4", "mxfp")):
        raise ValueError(f"format '{value}' is not supported: octavo knows int2 to int8 and fp8_e4m3")
    raise ValueError(f"format '{value}' is not known; known are {', '.join(FORMATS)}")


FORMATS = (
    "dense",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "mixed-precision",
    "fakequant",
)


def expand_preset(name: str, targets: Any) -> dict[str, Any]:
    """The scheme that a preset's name stands for; raises ValueError for unknown ones and those octavo cannot compute."""
    name = name.upper()
    scheme: dict[str, Any] = {"targets": targets, "preset": name}
    integers = re.fullmatch(r"W([2-8])A(4|8|16)", name)
    if name in _PRESETS:
        scheme["weights"], scheme["input_activations"] = _PRESETS[name]
    elif integers is not None:
        bits, inputs = map(int, integers.groups())
        scheme["weights"] = {"num_bits": bits, "group_size": 128}
        scheme["input_activations"] = None if inputs == 16 else {**_TOKEN, "num_bits": inputs}
    elif name.startswith(("NVFP", "MXFP")):
        raise ValueError(f"preset '{name}' is not supported: octavo knows int2 to int8 and fp8_e4m3")
    else:
        raise ValueError(f"preset '{name}' is not known")
    return scheme


_TOKEN = {"strategy": "token", "dynamic": True}
_INT8 = {"strategy": "channel"}
_INT4 = {"num_bits": 4, "group_size": 128}
_FP8 = {"type": "float", "strategy": "tensor"}
_PRESETS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "UNQUANTIZED": (None, None),
    "W8A8": (_INT8, _TOKEN),
    "INT8": (_INT8, _TOKEN),
    "W4A16_ASYM": ({**_INT4, "symmetric": False}, None),
    "W4AFP8": (_INT4, {**_TOKEN, "type": "float"}),
    "FP8": (_FP8, _FP8),
    "FP8_DYNAMIC": ({**_FP8, "strategy": "channel"}, {**_TOKEN, "type": "float"}),
    "FP8_BLOCK": (
        {"type": "float", "strategy": "block", "block_structure": [128, 128]},
        {"type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
    ),
}


def unread_args(where: str, raw: Mapping[str, Any]) -> list[str]:
    """Keys of a `QuantArgs` object that nobody reads, with the place where they stand."""
    known = {*QuantArgs.model_fields, *_HARMLESS_ARGS, "scale_dtype"}
    return [f"{where}.{key}" for key, value in raw.items() if key not in known and value is not None]


def unread_scheme(where: str, raw: Mapping[str, Any]) -> list[str]:
    """The same for an entry of `config_groups`."""
    keys = [f"{where}.{key}" for key in raw if key not in Scheme.model_fields or key == "preset"]
    for part in ("weights", "input_activations", "output_activations"):
        if isinstance(args := raw.get(part), Mapping):
            keys += unread_args(f"{where}.{part}", args)
    return keys
