"""Benchmark results as a table and as JSON."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from conformance.bench.plan import show_bytes

FLOOR = "compute"
"""Beside the targets of a step: what each rank takes for the same step alone."""
FLOOR_OF_COLLECTIVES = "floor"
"""Beside the targets of a collective: what it costs if no rank waits; see `floor`."""


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

    def ratio_above_floor(self, target: str, against: str) -> float | None:
        """The same of what is above the floor; None where one of them reaches it."""
        above, other = (self.median_s(name) - self.median_s(FLOOR) for name in (target, against))
        return other / above if min(above, other) > 0 else None


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak memory of a step. mib: target's name -> MiB of the largest rank."""

    what: str
    world_size: int
    mib: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement. target: what the others are compared with."""

    workload: str
    target: str
    against: tuple[str, ...]
    rows: Sequence[Row]
    peaks: Sequence[Peak] = ()

    @property
    def has_floor(self) -> bool:
        return any(FLOOR in row.times_s for row in self.rows)

    @property
    def _above_floor(self) -> list[str]:
        """Which of the others are also compared with the floor of the collectives."""
        if FLOOR_OF_COLLECTIVES not in self.against:
            return []
        return [name for name in self.against if name != FLOOR_OF_COLLECTIVES]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Head and lines: medians and ratios, one line a point."""
        head = ["what", "ranks", "size", self.target]
        for other in self.against:
            head += [other, f"{other} / {self.target}"]
        if self.has_floor:
            head += [FLOOR, *(f"{other} / {self.target}, above it" for other in self.against)]
        head += [f"{other} / {FLOOR_OF_COLLECTIVES}" for other in self._above_floor]
        return head, [self._line(row) for row in self.rows]

    def _line(self, row: Row) -> list[str]:
        cells = [row.what, str(row.world_size), show_bytes(row.nbytes)]
        cells.append(show_s(row.median_s(self.target)))
        for other in self.against:
            if other in row.times_s:
                cells += [show_s(row.median_s(other)), f"{row.ratio(self.target, other):.2f}"]
            else:
                cells += ["", ""]
        if self.has_floor:
            cells.append(show_s(row.median_s(FLOOR)))
            for other in self.against:
                above = row.ratio_above_floor(self.target, other)
                cells.append("" if above is None else f"{above:.2f}")
        for other in self._above_floor:
            cells.append(f"{row.ratio(FLOOR_OF_COLLECTIVES, other):.2f}")
        return cells


def print_table(measured: Measured, console: Console) -> None:
    """See `Measured.table`."""
    head, lines = measured.table()
    table = Table(*head, box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"  # not cut, nor by a character that is no ASCII
    for column in table.columns[1:]:
        column.justify = "right"
    for line in lines:
        table.add_row(*line)
    console.print(table)


def write_json(path: Path, measured: Measured, rounds: int) -> None:
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
        for row in measured.rows
    ]
    head, lines = measured.table()
    document = {
        "workload": measured.workload,
        "target": measured.target,
        "against": measured.against,
        "rounds": rounds,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "points": points,
        "peaks": [asdict(peak) for peak in measured.peaks],
        "table": [head, *lines],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def show_s(seconds: float) -> str:
    """ "1.2 s", "30 ms", "5 us"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
