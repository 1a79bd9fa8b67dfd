"""Where a KV format's scales come from, and what happens without: checkpoint, `--kv-scales FILE`, `--kv-scales unit` (V13)."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit_subjects import ByteKV, Fp8KV, NibbleConfig
from safetensors.torch import load_file, save_file
from support import registry
from test_kv_kit import CalibratedKV
from torch import Tensor

from octavo import LLM, CheckpointError, ConfigError, EngineConfig, KVScales, SamplingParams
from octavo.attention.kv_format import KVFormat
from octavo.cli import main
from octavo.engine.kv_plan import kv_layout
from octavo.model.checkpoint import open_checkpoint
from octavo.model.plan import plan_model
from octavo.quant.kv_scales import kv_scale_tensors
from octavo.testing import tiny_model

MODULES = [f"model.layers.{index}.self_attn" for index in range(2)]
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


class WithFallback(CalibratedKV):
    name = "toy_fallback"
    without_scales = "toy_int8"


class Asks(NibbleConfig):
    """A format whose settings ask for a KV cache too."""

    name = "asks"
    cache: str

    @property
    def kv_cache(self) -> str | None:
        return self.cache


def installed(**changes: object):
    kinds: list[type[KVFormat]] = [Fp8KV, ByteKV, CalibratedKV, WithFallback]
    formats = {**registry().kv_formats, **{kind.name: kind for kind in kinds}}
    return replace(registry(), **{"kv_formats": formats, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model")


def with_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    save_file({**load_file(folder / "model.safetensors"), **tensors}, folder / "model.safetensors")
    return folder


def tensors(tails: Mapping[str, object], modules: list[str] = MODULES) -> dict[str, Tensor]:
    """Each tail in every module, twice as large in the second."""
    return {
        f"{module}.{tail}": torch.as_tensor(value, dtype=torch.float32) * (index + 1)
        for index, module in enumerate(modules)
        for tail, value in tails.items()
    }


def scale_file(folder: Path, content: Mapping[str, Tensor]) -> str:
    save_file(dict(content), folder / "scales.safetensors")
    return str(folder / "scales.safetensors")


def side_file(folder: Path, layers: Mapping[str, object], **cache: object) -> str:
    content = {"model_type": "llama", "kv_cache": {"scaling_factor": {"0": dict(layers)}, **cache}}
    (folder / "scales.json").write_text(json.dumps(content))
    return str(folder / "scales.json")


def serve(folder: Path, dtype: str = "toy_calibrated", **settings: object) -> LLM:
    plugins = settings.pop("plugins", None) or installed()
    return LLM(str(folder), registry=plugins, kv_cache_dtype=dtype, num_blocks_override=8, **settings)


def format_of(llm: LLM) -> KVFormat:
    return llm.engine.executor.runner.kv.layout.formats[0]  # type: ignore[attr-defined, no-any-return]


def scales_of(llm: LLM) -> list[tuple[float, float]]:
    return [(float(one.k), float(one.v)) for one in format_of(llm).scales]


def logprobs(llm: LLM) -> Tensor:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": list(range(30))}, params)
    assert output.prompt_logprobs is not None
    return torch.tensor([next(iter(found.values())).logprob for found in output.prompt_logprobs[1:] if found])


# --- from the checkpoint


@pytest.mark.parametrize(("key", "value"), SPELLINGS)
def test_v13_q60_q63_q66_every_spelling_reaches_what_stores(folder: Path, key: str, value: str) -> None:
    llm = serve(with_tensors(folder, tensors({key: 0.5, value: 0.25})))
    assert scales_of(llm) == [(0.5, 0.25), (1.0, 0.5)]


def test_v13_scales_change_what_is_stored_and_what_comes_out(folder: Path) -> None:
    coarse = tensors({"k_scale": [1000.0], "v_scale": [1000.0]})
    unit = logprobs(serve(folder, kv_scales="unit"))
    scaled = serve(with_tensors(folder, coarse))
    assert not torch.allclose(logprobs(scaled), unit, atol=1e-3)
    codes = scaled.engine.executor.runner.kv.layers[1].key.float()  # type: ignore[attr-defined]
    assert 0 < codes.abs().max() < 0.1, "K was divided by its scale"


def test_one_scale_per_head_reaches_what_stores(folder: Path) -> None:
    llm = serve(with_tensors(folder, tensors({"k_scale": [[[0.5]], [[2.0]]], "v_scale": [3.0, 4.0]})))
    assert [one.k.tolist() for one in format_of(llm).scales] == [[0.5, 2.0], [1.0, 4.0]]
    assert [one.v.tolist() for one in format_of(llm).scales] == [[3.0, 4.0], [6.0, 8.0]]


@pytest.mark.parametrize("only", ["k", "v"])
def test_q61_one_scale_serves_both_sides(folder: Path, only: str) -> None:
    llm = serve(with_tensors(folder, tensors({f"{only}_scale": 0.5})))
    assert scales_of(llm) == [(0.5, 0.5), (1.0, 1.0)]


def test_q62_scales_of_queries_are_neither_needed_nor_used(folder: Path) -> None:
    llm = serve(with_tensors(folder, tensors({"k_scale": 0.5, "v_scale": 0.25, "q_scale": 9.0})))
    assert scales_of(llm) == [(0.5, 0.25), (1.0, 0.5)]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_v13_a_bad_scale_never_serves(folder: Path, bad: float) -> None:
    with pytest.raises(CheckpointError, match="not a positive number"):
        serve(with_tensors(folder, tensors({"k_scale": bad, "v_scale": 1.0})))


def test_scales_that_nothing_needs_are_a_notice(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        llm = serve(with_tensors(folder, tensors({"k_scale": 0.5, "v_scale": 0.25})), "toy_int8")
    assert "KV scales are not needed: K and V are stored as toy_int8" in caplog.text
    assert all(record.levelname == "INFO" for record in caplog.records if "scales" in record.message)
    assert format_of(llm).scales == ()


# --- without


@pytest.mark.parametrize("dtype", ["toy_fallback", "auto"])
def test_q60_without_scales_another_format_is_chosen_and_named(
    folder: Path, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    asking(folder, "toy_fallback")
    llm = serve(folder, dtype, plugins=installed(quant_configs={"asks": Asks}))
    assert format_of(llm).name == "toy_int8"
    said = [record.message for record in caplog.records if "no calibrated scales" in record.message]
    assert len(said) == 1
    assert "toy_int8 instead of toy_fallback" in said[0]
    assert all(part in said[0] for part in ("octavo quantize MODEL --kv-scales-only", "--kv-scales unit"))


def asking(folder: Path, cache: str) -> None:
    """Makes the settings of a folder ask for a KV cache."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "asks", "group_size": 16, "cache": cache}
    (folder / "config.json").write_text(json.dumps(config))


