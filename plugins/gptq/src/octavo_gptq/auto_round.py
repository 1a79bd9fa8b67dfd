"""The settings of auto-round, which packs as GPTQ, AWQ or compressed-tensors and says so in `packing_format`.

Each function turns them into the words of the format in which the tensors lie. Source: auto-round
`auto_round/inference/{backend,convert_model}.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from octavo import CheckpointError, QuantSource
from octavo_gptq.rules import FUSED, Rule

METHODS = ("auto-round", "intel/auto-round")
_OWN = """packing_format backend data_type extra_config autoround_version act_bits act_group_size act_sym act_data_type
    act_dynamic block_name_to_quantize to_quant_block_names quant_block_list super_bits super_group_size"""
_COMPRESSED_TENSORS = """config_groups format global_compression_ratio ignore kv_cache_scheme quantization_status
    sparsity_config transform_config version"""
_UNQUANTISED = 9  # bits from which on a layer is left as it is: 16 and 32 are written


def packing(source: QuantSource) -> str:
    """The format whose tensors the folder holds: "gptq", "gptq_v2", "awq" or "compressed-tensors"."""
    named = source.raw.get("packing_format") or source.raw.get("backend") or "auto"
    parts = str(named).lower().split(":")
    words = set(re.split(r"[:_]", str(named).lower()))
    if "awq" in words:
        return "awq"
    if "compressor" in words or "config_groups" in source.raw:
        return "compressed-tensors"
    if "gptqmodel" in words or parts == ["auto_round"]:  # these two store zeros as they are
        return "gptq_v2"
    if words & {"gptq", "exllama", "exllamav2", "marlin"} or parts == ["auto"]:
        return "gptq"
    raise CheckpointError(
        f"auto-round: no reader for packing_format '{named}'",
        file=source.where,
        hint="export the model again with format auto_round:auto_gptq, auto_round:auto_awq or llm_compressor",
    )


def as_gptq(source: QuantSource) -> QuantSource:
    """The settings with `extra_config` as rules; names of layers are exact, all else is searched for within names.

    The name of a fused module means its members too.
    """
    _refuse_other_types(source, source.raw)
    rules: dict[str, Any] = {}
    for key, settings in _extra(source):
        if excludes := _unquantised(settings):
            own = {}
        else:
            _refuse_other_types(source, settings)
            own = {k: v for k, v in settings.items() if k not in _OWN.split()}
        name = Rule.key_for(key, excludes) if _is_name(key) else f"{'-' if excludes else '+'}:.*(?:{key})"
        for fused, members in FUSED.items():  # the members are what files hold
            name = name.replace(fused, f"(?:{'|'.join((fused, *members))})")
        rules[name] = own
    exact = {key: value for key, value in rules.items() if key[2:3] == "^"}
    raw = {key: value for key, value in source.raw.items() if key not in _OWN.split()}
    if raw.get("checkpoint_format") not in (None, packing(source)):
        raise CheckpointError(
            "auto-round: checkpoint_format contradicts packing_format",
            file=source.where,
            expected=packing(source),
            found=repr(raw["checkpoint_format"]),
            hint="set quant_method to gptq if another tool wrote the file",
        )
    raw |= {"checkpoint_format": packing(source), "dynamic": exact | rules, "provider": "auto-round"}
    return QuantSource(raw | {"quant_method": "gptq"}, source.where)


def as_awq(source: QuantSource) -> QuantSource:
    """AWQ has one width; each layer's group size shows in its tensors, so it is left out where layers differ."""
    _refuse_other_types(source, source.raw)
    raw = source.raw
    groups = {_group_size(source, raw, "group_size")} if "group_size" in raw else set()
    for key, settings in _extra(source):
        if _unquantised(settings):
            continue
        _refuse_other_types(source, settings)
        if settings.get("bits", raw.get("bits")) != raw.get("bits"):
            raise CheckpointError(
                "auto-round: layers packed as AWQ have one width, extra_config gives them several",
                file=source.where,
                expected=f"bits {raw.get('bits')}",
                found=f"bits {settings['bits']} for '{key}'",
            )
        groups.add(_group_size(source, {**raw, **settings}, "group_size"))
    settings = {
        "quant_method": "awq",
        "bits": raw.get("bits"),
        "version": "gemm",
        "zero_point": not raw.get("sym", True),
    }
    if len(groups) == 1:
        settings["group_size"] = groups.pop()
    return QuantSource(settings, source.where)


