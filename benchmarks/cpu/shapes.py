"""The model shapes and weight kinds that are measured, and what a step of each must read and compute.

Bytes are those that the checkpoint's format needs for a decode step: all layer weights once, the head once (a tied embedding
is the head), K and V of the context. An untied embedding table is read in rows only and does not count. Operations are those
of the layers' matrix products; the head computes one row of a prefill and does not count there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder. `group_size` is that of its 4-bit weights."""

    name: str
    like: str
    architecture: str  # of transformers: "LlamaForCausalLM"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    tied: bool
    qkv_bias: bool
    group_size: int
    head_dim: int = 64

    def linears(self, index: int) -> dict[str, tuple[int, int]]:
        """Names of a layer's linears, with (out_features, in_features)."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        prefix = f"model.layers.{index}."
        return {
            f"{prefix}self_attn.q_proj": (query, self.hidden),
            f"{prefix}self_attn.k_proj": (key, self.hidden),
            f"{prefix}self_attn.v_proj": (key, self.hidden),
            f"{prefix}self_attn.o_proj": (self.hidden, query),
            f"{prefix}mlp.gate_proj": (self.inner, self.hidden),
            f"{prefix}mlp.up_proj": (self.inner, self.hidden),
            f"{prefix}mlp.down_proj": (self.hidden, self.inner),
        }

    @property
    def layer_weights(self) -> int:
        return self.layers * sum(rows * columns for rows, columns in self.linears(0).values())

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def ops_per_token(self) -> int:
        """Multiplications and additions in the layers' matrix products."""
        return 2 * self.layer_weights

    def kv_bytes(self, context: int, bytes_per_number: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * context * bytes_per_number

    def step_bytes(self, kind: Kind) -> float:
        """Weight bytes of one decode step."""
        body = self.layer_weights * (kind.bits + kind.bits_per_group / self.group_size) / 8
        return body + self.head_weights * kind.head_bits / 8


@dataclass(frozen=True, slots=True)
class Kind:
    """Weights of comparable bits, that engines store in their own ways. `peak` is the ceiling that its prefill is held to."""

    name: str
    says: str
    bits: float
    bits_per_group: float
    head_bits: float
    peak: str  # "int8" or "fp32"


S = Shape("S", "SmolLM2-135M", "LlamaForCausalLM", 30, 576, 9, 3, 1536, 49152, True, False, 64)
M = Shape("M", "Qwen2.5-0.5B", "Qwen2ForCausalLM", 24, 896, 14, 2, 4864, 151936, True, True, 64)
L = Shape("L", "TinyLlama-1.1B", "LlamaForCausalLM", 22, 2048, 32, 4, 5632, 32000, False, False, 128)
SHAPES = {shape.name: shape for shape in (S, M, L)}

INT4 = Kind("int4", "4-bit weights, int8 activations", 4, 16, 8, "int8")
INT4_FLOAT = Kind("int4-float", "4-bit weights, float activations", 4, 16, 8, "fp32")
GGUF = Kind("gguf", "one Q4_0 file, read by all", 4.5, 0, 8.5, "int8")
INT8 = Kind("int8", "8-bit weights, int8 activations", 8, 0, 8, "int8")
FLOAT16 = Kind("float16", "16-bit weights", 16, 0, 16, "fp32")
KINDS = {kind.name: kind for kind in (INT4, INT4_FLOAT, GGUF, INT8, FLOAT16)}
