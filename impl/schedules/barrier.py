"""Dissemination barrier: rounds of empty messages over doubling distances."""

from __future__ import annotations

from collections.abc import Iterator

from impl.schedules.steps import Fence, Receive, Schedule, Send, Step, schedule, scratch


def dissemination_barrier(rank: int, world_size: int) -> Schedule:
    """Empty messages over doubling distances (Hensgen, Finkel and Manber 1988; Gloo's).

    Cost: ceil(log2 N) rounds of one empty message. After the round of distance d a rank has heard,
    directly or through others, from the 2d - 1 ranks below it, so after the last one from all.

        N=5     round 0: r -> r+1     round 1: r -> r+2     round 2: r -> r+4
    """
    nothing = scratch(0, 0)

    def steps() -> Iterator[Step]:
        distance = 1
        while distance < world_size:
            yield Receive((rank - distance) % world_size, nothing)
            yield Send((rank + distance) % world_size, nothing)
            yield Fence()
            distance *= 2

    return schedule(steps)
