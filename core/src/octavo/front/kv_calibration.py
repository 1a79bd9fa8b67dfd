"""Calibration of the KV cache: the largest K and V that real text produces, taken where they are stored.

K is stored after its rotary embedding, so that is what is measured: the projection's own output can be smaller. The engine
that serves also computes here, chunked prefill and all; only the format that stores is another one, and it stores plainly.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.attention.backend import AttentionLayer, LayerKV
from octavo.attention.kv_format import KVGeometry, PlainKV
from octavo.config import EngineConfig
from octavo.engine.sampling_params import SamplingParams
from octavo.errors import ConfigError
from octavo.front.llm import LLM, registry_for
from octavo.front.tokenizer import Tokenizer
from octavo.model.loader import progress
from octavo.quant.kv_scales import KVScales

_LARGEST = 448.0  # of fp8 E4M3


class RecordingKV(PlainKV):
    """K and V as computed, and their largest magnitudes by layer and head: `largest` (num_layers, kv_heads) for "k" and "v"."""

    name = "recording"

    def __init__(self, geometry: KVGeometry) -> None:
        super().__init__(geometry)
        shape = (geometry.num_layers, geometry.kv_heads)
        self.largest = {side: torch.zeros(shape) for side in "kv"}

    def write(self, layer: AttentionLayer, kv: LayerKV, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        super().write(layer, kv, key, value, slot_mapping)
        for side, values in (("k", key), ("v", value)):
            row = self.largest[side][layer.index]
            torch.maximum(row, values.float().abs().amax((0, 2)).to(row.device), out=row)


def default_text() -> str:
    """English text that comes with Python: the topics of its built-in help."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError("this Python has no help topics to calibrate with; name a text file: --calibration") from None
    return "\n".join(topics.values())


def read_text(file: str, option: str = "--calibration") -> str:
    """A text file that an option names; raises ConfigError where it cannot be read as one."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {file}: cannot read the text: {error}") from None


def first_tokens(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer begins a prompt with: a token, or nothing."""
    first = tokenizer.hf_tokenizer.bos_token_id
    return [first] if first is not None and tokenizer.encode("a")[:1] == [first] else []


def samples(tokenizer: Tokenizer, text: str, num_samples: int, max_length: int, seed: int) -> list[list[int]]:
    """Pieces of the text of at most `max_length` tokens that do not overlap, drawn by `seed`, in the order of the text.

    Each begins with the token that the tokenizer begins a prompt with, if it does. Fewer where the text is short; raises
    ConfigError where it is empty.
    """
    begin = first_tokens(tokenizer)
    tokens = tokenizer.encode_plain(text)
    length = max_length - len(begin)
    starts = list(range(0, len(tokens), length))
    if len(starts) > 1 and starts[-1] + length > len(tokens):
        starts.pop()  # a rest
    if not tokens or length < 1:
        raise ConfigError(f"nothing to calibrate with: the text has {len(tokens)} tokens, --max-length is {max_length}")
    drawn = sorted(random.Random(seed).sample(starts, min(num_samples, len(starts))))
    return [begin + tokens[start : start + length] for start in drawn]


def calibrate(
    config: EngineConfig, text: str, num_samples: int, max_length: int, seed: int, per_head: bool
) -> tuple[list[KVScales], int]:
    """The scales of each layer, and how many tokens they come from.

    scale = largest magnitude / 448, for the whole tensor or for each KV head; 1 where all is zero. Raises ConfigError where
    the model does not compute finite K and V.
    """
    registry = registry_for(config)
    updates: dict[str, Any] = {
        "kv_cache_dtype": RecordingKV.name,
        "kv_cache_dtype_map": {},
        "kv_scales": None,
        "enable_prefix_caching": False,
        "max_num_seqs": 4,
        "distributed_executor_backend": "uni",
    }
    settings = config.model_copy(update=updates)
    llm = LLM(settings, registry=replace(registry, kv_formats={RecordingKV.name: RecordingKV}))
    length = min(max_length, llm.engine.model_info.max_model_len - 1)
    prompts = samples(llm.tokenizer, text, num_samples, length, seed)
    with progress("calibrating", len(prompts), config.disable_progress) as advance:
        for delta in llm.stream(
            [{"prompt_token_ids": ids} for ids in prompts], SamplingParams(max_tokens=1, temperature=0)
        ):
            if delta.finished:
                advance()
    (recorder,) = {kv_format for kv_format in llm.engine.executor.runner.kv.layout.formats}  # type: ignore[attr-defined]
    llm.shutdown()
    return kv_scales(recorder.largest, per_head), sum(map(len, prompts))


def kv_scales(largest: dict[str, Tensor], per_head: bool) -> list[KVScales]:
    """The scales of each layer from its largest K and V, (layers, kv_heads) by side; see `calibrate`."""
    for side, seen in largest.items():
        if bad := (~torch.isfinite(seen)).any(1).nonzero().flatten().tolist():
            raise ConfigError(
                f"calibration failed: {side.upper()} of layer {bad[0]} is NaN or infinite; try another --dtype"
            )
    scales = {}
    for side, seen in largest.items():
        amax = seen if per_head else seen.amax(1)
        scales[side] = torch.where(amax > 0, amax / _LARGEST, 1.0)
    return [KVScales(k, v) for k, v in zip(scales["k"], scales["v"], strict=True)]


def kv_cache_scheme(per_head: bool) -> dict[str, Any]:
    """How compressed-tensors' settings ask for an fp8 KV cache with calibrated scales."""
    strategy = "attn_head" if per_head else "tensor"
    return {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True}


def span(scales: Sequence[KVScales]) -> str:
    """What was found, in a few words: "K 0.02 ... 0.31, V 0.004 ... 0.1"."""
    sides = {"K": torch.stack([one.k for one in scales]), "V": torch.stack([one.v for one in scales])}
    return ", ".join(f"{side} {float(all_.min()):.3g} ... {float(all_.max()):.3g}" for side, all_ in sides.items())
