"""Tiny models in every format that is installed, and the float models with the same numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from convert_support import tensors_of
from safetensors.torch import save_file
from support import all_logits, registry

from octavo import LLM, ActivationSpec, EngineConfig, LayerFacts, LinearLayer, QuantConfig, Registry, WeightSpec
from octavo.model.checkpoint import open_checkpoint
from octavo.model.loader import stored_weight
from octavo.model.plan import ModelPlan, plan_model
from octavo.testing import tiny_config, tiny_model
from octavo.testing.models import float_tensors

PROMPT = [1, 5, 9, 60, 200, 33]
FLOAT = WeightSpec("float", (-1, -1))
WEIGHT_ONLY: Mapping[str, tuple[str, WeightSpec]] = {
    "awq": ("awq", WeightSpec("uint4", (1, 32), has_zeros=True)),
    "gptq": ("gptq", WeightSpec("uint4", (1, 32), has_zeros=True)),
    "gptq_ordered": ("gptq_v2", WeightSpec("uint4", (1, 32), has_zeros=True, act_order=True)),
    "gptq_3_bits": ("gptq_v2", WeightSpec("uint3", (1, 32), has_zeros=True)),
    "ct_packed": ("compressed-tensors", WeightSpec("uint4", (1, 32), has_zeros=True)),
    "ct_ordered": ("compressed-tensors", WeightSpec("uint4", (1, 32), has_zeros=True, act_order=True)),
    "ct_int8": ("compressed-tensors", WeightSpec("int8", (1, -1))),
}
QUANTISED_INPUTS: Mapping[str, tuple[str, WeightSpec]] = {
    "ct_tokens": ("compressed-tensors", WeightSpec("int8", (1, -1), activation=ActivationSpec("int8"))),
    "ct_static": (
        "compressed-tensors",
        WeightSpec("int8", (1, -1), activation=ActivationSpec("int8", "per_tensor", dynamic=False, symmetric=False)),
    ),
    "fp8": ("fp8", WeightSpec("fp8_e4m3", (-1, -1), activation=ActivationSpec("fp8_e4m3"))),
    "w8a8_int8": ("w8a8_int8", WeightSpec("int8", (1, -1), activation=ActivationSpec("int8"))),
}
FORMATS = {**WEIGHT_ONLY, **QUANTISED_INPUTS}


def format_of(target: str) -> type[QuantConfig]:
    """The format that writes `target`."""
    return next(kind for kind in registry().quant_configs.values() if target in kind.targets)


def model(
    folder: Path,
    name: str,
    skip: Sequence[str] = (),
    listed: bool = True,
    spec: WeightSpec | None = None,
    **options: Any,
) -> Path:
    """A tiny model in one of `FORMATS`; modules that match `skip` stay floats, which the settings say where `listed`.

    `options` go to `tiny_model`; `settings` among them are added to the format's own.
    """
    target, usual = FORMATS[name]
    spec = spec or usual
    architecture = options.pop("architecture", "LlamaForCausalLM")
    extra = options.pop("settings", {})
    kinds = {"dtype", "seed", "shards", "tie"}
    config = tiny_config(
        architecture,
        tie_word_embeddings=options.get("tie", False),
        **{key: value for key, value in options.items() if key not in kinds},
    )
    facts = {}
    for tensor, value in float_tensors(config, torch.Generator().manual_seed(0)).items():
        module, _, last = tensor.rpartition(".")
        if last == "weight" and value.dim() == 2 and not module.endswith("embed_tokens"):
            plain = module == "lm_head" or (listed and any(fnmatchcase(module, pattern) for pattern in skip))
            layer = LinearLayer(module, value.shape[1], value.shape[0])
            facts[layer] = LayerFacts(FLOAT if plain else spec, not spec.has_zeros, torch.float32)
    own = format_of(target).for_weights(target, facts)
    settings = {**own.settings(), **extra}
    return tiny_model(folder, architecture, quantize=(own, spec), settings=settings, skip=skip, **options)


def plan(folder: Path, **settings: Any) -> ModelPlan:
    config = EngineConfig(model=str(folder), **settings)
    found = registry()
    return plan_model(config, found, open_checkpoint(str(folder), found.checkpoint_readers))


def as_floats(folder: Path, out: Path) -> Path:
    """The same model as a float checkpoint: each weight as the format dequantises it."""
    made = plan(folder)
    out.mkdir()
    for file in folder.glob("*.json"):
        (out / file.name).write_text(file.read_text())
    (out / "model.safetensors.index.json").unlink(missing_ok=True)
    edit_config(out, quantization_config=None)
    layers = [layer for group in made.groups for layer in group.layers]
    tensors = {
        name: tensor
        for name, tensor in tensors_of(folder).items()
        if name.rpartition(".")[0] not in {layer.name for layer in layers}
    }
    for layer in layers:
        weight = stored_weight(made, layer)
        tensors[f"{layer.name}.weight"] = weight.dequantize()
        if weight.bias is not None:
            tensors[f"{layer.name}.bias"] = weight.bias
    save_file(tensors, out / "model.safetensors")
    return out


def edit_config(folder: Path, **values: Any) -> Path:
    """Changes keys of config.json; None takes one away."""
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def edit_settings(folder: Path, **values: Any) -> Path:
    """Changes keys of the quantization settings; None takes one away."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"] | values
    return edit_config(folder, quantization_config={k: v for k, v in settings.items() if v is not None})


def edit_tensors(folder: Path, remove: Sequence[str] = (), add: Mapping[str, torch.Tensor] | None = None) -> Path:
    """Takes tensors out of a folder's one file, and puts others in."""
    kept = {name: tensor for name, tensor in tensors_of(folder).items() if name not in remove}
    save_file({**kept, **(add or {})}, folder / "model.safetensors")
    return folder


def load(folder: Path, registry_: Registry | None = None, **settings: Any) -> LLM:
    settings = {"dtype": "float32", "num_blocks_override": 8, "disable_progress": True} | settings
    return LLM(str(folder), registry=registry_ or registry(), **settings)


def logits(folder: Path, **settings: Any) -> torch.Tensor:
    """(tokens, vocab_size) of a fixed prompt."""
    return all_logits(load(folder, **settings), PROMPT)


def kernels(llm: LLM) -> dict[str, str]:
    return {report.layer: report.kernel for report in llm.engine.model_info.linears}


def without_methods(*names: str) -> Registry:
    """What is installed, but for some linear methods."""
    found = registry()
    return replace(found, linear_methods=tuple(m for m in found.linear_methods if m.name not in names))
