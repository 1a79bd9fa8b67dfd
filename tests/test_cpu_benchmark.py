"""benchmarks/cpu: its arithmetic, what it reads from other programs, and that all its checkpoints hold the same numbers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cpu import __main__ as program  # noqa: E402
from benchmarks.cpu import checkpoints, gguf_files, process, report, roofline, shapes  # noqa: E402
from benchmarks.cpu.drivers import timing  # noqa: E402
from benchmarks.cpu.peers import llama_cpp  # noqa: E402
from benchmarks.cpu.peers.driven import result  # noqa: E402
from benchmarks.cpu.peers.octavo import Octavo  # noqa: E402
from benchmarks.cpu.roofline import Ceilings  # noqa: E402
from benchmarks.cpu.work import JOBS, Case, Sizes  # noqa: E402

TINY = shapes.Shape("tiny", "nothing", "LlamaForCausalLM", 2, 128, 2, 1, 192, 1000, True, False, 64)
CEILINGS = Ceilings(
    {"int8": {2: 1.5e12}, "fp32": {2: 3.5e11}}, {2: {100: 40e9, 400: 30e9}}, {"int8": "vnni", "fp32": "fma"}
)


def case(shape: shapes.Shape = shapes.S, kind: shapes.Kind = shapes.INT4, cache: Path = Path("cache")) -> Case:
    return Case(shape, kind, cache, Sizes(), 2)


# --- shapes


def test_shapes_have_the_weights_of_the_models_that_they_are_like() -> None:
    assert shapes.S.layer_weights + shapes.S.head_weights == pytest.approx(134.5e6, rel=0.001)
    assert shapes.M.layer_weights + shapes.M.head_weights == pytest.approx(494e6, rel=0.001)
    assert shapes.L.layer_weights + 2 * shapes.L.head_weights == pytest.approx(1.1e9, rel=0.001)
    assert [round(s.ops_per_token / 1e9, 3) for s in shapes.SHAPES.values()] == [0.212, 0.716, 1.938]


def test_a_step_reads_what_its_format_stores() -> None:
    assert shapes.S.step_bytes(shapes.FLOAT16) == 2 * (shapes.S.layer_weights + shapes.S.head_weights)
    assert shapes.S.step_bytes(shapes.GGUF) == pytest.approx(90e6, rel=0.01)  # 18 bytes for 32 weights, 34 in the head
    assert shapes.L.step_bytes(shapes.INT4) == shapes.L.layer_weights * (4 + 16 / 128) / 8 + shapes.L.head_weights
    assert shapes.S.kv_bytes(4096, 2) == 2 * 30 * 3 * 64 * 4096 * 2


# --- checkpoints


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def logprobs(path: Path) -> list[float]:
    """Of a prompt's tokens after the first."""
    llm = LLM(str(path), max_model_len=64, num_blocks_override=8, max_num_seqs=2, disable_progress=True)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    ids = list(range(300, 340))
    (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    llm.shutdown()
    assert output.prompt_logprobs is not None
    return [found[token].logprob for token, found in zip(ids[1:], output.prompt_logprobs[1:], strict=True) if found]


@pytest.mark.parametrize(
    "shape",
    [
        TINY,
        replace(TINY, name="biased", architecture="Qwen2ForCausalLM", qkv_bias=True),
        replace(TINY, name="untied", tied=False),
    ],
    ids=lambda shape: shape.name,
)
def test_gguf_holds_the_numbers_of_the_float_checkpoint(shape: shapes.Shape, cache: Path) -> None:
    expected = logprobs(checkpoints.make(cache, shape, "float16"))
    assert logprobs(gguf_files.make(cache, shape, "F16")) == pytest.approx(expected, abs=2e-5)


def test_the_order_of_rows_matters(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logprobs(checkpoints.make(cache, TINY, "float16"))
    monkeypatch.setattr(gguf_files, "interleaved", lambda weight, heads: weight)
    assert logprobs(gguf_files.make(tmp_path, TINY, "F16")) != pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("name", ["gptq", "awq", "w8a8"])
def test_quantised_checkpoints_load(name: str, cache: Path) -> None:
    place = checkpoints.make(cache, TINY, name)
    llm = LLM(
        str(place), quantization=None, max_model_len=64, num_blocks_override=8, max_num_seqs=2, disable_progress=True
    )
    specs = {report.spec for report in llm.engine.model_info.linears if "lm_head" not in report.layer}
    assert specs == {{"w8a8": "int8 channel x int8 per_token"}.get(name, "uint4 g64 asym")}
    llm.shutdown()
    assert len(logprobs(place)) == 39


def test_a_checkpoint_is_made_once_and_never_half(cache: Path) -> None:
    place = checkpoints.make(cache, TINY, "float16")
    written = (place / "model.safetensors").stat().st_mtime_ns
    assert checkpoints.make(cache, TINY, "float16") == place
    assert (place / "model.safetensors").stat().st_mtime_ns == written

    def fail(partial: Path) -> None:
        partial.mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.written(cache / "broken", fail)
    assert not (cache / "broken").exists()


def test_the_vocabulary_has_the_size_and_no_token_twice() -> None:
    made, merges = checkpoints.vocabulary(TINY)
    assert len(made) == TINY.vocab == len(set(made))
    assert all(first + second in made for first, second in merges)


def test_rows_of_q_and_k_change_from_halves_to_pairs() -> None:
    rows = gguf_files.interleaved(torch.arange(16)[:, None], heads=2)
    assert rows.flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


# --- what others print


BENCH = """warning: something [about] a flag
[
  {
    "build_commit": "unknown",
    "n_prompt": 512,
    "n_gen": 0,
    "avg_ns": 717134213,
    "avg_ts": 713.953100,
    "samples_ns": [ 717134213 ],
    "samples_ts": [ 713.953 ]
  }
]
"""
BATCHED = """
main: n_kv_max = 3072, n_batch = 2048, n_ubatch = 512, flash_attn = -1

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |     64 |    4 |    768 |    0.711 |   720.12 |    1.066 |   240.19 |    1.777 |   432.16 |
|   128 |     64 |   16 |   3072 |    2.902 |   705.71 |    2.798 |   366.02 |    5.700 |   538.98 |

llama_perf_context_print:        load time =     100.00 ms
"""


def test_reads_llama_bench() -> None:
    assert llama_cpp.read_bench(f"{BENCH}\nsaid [later]", "prefill") == {"prefill": 713.9531}
    with pytest.raises(ValueError, match="no result"):
        llama_cpp.read_bench("error: failed to load model [x]", "prefill")


def test_reads_llama_batched_bench() -> None:
    assert llama_cpp.read_batched(BATCHED) == {"decode 4": 240.19, "decode 16": 366.02}
    with pytest.raises(ValueError, match="no table"):
        llama_cpp.read_batched("failed")
    with pytest.raises(ValueError, match="no rows"):
        llama_cpp.read_batched("\n".join(BATCHED.splitlines()[:5]))


def test_reads_drivers() -> None:
    assert result('noise\nRESULT {"values": {"load": 1.5}, "notes": {}}\n')["values"] == {"load": 1.5}
    with pytest.raises(ValueError, match="no result"):
        result("Traceback")


def test_reads_the_roofline_program() -> None:
    lines = [
        '{"what": "fp32", "threads": 1, "per_s": 1.8e11, "set": "avx512f"}',
        '{"what": "read", "threads": 1, "megabytes": 100, "per_s": 2e10}',
        "something else",
    ]
    found = Ceilings.parse(lines)
    assert found.peak("fp32", 1) == 1.8e11
    assert found.peak("int8", 1) is None
    assert found.bandwidth(5e6, 1) == 2e10
    assert found.bandwidth(5e6, 2) is None
    assert "fp32 180 G a second (avx512f)" in str(found)


def test_bandwidth_is_that_of_the_working_set() -> None:
    assert CEILINGS.bandwidth(10e6, 2) == 40e9
    assert CEILINGS.bandwidth(200e6, 2) == pytest.approx(35e9)
    assert CEILINGS.bandwidth(5e9, 2) == 30e9


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build roofline.cpp with")
def test_the_roofline_program_builds_and_runs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "MEGABYTES", (1, 2))
    found = roofline.measure(cache, [], [1], 0.002)
    assert isinstance(found, Ceilings), found
    assert found.reads[1].keys() == {1, 2}
    assert min(found.peaks["fp32"][1], found.reads[1][1]) > 0


def test_without_a_compiler_there_are_no_ceilings(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = roofline.measure(cache, [], [1], 0.1)
    assert isinstance(found, str)
    assert "no C++ compiler" in found


# --- timing


class Clock:
    """An engine whose time is 10 s a prompt token and 1 s a decoded token and step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.asked = 0.0, []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def generate(self, batch: list[list[int]], max_tokens: int) -> None:
        self.asked.append((len(batch), len(batch[0]), max_tokens))
        self.now += 10 * sum(map(len, batch)) + (max_tokens - 1)


def test_decoding_is_timed_without_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    sizes = {"prefill": 20, "prompt": 5, "decode": 8, "context": 40, "context_decode": 4}
    works = ["prefill", "decode 1", "decode 4", "context kv16"]
    found = timing.measure(clock.generate, {"works": works, "sizes": sizes, "vocab": 1000, "seed": 1})
    assert found == {"prefill": 0.1, "decode 1": 1.0, "decode 4": 4.0, "context kv16": 1.0}
    assert clock.asked[-4:] == [(1, 40, 2), (1, 40, 1), (1, 40, 5), (1, 40, 1)]


def test_prompts_differ_by_seed_and_hold_no_special_token() -> None:
    first, second = timing.prompts(1, 2, 50, 1000)
    assert first != second
    assert min(*first, *second) >= 300
    assert timing.prompts(1, 2, 50, 1000) == [first, second] != timing.prompts(2, 2, 50, 1000)


def test_load_is_counted_from_the_start_of_the_process() -> None:
    code = "import time, timing; time.sleep(0.2); print(timing.seconds_since_start())"
    ended = process.run([sys.executable, "-c", code], {"PYTHONPATH": str(Path(timing.__file__).parent)})
    assert ended.exit_code == 0, ended.errors
    assert 0.2 <= float(ended.output) <= ended.wall_s + 0.05


def test_processes_are_measured_alone() -> None:
    code = "import sys; data = b'x' * 50_000_000; print(len(data)); sys.exit(3)"
    ended = process.run([sys.executable, "-c", code], prefix=["sh", "-c", 'sleep 0.3; exec "$@"', "sh"])
    assert (ended.output.strip(), ended.exit_code) == ("50000000", 3)
    assert ended.peak_rss_bytes > 50_000_000
    assert process.run([sys.executable, "-c", "input()"], timeout_s=0.0).exit_code == -1


# --- results


@pytest.fixture
def measured() -> report.CaseResult:
    found = report.CaseResult(case())
    for value in (300, 200, 1000):
        found.add("octavo", {"decode 1": value})
    found.add("llama.cpp", {"decode 1": 100, "load": 0.5})
    found.add("ik", {"decode 1": 200, "load": 0.25})
    found.add("octavo", {"load": 1.0, "prefill": 2000})
    return found


def test_ratios_are_of_medians_and_best_is_the_hardest_to_beat(measured: report.CaseResult) -> None:
    assert measured.median("octavo", "decode 1") == 300
    assert measured.gain("decode 1", "llama.cpp") == 3
    assert measured.best_peer("decode 1") == "ik"
    assert measured.gain("decode 1", "ik") == 1.5
    assert measured.gain("load", "ik") == 0.25  # octavo takes four times as long
    assert measured.best_peer("load") == "ik"
    assert measured.gain("prefill", "llama.cpp") is None
    assert measured.best_peer("prefill") is None


def test_shares_are_of_the_ceiling_that_binds() -> None:
    prefill = report.share(case(), "prefill", 2000, CEILINGS)
    assert prefill == pytest.approx(2000 * shapes.S.ops_per_token / 1.5e12)
    as_float = report.share(case(kind=shapes.INT4_FLOAT), "prefill", 100, CEILINGS)
    assert as_float == pytest.approx(100 * shapes.S.ops_per_token / 3.5e11)
    num_bytes = shapes.S.step_bytes(shapes.INT4) + shapes.S.kv_bytes(4 * 160, 2)
    assert report.step_bytes(shapes.S, shapes.INT4, "decode 4", Sizes()) == pytest.approx(num_bytes)
    four = report.share(case(), "decode 4", 400, CEILINGS)
    assert four == pytest.approx(100 * num_bytes / CEILINGS.bandwidth(num_bytes, 2))
    kv16, kv8 = (report.step_bytes(shapes.S, shapes.INT4, f"context {kv}", Sizes()) for kv in ("kv16", "kv8"))
    assert kv16 - kv8 == shapes.S.kv_bytes(4112, 1)
    assert report.share(case(), "load", 1, CEILINGS) is None
    assert report.share(case(), "decode 4", 400, Ceilings()) is None


def test_the_table_shows_medians_ratios_goals_and_shares(measured: report.CaseResult) -> None:
    shown = report.table([measured], CEILINGS).splitlines()
    assert shown[0] == "S (SmolLM2-135M), 4-bit weights, int8 activations, 2 thread(s)"
    row = next(line for line in shown if line.startswith("decode 1"))
    assert row.split()[2:10] == ["300", "100", "200", "3.00", "1.50", "1.50", "/", "1.20"]
    assert row.split()[-2:] == [
        report.percent(report.share(measured.case, "decode 1", v, CEILINGS)) for v in (300, 200)
    ]
    load = next(line for line in shown if line.startswith("load (s)"))
    assert load.split()[2:7] == ["1.00", "0.50", "0.25", "0.50", "0.25"]


def test_goals_follow_shape_kind_and_workload() -> None:
    assert report.goal(shapes.L, shapes.INT4, "decode 1") == (1.7, 1.2)
    assert report.goal(shapes.S, shapes.INT4_FLOAT, "prefill") == (1.5, None)
    assert report.goal(shapes.S, shapes.GGUF, "prefill") is None


def test_kernels_are_named(measured: report.CaseResult) -> None:
    kernels = {"reference: uint4 g64 asym": {"layers": 120, "MiB": 60.0}}
    measured.notes["octavo"] = {
        "kernels": kernels,
        "attention": "reference",
        "step": "Tape",
        "unknown_settings": ["cpu_activations"],
    }
    (line,) = report.kernels([measured]).splitlines()
    assert "reference: uint4 g64 asym (120 layers); attention: reference; step: Tape; this octavo" in line
    assert "no setting cpu_activations" in line


def test_the_chart_is_a_picture_or_a_reason(measured: report.CaseResult, tmp_path: Path) -> None:
    reason = report.chart([measured], tmp_path / "chart.png")
    if reason is None:
        assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "matplotlib is not installed" in reason
    only = report.CaseResult(case())
    only.add("octavo", {"prefill": 1})
    assert report.chart([only], tmp_path / "none.png") is not None


# --- the program


def test_octavo_gets_memory_for_its_job_and_an_8_bit_head() -> None:
    batch = Octavo({"seed": 3}, "awq").settings(case(), "batch")
    assert (batch["max_num_seqs"], batch["max_model_len"], batch["seed"]) == (16, 193, 3)
    assert batch["num_blocks_override"] >= 16 * 13
    assert batch["quantize_weights"] == {"lm_head": "int8"}
    assert not batch["enable_prefix_caching"]
    long = Octavo({}, "awq").settings(case(), "context kv8")
    assert (long["kv_cache_dtype"], long["enable_prefix_caching"], long["max_num_seqs"]) == ("fp8", True, 1)
    assert Octavo({}, "awq").model(case()).name == "S-awq"
    assert Octavo({}, "awq").model(case(kind=shapes.GGUF)).name == "S-Q4_0.gguf"


def fake(path: Path, output: str, code: int = 0) -> str:
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def test_a_whole_run_with_programs_that_only_print(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BENCH_IK_BENCH", raising=False)
    (tmp_path / "S-Q4_0.gguf").touch()
    bench, batched = fake(tmp_path / "bench", BENCH), fake(tmp_path / "batched", BATCHED, code=7)
    arguments = (
        f"--cache {tmp_path} --shapes S --roofline-seconds 0 --jobs single,batch --repeats 2 --json {tmp_path}/out.json"
    )
    peers = f"--engines llama.cpp,ik_llama.cpp --llama-bench {bench} --llama-batched-bench {batched}"
    assert program.main([*arguments.split(), *peers.split()]) == 1  # for the batched program failed
    said = capsys.readouterr().out
    assert "ik_llama.cpp is left out: not found: --ik-bench" in said
    found = json.loads((tmp_path / "out.json").read_text())
    (only,) = found["cases"]
    assert only["samples"]["llama.cpp"]["prefill"] == [713.9531] * 2
    assert only["samples"]["llama.cpp"].keys() == {"load", "prefill", "decode 1", "peak RSS"}
    assert len(only["failures"]) == 2
    assert "exit code 7" in only["failures"][0]
    assert only["failures"][0] in said


def test_every_job_of_every_engine_is_a_command(tmp_path: Path) -> None:
    options = program.parser().parse_args(["--openvino-python", "x", "--vllm-python", "x", "--ik-bench", "true"])
    for engine in program.engines(options):
        if isinstance(engine, llama_cpp.LlamaCpp):
            engine.bench = engine.batched = "true"
        for kind in shapes.KINDS.values():
            for job in JOBS:
                if engine.refuses(case(kind=kind), job) is None:
                    commands = engine.commands(case(kind=kind), job)
                    assert all(isinstance(part, str) for command in commands for part in command.arguments)


@pytest.mark.parametrize("wait", [False, True])
def test_a_time_limit_shows_what_was_measured(tmp_path: Path, wait: bool) -> None:
    (tmp_path / "S-Q4_0.gguf").touch()
    slow = tmp_path / "slow"
    lines = [
        "#!/bin/sh",
        "[ $1 = --version ] && exit",
        f"[ -e {tmp_path}/ran ] && echo $$ > {tmp_path}/sleeps && exec sleep 600",
        f"echo $$ > {tmp_path}/ran",
        f"cat <<'END'\n{BATCHED}\nEND",
    ]
    slow.write_text("\n".join(lines))
    slow.chmod(0o755)
    arguments = f"--cache {tmp_path} --shapes S --roofline-seconds 0 --jobs batch --engines llama.cpp"
    peers = f"--llama-bench {slow} --llama-batched-bench {slow}"
    command = [sys.executable, "-m", "benchmarks.cpu", *arguments.split(), *peers.split()]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert run.stdout is not None
        first = next(line for line in run.stdout if "llama.cpp:" in line)
        assert "decode 16 366" in first
        if wait:
            while not (tmp_path / "sleeps").exists():
                time.sleep(0.01)
    finally:
        run.terminate()
        rest = run.communicate(timeout=60)[0]
    assert "interrupted" in rest
    assert any(line.startswith("decode 16") for line in rest.splitlines())
    if wait:
        sleeping = Path("/proc", (tmp_path / "sleeps").read_text().strip())
        assert not sleeping.exists() or "State:\tZ" in (sleeping / "status").read_text()


def test_unknown_names_are_refused() -> None:
    for arguments in (["--shapes", "XL"], ["--kinds", "int3"], ["--jobs", "x"], ["--engines", "x"]):
        with pytest.raises(SystemExit, match="unknown"):
            program.main([*arguments, "--only-make"])
