"""What the tests of `octavo convert` share: models to convert, and comparisons of folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import all_logits, registry

from octavo import LLM, LayerFacts, LinearLayer, WeightSpec
from octavo.cli import main
from octavo.testing import tiny_config, tiny_model
from octavo.testing.models import float_tensors

TARGETS = sorted({name for kind in registry().quant_configs.values() for name in kind.targets})
ASYMMETRIC = WeightSpec("uint4", (1, 32), has_zeros=True)
HOLDING = ["awq", *sorted({"gptq", "gptq_v2", "compressed-tensors"} & set(TARGETS))]
"""Those that hold the numbers of AWQ."""
KINDS_OF_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PROMPT = [1, 5, 9, 60, 200, 33]


def needs(*targets: str) -> None:
    if missing := [target for target in targets if target not in TARGETS]:
        pytest.skip(f"no installed plugin writes {', '.join(missing)}")


def convert(source: Path, destination: Path, target: str, *options: str) -> Path:
    assert main(["convert", str(source), str(destination), "--to", target, *options]) == 0
    return destination


def quantised_model(
    folder: Path, target: str, spec: WeightSpec, sizes: Mapping[str, Any] | None = None, **options: Any
) -> Path:
    """A tiny model whose linears are rounded to `spec` and stored as `target`, but for the head."""
    kind = next(kind for kind in registry().quant_configs.values() if target in kind.targets)
    config = tiny_config(options.pop("architecture", "LlamaForCausalLM"), **(sizes or {}))
    tensors = float_tensors(config, torch.Generator().manual_seed(0))
    layers = {
        LinearLayer(name.removesuffix(".weight"), *reversed(tensor.shape)): LayerFacts(
            spec if name.endswith("_proj.weight") else WeightSpec("float", (-1, -1)), not spec.has_zeros, torch.float16
        )
        for name, tensor in tensors.items()
        if name.endswith(("_proj.weight", "lm_head.weight"))
    }
    settings = kind.for_weights(target, layers)
    return tiny_model(
        folder,
        config["architectures"][0],
        quantize=(settings, spec),
        settings=settings.settings(),
        **(sizes or {}),
        **options,
    )


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def expect_same_tensors(found: Path, expected: Path) -> None:
    mine, theirs = tensors_of(found), tensors_of(expected)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        kind = KINDS_OF_INTS[tensor.itemsize]
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name].view(kind), tensor.view(kind)), name


def logits(folder: Path) -> torch.Tensor:
    return all_logits(LLM(str(folder), registry=registry(), dtype="float32", num_blocks_override=64), PROMPT)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
