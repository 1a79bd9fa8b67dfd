"""Which format a checkpoint is taken for, and what its wishes for the KV cache lead to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import ClassVar

import pytest
from kit_subjects import NibbleConfig

from octavo import CheckpointError, ConfigError, QuantConfig, QuantSource
from octavo.engine.kv_plan import choose_kv_format
from octavo.quant.detection import detect_format


class Bits(NibbleConfig):
    """A format whose settings two tools write under names of their own."""

    name = "bits"


class Tool(NibbleConfig):
    """Its own files under "tool", those of `Bits` where the packing says so."""

    name = "tool"
    aliases_of: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @classmethod
    def translate(cls, source: QuantSource) -> QuantSource | None:
        packing = source.raw.get("packing")
        if packing is None:
            return None
        return QuantSource({"quant_method": packing, "group_size": source.raw["group_size"]}, source.where)


FORMATS: dict[str, type[QuantConfig]] = {"bits": Bits, "tool": Tool}


def source(**settings: object) -> QuantSource:
    return QuantSource({"group_size": 16, **settings}, "config.json")


def test_a_tools_files_of_another_format_are_handed_over() -> None:
    assert type(detect_format([source(quant_method="tool")], {}, FORMATS, None)) is Tool
    found = detect_format([source(quant_method="tool", packing="bits")], {}, FORMATS, "bits")
    assert type(found) is Bits
    with pytest.raises(ConfigError, match="says 'tool', but the checkpoint's is 'bits'"):
        detect_format([source(quant_method="tool", packing="bits")], {}, FORMATS, "tool")
    with pytest.raises(CheckpointError, match="no installed plugin reads quantization format 'unknown'"):
        detect_format([source(quant_method="tool", packing="unknown")], {}, FORMATS, None)


def test_handed_over_settings_do_not_contradict_themselves(caplog: pytest.LogCaptureFixture) -> None:
    detect_format([source(quant_method="tool", packing="bits")], {}, FORMATS, None)
    assert not caplog.records


def test_a_float_model_may_be_about_to_be_quantised() -> None:
    with pytest.raises(ConfigError, match="not quantised"):
        detect_format([], {}, FORMATS, "bits")
    assert detect_format([], {}, FORMATS, "bits", float_too=True) is None
    with pytest.raises(ConfigError, match="says 'tool'"):
        detect_format([source(quant_method="bits")], {}, FORMATS, "tool", float_too=True)


def choose(name: str, stored: str | None, *more: str) -> str:
    from support import registry

    formats = dict(registry().kv_formats)
    formats |= {other: type("Other", (formats["float32"],), {"name": other}) for other in more}
    return choose_kv_format(name, formats, stored).name


def test_auto_follows_what_the_checkpoint_was_calibrated_for(caplog: pytest.LogCaptureFixture) -> None:
    assert choose("auto", None) == "auto"
    assert choose("auto", "fp9", "fp9") == "fp9"
    assert choose("float32", "fp9", "fp9") == "float32", "the user decides"
    with caplog.at_level(logging.WARNING):
        assert choose("auto", "fp8_none_stores_this") == "auto"
    assert "stays unquantised" in caplog.text


def test_q65_what_no_plugin_stores_is_refused_or_decided() -> None:
    with pytest.raises(ConfigError, match="asks for a KV cache in int9"):
        choose("auto", "int9")
    assert choose("bfloat16", "int9") == "bfloat16"
