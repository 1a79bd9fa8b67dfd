"""How a plan is shown: the kernel table and the memory plan, printed or as JSON, for `inspect` and `doctor`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from octavo.attention.kv_format import ranges
from octavo.attention.selection import LayoutSelection
from octavo.engine.kv_plan import KVPlan
from octavo.model.plan import LinearReport, ModelPlan


def console() -> Any:
    """Standard output for tables: as wide as the terminal, or wide enough for any table where there is none."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    return Console(markup=False, highlight=False, soft_wrap=True, width=width)


def plan_json(plan: ModelPlan, kv_plan: KVPlan | None, attention: LayoutSelection | None) -> dict[str, Any]:
    """Numbers and names for scripts; null for what could not be planned."""
    kv = kv_plan and {
        **asdict(kv_plan),
        "bytes_per_token": kv_plan.bytes_per_token,
        "capacity_tokens": kv_plan.capacity_tokens,
        "longest_tokens": kv_plan.longest_tokens,
    }
    return {
        "model": plan.settings.model,
        "format": plan.quant.name if plan.quant else None,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "linears": [asdict(report) for report in plan.linears],
        "embedding": {"spec": str(plan.spec(plan.embedding)), "num_bytes": plan.embedding_bytes},
        "other_bytes": plan.other_bytes,
        "total_bytes": plan.stored_bytes,
        "resident_bytes": plan.resident_bytes,
        "attention": attention and {"kernel": str(attention), "refusals": attention.refusals},
        "kv": kv,
    }


def print_plan(
    plan: ModelPlan, kv_plan: KVPlan | None, attention: LayoutSelection | None, every_layer: bool = False
) -> None:
    """The table of kernels, and the lines about memory; without those rows that could not be planned."""
    from rich.table import Column, Table

    decoder = plan.config
    output = console()
    scheme = f"{plan.quant.name} checkpoint" if plan.quant else "unquantised checkpoint"
    output.print(
        f"{plan.settings.model}: {scheme}, {decoder.num_layers} layers, hidden {decoder.hidden_size}, {decoder.heads} heads / "
        f"{decoder.kv_heads} kv heads of {decoder.head_dim}, vocabulary {decoder.vocab_size}; computes in "
        f"{str(plan.dtype).removeprefix('torch.')}"
    )
    columns = (Column("layer", overflow="fold"), "scheme", "kernel", "MiB in file", "why not a better one")
    table = Table(*columns, box=None, pad_edge=False)
    reasons: dict[tuple[str, str], int] = {}
    for label, reports in kernel_rows(plan.linears, every_layer):
        first = reports[0]
        size = sum(r.num_bytes for r in reports) / 2**20
        table.add_row(label, first.spec, first.kernel, f"{size:.2f}", _marks(reasons, first.refusals, first.note))
    if kv_plan is not None and attention is not None:
        table.add_row("attention", f"KV as {kv_plan.format}", str(attention), "-", _marks(reasons, attention.refusals))
    table.add_row("embedding", str(plan.spec(plan.embedding)), "lookup", f"{plan.embedding_bytes / 2**20:.2f}", "-")
    table.add_row("norms", "float", "-", f"{plan.other_bytes / 2**20:.2f}", "-")
    table.add_row("total", "", "", f"{plan.stored_bytes / 2**20:.2f}", "")
    output.print(table)
    for (name, why), number in reasons.items():
        output.print(f"[{number}] {name}: {why}")
    output.print(f"weights in memory: about {plan.resident_bytes / 2**20:,.2f} MiB")
    if kv_plan is not None:
        output.print(str(kv_plan))


def _marks(reasons: dict[tuple[str, str], int], refusals: Sequence[tuple[str, str]], note: str = "") -> str:
    """What is said of a row: the note, and the numbers under which its refusals are listed below the table."""
    marks = [f"[{reasons.setdefault(refusal, len(reasons) + 1)}]" for refusal in refusals]
    return "; ".join([*([note] if note else []), *([" ".join(marks)] if marks else [])]) or "-"


def kernel_rows(linears: Sequence[LinearReport], every_layer: bool = False) -> list[tuple[str, list[LinearReport]]]:
    """Table rows: layers that differ by their number only share one, unless every layer is wanted."""
    if every_layer:
        return [(r.layer, [r]) for r in linears]
    grouped: dict[tuple[Any, ...], list[LinearReport]] = {}
    for report in linears:
        key = (re.sub(r"\.\d+\.", ".*.", report.layer), report.spec, report.kernel, report.refusals, report.note)
        grouped.setdefault(key, []).append(report)
    rows = []
    for key, reports in grouped.items():
        numbers = [int(m.group(1)) for r in reports if (m := re.search(r"\.(\d+)\.", r.layer))]
        rows.append((key[0].replace("*", ranges(numbers), 1) if numbers else key[0], reports))
    return rows
