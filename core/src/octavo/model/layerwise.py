"""A decoder computed layer by layer over calibration sequences, each group of linears replaced before what reads its output.

One layer of float weights is in memory at a time. A layer is computed once: the input of a group is taken where it arises, and
what comes after sees the quantised group. The float model may be computed beside it, for methods that compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.attention.backend import AttentionBatch, AttentionLayer
from octavo.errors import ConfigError
from octavo.model.decoder import DecoderLayer, SeparateLinears
from octavo.model.loader import stored_vector, stored_weight
from octavo.model.ops import TorchOps
from octavo.model.plan import ModelPlan
from octavo.model.rope import RotaryEmbedding
from octavo.quant.activation import dequantize_inputs, quantize_inputs
from octavo.quant.calibration import InputStatistics, InputSums, SequenceSums, parallel_map
from octavo.quant.weight import FLOAT, LinearLayer, QuantizedWeight

ROLES = ("qkv", "o", "gate_up", "down")
_BATCH_TOKENS = 2048  # computed by one thread at once
_SAMPLE_ROWS = 2048


@dataclass(frozen=True, slots=True)
class Replacement:
    """What stands for one float linear: `weight` is of the input divided by `divisor` (in,), as it is where that is None."""

    weight: QuantizedWeight
    divisor: Tensor | None = None

    def effective(self) -> Tensor:
        """The float weight (out, in) of the undivided input, fp32."""
        weight = self.weight.dequantize()
        return weight if self.divisor is None else weight / self.divisor


class _Linear(nn.Module):
    """A linear of calibration: a plain product, its input quantised where the weight's spec wants that."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, replacement: Replacement, dtype: torch.dtype) -> None:
        super().__init__()
        self.replacement = replacement
        self.activation = replacement.weight.spec.activation
        weight = replacement.effective() if self.activation is None else replacement.weight.dequantize()
        bias = replacement.weight.bias
        self.register_buffer("weight", weight.to(dtype))
        self.register_buffer("bias", None if bias is None else bias.to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.activation is not None:
            made, divisor = self.replacement.weight, self.replacement.divisor
            x = x if divisor is None else x / divisor.to(x.dtype)
            codes = quantize_inputs(x, self.activation, made.input_scale, made.input_zero)
            x = dequantize_inputs(*codes, self.activation).to(x.dtype)
        return F.linear(x, self.weight, self.bias)


class _Sequences:
    """Attention of whole sequences of one length, without blocks; keeps the largest K and V of each head."""

    def __init__(self, length: int, largest: dict[str, Tensor] | None) -> None:
        self.length, self.largest = length, largest

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def by_sequence(x: Tensor, heads: int) -> Tensor:
            return x.reshape(-1, self.length, heads, layer.head_dim).transpose(1, 2)

        if self.largest is not None:
            for side, values in (("k", key), ("v", value)):
                self.largest[side] = torch.maximum(self.largest[side], values.float().abs().amax((0, 2)))
        queries = by_sequence(query, layer.heads)
        repeats = layer.heads // layer.kv_heads
        keys, values = (by_sequence(x, layer.kv_heads).repeat_interleave(repeats, 1) for x in (key, value))
        if layer.sliding_window is None and layer.soft_cap is None:
            out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=layer.scale)
        else:
            scores = (queries.float() @ keys.float().transpose(-1, -2)) * layer.scale
            if layer.soft_cap is not None:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            places = torch.arange(self.length, device=query.device)
            ahead = places - places[:, None]
            hidden = ahead > 0
            if layer.sliding_window is not None:
                hidden |= ahead <= -layer.sliding_window
            out = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(values.dtype) @ values
        return out.transpose(1, 2).flatten(0, 1)


class Activations:
    """Tensors by the number of their batch, in memory or, where `folder` is given, in files."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._kept: dict[int, Tensor] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def __setitem__(self, batch: int, tensor: Tensor) -> None:
        if self._folder is not None:
            file = self._folder / f"{batch}.bin"
            file.write_bytes(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self._kept[batch] = tensor

    def on(self, batch: int, device: str) -> Tensor:
        """One batch's tensor."""
        tensor = self._kept[batch]
        if self._folder is None:
            return tensor
        data = bytearray((self._folder / f"{batch}.bin").read_bytes())
        return torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape).to(device)


@dataclass(slots=True)
class _Stream:
    """One model on its way through the sequences: its current layer, and what it computed so far."""

    hidden: Activations
    inner: Activations  # the input of o, then of down
    layer: DecoderLayer | None = None


