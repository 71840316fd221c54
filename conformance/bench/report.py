"""Benchmark results as a table, as JSON, and as a plot of time against size."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from conformance.bench.plan import show_bytes


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. times_s: target's name -> latencies, seconds, of every call."""

    what: str
    nbytes: int
    world_size: int
    times_s: Mapping[str, Sequence[float]]

    def median_s(self, target: str) -> float:
        return statistics.median(self.times_s[target])

    def ratio(self, target: str, against: str) -> float:
        """How many times faster the target is."""
        return self.median_s(against) / self.median_s(target)


def print_table(rows: Iterable[Row], target: str, others: Sequence[str], console: Console) -> None:
    """Medians and ratios, one line a point."""
    table = Table("what", "ranks", "size", target, box=None, pad_edge=False)
    for other in others:
        table.add_column(other)
        table.add_column(f"{other} / {target}")
    for column in table.columns:
        column.overflow = "fold"  # not cut, nor by a character that is no ASCII
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        cells = [row.what, str(row.world_size), show_bytes(row.nbytes)]
        cells.append(_show_s(row.median_s(target)))
        for other in others:
            if other in row.times_s:
                cells += [_show_s(row.median_s(other)), f"{row.ratio(target, other):.2f}"]
            else:
                cells += ["", ""]
        table.add_row(*cells)
    console.print(table)


def write_json(path: Path, rows: Sequence[Row], what: Mapping[str, Any]) -> None:
    """Medians, extremes and counts of every point, and on what they were measured."""
    points = [
        {
            "what": row.what,
            "world_size": row.world_size,
            "nbytes": row.nbytes,
            "seconds": {
                name: {
                    "median": statistics.median(times),
                    "min": min(times),
                    "max": max(times),
                    "calls": len(times),
                }
                for name, times in row.times_s.items()
            },
        }
        for row in rows
    ]
    where = {"python": platform.python_version(), "torch": torch.__version__}
    where["machine"] = f"{platform.system()} {platform.machine()}"
    path.write_text(json.dumps({**what, **where, "points": points}, indent=1) + "\n")


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Time against size, both axes logarithmic: one panel for each operation and world size.

    Raises ModuleNotFoundError where matplotlib is not installed (the extra `bench` brings it).
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    operations = list(dict.fromkeys(row.what for row in rows))
    world_sizes = list(dict.fromkeys(row.world_size for row in rows))
    figure = Figure(figsize=(4.5 * len(world_sizes), 3.2 * len(operations)), layout="constrained")
    FigureCanvasSVG(figure)
    panels = figure.subplots(len(operations), len(world_sizes), squeeze=False)
    for line, operation in zip(panels, operations, strict=True):
        for panel, world_size in zip(line, world_sizes, strict=True):
            shown = [r for r in rows if r.what == operation and r.world_size == world_size]
            for name in dict.fromkeys(name for row in shown for name in row.times_s):
                having = [row for row in shown if name in row.times_s]
                sizes = [max(row.nbytes, 1) for row in having]
                panel.plot(sizes, [row.median_s(name) for row in having], marker=".", label=name)
            panel.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds, median")
            panel.set_title(f"{operation}, {world_size} ranks", fontsize=10)
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
    figure.savefig(path)


def _show_s(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
