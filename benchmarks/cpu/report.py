"""From samples to what is printed: medians, ratios, shares of the machine's ceilings, a table, JSON and a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cpu.roofline import Ceilings
from benchmarks.cpu.shapes import KINDS, SHAPES, Kind, Shape
from benchmarks.cpu.work import CONTEXT, LOAD, PREFILL, RSS, UNITS, WORKS, Case, Sizes

OURS, LLAMA_CPP = "octavo", "llama.cpp"
LESS_IS_BETTER = frozenset(UNITS)

GOALS: Mapping[str, Mapping[str, tuple[Mapping[str, float], float | None]]] = {
    "int4": {
        "decode 1": ({"S": 1.5, "M": 1.6, "L": 1.7}, 1.2),
        "decode 4": (dict.fromkeys(SHAPES, 1.8), 1.2),
        "decode 8": (dict.fromkeys(SHAPES, 2.2), 1.2),
        "decode 16": (dict.fromkeys(SHAPES, 2.5), 1.2),
        PREFILL: (dict.fromkeys(SHAPES, 4.0), 1.3),
        "context kv16": (dict.fromkeys(SHAPES, 3.0), 2.0),
        "context kv8": (dict.fromkeys(SHAPES, 4.0), 2.0),
    },
    "int4-float": {PREFILL: (dict.fromkeys(SHAPES, 1.5), None)},
    "int8": {
        PREFILL: (dict.fromkeys(SHAPES, 4.0), 1.2),
        "decode 1": (dict.fromkeys(SHAPES, 1.3), 1.2),
        "decode 16": (dict.fromkeys(SHAPES, 2.5), 1.2),
    },
    "float16": {
        PREFILL: (dict.fromkeys(SHAPES, 1.2), 1.0),
        "decode 1": (dict.fromkeys(SHAPES, 1.3), 1.0),
    },
}
"""How many times llama.cpp (by shape) and the best of all peers octavo means to reach, by kind of weights and workload."""


@dataclass(slots=True)
class CaseResult:
    """All samples of one shape and kind of weights, by engine and workload; `notes` by engine."""

    case: Case
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, engine: str, values: Mapping[str, float]) -> None:
        for work, value in values.items():
            self.samples.setdefault(engine, {}).setdefault(work, []).append(value)

    def median(self, engine: str, work: str) -> float | None:
        values = self.samples.get(engine, {}).get(work)
        return median(values) if values else None

    def gain(self, work: str, engine: str) -> float | None:
        """How many times as good octavo is as another engine: more tokens a second, or fewer seconds and bytes."""
        ours, theirs = self.median(OURS, work), self.median(engine, work)
        if not ours or not theirs:
            return None
        return theirs / ours if work in LESS_IS_BETTER else ours / theirs

    def best_peer(self, work: str) -> str | None:
        """The peer that octavo is the least ahead of."""
        gains = {engine: gain for engine in self.samples if engine != OURS and (gain := self.gain(work, engine))}
        return min(gains, key=gains.__getitem__, default=None)

    def as_dict(self, ceilings: Ceilings) -> dict[str, Any]:
        case = self.case
        works = [work for work in WORKS if any(work in found for found in self.samples.values())]
        rows = {}
        for work in works:
            best = self.best_peer(work)
            row: dict[str, Any] = {
                "medians": {e: v for e in self.samples if (v := self.median(e, work)) is not None},
                "ours_over_llama_cpp": self.gain(work, LLAMA_CPP),
                "ours_over_best": None if best is None else self.gain(work, best),
                "best_peer": best,
                "shares": {e: s for e in self.samples if (s := share(case, work, self.median(e, work), ceilings))},
                "ceiling": ceiling_of(case.kind, work),
                "goal": goal(case.shape, case.kind, work),
            }
            rows[work] = row
        return {
            "shape": case.shape.name,
            "kind": case.kind.name,
            "threads": case.threads,
            "rows": rows,
            "samples": self.samples,
            "notes": self.notes,
            "failures": self.failures,
        }


def goal(shape: Shape, kind: Kind, work: str) -> tuple[float, float | None] | None:
    """(times llama.cpp, times the best peer) that octavo means to reach."""
    found = GOALS.get(kind.name, {}).get(work)
    return None if found is None else (found[0][shape.name], found[1])


def ceiling_of(kind: Kind, work: str) -> str | None:
    """Which ceiling a workload is held to: "int8", "fp32", "read"; None for those without."""
    return kind.peak if work == PREFILL else None if work in UNITS else "read"


def step_bytes(shape: Shape, kind: Kind, work: str, sizes: Sizes) -> float:
    """Bytes that one decode step of a workload must read, half of the decoded tokens being in K and V on average."""
    what, _, tail = work.partition(" ")
    if what == "context":
        tokens, number = sizes.context + sizes.context_decode / 2, CONTEXT[work]
    else:
        tokens, number = int(tail) * (sizes.prompt + sizes.decode / 2), 2
    return shape.step_bytes(kind) + shape.kv_bytes(1, number) * tokens


def share(case: Case, work: str, value: float | None, ceilings: Ceilings) -> float | None:
    """Of the ceiling: operations of a prefill over the peak, or bytes of decode steps over the bandwidth for so many bytes."""
    ceiling = ceiling_of(case.kind, work)
    if value is None or ceiling is None:
        return None
    if ceiling != "read":
        peak = ceilings.peak(ceiling, case.threads)
        return None if peak is None else value * case.shape.ops_per_token / peak
    num_bytes = step_bytes(case.shape, case.kind, work, case.sizes)
    bandwidth = ceilings.bandwidth(num_bytes, case.threads)
    sequences = 1 if work in CONTEXT else int(work.rpartition(" ")[2])
    return None if bandwidth is None else value / sequences * num_bytes / bandwidth


# --- what a person reads


def table(results: Sequence[CaseResult], ceilings: Ceilings) -> str:
    """One block a case: a row a workload, a column an engine, then the ratios, the goals and octavo's and the best's share."""
    blocks = []
    for result in results:
        found = result.as_dict(ceilings)
        engines = list(result.samples)
        heads = ["tokens a second", *engines, "/ llama.cpp", "/ best", "goal", "share of", "octavo", "best peer"]
        lines = [heads]
        for work, row in found["rows"].items():
            values = [number(row["medians"].get(engine)) for engine in engines]
            wanted = row["goal"]
            lines.append(
                [
                    f"{work} ({UNITS[work]})" if work in UNITS else work,
                    *values,
                    times(row["ours_over_llama_cpp"]),
                    times(row["ours_over_best"]),
                    "" if wanted is None else " / ".join(times(part) for part in wanted),
                    row["ceiling"] or "",
                    percent(row["shares"].get(OURS)),
                    percent(max((v for e, v in row["shares"].items() if e != OURS), default=None)),
                ]
            )
        case = result.case
        title = f"{case.shape.name} ({case.shape.like}), {case.kind.says}, {case.threads} thread(s)"
        blocks.append("\n".join([title, aligned(lines), *result.failures]))
    return "\n\n".join(blocks)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first to the left."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    out = []
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        out.append("  ".join(cells).rstrip())
    return "\n".join(out)


def number(value: float | None) -> str:
    return (
        "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    )


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def kernels(results: Sequence[CaseResult]) -> str:
    """Which kernels octavo ran, a line a case."""
    lines = []
    for result in results:
        notes = result.notes.get(OURS, {})
        ran = [f"{name} ({found['layers']} layers)" for name, found in notes.get("kernels", {}).items()]
        if ran:
            unknown = notes.get("unknown_settings")
            eager = notes.get("eager_because")
            more = f" (eager: {eager})" if eager else ""
            more += f"; this octavo has no setting {', '.join(unknown)}" if unknown else ""
            what = f"attention: {notes['attention']}; step: {notes.get('step')}"
            lines.append(f"octavo, {result.case}: {', '.join(ran)}; {what}{more}")
    return "\n".join(lines)


def chart(results: Sequence[CaseResult], place: Path) -> str | None:
    """Draws each engine's speed over llama.cpp's, a panel a case; returns a sentence where it cannot."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no chart: matplotlib is not installed"
    works = [work for work in WORKS if work not in (LOAD, RSS)]
    drawn = [r for r in results if any(r.median(LLAMA_CPP, work) for work in works)]
    if not drawn:
        return "no chart: llama.cpp, to which it would compare, did not run"
    engines = list(dict.fromkeys(engine for result in drawn for engine in result.samples))
    columns = min(3, len(drawn))
    figure = Figure(figsize=(6.5 * columns, 3.6 * -(-len(drawn) // columns)), layout="constrained")
    panels = figure.subplots(-(-len(drawn) // columns), columns, squeeze=False).flat
    for panel, result in zip(panels, drawn, strict=False):
        shown = [work for work in works if result.median(LLAMA_CPP, work)]
        width = 0.8 / len(engines)
        for i, engine in enumerate(engines):
            heights = [(result.median(engine, work) or 0) / (result.median(LLAMA_CPP, work) or 1) for work in shown]
            places = [place + (i - (len(engines) - 1) / 2) * width for place in range(len(shown))]
            panel.bar(places, heights, width, label=engine, color=f"C{i}")
        for i, work in enumerate(shown):
            if (wanted := goal(result.case.shape, result.case.kind, work)) is not None:
                panel.plot([i - 0.45, i + 0.45], [wanted[0]] * 2, color="black", linewidth=1)
        panel.set_xticks(range(len(shown)), shown, rotation=20, ha="right", fontsize=8)
        panel.axhline(1, color="grey", linewidth=0.5)
        panel.set_ylabel("speed / llama.cpp's")
        panel.set_title(f"{result.case.shape.like}: {result.case.kind.says}", fontsize=9)
    for panel in list(panels)[len(drawn) :]:
        panel.set_axis_off()
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(f"{drawn[0].case.threads} threads; black lines: octavo's goals", fontsize=9)
    figure.savefig(place, dpi=120)
    return None


def cases(shapes: Sequence[str], kinds: Sequence[str], cache: Path, sizes: Sizes, threads: int) -> list[Case]:
    """All pairs, shapes first."""
    return [Case(SHAPES[s], KINDS[k], cache, sizes, threads) for s in shapes for k in kinds]
