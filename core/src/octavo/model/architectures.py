"""From config.json to a `DecoderConfig`: one function for each family, one value that says all that the decoder must know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `kind` is "default", "linear", "dynamic", "llama3" or "yarn"; `parameters` are that kind's own."""

    theta: float = 10000.0
    kind: str = "default"
    rotary_dim: int = 0  # leading elements of a head that turn; the others pass
    original_max_positions: int = 2048  # positions the frequencies were trained on, before stretching
    parameters: Mapping[str, float] | None = None


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


ARCHITECTURES: Mapping[str, Callable[[dict[str, Any]], DecoderConfig]] = {}
