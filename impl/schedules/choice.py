"""Choice of the fastest algorithm of each collective, by tensor size and world size.

The answer depends on nothing but the arguments, so all ranks come to the same one without
talking. It is the algorithm whose predicted time (`cost.py`) is the smallest. The schedules that
Gloo defines are not chosen here: a group with C++ ranks in it has to follow Gloo to the letter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from impl.schedules import cost
from impl.schedules.arithmetic import factors_of
from impl.schedules.bcube import bcube_all_reduce, exchange_all_reduce
from impl.schedules.cost import Cost, NetworkCost, predicted_s
from impl.schedules.logarithmic import binomial_broadcast, binomial_reduce, bruck_all_gather
from impl.schedules.pairwise import direct_all_gather, direct_reduce_scatter
from impl.schedules.ring import (
    chain_broadcast,
    ring_all_gather,
    ring_all_gather_v,
    ring_all_reduce,
    ring_reduce,
    ring_reduce_scatter,
)
from impl.schedules.steps import Schedule

GROUP_SIZES = (2, 4, 8)  # how many ranks may meet in one round of a cube
NETWORK = NetworkCost()

# Scratch of several times the tensor is fine for small tensors only.
EXCHANGE_NBYTES_MAX = 256 << 10
DIRECT_NBYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm that could serve: what it costs, and how to write it down for one rank."""

    algorithm: str
    cost: Cost
    schedule: Callable[[int], Schedule]  # from the rank


def best(candidates: Sequence[Candidate], network: NetworkCost = NETWORK) -> Candidate:
    """The one that takes the least time; of equals, the first."""
    return min(candidates, key=lambda candidate: predicted_s(candidate.cost, network))


def cube_factors(world_size: int) -> list[tuple[int, ...]]:
    """The ways to build the whole world as a cube that are worth a look, without duplicates."""
    ways = [factors_of(world_size, size) for size in GROUP_SIZES]
    return list(dict.fromkeys(way for way in ways if way))


def folded_factors(world_size: int) -> list[tuple[int, ...]]:
    """The same for the largest power of two that is not above the world size."""
    return cube_factors(1 << (world_size.bit_length() - 1))


def _named(kind: str, factors: tuple[int, ...]) -> str:
    return f"{kind} {'x'.join(map(str, factors))}"


def all_reduce_candidates(world_size: int, total_nbytes: int, itemsize: int) -> list[Candidate]:
    def exchange(factors: tuple[int, ...]) -> Candidate:
        return Candidate(
            _named("exchange", factors),
            cost.exchange_all_reduce_cost(world_size, factors, total_nbytes),
            lambda rank: exchange_all_reduce(rank, world_size, factors, total_nbytes),
        )

    def bcube(factors: tuple[int, ...]) -> Candidate:
        return Candidate(
            _named("bcube", factors),
            cost.bcube_all_reduce_cost(world_size, factors, total_nbytes, itemsize),
            lambda rank: bcube_all_reduce(rank, world_size, factors, total_nbytes, itemsize),
        )

    candidates = [
        Candidate(
            "ring",
            cost.ring_all_reduce_cost(world_size, total_nbytes, itemsize),
            lambda rank: ring_all_reduce(rank, world_size, total_nbytes, itemsize),
        )
    ]
    if total_nbytes <= EXCHANGE_NBYTES_MAX:
        ways = dict.fromkeys(cube_factors(world_size) + folded_factors(world_size))
        candidates += [exchange(factors) for factors in ways]
    if total_nbytes <= DIRECT_NBYTES_MAX * world_size:
        candidates += [bcube(factors) for factors in cube_factors(world_size)]
    return candidates


def reduce_candidates(
    world_size: int, root: int, total_nbytes: int, itemsize: int
) -> list[Candidate]:
    return [
        Candidate(
            "ring",
            cost.ring_reduce_cost(world_size, total_nbytes, itemsize),
            lambda rank: ring_reduce(rank, world_size, root, total_nbytes, itemsize),
        ),
        Candidate(
            "tree",
            cost.binomial_reduce_cost(world_size, total_nbytes),
            lambda rank: binomial_reduce(rank, world_size, root, total_nbytes),
        ),
    ]


