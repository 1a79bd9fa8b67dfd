"""Every engine setting, defined once: its name, type, default and help.

From this one definition come the Python arguments of `LLM`, the command line flags, the `OCTAVO_*` environment variables and
the keys of a `--config` YAML file. A value given in Python or on the command line wins over the environment, which wins over
the file, which wins over the default. Names and defaults follow vLLM's where the thing is the same.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from octavo.errors import ConfigError

logger = logging.getLogger(__name__)

_NOT_SETTINGS = frozenset(["OCTAVO_DEMO_MODEL", "OCTAVO_DEMO_GGUF", "OCTAVO_CPU_ISA", "OCTAVO_CPU_THREADS"])
"""Environment variables that others read."""
_OTHERS_NAMES = {
    "gpu_memory_utilization": "; octavo has kv_cache_memory_utilization, a share of what the weights leave, not of all memory"
}
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def _human_int(value: Any) -> Any:
    """Reads "8k" (8000), "8K" or "8Ki" (8192), "4GiB" as vLLM does: a small letter is decimal, a capital one binary."""
    if isinstance(value, str):
        match = re.fullmatch(r"([\d_.]+)\s*([kmgKMGT]?)i?B?", value.strip())
        if match:
            number, unit = match.groups()
            return int(float(number) * _UNITS[unit]) if "." in number else int(number) * _UNITS[unit]
    return value


def _gibibytes(value: Any) -> Any:
    """Reads "4" as 4 GiB; what has a unit, like "512MiB", counts as that."""
    if isinstance(value, str) and not re.fullmatch(r"[\d_.]+", value.strip()):
        number = _human_int(value)
        return number / 2**30 if isinstance(number, int) else value
    return value


def _pairs(value: Any) -> Any:
    """Reads "a=1,b=2" as {"a": "1", "b": "2"}."""
    if isinstance(value, str):
        items = [item for item in value.split(",") if item]
        if bad := [item for item in items if "=" not in item]:
            raise ValueError(f"expected PATTERN=NAME, got '{bad[0]}'")
        return dict(item.rsplit("=", 1) for item in items)
    return value


def _layer_map(value: Any) -> Any:
    """Reads "0,1=auto,4-7=fp8,*=auto" as {"0,1": "auto", "4-7": "fp8", "*": "auto"}: what has no "=" belongs to the next."""
    if isinstance(value, str):
        pairs: list[tuple[str, str]] = []
        keys: list[str] = []
        for item in filter(None, map(str.strip, value.split(","))):
            key, equals, name = item.partition("=")
            keys.append(key.strip())
            if equals:
                pairs.append((",".join(keys), name.strip()))
                keys = []
        if keys:
            raise ValueError(f"'{','.join(keys)}' is given no value, expected LAYERS=NAME")
        value = pairs
    elif isinstance(value, Mapping):
        value = [(str(key).replace(" ", ""), name) for key, name in value.items()]
    else:
        return value
    listed = [part for key, _ in value for part in key.split(",")]
    if wrong := [part for part in listed if not re.fullmatch(r"\*|\d+|\d+-\d+", part)]:
        raise ValueError(f"expected layers as 3, 0-7 or *, got '{wrong[0]}'")
    if twice := [part for part in listed if listed.count(part) > 1]:
        raise ValueError(f"'{twice[0]}' is given twice")
    if empty := [key for key, name in value if not name]:
        raise ValueError(f"'{empty[0]}' is given no value, expected LAYERS=NAME")
    return dict(value)


def _schemes(value: Any) -> Any:
    """Reads "awq,lm_head=int8" as {"": "awq", "lm_head": "int8"}; true alone means the scheme that --quantization names."""
    if isinstance(value, bool) or value in ("", "true", "True", "1"):
        return {"": ""} if value else {}
    if isinstance(value, str):
        items = [item.strip() for item in value.split(",") if item.strip()]
        return {pattern: scheme for pattern, _, scheme in (item.rpartition("=") for item in items)}
    return value


def _names(value: Any) -> Any:
    """Reads "a,b" as ("a", "b")."""
    return tuple(item for item in value.split(",") if item) if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, os.PathLike) else value)]
HumanInt = Annotated[int, BeforeValidator(_human_int)]
Gibibytes = Annotated[float, BeforeValidator(_gibibytes)]
Pairs = Annotated[dict[str, str], BeforeValidator(_pairs)]
Schemes = Annotated[dict[str, str], BeforeValidator(_schemes)]
LayerMap = Annotated[dict[str, str], BeforeValidator(_layer_map)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class Settings(BaseModel):
    """A group of settings. Immutable; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(describe(error, "setting")) from None

    @classmethod
    def load(
        cls,
        values: Mapping[str, Any],
        file: str | Path | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        others: Collection[str] = (),
    ) -> Self:
        """Merges explicit values, `OCTAVO_*` variables and a YAML file, in this order of precedence.

        `others` are settings of another group, which the variables and the file may hold as well. Raises ConfigError that
        names the setting and where its value came from.
        """
        merged: dict[str, Any] = {}
        origin: dict[str, str] = {}
        if file is not None:
            for key, value in _read_yaml(Path(file)).items():
                name = str(key).replace("-", "_")
                if name not in others:
                    merged[name], origin[name] = value, f"file {file}"
        environ = os.environ if environ is None else environ
        known = {f"OCTAVO_{name.upper()}": name for name in cls.model_fields}
        elsewhere = _NOT_SETTINGS.union(f"OCTAVO_{name.upper()}" for name in others)
        for variable in sorted(v for v in environ if v.startswith("OCTAVO_") and v not in elsewhere):
            if variable in known:
                merged[known[variable]] = environ[variable]
                origin[known[variable]] = f"environment variable {variable}"
            else:
                nearest = "".join(f"; did you mean {v}?" for v in get_close_matches(variable, known, n=1))
                logger.warning("%s is ignored: there is no such setting%s", variable, nearest)
        for name, value in values.items():
            merged[name], origin[name] = value, "argument"
        try:
            return cls(**merged)
        except ConfigError as error:
            cause = error.__context__
            assert isinstance(cause, ValidationError)
            # An error of several fields has no place, but says their names.
            blamed = {name for item in cause.errors() for name in item["loc"][:1] or re.findall(r"\w+", item["msg"])}
            places = [f"  {name} comes from {place}" for name, place in origin.items() if name in blamed]
            raise ConfigError("\n".join([str(error), *places])) from None


