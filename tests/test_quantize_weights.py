"""`--quantize-weights`: float checkpoints quantised while they load, by rounding to nearest; and mixed precision."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import all_logits, registry

from octavo import LLM, ConfigError, LinearLayer, WeightSpec, round_to_nearest
from octavo.cli import main
from octavo.quant.online import SCHEMES
from octavo.testing import tiny_model
from octavo_awq.config import AWQConfig

INT8 = WeightSpec("int8", (1, -1))
INT4_64 = WeightSpec("uint4", (1, 64), has_zeros=True)
INT4_128 = WeightSpec("uint4", (1, 128), has_zeros=True)
pytestmark = pytest.mark.usefixtures("core_kernels")
IDS = [int(i) for i in torch.randint(0, 250, (48,), generator=torch.Generator().manual_seed(3))]
QKV = "model.layers.*.self_attn.q_proj|k_proj|v_proj"


def load(folder: Path, **settings: object) -> LLM:
    return LLM(str(folder), registry=registry(), dtype="float32", num_blocks_override=32, **settings)


def logits(folder: Path, **settings: object) -> torch.Tensor:
    return all_logits(load(folder, **settings), IDS)


def loaded(llm: LLM) -> dict[str, str]:
    """The schemes of the kernel table; layers of different number are one."""
    return {r.layer.replace(".0.", ".*.").replace(".1.", ".*."): r.spec for r in llm.engine.model_info.linears}


def planned(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, str]:
    report = inspect(folder, capsys, *options)
    schemes = {r["layer"].replace(".0.", ".*.").replace(".1.", ".*."): r["spec"] for r in report["linears"]}
    return schemes | {"embedding": report["embedding"]["spec"]}


def inspect(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    capsys.readouterr()
    assert main(["inspect", str(folder), "--json", "--kv-cache-memory-bytes", "1M", *options]) == 0
    return json.loads(capsys.readouterr().out)


def rounded(source: Path, folder: Path, specs: Mapping[str, WeightSpec]) -> Path:
    """A float model whose weights are what rounding makes of the source's: an answer that shares no loading code."""
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        spec = next((spec for pattern, spec in specs.items() if fnmatchcase(module, pattern)), None)
        if spec is not None and tensor.ndim == 2:
            tensors[name] = round_to_nearest(tensor, spec).dequantize()
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("untied") / "model", "Qwen2ForCausalLM")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tied") / "model", tie=True)


# --- what becomes what


@pytest.mark.parametrize(("scheme", "spec", "down"), [("int8", INT8, INT8), ("int4", INT4_64, INT4_128)])
def test_a_scheme_alone_means_the_linears_of_the_layers(
    untied: Path, tmp_path: Path, scheme: str, spec: WeightSpec, down: WeightSpec
) -> None:
    llm = load(untied, quantize_weights=scheme)
    specs = {"*.down_proj": down, "*_proj": spec}
    assert loaded(llm) == {
        QKV: str(spec),
        "model.layers.*.self_attn.o_proj": str(spec),
        "model.layers.*.mlp.gate_proj|up_proj": str(spec),
        "model.layers.*.mlp.down_proj": str(down),
        "lm_head": "float",
    }
    expected = logits(rounded(untied, tmp_path / "rounded", specs))
    assert (all_logits(llm, IDS) - expected).abs().max() < 2e-5
    assert not torch.allclose(expected, logits(untied), atol=1e-3)


