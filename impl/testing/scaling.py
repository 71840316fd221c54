"""Scaling report: predicted messages, bytes and time of each algorithm, by world and tensor size.

The numbers of messages and bytes are those of the schedules themselves (`impl.schedules.cost` is
tested against them for every world up to 32). The time comes from a latency-bandwidth model whose
constants are the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from impl.schedules import choice, cost
from impl.schedules.barrier import dissemination_barrier
from impl.schedules.choice import Candidate, best
from impl.schedules.cost import NetworkCost, predicted_s
from impl.schedules.pairwise import direct_gather, direct_scatter, pairwise_all_to_all

WORLD_SIZES = (2, 4, 8, 64, 1024)
SIZES_NBYTES = (4, 64 << 10, 1 << 20, 64 << 20)
ITEMSIZE = 4


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """One algorithm for one operation, in one world, on tensors of one size.

    `nbytes` is the size of the whole tensor: of the result of a gather, of the input of a scatter
    or reduce-scatter, of everything that a rank sends in an all-to-all.
    """

    operation: str
    algorithm: str
    world_size: int
    nbytes: int
    rounds: int  # messages that must follow one another
    messages: int  # that the busiest rank sends
    sent_nbytes: int  # by the busiest rank
    predicted_s: float
    is_chosen: bool  # what the authenticated mode uses
    is_gloo: bool  # what C++ Gloo uses


GLOO = {
    "all_reduce": "ring",
    "reduce": "ring",
    "broadcast": "tree",
    "all_gather": "ring",
    "all_to_all": "pairwise",
    "gather": "direct",
    "scatter": "direct",
    "barrier": "dissemination",
}


def scaling_rows(
    world_sizes: Sequence[int] = WORLD_SIZES,
    sizes_nbytes: Sequence[int] = SIZES_NBYTES,
    network: NetworkCost = choice.NETWORK,
) -> list[ScalingRow]:
    """Every algorithm for every operation, world and size."""
    rows = []
    for world_size in world_sizes:
        for nbytes in sizes_nbytes:
            for operation, candidates in _operations(world_size, nbytes):
                # The choice is made with the constants of the code, whatever network is asked
                # about.
                chosen = best(candidates)
                rows += [
                    _row(operation, world_size, nbytes, candidate, chosen, network)
                    for candidate in candidates
                ]
    return rows


def _row(
    operation: str,
    world_size: int,
    nbytes: int,
    candidate: Candidate,
    chosen: Candidate,
    network: NetworkCost,
) -> ScalingRow:
    price = candidate.cost
    return ScalingRow(
        operation,
        candidate.algorithm,
        world_size,
        nbytes,
        price.rounds,
        price.messages,
        price.sent_nbytes,
        predicted_s(price, network),
        is_chosen=candidate is chosen,
        is_gloo=GLOO.get(operation) == candidate.algorithm,
    )


def _operations(n: int, nbytes: int) -> Iterator[tuple[str, list[Candidate]]]:
    part = nbytes // n // ITEMSIZE * ITEMSIZE
    parts = [part] * n
    yield "all_reduce", choice.all_reduce_candidates(n, nbytes, ITEMSIZE)
    yield "reduce", choice.reduce_candidates(n, 0, nbytes, ITEMSIZE)
    yield "broadcast", choice.broadcast_candidates(n, 0, nbytes)
    yield "all_gather", choice.all_gather_candidates(n, part)
    yield "reduce_scatter", choice.reduce_scatter_candidates(n, part, ITEMSIZE)
    yield (
        "all_to_all",
        [
            Candidate(
                "pairwise",
                cost.pairwise_all_to_all_cost(parts),
                lambda rank: pairwise_all_to_all(rank, n, parts, parts),
            )
        ],
    )
    yield (
        "gather",
        [
            Candidate(
                "direct",
                cost.direct_gather_cost(parts),
                lambda rank: direct_gather(rank, n, 0, parts),
            )
        ],
    )
    yield (
        "scatter",
        [
            Candidate(
                "direct",
                cost.direct_scatter_cost(n, part),
                lambda rank: direct_scatter(rank, n, 0, part),
            )
        ],
    )
    yield (
        "barrier",
        [
            Candidate(
                "dissemination",
                cost.dissemination_barrier_cost(n),
                lambda rank: dissemination_barrier(rank, n),
            )
        ],
    )


def report() -> str:
    """The default table, which `python -m conformance bench --simulate` prints."""
    return table(scaling_rows())


def table(rows: Sequence[ScalingRow]) -> str:
    """The rows as text: `*` marks what the authenticated mode uses, `g` what C++ Gloo uses."""
    header = ("operation", "ranks", "bytes", "algorithm", "rounds", "messages", "sent", "time")
    lines = [header]
    for row in rows:
        marks = ("*" if row.is_chosen else "") + ("g" if row.is_gloo else "")
        lines.append(
            (
                row.operation,
                str(row.world_size),
                _bytes(row.nbytes),
                f"{row.algorithm} {marks}".rstrip(),
                str(row.rounds),
                str(row.messages),
                _bytes(row.sent_nbytes),
                _seconds(row.predicted_s),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    left_aligned = {0, 3}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left_aligned else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
