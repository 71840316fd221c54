"""Ring algorithms for all-reduce, reduce, reduce-scatter, all-gather, and a chain broadcast.

[Note: the geometry of Gloo's rings]
`ring_all_reduce` and `ring_reduce` are Gloo's, segment for segment (gloo/allreduce.cc and
gloo/reduce.cc, 2026), because ranks that run C++ Gloo may sit in the same ring and because the
order of summation follows from it. The tensor is cut into one *chunk* a rank and each chunk into
at least two *segments* of at most 1 MiB, so that one segment can travel while another is being
reduced. Chunks towards the end of a short tensor are shorter or empty; empty segments are not
sent.

Data move downwards: rank r receives from r + 1 and sends to r - 1, modulo the world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from impl.schedules.arithmetic import ceil_div, round_up, starts_of
from impl.schedules.steps import (
    NOTHING,
    Accumulate,
    Copy,
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

SEGMENT_NBYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class RingGeometry:
    """How a tensor is cut: `world_size` chunks of `segments_per_rank` segments."""

    total_nbytes: int
    world_size: int
    segment_nbytes: int
    segments_per_rank: int

    @property
    def segment_count(self) -> int:
        return self.segments_per_rank * self.world_size

    @property
    def chunk_nbytes(self) -> int:
        return self.segments_per_rank * self.segment_nbytes

    def segment(self, index: int) -> Region:
        """Segment `index`, modulo their number, cut off at the end of the tensor."""
        start = (index % self.segment_count) * self.segment_nbytes
        return output(start, max(0, min(self.segment_nbytes, self.total_nbytes - start)))

    def chunk(self, rank: int) -> Region:
        """What ends up complete on `rank` after the reducing phase."""
        start = rank * self.chunk_nbytes
        return output(start, max(0, min(self.chunk_nbytes, self.total_nbytes - start)))


def all_reduce_geometry(
    total_nbytes: int, itemsize: int, world_size: int, segment_nbytes_max: int = SEGMENT_NBYTES_MAX
) -> RingGeometry:
    largest = itemsize * max(1, segment_nbytes_max // itemsize)
    count = round_up(max(ceil_div(total_nbytes, largest), 2 * world_size), world_size)
    segment_nbytes = round_up(ceil_div(total_nbytes, count), itemsize)
    return RingGeometry(total_nbytes, world_size, segment_nbytes, count // world_size)


def reduce_geometry(
    total_nbytes: int, itemsize: int, world_size: int, segment_nbytes_max: int = SEGMENT_NBYTES_MAX
) -> RingGeometry:
    """Gloo bounds the segment first and counts afterwards; all_reduce does it the other way."""
    largest = itemsize * max(1, segment_nbytes_max // itemsize)
    wanted = min(ceil_div(total_nbytes, 2 * world_size), largest)
    segment_nbytes = round_up(wanted, itemsize)
    count = round_up(max(ceil_div(total_nbytes, segment_nbytes), 2 * world_size), world_size)
    return RingGeometry(total_nbytes, world_size, segment_nbytes, count // world_size)


def _reducing_phase(rank: int, shape: RingGeometry, issued: int) -> Iterator[Step]:
    """Pass `issued` segments around the ring and add the local contribution to each.

    Iteration i reduces what arrived two iterations ago and starts the next transfers: the two
    halves of the scratch space take turns. The local value is the first operand of the reduction.
    """
    n, per_rank = shape.world_size, shape.segments_per_rank
    above, below = (rank + 1) % n, (rank - 1) % n

    def incoming(i: int) -> Region:
        return shape.segment((rank + 2) * per_rank + i)

    def staged(i: int) -> Region:
        return scratch((i & 1) * shape.segment_nbytes, incoming(i).nbytes)

    for i in range(issued + 2):
        if i >= 2 and incoming(i - 2).nbytes:
            yield Accumulate(into=incoming(i - 2), other=staged(i - 2))
        if i < issued:
            outgoing = shape.segment((rank + 1) * per_rank + i)
            if incoming(i).nbytes:
                yield Receive(above, staged(i))
            if outgoing.nbytes:
                yield Send(below, outgoing)


def ring_all_reduce(
    rank: int,
    world_size: int,
    total_nbytes: int,
    itemsize: int,
    segment_nbytes_max: int = SEGMENT_NBYTES_MAX,
) -> Schedule:
    """All-reduce in place: reduce around the ring, then copy around the ring (Gloo's).

    Cost: 2(N-1) hops; a rank sends 2(N-1)/N of the tensor in 2(N-1) chunks of two or more
    segments. Afterwards every OUTPUT holds the same bits: each chunk is reduced once and then
    only copied. Chunk c is x[c] + (x[c+1] + ... (x[c-2] + x[c-1])): the sum starts at rank c - 1,
    moves downwards, and each rank's own value is the first operand.

        N=3, chunk sent at hop 0, 1 | 2, 3          chunk complete on its rank after hop 1
        rank 0:   1, 2 | 0, 1
        rank 1:   2, 0 | 1, 2
        rank 2:   0, 1 | 2, 0
    """
    if world_size == 1 or total_nbytes == 0:
        return NOTHING
    shape = all_reduce_geometry(total_nbytes, itemsize, world_size, segment_nbytes_max)
    per_rank = shape.segments_per_rank
    issued = shape.segment_count - per_rank

    def steps() -> Iterator[Step]:
        yield from _reducing_phase(rank, shape, issued)
        for i in range(issued):
            incoming = shape.segment((rank + 1) * per_rank + i)
            outgoing = shape.segment(rank * per_rank + i)
            if incoming.nbytes:
                yield Receive((rank + 1) % world_size, incoming)
            if outgoing.nbytes:
                yield Send((rank - 1) % world_size, outgoing)

    return schedule(steps, 2 * shape.segment_nbytes)


def ring_reduce(
    rank: int,
    world_size: int,
    root: int,
    total_nbytes: int,
    itemsize: int,
    segment_nbytes_max: int = SEGMENT_NBYTES_MAX,
) -> Schedule:
    """Reduce around the ring, then every rank hands its chunk to the root (Gloo's).

    Cost: N hops; a rank sends the whole tensor about once. Works in place, so a rank other than the
    root must bind OUTPUT to a copy. Afterwards only the root's OUTPUT is the result.

    Gloo passes `segment_count - 2` segments on where `segment_count - segments_per_rank` would
    do. With more than two segments a rank (tensors above N x 2 MiB) the surplus makes rank r add
    to its copy of chunk r + 1 a second time, which does no harm: the owner of that chunk is rank
    r + 1, and the root's copy is overwritten at the end. Peers expect these messages, so they are
    sent.

        N=2, 3 segments a chunk (rank 0 owns 0 1 2, rank 1 owns 3 4 5), 4 issued:
        rank 0 sends 3 4 5 0 and adds what it receives to 0 1 2 and once more to 3
    """
    if world_size == 1 or total_nbytes == 0:
        return NOTHING
    shape = reduce_geometry(total_nbytes, itemsize, world_size, segment_nbytes_max)

    def steps() -> Iterator[Step]:
        yield from _reducing_phase(rank, shape, shape.segment_count - 2)
        if rank != root:
            if shape.chunk(rank).nbytes:
                yield Send(root, shape.chunk(rank))
            return
        for source in range(world_size):
            if source != root and shape.chunk(source).nbytes:
                yield Receive(source, shape.chunk(source))

    return schedule(steps, 2 * shape.segment_nbytes)


def ring_reduce_scatter(
    rank: int,
    world_size: int,
    chunk_nbytes: int,
    itemsize: int,
    segment_nbytes_max: int = SEGMENT_NBYTES_MAX,
) -> Schedule:
    """Reduce INPUT (`world_size` chunks) so that rank r's OUTPUT is chunk r; INPUT stays as it is.

    Cost: N-1 hops; a rank sends (N-1)/N of its input. A chunk travels downwards and collects
    x[c-1], x[c-2], ... x[c]; what has arrived is the first operand, since it lies in memory of
    our own. Scratch: two chunks. A sum must not be received where the previous one is still being
    sent from: with a single chunk every rank would wait for the rank below it, all around the
    ring.

        N=3, chunk sent at hop 0, 1          what is sent at hop 1
        rank 0:   1, 2                       chunk 2 of ranks 1 and 0
        rank 1:   2, 0                       chunk 0 of ranks 2 and 1
        rank 2:   0, 1                       chunk 1 of ranks 0 and 2
    """
    if chunk_nbytes == 0:
        return NOTHING
    if world_size == 1:
        return Schedule((Copy(output(0, chunk_nbytes), input_(0, chunk_nbytes)),))
    above, below = (rank + 1) % world_size, (rank - 1) % world_size
    pieces = _pieces(chunk_nbytes, itemsize, segment_nbytes_max)
    hops = world_size - 1
    lag = min(2, len(pieces))  # transfers that are started before the first one is waited for

    def sum_of(hop: int, start: int, nbytes: int) -> Region:
        """Where the sum that arrives in this hop is kept."""
        if hop == hops - 1:
            return output(start, nbytes)
        return scratch((hop & 1) * chunk_nbytes + start, nbytes)

    def steps() -> Iterator[Step]:
        work = [(hop, start, nbytes) for hop in range(hops) for start, nbytes in pieces]
        for i in range(len(work) + lag):
            if i >= lag:
                hop, start, nbytes = work[i - lag]
                owner = (rank + 2 + hop) % world_size
                yield Accumulate(
                    into=sum_of(hop, start, nbytes),
                    other=input_(owner * chunk_nbytes + start, nbytes),
                )
            if i < len(work):
                hop, start, nbytes = work[i]
                yield Receive(above, sum_of(hop, start, nbytes))
                if hop == 0:
                    yield Send(below, input_(above * chunk_nbytes + start, nbytes))
                else:
                    yield Send(below, sum_of(hop - 1, start, nbytes))

    return schedule(steps, 2 * chunk_nbytes if hops > 1 else 0)


def ring_all_gather(rank: int, world_size: int, block_nbytes: int) -> Schedule:
    """Every rank ends with every rank's INPUT, in OUTPUT at rank x `block_nbytes` (Gloo's).

    Cost: N-1 hops; a rank sends N-1 blocks, each in two halves (the first rounds down, so a block
    of one byte sends an empty first half). Data move upwards: rank r sends to r + 1.

        N=3, block sent at hop 0, 1
        rank 0:   0, 2
        rank 1:   1, 0
        rank 2:   2, 1
    """
    if block_nbytes == 0:
        return NOTHING
    half = block_nbytes // 2
    halves = ((0, half), (half, block_nbytes - half))

    def steps() -> Iterator[Step]:
        yield Copy(output(rank * block_nbytes, block_nbytes), input_(0, block_nbytes))
        for hop in range(world_size - 1):
            for start, nbytes in halves:
                sent, received = (rank - hop) % world_size, (rank - hop - 1) % world_size
                yield Receive(
                    (rank - 1) % world_size, output(received * block_nbytes + start, nbytes)
                )
                yield Send((rank + 1) % world_size, output(sent * block_nbytes + start, nbytes))

    return schedule(steps)


def ring_all_gather_v(rank: int, world_size: int, block_nbytes: Sequence[int]) -> Schedule:
    """As `ring_all_gather`, for blocks of any size: they travel whole, empty ones too (Gloo's).

    Cost: N-1 hops and messages; a rank sends all blocks but that of the rank above it.
    """
    starts = starts_of(block_nbytes)
    if starts[-1] == 0:
        return NOTHING

    def block(index: int) -> Region:
        return output(starts[index % world_size], block_nbytes[index % world_size])

    def steps() -> Iterator[Step]:
        yield Copy(block(rank), input_(0, block_nbytes[rank]))
        for hop in range(world_size - 1):
            yield Receive((rank - 1) % world_size, block(rank - hop - 1))
            yield Send((rank + 1) % world_size, block(rank - hop))

    return schedule(steps)


def chain_broadcast(
    rank: int,
    world_size: int,
    root: int,
    total_nbytes: int,
    segment_nbytes_max: int = SEGMENT_NBYTES_MAX,
) -> Schedule:
    """Broadcast along the ranks root, root + 1, ...: a ring that is cut open before the root.

    Cost: N-1 hops for the first segment and one more for each further one; a rank sends the
    tensor once, where a tree's root sends it log2 N times. Worth it for tensors of many segments.

        N=3, root 1, segments a b c          1 -> 2: a b c      2 -> 0: (a) a b c, one step later
    """
    place = (rank - root) % world_size
    previous, following = (rank - 1) % world_size, (rank + 1) % world_size
    pieces = _pieces(total_nbytes, 1, segment_nbytes_max)

    def steps() -> Iterator[Step]:
        if place > 0:
            for start, nbytes in pieces:
                yield Receive(previous, output(start, nbytes))
        if place < world_size - 1:
            for start, nbytes in pieces:
                yield Send(following, output(start, nbytes))

    return schedule(steps)


def _pieces(nbytes: int, itemsize: int, nbytes_max: int) -> list[tuple[int, int]]:
    """(start, size) of the pieces: two or more, if there are two elements to share out."""
    largest = itemsize * max(1, nbytes_max // itemsize)
    size = min(largest, round_up(ceil_div(nbytes, 2), itemsize))
    return (
        [(start, min(size, nbytes - start)) for start in range(0, nbytes, size)] if nbytes else []
    )
