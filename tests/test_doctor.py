"""`octavo doctor`: every kind of finding once, silence on good models, and what it promises about reading and exit codes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import registry
from torch import Tensor

from octavo import (
    ActivationSpec,
    Checkpoint,
    EngineConfig,
    LinearLayer,
    QuantSource,
    Registry,
    WeightSpec,
    round_to_nearest,
)
from octavo.cli import main
from octavo.front import doctor as doctor_module
from octavo.front.doctor import Diagnosis, examine
from octavo.front.lint import READ_LIMIT, odd_numbers
from octavo.plugins import PluginInfo
from octavo.testing import tiny_model, tiny_tokenizer
from octavo_awq.config import AWQConfig

pytestmark = pytest.mark.usefixtures("core_kernels")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
DOWN = "model.layers.1.mlp.down_proj"
ACT = "model.layers.1.mlp.act"
KINDS = {
    "attention",
    "chat_template",
    "code_range",
    "config",
    "constant_groups",
    "files",
    "format",
    "kernel",
    "kv_format",
}
KINDS |= {"kv_scales", "kv_scales_unused", "layer", "log", "mean", "memory", "plugin", "scale_types", "settings"}
KINDS |= {"small_scales", "tensors", "tied_head", "tokenizer", "unread_tensors", "unused_file", "values", "vocabulary"}
KINDS |= {"zero_scales"}


def awq_model(folder: Path, **settings: object) -> Path:
    quantize = (AWQConfig(bits=4, group_size=32), WeightSpec("uint4", (1, 32), has_zeros=True))
    return tiny_model(folder, quantize=quantize, settings={**AWQ, **settings})


def edit(folder: Path, remove: tuple[str, ...] = (), add: dict[str, Tensor] | None = None) -> Path:
    stored = {n: t for n, t in load_file(folder / "model.safetensors").items() if n not in remove}
    save_file(stored | (add or {}), folder / "model.safetensors")
    return folder


def change(folder: Path, name: str, function: Callable[[Tensor], Tensor]) -> Path:
    return edit(folder, add={name: function(load_file(folder / "model.safetensors")[name].clone())})


def configure(folder: Path, file: str = "config.json", **values: object) -> Path:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path.parent


def without(folder: Path, *files: str) -> Path:
    for file in files:
        (folder / file).unlink()
    return folder


def diagnose(folder: Path | str, **settings: Any) -> Diagnosis:
    return examine(EngineConfig(model=folder, **settings))


def found(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(finding.severity, finding.kind) for finding in diagnosis.findings.found]


def sharded(folder: Path) -> Path:
    return tiny_model(folder, shards=3)


def embedding_with_inputs(folder: Path) -> Path:
    if (kind := registry().quant_configs.get("w8a8_int8")) is None:
        pytest.skip("no installed plugin reads quantised inputs")
    spec = WeightSpec("int8", (1, -1), activation=ActivationSpec("int8"))
    settings = kind.parse(QuantSource({}, "test"))
    stored = load_file(tiny_model(folder, settings=settings.settings()) / "model.safetensors")
    table = stored["model.embed_tokens.weight"]
    layer = LinearLayer("model.embed_tokens", table.shape[1], table.shape[0])
    packed = settings.serialise(layer, round_to_nearest(table, spec))
    return edit(folder, add={f"{layer.name}.{suffix}": tensor for suffix, tensor in packed.items()})


def fill(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def spoilt(tensor: Tensor) -> Tensor:
    tensor.view(-1)[3] = float("nan")
    return tensor


def blank(tensor: Tensor) -> Tensor:
    tensor[0] = 0
    return tensor


Case = tuple[Callable[[Path], Path], str, str, str]
CASES: dict[str, Case] = {
    "no folder": (lambda p: p / "nowhere", "error", "files", "no such model folder"),
    "empty folder": (lambda p: p, "error", "files", "holds no weights and no config.json"),
    "damaged weights": (
        lambda p: write(tiny_model(p) / "model.safetensors", b"\0" * 9),
        "error",
        "files",
        "safetensors",
    ),
    "config.json is no JSON": (lambda p: write(tiny_model(p) / "config.json", "{"), "error", "files", "as JSON"),
    "config.json is missing": (lambda p: without(tiny_model(p), "config.json"), "error", "files", "no config.json"),
    "bad generation_config": (
        lambda p: write(tiny_model(p) / "generation_config.json", "["),
        "error",
        "config",
        "as JSON",
    ),
    "unknown architecture": (
        lambda p: configure(tiny_model(p), architectures=["NewForCausalLM"]),
        "error",
        "config",
        "NewForCausalLM is not supported",
    ),
    "absurd number of layers": (
        lambda p: configure(tiny_model(p), num_hidden_layers=2_000_000_000),
        "error",
        "config",
        "at most 10000",
    ),
    "home of nobody": (lambda p: Path("~nobody-here/model"), "error", "files", "home directory"),
    "index names a missing file": (
        lambda p: without(sharded(p), "model-00002-of-00003.safetensors"),
        "error",
        "files",
        "1 of 3 files that the index names are missing",
    ),
    "file that the index does not name": (
        lambda p: write(sharded(p) / "other.safetensors", b""),
        "note",
        "unused_file",
        "model.safetensors.index.json does not name it",
    ),
    "leftover bin": (lambda p: write(tiny_model(p) / "pytorch_model.bin", b""), "note", "unused_file", "is not read"),
    "unknown format": (
        lambda p: tiny_model(p, settings={"quant_method": "exl9"}),
        "error",
        "format",
        "no installed plugin reads quantization format 'exl9'",
    ),
    "nothing quantised": (lambda p: tiny_model(p, settings=AWQ), "warning", "log", "not one layer is quantised"),
    "unread settings": (lambda p: awq_model(p, foo=1), "warning", "log", "not understood: foo"),
    "two settings disagree": (
        lambda p: write(awq_model(p) / "quantize_config.json", json.dumps({**AWQ, "group_size": 64})),
        "warning",
        "log",
        "group_size",
    ),
    "missing tensor": (lambda p: edit(tiny_model(p), (f"{DOWN}.weight",)), "error", "tensors", DOWN),
    "missing scales": (lambda p: edit(awq_model(p), (f"{DOWN}.scales",)), "error", "layer", "scales is missing"),
    "label against shapes": (lambda p: awq_model(p, version="gemv"), "error", "layer", "lie as AWQ gemm"),
    "group against shapes": (lambda p: awq_model(p, group_size=64), "error", "layer", "group_size"),
    "norm of another size": (
        lambda p: edit(tiny_model(p), add={"model.norm.weight": torch.ones(3)}),
        "error",
        "layer",
        "config.json implies",
    ),
    "zeros against settings": (lambda p: awq_model(p, zero_point=False), "error", "values", "symmetric"),
    "scale that is no number": (
        lambda p: change(awq_model(p), f"{DOWN}.scales", spoilt),
        "error",
        "values",
        "scales holds 1 value",
    ),
    "norm that is no number": (
        lambda p: change(tiny_model(p), "model.norm.weight", spoilt),
        "error",
        "values",
        "NaN or infinite",
    ),
    "zero scales": (lambda p: change(awq_model(p), f"{DOWN}.scales", blank), "warning", "zero_scales", "64 of 256"),
    "tiny scales": (
        lambda p: change(awq_model(p), f"{DOWN}.scales", lambda t: fill(1e-6)(t).half()),
        "note",
        "small_scales",
        "digits",
    ),
    "scales of two types": (
        lambda p: change(awq_model(p), f"{DOWN}.scales", Tensor.half),
        "note",
        "scale_types",
        f"torch.float16 in {DOWN}.scales",
    ),
    "zeros off": (lambda p: change(awq_model(p), f"{DOWN}.qzeros", fill(-1)), "warning", "mean", "not centred"),
    "codes of half a byte": (
        lambda p: change(awq_model(p), f"{DOWN}.qweight", lambda t: t & 0x77777777),
        "warning",
        "code_range",
        "0 to 7 of 0 to 15",
    ),
    "constant groups": (
        lambda p: change(awq_model(p), f"{DOWN}.qweight", lambda t: torch.where(torch.arange(128)[:, None] < 32, 0, t)),
        "warning",
        "constant_groups",
        "25.0%",
    ),
    "unknown tensor": (
        lambda p: edit(tiny_model(p), add={"model.extra.weight": torch.ones(3)}),
        "warning",
        "log",
        "not used: model.extra.weight",
    ),
    "float weight beside a quantised one": (
        lambda p: edit(awq_model(p), add={f"{DOWN}.weight": torch.ones(64, 128)}),
        "error",
        "unread_tensors",
        f"{DOWN}.weight",
    ),
    "bias of the last norm": (
        lambda p: edit(tiny_model(p), add={"model.norm.bias": torch.ones(64)}),
        "error",
        "unread_tensors",
        "model.norm.bias",
    ),
    "bias of an embedding": (
        lambda p: edit(tiny_model(p), add={"model.embed_tokens.bias": torch.ones(288)}),
        "error",
        "layer",
        "an embedding has no bias",
    ),
    "embedding of quantised inputs": (embedding_with_inputs, "error", "layer", "cannot be looked up"),
    "divisor of another size": (
        lambda p: edit(awq_model(p), add={f"{ACT}.scales": torch.ones(4)}),
        "error",
        "layer",
        "config.json implies",
    ),
    "divisor of 0": (
        lambda p: edit(awq_model(p), add={f"{ACT}.scales": torch.arange(128) / 9}),
        "error",
        "values",
        "divided by 0",
    ),
    "unread quantised data": (
        lambda p: edit(awq_model(p), add={f"{DOWN}.input_scale": torch.ones(1)}),
        "error",
        "unread_tensors",
        f"{DOWN}.input_scale",
    ),
    "stored head though tied": (
        lambda p: configure(tiny_model(p), tie_word_embeddings=True),
        "note",
        "tied_head",
        "lm_head",
    ),
    "no tokenizer": (
        lambda p: without(tiny_model(p), "tokenizer.json", "tokenizer_config.json"),
        "error",
        "tokenizer",
        "no tokenizer",
    ),
    "damaged tokenizer": (lambda p: write(tiny_model(p) / "tokenizer.json", "{}"), "error", "tokenizer", "cannot load"),
    "damaged settings of the tokenizer": (
        lambda p: write(tiny_model(p) / "tokenizer_config.json", "{"),
        "error",
        "tokenizer",
        "cannot load",
    ),
    "damaged template": (
        lambda p: write(tiny_model(p) / "chat_template.jinja", b"\xff"),
        "error",
        "tokenizer",
        "cannot load",
    ),
    "large tokenizer": (
        lambda p: tiny_tokenizer(tiny_model(p), [f"w{i}" for i in range(40)]) and p,
        "warning",
        "vocabulary",
        "ids up to 298",
    ),
    "no template": (
        lambda p: configure(without(tiny_model(p), "tokenizer_config.json"), eos_token_id=257),
        "note",
        "chat_template",
        "chat requests will be refused",
    ),
    "end token beyond the vocabulary": (
        lambda p: configure(tiny_model(p), "generation_config.json", eos_token_id=[257, 4000]),
        "warning",
        "log",
        "not a token of the model: 4000",
    ),
    "zero KV scale": (
        lambda p: edit(tiny_model(p), add={f"model.layers.{i}.self_attn.k_scale": torch.zeros(1) for i in (0, 1)}),
        "error",
        "kv_scales",
        "not a positive number",
    ),
    "KV scales of some layers": (
        lambda p: edit(tiny_model(p), add={"model.layers.0.self_attn.k_scale": torch.ones(1)}),
        "error",
        "kv_scales",
        "only some layers",
    ),
    "KV scales that nothing uses": (
        lambda p: edit(tiny_model(p), add={f"model.layers.{i}.self_attn.k_scale": torch.ones(1) for i in (0, 1)}),
        "note",
        "kv_scales_unused",
        "stored as 'auto'",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_finding(tmp_path: Path, name: str) -> None:
    make, severity, kind, text = CASES[name]
    diagnosis = diagnose(make(tmp_path))
    matching = [f for f in diagnosis.findings.found if (f.severity, f.kind) == (severity, kind) and text in str(f)]
    assert len(matching) >= 1, "\n".join(map(str, diagnosis.findings.found))
    assert diagnosis.loads == (severity != "error")
    assert diagnosis.exit_code(strict=False) == (severity == "error")
    assert diagnosis.exit_code(strict=True) == (severity != "note")
    others = [
        f for f in diagnosis.findings.found if f not in matching and f.severity == "warning" and severity == "note"
    ]
    assert not others, "a note comes alone"


SETTINGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "context": ({"max_model_len": 4096}, "settings", "exceeds the 512 positions"),
    "kv format": ({"kv_cache_dtype": "fp9"}, "kv_format", "fp9"),
    "attention": ({"attention_backend": "none"}, "attention", "no such backend"),
    "kernel": ({"linear_kernels": {"*down_proj": "none"}}, "kernel", "no such kernel"),
    "memory": ({"kv_cache_memory_bytes": 1}, "memory", "no memory for KV blocks"),
    "format": ({"quantization": "awq"}, "format", "not quantised"),
    "tokenizer": ({"tokenizer": "nowhere"}, "tokenizer", "no tokenizer"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_finding_about_settings(tmp_path: Path, name: str) -> None:
    settings, kind, text = SETTINGS[name]
    diagnosis = diagnose(tiny_model(tmp_path), **settings)
    errors = [f for f in diagnosis.findings.found if f.severity == "error"]
    assert {f.kind for f in errors} == {kind}
    assert text in str(errors[0])
    assert diagnosis.loads == (kind == "memory")
    assert diagnosis.exit_code(strict=False) == 1


def test_the_weights_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "free_bytes", lambda platform: 1000)
    diagnosis = diagnose(tiny_model(tmp_path))
    assert (diagnosis.loads, diagnosis.fits, diagnosis.kv_plan) == (True, False, None)
    assert ("error", "memory") in found(diagnosis)
    assert diagnosis.as_json()["plan"]["linears"], "what would run is shown all the same"


def test_failed_plugins_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry_for = doctor_module.registry_for

    def with_failure(config: EngineConfig) -> Registry:
        registry = registry_for(config)
        failed = PluginInfo("broken", "octavo-broken", "1", state="failed", reason="ImportError: no such op")
        return replace(registry, plugins=(*registry.plugins, failed))

    monkeypatch.setattr(doctor_module, "registry_for", with_failure)
    diagnosis = diagnose(tiny_model(tmp_path))
    assert [str(f) for f in diagnosis.findings.found if f.kind == "plugin"] == [
        "warning: plugin broken (octavo-broken 1) failed to load: ImportError: no such op"
    ]


def test_the_tests_know_every_kind() -> None:
    covered = {kind for _, _, kind, _ in CASES.values()} | {kind for _, kind, _ in SETTINGS.values()} | {"plugin"}
    assert covered == KINDS
    sources = [
        Path(str(doctor_module.__file__)).with_name(f"{name}.py").read_text()
        for name in ("doctor", "lint", "preflight")
    ]
    assert [kind for kind in KINDS if not any(f'"{kind}"' in source for source in sources)] == []


def test_all_refusals_are_told_and_not_only_the_first(tmp_path: Path) -> None:
    folder = edit(awq_model(tmp_path), (f"{DOWN}.scales", "model.layers.0.mlp.up_proj.qzeros", "model.norm.weight"))
    edit(folder, add={"model.layers.0.self_attn.k_scale": torch.zeros(1)})
    write(without(folder, "tokenizer_config.json") / "tokenizer.json", "{}")
    diagnosis = diagnose(folder)
    kinds = [kind for severity, kind in found(diagnosis) if severity == "error"]
    assert sorted(kinds) == ["kv_scales", "layer", "layer", "tensors", "tokenizer"]
    assert {f.layer for f in diagnosis.findings.found if f.kind == "layer"} == {DOWN, "model.layers.0.mlp.up_proj"}


def test_what_needs_no_weights_is_told_where_they_cannot_be_opened(tmp_path: Path) -> None:
    folder = write(configure(tiny_model(tmp_path), hidden_act="tanh") / "model.safetensors", b"\0" * 9)
    write(folder / "tokenizer.json", "{}")
    errors = [f for f in diagnose(folder).findings.found if f.severity == "error"]
    assert [f.kind for f in errors] == ["files", "config", "tokenizer"]


def test_missing_tensors_are_told_where_the_format_is_unknown(tmp_path: Path) -> None:
    folder = edit(awq_model(tmp_path, quant_method="exl9"), ("model.norm.weight",))
    errors = [f for f in diagnose(folder).findings.found if f.severity == "error"]
    assert [f.kind for f in errors] == ["format", "tensors"]


def test_every_refusal_of_loading_is_foreseen(tmp_path: Path) -> None:
    """The cases above that are errors refuse to load with the same words."""
    from octavo import LLM, OctavoError

    installed = registry()
    for number, (make, severity, _, text) in enumerate(CASES.values()):
        folder = make(tmp_path / str(number))
        if severity == "error" and folder.is_dir() and (folder / "config.json").exists():
            with pytest.raises(OctavoError) as caught:
                LLM(str(folder), registry=installed, num_blocks_override=8)
            assert text in str(caught.value) or text == "no tokenizer"


# --- reading


def test_reading_stays_within_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "head_dim": 64,
        "num_hidden_layers": 2,
    }
    folder = tiny_model(tmp_path, vocab_size=2048, **big)
    read, num_bytes = Checkpoint.read, []

    def counted(self: Checkpoint, name: str) -> Tensor:
        tensor = read(self, name)
        num_bytes.append(tensor.numel() * tensor.element_size())
        return tensor

    monkeypatch.setattr(Checkpoint, "read", counted)
    diagnosis = diagnose(folder)
    total = (folder / "model.safetensors").stat().st_size
    side = sum(path.stat().st_size for path in folder.iterdir() if path.suffix == ".json")
    assert total > 2 * READ_LIMIT
    assert 2**20 < sum(num_bytes) + side <= READ_LIMIT
    assert diagnosis.exit_code(strict=True) == 0


# --- the command


def test_json_has_stable_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = edit(awq_model(tmp_path, foo=1), add={"model.extra.weight": torch.ones(3)})
    assert main(["doctor", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"verdict", "findings", "plan"}
    assert set(report["verdict"]) == {"loads", "fits", "longest_tokens", "free_bytes"}
    assert (report["verdict"]["loads"], report["verdict"]["fits"], report["verdict"]["longest_tokens"]) == (
        True,
        True,
        512,
    )
    fields = {"severity", "kind", "message", "file", "tensor", "layer", "expected", "found", "hint"}
    assert report["findings"]
    assert all(set(finding) == fields for finding in report["findings"])
    assert report["plan"]["unread_tensors"] == ["model.extra.weight"]
    assert report["plan"]["unread_settings"] == ["foo"]
    assert {r["kernel"] for r in report["plan"]["linears"]} == {"reference", "dense"}
    assert report["plan"]["kv"]["num_blocks"] > 0


def test_json_where_there_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "nowhere"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["plan"] is None
    assert report["verdict"]["loads"] is False
    assert report["verdict"]["fits"] is None
    assert [finding["kind"] for finding in report["findings"]] == ["files"]


def test_the_printed_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(awq_model(tmp_path, foo=1))]) == 0
    shown = capsys.readouterr()
    for part in ("uint4 g32 asym", "reference", "KV memory", "warning: config.json", "foo", "1 warning"):
        assert part in shown.out
    verdict = shown.out.strip().splitlines()[-1]
    assert all(part in verdict for part in ("loads: yes", "fits: yes", "longest context: 512 tokens"))
    assert "WARNING" not in shown.err, "what is a finding is not logged too"


def test_findings_alike_are_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(awq_model(tmp_path, group_size=64))]) == 1
    out = capsys.readouterr().out
    assert "more like this" in out
    assert "loads: no; fits: unknown" in out
    assert len(diagnose(tmp_path).findings.found) == 14, "each layer is a finding of its own"


def test_strict_counts_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = awq_model(tmp_path, foo=1)
    assert [main(["doctor", str(folder)]), main(["doctor", str(folder), "--strict"])] == [0, 1]


def test_settings_that_concern_no_folder_are_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tiny_model(tmp_path)), "--block-size", "0"]) == 2
    assert "block_size" in capsys.readouterr().err


def test_help_says_what_the_exit_codes_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Exit code: 0 if it would load and fit, 1 if not" in text
    assert all(flag in text for flag in ("--strict", "--json", "32 MiB"))


def test_logging_is_as_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    handlers = logging.getLogger().handlers[:]
    diagnose(awq_model(tmp_path, foo=1))
    assert logging.getLogger().handlers == handlers
    assert "foo" not in caplog.text
    logging.getLogger("octavo.test").warning("later")
    assert "later" in caplog.text


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_q27_zeros_read_by_the_other_convention_are_suspected(bits: int) -> None:
    weight = round_to_nearest(torch.randn(64, 64), WeightSpec(f"uint{bits}", (1, 32), has_zeros=True))
    layer = LinearLayer("layer", 64, 64)
    assert weight.zeros is not None
    assert list(odd_numbers(layer, weight)) == []
    for shift in (-1, 1):
        (finding,) = odd_numbers(layer, replace(weight, zeros=weight.zeros + shift))
        assert (finding.kind, finding.layer) == ("mean", "layer")


def test_constant_groups_are_seen_whatever_their_order() -> None:
    weight = round_to_nearest(torch.randn(64, 64), WeightSpec("uint4", (1, 16), has_zeros=True))
    index = (torch.randperm(64, generator=torch.Generator().manual_seed(0)) // 16).to(torch.int32)
    ordered = replace(weight, spec=replace(weight.spec, act_order=True), group_index=index)
    layer = LinearLayer("layer", 64, 64)
    assert list(odd_numbers(layer, ordered)) == []
    constant = torch.where(torch.arange(64) % 2 == 0, 3, 12)[
        :, None
    ]  # on either side of the zeros, lest the mean be off too
    codes = torch.where(index == 2, constant, ordered.codes).to(torch.uint8)
    assert [f.kind for f in odd_numbers(layer, replace(ordered, codes=codes))] == ["constant_groups"]


@pytest.mark.parametrize("seed", range(30))
def test_damaged_folders_are_findings_too(tmp_path: Path, seed: int) -> None:
    """Flipped bytes in one of the files: whatever becomes of it, the doctor answers."""
    folder = awq_model(tmp_path)
    generator = torch.Generator().manual_seed(seed)
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    path = files[seed % len(files)]
    content = bytearray(path.read_bytes())
    for position in torch.randint(0, min(len(content), 4000), (4,), generator=generator).tolist():
        content[position] ^= int(torch.randint(1, 256, (1,), generator=generator))
    path.write_bytes(bytes(content))
    diagnosis = diagnose(folder)
    json.dumps(diagnosis.as_json())
    assert diagnosis.exit_code(strict=False) == (0 if diagnosis.loads and diagnosis.fits else 1)
