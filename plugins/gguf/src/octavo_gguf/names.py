"""Between GGUF's names of tensors and Hugging Face's, by the tables of the `gguf` package."""

from __future__ import annotations

import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map

PLAIN_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
    GGMLQuantizationType.I8: torch.int8,
    GGMLQuantizationType.I16: torch.int16,
    GGMLQuantizationType.I32: torch.int32,
    GGMLQuantizationType.I64: torch.int64,
}
"""Types that hold one number an element, as torch has them. All others are blocks."""

ARCHITECTURES = {
    "llama": (MODEL_ARCH.LLAMA, "LlamaForCausalLM"),
    "qwen2": (MODEL_ARCH.QWEN2, "Qwen2ForCausalLM"),
    "qwen3": (MODEL_ARCH.QWEN3, "Qwen3ForCausalLM"),
}
"""What is read, by `general.architecture`: the package's name and Hugging Face's."""

PERMUTED = ("llama",)
"""Architectures for which llama.cpp's converter reorders the rows of q and k, weight and bias."""

_OUTSIDE = ("model.embed_tokens", "model.norm", "lm_head")
_IN_LAYER = (
    "input_layernorm",
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    "post_attention_layernorm",
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def module_names(architecture: str, num_layers: int) -> dict[str, str]:
    """Hugging Face's module by GGUF's: "blk.0.attn_q" is "model.layers.0.self_attn.q_proj"."""
    table = get_tensor_name_map(ARCHITECTURES[architecture][0], num_layers)
    layers = [f"model.layers.{index}.{name}" for index in range(num_layers) for name in _IN_LAYER]
    found = {table.get_name(name): name for name in (*_OUTSIDE, *layers)}
    return {ours: theirs for ours, theirs in found.items() if ours is not None}
