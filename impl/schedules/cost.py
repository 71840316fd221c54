"""Cost model of each collective algorithm: predicted messages, bytes and time by world size.

Every formula is for the busiest rank. Tests compare the formulas with the schedules themselves
for all worlds from 1 to 32; the scaling report (`python -m impl.testing`) and the choice between
algorithms (`choice.py`) rest on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from impl.schedules.arithmetic import ceil_div, log2_ceil, round_up
from impl.schedules.ring import SEGMENT_NBYTES_MAX, all_reduce_geometry, reduce_geometry


@dataclass(frozen=True, slots=True)
class Cost:
    """`rounds`: messages that must follow one another. The rest is what the busiest rank does."""

    rounds: int
    messages: int
    sent_nbytes: int
    combined_nbytes: int = 0


FREE = Cost(0, 0, 0)


@dataclass(frozen=True, slots=True)
class NetworkCost:
    """A latency-bandwidth model with a price for each message (Culler's LogP, less the gap).

    The defaults are what two ranks on a loopback device saw on a machine of 2020 with this code.
    """

    latency_s: float = 25e-6
    message_s: float = 10e-6
    bytes_per_s: float = 2e9
    combined_bytes_per_s: float = 6e9


def predicted_s(cost: Cost, network: NetworkCost) -> float:
    """Rounds follow one another; a rank's messages, bytes and sums are handled by one thread."""
    return (
        cost.rounds * network.latency_s
        + cost.messages * network.message_s
        + cost.sent_nbytes / network.bytes_per_s
        + cost.combined_nbytes / network.combined_bytes_per_s
    )


def ring_all_reduce_cost(world_size: int, total_nbytes: int, itemsize: int) -> Cost:
    if world_size == 1 or total_nbytes == 0:
        return FREE
    shape = all_reduce_geometry(total_nbytes, itemsize, world_size)
    # Each phase leaves out one chunk, rank r its own and then the one below. The busiest rank is
    # the last one: the last chunks are the ones that may be short or empty.
    left_out = [shape.chunk(world_size - 1).nbytes, shape.chunk(world_size - 2).nbytes]
    segments = sum(ceil_div(total_nbytes - n, shape.segment_nbytes) for n in left_out)
    return Cost(
        rounds=2 * (world_size - 1),
        messages=segments,
        sent_nbytes=2 * total_nbytes - sum(left_out),
        combined_nbytes=total_nbytes - left_out[0],
    )


def ring_reduce_cost(world_size: int, total_nbytes: int, itemsize: int) -> Cost:
    """An upper bound: the surplus messages of `ring_reduce` depend on the rank."""
    if world_size == 1 or total_nbytes == 0:
        return FREE
    shape = reduce_geometry(total_nbytes, itemsize, world_size)
    filled = ceil_div(total_nbytes, shape.segment_nbytes)
    issued = min(filled, shape.segment_count - 2)
    passed_on = min(total_nbytes, issued * shape.segment_nbytes)
    return Cost(world_size, issued + 1, passed_on + shape.chunk(0).nbytes, passed_on)


def ring_reduce_scatter_cost(world_size: int, chunk_nbytes: int, itemsize: int) -> Cost:
    if world_size == 1 or chunk_nbytes == 0:
        return FREE
    hops = world_size - 1
    pieces = _piece_count(chunk_nbytes, itemsize)
    return Cost(hops, hops * pieces, hops * chunk_nbytes, hops * chunk_nbytes)


def ring_all_gather_cost(world_size: int, block_nbytes: int) -> Cost:
    if world_size == 1 or block_nbytes == 0:
        return FREE
    hops = world_size - 1
    return Cost(hops, 2 * hops, hops * block_nbytes)


def ring_all_gather_v_cost(block_nbytes: Sequence[int]) -> Cost:
    if len(block_nbytes) == 1 or sum(block_nbytes) == 0:
        return FREE
    hops = len(block_nbytes) - 1
    return Cost(hops, hops, sum(block_nbytes) - min(block_nbytes))


def chain_broadcast_cost(world_size: int, total_nbytes: int) -> Cost:
    if world_size == 1 or total_nbytes == 0:
        return FREE
    pieces = _piece_count(total_nbytes, 1)
    # The last rank starts N-2 segments after the second one.
    return Cost(world_size - 1, pieces, total_nbytes)


def binomial_broadcast_cost(world_size: int, total_nbytes: int) -> Cost:
    rounds = log2_ceil(world_size)
    return Cost(rounds, rounds, rounds * total_nbytes)


def binomial_reduce_cost(world_size: int, total_nbytes: int) -> Cost:
    """Seen from the root, for which a whole tensor arrives in each round."""
    if world_size == 1 or total_nbytes == 0:
        return FREE
    rounds = log2_ceil(world_size)
    return Cost(rounds, rounds, rounds * total_nbytes, rounds * total_nbytes)


def bruck_all_gather_cost(world_size: int, block_nbytes: int) -> Cost:
    if world_size == 1 or block_nbytes == 0:
        return FREE
    rounds = log2_ceil(world_size)
    return Cost(rounds, rounds, (world_size - 1) * block_nbytes)


def pairwise_all_to_all_cost(input_nbytes: Sequence[int]) -> Cost:
    """For the largest input of any rank, less what it keeps."""
    peers = len(input_nbytes) - 1
    return Cost(min(peers, 1), peers, sum(input_nbytes) - min(input_nbytes) if peers else 0)


def direct_gather_cost(block_nbytes: Sequence[int]) -> Cost:
    """Seen from the root, where the messages meet: what it receives counts as sent."""
    peers = len(block_nbytes) - 1
    return Cost(min(peers, 1), peers, sum(block_nbytes) - min(block_nbytes) if peers else 0)


def direct_scatter_cost(world_size: int, block_nbytes: int) -> Cost:
    peers = world_size - 1
    return Cost(min(peers, 1), peers, peers * block_nbytes)


def direct_all_gather_cost(block_nbytes: Sequence[int]) -> Cost:
    peers = len(block_nbytes) - 1
    if peers == 0 or sum(block_nbytes) == 0:
        return FREE
    return Cost(1, peers, peers * max(block_nbytes))


def direct_reduce_scatter_cost(world_size: int, chunk_nbytes: int) -> Cost:
    peers = world_size - 1
    if peers == 0 or chunk_nbytes == 0:
        return FREE
    return Cost(1, peers, peers * chunk_nbytes, peers * chunk_nbytes)


def exchange_all_reduce_cost(world_size: int, factors: Sequence[int], total_nbytes: int) -> Cost:
    if world_size == 1 or total_nbytes == 0:
        return FREE
    folds = 1 if prod(factors) < world_size else 0
    peers = sum(f - 1 for f in factors)
    return Cost(
        rounds=len(factors) + 2 * folds,
        messages=peers + folds,
        sent_nbytes=(peers + folds) * total_nbytes,
        combined_nbytes=(peers + folds) * total_nbytes,
    )


def bcube_all_reduce_cost(
    world_size: int, factors: Sequence[int], total_nbytes: int, itemsize: int
) -> Cost:
    """For tensors that divide evenly; otherwise a little less is sent by some ranks."""
    if world_size == 1 or total_nbytes == 0:
        return FREE
    piece, sent, combined = total_nbytes, 0, 0
    for factor in factors:
        share = min(piece, round_up(ceil_div(piece, factor), itemsize))
        sent += (piece - share) + (factor - 1) * share
        combined += (factor - 1) * share
        piece = share
    return Cost(2 * len(factors), 2 * sum(f - 1 for f in factors), sent, combined)


def dissemination_barrier_cost(world_size: int) -> Cost:
    rounds = log2_ceil(world_size)
    return Cost(rounds, rounds, 0)


def _piece_count(nbytes: int, itemsize: int) -> int:
    largest = itemsize * max(1, SEGMENT_NBYTES_MAX // itemsize)
    return ceil_div(nbytes, min(largest, round_up(ceil_div(nbytes, 2), itemsize)))
