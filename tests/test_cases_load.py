"""Cases V01-V05 and their kinds: what folders get wrong, and what loading makes of it."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import registry

from octavo import (
    LLM,
    Checkpoint,
    CheckpointError,
    ConfigError,
    LinearLayer,
    QuantizedWeight,
    SamplingParams,
    WeightSpec,
    round_to_nearest,
)
from octavo.testing import tiny_model
from octavo_awq.config import AWQConfig

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
SPEC = WeightSpec("uint4", (1, 32), has_zeros=True)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["hello", "a longer prompt with more bytes"]


def awq_model(folder: Path, skip: Sequence[str] = (), layers: int = 2, **settings: object) -> Path:
    config = AWQConfig(bits=4, group_size=32)
    return tiny_model(
        folder, quantize=(config, SPEC), settings={**AWQ, **settings}, skip=skip, num_hidden_layers=layers
    )


def load(folder: Path, **settings: object) -> LLM:
    return LLM(str(folder), registry=registry(), num_blocks_override=64, **settings)


def tokens(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]


def dequantised(folder: Path, out: Path) -> Path:
    """The same model as a float checkpoint, dequantised by the format itself."""
    out.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".json":
            (out / file.name).write_text(file.read_text())
    settings = json.loads((out / "config.json").read_text())
    settings.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(settings))
    stored = load_file(folder / "model.safetensors")
    plain = {name: t for name, t in stored.items() if name.rpartition(".")[2] in ("weight", "bias")}
    config = AWQConfig(bits=4, group_size=32)
    for name in [n.removesuffix(".qweight") for n in stored if n.endswith(".qweight")]:
        parts = {n.rpartition(".")[2]: t for n, t in stored.items() if n.startswith(f"{name}.")}
        layer = LinearLayer(name, parts["qweight"].shape[0], parts["scales"].shape[1])
        plain[f"{name}.weight"] = config.canonicalise(layer, parts).dequantize()
    save_file({name: t.contiguous() for name, t in plain.items()}, out / "model.safetensors")
    return out


# --- V01: some modules quantised


@pytest.mark.parametrize("listed", [["self_attn"], ["model.layers.0.self_attn", "model.layers.1.self_attn"], None])
def test_v01_q47_attention_left_unquantised(tmp_path: Path, listed: list[str] | None) -> None:
    folder = awq_model(tmp_path / "q", skip=["*self_attn*"], modules_to_not_convert=listed)
    llm = load(folder)
    specs = {r.layer: r.spec for r in llm.engine.model_info.linears}
    assert specs["model.layers.0.self_attn.q_proj|k_proj|v_proj"] == "float"
    assert specs["model.layers.0.mlp.gate_proj|up_proj"] == "uint4 g32 asym"
    assert tokens(llm) == tokens(load(dequantised(folder, tmp_path / "f")))


def test_v01_q44_one_member_of_a_fused_group_unquantised(tmp_path: Path) -> None:
    folder = awq_model(tmp_path / "q", skip=["*q_proj", "model.layers.1.mlp.up_proj"])
    llm = load(folder)
    reports = {r.layer: r for r in llm.engine.model_info.linears}
    assert reports["model.layers.0.self_attn.q_proj"].spec == "float"
    assert reports["model.layers.0.self_attn.k_proj"].spec == "uint4 g32 asym"
    assert "not fused" in reports["model.layers.0.self_attn.q_proj"].note
    assert reports["model.layers.0.mlp.gate_proj|up_proj"].note == ""
    assert tokens(llm) == tokens(load(dequantised(folder, tmp_path / "f")))


def test_v01_q54_bias_on_some_members_only(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m")
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.self_attn.k_proj.bias"] = torch.full((32,), 0.5)
    save_file(stored, folder / "model.safetensors")
    zeros = {f"model.layers.0.self_attn.{n}_proj.bias": torch.zeros(s) for n, s in (("q", 64), ("v", 32))}
    other = tiny_model(tmp_path / "n")
    save_file(stored | zeros, other / "model.safetensors")
    assert tokens(load(folder)) == tokens(load(other)) != tokens(load(tiny_model(tmp_path / "o")))


# --- V02: missing and unknown tensors


def edit(folder: Path, remove: tuple[str, ...] = (), add: dict[str, torch.Tensor] | None = None) -> Path:
    stored = {n: t for n, t in load_file(folder / "model.safetensors").items() if n not in remove}
    save_file(stored | (add or {}), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
    ],
)
def test_v02_missing_tensor_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(edit(tiny_model(tmp_path), remove=(name,)))


def test_v02_all_missing_tensors_are_listed(tmp_path: Path) -> None:
    names = tuple(f"model.layers.{i}.mlp.{n}_proj.weight" for i in (0, 1) for n in ("up", "down"))
    with pytest.raises(CheckpointError, match="4 tensor") as caught:
        load(edit(tiny_model(tmp_path), remove=names))
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize("suffix", ["scales", "qzeros"])
def test_v02_missing_part_of_a_quantised_layer(tmp_path: Path, suffix: str) -> None:
    name = f"model.layers.1.mlp.down_proj.{suffix}"
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj") as caught:
        load(edit(awq_model(tmp_path), remove=(name,)))
    assert suffix in str(caught.value)


def test_v02_q54_missing_real_bias(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "Qwen2ForCausalLM")
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_proj\.bias"):
        load(edit(folder, remove=("model.layers.0.self_attn.k_proj.bias",)))


def test_v02_unknown_tensor_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(edit(tiny_model(tmp_path), add={"model.extra.weight": torch.ones(3)}))
    assert [r.getMessage() for r in caplog.records if "model.extra.weight" in r.getMessage()] == [
        "1 tensor(s) of the checkpoint are not used: model.extra.weight"
    ]


@pytest.mark.parametrize("suffix", ["k_scale", "g_idx", "input_scale", "weight_scale"])
def test_v02_unread_quantised_data_is_refused(tmp_path: Path, suffix: str) -> None:
    folder = edit(awq_model(tmp_path), add={f"model.layers.0.self_attn.{suffix}": torch.ones(1)})
    with pytest.raises(CheckpointError, match=suffix):
        load(folder)
    assert tokens(load(folder, ignore_tensors=(f"*.{suffix}",)))


def test_v02_q51_harmless_tensors_pass_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(edit(tiny_model(tmp_path), add={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_v02_q53_tied_head_may_be_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert tokens(load(tiny_model(tmp_path / "tied", tie=True)))
    untied = tiny_model(tmp_path / "untied")
    expected = tokens(load(untied))
    settings = json.loads((untied / "config.json").read_text()) | {"tie_word_embeddings": True}
    (untied / "config.json").write_text(json.dumps(settings))
    assert tokens(load(untied)) == expected, "a head that differs from the embedding is used, whatever config.json says"
    assert "differs from the embedding" in caplog.text
    assert tokens(load(edit(untied, remove=("lm_head.weight",)))) != expected
    del settings["tie_word_embeddings"]  # absent means untied, as for Hugging Face
    (untied / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(untied)


def test_v02_q53_stray_copy_of_a_tied_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_model(tmp_path, tie=True)
    expected = tokens(load(folder))
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    llm = load(edit(folder, add={"lm_head.weight": embedding.clone()}))
    assert tokens(llm) == expected
    assert llm.engine.model_info.linears[-1].note == "the embedding"
    assert "differs" not in caplog.text


def test_v02_nothing_uninitialised_after_a_failed_load(tmp_path: Path) -> None:
    stored = load_file(tiny_model(tmp_path) / "model.safetensors")
    stored["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj: weight holds 1 value"):
        load(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_v02_scales_that_are_no_numbers(tmp_path: Path, value: float) -> None:
    name = "model.layers.1.mlp.down_proj.scales"
    scales = load_file(awq_model(tmp_path) / "model.safetensors")[name]
    scales[0, 3] = value
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj: scales holds 1 value") as caught:
        load(edit(tmp_path, add={name: scales}))
    assert "model.safetensors" in str(caught.value)


def test_v02_q55_scaled_activation_is_applied(tmp_path: Path) -> None:
    """AWQ may move a factor from the activation into down_proj: `act(x) / scales` restores it."""
    folder = awq_model(tmp_path / "q")
    plain = tokens(load(folder))
    factors = {f"model.layers.{i}.mlp.act_fn.scales": torch.linspace(0.5, 3, 128) for i in (0, 1)}
    scaled = tokens(load(edit(folder, add=factors)))
    assert scaled != plain
    reference = dequantised(edit(folder, remove=tuple(factors)), tmp_path / "f")
    down = {
        name: tensor / torch.linspace(0.5, 3, 128)
        for name, tensor in load_file(reference / "model.safetensors").items()
        if name.endswith("down_proj.weight")
    }
    assert tokens(load(edit(reference, add=down))) == scaled


# --- V03: the label disagrees with the content


def test_v03_wrong_method_names_both_values_and_their_origin(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, settings={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError) as caught:
        load(folder, quantization="awq")
    assert all(part in str(caught.value) for part in ("--quantization", "'awq'", "'gptq'", "config.json"))


def test_v03_right_method_is_accepted_under_each_of_its_names(tmp_path: Path) -> None:
    folder = awq_model(tmp_path)
    expected = tokens(load(folder))
    for name in ("awq", "AWQ", "awq_marlin"):
        assert tokens(load(folder, quantization=name)) == expected


def test_v03_method_for_a_float_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not quantised"):
        load(tiny_model(tmp_path), quantization="awq")


def test_v03_unknown_method_names_what_is_installed(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, settings={"quant_method": "exl9"})
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert all(part in str(caught.value) for part in ("'exl9'", "config.json", "awq"))


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_v03_q01_q57_settings_in_the_old_side_file(tmp_path: Path, name: str) -> None:
    folder = awq_model(tmp_path)
    expected = tokens(load(folder))
    settings = json.loads((folder / "config.json").read_text())
    side = settings.pop("quantization_config")
    side.pop("quant_method")
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / name).write_text(json.dumps(side))
    assert tokens(load(folder)) == expected


def test_v03_q01_no_settings_at_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = awq_model(tmp_path)
    expected = tokens(load(folder))
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(settings))
    assert tokens(load(folder)) == expected
    assert "no quantization settings found" in caplog.text


def test_v03_unknown_key_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(awq_model(tmp_path, foo=1))
    assert len([r for r in caplog.records if "foo" in r.getMessage()]) == 1


def test_v03_q03_two_files_disagree(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = awq_model(tmp_path)
    (folder / "quantize_config.json").write_text(json.dumps({**AWQ, "group_size": 64}))
    assert tokens(load(folder))
    assert "group_size" in caplog.text
    assert "quantize_config.json" in caplog.text


def test_v03_q05_group_size_that_the_tensors_deny(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(awq_model(tmp_path, group_size=64))
    assert all(part in str(caught.value) for part in ("64", "32", "model.layers.0"))


# --- V04: conventions for zeros that differ by one


def test_v04_q06_symmetric_zeros_stored_off_by_one_are_refused(tmp_path: Path) -> None:
    folder = tiny_model(
        tmp_path,
        quantize=(AWQConfig(bits=4, group_size=32), WeightSpec("uint4", (1, 32))),
        settings={**AWQ, "zero_point": False},
    )
    assert tokens(load(folder))
    seven = {
        n: torch.full_like(t, 0x77777777) for n, t in load_file(folder / "model.safetensors").items() if "qzeros" in n
    }
    assert seven, "the symmetric model stores its zeros"
    with pytest.raises(CheckpointError, match="qzeros"):
        load(edit(folder, add=seven))


def test_v04_zeros_count_as_they_are_stored(tmp_path: Path) -> None:
    folder = awq_model(tmp_path / "q")
    expected = tokens(load(dequantised(folder, tmp_path / "f")))
    assert tokens(load(folder)) == expected
    shifted = {
        name: tensor + 0x01010101  # every zero that has room, by one or more
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.endswith("qzeros")
    }
    assert tokens(load(edit(folder, add=shifted))) != expected


# --- V05: act-order


def ordered(seed: int, in_features: int = 64, group: int = 16) -> QuantizedWeight:
    """A weight whose groups are a random permutation of its inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = round_to_nearest(torch.randn(8, in_features, generator=generator), WeightSpec("uint4", (1, group), True))
    index = (torch.randperm(in_features, generator=generator) // group).to(torch.int32)
    return replace(weight, spec=replace(weight.spec, act_order=True), group_index=index)


def test_v05_permuted_groups_equal_the_formula() -> None:
    weight = ordered(0)
    assert weight.group_index is not None
    for k, group in enumerate(weight.group_index.tolist()):
        column = (weight.codes[:, k].float() - weight.zeros[:, group]) * weight.scales[:, group]
        assert torch.equal(weight.dequantize()[:, k], column)


def test_v05_trivial_index_is_dropped() -> None:
    weight = ordered(0)
    trivial = replace(weight, group_index=torch.arange(64, dtype=torch.int32) // 16)
    dropped = trivial.without_trivial_order()
    assert dropped.group_index is None
    assert not dropped.spec.act_order
    assert torch.equal(dropped.dequantize(), trivial.dequantize())
    assert weight.without_trivial_order() is weight


def test_v05_all_zero_index_of_one_group() -> None:
    spec = WeightSpec("uint4", (1, -1), has_zeros=True)
    weight = round_to_nearest(torch.randn(8, 64), spec)
    indexed = replace(weight, spec=replace(weight.spec, act_order=True), group_index=torch.zeros(64, dtype=torch.int32))
    indexed.check(LinearLayer("x", 64, 8))
    assert indexed.without_trivial_order().spec == weight.spec
    assert torch.equal(indexed.dequantize(), weight.dequantize())


def test_v05_members_with_different_order_are_not_fused() -> None:
    first, other = ordered(0), ordered(1)
    assert first.why_not_concat(other) == "group_index differs"
    with pytest.raises(ValueError, match="group_index"):
        first.concat([other])
    same = replace(ordered(1), group_index=first.group_index)
    fused = first.concat([same])
    assert torch.equal(fused.dequantize(), torch.cat([first.dequantize(), same.dequantize()]))


@pytest.mark.parametrize("bound", [16, 24, 33])
def test_v05_q42_slices_keep_the_order(bound: int) -> None:
    weight = ordered(3)
    parts = [weight.slice_in(0, bound), weight.slice_in(bound, 64)]
    assert torch.equal(torch.cat([p.dequantize() for p in parts], dim=1), weight.dequantize())


# --- memory


def test_loading_holds_one_layer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed tensors are gone once their layer is prepared: peak memory is the result plus one layer."""
    alive: set[int] = set()
    most = 0
    read = Checkpoint.read

    def counted(self: Checkpoint, name: str) -> torch.Tensor:
        nonlocal most
        tensor = read(self, name)
        if name.endswith(("qweight", "qzeros")):
            alive.add(id(tensor))
            weakref.finalize(tensor, alive.discard, id(tensor))
            most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(Checkpoint, "read", counted)
    load(awq_model(tmp_path, layers=6))
    assert 0 < most <= 2 * 3, "at most the members of one fused group"
    assert not alive
