"""From config.json to a `DecoderConfig`: one function a family, one value that says all that the decoder must know.

Both spellings are read, that of transformers 5 (`rope_parameters`, `dtype`) and that of 4.x (`rope_theta`,
`rope_scaling`, `torch_dtype`). An absent key means what its absence means to Hugging Face's configuration class of the
family; sizes have no such meaning and must be there.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import CheckpointError

logger = logging.getLogger(__name__)

_LARGEST = 2**31 - 1  # of sizes: kernels index with 32 bits
_MOST_LAYERS = 10_000  # so that a damaged number is refused before anything is made for each layer
_MOST_POSITIONS = 2**24  # fp32, in which angles are computed, cannot tell later ones apart


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a kind: "default", "linear", "dynamic", "llama3", "yarn". `parameters` are the kind's own."""

    rotary_dim: int  # leading elements of a head that turn; the others pass
    theta: float = 10000.0
    kind: str = "default"
    original_max_positions: int = 2048  # positions the frequencies were trained on, before stretching
    parameters: Mapping[str, float] = field(default_factory=dict)

    @property
    def needs_prompt_lens(self) -> bool:
        """Whether K depends on the length of a request's prompt, so that equal prefixes of two requests may differ."""
        return self.kind == "dynamic"


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A llama-like decoder: pre-norm attention and gated MLP. Flags cover the differences between families."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    activation: str = "silu"
    qk_norm: bool = False  # RMS norm of each query and key head, before rotation
    sliding_windows: tuple[int | None, ...] = ()  # per layer; empty: none
    tie_word_embeddings: bool = False
    biases: frozenset[str] = frozenset()  # linears that must have a bias: "q_proj", ..., "down_proj"

    @property
    def max_positions(self) -> int:
        """Positions that the model was made for, rotary stretching included."""
        if self.rope.kind == "llama3":  # here max_position_embeddings is the stretched length already
            return self.max_position_embeddings
        stretched = self.rope.original_max_positions * self.rope.parameters.get("factor", 1.0)
        return max(self.max_position_embeddings, int(min(stretched, _LARGEST)))


def decoder_config(
    config: Mapping[str, Any], architectures: Mapping[str, Callable[[dict[str, Any]], DecoderConfig]]
) -> DecoderConfig:
    """Reads config.json by its architecture: `architectures[0]`, or else the one that `model_type` means.

    Values of a nested `text_config` count as if they stood outside. Raises CheckpointError.
    """
    named = config.get("architectures") or [
        name for name in architectures if name.removesuffix("ForCausalLM").lower() == config.get("model_type")
    ]
    known = ", ".join(sorted(architectures))
    if not isinstance(named, list) or not named:
        raise CheckpointError(
            "config.json does not say which architecture this is",
            file="config.json",
            expected=f"a list 'architectures' that names one of {known}",
            found=config.get("architectures"),
        )
    name = str(named[0])
    if name not in architectures:
        raise CheckpointError(
            f"the architecture {name} is not supported",
            file="config.json",
            expected=f"one of {known}",
            hint="a plugin adds an architecture through the hook octavo_architectures",
        )
    return architectures[name](_flat(config))


def declared_dtype(config: Mapping[str, Any]) -> str | None:
    """The type to compute in by config.json: "float32", "bfloat16" or "float16"; None where it is silent.

    Where its two spellings differ, which is reported, `dtype` counts: some quantisers change only one of them.
    """
    config = _flat(config)
    names = [str(config[key]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if config.get(key) is not None]
    if unknown := [name for name in names if name not in ("float32", "bfloat16", "float16")]:
        raise _bad_value("dtype", "float32, bfloat16 or float16", unknown[0])
    if len(set(names)) > 1:
        logger.warning("config.json: dtype is %s, but torch_dtype is %s; dtype counts, as for Hugging Face", *names)
    return names[0] if names else None


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config") or {}
    if not isinstance(nested, dict):
        raise _bad_value("text_config", "an object", nested)
    return {**config, **nested}


# --- the families

_QKV = frozenset({"q_proj", "k_proj", "v_proj"})
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})


def _llama(config: dict[str, Any]) -> DecoderConfig:
    biases = _attention_biases(config) | (_MLP if _flag(config, "mlp_bias") else frozenset())
    return _decoder(config, biases=biases)


def _mistral(config: dict[str, Any]) -> DecoderConfig:
    window = _window(config)
    return _decoder(config, sliding_windows=() if window is None else (window,) * _layers(config))


def _qwen2(config: dict[str, Any]) -> DecoderConfig:
    return _decoder(config, biases=_QKV, sliding_windows=_windows_by_layer(config))


def _qwen3(config: dict[str, Any]) -> DecoderConfig:
    return _decoder(
        {"head_dim": 128, **config},
        biases=_attention_biases(config),
        sliding_windows=_windows_by_layer(config),
        qk_norm=True,
    )


