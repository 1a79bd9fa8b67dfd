"""One picture of a run: how TTFT and ITL are distributed, and when each request waited and answered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo import ConfigError
from octavo_bench.metrics import Summary, percentile
from octavo_bench.recorder import RequestResult

WAITING, ANSWERING, FAILED = "#e0a458", "#3b6ea5", "#b3392f"


def need_matplotlib() -> None:
    """Raises ConfigError where it is missing: before the run, not after it."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib; install it with: pip install 'octavo-bench[plot]'")


def plot(summary: Summary, results: Sequence[RequestResult], file: Path, title: str) -> None:
    """Writes a PNG (or what the name's ending asks for)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplot_mosaic([["ttft", "itl"], ["timeline", "timeline"]], figsize=(11, 8))
    _distribution(axes["ttft"], summary.times["ttft"], "time to first token")
    _distribution(axes["itl"], summary.times["itl"], "inter-token latency")
    _timeline(axes["timeline"], results)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _distribution(axes: Any, seconds: Sequence[float], name: str) -> None:
    """A histogram with the median and P99; its few largest values may lie beyond the right edge, and it says how many."""
    values = [1000 * s for s in seconds]
    axes.set(title=name, xlabel="ms", ylabel="count")
    if not values:
        axes.text(0.5, 0.5, "no values", ha="center", transform=axes.transAxes)
        return
    edge = max(percentile(values, 99.5), min(values) + 1e-6)
    beyond = sum(v > edge for v in values)
    axes.hist(values, bins=60, range=(min(min(values), 0.0), edge), color=ANSWERING)
    for percent, style in ((50, "-"), (99, "--")):
        place = percentile(values, percent)
        axes.axvline(place, color="black", linestyle=style, linewidth=1, label=f"P{percent} {place:.1f} ms")
    if beyond:
        axes.plot([], [], " ", label=f"{beyond} beyond, to {max(values):.0f} ms")
    axes.legend(fontsize="small")


def _timeline(axes: Any, results: Sequence[RequestResult]) -> None:
    """A bar for each request, in order of sending."""
    origin = min((r.start for r in results), default=0.0)
    rows: dict[str, tuple[list[int], list[float], list[float]]] = {
        c: ([], [], []) for c in (WAITING, ANSWERING, FAILED)
    }

    def bar(colour: str, row: int, start: float, end: float) -> None:
        ys, lefts, widths = rows[colour]
        ys.append(row)
        lefts.append(start - origin)
        widths.append(end - start)

    for row, result in enumerate(sorted(results, key=lambda r: r.start)):
        first = result.chunk_times[0] if result.chunk_times else result.end
        bar(WAITING if result.success else FAILED, row, result.start, first if result.success else result.end)
        if result.success:
            bar(ANSWERING, row, first, result.end)
    for colour, label in ((WAITING, "until the first token"), (ANSWERING, "answering"), (FAILED, "failed")):
        ys, lefts, widths = rows[colour]
        if ys:
            axes.barh(ys, widths, left=lefts, height=0.9, color=colour, label=label, linewidth=0)
    axes.set(xlabel="seconds since the first request", ylabel="request", ylim=(-1, max(len(results), 1)))
    axes.invert_yaxis()
    if results:
        axes.legend(fontsize="small", loc="lower left")
