"""Random models for the GPU benchmark: the shapes of 1B and 7B, written in seconds because nothing is drawn twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo.testing import tiny_config, tiny_tokenizer

SHAPES: dict[str, dict[str, Any]] = {
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "7B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


def write(folder: Path, shape: str, quantised: bool = False) -> Path:
    """A Llama of such a shape in bf16, its linears in 4 bits (AWQ's gemm layout, groups of 128) where `quantised`."""
    config = tiny_config(**SHAPES[shape], vocab_size=32_000, max_position_embeddings=32_768)
    config["torch_dtype"] = "bfloat16"
    if quantised:
        config["quantization_config"] = {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": 128,
            "zero_point": True,
        }
    tiny_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query, key = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    linears = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    weights = {
        name: _codes(*size) if quantised else {"weight": torch.randn(size, dtype=torch.bfloat16) * size[1] ** -0.5}
        for name, size in linears.items()
    }
    table = torch.randn(config["vocab_size"], hidden, dtype=torch.bfloat16)
    norm = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": table, "lm_head.weight": table * hidden**-0.5, "model.norm.weight": norm}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = norm.clone()
        for module, parts in weights.items():  # the same in every layer: speed does not depend on numbers
            tensors |= {f"{layer}.{module}.{suffix}": tensor.clone() for suffix, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _codes(outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)

    groups = inputs // 128
    scales = (torch.rand(groups, outputs) + 0.5) * inputs**-0.5 / 8
    return {
        "qweight": words(inputs, outputs // 8),
        "qzeros": words(groups, outputs // 8),
        "scales": scales.to(torch.float16),
    }
