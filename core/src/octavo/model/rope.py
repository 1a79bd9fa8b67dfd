"""Rotary position embedding: the cosines and sines by which `FusedOps.rotate` turns queries and keys.

Formulas and their order of operations are those of Hugging Face's modeling_rope_utils.py, in fp32, so that results
agree to the last bits. RoPE: arXiv 2104.09864; NTK-aware stretching and YaRN: arXiv 2309.00071; "llama3": Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from octavo.attention.backend import AttentionBatch
from octavo.errors import ConfigError
from octavo.model.architectures import RopeConfig
from octavo.model.ops import FusedOps


class RotaryEmbedding(nn.Module):
    """cos and sin for the positions 0 ... `max_positions` - 1, from a table that stays where it is in memory.

    Kind "dynamic" has no table and no bound: its frequencies depend on a request's length. A token at position p is
    rotated for the length max(prompt length, p + 1), however its prompt was cut into chunks: what Hugging Face does
    when it prefills the whole prompt at once and then decodes.
    """

    cos: Tensor
    sin: Tensor
    exponents: Tensor

    def __init__(self, config: RopeConfig, max_positions: int, device: str = "cpu") -> None:
        super().__init__()
        self.config = config
        if config.needs_prompt_lens:
            self.register_buffer("exponents", _exponents(config).to(device))
            return
        if config.kind not in _STRETCHES:
            known = ", ".join([*_STRETCHES, "dynamic"])
            raise ConfigError(f"no rotary embedding of kind '{config.kind}'; there are: {known}")
        frequencies, magnitude = _STRETCHES[config.kind](config)
        angles = torch.arange(max_positions, device=device).float()[:, None] * frequencies.to(device)
        self.register_buffer("cos", angles.cos() * magnitude)
        self.register_buffer("sin", angles.sin() * magnitude)

    def forward(self, positions: Tensor, batch: AttentionBatch, ops: FusedOps) -> tuple[Tensor, Tensor]:
        """cos and sin, each (tokens, rotary_dim / 2) fp32, for positions (tokens,) int64 of a batch."""
        if not self.config.needs_prompt_lens:
            return ops.gather(self.cos, positions), ops.gather(self.sin, positions)
        angles = positions.float()[:, None] * self._dynamic_frequencies(positions, batch)
        return angles.cos(), angles.sin()

    def _dynamic_frequencies(self, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """A row of frequencies for each token, (tokens, rotary_dim / 2)."""
        config = self.config
        factor, original, dim = config.parameters["factor"], config.original_max_positions, config.rotary_dim
        prompt_lens = batch.prompt_lens.repeat_interleave(batch.query_start_loc.diff(), output_size=len(positions))
        lengths = torch.maximum(prompt_lens, positions + 1)
        growth = _power(factor * lengths / original - (factor - 1), torch.tensor(dim / (dim - 2)))
        # exactly 1, and no rounding error of it, for all lengths that need no stretching
        growth = torch.where(lengths > original, growth, 1.0)
        return 1.0 / _power((config.theta * growth)[:, None], self.exponents)


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    """base ** exponent, fp32. torch's own rounds otherwise in the last elements of a tensor, so a token's place would count."""
    return (base.double().log() * exponent.double()).exp().float()


def _exponents(config: RopeConfig) -> Tensor:
    return torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim


# --- frequencies (rotary_dim / 2,) and the factor on cos and sin, by kind


def _default(config: RopeConfig) -> tuple[Tensor, float]:
    return 1.0 / config.theta ** _exponents(config), 1.0


def _linear(config: RopeConfig) -> tuple[Tensor, float]:
    return _default(config)[0] / config.parameters["factor"], 1.0


def _llama3(config: RopeConfig) -> tuple[Tensor, float]:
    """Stretches wavelengths longer than a bound, keeps those shorter than another, and blends in between."""
    factor, low, high = (config.parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    frequencies = _default(config)[0]
    wavelengths = 2 * math.pi / frequencies
    blend = (config.original_max_positions / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = torch.where(wavelengths > config.original_max_positions / low, frequencies / factor, blended)
    return torch.where(wavelengths < config.original_max_positions / high, frequencies, stretched), 1.0


def _yarn(config: RopeConfig) -> tuple[Tensor, float]:
    """Stretches elements that turn fewer than `beta_slow` times over the trained length, keeps those of `beta_fast` up.

    Unless `attention_factor` is given, cos and sin grow by 0.1 log(factor) + 1, or, with `mscale` and `mscale_all_dim`,
    by the ratio of two such terms.
    """
    parameters, dim = config.parameters, config.rotary_dim
    factor = parameters["factor"]

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    def element_that_turns(times: float) -> float:
        return dim * math.log(config.original_max_positions / (times * 2 * math.pi)) / (2 * math.log(config.theta))

    first = element_that_turns(parameters.get("beta_fast") or 32)
    last = element_that_turns(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0.0  # a step, without dividing by zero
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    wavelengths = config.theta ** _exponents(config)
    frequencies = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept

    if (given := parameters.get("attention_factor")) is not None:
        return frequencies, given
    scale, scale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if scale and scale_all_dim:
        return frequencies, magnitude(scale) / magnitude(scale_all_dim)
    return frequencies, magnitude(1.0)


_STRETCHES: Mapping[str, Callable[[RopeConfig], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