def test_the_option_alone_means_the_format_of_quantization(
    untied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = planned(untied, capsys, "--quantize-weights", "-q", "awq")
    assert shown[QKV] == "uint4 g64 asym"
    assert shown["model.layers.*.mlp.down_proj"] == "uint4 g128 asym"
    assert (shown["lm_head"], shown["embedding"]) == ("float", "float")
    llm = load(untied, quantize_weights=True, quantization="awq")
    assert loaded(llm) | {"embedding": "float"} == shown
    specs = {"*.down_proj": INT4_128, "*_proj": INT4_64}
    assert (all_logits(llm, IDS) - logits(rounded(untied, tmp_path / "rounded", specs))).abs().max() < 2e-5


def test_a_map_of_patterns(untied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "lm_head=int8,*.mlp.*=awq"
    llm = load(untied, quantize_weights=text)
    assert loaded(llm) == {
        QKV: "float",
        "model.layers.*.self_attn.o_proj": "float",
        "model.layers.*.mlp.gate_proj|up_proj": "uint4 g64 asym",
        "model.layers.*.mlp.down_proj": "uint4 g128 asym",
        "lm_head": "int8 channel",
    }
    assert planned(untied, capsys, "--quantize-weights", text) == loaded(llm) | {"embedding": "float"}
    specs = {"lm_head": INT8, "*.mlp.down_proj": INT4_128, "*.mlp.*": INT4_64}
    assert (all_logits(llm, IDS) - logits(rounded(untied, tmp_path / "rounded", specs))).abs().max() < 2e-5


def test_the_first_pattern_counts_and_float_excepts(untied: Path) -> None:
    llm = load(untied, quantize_weights="*.o_proj=float,*.0.*=int4,*_proj=int8,int4")
    by_layer = {r.layer: r.spec for r in llm.engine.model_info.linears}
    assert by_layer["model.layers.0.self_attn.o_proj"] == by_layer["model.layers.1.self_attn.o_proj"] == "float"
    assert by_layer["model.layers.0.mlp.gate_proj|up_proj"] == "uint4 g64 asym"
    assert by_layer["model.layers.1.mlp.gate_proj|up_proj"] == "int8 channel"


def test_the_embedding_of_an_untied_model(untied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = planned(untied, capsys, "--quantize-weights", "embed_tokens=int8")
    assert shown.pop("embedding") == "int8 channel"
    assert set(shown.values()) == {"float"}
    found = logits(untied, quantize_weights="embed_tokens=int8")
    assert (found - logits(rounded(untied, tmp_path / "rounded", {"*.embed_tokens": INT8}))).abs().max() < 2e-5


def test_the_embedding_of_a_tied_model_is_its_head_too(
    tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = load(tied, quantize_weights="embed_tokens=int4")
    assert loaded(llm)["lm_head"] == "uint4 g64 asym"
    assert planned(tied, capsys, "--quantize-weights", "embed_tokens=int4") == loaded(llm) | {
        "embedding": "uint4 g64 asym"
    }
    expected = logits(rounded(tied, tmp_path / "rounded", {"*.embed_tokens": INT4_64}))
    assert (all_logits(llm, IDS) - expected).abs().max() < 2e-5
    head = next(r for r in llm.engine.model_info.linears if r.layer == "lm_head")
    assert head.num_bytes == 0, "one table in memory serves as both"


def test_a_tied_head_may_have_a_scheme_of_its_own(
    tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = load(tied, quantize_weights="lm_head=int8")
    shown = planned(tied, capsys, "--quantize-weights", "lm_head=int8")
    assert loaded(llm)["lm_head"] == shown["lm_head"] == "int8 channel"
    assert shown["embedding"] == "float"
    # the same as an untied model whose head is rounded
    apart = tmp_path / "apart"
    apart.mkdir()
    for file in tied.iterdir():
        (apart / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tied / "model.safetensors")
    tensors["lm_head.weight"] = round_to_nearest(tensors["model.embed_tokens.weight"], INT8).dequantize()
    save_file(tensors, apart / "model.safetensors")
    assert (all_logits(llm, IDS) - logits(apart)).abs().max() < 2e-5


def test_embedding_and_tied_head_in_two_schemes(tied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "embed_tokens=int8,lm_head=int4"
    shown = planned(tied, capsys, "--quantize-weights", text)
    assert (shown["embedding"], shown["lm_head"]) == ("int8 channel", "uint4 g64 asym")
    assert loaded(load(tied, quantize_weights=text))["lm_head"] == "uint4 g64 asym"


def test_inputs_of_an_embedding_are_no_activations(tied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "w8a8" not in registry().quant_configs and "compressed-tensors" not in registry().quant_configs:
        pytest.skip("no installed plugin quantises inputs")
    scheme = "w8a8" if "w8a8" in registry().quant_configs else "compressed-tensors"
    text = f"embed_tokens={scheme},{scheme}"
    shown = planned(tied, capsys, "--quantize-weights", text)
    assert shown[QKV] == "int8 channel x int8 per_token"
    assert shown["embedding"] == "int8 channel"
    llm = load(tied, quantize_weights=text)
    assert loaded(llm)[QKV] == "int8 channel x int8 per_token"
    assert loss(all_logits(llm, IDS)) == pytest.approx(loss(logits(tied)), rel=0.02)


# --- what stays


def test_layers_that_are_quantised_already_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    quantize = (AWQConfig(bits=4, group_size=32), WeightSpec("uint4", (1, 32), has_zeros=True))
    folder = tiny_model(tmp_path / "awq", quantize=quantize, settings=settings, skip=["*.layers.1.mlp.*"])
    shown = {r["layer"]: r["spec"] for r in inspect(folder, capsys, "--quantize-weights", "int8")["linears"]}
    assert shown["model.layers.0.mlp.down_proj"] == "uint4 g32 asym"
    assert shown["model.layers.1.mlp.down_proj"] == "int8 channel"
    llm = load(folder, quantize_weights="int8")
    assert {r.layer: r.spec for r in llm.engine.model_info.linears} == shown
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items()}
    for name, tensor in tensors.items():
        if "layers.1.mlp" in name:
            tensors[name] = round_to_nearest(tensor, INT8).dequantize()
    expected_folder = tmp_path / "expected"
    expected_folder.mkdir()
    for file in folder.iterdir():
        (expected_folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, expected_folder / "model.safetensors")
    assert (all_logits(llm, IDS) - logits(expected_folder)).abs().max() < 2e-5


def test_a_stored_quantised_embedding_stays_as_the_tied_head(
    tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "awq"
    folder.mkdir()
    for file in tied.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tied / "model.safetensors")
    table = tensors.pop("model.embed_tokens.weight")
    layer = LinearLayer("model.embed_tokens", table.shape[1], table.shape[0])
    awq = AWQConfig(group_size=64)
    stored = awq.serialise(layer, round_to_nearest(table, INT4_64))
    save_file(tensors | {f"{layer.name}.{suffix}": t for suffix, t in stored.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": awq.settings()}
    (folder / "config.json").write_text(json.dumps(config))
    shown = planned(folder, capsys, "--quantize-weights", "lm_head=int8")
    assert shown["embedding"] == shown["lm_head"] == "uint4 g64 asym"
    assert "nothing matches the pattern 'lm_head'" in caplog.text
    assert loaded(load(folder, quantize_weights="lm_head=int8"))["lm_head"] == "uint4 g64 asym"


def test_the_format_of_a_quantised_checkpoint_is_still_guarded(tmp_path: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    quantize = (AWQConfig(bits=4, group_size=32), WeightSpec("uint4", (1, 32), has_zeros=True))
    folder = tiny_model(tmp_path / "awq", quantize=quantize, settings=settings)
    with pytest.raises(ConfigError, match="--quantization says 'other'"):
        load(folder, quantization="other", quantize_weights=True)


def test_what_a_scheme_cannot_hold_stays_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_model(tmp_path / "odd", intermediate_size=100)
    with caplog.at_level(logging.WARNING):
        llm = load(folder, quantize_weights="awq")
    assert loaded(llm)["model.layers.*.mlp.gate_proj|up_proj"] == "float"
    assert loaded(llm)["model.layers.*.mlp.down_proj"] == "float"
    assert loaded(llm)[QKV] == "uint4 g64 asym"
    assert "'awq' cannot hold model.layers.0.mlp.gate_proj (64 inputs, 100 outputs)" in caplog.text
    assert "and 5 other layer(s)" in caplog.text


def test_the_head_of_a_nested_model_has_its_short_name(untied: Path, tmp_path: Path) -> None:
    tensors = {f"language_model.{name}": t for name, t in load_file(untied / "model.safetensors").items()}
    for file in untied.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    schemes = "lm_head=int8,layers.0.mlp.*=int8"
    assert loaded(load(tmp_path, quantize_weights=schemes))["language_model.lm_head"] == "int8 channel"
    assert torch.equal(logits(tmp_path, quantize_weights=schemes), logits(untied, quantize_weights=schemes))


# --- mistakes


@pytest.mark.parametrize("text", ["int9", "lm_head=int9", "*.mlp.*=int8,int9"])
@pytest.mark.parametrize("command", ["inspect", "generate"])
def test_unknown_schemes_are_answered_with_the_known(
    untied: Path, capsys: pytest.CaptureFixture[str], text: str, command: str
) -> None:
    arguments = [command, str(untied), "--quantize-weights", text]
    assert main([*arguments, "--prompt", "a"] if command == "generate" else arguments) == 2
    message = capsys.readouterr().err
    assert "no scheme 'int9'" in message
    assert all(known in message for known in ("int8", "int4", "float", "awq"))


def test_unknown_schemes_are_refused_where_nothing_would_use_them(untied: Path) -> None:
    with pytest.raises(ConfigError, match="no scheme 'int9'"):
        load(untied, quantize_weights="lm_head=int8,*.nothing=int9")


def test_a_bare_option_without_a_format_is_refused(untied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(untied), "--quantize-weights"]) == 2
    assert "--quantization" in capsys.readouterr().err


def test_patterns_that_match_nothing_are_told(
    untied: Path, tied: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "*.mlps.*=int8,lm_head=int8,layers.0.mlp.*=int8,model.layers.1.mlp.*=int8"
    for folder in (untied, tied):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            inspect(folder, capsys, "--quantize-weights", text)
        told = [r.getMessage() for r in caplog.records if "nothing matches" in r.getMessage()]
        assert told == ["--quantize-weights: nothing matches the pattern '*.mlps.*'"]


# --- mixed precision


def test_fused_members_that_differ_run_apart(untied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "*.0.*.q_proj=int8,*.up_proj=int4"
    llm = load(untied, quantize_weights=text)
    table = {r.layer: (r.spec, r.note) for r in llm.engine.model_info.linears}
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    assert table[f"{attention}.q_proj"][0] == "int8 channel"
    assert table[f"{attention}.k_proj"][0] == table[f"{attention}.v_proj"][0] == "float"
    assert table[f"{mlp}.gate_proj"][0] == "float"
    assert table[f"{mlp}.up_proj"][0] == "uint4 g64 asym"
    apart = [f"{attention}.{name}" for name in ("q_proj", "k_proj", "v_proj")] + [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    assert all("not fused" in table[name][1] for name in apart)
    assert table["model.layers.1.self_attn.q_proj|k_proj|v_proj"] == ("float", "")
    specs = {"*.0.*.q_proj": INT8, "*.up_proj": INT4_64}
    assert (all_logits(llm, IDS) - logits(rounded(untied, tmp_path / "rounded", specs))).abs().max() < 2e-5
    shown = inspect(untied, capsys, "--quantize-weights", text)["linears"]
    assert {r["layer"]: r["spec"] for r in shown} == {name: spec for name, (spec, _) in table.items()}
    assert all("not fused" in r["note"] for r in shown if r["layer"] in apart)
    assert main(["inspect", str(untied), "--quantize-weights", text]) == 0
    assert "not fused" in capsys.readouterr().out


# --- numbers and memory


def loss(values: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(values[:-1], torch.tensor(IDS[1:])))


def needs_scheme(scheme: str) -> None:
    if scheme == "fp8" and scheme not in registry().quant_configs:
        pytest.skip("no installed plugin brings the format fp8")


@pytest.mark.parametrize(("scheme", "allowed"), [("int8", 0.01), ("fp8", 0.05), ("int4", 0.2)])
def test_rounding_changes_little(untied: Path, scheme: str, allowed: float) -> None:
    needs_scheme(scheme)
    before = logits(untied)
    after = logits(untied, quantize_weights=scheme)
    assert loss(after) == pytest.approx(loss(before), rel=allowed)
    assert not torch.equal(after, before)


@pytest.mark.parametrize(("scheme", "allowed"), [("int8", 0.005), ("awq", 0.05), ("fp8", 0.02)])
def test_a_trained_model_keeps_its_loss(shared: Path, scheme: str, allowed: float) -> None:
    needs_scheme(scheme)
    folder = shared / "checkpoints" / "tiny-llama-fp16"
    ids = load_file(folder / "reference.safetensors")["input_ids"][0]

    def trained_loss(**settings: object) -> float:
        values = all_logits(load(folder, **settings), ids.tolist())
        return float(torch.nn.functional.cross_entropy(values[:-1], ids[1:]))

    assert trained_loss(quantize_weights=scheme) == pytest.approx(trained_loss(), abs=allowed)


@pytest.mark.parametrize(("text", "share"), [("int8,embed_tokens=int8,lm_head=int8", 0.30), ("int4", 0.55)])
def test_memory_falls_as_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, share: float) -> None:
    folder = tiny_model(tmp_path / "model", hidden_size=256, head_dim=64, intermediate_size=512)

    def bytes_of(*options: str) -> tuple[int, int]:
        decoder = load(folder, quantize_weights=options[-1] if options else {}).engine.executor.runner.model
        tensors = {t.data_ptr(): t.numel() * t.element_size() for t in [*decoder.parameters(), *decoder.buffers()]}
        return inspect(folder, capsys, *options)["resident_bytes"], sum(tensors.values())

    before_plan, before = bytes_of()
    after_plan, after = bytes_of("--quantize-weights", text)
    assert after < share * before
    assert after_plan < share * before_plan
    assert after_plan == pytest.approx(after, rel=0.15)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_v07_groups_of_zeros_and_of_tiny_numbers(tmp_path: Path, scheme: str, dtype: torch.dtype) -> None:
    """A group that is all zero, or smaller than the smallest normal number, gives finite scales and weights near it."""
    spec = SCHEMES[scheme](LinearLayer("layer", 128, 4))
    assert spec is not None
    tiny = torch.finfo(dtype).tiny
    weight = torch.zeros(4, 128, dtype=dtype)
    weight[1, ::3], weight[2, ::2], weight[3] = 1.0, tiny / 4, torch.linspace(-2, 3, 128)
    quantised = round_to_nearest(weight, spec)
    quantised.check(LinearLayer("layer", 128, 4))
    back = quantised.dequantize()
    assert quantised.scales is not None
    assert bool((quantised.scales > 0).all())
    assert not back[0].any()
    assert bool((back[2].abs() <= 2 * tiny).all())
    largest = weight.float().abs().amax(1, keepdim=True)
    assert bool(((back - weight.float()).abs() <= largest / (7 if scheme == "int4" else 120) + tiny).all())