def broadcast_candidates(world_size: int, root: int, total_nbytes: int) -> list[Candidate]:
    return [
        Candidate(
            "tree",
            cost.binomial_broadcast_cost(world_size, total_nbytes),
            lambda rank: binomial_broadcast(rank, world_size, root, total_nbytes),
        ),
        Candidate(
            "chain",
            cost.chain_broadcast_cost(world_size, total_nbytes),
            lambda rank: chain_broadcast(rank, world_size, root, total_nbytes),
        ),
    ]


def all_gather_candidates(world_size: int, block_nbytes: int) -> list[Candidate]:
    blocks = [block_nbytes] * world_size
    candidates = [
        Candidate(
            "ring",
            cost.ring_all_gather_cost(world_size, block_nbytes),
            lambda rank: ring_all_gather(rank, world_size, block_nbytes),
        )
    ]
    if block_nbytes <= DIRECT_NBYTES_MAX:
        candidates += [
            Candidate(
                "direct",
                cost.direct_all_gather_cost(blocks),
                lambda rank: direct_all_gather(rank, world_size, blocks),
            ),
            Candidate(
                "Bruck",
                cost.bruck_all_gather_cost(world_size, block_nbytes),
                lambda rank: bruck_all_gather(rank, world_size, block_nbytes),
            ),
        ]
    return candidates


def all_gather_v_candidates(world_size: int, block_nbytes: Sequence[int]) -> list[Candidate]:
    candidates = [
        Candidate(
            "ring",
            cost.ring_all_gather_v_cost(block_nbytes),
            lambda rank: ring_all_gather_v(rank, world_size, block_nbytes),
        )
    ]
    if max(block_nbytes) <= DIRECT_NBYTES_MAX:
        candidates.append(
            Candidate(
                "direct",
                cost.direct_all_gather_cost(block_nbytes),
                lambda rank: direct_all_gather(rank, world_size, block_nbytes),
            )
        )
    return candidates


def reduce_scatter_candidates(world_size: int, chunk_nbytes: int, itemsize: int) -> list[Candidate]:
    candidates = [
        Candidate(
            "ring",
            cost.ring_reduce_scatter_cost(world_size, chunk_nbytes, itemsize),
            lambda rank: ring_reduce_scatter(rank, world_size, chunk_nbytes, itemsize),
        )
    ]
    if chunk_nbytes <= DIRECT_NBYTES_MAX:
        candidates.append(
            Candidate(
                "direct",
                cost.direct_reduce_scatter_cost(world_size, chunk_nbytes),
                lambda rank: direct_reduce_scatter(rank, world_size, chunk_nbytes),
            )
        )
    return candidates


# The best schedule of one rank. Programs repeat themselves, so the answers are kept.


@lru_cache(maxsize=128)
def all_reduce(rank: int, world_size: int, total_nbytes: int, itemsize: int) -> Schedule:
    return best(all_reduce_candidates(world_size, total_nbytes, itemsize)).schedule(rank)


@lru_cache(maxsize=128)
def reduce(rank: int, world_size: int, root: int, total_nbytes: int, itemsize: int) -> Schedule:
    return best(reduce_candidates(world_size, root, total_nbytes, itemsize)).schedule(rank)


@lru_cache(maxsize=128)
def broadcast(rank: int, world_size: int, root: int, total_nbytes: int) -> Schedule:
    return best(broadcast_candidates(world_size, root, total_nbytes)).schedule(rank)


@lru_cache(maxsize=128)
def all_gather(rank: int, world_size: int, block_nbytes: int) -> Schedule:
    return best(all_gather_candidates(world_size, block_nbytes)).schedule(rank)


def all_gather_v(rank: int, world_size: int, block_nbytes: Sequence[int]) -> Schedule:
    return best(all_gather_v_candidates(world_size, block_nbytes)).schedule(rank)


@lru_cache(maxsize=128)
def reduce_scatter(rank: int, world_size: int, chunk_nbytes: int, itemsize: int) -> Schedule:
    return best(reduce_scatter_candidates(world_size, chunk_nbytes, itemsize)).schedule(rank)
