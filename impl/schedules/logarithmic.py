"""Schedules of log2 N rounds: binomial broadcast and reduce, and Bruck's all_gather.

They are best while latency outweighs bandwidth.

[Note: virtual ranks]
Trees are described for root 0. Other roots shift all ranks: virtual rank = (rank - root) modulo N.
"""

from __future__ import annotations

from collections.abc import Iterator

from impl.schedules.arithmetic import log2_ceil
from impl.schedules.steps import (
    NOTHING,
    Accumulate,
    Copy,
    Receive,
    Schedule,
    Send,
    Step,
    input_,
    output,
    schedule,
    scratch,
)


def binomial_broadcast(rank: int, world_size: int, root: int, total_nbytes: int) -> Schedule:
    """The root's OUTPUT reaches every rank's OUTPUT (Gloo's).

    Cost: ceil(log2 N) rounds; the root sends that many times, a rank at the bottom never. An
    empty tensor is sent like any other. In round i the virtual ranks below 2^i send to the rank
    2^i above them.

        N=5, root 0     round 0: 0->1     round 1: 0->2 1->3     round 2: 0->4
    """

    def steps() -> Iterator[Step]:
        virtual = (rank - root) % world_size
        everything = output(0, total_nbytes)
        for i in range(log2_ceil(world_size)):
            distance = 1 << i
            if virtual < distance:
                if virtual + distance < world_size:
                    yield Send((rank + distance) % world_size, everything)
            elif virtual < 2 * distance:
                yield Receive((rank - distance) % world_size, everything)

    return schedule(steps)


def binomial_reduce(rank: int, world_size: int, root: int, total_nbytes: int) -> Schedule:
    """The combination of all OUTPUTs ends in the root's; the others' are used up as working memory.

    Cost: ceil(log2 N) rounds; each rank but the root sends the tensor once, and the root combines
    once a round. The broadcast's tree upside down: in round i a virtual rank that is an odd
    multiple of 2^i sends to the rank 2^i below it, which adds it to its own as the second
    operand.

        N=5, root 0     round 0: 1->0 3->2     round 1: 2->0     round 2: 4->0
        result          ((x0 + x1) + (x2 + x3)) + x4
    """
    if world_size == 1 or total_nbytes == 0:
        return NOTHING

    def steps() -> Iterator[Step]:
        virtual = (rank - root) % world_size
        everything = output(0, total_nbytes)
        for i in range(log2_ceil(world_size)):
            distance = 1 << i
            if virtual & distance:
                yield Send((rank - distance) % world_size, everything)
                return
            if virtual + distance < world_size:
                arrived = scratch((i & 1) * total_nbytes, total_nbytes)
                yield Receive((rank + distance) % world_size, arrived)
                yield Accumulate(everything, arrived)

    return schedule(steps, 2 * total_nbytes)


def bruck_all_gather(rank: int, world_size: int, block_nbytes: int) -> Schedule:
    """Every rank ends with every rank's INPUT, in ceil(log2 N) rounds instead of the ring's N-1.

    Cost: ceil(log2 N) messages; a rank sends N-1 blocks, as in the ring, but pays for it with
    scratch of N blocks and a copy of the result. Block k of the scratch space is that of rank r +
    k: a rank that has the first 2^i of them can double their number by one message. Two copies then
    turn them into place.

        N=5, rank 0     start: 0     from 1: 1     from 2: 2 3     from 4: 4
    """
    if block_nbytes == 0:
        return NOTHING

    def steps() -> Iterator[Step]:
        yield Copy(scratch(0, block_nbytes), input_(0, block_nbytes))
        have = 1
        while have < world_size:
            count = min(have, world_size - have)
            arriving = scratch(have * block_nbytes, count * block_nbytes)
            yield Receive((rank + have) % world_size, arriving)
            yield Send((rank - have) % world_size, scratch(0, count * block_nbytes))
            have += count
        turned = (world_size - rank) * block_nbytes  # the blocks of ranks r to N-1
        rest = rank * block_nbytes
        yield Copy(output(rest, turned), scratch(0, turned))
        if rest:
            yield Copy(output(0, rest), scratch(turned, rest))

    return schedule(steps, world_size * block_nbytes)
