"""Direct algorithms (one round) for all-to-all, gather, scatter, all-gather and reduce-scatter.

One round, N-1 messages a rank: the fewest bytes and the least delay while N is small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from impl.schedules.arithmetic import starts_of
from impl.schedules.steps import (
    NOTHING,
    Copy,
    Fold,
    Receive,
    Region,
    Schedule,
    Send,
    Step,
    input_,
    output,
    schedule,
    scratch,
)


def pairwise_all_to_all(
    rank: int, world_size: int, output_nbytes: Sequence[int], input_nbytes: Sequence[int]
) -> Schedule:
    """Part d of INPUT goes to rank d, part s of OUTPUT comes from rank s (Gloo's alltoall(v)).

    Cost: one round of N-1 messages. Everything is started at once; in turn i a rank serves the
    rank i above it and is served by the rank i below it, so that no two ranks begin with the same
    partner. Empty parts are sent too.

        N=3     rank 0: to 1 from 2, to 2 from 1     rank 1: to 2 from 0, to 0 from 2     ...
    """
    into, out_of = starts_of(output_nbytes), starts_of(input_nbytes)

    def steps() -> Iterator[Step]:
        yield Copy(
            output(into[rank], output_nbytes[rank]), input_(out_of[rank], input_nbytes[rank])
        )
        for turn in range(1, world_size):
            to, source = (rank + turn) % world_size, (rank - turn) % world_size
            yield Receive(source, output(into[source], output_nbytes[source]))
            yield Send(to, input_(out_of[to], input_nbytes[to]))

    return schedule(steps)


def direct_gather(rank: int, world_size: int, root: int, block_nbytes: Sequence[int]) -> Schedule:
    """Every rank's INPUT ends in the root's OUTPUT, block r from rank r (Gloo's gather(v)).

    Cost: one message for every rank but the root, which receives N-1. Empty blocks are sent too.

        N=3, root 1     0 -> 1, 2 -> 1
    """

    def steps() -> Iterator[Step]:
        own = input_(0, block_nbytes[rank])
        if rank != root:
            yield Send(root, own)
            return
        starts = starts_of(block_nbytes)
        for source in range(world_size):
            if source != root:
                yield Receive(source, output(starts[source], block_nbytes[source]))
        yield Copy(output(starts[root], block_nbytes[root]), own)

    return schedule(steps)


def direct_scatter(rank: int, world_size: int, root: int, block_nbytes: int) -> Schedule:
    """Block r of the root's INPUT ends in rank r's OUTPUT (Gloo's).

    Cost: the root sends N-1 messages. Empty blocks are sent too.

        N=3, root 1     1 -> 0, 1 -> 2
    """

    def steps() -> Iterator[Step]:
        own = output(0, block_nbytes)
        if rank != root:
            yield Receive(root, own)
            return
        for to in range(world_size):
            if to != root:
                yield Send(to, input_(to * block_nbytes, block_nbytes))
        yield Copy(own, input_(root * block_nbytes, block_nbytes))

    return schedule(steps)


def direct_all_gather(rank: int, world_size: int, block_nbytes: Sequence[int]) -> Schedule:
    """Every rank's INPUT ends in every OUTPUT, block r from rank r; each rank tells all others.

    Cost: one round of N-1 messages; as many bytes as a ring moves.

        N=3     rank 0: to 1, to 2     rank 1: to 2, to 0     rank 2: to 0, to 1
    """
    if sum(block_nbytes) == 0:
        return NOTHING
    starts = starts_of(block_nbytes)

    def steps() -> Iterator[Step]:
        own = input_(0, block_nbytes[rank])
        for turn in range(1, world_size):
            source = (rank - turn) % world_size
            yield Receive(source, output(starts[source], block_nbytes[source]))
            yield Send((rank + turn) % world_size, own)
        yield Copy(output(starts[rank], block_nbytes[rank]), own)

    return schedule(steps)


def direct_reduce_scatter(rank: int, world_size: int, chunk_nbytes: int) -> Schedule:
    """Reduce INPUT (`world_size` chunks) so that rank r's OUTPUT is chunk r; INPUT stays as it is.

    Cost: one round of N-1 messages; as many bytes as a ring moves, and scratch for N-1 chunks.
    The sum is taken in the order of ranks, (x0 + x1) + x2 ..., whatever arrives first.

        N=3     rank 0 receives chunk 0 of ranks 2 and 1, and computes (x0 + x1) + x2
    """
    if chunk_nbytes == 0:
        return NOTHING

    def contribution(source: int) -> Region:
        if source == rank:
            return input_(rank * chunk_nbytes, chunk_nbytes)
        if source == 0:
            return output(0, chunk_nbytes)  # the result may replace the first operand
        return scratch((source - 1) * chunk_nbytes, chunk_nbytes)

    def steps() -> Iterator[Step]:
        for turn in range(1, world_size):
            to, source = (rank + turn) % world_size, (rank - turn) % world_size
            yield Receive(source, contribution(source))
            yield Send(to, input_(to * chunk_nbytes, chunk_nbytes))
        yield Fold(output(0, chunk_nbytes), tuple(map(contribution, range(world_size))))

    return schedule(steps, (world_size - 1) * chunk_nbytes)
