"""Cases V01-V10 and V44-V46 in every format that is installed: the siblings of the AWQ cases in test_cases_load.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from convert_support import tensors_of
from formats_support import (
    FORMATS,
    WEIGHT_ONLY,
    as_floats,
    edit_config,
    edit_settings,
    edit_tensors,
    kernels,
    load,
    logits,
    model,
    without_methods,
)
from support import registry

from octavo import (
    CheckpointError,
    ConfigError,
    OctavoError,
    PluginInfo,
    QuantSource,
    WeightSpec,
)
from octavo.cli import main
from octavo.testing import tiny_model

LAYER = "model.layers.1.mlp.down_proj"
SHORT = {"num_hidden_layers": 1}


def expect_same_numbers(folder: Path, out: Path, name: str) -> None:
    """Logits of a folder are those of its float counterpart; with quantised inputs, near them, and exactly core's own."""
    found, expected = logits(folder), logits(as_floats(folder, out))
    if name in WEIGHT_ONLY:
        assert torch.allclose(found, expected, atol=2e-4)
    else:
        assert torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1] > 0.85
        assert torch.allclose(found, logits(folder, linear_kernels="*=reference?"), atol=2e-2)


def outcome(folder: Path) -> torch.Tensor | None:
    """The folder's logits, None where it is refused."""
    try:
        return logits(folder)
    except OctavoError:
        return None


# --- V01: some modules quantised


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_v01_attention_left_unquantised(tmp_path: Path, name: str, listed: bool) -> None:
    folder = model(tmp_path / "q", name, ["*self_attn*"], listed)
    specs = {r.layer: r.spec for r in load(folder).engine.model_info.linears}
    assert specs["model.layers.0.self_attn.q_proj|k_proj|v_proj"] == "float"
    assert specs["model.layers.0.mlp.down_proj"].startswith(FORMATS[name][1].code)
    expect_same_numbers(folder, tmp_path / "f", name)


@pytest.mark.parametrize("name", FORMATS)
def test_v01_q44_one_member_of_each_fused_group_unquantised(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path / "q", name, ["*q_proj", "*.1.mlp.up_proj"])
    reports = {r.layer: r for r in load(folder).engine.model_info.linears}
    assert reports["model.layers.0.self_attn.q_proj"].spec == "float"
    assert "not fused: specs differ" in reports["model.layers.0.self_attn.k_proj"].note
    assert {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"} <= reports.keys()
    expect_same_numbers(folder, tmp_path / "f", name)


@pytest.mark.parametrize("name", FORMATS)
def test_v01_q54_biases_beside_quantised_weights(tmp_path: Path, name: str) -> None:
    """Qwen2 has biases on q, k and v; Llama has none, yet one that is stored counts."""
    folder = model(tmp_path / "q", name, architecture="Qwen2ForCausalLM", **SHORT)
    expect_same_numbers(folder, tmp_path / "f", name)
    plain = model(tmp_path / "p", name, **SHORT)
    before = logits(plain)
    edit_tensors(plain, add={"model.layers.0.mlp.up_proj.bias": torch.full((128,), 0.5)})
    assert not torch.allclose(logits(plain), before, atol=1e-3)
    expect_same_numbers(plain, tmp_path / "pf", name)
    edit_tensors(plain, add={"model.layers.0.mlp.up_proj.bias": torch.zeros(128)})
    assert torch.allclose(logits(plain), before, atol=1e-6)


# --- V02: missing and unknown tensors

OPTIONAL = {"bias", "weight_zero_point", "g_idx", "weight_g_idx", "weight_shape"}
"""What a sound file may lack: zero points of 0, the order of inputs that lie in their own, sizes that the model knows."""


@pytest.mark.parametrize("name", FORMATS)
def test_v02_each_missing_part_of_a_layer_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path, name)
    tensors = tensors_of(folder)
    parts = [n for n in tensors if n.startswith(f"{LAYER}.") and n.rpartition(".")[2] not in OPTIONAL]
    assert len(parts) >= 2
    for part in parts:
        edit_tensors(folder, remove=[part])
        with pytest.raises(CheckpointError) as caught:
            load(folder)
        assert LAYER in str(caught.value)
        edit_tensors(folder, add={part: tensors[part]})
    load(folder)


@pytest.mark.parametrize("name", ["gptq_ordered", "ct_ordered"])
def test_v02_an_order_that_is_missing_is_refused(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path, name)
    (order,) = [n for n in tensors_of(folder) if n.startswith(f"{LAYER}.") and n.endswith("g_idx")]
    edit_tensors(folder, remove=[order])
    with pytest.raises(CheckpointError, match="g_idx") as caught:
        load(folder)
    assert LAYER in str(caught.value)


