"""Checkpoints of random weights, made once: float16, GPTQ, AWQ, compressed-tensors W8A8, and a tokenizer for all of them.

All formats of a shape are rounded from the same numbers, each tensor drawn with a seed of its own name. The quantised ones are
written by octavo's own formats. A folder that exists is complete: it is written beside its place and renamed.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.cpu.shapes import Shape
from safetensors.torch import save_file
from torch import Tensor

from octavo import ActivationSpec, LayerFacts, LinearLayer, Platform, WeightSpec, discover, round_to_nearest

MAX_POSITION = 8192
ROPE_THETA = 10_000.0
FORMATS = ("float16", "gptq", "awq", "w8a8")


def folder(cache: Path, shape: Shape, name: str) -> Path:
    """Where a checkpoint is, whether or not it has been made."""
    return cache / f"{shape.name}-{name}"


def make(cache: Path, shape: Shape, name: str) -> Path:
    """The checkpoint `name` (one of FORMATS) of a shape; writes it where it is missing."""
    place = folder(cache, shape, name)
    return place if place.exists() else written(place, lambda partial: _write(partial, shape, name))


def written(place: Path, write: Callable[[Path], object]) -> Path:
    """Lets `write` fill a folder, or a file, that takes its place only when it is complete."""
    print(f"making {place}", flush=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.unlink(missing_ok=True)
    write(partial)
    partial.rename(place)
    return place


def random(shape: Shape, name: str, size: tuple[int, ...]) -> Tensor:
    """A tensor in fp32, the same in every run: norms are ones, the rest is normal with deviation 0.02, rounded to fp16."""
    if name.endswith("norm.weight"):
        return torch.ones(size)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{shape.name} {name}".encode()))
    return (torch.randn(size, generator=generator) * 0.02).half().float()


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """All tensors of a model by their names in transformers, with their sizes, linears' weights as "....weight"."""
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for index in range(shape.layers):
        prefix = f"model.layers.{index}."
        yield f"{prefix}input_layernorm.weight", (shape.hidden,)
        for name, size in shape.linears(index).items():
            yield f"{name}.weight", size
            if shape.qkv_bias and name.endswith(("q_proj", "k_proj", "v_proj")):
                yield f"{name}.bias", size[:1]
        yield f"{prefix}post_attention_layernorm.weight", (shape.hidden,)
    yield "model.norm.weight", (shape.hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab, shape.hidden)


def config(shape: Shape) -> dict[str, Any]:
    """config.json of the float checkpoint."""
    return {
        "architectures": [shape.architecture],
        "model_type": shape.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-5,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "float16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def spec(shape: Shape, name: str) -> WeightSpec | None:
    """What the numbers of a checkpoint's linears mean; None for floats."""
    if name == "float16":
        return None
    if name == "w8a8":
        return WeightSpec("int8", (1, -1), activation=ActivationSpec("int8", "per_token", dynamic=True))
    return WeightSpec("uint4", (1, shape.group_size), has_zeros=True)


def _write(place: Path, shape: Shape, name: str) -> None:
    place.mkdir()
    settings, wanted = config(shape), spec(shape, name)
    out: dict[str, Tensor] = {}
    linears = {layer: size for index in range(shape.layers) for layer, size in shape.linears(index).items()}
    if wanted is None:
        out = {tensor: random(shape, tensor, size).half() for tensor, size in tensors(shape)}
    else:
        target = "compressed-tensors" if name == "w8a8" else name
        scale_dtype = torch.float32 if name == "w8a8" else torch.float16
        rounded = replace(wanted, has_zeros=name == "awq")  # GPTQ is symmetric, though it stores zeros
        kinds = discover(Platform.detect("cpu")).quant_configs.values()
        kind = next((kind for kind in kinds if target in kind.targets), None)
        if kind is None:
            raise SystemExit(f"no installed plugin writes {target}: install plugins/{name}")
        facts = {
            LinearLayer(layer, size[1], size[0]): LayerFacts(wanted, name != "awq", scale_dtype)
            for layer, size in linears.items()
        }
        written_by = kind.for_weights(target, facts)
        settings["quantization_config"] = written_by.settings()
        for tensor, size in tensors(shape):
            layer = tensor.rpartition(".")[0]
            value = random(shape, tensor, size)
            if layer not in linears or tensor.endswith(".bias"):
                out[tensor] = value.half()
                continue
            weight = round_to_nearest(value, rounded)
            assert weight.scales is not None
            weight = replace(weight, scales=weight.scales.to(scale_dtype))
            stored = written_by.serialise(LinearLayer(layer, size[1], size[0]), weight)
            out |= {f"{layer}.{suffix}": part.contiguous() for suffix, part in stored.items()}
    save_file(out, place / "model.safetensors", metadata={"format": "pt"})
    (place / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    write_tokenizer(place, shape)


# --- a tokenizer


def byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def vocabulary(shape: Shape) -> tuple[list[str], list[tuple[str, str]]]:
    """(tokens, merges) of a byte-level BPE: an end token, all bytes, all pairs of small letters, and fillers up to the size."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    merges = [(first, second) for first in letters for second in letters]
    tokens = ["<|endoftext|>", *byte_letters(), *map("".join, merges)]
    return [*tokens, *(f"<|unused{i}|>" for i in range(shape.vocab - len(tokens)))], merges


def write_tokenizer(place: Path, shape: Shape) -> None:
    """tokenizer.json and its settings, for transformers and whoever reads the same files."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, merges = vocabulary(shape)
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tokens[0], special=True)])
    tokenizer.save(str(place / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[0], "model_max_length": MAX_POSITION}
    (place / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
