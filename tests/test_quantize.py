"""`octavo quantize`: that what is written computes what calibration computed, byte-identical runs, recipes, and refusals."""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from convert_support import needs, tensors_of
from safetensors.torch import load_file, save_file
from support import all_logits, registry

from octavo import (
    LLM,
    CalibratedGroup,
    ConfigError,
    EngineConfig,
    InputStatistics,
    QuantizedGroup,
    gram_loss,
)
from octavo.cli import main
from octavo.front.auto_bits import Choice, spend
from octavo.front.kv_calibration import calibrate
from octavo.front.recipe import Assignment, Recipe
from octavo.front.work_folder import WorkFolder
from octavo.model.checkpoint import open_checkpoint
from octavo.model.layerwise import ROLES, LayerwiseModel, Replacement, producers
from octavo.model.plan import ModelPlan
from octavo.model.shards import ShardWriter
from octavo.quant.calibration import InputSums, one_thread, parallel_map
from octavo.quant.quantizer import RoundToNearest
from octavo.testing import tiny_model

TEXT = "".join(chr(ord("a") + (i * i + i // 7) % 26) for i in range(3000))
PROMPT = [1, 5, 9, 60, 200, 33, 70, 71, 72, 100, 101, 99]
pytestmark = pytest.mark.usefixtures("core_kernels")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "Qwen2ForCausalLM", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


def quantize(model: Path, out: Path, text: Path, *options: str, method: str | None = "awq") -> int:
    few = ["--num-samples", "6", "--max-length", "64", "--calibration", str(text), "--disable-progress"]
    return main(["quantize", str(model), "--out", str(out), *(["--method", method] if method else []), *few, *options])


def recipe(folder: Path, content: str) -> str:
    file = folder / "recipe.yaml"
    file.write_text(content)
    return str(file)


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(f.name.encode() + f.read_bytes() for f in sorted(folder.iterdir()))).hexdigest()


def plan_of(folder: Path) -> ModelPlan:
    found = registry()
    config = EngineConfig(model=str(folder), dtype="float32")
    return ModelPlan.of(config, found, open_checkpoint(str(folder), found.checkpoint_readers))


def schemes(folder: Path) -> dict[str, str]:
    plan = plan_of(folder)
    layers = [layer for group in plan.groups for layer in group.layers]
    return {layer.name.removeprefix("model."): str(plan.stored_spec(layer)) for layer in layers}


def logits(folder: Path, ids: list[int] = PROMPT) -> torch.Tensor:
    return all_logits(LLM(str(folder), registry=registry(), dtype="float32", num_blocks_override=32), ids)


# --- the numbers


@torch.inference_mode()
def computed_layerwise(folder: Path, work: WorkFolder | None) -> torch.Tensor:
    """Logits of the prompt by the code that calibrates, with the layers that an unfinished run kept."""
    plan = plan_of(folder)
    run = LayerwiseModel(plan, torch.tensor([PROMPT]), quantised=True, floating=False, skip=0, folder=None)
    for index in range(plan.config.num_layers):
        floats, groups = run.open_layer(index), plan.layer_names(index).linears
        made = {} if work is None else work.load(index).replacements
        for role in ROLES:
            run.collect(role, groups[role].layers[0].in_features, {}, role)
            run.install(role, [made.get(layer, Replacement(floats[layer])) for layer in groups[role].layers])
        run.close_layer()
    (hidden,) = run.hidden("quantised")
    hidden = run._ops.rms_norm(hidden, plan.checkpoint.read("model.norm.weight").float(), plan.config.rms_norm_eps)
    return hidden @ plan.checkpoint.read("lm_head.weight").float().T


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"]
)
def test_the_calibration_run_computes_the_model(tmp_path: Path, architecture: str) -> None:
    sizes = {"sliding_window": 5} if architecture == "MistralForCausalLM" else {}
    folder = tiny_model(tmp_path / "model", architecture, **sizes)
    assert torch.allclose(computed_layerwise(folder, None), logits(folder), atol=2e-4)


def test_what_is_written_is_what_calibration_saw(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divisors end up in norms and in the rows of v and up, under grouped heads too; biases are divided along."""
    model = tiny_model(tmp_path / "model", "Qwen2ForCausalLM")
    monkeypatch.setattr(WorkFolder, "remove", lambda self: None)
    assert quantize(model, tmp_path / "out", text, "--group-size", "32", "--set", "scale_dtype=float32") == 0
    with WorkFolder(tmp_path / "out", _manifest(tmp_path / "out"), restart=False) as work:
        divided = [
            layer.name.rpartition(".")[2] for layer, r in work.load(0).replacements.items() if r.divisor is not None
        ]
        seen = computed_layerwise(model, work)
    assert divided, "no divisor was found, so that folding is not tested"
    found = logits(tmp_path / "out")
    assert torch.allclose(found, seen, atol=1e-3)
    assert float((found - logits(model)).square().mean()) < float(logits(model).square().mean())


def _manifest(out: Path) -> dict:
    return json.loads((out.with_name(f".{out.name}.quantising") / "manifest.json").read_text())


class Dividing(RoundToNearest):
    """Divides inputs by powers of two, each for whole groups of 32, so that not one code changes."""

    name = "dividing"
    calibrates = True

    def quantize(self, group: CalibratedGroup) -> QuantizedGroup:
        assert group.producers is not None
        width = (int(group.producers.max()) + 1) // (group.in_features // 32)
        divisor = torch.tensor([0.5, 4.0, 1.0, 2.0])[group.producers // width]
        assert torch.equal(group.storable(divisor), divisor), "norms are bf16, which powers of two keep"
        divided = replace(group, weights=tuple(weight * divisor for weight in group.weights))
        return QuantizedGroup(super().quantize(divided).weights, divisor)


def test_norms_and_linears_absorb_the_divisors_of_every_role(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("gptq")
    more = replace(registry(), quantizers={"dividing": Dividing, "rtn": RoundToNearest})
    monkeypatch.setattr("octavo.front.quantize_weights.registry_for", lambda config: more)
    options = ["--bits", "8", "--group-size", "32"]
    for method in ("dividing", "rtn"):
        assert quantize(model, tmp_path / method, text, *options, method=method) == 0
    assert torch.equal(logits(tmp_path / "dividing"), logits(tmp_path / "rtn"))
    changed = [
        n for n, t in tensors_of(tmp_path / "dividing").items() if not torch.equal(t, tensors_of(tmp_path / "rtn")[n])
    ]
    tails = {name.removeprefix("model.layers.0.") for name in changed if ".0." in name}
    assert {"input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.v_proj.scales"} <= tails
    assert {"self_attn.v_proj.bias", "mlp.up_proj.scales", "mlp.down_proj.scales"} <= tails


def test_query_heads_that_read_one_kv_head_share_a_divisor(model: Path) -> None:
    made = producers(plan_of(model), "o")
    assert made is not None
    assert made.tolist() == [*range(16), *range(16), *range(16, 32), *range(16, 32)]


def test_statistics_are_the_sums_that_they_say(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(50, 300, generator=generator) for _ in range(2))
    sums = InputSums(300, frozenset({"gram", "cross", "sample"}), 10)
    for part, before in zip(x.split(20), other.split(20), strict=True):
        sums.add(InputSums.terms(sums.needs, part, before, 5))
    found = sums.statistics()
    wide = x.double()
    assert torch.allclose(found.gram, wide.T @ wide, atol=1e-4)
    assert torch.allclose(found.cross, (other.double() - wide).T @ wide, atol=1e-4)
    assert torch.equal(found.gram, found.gram.T)
    assert found.tokens == 50
    assert found.sample.shape == (10, 300)
    assert torch.allclose(found.mean_abs, x.abs().mean(0), atol=1e-6)
    assert torch.equal(found.largest, x.abs().amax(0))
    divided = found.divided(torch.full((300,), 2.0))
    assert torch.allclose(divided.gram * 4, found.gram)


def test_the_gram_loss_is_the_direct_loss() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(700, 96, generator=generator) * torch.linspace(0.01, 30, 96)
    error = torch.randn(40, 96, generator=generator) * 0.01
    direct = float((x.double() @ error.double().T).square().sum())
    stats = InputStatistics.of(x)
    assert float(gram_loss(error, stats.gram)) == pytest.approx(direct, rel=1e-5)
    assert float(gram_loss(error, stats.gram.float())) == pytest.approx(direct, rel=1e-5)


def test_parallel_results_come_in_order() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
            found = list(parallel_map(lambda n: (n, torch.get_num_threads()), range(20)))
        assert found == [(n, 1) for n in range(20)]
        assert torch.get_num_threads() == 3
        with one_thread(), pytest.raises(ZeroDivisionError):
            list(parallel_map(lambda n: 1 // n, range(5)))
    finally:
        torch.set_num_threads(before)


# --- the same bytes


def test_threads_memory_and_repetition_change_no_byte(model: Path, text: Path, tmp_path: Path) -> None:
    before, digests = torch.get_num_threads(), set()
    try:
        for threads, options in ((1, ()), (3, ()), (2, ("--activation-memory", "0"))):
            torch.set_num_threads(threads)
            out = tmp_path / f"out{threads}"
            assert quantize(model, out, text, *options) == 0
            digests.add(digest(out))
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out1", "out2", "out3"], "something was left"
    assert quantize(model, tmp_path / "other", text, "--seed", "1") == 0
    assert digest(tmp_path / "other") not in digests


def test_a_killed_run_goes_on_and_gives_the_same_bytes(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import os, signal, sys\n"
        "from octavo.cli import main\n"
        "from octavo.front.work_folder import WorkFolder\n"
        "save = WorkFolder.save\n"
        "def killing(self, index, result):\n"
        "    save(self, index, result)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "WorkFolder.save = killing\n"
        "main(sys.argv[1:])\n"
    )
    command = ["quantize", str(model), "--out", str(tmp_path / "out"), "--method", "awq", "--num-samples", "6"]
    command += ["--max-length", "64", "--calibration", str(text), "--disable-progress"]
    run = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert run.returncode == -9, run.stderr
    assert [p.name for p in tmp_path.iterdir()] == [".out.quantising"], "a killed run must not look finished"
    kept = tmp_path / ".out.quantising" / "layer-00000.safetensors"
    before = kept.stat().st_mtime_ns
    assert quantize(model, tmp_path / "out", text, "--seed", "3") == 2
    assert "unfinished quantisation with another calibration" in capsys.readouterr().err
    assert kept.stat().st_mtime_ns == before
    assert quantize(model, tmp_path / "out", text) == 0
    assert quantize(model, tmp_path / "whole", text) == 0
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")
    assert not (tmp_path / ".out.quantising").exists()


def test_an_unfinished_run_of_another_job_is_kept_until_it_is_thrown_away(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / ".out.quantising"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"torch": "1.0"}')
    (folder / "layer-00000.safetensors").write_bytes(b"of another")
    assert quantize(model, tmp_path / "out", text) == 2
    assert "--restart" in capsys.readouterr().err
    assert (folder / "layer-00000.safetensors").read_bytes() == b"of another"
    assert quantize(model, tmp_path / "out", text, "--restart") == 0
    assert not folder.exists()


def test_two_processes_do_not_write_one_place(tmp_path: Path) -> None:
    def opened() -> WorkFolder:
        return WorkFolder(tmp_path / "out", {"a": 1}, restart=False)

    with opened(), pytest.raises(ConfigError, match="another process is writing it"):
        opened()
    with opened():
        pass


# --- recipes


MIXED = """
rules:
  - layers: "*.k_proj"
    method: keep
  - layers: ["layers.0.mlp.*", "lm_head"]
    method: rtn
    bits: 8
    group_size: -1
    symmetric: true
  - method: rtn
    group_size: 32
    smooth: 0.5
to: gptq
kv_scales: head
"""


def test_a_recipe_mixes_methods_keeps_layers_smooths_and_sets_kv_scales(
    model: Path, text: Path, tmp_path: Path
) -> None:
    needs("gptq")
    file = recipe(tmp_path, MIXED)
    assert quantize(model, tmp_path / "out", text, "--recipe", file, method=None) == 0
    found = schemes(tmp_path / "out")
    assert found["layers.0.self_attn.k_proj"] == found["layers.1.self_attn.k_proj"] == "float"
    assert found["layers.0.mlp.up_proj"].startswith("uint8 channel")
    assert found["lm_head"].startswith("uint8 channel")
    assert found["layers.1.mlp.up_proj"].startswith("uint4 g32")
    before, after = tensors_of(model), tensors_of(tmp_path / "out")
    for name in ("layers.0.input_layernorm.weight", "layers.0.self_attn.k_proj.weight"):
        assert not torch.equal(before[f"model.{name}"], after[f"model.{name}"]), (
            "what reads a smoothed norm is smoothed"
        )
    same = "model.layers.0.post_attention_layernorm.weight"
    assert torch.equal(before[same], after[same]), "the MLP of layer 0 is not smoothed"
    difference = logits(tmp_path / "out") - logits(model)
    assert 0 < float(difference.square().mean()) < 0.3 * float(logits(model).square().mean())
    config = EngineConfig(model=str(model), dtype="float32", disable_progress=True)
    scales, _ = calibrate(config, text.read_text(), 6, 64, 0, True)
    assert torch.allclose(after["model.layers.0.self_attn.k_scale"].flatten(), scales[0].k, rtol=1e-4)
    assert after["model.layers.1.self_attn.v_scale"].numel() == 2


def test_a_tied_head_that_is_quantised_becomes_a_head_of_its_own(text: Path, tmp_path: Path) -> None:
    needs("gptq")
    tied = tiny_model(tmp_path / "model", tie=True)
    file = recipe(tmp_path, "rules: [{layers: lm_head, method: rtn, bits: 8, group_size: 32}]\n")
    assert quantize(tied, tmp_path / "out", text, "--recipe", file, method=None) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(
        tensors_of(tied)["model.embed_tokens.weight"], tensors_of(tmp_path / "out")["model.embed_tokens.weight"]
    )
    assert torch.allclose(logits(tmp_path / "out"), logits(tied), atol=0.05)


def test_auto_bits_stay_within_their_size(model: Path, text: Path, tmp_path: Path) -> None:
    needs("gptq")
    options = ["--auto-bits", "5.2", "--group-size", "32"]
    assert quantize(model, tmp_path / "out", text, *options, method="rtn") == 0
    found = schemes(tmp_path / "out")
    sizes = {layer.name.removeprefix("model."): layer for group in plan_of(model).groups for layer in group.layers}
    sizes.pop("lm_head")
    bits = {name: int(found[name].removeprefix("uint")[0]) for name in sizes}
    assert len(set(bits.values())) > 1
    weights = {name: layer.in_features * layer.out_features for name, layer in sizes.items()}
    total = sum(weights[name] * (bits[name] + (16 + bits[name]) / 32) for name in sizes)
    assert 4.9 < total / sum(weights.values()) <= 5.2
    for index in range(2):
        shared = {bits[f"layers.{index}.self_attn.{name}_proj"] for name in "qkv"}
        assert len(shared) == 1, "what is computed as one has one number of bits"


def test_bits_are_spent_where_they_help_most() -> None:
    options = {
        "a": [Choice(3, 30, 5.0), Choice(4, 40, 1.0), Choice(8, 80, 0.0)],
        "b": [Choice(3, 30, 2.0), Choice(4, 40, 1.9), Choice(8, 80, 0.0)],
    }
    assert spend(options, 59) is None
    assert spend(options, 60) == {"a": 3, "b": 3}
    assert spend(options, 70) == {"a": 4, "b": 3}
    assert spend(options, 120) == {"a": 4, "b": 8}
    assert spend(options, 1000) == {"a": 8, "b": 8}


# --- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--method", "gtpq"], "no method 'gtpq' is installed; there is: awq"),
        (["--method", "awq", "--set", "grops=3"], "method awq: unknown option 'grops'; its options: bits, group_size"),
        (["--method", "awq", "--bits", "3"], "method awq: option 'bits'"),
        (["--method", "awq", "--group-size", "48"], "group_size 48 does not divide"),
        (["--method", "awq", "--set", "clip"], "--set clip: expected NAME=VALUE"),
        (["--method", "awq", "--to", "gguf2"], "--to gguf2: no installed plugin writes this format"),
        (["--method", "awq", "--calibration", "missing.txt"], "--calibration missing.txt: cannot read the text"),
        (["--method", "awq", "--skip-tokens", "64"], "--skip-tokens 64: pieces of the text have 64 tokens"),
        (["--method", "awq", "--num-samples", "0"], "--num-samples 0: expected 1 or more"),
        (["--method", "awq", "--auto-bits", "5"], "method awq: option 'bits'"),
        (["--method", "rtn", "--auto-bits", "2", "--calibration", "TEXT"], "the fewest bits, scales included, are 3."),
        ([], "say how to quantise, by --method NAME or by --recipe FILE"),
        (["--method", "awq", "--kv-scales-only"], "--kv-scales-only leaves weights alone: --method has no meaning"),
    ],
)
def test_bad_options_are_named(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    options = [str(text) if option == "TEXT" else option for option in options]
    assert quantize(model, tmp_path / "out", text, *options, method=None) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("rules: [{layers: '*.w1', method: awq}]", "recipe: no layer matches '*.w1'; a layer is called model.layers.0"),
        ("rules: [{layers: '*.q_proj'}]", "key 'rules.0.method' is required"),
        ("rules: []", "rules"),
        ("rule: 3", "unknown key 'rule'"),
        ("- a", "expected 'rules:' with a list of rules, found list"),
        ("rules: [{method: keep}]", "not one layer is to be quantised"),
        ("a: [", "not YAML"),
        ("rules: [{method: awq}]\nkv_scales: rows", "kv_scales"),
    ],
)
def test_bad_recipes_are_named(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    assert quantize(model, tmp_path / "out", text, "--recipe", recipe(tmp_path, content), method=None) == 2
    assert words in capsys.readouterr().err


def test_text_that_is_too_short_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, words in (("", "the text has 0 tokens"), ("a few words", "the text has 11 tokens, too few")):
        (tmp_path / "short.txt").write_text(content)
        assert quantize(model, tmp_path / "out", tmp_path / "short.txt") == 2
        assert words in capsys.readouterr().err


def test_inputs_that_are_not_finite_name_the_layer(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    for name in ("gate", "up"):  # weights that scales of fp32 can hold; the product of the two outputs is too large
        tensors[f"model.layers.1.mlp.{name}_proj.weight"] *= 1e25
    save_file(tensors, broken / "model.safetensors")
    assert quantize(broken, tmp_path / "out", text, "--set", "scale_dtype=float32") == 2
    assert "model.layers.1.mlp.down_proj: its calibration inputs are NaN or infinite" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing_that_looks_finished_and_can_go_on(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: ShardWriter, *args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "_write", full)
        assert quantize(model, tmp_path / "out", text) == 2
    told = capsys.readouterr().err
    assert "No space left on device" in told
    assert "run the same command again" in told
    assert not (tmp_path / "out").exists()
    assert quantize(model, tmp_path / "out", text) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_format_cannot_hold_is_refused_before_anything_is_computed(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **options: object) -> None:
        raise AssertionError("computed")

    monkeypatch.setattr(LayerwiseModel, "__init__", never)
    file = recipe(
        tmp_path, "rules: [{layers: '*.down_proj', method: awq, group_size: 64}, {method: awq, group_size: 32}]\n"
    )
    assert quantize(model, tmp_path / "out", text, "--recipe", file, method=None) == 2
    assert "AWQ has one group size for all layers" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "recipe.yaml"]


def test_methods_are_listed_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "--list-methods"]) == 0
    found = capsys.readouterr().out
    assert "awq: Activation-aware" in found
    assert "  group_size=None  Inputs that share a scale" in found


def test_rules_choose_layers_by_the_first_match(model: Path) -> None:
    rules = [{"layers": "*.q_proj", "method": "keep"}, {"layers": "layers.0.self_attn.*", "method": "rtn"}]
    found = Assignment.of(Recipe.load({"rules": rules}, "test"), plan_of(model))
    names = {layer.name.removeprefix("model.layers.") for layer in found.quantizers}
    assert names == {"0.self_attn.k_proj", "0.self_attn.v_proj", "0.self_attn.o_proj"}
    assert found.target == "gptq"
