"""All-reduce on a mixed-radix hypercube (bcube; recursive doubling is a special case).

[Note: groups of a cube]
The world size is written as a product of factors f0 x f1 x ... and every rank as a number with
one digit for each factor, the digit of f0 counting single ranks, that of f1 counting f0 ranks,
and so on. In round i a rank meets the f_i - 1 ranks that differ from it in digit i only. With
factors of 2 this is recursive doubling; with the single factor N it is a direct exchange with
all ranks.

    N=6 = 3 x 2     rank 4 = digits (1, 1)     round 0: meets 3 and 5     round 1: meets 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from impl.schedules.arithmetic import ceil_div
from impl.schedules.steps import (
    NOTHING,
    Accumulate,
    Copy,
    Fold,
    Receive,
    Region,
    Schedule,
    Send,
    Step,
    output,
    schedule,
    scratch,
)


@dataclass(frozen=True, slots=True)
class CubeGroup:
    """The ranks that meet in one round, lowest first, and the place of the observer among them."""

    members: tuple[int, ...]
    place: int


def cube_groups(rank: int, factors: Sequence[int]) -> list[CubeGroup]:
    """The groups of `rank`, one per round."""
    groups = []
    distance = 1
    for factor in factors:
        place = rank // distance % factor
        first = rank - place * distance
        groups.append(CubeGroup(tuple(range(first, first + factor * distance, distance)), place))
        distance *= factor
    return groups


def exchange_all_reduce(
    rank: int, world_size: int, factors: Sequence[int], total_nbytes: int
) -> Schedule:
    """All-reduce a small tensor: in each round the members of a group swap all they know.

    Cost: one round a factor; a rank sends the whole tensor sum(f - 1) times and combines as
    often. Every member of a group computes the same expression, (g0 + g1) + g2 ... in the order
    of ranks, so all end with the same bits, whatever the operation does with NaNs or signed
    zeros.

    The factors may multiply to less than the world size. Then the first ranks pair up: the odd
    one hands its tensor to the even one, sits out, and is told the result; two more rounds.

        N=5, factors (2, 2): 0+1, others alone     then the cube 01 2 3 4: (01+2) (3+4),
        (01+2)+(3+4)
    """
    cube_size = 1
    for factor in factors:
        cube_size *= factor
    folded = world_size - cube_size  # pairs (0, 1), (2, 3) ...: the odd rank of each sits out
    assert 0 <= folded <= cube_size, "a rank can stand in for one other"
    if world_size == 1 or total_nbytes == 0:
        return NOTHING
    everything = output(0, total_nbytes)
    slots = max([f - 1 for f in factors], default=0)

    def rank_in_world(place: int) -> int:
        return 2 * place if place < folded else place + folded

    def exchange(group: CubeGroup, half: int) -> Iterator[Step]:
        # Rounds alternate between two sets of slots: a partner may already send for the next round.
        slot = iter(range(half * slots, (half + 1) * slots))
        operand: list[Region] = []
        for place, member in enumerate(group.members):
            if place == group.place:
                operand.append(everything)
                continue
            operand.append(scratch(next(slot) * total_nbytes, total_nbytes))
            yield Receive(rank_in_world(member), operand[-1])
        for place, member in enumerate(group.members):
            if place != group.place:
                yield Send(rank_in_world(member), everything)
        yield Fold(operand[0], tuple(operand))
        if operand[0] is not everything:
            yield Copy(everything, operand[0])

    def steps() -> Iterator[Step]:
        place = rank // 2 if rank < 2 * folded else rank - folded
        if rank < 2 * folded:
            if rank % 2 == 1:
                yield Send(rank - 1, everything)
                yield Receive(rank - 1, everything)
                return
            yield Receive(rank + 1, scratch(0, total_nbytes))
            yield Accumulate(everything, scratch(0, total_nbytes))
        for turn, group in enumerate(cube_groups(place, factors)):
            yield from exchange(group, (turn + 1) & 1)
        if rank < 2 * folded:
            yield Send(rank + 1, everything)

    return schedule(steps, max(2 * slots, 1) * total_nbytes)


@dataclass(frozen=True, slots=True)
class _Halving:
    """One reducing round: the group shares out `piece`, and each member reduces one chunk of it."""

    group: CubeGroup
    chunks: tuple[Region, ...]  # one per member; short or empty towards the end


def _halvings(rank: int, factors: Sequence[int], numel: int, itemsize: int) -> list[_Halving]:
    rounds = []
    start, length = 0, numel
    for group in cube_groups(rank, factors):
        share = ceil_div(length, len(group.members))
        chunks = []
        for place in range(len(group.members)):
            lower, upper = min(place * share, length), min((place + 1) * share, length)
            chunks.append(output((start + lower) * itemsize, (upper - lower) * itemsize))
        rounds.append(_Halving(group, tuple(chunks)))
        mine = chunks[group.place]
        start, length = mine.start // itemsize, mine.nbytes // itemsize
    return rounds


def bcube_all_reduce(
    rank: int, world_size: int, factors: Sequence[int], total_nbytes: int, itemsize: int
) -> Schedule:
    """All-reduce a tensor of medium size: share it out round by round, then put it together again.

    Cost: two rounds a factor; a rank sends 2(N-1)/N of the tensor, as in a ring, but in 2 sum(f -
    1) messages. Afterwards all ranks hold the same bits: each chunk is reduced in one place and
    then copied. A member of a group adds the others' chunks, lowest rank first, to its own. With
    the single factor N this is a direct reduce-scatter and all-gather; with factors of 2,
    recursive halving and doubling.

        N=4 = 2 x 2, quarters a b c d        reducing                   gathering
        rank 0:                              sends cd to 1, b to 2      a to 2, ab to 1
        rank 3:                              sends ab to 2, c to 1      d to 1, cd to 2
    """
    if world_size == 1 or total_nbytes == 0:
        return NOTHING
    rounds = _halvings(rank, factors, total_nbytes // itemsize, itemsize)
    scratch_nbytes = sum(len(r.chunks) * r.chunks[r.group.place].nbytes for r in rounds)

    def others(halving: _Halving) -> Iterator[tuple[int, Region]]:
        for place, member in enumerate(halving.group.members):
            if place != halving.group.place:
                yield member, halving.chunks[place]

    def steps() -> Iterator[Step]:
        free = 0
        for halving in rounds:
            mine = halving.chunks[halving.group.place]
            arrived = []
            for member, _ in others(halving):
                arrived.append(scratch(free, mine.nbytes))
                free += mine.nbytes
                if mine.nbytes:
                    yield Receive(member, arrived[-1])
            for member, chunk in others(halving):
                if chunk.nbytes:
                    yield Send(member, chunk)
            if mine.nbytes:
                yield Fold(mine, (mine, *arrived))
        for halving in reversed(rounds):
            mine = halving.chunks[halving.group.place]
            for member, chunk in others(halving):
                if chunk.nbytes:
                    yield Receive(member, chunk)
            for member, _ in others(halving):
                if mine.nbytes:
                    yield Send(member, mine)

    return schedule(steps, scratch_nbytes)
