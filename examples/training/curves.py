"""Loss curves of several runs: in one picture, and how far apart they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(path: Path, curves: Mapping[str, Sequence[float]]) -> None:
    """All loss curves in one picture; lines become thinner, so that none hides another.

    Needs matplotlib, of ci/requirements-bench.txt.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for i, (name, losses) in enumerate(curves.items()):
        axes.plot(losses, label=name, linewidth=2 * (len(curves) - i) - 1, alpha=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per character)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest distance between two curves."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def learns(losses: Sequence[float]) -> bool:
    """Whether the loss ends below half of where it began."""
    return sum(losses[-10:]) < 0.5 * sum(losses[:10])