def test_auto_follows_a_calibrated_checkpoint(folder: Path) -> None:
    asking(with_tensors(folder, tensors({"k_scale": 0.5, "v_scale": 0.25})), "toy_fallback")
    llm = serve(folder, "auto", plugins=installed(quant_configs={"asks": Asks}))
    assert format_of(llm).name == "toy_fallback"
    assert scales_of(llm) == [(0.5, 0.25), (1.0, 0.5)]


def test_without_scales_and_without_a_substitute_it_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"toy_calibrated: there are no calibrated scales.*--kv-scales unit"):
        serve(folder)
    formats = {"toy_fallback": WithFallback}
    with pytest.raises(ConfigError, match="toy_fallback: there are no calibrated scales"):
        serve(folder, "toy_fallback", plugins=installed(kv_formats=formats))


@pytest.mark.parametrize("stored", [True, False])
def test_who_insists_gets_scales_of_1(folder: Path, stored: bool, caplog: pytest.LogCaptureFixture) -> None:
    if stored:
        with_tensors(folder, tensors({"k_scale": 0.5, "v_scale": 0.25}))
    with caplog.at_level(logging.INFO):
        llm = serve(folder, "toy_fallback", kv_scales="unit")
    assert format_of(llm).name == "toy_fallback"
    assert scales_of(llm) == [(1.0, 1.0)] * 2
    assert ("those of --kv-scales unit are" in caplog.text) == stored


