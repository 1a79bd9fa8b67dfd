"""Tiny models in Hugging Face layout, written in milliseconds: what tests load instead of a download.

Weights are random but chosen so that greedy outputs wander through the vocabulary. The tokenizer has one token for each byte
value, whose id is that value, so that every character beyond ASCII is cut by a token border.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from octavo.quant.config import QuantConfig
from octavo.quant.weight import LinearLayer, QuantizedWeight, WeightSpec
from octavo.testing.weights import quantise

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
"""Ids 256, 257 and 258. `<|im_end|>` ends a turn, and the output."""
IM_START, IM_END, END_OF_TEXT = 256, 257, 258

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def tiny_tokenizer(folder: Path | None = None, words: Sequence[str] = ()) -> Tokenizer:
    """A byte-level tokenizer without merges: ids 0...255 are the bytes, then the specials, then `words`.

    `words` are tokens that only decoding uses: text is never encoded to them. With `folder`, writes tokenizer.json and
    tokenizer_config.json there.
    """
    names = _byte_names()
    vocabulary = {names[byte]: byte for byte in range(256)}
    vocabulary |= {token: 256 + number for number, token in enumerate(SPECIAL_TOKENS)}
    for word in words:
        vocabulary["".join(names[byte] for byte in word.encode())] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 512,
            "chat_template": CHAT_TEMPLATE,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return tokenizer


def _byte_names() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies (the table of GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def tiny_config(architecture: str = "LlamaForCausalLM", **overrides: Any) -> dict[str, Any]:
    """config.json of a model of one of the four families: 2 layers, hidden size 64, 4 heads on 2 KV heads, MLP of 128.

    All sizes are multiples of 32, so that every format can pack them. `overrides` replace any key.
    """
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": _MODEL_TYPES[architecture],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 288,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
    }
    if architecture == "MistralForCausalLM":
        config["sliding_window"] = None
    return config | overrides


def tiny_model(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    quantize: tuple[QuantConfig, WeightSpec] | None = None,
    settings: Mapping[str, Any] | None = None,
    skip: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tie: bool = False,
    shards: int = 1,
    **overrides: Any,
) -> Path:
    """Writes a complete model folder: config.json, tokenizer and random weights, the same for the same seed.

    `quantize` rounds every linear of the decoder layers to a spec and stores it in a format, but for those whose name matches
    a pattern in `skip`; `settings` is written as `quantization_config`. `tie` leaves out the head. `overrides` go to
    `tiny_config`. Returns the folder.
    """
    config = tiny_config(architecture, tie_word_embeddings=tie, **overrides)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    if settings is not None:
        config["quantization_config"] = dict(settings)
    tiny_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: tensor.to(dtype) for name, tensor in float_tensors(config, generator).items()}
    if quantize is not None:
        for module in [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]:
            if not any(fnmatchcase(module, pattern) for pattern in skip):
                plain, bias = tensors.pop(f"{module}.weight"), tensors.pop(f"{module}.bias", None)
                layer = LinearLayer(module, plain.shape[1], plain.shape[0])
                weight = replace(_quantised(plain, quantize[1], generator), bias=bias)
                stored = quantize[0].serialise(layer, weight)
                tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in stored.items()}
    _save(folder, tensors, shards)
    return folder


def _quantised(weight: Tensor, spec: WeightSpec, generator: torch.Generator) -> QuantizedWeight:
    rounded = quantise(weight.float(), spec, generator)
    if spec.activation is None or spec.activation.dynamic:
        return rounded
    largest = 127.0 if spec.activation.code == "int8" else 448.0
    return replace(
        rounded,
        input_scale=torch.tensor([4 / largest]),
        input_zero=None if spec.activation.symmetric else torch.tensor([0.0]),
    )


def float_tensors(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Random fp32 weights of a model, by their names in the checkpoint."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    qwen2, qwen3 = (config["model_type"] == family for family in ("qwen2", "qwen3"))
    tensors: dict[str, Tensor] = {}

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def linear(name: str, out_features: int, in_features: int, bias: bool) -> None:
        tensors[f"{name}.weight"] = normal(out_features, in_features) * 1.5 * in_features**-0.5
        if bias:
            tensors[f"{name}.bias"] = normal(out_features) * 0.3

    def norm(name: str, size: int, around: float = 1.0) -> None:
        tensors[f"{name}.weight"] = around + 0.1 * normal(size)

    tensors["model.embed_tokens.weight"] = normal(vocab, hidden) * 0.15
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        bias = bool(config.get("attention_bias"))
        norm(f"{layer}.input_layernorm", hidden)
        for name, size in (("q", query), ("k", key), ("v", key)):
            linear(f"{layer}.self_attn.{name}_proj", size, hidden, bias or qwen2)
        if qwen3:
            norm(f"{layer}.self_attn.q_norm", config["head_dim"], 2.0)
            norm(f"{layer}.self_attn.k_norm", config["head_dim"], 2.0)
        linear(f"{layer}.self_attn.o_proj", hidden, query, bias)
        norm(f"{layer}.post_attention_layernorm", hidden)
        for name in ("gate", "up"):
            linear(f"{layer}.mlp.{name}_proj", inner, hidden, bool(config.get("mlp_bias")))
        linear(f"{layer}.mlp.down_proj", hidden, inner, bool(config.get("mlp_bias")))
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(vocab, hidden) * 1.5 * hidden**-0.5
    return tensors


def _save(folder: Path, tensors: Mapping[str, Tensor], shards: int) -> None:
    """Writes model.safetensors, or `shards` files and their index."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
        return
    index: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        names = sorted(contiguous)[number::shards]
        save_file({name: contiguous[name] for name in names}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in contiguous.values())
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))
