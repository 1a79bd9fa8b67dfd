"""What the parts of the GPU benchmark share: the device, how time is taken, and what the chip can do at most."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from octavo import Platform
from octavo.testing import gpu


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the chip reaches: copying in GB/s, read and written, and a large bf16 product in TFLOP/s."""

    copy: float
    matmul: float


@dataclass(slots=True)
class Context:
    """`tiny` shrinks everything to what Triton's interpreter computes in seconds: to see that the script runs, not how fast."""

    quick: bool = False
    tiny: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    ceilings: Ceilings = Ceilings(float("nan"), float("nan"))

    @property
    def platform(self) -> Platform:
        return gpu((9, 0)) if self.tiny else Platform.detect("cuda")

    @property
    def seconds(self) -> float:
        """To spend on one measurement."""
        return 0.03 if self.quick else 0.15

    def measure(self, function: Callable[[], Any]) -> float:
        """Seconds that one call takes on the device: the median of five series."""
        function()
        if self.device.type != "cuda":
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        function()
        once = self._series(function, 2)
        repeats = max(2, int(self.seconds / 5 / max(once, 1e-6)))
        return median(self._series(function, repeats) for _ in range(5))

    def _series(self, function: Callable[[], Any], repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / repeats

    def find_ceilings(self) -> list[dict[str, Any]]:
        """Measures what copying and a large bf16 product reach, against which everything else is held."""
        count, size = (2**16, 64) if self.tiny else (2**30, 8192)
        source = torch.zeros(count, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copy = 2 * count / self.measure(lambda: target.copy_(source)) / 1e9
        left, right = (torch.randn(size, size, device=self.device).to(torch.bfloat16) for _ in range(2))
        matmul = 2 * size**3 / self.measure(lambda: left @ right) / 1e12
        self.ceilings = Ceilings(copy, matmul)
        return [
            {"what": f"copy of {count >> 20} MiB", "GB/s": copy},
            {"what": f"bf16 matmul of {size}", "TFLOP/s": matmul},
        ]


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of one part, under all columns that occur."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_shown(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