def test_only_the_layers_that_need_scales_fall_back(folder: Path) -> None:
    llm = serve(folder, "float32", kv_cache_dtype_map="1=toy_fallback")
    names = [kv_format.name for kv_format in llm.engine.executor.runner.kv.layout.formats]  # type: ignore[attr-defined]
    assert names == ["float32", "toy_int8"]


def test_a_layer_finds_its_own_scale_in_a_mixed_layout(folder: Path) -> None:
    llm = serve(folder, "float32", kv_cache_dtype_map="1=toy_calibrated", kv_scales="unit")
    plain = logprobs(llm)
    with_tensors(folder, {f"{MODULES[0]}.k_scale": torch.tensor(1.0), f"{MODULES[1]}.k_scale": torch.tensor(1e6)})
    coarse = logprobs(serve(folder, "float32", kv_cache_dtype_map="1=toy_calibrated"))
    assert not torch.allclose(plain, coarse, atol=1e-3), "the second layer's K underflows"


# --- from a file


@pytest.mark.parametrize(("key", "value"), SPELLINGS)
def test_v13_a_file_may_use_any_spelling(folder: Path, tmp_path: Path, key: str, value: str) -> None:
    file = scale_file(tmp_path, tensors({key: 0.5, value: [0.25]}))
    assert scales_of(serve(folder, kv_scales=file)) == [(0.5, 0.25), (1.0, 0.5)]


