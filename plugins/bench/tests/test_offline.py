"""Benchmarks that run an engine: every figure they print is one that the engine's own counts confirm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo import ConfigError, EngineConfig, OctavoError
from octavo.testing import tiny_model
from octavo_bench import latency, startup
from octavo_bench.command import Bench


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model")))


def run(*arguments: str) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    Bench().add_arguments(parser)
    return Bench().run(parser.parse_args([*arguments, "--disable-progress", "--num-blocks-override", "64"]))


@pytest.mark.parametrize("backend", ["octavo", "hf"])
def test_throughput(model: str, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ("--input-len", "8", "--output-len", "5", "--num-prompts", "6", "--output-json", str(out))
    assert run("throughput", model, "--backend", backend, "--hf-max-batch-size", "4", *arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("Throughput: ")
    assert "total tokens/s" in text
    found = json.loads(out.read_text())
    assert (found["num_requests"], found["total_input_tokens"], found["total_output_tokens"]) == (6, 48, 30)
    assert found["tokens_per_second"] == pytest.approx(78 / found["elapsed_time"])
    assert found["requests_per_second"] == pytest.approx(6 / found["elapsed_time"])


def test_throughput_of_several_outputs(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("--input-len", "8", "--output-len", "5", "--num-prompts", "3", "--n", "2", "--output-json", str(out))
    assert run("throughput", model, *arguments, "--seed", "4") == 0
    assert json.loads(out.read_text())["total_output_tokens"] == 30
    with pytest.raises(ConfigError, match="one output a prompt"):
        run("throughput", model, *arguments, "--backend", "hf")


def test_latency(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = (
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--batch-size",
        "3",
        "--num-iters",
        "3",
        "--num-iters-warmup",
        "1",
    )
    assert run("latency", model, *arguments, "--output-json", str(out)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Avg latency: ")
    assert [line.split("%")[0] for line in lines[1:]] == ["10", "25", "50", "75", "90", "99"]
    found = json.loads(out.read_text())
    assert len(found["latencies"]) == 3
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 3)
    assert found["percentiles"] == latency.percentiles(found["latencies"])
    with pytest.raises(ConfigError, match="--batch-size 0"):
        run("latency", model, "--batch-size", "0")


def test_startup(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    counts = ("--num-iters-cold", "1", "--num-iters-warmup", "0", "--num-iters-warm", "1")
    assert run("startup", model, *counts, "--output-json", str(out)) == 0
    text = capsys.readouterr().out
    assert "cold starts (1)" in text
    assert "Avg warm startup time: " in text
    found = json.loads(out.read_text())
    for kind in ("cold", "warm"):
        (total,) = found[kind]["total"]["times"]
        assert total == pytest.approx(sum(found[kind][p]["avg"] for p in ("import", "load", "first_token")), rel=0.01)
    with pytest.raises(ConfigError, match="some to measure"):
        run("startup", model, "--num-iters-cold", "0", "--num-iters-warm", "0")


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(OctavoError, match=r"a start failed: .*nowhere"):
        startup.probe(EngineConfig(model=str(tmp_path / "nowhere")))
