"""The one decoder: a llama-like transformer over paged KV, for every family that a `DecoderConfig` can describe.

Modules are built from weights that are already loaded, so nothing uninitialised can ever compute; loading is none of
this file's business. What a step needs is an argument, and nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from octavo.attention.backend import AttentionLayer
from octavo.attention.kv_format import AttentionStep
from octavo.model.architectures import DecoderConfig
from octavo.model.ops import FusedOps
from octavo.model.rope import RotaryEmbedding


def attention_layers(config: DecoderConfig) -> tuple[AttentionLayer, ...]:
    """The constants of every layer's attention, known before any weight is loaded."""
    windows = config.sliding_windows or (None,) * config.num_layers
    return tuple(
        AttentionLayer(index, config.heads, config.kv_heads, config.head_dim, config.head_dim**-0.5, window)
        for index, window in enumerate(windows)
    )


class Attending(Protocol):
    """What a layer needs of a step."""

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (tokens, heads, head_dim), key and value (tokens, kv_heads, head_dim) -> (tokens, heads, head_dim)."""


class SeparateLinears(nn.Module):
    """A group such as q|k|v whose members could not become one weight: computes each, then joins the outputs."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        """x (tokens, in_features) -> (tokens, sum of the members' out_features)."""
        return torch.cat([member(x) for member in self.members], dim=-1)


class DecoderLayer(nn.Module):
    """Attention and gated MLP, each behind a norm and added to the residual stream.

    `input_norm`, `post_attention_norm` (hidden_size,); `q_norm`, `k_norm` (head_dim,) or none. `qkv` maps
    hidden_size to q|k|v and `gate_up` to gate|up, joined along the last dimension. `activation_scale`
    (intermediate_size,) divides the input of `down`, where a format has moved that factor into the weight of `down`
    (AWQ's ScaledActivation).
    """

    input_norm: Tensor
    post_attention_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    activation_scale: Tensor | None

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        ops: FusedOps,
        *,
        input_norm: Tensor,
        post_attention_norm: Tensor,
        qkv: nn.Module,
        o: nn.Module,
        gate_up: nn.Module,
        down: nn.Module,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        activation_scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.attention = attention_layers(config)[index]
        self.qkv, self.o, self.gate_up, self.down = qkv, o, gate_up, down
        self.register_buffer("input_norm", input_norm)
        self.register_buffer("post_attention_norm", post_attention_norm)
        self.register_buffer("q_norm", q_norm)
        self.register_buffer("k_norm", k_norm)
        self.register_buffer("activation_scale", activation_scale)

    def forward(
        self, update: Tensor | None, residual: Tensor, cos: Tensor, sin: Tensor, step: Attending
    ) -> tuple[Tensor, Tensor]:
        """(update, residual), each (tokens, hidden_size), from the layer before, whose sum is the stream -> the same.

        `update` is None in the first layer. The sum is left to the next norm, as kernels do both in one pass.
        """
        eps = self.config.rms_norm_eps
        x, residual = _add_norm(self.ops, update, residual, self.input_norm, eps)
        update = self.o(self.attended(self.qkv(x), cos, sin, step))
        x, residual = _add_norm(self.ops, update, residual, self.post_attention_norm, eps)
        return self.down(self.gated(self.gate_up(x))), residual

    def attended(self, qkv: Tensor, cos: Tensor, sin: Tensor, step: Attending) -> Tensor:
        """The input of `o` (tokens, heads * head_dim), from the output of `qkv`."""
        heads, kv_heads, head_dim = self.config.heads, self.config.kv_heads, self.config.head_dim
        qkv = qkv.view(-1, heads + 2 * kv_heads, head_dim)
        query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if self.q_norm is not None:
            query = self.ops.rms_norm(query, self.q_norm, self.config.rms_norm_eps)
        if self.k_norm is not None:
            key = self.ops.rms_norm(key, self.k_norm, self.config.rms_norm_eps)
        query, key = self.ops.rotate(query, cos, sin), self.ops.rotate(key, cos, sin)
        return step.attend(self.attention, query, key, value).flatten(1)

    def gated(self, gate_up: Tensor) -> Tensor:
        """The input of `down` (tokens, intermediate_size), from the output of `gate_up`."""
        return self.ops.gated(gate_up, self.config.activation, self.activation_scale)


def _add_norm(
    ops: FusedOps, update: Tensor | None, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm of the stream, the stream) after `update`, which is None where nothing was added yet."""
    if update is None:
        return ops.rms_norm(residual, weight, eps), residual
    return ops.add_rms_norm(update, residual, weight, eps)


class Decoder(nn.Module):
    """A whole model, from token ids to logits.

    `embedding` maps ids to rows of hidden_size; `final_norm` (hidden_size,); `head` maps hidden_size to vocab_size.
    """

    final_norm: Tensor

    def __init__(
        self,
        config: DecoderConfig,
        embedding: nn.Module,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        head: nn.Module,
        ops: FusedOps,
        rope: RotaryEmbedding,
    ) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.embedding, self.rope, self.head = embedding, rope, head
        self.layers = nn.ModuleList(layers)
        self.register_buffer("final_norm", final_norm)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """The constants of every layer's attention."""
        return attention_layers(self.config)

    def forward(
        self, token_ids: Tensor, positions: Tensor, step: AttentionStep, seen: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """token_ids and positions (tokens,) int64 -> the last hidden state (tokens, hidden_size).

        Writes the tokens' K and V into the blocks of `step`. `seen` is shown the stream (tokens, hidden_size) after each layer.
        """
        cos, sin = self.rope(positions, step.batch, self.ops)
        update, residual = None, self.embedding(token_ids)
        for layer in self.layers:
            update, residual = layer(update, residual, cos, sin, step)
            if seen is not None:
                seen(update + residual)
        return _add_norm(self.ops, update, residual, self.final_norm, self.config.rms_norm_eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (rows, hidden_size) -> (rows, vocab_size) fp32."""
        logits: Tensor = self.head(hidden).float()
        return logits
