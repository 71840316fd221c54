"""Benchmark points (operation, size, world size), iterations per round, sizes as text, and how
latency is computed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OPERATIONS = (
    "all_reduce",
    "broadcast",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "reduce",
    "barrier",
    "send_recv",
)

DEFAULT_BYTES = tuple(4**k for k in range(1, 14))  # 4 B, 16 B, ... 64 MiB

Span = tuple[float, float]  # when a rank entered a call and when it left; seconds, any zero

_ROUND_S = 0.03
_ITERATIONS_MIN = 3
_ITERATIONS_MAX = 300


@dataclass(frozen=True, slots=True)
class Point:
    """One cell of the table: an operation, the size of its tensor and the number of ranks.

    nbytes: size of the larger side, float32: what all_gather_into_tensor puts out, what
        reduce_scatter_tensor takes in, and the one tensor of the others. 0 for a barrier.
    """

    operation: str
    nbytes: int
    world_size: int

    @property
    def numel(self) -> int:
        """Elements of the larger side, a multiple of the world size where chunks are needed."""
        numel = max(1, self.nbytes // 4)
        if self.operation in ("all_reduce", "broadcast", "reduce", "send_recv"):
            return numel
        return -(-numel // self.world_size) * self.world_size


def points(
    operations: Sequence[str], sizes: Sequence[int], world_sizes: Sequence[int]
) -> list[Point]:
    """Every cell; a barrier has one size only."""
    return [
        Point(operation, nbytes, world_size)
        for world_size in world_sizes
        for operation in operations
        for nbytes in (sizes if operation != "barrier" else (0,))
    ]


def iterations(one_s: float) -> int:
    """How many calls make a round that is long enough to be timed and short enough to alternate."""
    return round(min(max(_ROUND_S / max(one_s, 1e-9), _ITERATIONS_MIN), _ITERATIONS_MAX))


def latencies(by_rank: Sequence[Sequence[Span]]) -> list[float]:
    """Seconds of each call: from when the last rank entered it to when the last rank left it.

    So what a rank waits for one that is late is not counted, and the calls of a loop add up to the
    time that the loop takes. The ranks' clocks must be one, as `time.perf_counter` is on one host.

    by_rank: [rank][call].
    """
    return [
        max(left for _, left in spans) - max(entered for entered, _ in spans)
        for spans in zip(*by_rank, strict=True)
    ]


def parse_size(text: str) -> int:
    """Bytes of whole float32 elements, from "4", "64Ki" or "1Mi". Raises ValueError."""
    units = {"": 1, "Ki": 1024, "Mi": 1024**2, "Gi": 1024**3}
    number = text.rstrip("KMGi")
    unit = units.get(text.removeprefix(number))
    if not number.isdecimal() or unit is None:
        raise ValueError(f"{text!r} is no size: sizes are such as 4, 64Ki and 1Mi")
    nbytes = int(number) * unit
    if nbytes == 0 or nbytes % 4:
        raise ValueError(f"{text} is no number of bytes that float32 elements take")
    return nbytes


def show_bytes(nbytes: int) -> str:
    """ "4 B", "64 KiB", "1 MiB"."""
    for unit, size in (("MiB", 1024**2), ("KiB", 1024)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"