def as_compressed_tensors(source: QuantSource) -> QuantSource:
    """The groups of compressed-tensors, one for each scheme; those of the settings themselves where they hold some."""
    raw = source.raw
    if "config_groups" in raw:
        words = {key: value for key, value in raw.items() if key in _COMPRESSED_TENSORS.split()}
        return QuantSource(words | {"quant_method": "compressed-tensors"}, source.where)
    ignore: list[str] = []
    groups = {"group_0": {"targets": ["Linear"], **_scheme(source, raw)}}
    for number, (key, settings) in enumerate(_extra(source), 1):
        target = key if _is_name(key) else f"re:.*(?:{key})"
        if _unquantised(settings):
            ignore.append(target)
        else:
            groups[f"group_{number}"] = {"targets": [target], **_scheme(source, {**raw, **settings})}
    settings = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ignore}
    return QuantSource(settings | {"quantization_status": "compressed"}, source.where)


def _scheme(source: QuantSource, raw: Mapping[str, Any]) -> dict[str, Any]:
    """How weights and inputs are quantised, in the words of compressed-tensors."""
    weights = _arguments(source, raw, "", {-1: "channel", 0: "tensor"})
    inputs = None
    if isinstance(bits := raw.get("act_bits"), int) and bits < _UNQUANTISED:
        inputs = _arguments(source, raw, "act_", {-1: "token", 0: "tensor"})
        inputs["dynamic"] = bool(raw.get("act_dynamic", True))
    return {"weights": weights, "input_activations": inputs}


def _arguments(
    source: QuantSource, raw: Mapping[str, Any], prefix: str, strategies: Mapping[int, str]
) -> dict[str, Any]:
    kind = str(raw.get(f"{prefix}data_type") or raw.get("data_type") or "int").lower()
    if kind not in ("int", "fp", "fp8", "fp8_e4m3"):
        raise _other_type(source, f"{prefix}data_type", kind)
    group = _group_size(source, raw, f"{prefix}group_size")
    arguments = {
        "num_bits": raw.get(f"{prefix}bits"),
        "type": "int" if kind == "int" else "float",
        "symmetric": bool(raw.get(f"{prefix}sym", True)),
        "strategy": strategies.get(group, "group"),
    }
    return arguments if group in strategies else arguments | {"group_size": group}


def _extra(source: QuantSource) -> Iterator[tuple[str, Mapping[str, Any]]]:
    extra = source.raw.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(value, Mapping) for value in extra.values()):
        raise CheckpointError(
            "auto-round: extra_config maps names of layers to settings", file=source.where, found=repr(extra)[:200]
        )
    return ((key, settings) for key, settings in extra.items() if settings)


def _group_size(source: QuantSource, raw: Mapping[str, Any], key: str) -> int:
    if not isinstance(value := raw.get(key, -1), int):
        raise CheckpointError(f"auto-round: cannot use setting '{key}'", file=source.where, found=repr(value)[:200])
    return value


def _unquantised(settings: Mapping[str, Any]) -> bool:
    bits = settings.get("bits")
    return isinstance(bits, int) and bits >= _UNQUANTISED


def _is_name(key: str) -> bool:
    """Whether a key of extra_config is a layer's full name, which the number of its block shows, not a pattern."""
    return key == "lm_head" or re.fullmatch(r"[\w-]+(?:\.[\w-]+)*\.\d+(?:\.[\w-]+)+", key) is not None


def _refuse_other_types(source: QuantSource, settings: Mapping[str, Any]) -> None:
    if (kind := str(settings.get("data_type") or "int").lower()) != "int":
        raise _other_type(source, "data_type", kind)
    if isinstance(bits := settings.get("act_bits"), int) and bits < _UNQUANTISED:
        raise _other_type(source, "act_bits", bits)


def _other_type(source: QuantSource, setting: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"auto-round: weights packed so are integers with floating inputs, not {setting} {value!r}",
        file=source.where,
        hint="export the model again as plain W4A16 or W8A16",
    )