def test_a_file_wins_over_the_checkpoint(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with_tensors(folder, tensors({"k_scale": 7.0, "v_scale": 7.0}))
    file = scale_file(tmp_path, tensors({"k_scale": 0.5, "v_scale": 0.25}))
    with caplog.at_level(logging.INFO):
        assert scales_of(serve(folder, kv_scales=file)) == [(0.5, 0.25), (1.0, 0.5)]
    assert "the checkpoint's KV scales are not used" in caplog.text


def test_a_whole_checkpoints_file_will_do(folder: Path, tmp_path: Path) -> None:
    other = with_tensors(tiny_model(tmp_path / "other"), tensors({"k_scale": 0.5, "v_scale": 0.25}))
    assert scales_of(serve(folder, kv_scales=str(other / "model.safetensors"))) == [(0.5, 0.25), (1.0, 0.5)]


def test_the_json_of_vllm(folder: Path, tmp_path: Path) -> None:
    file = side_file(tmp_path, {"0": 0.5, "1": 2}, dtype="float8_e4m3fn")
    assert scales_of(serve(folder, kv_scales=file)) == [(0.5, 0.5), (2.0, 2.0)]


@pytest.mark.parametrize(
    ("layers", "cache", "said"),
    [
        ({"0": 0.5}, {}, "only some layers"),
        ({"0": 0.5, "1": 0}, {}, "not a positive number"),
        ({"0": 0.5, "1": float("nan")}, {}, "not a positive number"),
        ({"0": 0.5, "1": "2"}, {}, "not a positive number"),
        ({"0": 0.5, "1": 1.0, "2": 1.0}, {}, "a layer that the model of 2 layers does not have"),
        ({"0": 0.5, "1": 1.0}, {"dtype": "float8_e4m3fnuz"}, "for another type"),
        ({}, {}, "holds no scales"),
        ({"0": 0.5}, {"scaling_factor": 3}, "by rank and layer"),
    ],
)
def test_v13_a_json_file_that_is_wrong_is_refused(
    folder: Path, tmp_path: Path, layers: Mapping[str, object], cache: Mapping[str, object], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        serve(folder, kv_scales=side_file(tmp_path, layers, **cache))
    assert "scales.json" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"k_scale": 0.0, "v_scale": 1.0}, "not a positive number"),
        ({"k_scale": [1.0, 2.0, 3.0]}, "neither the tensor nor its heads"),
        ({"k_scale": 1.0, "k_zero_point": 3.0}, "zero points"),
        ({"k_scale": 1.0, "k_scale_2": 1.0}, "no KV scale of a layer"),
        ({"key_scale": 1.0}, "no KV scale of a layer"),
        ({"q_scale": 1.0}, "holds no scales"),
    ],
)
def test_v13_q65_a_file_that_is_wrong_is_refused(
    folder: Path, tmp_path: Path, content: Mapping[str, object], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        serve(folder, kv_scales=scale_file(tmp_path, tensors(content)))


def test_v13_a_file_for_other_layers_is_refused(folder: Path, tmp_path: Path) -> None:
    scales = {"k_scale": 0.5, "v_scale": 0.5}
    with pytest.raises(CheckpointError, match="only some layers have KV scales"):
        serve(folder, kv_scales=scale_file(tmp_path, tensors(scales, MODULES[:1])))
    with pytest.raises(CheckpointError, match=r"layers\.7\.self_attn"):
        serve(folder, kv_scales=scale_file(tmp_path, tensors(scales, [*MODULES, "model.layers.7.self_attn"])))


def test_what_is_no_file_of_scales_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; 'unit' alone"):
        serve(folder, kv_scales=str(tmp_path / "none.json"))
    for name, said in (("a.safetensors", "as safetensors"), ("a.json", "as JSON")):
        (tmp_path / name).write_bytes(b"\x01\x02")
        with pytest.raises(CheckpointError, match=said):
            serve(folder, kv_scales=str(tmp_path / name))
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        serve(folder, kv_scales=str(tmp_path / "a.json"))


@pytest.mark.parametrize("scales", ["unit", "file"])
def test_scales_that_were_given_and_serve_nobody_are_an_error(folder: Path, tmp_path: Path, scales: str) -> None:
    given = scale_file(tmp_path, tensors({"k_scale": 1.0})) if scales == "file" else scales
    with pytest.raises(ConfigError, match=r"--kv-scales .*stored as bfloat16, which uses no scales"):
        serve(folder, "bfloat16", kv_scales=given)


def test_what_is_written_is_read(folder: Path, tmp_path: Path) -> None:
    pairs = [KVScales(torch.tensor(0.5), torch.tensor(0.25)), KVScales(torch.tensor([1.0, 2.0]), torch.tensor(4.0))]
    stored = [kv_scale_tensors(module, one) for module, one in zip(MODULES, pairs, strict=True)]
    shapes = [[tuple(t.shape) for t in one.values()] for one in stored]
    assert shapes == [[(1,), (1,)], [(2, 1, 1), (1,)]]
    found = format_of(serve(folder, kv_scales=scale_file(tmp_path, {**stored[0], **stored[1]}))).scales
    assert all(torch.equal(a.k, b.k) and torch.equal(a.v, b.v) for a, b in zip(found, pairs, strict=True))


# --- plans


@pytest.mark.parametrize("source", ["checkpoint", "side file", "unit", "none"])
def test_a_plan_from_headers_is_what_loading_does(folder: Path, source: str) -> None:
    if source == "checkpoint":
        with_tensors(folder, tensors({"k_proj.output_scale": 0.5}))
    elif source == "side file":
        side_file(folder, {"0": 0.5, "1": 2})
        (folder / "scales.json").rename(folder / "kv_cache_scales.json")
    settings = {"kv_scales": "unit"} if source == "unit" else {}
    plugins = installed()
    config = EngineConfig(model=str(folder), kv_cache_dtype="toy_fallback", **settings)
    planned = kv_layout(plan_model(config, plugins, open_checkpoint(str(folder), plugins.checkpoint_readers)))
    assert planned.name == ("toy_int8" if source == "none" else "toy_fallback")
    assert format_of(serve(folder, "toy_fallback", **settings)).name == planned.name


def test_doctor_does_not_call_used_scales_unused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = installed()
    monkeypatch.setattr("octavo.front.doctor.registry_for", lambda config: found)
    with_tensors(folder, tensors({"k_scale": 0.5, "v_scale": 0.25}))
    kinds = {}
    for dtype in ("toy_calibrated", "float32", "toy_int8", "toy_fp8"):
        main(["doctor", str(folder), "--kv-cache-dtype", dtype, "--json"])
        report = json.loads(capsys.readouterr().out)
        kinds[dtype] = [f["severity"] for f in report["findings"] if f["kind"] == "kv_scales_unused"]
    assert kinds == {"toy_calibrated": [], "float32": ["note"], "toy_int8": ["warning"], "toy_fp8": ["warning"]}