class LayerwiseModel:
    """The calibration run of one model. Layers come in order: `open_layer`, then for each role `collect` and `install`."""

    def __init__(
        self,
        plan: ModelPlan,
        token_ids: Tensor,
        *,
        quantised: bool,
        floating: bool,
        skip: int,
        folder: Path | None,
        keep_largest: bool = False,
    ) -> None:
        """token_ids (sequences, length) int64. `quantised`, `floating`: which of the two models to compute.

        The first `skip` tokens of each sequence are computed, and left out of the statistics. `folder`: where activations lie
        if not in memory.
        """
        self.plan, self.length, self.skip = plan, token_ids.shape[1], skip
        self.device = plan.registry.platform.device
        self.batches = torch.split(token_ids, max(1, _BATCH_TOKENS // self.length))
        self._every = max(1, token_ids.numel() // _SAMPLE_ROWS)
        self._ops = TorchOps()
        self._rope = RotaryEmbedding(plan.config.rope, self.length, self.device)
        self._streams: dict[str, _Stream] = {}
        for name, wanted in (("quantised", quantised), ("floating", floating)):
            if wanted:
                hidden, inner = (
                    Activations(None if folder is None else folder / f"{name}-{part}") for part in ("hidden", "inner")
                )
                self._streams[name] = _Stream(hidden, inner)
        self.keep_largest = keep_largest
        self._largest: list[dict[str, Tensor]] = []
        self._embed()

    def _embed(self) -> None:
        table = self._ops.embedding(stored_weight(self.plan, self.plan.embedding), self.plan.dtype)
        for number, ids in enumerate(self.batches):
            rows = table(ids.flatten()).to(self.device)
            for stream in self._streams.values():
                stream.hidden[number] = rows

    def open_layer(self, index: int) -> dict[LinearLayer, QuantizedWeight]:
        """Reads the float weights of a layer, which every stream computes with until they are replaced."""
        names = self.plan.layer_names(index)
        dtype = self.plan.dtype
        norms = {r: stored_vector(self.plan, name, size) for r, (name, size) in names.norms.items()}
        weights: dict[LinearLayer, QuantizedWeight] = {}
        parts: dict[str, Any] = {role: norm.to(self.device, dtype) for role, norm in norms.items()}
        for role, group in names.linears.items():
            weights |= {layer: self.float_weight(layer) for layer in group.layers}
            parts[role] = self._module([Replacement(weights[layer]) for layer in group.layers])
        for stream in self._streams.values():
            stream.layer = DecoderLayer(self.plan.config, index, self._ops, **parts)
        shape = self.plan.config.kv_heads
        self._largest = [{side: torch.zeros(shape, device=self.device) for side in "kv"} for _ in self.batches]
        return weights

    def float_weight(self, layer: LinearLayer) -> QuantizedWeight:
        """A layer's weight as floats (out, in) fp32, on the device."""
        stored = stored_weight(self.plan, layer)
        plain = QuantizedWeight(FLOAT, stored.dequantize(), bias=stored.bias)
        return plain.to(self.device)

    def norm(self, index: int, role: str) -> tuple[str, Tensor] | None:
        """The norm that makes the input of a role, as stored, and its tensor's name; None where a linear makes it."""
        name = {"qkv": "input_norm", "gate_up": "post_attention_norm"}.get(role)
        if name is None:
            return None
        tensor, size = self.plan.layer_names(index).norms[name]
        return tensor, stored_vector(self.plan, tensor, size)

    def collect(
        self, role: str, in_features: int, needs: Mapping[str, frozenset[str]], what: str
    ) -> dict[str, InputStatistics]:
        """Computes the input of a role in each stream; returns what `needs` asks for, by stream.

        Raises ConfigError that names `what` where an input is not finite.
        """
        return self._collect(lambda stream, number: self._input(stream, role, number), in_features, needs, what)

    def collect_head(self, norm: Tensor, needs: Mapping[str, frozenset[str]], what: str) -> dict[str, InputStatistics]:
        """The same for what the final `norm` (hidden_size,) gives, after the last layer."""
        weight, eps = norm.to(self.device, self.plan.dtype), self.plan.config.rms_norm_eps

        def normed(stream: _Stream, number: int) -> Tensor:
            return self._ops.rms_norm(stream.hidden.on(number, self.device), weight, eps)

        return self._collect(normed, len(norm), needs, what)

    def _collect(
        self,
        compute: Callable[[_Stream, int], Tensor],
        in_features: int,
        needs: Mapping[str, frozenset[str]],
        what: str,
    ) -> dict[str, InputStatistics]:
        sums = {name: InputSums(in_features, need, _SAMPLE_ROWS, self.device) for name, need in needs.items()}

        def work(number: int) -> dict[str, SequenceSums]:
            inputs = {name: compute(stream, number) for name, stream in self._streams.items()}
            kept = {name: self.counted(x) for name, x in inputs.items()}
            other = kept.get("floating")
            return {name: InputSums.terms(need, kept[name], other, self._every) for name, need in needs.items()}

        for terms in parallel_map(work, range(len(self.batches))):
            for name, part in terms.items():
                sums[name].add(part)
        found = {name: one.statistics() for name, one in sums.items()}
        for one in found.values():
            parts = [one.mean_abs, one.low, one.high, *(() if one.gram is None else (one.gram,))]
            if not all(bool(torch.isfinite(part).all()) for part in parts):
                raise ConfigError(
                    f"{what}: its calibration inputs are NaN or infinite; try another --dtype or --calibration text"
                )
        return found

    def counted(self, x: Tensor) -> Tensor:
        """The rows (tokens, in) that statistics are made of."""
        return x if self.skip == 0 else x.view(-1, self.length, x.shape[1])[:, self.skip :].flatten(0, 1)

    def install(self, role: str, replacements: Sequence[Replacement]) -> None:
        """What the quantised stream computes a role with from now on."""
        if (stream := self._streams.get("quantised")) is not None:
            setattr(self._layer(stream), role, self._module(replacements))

    def close_layer(self) -> dict[str, Tensor]:
        """Computes what is left of the layer, and lets go of it; returns the largest K and V (kv_heads,) by side."""

        def work(number: int) -> None:
            for stream in self._streams.values():
                hidden = stream.hidden.on(number, self.device)
                stream.hidden[number] = hidden + self._layer(stream).down(stream.inner.on(number, self.device))

        for _ in parallel_map(work, range(len(self.batches))):
            pass
        for stream in self._streams.values():
            stream.layer = None
        return {side: torch.stack([one[side] for one in self._largest]).amax(0) for side in "kv"}

    def hidden(self, stream: str) -> Iterator[Tensor]:
        """The residual stream of one model, batch by batch, (tokens, hidden_size)."""
        for number in range(len(self.batches)):
            yield self._streams[stream].hidden.on(number, self.device)

    @staticmethod
    def _layer(stream: _Stream) -> DecoderLayer:
        assert stream.layer is not None
        return stream.layer

    def _module(self, replacements: Sequence[Replacement]) -> nn.Module:
        if all(one.weight.spec.activation is None for one in replacements):
            plain = [QuantizedWeight(FLOAT, one.effective(), bias=one.weight.bias) for one in replacements]
            first, *others = plain
            return _Linear(Replacement(first.concat(others) if others else first), self.plan.dtype)
        return SeparateLinears([_Linear(one, self.plan.dtype) for one in replacements])

    def _input(self, stream: _Stream, role: str, number: int) -> Tensor:
        """The input of a role for one batch; keeps what the next role needs."""
        layer, eps = self._layer(stream), self.plan.config.rms_norm_eps
        hidden = stream.hidden.on(number, self.device)
        if role == "qkv":
            return self._ops.rms_norm(hidden, layer.input_norm, eps)
        if role == "o":
            qkv = layer.qkv(self._ops.rms_norm(hidden, layer.input_norm, eps))
            cos, sin = self._angles(number)
            counted = stream is self._streams.get("floating", stream) and self.keep_largest
            step = _Sequences(self.length, self._largest[number] if counted else None)
            stream.inner[number] = mixed = layer.attended(qkv, cos, sin, step)
            return mixed
        if role == "gate_up":
            hidden = hidden + layer.o(stream.inner.on(number, self.device))
            stream.hidden[number] = hidden
            return self._ops.rms_norm(hidden, layer.post_attention_norm, eps)
        gate_up = layer.gate_up(self._ops.rms_norm(hidden, layer.post_attention_norm, eps))
        stream.inner[number] = gated = layer.gated(gate_up)
        return gated

    def _angles(self, number: int) -> tuple[Tensor, Tensor]:
        count = len(self.batches[number])
        positions = torch.arange(self.length, device=self.device).repeat(count)
        starts = torch.arange(count + 1, device=self.device, dtype=torch.int32) * self.length
        lengths = torch.full((count,), self.length, device=self.device, dtype=torch.int32)
        empty = torch.zeros((count, 0), dtype=torch.int32, device=self.device)
        lists = [self.length] * count
        batch = AttentionBatch(starts, lengths, empty, empty.flatten().long(), lengths, lists, lists, 1)
        cos, sin = self._rope(positions, batch, self._ops)
        return cos, sin


def producers(plan: ModelPlan, role: str) -> Tensor | None:
    """By channel of a role's input, which number its producer makes it of, see `CalibratedGroup.producers`."""
    config = plan.config
    if role in ("qkv", "gate_up"):
        return torch.arange(config.hidden_size)
    if role == "down":
        return torch.arange(config.intermediate_size)
    repeats = config.heads // config.kv_heads
    rows = torch.arange(config.kv_heads * config.head_dim).view(config.kv_heads, 1, config.head_dim)
    return rows.expand(config.kv_heads, repeats, config.head_dim).reshape(-1)


def divide_rows(weight: QuantizedWeight, divisor: Tensor) -> QuantizedWeight:
    """The weight whose outputs are divided by `divisor` (out,): only scales, or floats, and the bias change."""
    column = divisor[:, None]
    bias = None if weight.bias is None else (weight.bias.float() / divisor).to(weight.bias.dtype)
    if weight.scales is None:
        return replace(weight, codes=(weight.codes.float() / column).to(weight.codes.dtype), bias=bias)
    return replace(weight, scales=(weight.scales.float() / column).to(weight.scales.dtype), bias=bias)
