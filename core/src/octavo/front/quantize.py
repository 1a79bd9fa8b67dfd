"""`octavo quantize --kv-scales-only`: calibrates the scales of an fp8 KV cache and writes them as compressed-tensors does.

Either a file of nothing but scales, which `--kv-scales` takes beside any checkpoint of the model; or a copy of the model whose
settings ask for the cache, which other engines read too. Either is written beside its place, read back, and renamed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from octavo.config import EngineConfig
from octavo.errors import CheckpointError, PluginError
from octavo.front.convert import check_free, check_space, copy_side_files
from octavo.front.kv_calibration import calibrate, default_text, kv_cache_scheme, read_text, span
from octavo.front.llm import registry_for
from octavo.model.checkpoint import Checkpoint, open_checkpoint
from octavo.model.kv_scale_file import read_kv_scale_file
from octavo.model.plan import ModelPlan
from octavo.model.shards import ShardWriter
from octavo.quant.kv_scales import (
    KV_SCALE_FILE,
    KVScales,
    kv_scale_names,
    kv_scale_tensors,
    read_kv_scales,
)

logger = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_METHOD = "compressed-tensors"


def quantize_kv(
    config: EngineConfig,
    destination: str,
    *,
    calibration: str | None,
    num_samples: int,
    max_length: int,
    seed: int,
    per_head: bool,
    max_shard_size: int,
) -> int:
    """Writes calibrated scales to a new .safetensors file or model folder; prints one line and returns the exit code.

    `calibration` names a text file; None: text that comes with Python. Raises ConfigError for a destination in use and for a
    text that is none, CheckpointError for a folder of a model whose settings cannot say that its cache is quantised.
    """
    start = time.monotonic()
    place = Path(destination).expanduser().resolve()
    check_free(place)
    text = default_text() if calibration is None else read_text(calibration)
    registry = registry_for(config)
    with closing(open_checkpoint(config.model, registry.checkpoint_readers)) as checkpoint:
        plan = ModelPlan.of(config, registry, checkpoint)
        modules = [plan.layer_names(index).attention for index in range(plan.config.num_layers)]
        as_folder = place.suffix != _SUFFIX
        settings = _folder_settings(checkpoint, per_head) if as_folder else {}
        if as_folder:
            check_space(place.parent, sum(info.num_bytes for info in checkpoint.tensors.values()))
        scales, num_tokens = calibrate(config, text, num_samples, max_length, seed, per_head)
        partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
        try:
            if as_folder:
                partial.mkdir()
                _write_folder(partial, checkpoint, settings, modules, scales, max_shard_size)
                _expect_same(_read_folder(partial, plan, modules), scales)
                if _METHOD not in registry.quant_configs:
                    logger.warning("no installed plugin reads %s: octavo itself cannot load the new folder", _METHOD)
            else:
                _write_file(partial, modules, scales)
                _expect_same(read_kv_scale_file(str(partial), modules, plan.config.kv_heads), scales)
            partial.rename(place)
        except OSError as error:
            if error.filename is not None:
                raise
            raise CheckpointError(f"cannot write: {error.strerror}", file=str(place)) from None
        finally:
            _remove(partial)
    source = "Python's help topics" if calibration is None else calibration
    use = "" if as_folder else f"; use them with --kv-cache-dtype fp8_e4m3 --kv-scales {destination}"
    print(
        f"{place}: scales for {len(modules)} layers, {span(scales)}, from {num_tokens:,} tokens of {source} "
        f"in {time.monotonic() - start:.1f} s{use}"
    )
    return 0


def _folder_settings(checkpoint: Checkpoint, per_head: bool) -> dict[str, Any]:
    """config.json that asks for the cache; raises CheckpointError where the quantisation it states has no word for that."""
    scheme = kv_cache_scheme(per_head)
    stated = checkpoint.config.get("quantization_config")
    sources = checkpoint.quant_sources
    if sources and (len(sources) > 1 or stated is None or stated.get("quant_method") != _METHOD):
        raise CheckpointError(
            "the settings of this quantised model cannot ask for a quantised KV cache as well",
            file=sources[0].where,
            expected=f"quant_method {_METHOD}, or no quantisation",
            found=sources[0].raw.get("quant_method"),
            hint=f"write a file instead, --out scales{_SUFFIX}, and serve with --kv-scales",
        )
    if not sources:
        stated = {
            "quant_method": _METHOD,
            "format": "dense",
            "quantization_status": "compressed",
            "config_groups": {},
            "ignore": [],
        }
    return {**checkpoint.config, "quantization_config": {**(stated or {}), "kv_cache_scheme": scheme}}


def _write_folder(
    folder: Path,
    checkpoint: Checkpoint,
    settings: dict[str, Any],
    modules: Sequence[str],
    scales: Sequence[KVScales],
    max_shard_size: int,
) -> None:
    """The model as it is, with the new scales in place of any old ones."""
    new = {
        name: tensor
        for module, one in zip(modules, scales, strict=True)
        for name, tensor in kv_scale_tensors(module, one).items()
    }
    old = {name for module in modules for name in kv_scale_names(module, checkpoint.tensors)}
    kept = [name for name in checkpoint.tensors if name not in old]
    with ShardWriter(folder, [*kept, *new], max_shard_size) as writer:
        for name in kept:
            writer.add(name, checkpoint.read(name))
        for name, tensor in new.items():
            writer.add(name, tensor)
        writer.finish()
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    copy_side_files(checkpoint, folder)


def _write_file(file: Path, modules: Sequence[str], scales: Sequence[KVScales]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for module, one in zip(modules, scales, strict=True):
        tensors |= kv_scale_tensors(module, one)
    file.write_bytes(save(tensors, metadata={"format": "pt"}))  # with the rights that new files have, unlike save_file


def _read_folder(folder: Path, plan: ModelPlan, modules: Sequence[str]) -> list[KVScales | None]:
    with closing(open_checkpoint(str(folder), plan.registry.checkpoint_readers)) as checkpoint:
        assert not checkpoint.json(KV_SCALE_FILE), "not among the files that are copied"
        return [read_kv_scales(module, plan.config.kv_heads, checkpoint.tensors, checkpoint.read) for module in modules]


def _expect_same(found: Sequence[KVScales | None], written: Sequence[KVScales]) -> None:
    for one, other in zip(found, written, strict=True):
        if one is None or not (torch.equal(one.k, other.k) and torch.equal(one.v, other.v)):
            raise PluginError("the written KV scales are read back as others; nothing was written")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
