"""GGUF files of the same random weights, by the `gguf` package: Q4_0, Q8_0 and F16, for llama.cpp and for octavo.

As llama.cpp's own converter does, rows of Q and K are put in the order of its rotary embedding where the architecture is
"llama", norms and biases stay fp32, and embedding and head of a Q4_0 file have 8 bits. (llama-quantize gives the head of L
6.6 bits instead, for its size is a multiple of 256; that is 14 MB of 615.)
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.cpu.checkpoints import MAX_POSITION, ROPE_THETA, byte_letters, random, tensors, vocabulary, written
from benchmarks.cpu.shapes import Shape
from torch import Tensor

TYPES = ("Q4_0", "Q8_0", "F16")
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of modules in transformers, less "model.layers.N.", and in GGUF, less "blk.N."."""


def path(cache: Path, shape: Shape, kind: str) -> Path:
    return cache / f"{shape.name}-{kind}.gguf"


def make(cache: Path, shape: Shape, kind: str) -> Path:
    """The GGUF file of a type in TYPES; writes it where it is missing."""
    place = path(cache, shape, kind)
    return place if place.exists() else written(place, lambda partial: _write(partial, shape, kind))


def gguf_name(name: str) -> str:
    """ "model.layers.3.mlp.up_proj.weight" -> "blk.3.ffn_up.weight"."""
    module, _, suffix = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{suffix}"
    index, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{NAMES[rest]}.{suffix}"


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head, from halves (as transformers rotates them) to pairs (as llama.cpp's "llama" does)."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _write(place: Path, shape: Shape, kind: str) -> None:
    import gguf

    architecture = shape.architecture.removesuffix("ForCausalLM").lower()
    wanted, eight = gguf.GGMLQuantizationType[kind], gguf.GGMLQuantizationType.Q8_0
    plain = gguf.GGMLQuantizationType.F32
    writer = gguf.GGUFWriter(place, architecture)
    writer.add_name(f"{shape.name} of random weights")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(MAX_POSITION)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_tokenizer(writer, shape)
    for name, size in tensors(shape):
        value = random(shape, name, size)
        if architecture == "llama" and ".q_proj." in name:
            value = interleaved(value, shape.heads)
        if architecture == "llama" and ".k_proj." in name:
            value = interleaved(value, shape.kv_heads)
        outer = name.startswith(("model.embed_tokens", "lm_head"))
        stored = plain if len(size) == 1 else eight if kind == "Q4_0" and outer else wanted
        data = gguf.quants.quantize(value.contiguous().numpy(), stored)
        writer.add_tensor(gguf_name(name), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: object, shape: Shape) -> None:
    import gguf

    assert isinstance(writer, gguf.GGUFWriter)
    tokens, merges = vocabulary(shape)
    words = 1 + len(byte_letters()) + len(merges)
    kinds = [gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (words - 1)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED] * (len(tokens) - words)])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
