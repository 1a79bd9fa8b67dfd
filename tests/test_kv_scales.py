"""Calibrated scales of the KV cache (V13, the loading half): every spelling is found, every bad value is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import registry
from torch import Tensor

from octavo import (
    LLM,
    CheckpointError,
    ConfigError,
    EngineConfig,
    LinearLayer,
    QuantConfig,
    QuantizedWeight,
    TensorInfo,
    WeightSpec,
)
from octavo.model.loader import LoadedModel
from octavo.testing import tiny_model
from octavo_awq.config import AWQConfig

LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")
SPELLINGS = [
    ("k_scale", "v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("qkqkv_proj.k_scale", "qkqkv_proj.v_scale"),
    ("k_cache.scale", "v_cache.scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("mla_attn.k_scale", "mla_attn.v_scale"),
]


def scaled(folder: Path, *tails: Mapping[str, Tensor | float]) -> Path:
    """A tiny model whose attention modules hold these tensors beside their weights: one mapping for each layer, or for all."""
    tiny_model(folder)
    return with_scales(folder, *tails)


def with_scales(folder: Path, *tails: Mapping[str, Tensor | float]) -> Path:
    stored = load_file(folder / "model.safetensors")
    for layer, content in zip(LAYERS, tails * 2 if len(tails) == 1 else tails, strict=True):
        stored |= {f"{layer}.{tail}": torch.as_tensor(value).clone() for tail, value in content.items()}
    save_file(stored, folder / "model.safetensors")
    return folder


def load(folder: Path, **settings: object) -> LoadedModel:
    llm = LLM(str(folder), registry=registry(), num_blocks_override=8, **settings)
    return llm.engine.executor.runner.loaded


def test_v13_no_scales_is_no_finding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(tiny_model(tmp_path)).kv_scales == ()
    assert "KV" not in "".join(r.getMessage() for r in caplog.records if r.levelname == "WARNING")


@pytest.mark.parametrize(("k", "v"), SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_v13_every_spelling_takes_effect(tmp_path: Path, k: str, v: str, dtype: torch.dtype) -> None:
    one = [{k: torch.tensor([0.5 + i], dtype=dtype), v: torch.tensor(0.25 + i, dtype=dtype)} for i in (0, 1)]
    found = load(scaled(tmp_path, *one)).kv_scales
    assert [(float(s.k), float(s.v)) for s in found] == [(0.5, 0.25), (1.5, 1.25)]
    assert all(t.dtype is torch.float32 and t.shape == () for s in found for t in (s.k, s.v))


def test_v13_scales_of_heads(tmp_path: Path) -> None:
    found = load(scaled(tmp_path, {"k_scale": torch.tensor([[[0.5]], [[2.0]]]), "v_scale": torch.tensor([3.0, 4.0])}))
    assert [(s.k.tolist(), s.v.tolist()) for s in found.kv_scales] == [([0.5, 2.0], [3.0, 4.0])] * 2


def test_v13_scales_under_a_nested_model(tmp_path: Path) -> None:
    scaled(tmp_path, {"k_scale": 0.5, "v_scale": 0.25})
    stored = load_file(tmp_path / "model.safetensors")
    nested = {n.replace("model.", "model.language_model.", 1): t for n, t in stored.items()}
    save_file(nested, tmp_path / "model.safetensors")
    assert [float(s.k) for s in load(tmp_path).kv_scales] == [0.5, 0.5]


@pytest.mark.parametrize("value", [0.0, -0.5, math.nan, math.inf])
@pytest.mark.parametrize("side", ["k", "v"])
def test_v13_bad_values_are_refused_by_name(tmp_path: Path, side: str, value: float) -> None:
    good, bad = {"k_scale": 0.5, "v_scale": 0.5}, {"k_scale": 0.5, "v_scale": 0.5, f"{side}_scale": value}
    with pytest.raises(CheckpointError, match="not a positive number") as caught:
        load(scaled(tmp_path, good, bad))
    assert all(part in str(caught.value) for part in (f"{LAYERS[1]}.{side}_scale", "model.safetensors", str(value)))
    assert load(tmp_path, ignore_tensors=("*.k_scale", "*.v_scale")).kv_scales == ()


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_v13_scales_that_are_no_floats_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """A header that calls the bits of 0.5 an integer would make a scale of 1,056,964,608."""
    with pytest.raises(CheckpointError, match=r"v_scale(.|\n)*a floating type") as caught:
        load(scaled(tmp_path, {"k_scale": 0.5, "v_scale": torch.ones(1, dtype=dtype)}))
    assert str(dtype) in str(caught.value)


def test_v13_one_bad_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.v_scale"):
        load(scaled(tmp_path, {"k_scale": 0.5, "v_scale": torch.tensor([0.5, 0.0])}))


def test_v13_shapes_that_fit_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="1 or 2 numbers"):
        load(scaled(tmp_path, {"k_scale": torch.ones(3), "v_scale": 0.5}))


def test_v13_only_some_layers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(scaled(tmp_path, {"k_scale": 0.5, "v_scale": 0.5}, {}))
    text = str(caught.value)
    assert all(part in text for part in ("only some layers", LAYERS[1], f"{LAYERS[0]}.k_scale"))
    assert "'*.k_scale,*.v_scale'" in text, "a hint of '*_scale' would leave out scales of weights too"


def test_v13_two_spellings_of_one_scale(tmp_path: Path) -> None:
    agreeing = {"k_scale": 0.5, "v_scale": 0.25, "k_proj.output_scale": torch.tensor([0.5])}
    assert [float(s.k) for s in load(scaled(tmp_path / "a", agreeing)).kv_scales] == [0.5, 0.5]
    with pytest.raises(CheckpointError, match=r"differ: .*\.k_scale and .*\.k_proj\.output_scale"):
        load(scaled(tmp_path / "b", agreeing | {"k_proj.output_scale": 0.75}))


@pytest.mark.parametrize("tail", ["key_scale", "k_proj.cache_scale", "cache.value_scales", "attn.k.zero_point"])
def test_v13_unknown_spellings_are_refused(tmp_path: Path, tail: str) -> None:
    with pytest.raises(CheckpointError, match="not used") as caught:
        load(scaled(tmp_path, {tail: 0.5}))
    assert f"{LAYERS[0]}.{tail}" in str(caught.value)
    assert load(tmp_path, ignore_tensors=(f"*.{tail}",)).kv_scales == ()


@pytest.mark.parametrize("wrong", [{"num_bits": 4}, {"dynamic": True}, {"symmetric": False}])
def test_v13_schemes_that_cannot_be_served(tmp_path: Path, wrong: dict[str, object]) -> None:
    if "compressed-tensors" not in registry().quant_configs:
        pytest.skip("no plugin for compressed-tensors is installed")
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False, **wrong}
    settings = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    folder = tiny_model(tmp_path, settings=settings)
    with pytest.raises((CheckpointError, ConfigError), match=r"(?i)kv"):
        load(with_scales(folder, {"k_scale": 0.5, "v_scale": 0.5}))


# --- the side file of vLLM up to 0.6


def side_file(folder: Path, *ranks: Mapping[str, object]) -> Path:
    content = {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": dict(enumerate(ranks))}}
    tiny_model(folder)
    (folder / "kv_cache_scales.json").write_text(json.dumps(content))
    return folder


def test_v13_the_side_file_takes_effect(tmp_path: Path) -> None:
    found = load(side_file(tmp_path / "one", {"0": 0.5, "1": 2})).kv_scales
    assert [(float(s.k), float(s.v)) for s in found] == [(0.5, 0.5), (2.0, 2.0)]
    same = load(side_file(tmp_path / "two", {"0": 0.5, "1": 2}, {"1": 2, "0": 0.5})).kv_scales
    assert [float(s.k) for s in same] == [0.5, 2.0]


def test_v13_tensors_count_before_the_side_file(tmp_path: Path) -> None:
    found = load(with_scales(side_file(tmp_path, {"0": 0.5, "1": 2}), {"k_scale": 4.0, "v_scale": 8.0})).kv_scales
    assert [(float(s.k), float(s.v)) for s in found] == [(4.0, 8.0)] * 2


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([{"0": 0.5}], "only some layers"),
        ([{"0": 0.5, "1": 0}], "not a positive number"),
        ([{"0": 0.5, "1": "high"}], "not a positive number"),
        ([{"0": 0.5, "1": True}], "not a positive number"),
        ([{"0": 0.5, "1": 0.5, "2": 0.5}], "does not have"),
        ([{"0": 0.5, "1": 0.5}, {"0": 0.5, "1": 0.25}], "ranks differ"),
        ([[0.5, 0.5]], "by rank and layer"),
    ],
)
def test_v13_side_files_that_are_wrong(tmp_path: Path, ranks: list[dict[str, object]], said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        load(side_file(tmp_path, *ranks))
    assert "kv_cache_scales.json" in str(caught.value)


# --- quirks of formats.md, by number


class _Calibrated(QuantConfig):
    """A format that changes no weight and wants an fp8 cache."""

    name = "calibrated"
    suffixes = ("weight", "bias")

    @property
    def kv_cache(self) -> str:
        return "fp8_e4m3"

    def spec_for(self, layer: LinearLayer, stored: Mapping[str, TensorInfo]) -> WeightSpec | None:
        return None

    def canonicalise(self, layer: LinearLayer, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        raise NotImplementedError

    def serialise(self, layer: LinearLayer, weight: QuantizedWeight) -> dict[str, Tensor]:
        raise NotImplementedError


def test_q60_missing_scales_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    installed = replace(registry(), quant_configs={"calibrated": _Calibrated})
    folder = tiny_model(tmp_path, settings={"quant_method": "calibrated"})
    LLM(str(folder), registry=installed, num_blocks_override=8)
    assert "no scales of K and V are stored" in caplog.text
    caplog.clear()
    LLM(str(with_scales(folder, {"k_scale": 0.5, "v_scale": 0.5})), registry=installed, num_blocks_override=8)
    assert "no scales of K and V are stored" not in caplog.text


@pytest.mark.parametrize("side", ["k", "v"])
def test_q61_one_scale_serves_both(tmp_path: Path, side: str) -> None:
    found = load(scaled(tmp_path, {f"{side}_scale": 0.5})).kv_scales
    assert [(float(s.k), float(s.v)) for s in found] == [(0.5, 0.5)] * 2


@pytest.mark.parametrize(
    "extra",
    [{}, {"q_scale": 0.5}, {"q.scale": 0.5}, {"q_proj.output_scale": 0.5, "prob_output_scale": 1.0}, {"q_scale": 0.0}],
)
def test_q62_a_query_scale_is_never_needed(
    tmp_path: Path, extra: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    found = load(scaled(tmp_path, {"k_scale": 0.5, "v_scale": 0.25, **extra})).kv_scales
    assert [(float(s.k), float(s.v)) for s in found] == [(0.5, 0.25)] * 2
    assert "not used" not in caplog.text


def test_q63_one_scale_under_a_name_for_both(tmp_path: Path) -> None:
    found = load(scaled(tmp_path, {"kv_scale": torch.tensor([0.5])})).kv_scales
    assert [(float(s.k), float(s.v)) for s in found] == [(0.5, 0.5)] * 2


def test_q64_scales_are_not_measured_on_the_first_batch() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'calculate_kv_scales'"):
        EngineConfig(model="m", calculate_kv_scales=True)


@pytest.mark.parametrize("tail", ["k_zero_point", "v_zero_point", "v_proj.output_zero_point", "k_cache.zero_point"])
def test_q65_zero_points_must_be_zero(tmp_path: Path, tail: str) -> None:
    scales = {"k_scale": 0.5, "v_scale": 0.5}
    assert len(load(scaled(tmp_path / "a", scales | {tail: torch.zeros(1, dtype=torch.int8)})).kv_scales) == 2
    with pytest.raises(CheckpointError, match="zero points are not supported") as caught:
        load(scaled(tmp_path / "b", scales | {tail: torch.tensor([3], dtype=torch.int8)}))
    assert f"{LAYERS[0]}.{tail}" in str(caught.value)


def test_q66_an_output_scale_beside_a_quantised_weight_belongs_to_the_cache(tmp_path: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    quantize = (AWQConfig(bits=4, group_size=32), WeightSpec("uint4", (1, 32), has_zeros=True))
    folder = tiny_model(tmp_path, quantize=quantize, settings=settings)
    loaded = load(with_scales(folder, {"k_proj.output_scale": 0.5, "v_proj.output_scale": 0.25}))
    assert [(float(s.k), float(s.v)) for s in loaded.kv_scales] == [(0.5, 0.25)] * 2
    assert {r.spec for r in loaded.linears if "q_proj" in r.layer} == {"uint4 g32 asym"}
