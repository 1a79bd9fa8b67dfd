"""What a quantisation tells at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.config import EngineConfig
from octavo.front.llm import registry_for
from octavo.front.recipe import describe_options


def list_methods(config: EngineConfig) -> int:
    """Prints each installed method with its options, their defaults and meaning; returns the exit code."""
    for name, kind in sorted(registry_for(config).quantizers.items()):
        first = (kind.__doc__ or "").partition("\n")[0]
        print(f"{name}: {first} Writes {kind.target} unless --to says otherwise.")
        for option, default, text in describe_options(kind):
            print(f"  {option}={default}  {text}")
    return 0


def print_errors(rows: Sequence[Mapping[str, float]], plain: bool) -> None:
    """A table of relative output errors, ||X (Wq - W)^T||^2 / ||X W^T||^2 in percent, by layer and group of linears."""
    from rich.console import Console
    from rich.table import Table

    columns = list(dict.fromkeys(label for row in rows for label in row))
    table = Table(title="lost of each output's power, %", title_justify="left", box=None, header_style="")
    table.add_column("layer")
    for label in columns:
        table.add_column(label, justify="right", overflow="fold")
    for index, row in enumerate(rows):
        values = [f"{100 * row[label]:.3f}" if label in row else "-" for label in columns]
        table.add_row("head" if "lm_head" in row else str(index), *values)
    Console(width=100, no_color=plain, highlight=False).print(table)
