"""`octavo quantize --kv-scales-only`: what is measured, what is written, and what is refused before anything is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit_subjects import Fp8KV, NibbleConfig
from safetensors.torch import load_file, save_file
from support import registry
from test_kv_kit import CalibratedKV

from octavo import LLM, ConfigError, EngineConfig, KVGeometry, PlainKV, SamplingParams, WeightSpec
from octavo.attention.kv_format import KVFormat
from octavo.cli import main
from octavo.front.kv_calibration import RecordingKV, calibrate, default_text, samples
from octavo.front.tokenizer import Tokenizer
from octavo.testing import tiny_model, tiny_tokenizer

TEXT = "".join(chr(ord("a") + (i * i + i // 7) % 26) for i in range(2000))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def quantize(model: Path, out: Path, *options: str) -> int:
    few = ["--num-samples", "3", "--max-length", "40"]
    return main(["quantize", str(model), "--kv-scales-only", "--out", str(out), *few, *options])


class KeepingKV(PlainKV):
    """Keeps all that was stored, as an oracle of what the largest was."""

    name = "keeping"
    kept: Mapping[str, list[list[torch.Tensor]]]

    def __init__(self, geometry: KVGeometry) -> None:
        super().__init__(geometry)
        self.kept = {side: [[] for _ in range(geometry.num_layers)] for side in "kv"}

    def write(self, layer, kv, key, value, slot_mapping):
        super().write(layer, kv, key, value, slot_mapping)
        self.kept["k"][layer.index].append(key.clone())
        self.kept["v"][layer.index].append(value.clone())


def kept(model: Path, prompts: list[list[int]]) -> dict[str, list[torch.Tensor]]:
    """All K and V of the prompts by layer, (tokens, kv_heads, head_dim), each prompt computed alone."""
    formats: dict[str, type[KVFormat]] = {"keeping": KeepingKV}
    llm = LLM(str(model), registry=replace(registry(), kv_formats=formats), kv_cache_dtype="keeping", max_num_seqs=1)
    for ids in prompts:
        llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1))
    (kept,) = {kv_format for kv_format in llm.engine.executor.runner.kv.layout.formats}
    return {side: [torch.cat(parts) for parts in layers] for side, layers in kept.kept.items()}


# --- what is measured


@pytest.mark.parametrize("per_head", [False, True])
def test_scales_are_the_largest_k_and_v_as_stored(model: Path, per_head: bool) -> None:
    config = EngineConfig(model=str(model), disable_progress=True)
    scales, num_tokens = calibrate(config, TEXT, 3, 40, 0, per_head)
    prompts = samples(Tokenizer(model), TEXT, 3, 40, 0)
    assert num_tokens == sum(map(len, prompts)) == 120
    for side, layers in kept(model, prompts).items():
        for one, stored in zip(scales, layers, strict=True):
            largest = stored.abs().amax((0, 2) if per_head else (0, 1, 2))
            assert torch.allclose(getattr(one, side), largest / 448, rtol=1e-6)


def test_keys_are_measured_after_their_rotation(model: Path) -> None:
    """At position 0 nothing is rotated: further on, the same token can show a larger component, and that one counts."""
    repeated = kept(model, [[token] * 40 for token in range(65, 85)])["k"][0].view(20, 40, -1).abs().amax(-1)
    growth = repeated.amax(1) / repeated[:, 0]
    token = int(growth.argmax())
    assert growth[token] > 1.02
    config = EngineConfig(model=str(model), disable_progress=True)
    scales, _ = calibrate(config, chr(65 + token) * 40, 1, 40, 0, False)
    assert torch.allclose(scales[0].k, repeated[token].amax() / 448, rtol=1e-6)


def test_heads_that_never_fire_get_a_scale_of_1() -> None:
    recorder = RecordingKV(KVGeometry(1, 2, 4, 4, torch.float32))
    from octavo.front.kv_calibration import kv_scales

    recorder.largest["k"][0] = torch.tensor([0.0, 44.8])
    (one,) = kv_scales(recorder.largest, per_head=True)
    assert one.k.tolist() == pytest.approx([1.0, 0.1])
    assert one.v.tolist() == [1.0, 1.0]
    recorder.largest["v"][0, 1] = float("nan")
    with pytest.raises(ConfigError, match="V of layer 0 is NaN or infinite"):
        kv_scales(recorder.largest, per_head=False)


def test_samples_are_pieces_of_the_text_drawn_by_the_seed(model: Path) -> None:
    tokenizer = Tokenizer(model)
    drawn = samples(tokenizer, TEXT, 5, 100, 1)
    whole = tokenizer.encode_plain(TEXT)
    starts = [next(i for i in range(0, 2000, 100) if whole[i : i + 100] == piece) for piece in drawn]
    assert starts == sorted(set(starts)), "in order, none twice"
    assert drawn == samples(tokenizer, TEXT, 5, 100, 1) != samples(tokenizer, TEXT, 5, 100, 2)
    assert len(samples(tokenizer, TEXT, 50, 100, 0)) == 20, "all there are"
    assert [len(piece) for piece in samples(tokenizer, TEXT, 9, 1500, 0)] == [1500], "a rest is left out"
    assert samples(tokenizer, "ab", 9, 1500, 0) == [[97, 98]], "unless it is all"
    with pytest.raises(ConfigError, match="0 tokens"):
        samples(tokenizer, "", 5, 100, 0)


def test_samples_begin_as_prompts_do(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    hf = tokenizer.hf_tokenizer
    hf.bos_token = "<|im_start|>"
    plain = hf.encode
    hf.encode = lambda text, add_special_tokens: (
        ([256] if add_special_tokens else []) + plain(text, add_special_tokens=False)
    )
    assert samples(tokenizer, "abcd", 9, 3, 0) == [[256, 97, 98], [256, 99, 100]]


def test_there_is_text_without_a_file() -> None:
    text = default_text()
    assert len(text) > 200_000
    assert "expression" in text


# --- what is written


def served(folder: Path, **settings: object) -> LLM:
    formats = {**registry().kv_formats, "toy_calibrated": CalibratedKV, "toy_fp8": Fp8KV}
    plugins = replace(registry(), kv_formats=formats)
    return LLM(str(folder), registry=plugins, num_blocks_override=8, kv_cache_dtype="toy_calibrated", **settings)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_a_file_serves_beside_the_model(
    model: Path, text: Path, tmp_path: Path, granularity: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scales.safetensors"
    assert quantize(model, out, "--calibration", str(text), "--kv-scales-granularity", granularity) == 0
    said = capsys.readouterr().out
    assert all(part in said for part in ("scales for 2 layers", "120 tokens", f"--kv-scales {out}"))
    shape = (1,) if granularity == "tensor" else (2, 1, 1)
    stored = load_file(out)
    assert {name: tuple(t.shape) for name, t in stored.items()} == {
        f"model.layers.{index}.self_attn.{side}_scale": shape for index in range(2) for side in "kv"
    }
    assert all(t.dtype is torch.float32 for t in stored.values())
    kv_format = served(model, kv_scales=str(out)).engine.executor.runner.kv.layout.formats[0]
    assert torch.equal(kv_format.scales[1].k.flatten(), stored["model.layers.1.self_attn.k_scale"].flatten())


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_a_folder_is_the_model_and_asks_for_the_cache(
    model: Path, text: Path, tmp_path: Path, granularity: str, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "new"
    assert quantize(model, out, "--calibration", str(text), "--kv-scales-granularity", granularity) == 0
    config = json.loads((out / "config.json").read_text())
    settings = config.pop("quantization_config")
    assert config == json.loads((model / "config.json").read_text())
    assert settings["quant_method"] == "compressed-tensors"
    assert settings["config_groups"] == {}
    assert settings["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor" if granularity == "tensor" else "attn_head",
        "dynamic": False,
        "symmetric": True,
    }
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(after.pop(name), tensor) for name, tensor in before.items())
    assert sorted(after) == [f"model.layers.{i}.self_attn.{side}_scale" for i in range(2) for side in "kv"]
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    installed = "compressed-tensors" in registry().quant_configs
    assert ("no installed plugin reads compressed-tensors" in caplog.text) != installed
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
    config_without = json.dumps(config)
    (out / "config.json").write_text(config_without)  # as if a plugin had read the settings
    assert len(served(out).engine.executor.runner.kv.layout.formats[0].scales) == 2


def test_old_scales_are_replaced_whatever_their_name(tmp_path: Path, text: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    stored |= {
        f"model.layers.{i}.self_attn.{side}_proj.output_scale": torch.tensor(9.0) for i in range(2) for side in "kv"
    }
    save_file(stored, folder / "model.safetensors")
    assert quantize(folder, tmp_path / "new", "--calibration", str(text)) == 0
    names = load_file(tmp_path / "new" / "model.safetensors")
    assert not [name for name in names if "output_scale" in name]
    assert len([name for name in names if name.endswith("_scale")]) == 4


def test_the_same_seed_gives_the_same_file(model: Path, text: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        assert quantize(model, file, "--calibration", str(text), "--seed", str(seed)) == 0
    one, two, other = (file.read_bytes() for file in files)
    assert one == two != other


# --- what is refused


def refused(capsys: pytest.CaptureFixture[str], *said: str) -> bool:
    error = capsys.readouterr().err
    return all(part in error for part in ("octavo: ", *said))


def test_it_must_be_said_what_to_make(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(model), "--out", str(tmp_path / "new")]) == 2
    assert refused(capsys, "--method", "--recipe", "--kv-scales-only")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--num-samples", "0"], "--num-samples 0: expected 1 or more"),
        (["--max-length", "-3"], "--max-length -3: expected 1 or more"),
        (["--max-shard-size", "0"], "--max-shard-size"),
        (["--calibration", "none.txt"], "--calibration none.txt: cannot read the text"),
    ],
)
def test_bad_options(
    model: Path, tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(model, tmp_path / "new", *options) == 2
    assert refused(capsys, said)
    assert not (tmp_path / "new").exists()


def test_a_place_in_use_is_refused(model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (text, tmp_path):
        assert quantize(model, place) == 2
        assert refused(capsys, "exists already")
    assert text.read_text() == TEXT
    assert quantize(model, tmp_path / "none" / "new") == 2
    assert refused(capsys, "there is no folder")


def test_another_formats_settings_cannot_ask_for_a_cache(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = replace(registry(), quant_configs={"nibble": NibbleConfig})
    monkeypatch.setattr("octavo.front.quantize.registry_for", lambda config: found)
    monkeypatch.setattr("octavo.front.kv_calibration.registry_for", lambda config: found)
    config, spec = NibbleConfig(group_size=2), WeightSpec("uint4", (1, 2), has_zeros=True)
    settings = {"quant_method": "nibble", "group_size": 2}
    folder = tiny_model(tmp_path / "model", quantize=(config, spec), settings=settings)
    assert quantize(folder, tmp_path / "new", "--calibration", str(text)) == 2
    assert refused(capsys, "nibble", "--out scales.safetensors", "--kv-scales")
    assert quantize(folder, tmp_path / "new.safetensors", "--calibration", str(text)) == 0, "as it was told"
