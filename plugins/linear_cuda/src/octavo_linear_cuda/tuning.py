"""Which tiles a product is computed in: tables by chip, kernel and shape, and each chip's rules where these say nothing.

`tables/sm_XX.json` comes with the plugin; `octavo tune` writes a file of the same form into the user's cache folder, whose
shapes count first. `rules` are estimates unless `measured` says on which GPU they were found.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo import Platform

logger = logging.getLogger(__name__)

ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Calls are looked up by the next of these numbers of rows."""
_SPLIT_ROWS = 64
"""Up to so many rows, inputs are split where outputs alone leave multiprocessors idle."""
_LEAST_INPUTS = 512
"""Inputs that a part has at least."""
_MOST_SPLITS = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """Outputs and rows of a tile, into how many parts the inputs are split, and how it is computed."""

    outputs: int
    rows: int
    splits: int
    warps: int
    stages: int

    @property
    def is_sound(self) -> bool:
        """Whether the kernels can compute such tiles at all."""
        sizes = self.outputs in (32, 64, 128) and self.rows in (8, 16, 32, 64, 128, 256)
        return sizes and 1 <= self.splits <= _MOST_SPLITS and self.warps in (2, 4, 8) and 1 <= self.stages <= 8


@dataclass(frozen=True, slots=True)
class Work:
    """A product: its kernel ("w4a16", "w3a32", "w8a8", "fp8"), and its sizes. `group` -1: one scale for all inputs."""

    kernel: str
    rows: int
    outputs: int
    inputs: int
    group: int

    @property
    def shape(self) -> str:
        """The name of kernel and weight in the tables."""
        return f"{self.kernel} {self.outputs}x{self.inputs} g{self.group}"

    @property
    def bucket(self) -> int:
        """The number of rows under which the tables have it."""
        return bucket(self.rows)


def bucket(rows: int) -> int:
    """The number of rows under which the tables have so many."""
    return next((most for most in ROWS if rows <= most), ROWS[-1])


@dataclass(frozen=True, slots=True)
class Table:
    """One chip: how many multiprocessors, rules by kernel (most rows, tile), and tiles by shape and bucket of rows."""

    multiprocessors: int
    measured: str
    rules: Mapping[str, tuple[tuple[int, Tile], ...]]
    shapes: Mapping[str, Mapping[int, Tile]]

    @classmethod
    def read(cls, text: str) -> Table:
        """Raises ValueError, KeyError or TypeError where the text is no table."""
        data = json.loads(text)
        rules = {
            kernel: tuple((int(most), _tile(numbers)) for most, numbers in rows.items())
            for kernel, rows in data.get("rules", {}).items()
        }
        shapes = {shape: {int(r): _tile(t) for r, t in rows.items()} for shape, rows in data.get("shapes", {}).items()}
        return cls(int(data["multiprocessors"]), str(data["measured"]), rules, shapes)

    def write(self) -> str:
        """The text that `read` reads."""
        rules = {kernel: {str(most): astuple(t) for most, t in rows} for kernel, rows in self.rules.items()}
        shapes = {shape: {str(r): astuple(t) for r, t in rows.items()} for shape, rows in self.shapes.items()}
        head = {"multiprocessors": self.multiprocessors, "measured": self.measured}
        return json.dumps({**head, "rules": rules, "shapes": shapes}, indent=1)


def _tile(numbers: Any) -> Tile:
    tile = Tile(*(int(number) for number in numbers))
    if not tile.is_sound:
        raise ValueError(f"no kernel computes tiles of {numbers}")
    return tile


def chip_of(platform: Platform) -> str:
    """The chip whose table serves: of a capability without one, the next lower, of none, as when interpreting, the newest."""
    major, minor = platform.capability or (9, 0)
    return "sm_90" if (major, minor) >= (9, 0) else "sm_80"


def cache_file(chip: str) -> Path:
    """Where `octavo tune` keeps what it found for a chip."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "octavo" / "linear_cuda" / f"{chip}.json"


@cache
def shipped(chip: str) -> Table:
    """The plugin's table."""
    return Table.read((files("octavo_linear_cuda") / "tables" / f"{chip}.json").read_text(encoding="utf-8"))


@cache
def tuned(chip: str) -> Table | None:
    """The user's table; one that cannot be read is named in the log, once, and not used."""
    path = cache_file(chip)
    try:
        return Table.read(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning(
            "%s cannot be used (%s): tiles are those that the plugin ships. Run octavo tune again", path, error
        )
        return None


@cache
def tile_for(work: Work, platform: Platform) -> Tile:
    """The user's tile for this shape, else the plugin's, else the one of the chip's rule."""
    chip = chip_of(platform)
    for table in (tuned(chip), shipped(chip)):
        if table is not None and (tile := table.shapes.get(work.shape, {}).get(work.bucket)) is not None:
            return tile
    return ruled(work, shipped(chip))


def ruled(work: Work, table: Table) -> Tile:
    """The rule's tile for so many rows; for few of them, split until the chip has about two tiles a multiprocessor."""
    rules = table.rules.get(work.kernel) or table.rules[work.kernel[-3:]]  # "w4a16" goes by "a16"
    tile = next((tile for most, tile in rules if work.rows <= most), rules[-1][1])
    splits = 1
    if work.rows <= _SPLIT_ROWS:
        tiles = -(-work.outputs // tile.outputs) * -(-work.rows // tile.rows)
        wanted = 2 * table.multiprocessors / tiles
        while splits * 2 <= min(wanted, work.inputs // _LEAST_INPUTS, _MOST_SPLITS):
            splits *= 2
    return Tile(tile.outputs, tile.rows, splits, tile.warps, tile.stages)