ARCHITECTURES: Mapping[str, Callable[[dict[str, Any]], DecoderConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


# --- what the families share

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _decoder(config: dict[str, Any], **family: Any) -> DecoderConfig:
    hidden_size, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    kv_heads = _whole(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise _bad_value("num_key_value_heads", f"a divisor of the {heads} attention heads", kv_heads)
    if config.get("head_dim") is None and hidden_size % heads:
        raise _bad_value("hidden_size", f"a multiple of the {heads} attention heads, or a 'head_dim'", hidden_size)
    head_dim = _whole(config, "head_dim", hidden_size // heads)
    if head_dim % 2:
        raise _bad_value("head_dim", "an even number, as pairs of elements are rotated", head_dim)
    activation = str(config.get("hidden_act", "silu"))
    if activation not in _ACTIVATIONS:
        raise _bad_value("hidden_act", f"one of {', '.join(_ACTIVATIONS)}", activation)
    max_positions = _whole(config, "max_position_embeddings")
    decoder = DecoderConfig(
        vocab_size=_whole(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_whole(config, "intermediate_size"),
        num_layers=_layers(config),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope=_rope(config, head_dim, max_positions),
        rms_norm_eps=_number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        activation=_ACTIVATIONS[activation],
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        **family,
    )
    if decoder.max_positions > _MOST_POSITIONS:
        limit = f"at most {_MOST_POSITIONS} positions, with the 'factor' of the rotary embedding"
        raise _bad_value("max_position_embeddings", limit, decoder.max_positions)
    return decoder


def _attention_biases(config: Mapping[str, Any]) -> frozenset[str]:
    return _QKV | {"o_proj"} if _flag(config, "attention_bias") else frozenset()


def _window(config: Mapping[str, Any]) -> int | None:
    """The length of sliding windows: null means none, but an absent key 4096."""
    return None if config.get("sliding_window", 4096) is None else _whole(config, "sliding_window", 4096)


def _windows_by_layer(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Qwen's rule: windows only where `use_sliding_window` allows them, in the layers from `max_window_layers` up."""
    window = _window(config) if _flag(config, "use_sliding_window") else None
    layers, full = _layers(config), _whole(config, "max_window_layers", 28, least=0)
    types = config.get("layer_types")
    if types is None:
        types = ["full_attention" if window is None or i < full else "sliding_attention" for i in range(layers)]
    allowed = ["full_attention"] if window is None else ["full_attention", "sliding_attention"]
    if not isinstance(types, list) or len(types) != layers or any(kind not in allowed for kind in types):
        off = " as sliding windows are off" if window is None else ""
        raise _bad_value("layer_types", f"{' or '.join(allowed)}{off}, for each of {layers} layers", types)
    return () if window is None else tuple(window if kind == "sliding_attention" else None for kind in types)


_ROPE_PARAMETERS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # required, optional
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (("factor",), ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
}
_ORIGINAL = "original_max_position_embeddings"


def _rope(config: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeConfig:
    sources: list[tuple[str, str, Any]] = []
    for key in ("rope_parameters", "rope_scaling"):
        given = config.get(key) or {}
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            raise _bad_value(key, "one set of parameters for all layers", given)
        sources += [(f"{key}.{name}", "rope_type" if name == "type" else name, given[name]) for name in given]
    sources += [(name, name, config.get(name)) for name in ("rope_theta", "partial_rotary_factor", _ORIGINAL)]
    stated = _agreed(sources)
    kind = str(stated.pop("rope_type", "default"))
    theta = _number("rope_theta", stated.pop("rope_theta", 10000.0))
    original = stated.pop(_ORIGINAL, max_positions) if kind in ("llama3", "yarn") else max_positions
    if kind not in _ROPE_PARAMETERS:
        raise _bad_value("rope_type", f"one of {', '.join(_ROPE_PARAMETERS)}", kind)
    if (part := stated.pop("partial_rotary_factor", 1.0)) != 1.0:
        raise _bad_value("partial_rotary_factor", "1, as heads of this family are rotated whole", part)
    original = _whole({_ORIGINAL: original}, _ORIGINAL)
    if kind == "yarn":
        if theta <= 1:
            raise _bad_value("rope_theta", "more than 1 for yarn, which takes logarithms to this base", theta)
        # DeepSeek's convention: without a factor, the ratio of the lengths is meant
        stated.setdefault("factor", max_positions / original)
    required, optional = _ROPE_PARAMETERS[kind]
    if missing := [name for name in required if name not in stated]:
        raise CheckpointError(
            f"config.json lacks '{missing[0]}' for its rotary embedding of type '{kind}'", file="config.json"
        )
    parameters = {name: _number(name, stated.pop(name)) for name in required}
    parameters |= {name: _number(name, stated.pop(name), zero=True) for name in optional if name in stated}
    if kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        low = parameters["low_freq_factor"]
        raise _bad_value("high_freq_factor", f"more than low_freq_factor, {low}", parameters["high_freq_factor"])
    if stated:
        logger.warning("config.json: rotary embedding of type '%s' does not use %s", kind, ", ".join(sorted(stated)))
    return RopeConfig(head_dim, theta, kind, original, parameters)


# --- reading single keys


def _agreed(sources: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
    """Values by name, from (place, name, value); null says nothing. Raises CheckpointError where places disagree."""
    stated: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for place, name, value in sources:
        if value is None:
            continue
        if name in stated and stated[name] != value:
            raise CheckpointError(
                f"config.json contradicts itself: {origin[name]} is {stated[name]}, but {place} is {value}",
                file="config.json",
            )
        stated[name], origin[name] = value, place
    return stated


def _bad_value(key: str, expected: str, found: object) -> CheckpointError:
    return CheckpointError(
        f"config.json has an unusable value for '{key}'", file="config.json", expected=expected, found=repr(found)
    )


def _whole(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json lacks '{key}'", file="config.json")
    if type(value) is not int or not least <= value <= _LARGEST:
        raise _bad_value(key, f"a whole number of at least {least}, below 2**31", value)
    return value


def _layers(config: Mapping[str, Any]) -> int:
    layers = _whole(config, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise _bad_value("num_hidden_layers", f"at most {_MOST_LAYERS}", layers)
    return layers


def _number(key: str, value: Any, zero: bool = False) -> float:
    """A finite number above 0, or `zero` itself where allowed. Truth values count as 1 and 0."""
    if not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max or (value == 0 and not zero):
        raise _bad_value(key, f"a number above 0{' or 0' if zero else ''}", value)
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    """A setting that is off unless it is given as true."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise _bad_value(key, "true or false", value)
    return bool(value)
