"""`octavo eval`: its figures against their definitions, computed from logits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from support import all_logits, registry

from octavo import LLM, WeightSpec
from octavo.cli import main
from octavo.testing import tiny_model
from octavo_awq.config import AWQConfig

TEXT = "".join(chr(ord("a") + (i * i + i // 7) % 26) for i in range(600))
pytestmark = pytest.mark.usefixtures("core_kernels")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    quantised = (AWQConfig(group_size=32), WeightSpec("uint4", (1, 32), has_zeros=True))
    settings = AWQConfig(group_size=32).settings()
    return tiny_model(folder / "float"), tiny_model(folder / "awq", quantize=quantised, settings=settings)


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict]:
    assert main(["eval", *map(str, arguments), "--json", "--disable-progress"]) == 0
    return json.loads(capsys.readouterr().out)["models"]


def test_the_figures_are_what_they_are_called(
    models: tuple[Path, Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "errors.png"
    found = evaluated(capsys, *models, "--text", text, "--windows", 3, "--window", 100, "--plot", plot)
    llms = [LLM(str(folder), registry=registry(), dtype="float32", num_blocks_override=16) for folder in models]
    ids = llms[0].tokenizer.encode_plain(TEXT)
    logs = [
        torch.cat(
            [torch.log_softmax(all_logits(llm, ids[start : start + 100])[:-1].double(), -1) for start in (0, 100, 200)]
        )
        for llm in llms
    ]
    following = torch.tensor([ids[start + i] for start in (0, 100, 200) for i in range(1, 100)])
    for one, log in zip(found, logs, strict=True):
        expected = math.exp(-float(log.gather(1, following[:, None]).mean()))
        assert one["perplexity"] == pytest.approx(expected, rel=1e-5)
        assert one["prefill_tokens_per_s"] > 0
        assert one["decode_tokens_per_s"] > 0
    kl = float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())
    assert found[1]["kl"] == pytest.approx(kl, rel=1e-4)
    assert found[1]["agreement"] == pytest.approx(float((logs[0].argmax(-1) == logs[1].argmax(-1)).float().mean()))
    assert (found[0]["kl"], found[0]["agreement"]) == (None, None)
    assert found[0]["num_bytes"] > found[1]["num_bytes"]
    assert len(found[1]["layer_errors"]) == 2
    assert all(0 < error < 1 for error in found[1]["layer_errors"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_model_is_no_distance_from_itself(
    models: tuple[Path, Path], text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, same = evaluated(capsys, models[0], models[0], "--text", text, "--windows", 1, "--window", 64)
    assert same["kl"] == pytest.approx(0, abs=1e-9)
    assert same["agreement"] == 1
    assert same["layer_errors"] == [0, 0]


def test_the_table_names_models_and_schemes(
    models: tuple[Path, Path], text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--text", str(text), "--windows", "1", "--window", "32", "--disable-progress"]
    assert main(["eval", *map(str, models), *options]) == 0
    told = capsys.readouterr().out
    assert "1 windows of 32 tokens" in told
    assert "uint4 g32 asym" in told
    assert "top-1 same" in told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--windows", "9"], "600 tokens are 5 windows of 110, not 9"),
        (["--window", "1"], "--window 1: expected 2 or more"),
        (["--plot", "x.png"], "name two or more"),
        (["--text", "missing"], "--text missing: cannot read the text"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    models: tuple[Path, Path], text: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    few = ["--text", str(text), "--window", "110", "--windows", "2", "--disable-progress"]
    assert main(["eval", str(models[0]), *few, *options]) == 2
    assert words in capsys.readouterr().err