@pytest.mark.parametrize("name", FORMATS)
def test_v02_a_whole_layer_that_is_missing_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path, name)
    edit_tensors(folder, remove=[n for n in tensors_of(folder) if n.startswith(f"{LAYER}.")])
    with pytest.raises(CheckpointError, match=rf"missing(.|\n)*{LAYER}"):
        load(folder)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "tail", ["mlp.down_proj.weight_scale_2", "mlp.extra_proj.scales", "self_attn.odd", "odd.weight"]
)
def test_v02_unknown_tensors_of_decoder_layers_are_refused(tmp_path: Path, name: str, tail: str) -> None:
    folder = edit_tensors(model(tmp_path, name, **SHORT), add={f"model.layers.0.{tail}": torch.ones(1)})
    with pytest.raises(CheckpointError, match="not used: the model would compute something else") as caught:
        load(folder)
    assert f"model.layers.0.{tail}" in str(caught.value)
    load(folder, ignore_tensors=(f"*.{tail}",))


def test_v02_layers_beyond_the_configured_number_are_refused(tmp_path: Path) -> None:
    folder = edit_config(tiny_model(tmp_path), num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"9 tensor\(s\) of decoder layers are not used") as caught:
        load(folder)
    assert "model.layers.1.input_layernorm.weight" in str(caught.value)
    load(folder, ignore_tensors=("model.layers.1.*",))


def test_v02_tensors_that_the_index_forgot_count(tmp_path: Path) -> None:
    """Dropping a bias in silence would change the model."""
    folder = tiny_model(tmp_path, attention_bias=True, shards=2)
    expected = logits(edit_config(folder, attention_bias=False))
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    forgotten = [name for name in content["weight_map"] if name.endswith(".bias")]
    assert len(forgotten) == 8
    for name in forgotten:
        del content["weight_map"][name]
    index.write_text(json.dumps(content))
    assert torch.equal(logits(folder), expected)


# --- V03: the label disagrees with the content

LABELS = ["awq", "gptq", "compressed-tensors", "fp8", "w8a8_int8", "gguf"]


@pytest.mark.parametrize("name", FORMATS)
def test_v03_the_users_method_must_be_the_checkpoints(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path, name, **SHORT)
    own = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    load(folder, quantization=own)
    for label in LABELS:
        if label != own:
            with pytest.raises(ConfigError) as caught:
                load(folder, quantization=label)
            assert all(part in str(caught.value) for part in (f"'{label}'", f"'{own}'", "config.json"))


@pytest.mark.parametrize("name", FORMATS)
def test_v03_another_formats_label_is_refused_or_changes_nothing(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path, name, **SHORT)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    expected = logits(folder)
    outcomes = {label: outcome(edit_settings(folder, quant_method=label)) for label in LABELS}
    assert outcomes[settings["quant_method"]] is not None
    assert all(found is None or torch.equal(found, expected) for found in outcomes.values())
    assert list(outcomes.values()).count(None) >= 2


