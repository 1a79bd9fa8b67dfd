"""Tables, rules, and `octavo tune` with a clock of the test's own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from octavo import ConfigError
from octavo.testing import gpu
from octavo_linear_cuda import tuner, tuning
from octavo_linear_cuda.tune import Tune
from octavo_linear_cuda.tuning import ROWS, Table, Tile, Work, cache_file, ruled, shipped, tile_for

CHIPS = ("sm_80", "sm_90")
H100 = gpu((9, 0))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning.tuned.cache_clear()
    tile_for.cache_clear()
    yield
    tuning.tuned.cache_clear()
    tile_for.cache_clear()


@pytest.mark.parametrize("chip", CHIPS)
def test_shipped_tables_have_a_tile_for_every_call(chip: str) -> None:
    table = shipped(chip)
    assert Table.read(table.write()) == table
    for kernel in ("w2a16", "w3a16", "w4a16", "w8a16", "w4a32", "w8a8", "fp8"):
        for rows in (1, *ROWS, 100_000):
            tile = ruled(Work(kernel, rows, 4096, 4096, 128), table)
            assert tile.is_sound
            assert tile.splits == 1 or rows <= 64


def test_few_tiles_are_split_until_the_chip_is_full() -> None:
    table = shipped("sm_90")
    narrow = ruled(Work("w4a16", 1, 1024, 4096, 128), table)
    wide = ruled(Work("w4a16", 1, 128_256, 4096, 128), table)
    short = ruled(Work("w4a16", 1, 1024, 256, 128), table)
    assert narrow.splits > wide.splits == short.splits == 1
    assert narrow.splits * (1024 // narrow.outputs) <= 2 * table.multiprocessors


@pytest.mark.parametrize(
    ("capability", "chip"), [((8, 0), "sm_80"), ((8, 9), "sm_80"), ((9, 0), "sm_90"), ((10, 0), "sm_90")]
)
def test_a_chip_without_a_table_takes_the_next_lower_ones(capability: tuple[int, int], chip: str) -> None:
    assert tuning.chip_of(gpu(capability)) == chip


def test_the_users_table_counts_first() -> None:
    work, other = Work("w4a16", 3, 4096, 4096, 128), Work("w4a16", 9, 4096, 4096, 128)
    mine = Tile(128, 16, 2, 8, 2)
    write({work.shape: {work.bucket: mine}})
    assert work.bucket == 8
    assert tile_for(work, H100) == mine
    assert tile_for(other, H100) == ruled(other, shipped("sm_90"))


@pytest.mark.parametrize(
    "text", ["", "{}", '{"multiprocessors": 1, "measured": "", "shapes": {"a": {"8": [3, 3, 3, 3, 3]}}}']
)
def test_a_damaged_table_is_named_and_not_used(text: str, caplog: pytest.LogCaptureFixture) -> None:
    work = Work("w4a16", 1, 4096, 4096, 128)
    write({})
    cache_file("sm_90").write_text(text)
    assert tile_for(work, H100) == ruled(work, shipped("sm_90"))
    assert str(cache_file("sm_90")) in caplog.text


@pytest.mark.usefixtures("interpreted")
def test_tuning_keeps_the_fastest_tile_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = (Tile(64, 8, 1, 4, 3), Tile(128, 8, 1, 4, 3), Tile(128, 8, 2, 4, 3))
    seconds = iter((3.0, 2.0, 1.0, 4.0))
    monkeypatch.setattr(tuner, "candidates", lambda work: iter(tiles))
    layer = tuner.layer_of(tuner.spec_of("w4a16:64"), 128, 256, torch.float16, H100, "cpu")
    right = layer.multiply

    def multiply(x: torch.Tensor, out: torch.Tensor, tile: Tile) -> None:
        right(x, out, tile)
        if tile == tiles[2]:
            out += 100

    monkeypatch.setattr(layer, "multiply", multiply)
    found = tuner.tune(layer, [8], H100, timed(seconds), "cpu")
    assert found == {8: tiles[1]}, "the third of four is the fastest of the right ones"


@pytest.mark.usefixtures("interpreted")
def test_octavo_tune_writes_a_table_that_is_then_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    best = Tile(128, 8, 1, 8, 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(tuner, "DEVICE", "cpu")
    monkeypatch.setattr(tuner, "candidates", lambda work: iter([best]))
    monkeypatch.setattr(tuner, "_seconds", timed(iter((2.0, 1.0, 2.0, 1.0))))
    assert Tune().run(options("--shapes", "128x256,64x128", "--kernels", "w4a16:64", "--rows", "3")) == 0
    table = json.loads(cache_file("sm_90").read_text())
    assert table["measured"] == "a GPU"
    assert set(table["shapes"]) == {"w4a16 128x256 g64", "w4a16 64x128 g64"}
    assert tile_for(Work("w4a16", 1, 64, 128, 64), H100) == best
    assert "2.00 times as fast as the rule's" in capsys.readouterr().out


def test_without_a_gpu_tuning_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="torch sees none"):
        Tune().run(options())


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--shapes", "4096"), ("--shapes", "ax1"), ("--kernels", "w5a16"), ("--rows", "0"), ("--dtype", "float64")],
)
def test_flags_that_say_nothing_known_are_refused(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        Tune().run(options(flag, value))


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    Tune().add_arguments(parser)
    return parser.parse_args(arguments)


def timed(seconds: Iterator[float]) -> Callable[[Callable[[], None]], float]:
    def measure(call: Callable[[], None]) -> float:
        call()
        return next(seconds)

    return measure


def write(shapes: dict[str, dict[int, Tile]]) -> None:
    path = cache_file("sm_90")
    path.parent.mkdir(parents=True)
    path.write_text(Table(132, "", {}, shapes).write())