class EngineConfig(Settings):
    """The settings of one engine."""

    model: Text = Field(description="Folder of the model, in Hugging Face layout.")
    tokenizer: Text | None = Field(None, description="Folder of the tokenizer, if it is not the model's.")
    quantization: str | None = Field(
        None,
        description="Format that the checkpoint must have. It is read from the checkpoint; this only guards against a mix-up, "
        "or says what --quantize-weights makes.",
        json_schema_extra={"short": "-q"},
    )
    quantize_weights: Schemes = Field(
        {},
        description="Quantise float weights while they load, rounding to nearest: SCHEME for the decoder's linears, or "
        "PATTERN=SCHEME[,...], which may name lm_head and embed_tokens too; alone: as --quantization says. Schemes: int8, "
        "int4, float, or a format (awq, gptq, w8a8, fp8). Default: none.",
        json_schema_extra={"bare": "true"},
    )
    dtype: Annotated[
        Literal["auto", "float32", "float", "bfloat16", "float16", "half"],
        BeforeValidator(lambda value: str(value).removeprefix("torch.")),  # torch.bfloat16 says the same
    ] = Field(
        "auto",
        description="Type to compute in. auto: the checkpoint's on a GPU; float32 on a CPU, which computes it fastest.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where to compute. auto: CUDA where there is one."
    )
    seed: int = Field(0, description="Seed of all sampling that brings no seed of its own.")
    max_model_len: HumanInt | None = Field(
        None, ge=1, description="Longest prompt plus output, in tokens. Default: what the model was made for."
    )
    max_num_seqs: HumanInt = Field(256, ge=1, description="Most sequences that run at once.")
    max_num_batched_tokens: HumanInt = Field(2048, ge=1, description="Most tokens computed in one step.")
    block_size: int = Field(16, ge=1, le=1024, description="Tokens in one block of KV memory.")
    num_blocks_override: HumanInt | None = Field(
        None,
        ge=1,
        description="Number of KV blocks, instead of what memory allows.",
        json_schema_extra={"flags": ["--num-gpu-blocks-override"]},
    )
    kv_cache_memory_bytes: HumanInt | None = Field(
        None, ge=1, description="Bytes of KV memory, instead of a share of what is free. Accepts 4GiB."
    )
    kv_cache_memory_utilization: float = Field(
        0.5, gt=0, le=1, description="Share of the memory left after the weights that KV blocks may take."
    )
    kv_cache_dtype: str = Field(
        "auto", description="How K and V are stored. auto: as the checkpoint asks, else in the type computed in."
    )
    kv_cache_dtype_map: LayerMap = Field(
        {},
        description="How K and V of single layers are stored, LAYERS=NAME[,...] with LAYERS such as 0,1 or 4-7 or * (all "
        "others): '0,1=auto,*=fp8'. First match wins; other layers follow --kv-cache-dtype. Default: all alike.",
    )
    kv_scales: Text | None = Field(
        None,
        description="File of calibrated scales of K and V, safetensors or JSON, in place of the checkpoint's; unit: scale 1. "
        "Default: the checkpoint's.",
    )
    swap_space: Gibibytes | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="GiB of host memory for the KV blocks of preempted requests; accepts 512MiB. Default: 4 on a GPU, at most "
        "a quarter of what is free; 0 on a CPU, where KV memory is host memory already, unless --preemption-mode is swap.",
    )
    preemption_mode: Literal["recompute", "swap", "auto"] = Field(
        "auto",
        description="What a request does that gave up its KV blocks: compute its tokens again, or fetch the blocks from swap "
        "space. auto: what costs less time. Without room in swap space it computes.",
    )
    enable_prefix_caching: bool = Field(True, description="Keep finished KV blocks and reuse them for equal prefixes.")
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="fcfs: by arrival. priority: by each request's priority (lower first), then arrival."
    )
    max_logprobs: int = Field(20, ge=-1, description="Most logprobs per token that a request may ask for; -1: all.")
    max_num_sequences_per_request: int = Field(128, ge=1, description="Largest n that a request may ask for.")
    linear_kernels: Pairs = Field(
        {},
        description="Kernel for layers by pattern, PATTERN=KERNEL[,...]; 'KERNEL?' where it can run. Default: the best.",
    )
    cpu_activations: Literal["auto", "float", "int8"] = Field(
        "auto",
        description="Inputs of layers whose weights alone are quantised, in kernels for CPUs. float: as they are. int8: "
        "quantised for each token and group of weights, which is faster. auto: int8 for weights of up to 4 bits, where that "
        "cost SmolLM2 0.1 to 0.4 % of perplexity. The kernel's name in the table says which.",
    )
    attention_backend: str | None = Field(None, description="Attention kernel. Default: the best that can serve.")
    enforce_eager: bool = Field(
        False, description="Run every operation as Python reaches it, instead of replaying steps that were recorded."
    )
    structured_outputs_backend: str = Field(
        "auto", description="What compiles schemas, regexes and grammars. auto: the installed plugin."
    )
    distributed_executor_backend: str = Field("uni", description="What runs the workers. uni: this process.")
    tensor_parallel_size: int = Field(
        1, ge=1, description="Workers that share each layer.", json_schema_extra={"short": "-tp"}
    )
    ignore_tensors: Names = Field(
        (), description="Patterns of tensors in the checkpoint that may stay unread without complaint."
    )
    disable_plugins: Names = Field((), description="Plugins not to load, by name.")
    strict_plugins: bool = Field(False, description="Refuse to start if any plugin fails to load.")
    self_test: bool = Field(True, description="Compare each kind of kernel with the reference at start.")
    disable_progress: bool = Field(False, description="Show no progress bars.")

    def __init__(self, **values: Any) -> None:  # type checkers would make one of the fields
        super().__init__(**values)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) exceeds max_num_batched_tokens ({self.max_num_batched_tokens}): "
                "each running sequence needs one token a step; lower the first or raise the second"
            )
        if self.preemption_mode == "swap" and self.swap_space == 0:
            raise ValueError("preemption_mode is swap, but swap_space is 0: give it some GiB, or leave one of them out")
        if "" in self.quantize_weights.values() and self.quantization is None:
            raise ValueError(
                "quantize_weights names no scheme and quantization none either: say --quantize-weights int8, or "
                "--quantization with a format"
            )
        return self

    @property
    def online_schemes(self) -> dict[str, str]:
        """`quantize_weights` with the format of `quantization` where it names no scheme."""
        return {pattern: scheme or str(self.quantization) for pattern, scheme in self.quantize_weights.items()}


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot read the file: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected settings as 'name: value' lines, found {type(content).__name__}")
    return content


def describe(error: ValidationError, noun: str) -> str:
    """A pydantic error as one line per field: what was given, and what is wrong with it."""
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown {noun} '{name}'{_OTHERS_NAMES.get(name, '')}")
        elif item["type"] == "missing":
            lines.append(f"{noun} '{name}' is required")
        elif name:
            given = repr(item["input"])
            given = given if len(given) <= 200 else f"{given[:200]}..."
            lines.append(f"{noun} '{name}': {_lower(item['msg'])}, got {given}")
        else:
            lines.append(_lower(item["msg"].removeprefix("Value error, ")))
    return "; ".join(lines)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