@pytest.mark.parametrize("name", FORMATS)
def test_v03_q03_settings_in_a_side_file_and_two_that_disagree(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = model(tmp_path, name, **SHORT)
    expected = logits(folder)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_config(folder, quantization_config=None)
    (folder / "quantize_config.json").write_text(json.dumps(settings))
    assert torch.equal(logits(folder), expected)
    edit_config(folder, quantization_config=settings)
    key = next(key for key in ("group_size", "ignored_layers", "ignore", "bits") if key in settings)
    changed = {key: 64 if key == "group_size" else 8 if key == "bits" else ["nothing"]}
    (folder / "quantize_config.json").write_text(json.dumps({**settings, **changed}))
    caplog.clear()
    assert torch.equal(logits(folder), expected)
    (told,) = [r.getMessage() for r in caplog.records if "the first counts" in r.getMessage()]
    assert all(part in told for part in ("config.json: quantization_config", "quantize_config.json", key))


@pytest.mark.parametrize("name", FORMATS)
def test_v03_unknown_keys_are_told_once(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    load(model(tmp_path, name, settings={"foo": 1}, **SHORT))
    assert len([r for r in caplog.records if "foo" in r.getMessage()]) == 1


UNDECIDABLE = {"gptq", "gptq_ordered", "gptq_3_bits", "ct_static"}
"""Formats whose tensors do not tell all that counts: the user is asked."""


@pytest.mark.parametrize("name", FORMATS)
def test_v03_q01_no_settings_at_all(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The tensors decide, or the user is asked: never another model."""
    folder = model(tmp_path, name, **SHORT)
    expected = logits(folder)
    edit_config(folder, quantization_config=None)
    found = outcome(folder)
    assert (found is None) == (name in UNDECIDABLE)
    told = [r.getMessage() for r in caplog.records if "no quantization settings found" in r.getMessage()]
    assert told or found is None
    if name == "ct_int8":  # int8 weights without a word on inputs are taken for the usual W8A8
        assert "w8a8_int8 {'is_dynamic': True}" in told[0]
    else:
        assert found is None or torch.equal(found, expected)


# --- V04: conventions for zeros that differ by one


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_v04_both_conventions_under_their_labels(tmp_path: Path, bits: int, symmetric: bool) -> None:
    kind, spec = registry().quant_configs["gptq"], WeightSpec(f"uint{bits}", (1, 32), has_zeros=not symmetric)
    found = {}
    for version in ("gptq", "gptq_v2"):
        settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": symmetric}
        own = kind.parse(QuantSource({**settings, "checkpoint_format": version}, "test"))
        folder = tiny_model(tmp_path / version, quantize=(own, spec), settings=own.settings(), **SHORT)
        found[version] = logits(folder)
        assert torch.allclose(found[version], logits(as_floats(folder, tmp_path / f"{version}-f")), atol=2e-4)
        zeros = {name: tensor for name, tensor in tensors_of(folder).items() if name.endswith("qzeros")}
        wrong = edit_settings(folder, checkpoint_format={"gptq": "gptq_v2", "gptq_v2": "gptq"}[version])
        assert torch.equal(logits(wrong), found[version]) == symmetric, "only symmetric zeros show their convention"
        assert zeros
    assert torch.equal(found["gptq"], found["gptq_v2"])


# --- V05: act-order


@pytest.mark.parametrize("name", ["gptq_ordered", "ct_ordered"])
def test_v05_ordered_inputs_equal_the_dense_model(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path / "q", name)
    reports = load(folder).engine.model_info.linears
    assert any("act_order" in report.spec for report in reports)
    expect_same_numbers(folder, tmp_path / "f", name)


@pytest.mark.parametrize("group", [16, 64, -1])
def test_v05_trivial_orders_are_dropped(tmp_path: Path, group: int) -> None:
    folder = model(tmp_path / "q", "gptq", spec=WeightSpec("uint4", (1, group), has_zeros=True))
    edit_settings(folder, desc_act=True)
    assert any(name.endswith("g_idx") for name in tensors_of(folder))
    assert not any("act_order" in report.spec for report in load(folder).engine.model_info.linears)
    expect_same_numbers(folder, tmp_path / "f", "gptq")
    expected = logits(folder)
    edit_tensors(folder, remove=[name for name in tensors_of(folder) if name.endswith("g_idx")])
    assert torch.equal(logits(edit_settings(folder, desc_act=False)), expected)


def test_v05_an_index_of_zeros_for_one_group(tmp_path: Path) -> None:
    folder = model(tmp_path, "gptq", spec=WeightSpec("uint4", (1, -1), has_zeros=True))
    expected = logits(folder)
    zeros = {n: torch.zeros_like(t) for n, t in tensors_of(folder).items() if n.endswith("g_idx")}
    assert zeros
    assert torch.equal(logits(edit_tensors(edit_settings(folder, desc_act=True), add=zeros)), expected)


@pytest.mark.parametrize("name", ["gptq_ordered", "ct_ordered"])
def test_v05_fused_members_with_different_orders_run_apart(tmp_path: Path, name: str) -> None:
    """Tiny models get a random order for each layer, so no two members agree."""
    folder = model(tmp_path / "q", name, **SHORT)
    reports = {r.layer: r for r in load(folder).engine.model_info.linears}
    assert reports["model.layers.0.self_attn.k_proj"].note == "not fused: group_index differs"
    tensors = tensors_of(folder)
    (order,) = [n for n in tensors if n.startswith("model.layers.0.self_attn.q_proj.") and n.endswith("g_idx")]
    same = {order.replace("q_proj", f"{member}_proj"): tensors[order].clone() for member in "kv"}
    fused = load(edit_tensors(folder, add=same))
    assert "model.layers.0.self_attn.q_proj|k_proj|v_proj" in kernels(fused)
    expect_same_numbers(folder, tmp_path / "f", name)


# --- V08-V10: kernels


@pytest.mark.parametrize("name", FORMATS)
def test_v08_without_any_kernel_of_a_plugin_core_serves(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path, name, **SHORT)
    own = [m.name for m in registry().linear_methods if not m.__module__.startswith("octavo.")]
    assert own
    bare = load(folder, without_methods(*own))
    assert set(kernels(bare).values()) == {"reference", "dense"}
    found = logits(folder, registry_=without_methods(*own))
    assert torch.allclose(found, logits(folder), atol=2e-2)


@pytest.mark.parametrize("name", FORMATS)
def test_v08_the_table_says_why_no_better_kernel_runs(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model(tmp_path, name, **SHORT)
    assert main(["inspect", str(folder), "--json"]) == 0
    rank = {method.name: method.rank for method in registry().linear_methods}
    for report in json.loads(capsys.readouterr().out)["linears"]:
        better = {kernel for kernel in rank if rank[kernel] > rank[report["kernel"]]}
        assert better <= {kernel for kernel, _ in report["refusals"]}, report
        assert all(len(reason) > 10 for _, reason in report["refusals"])


@pytest.mark.parametrize("name", FORMATS)
def test_v09_naming_the_format_pins_no_kernel(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path, name, **SHORT)
    own = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    assert kernels(load(folder)) == kernels(load(folder, quantization=own))


@pytest.mark.usefixtures("core_kernels")
def test_v09_int8_inputs_get_the_integer_kernel(tmp_path: Path) -> None:
    folder = model(tmp_path, "ct_tokens", **SHORT)
    for settings in ({}, {"quantization": "compressed-tensors"}):
        found = kernels(load(folder, **settings))
        assert found.pop("lm_head") == "dense"
        assert set(found.values()) == {"int8_torch"}
    slow = kernels(load(folder, linear_kernels="*=reference"))
    assert set(slow.values()) == {"reference"}


@pytest.mark.parametrize("sizes", [(64, 128), (96, 160), (192, 320)], ids=str)
@pytest.mark.parametrize("group", [16, 32, 64, -1])
@pytest.mark.parametrize("name", ["awq", "gptq", "ct_packed"])
def test_v10_q16_every_group_size_equals_the_dense_model(
    tmp_path: Path, name: str, group: int, sizes: tuple[int, int]
) -> None:
    """Whole models whose layers are no multiples of the usual tiles; the kit sweeps the kernels themselves."""
    hidden, inner = sizes
    spec = WeightSpec("uint4", (1, group), has_zeros=True)
    options = {"spec": spec, "hidden_size": hidden, "intermediate_size": inner, **SHORT}
    if name != "gptq" and group == 64 and (hidden % 64 or inner % 64):  # GPTQ alone has short last groups
        with pytest.raises(CheckpointError, match="group"):
            model(tmp_path / "q", name, **options)
    else:
        expect_same_numbers(model(tmp_path / "q", name, **options), tmp_path / "f", name)


# --- V44-V46: plugins and paths


@pytest.mark.parametrize("name", ["gptq", "ct_tokens", "fp8"])
def test_v44_a_format_whose_plugin_failed_is_told_with_the_reason(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path, name, **SHORT)
    failed = PluginInfo("lost", "octavo-lost", "0.1", state="failed", reason="ImportError: no module named 'x'")
    bare = replace(registry(), quant_configs={}, plugins=(failed,))
    with pytest.raises(CheckpointError) as caught:
        load(folder, bare)
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    assert all(part in str(caught.value) for part in (f"'{method}'", "lost", "ImportError: no module named 'x'"))


def test_v45_a_method_that_nobody_provides_lists_what_is_installed(tmp_path: Path) -> None:
    folder = model(tmp_path, "gptq", settings={"quant_method": "exl9"}, **SHORT)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert all(part in str(caught.value) for part in ("'exl9'", *LABELS, "octavo plugins"))


@pytest.mark.parametrize("path", ["nowhere.gguf", "deep/er/nowhere.safetensors"])
def test_v46_files_that_do_not_exist(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="no such model folder") as caught:
        load(tmp_path / path)
    assert str(tmp_path / path) in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "notes.txt", "config.json"])
def test_v46_files_that_are_no_model(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path, "gptq", **SHORT)
    (folder / "notes.txt").write_text("hello")
    with pytest.raises(OctavoError, match=f"{name}(.|\n)*folder"):
        load(folder / name)


def test_formats_of_this_file_are_all_that_are_written() -> None:
    """A format that a new plugin writes gets its row in formats_support.py, and so all of these cases."""
    written = {target for kind in registry().quant_configs.values() for target in kind.targets}
    assert {target for target, _ in FORMATS.values()} == written
