"""The commands, run as a user runs them."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import LLM, ConfigError, EngineConfig, SamplingParams, Step, StepOutput, WeightSpec
from octavo.cli import build_parser, main
from octavo.testing import tiny_model
from octavo_awq.config import AWQConfig

pytestmark = pytest.mark.usefixtures("core_kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    quantize = (AWQConfig(bits=4, group_size=32), WeightSpec("uint4", (1, 32), has_zeros=True))
    return tiny_model(tmp_path_factory.mktemp("awq"), quantize=quantize, settings=settings, skip=["*layers.1.*o_proj"])


def test_generate_streams_and_sums_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["generate", str(folder), "-q", "awq", "--prompt", "ab", "--max-tokens", "8", "--ignore-eos"])
    shown = capsys.readouterr()
    assert code == 0
    assert shown.out.endswith("\n")
    summary = shown.err.strip().splitlines()[-1]
    for part in ("8 tokens", "tokens/s", "TTFT", "KV", "prefix hits", "reference (uint4 g32 asym)", "dense (float)"):
        assert part in summary


def test_generate_several_prompts_in_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "generate",
        str(folder),
        "--prompt",
        "first",
        "--prompt",
        "second",
        "--max-tokens",
        "4",
        "--ignore-eos",
    ]
    assert main([*arguments, "--n", "2", "--temperature", "1"]) == 0
    titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("=== ")]
    assert titles == ["=== first [0]", "=== first [1]", "=== second [0]", "=== second [1]"]


def test_generate_json_from_stdin(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    assert main(["generate", str(folder), "--json", "--max-tokens", "3", "--ignore-eos"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "two"]
    assert all(line["finish_reason"] == "length" and len(line["token_ids"]) == 3 for line in lines)


def test_generate_json_with_prompt_logprobs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(folder), "--json", "--prompt", "abc", "--max-tokens", "1", "--prompt-logprobs", "0"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)["prompt_logprobs"]
    assert [None if at is None else list(at) for at in found] == [None, ["98"], ["99"]]
    assert all(entry["logprob"] < 0 for at in found[1:] for entry in at.values())


@pytest.mark.parametrize("extra", [[], ["--n", "2", "--temperature", "1"]])
def test_generate_reports_failures(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, extra: list[str]
) -> None:
    from octavo.engine.in_process import InProcessExecutor

    execute = InProcessExecutor.execute

    def failing(self: InProcessExecutor, step: Step) -> StepOutput:
        if any(request.token_ids[:3] == list(b"bad") for request in step.requests):
            raise RuntimeError("out of luck")
        return execute(self, step)

    monkeypatch.setattr(InProcessExecutor, "execute", failing)
    prompts = [part for text in ("good", "bad", "fine") for part in ("--prompt", text)]
    assert main(["generate", str(folder), *prompts, "--max-tokens", "3", "--ignore-eos", *extra]) == 1
    shown = capsys.readouterr()
    assert [line for line in shown.err.splitlines() if line.startswith("octavo: ")] == [
        "octavo: prompt 1 failed: RuntimeError: out of luck"
    ]
    outputs = 2 if extra else 1
    assert f"{2 * 3 * outputs} tokens in" in shown.err
    assert shown.out.count("=== fine") == outputs, "what follows a failed prompt is shown"


def test_generate_chat_from_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("hello\n")
    assert main(["generate", str(folder), "--chat", "--file", str(tmp_path / "prompts.txt"), "--max-tokens", "2"]) == 0


def test_inspect_table(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    for part in (
        "awq checkpoint",
        "model.layers.0-1.self_attn.q_proj|k_proj|v_proj",
        "model.layers.1.self_attn.o_proj",
        "uint4 g32 asym",
        "reference",
        "only for plain weights",
        "KV memory",
        "KV as auto",
        "MiB in file",
        "weights in memory: about",
        "total",
    ):
        assert part in out


def test_inspect_plans_for_a_gpu_that_is_not_here(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["inspect", str(folder), "--device", "cuda", "--json"]) == 0
    shown = capsys.readouterr()
    assert "no CUDA device is here; this is the plan for one of compute capability 9.0 with 80 GiB" in shown.err
    plan = json.loads(shown.out)
    assert {row["kernel"] for row in plan["linears"]}.isdisjoint({"cpu_float", "cpu_int8", "cpu_w8a8"})
    assert plan["kv"]["reason"] == "256 sequences of 512 tokens"
    with pytest.raises(ConfigError, match="sees no CUDA device"):  # to compute it must be here
        LLM(str(folder), device="cuda")


def test_inspect_shows_names_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    folder = tiny_model(tmp_path / "model[red] [v1]")
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert str(folder) in out
    assert "…" not in out


def test_inspect_json_covers_every_byte(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--json", "--kv-cache-memory-bytes", "1M"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == "awq"
    assert report["attention"]["kernel"] == "reference"
    plain = report["other_bytes"] + report["embedding"]["num_bytes"]
    assert report["total_bytes"] == plain + sum(r["num_bytes"] for r in report["linears"])
    header = 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    assert report["total_bytes"] == (folder / "model.safetensors").stat().st_size - header
    assert report["kv"]["num_blocks"] * report["kv"]["bytes_per_block"] <= 1 << 20
    assert {r["kernel"] for r in report["linears"]} == {"reference", "dense"}


def test_inspect_reads_headers_only(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel table of a plan equals that of the loaded model."""
    from octavo import LLM

    assert main(["inspect", str(folder), "--json"]) == 0
    planned = [(r["layer"], r["spec"], r["kernel"]) for r in json.loads(capsys.readouterr().out)["linears"]]
    loaded = [(r.layer, r.spec, r.kernel) for r in LLM(str(folder), num_blocks_override=8).engine.model_info.linears]
    assert planned == loaded


