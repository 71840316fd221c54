"""Benchmark results as pictures: time against size, steps against their floor, peak memory.

The extra `bench` brings matplotlib, without which each function raises ModuleNotFoundError.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from conformance.bench.report import FLOOR, Measured, Peak, Row

_BAR = 0.8  # of the place that a line has


def draw(path: Path, measured: Measured) -> None:
    """As SVG, by what was measured: collectives, or steps and memory."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure: Any = Figure(layout="constrained")
    FigureCanvasSVG(figure)
    if measured.has_floor or measured.peaks:
        _draw_bars(figure, measured)
    else:
        _draw_sizes(figure, measured.rows)
    figure.savefig(path)


def _draw_sizes(figure: Any, rows: Sequence[Row]) -> None:
    """Time against size, both axes logarithmic: one panel for each operation and world size."""
    operations = list(dict.fromkeys(row.what for row in rows))
    world_sizes = _world_sizes(rows)
    figure.set_size_inches(4.5 * len(world_sizes), 3.2 * len(operations))
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


def _draw_bars(figure: Any, measured: Measured) -> None:
    """A row of panels for times, each with the floor as a line, and one for memory."""
    names = [measured.target, *measured.against]
    rows, peaks = measured.rows, measured.peaks
    world_sizes = _world_sizes([*rows, *peaks])
    kinds = [kind for kind in (rows, peaks) if kind]
    height = sum(len({x.what for x in kind}) * 0.25 * len(names) + 1 for kind in kinds)
    figure.set_size_inches(5.5 * len(world_sizes), height)
    panels = figure.subplots(len(kinds), len(world_sizes), squeeze=False)
    for line, kind in zip(panels, kinds, strict=True):
        for panel, world_size in zip(line, world_sizes, strict=True):
            shown: Any = [x for x in kind if x.world_size == world_size]
            if kind is rows:
                values = {n: [1e3 * row.median_s(n) for row in shown] for n in (*names, FLOOR)}
            else:
                values = {n: [peak.mib[n] for peak in shown] for n in names}
            _draw_lines(panel, [x.what for x in shown], values)
            panel.set(xlabel="ms, median" if kind is rows else "MiB, peak of the largest rank")
            panel.set_title(f"{measured.workload}, {world_size} ranks", fontsize=10)
            panel.legend(fontsize=8)


def _draw_lines(panel: Any, labels: Sequence[str], values: dict[str, list[float]]) -> None:
    """Horizontal bars, those of one label side by side; the floor is a mark across them."""
    floor = values.pop(FLOOR, None)
    thick = _BAR / len(values)
    for place, (name, lengths) in enumerate(values.items()):
        middles = [i - _BAR / 2 + (place + 0.5) * thick for i in range(len(labels))]
        panel.barh(middles, lengths, height=thick * 0.9, label=name)
    if floor is not None:
        ends = (
            [i - _BAR / 2 for i in range(len(labels))],
            [i + _BAR / 2 for i in range(len(labels))],
        )
        panel.vlines(floor, *ends, colors="black", label=f"{FLOOR} alone")
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panel.invert_yaxis()


def _world_sizes(rows: Iterable[Row | Peak]) -> list[int]:
    return list(dict.fromkeys(row.world_size for row in rows))
