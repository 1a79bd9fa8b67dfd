"""A file of calibrated KV scales beside a model (`--kv-scales FILE`): its tensors or numbers, all of them understood.

Either safetensors, with the names that a checkpoint of the model could hold, in any spelling; a whole checkpoint's file will
do, its weights are passed over. Or JSON, as vLLM up to 0.6 took it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from octavo.errors import CheckpointError, ConfigError
from octavo.model.checkpoint import SafetensorsReader
from octavo.quant.kv_scales import KVScales, complete_kv_scales, kv_scale_names, read_kv_scales, scales_from_file

_WEIGHTS = ("weight", "bias")


def read_kv_scale_file(source: str, modules: Sequence[str], kv_heads: int) -> tuple[KVScales, ...]:
    """The scales of each attention module, in order; raises ConfigError for no such file, CheckpointError for its contents.

    A layer without scales, a scale that belongs to no layer, and a name that is not understood are errors.
    """
    path = Path(source).expanduser()
    if not path.is_file():
        raise ConfigError(f"--kv-scales {source}: no such file; 'unit' alone means a scale of 1")
    scales = _from_json(path, len(modules)) if path.suffix == ".json" else _from_tensors(path, modules, kv_heads)
    if len(scales) < len(modules):
        raise CheckpointError("the file holds no scales of K and V", file=str(path), expected=f"{modules[0]}.k_scale")
    return scales


def _from_json(path: Path, num_layers: int) -> tuple[KVScales, ...]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read the file as JSON: {error}", file=str(path)) from None
    if not isinstance(content, dict):
        raise CheckpointError("expected a JSON object", file=str(path), found=type(content).__name__)
    scales = scales_from_file(content, num_layers, str(path))
    found = tuple(one for one in scales if one is not None)
    if found and len(found) < num_layers:
        raise CheckpointError(
            "only some layers have KV scales",
            file=str(path),
            expected=f"scales of all {num_layers} layers",
            found=f"none for layer {scales.index(None)}",
        )
    return found


def _from_tensors(path: Path, modules: Sequence[str], kv_heads: int) -> tuple[KVScales, ...]:
    with closing(_OneFile(path)) as file:
        known = {name for module in modules for name in kv_scale_names(module, file.tensors)}
        strange = [name for name in file.tensors if name not in known and name.rpartition(".")[2] not in _WEIGHTS]
        if strange:
            raise CheckpointError(
                "a tensor is no KV scale of a layer of the model",
                file=str(path),
                tensor=strange[0],
                expected=f"names such as {modules[0]}.k_scale, for {len(modules)} layers",
            )
        found = [read_kv_scales(module, kv_heads, file.tensors, file.read) for module in modules]
        scales = complete_kv_scales(modules, found, file.tensors)
        return tuple(KVScales(one.k.clone(), one.v.clone()) for one in scales)  # not a view of the mapped file


class _OneFile(SafetensorsReader):
    """One file, under whatever name."""

    def _shards(self, file: Path) -> tuple[list[Path], None]:
        return [file], None