def test_linear_kernels_are_pinned_by_pattern(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--json", "--linear-kernels", "*mlp*=dequantized,*q_proj=dense?"]) == 0
    kernels = {r["layer"]: r for r in json.loads(capsys.readouterr().out)["linears"]}
    assert kernels["model.layers.0.mlp.down_proj"]["kernel"] == "dequantized"
    attention = kernels["model.layers.0.self_attn.q_proj|k_proj|v_proj"]
    assert attention["kernel"] == "reference"
    assert attention["refusals"][0][0] == "dense"


def test_v09_naming_the_format_pins_no_kernel(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = []
    for extra in ([], ["-q", "awq"]):
        assert main(["inspect", str(folder), "--json", *extra]) == 0
        reports.append(json.loads(capsys.readouterr().out)["linears"])
    assert reports[0] == reports[1]


def test_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json"]) == 0
    plugins = {p["name"]: p for p in json.loads(capsys.readouterr().out)}
    assert plugins["awq"]["distribution"] == "octavo-awq"
    assert plugins["awq"]["hooks"] == ["octavo_quant_configs", "octavo_quantizers"]
    assert plugins["core"]["state"] == "loaded"
    assert main(["plugins", "--disable-plugins", "awq"]) == 0
    assert "disabled" in capsys.readouterr().out


def test_every_setting_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["generate", "--help"])
    text = capsys.readouterr().out
    for name in [*EngineConfig.model_fields, *SamplingParams.model_fields]:
        if name not in ("seed", "logit_bias"):
            assert f"--{name.replace('_', '-')}" in text, name
    for field in EngineConfig.model_fields.values():
        assert field.description


def test_help_shows_what_the_command_does(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    shown = dict(re.findall(r" --(\S+) [A-Z]+ (?:(?! --).)*?Default: (\S+)\.(?= )", text))
    found: list[SamplingParams] = []
    monkeypatch.setattr("octavo.front.commands.generate", lambda _, __, params, **___: found.append(params) or 0)
    assert main(["generate", "m", "--prompt", "x"]) == 0
    for name in ("temperature", "max_tokens", "top_p", "min_tokens"):
        assert shown[name.replace("_", "-")] == str(getattr(found[0], name))


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from octavo.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_inspect_plans_the_tied_head_as_loading_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from octavo import LLM

    tied = tiny_model(tmp_path, tie=True)
    assert main(["inspect", str(tied), "--json"]) == 0
    planned = [(r["layer"], r["kernel"], r["note"]) for r in json.loads(capsys.readouterr().out)["linears"]]
    loaded = [(r.layer, r.kernel, r.note) for r in LLM(str(tied), num_blocks_override=8).engine.model_info.linears]
    assert planned == loaded
    assert planned[-1] == ("lm_head", "dense", "the embedding")
    for command in (["inspect"], ["generate", "--prompt", "x"]):
        assert main([command[0], str(tied), *command[1:], "--linear-kernels", "lm_head=nonsense"]) == 2


def test_planned_memory_follows_the_kernel(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from octavo import LLM

    planned = []
    for kernels in ("", "*=dequantized?"):
        assert main(["inspect", str(folder), "--json", "--linear-kernels", kernels]) == 0
        report = json.loads(capsys.readouterr().out)
        llm = LLM(str(folder), num_blocks_override=8, linear_kernels=kernels)
        resident = sum(r.num_bytes for r in llm.engine.model_info.linears)
        plain = report["other_bytes"] + report["embedding"]["num_bytes"]  # fp32 in the file and in memory
        assert report["resident_bytes"] - plain == pytest.approx(resident, rel=0.2)
        planned.append(report["resident_bytes"])
    assert planned[1] > 1.5 * planned[0]


def test_two_models_are_refused(folder: Path) -> None:
    assert main(["inspect", str(folder), "--model", str(folder)]) == 0
    assert main(["inspect", str(folder), "--model", "/other"]) == 2
