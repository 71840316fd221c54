"""Prints tables on a terminal, tab-separated lines to a pipe, and JSON; colours of verdicts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console, OverflowMethod
from rich.table import Table
from rich.text import Text

STYLES = {
    "holds": "green",
    "broken": "red",
    "timeout": "red",
    "crashed": "red",
    "unknown": "red",
    "blocked": "red",
    "deviation": "yellow",
    "not claimed": "yellow",
    "not exercised": "dim",
}


def show_table(group: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table under a heading on a terminal, its last column over several lines if need be.

    Elsewhere one line a row: the group and the cells, with tabs between them.
    """
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join([group, *row]))
        return
    table = Table(
        title=f"{group} ({len(rows)})",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    console = Console()
    # The sign that stands for what was cut is no ASCII.
    cut: OverflowMethod = "ellipsis" if console.encoding.startswith("utf") else "crop"
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True, overflow=cut, header_style="dim")
    table.add_column(columns[-1], overflow="fold", header_style="dim")
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    console.print(table)
    console.print()


def show_json(value: Any) -> None:
    """The value as JSON."""
    print(json.dumps(value, indent=1))
