"""The formulas of `cost.py` against the schedules themselves, and the choices that rest on them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from impl.schedules import choice, cost
from impl.schedules.barrier import dissemination_barrier
from impl.schedules.bcube import bcube_all_reduce, exchange_all_reduce
from impl.schedules.cost import Cost
from impl.schedules.logarithmic import binomial_broadcast, bruck_all_gather
from impl.schedules.pairwise import (
    direct_all_gather,
    direct_gather,
    direct_reduce_scatter,
    direct_scatter,
    pairwise_all_to_all,
)
from impl.schedules.ring import (
    chain_broadcast,
    ring_all_gather,
    ring_all_gather_v,
    ring_all_reduce,
    ring_reduce,
    ring_reduce_scatter,
)
from impl.schedules.steps import Receive, Schedule, Send, Traffic, traffic

MIB = 1 << 20
WORLDS = range(1, 33)
SIZES = (0, 4, 60, 4096, 3 * MIB + 4)


def busiest(plans: Sequence[Schedule]) -> Traffic:
    each = [traffic(plan) for plan in plans]
    return Traffic(
        max(t.messages for t in each),
        max(t.sent_nbytes for t in each),
        max(t.combined_nbytes for t in each),
    )


def assert_exact(formula: Cost, plans: Sequence[Schedule]) -> None:
    got = Traffic(formula.messages, formula.sent_nbytes, formula.combined_nbytes)
    assert got == busiest(plans)


@pytest.mark.parametrize("n", WORLDS)
def test_formulas_count_what_the_busiest_rank_does(n: int) -> None:
    for size in SIZES:
        ranks = range(n)
        assert_exact(
            cost.ring_all_reduce_cost(n, size, 4), [ring_all_reduce(r, n, size, 4) for r in ranks]
        )
        assert_exact(
            cost.ring_reduce_scatter_cost(n, size, 4),
            [ring_reduce_scatter(r, n, size, 4) for r in ranks],
        )
        assert_exact(
            cost.ring_all_gather_cost(n, size), [ring_all_gather(r, n, size) for r in ranks]
        )
        assert_exact(
            cost.chain_broadcast_cost(n, size), [chain_broadcast(r, n, 0, size) for r in ranks]
        )
        assert_exact(
            cost.binomial_broadcast_cost(n, size),
            [binomial_broadcast(r, n, 0, size) for r in ranks],
        )
        assert_exact(
            cost.bruck_all_gather_cost(n, size), [bruck_all_gather(r, n, size) for r in ranks]
        )
        assert_exact(
            cost.direct_scatter_cost(n, size), [direct_scatter(r, n, 0, size) for r in ranks]
        )
        assert_exact(
            cost.direct_reduce_scatter_cost(n, size),
            [direct_reduce_scatter(r, n, size) for r in ranks],
        )
        for factors in choice.cube_factors(n) + choice.folded_factors(n):
            assert_exact(
                cost.exchange_all_reduce_cost(n, factors, size),
                [exchange_all_reduce(r, n, factors, size) for r in ranks],
            )
    assert_exact(cost.dissemination_barrier_cost(n), [dissemination_barrier(r, n) for r in ranks])


@pytest.mark.parametrize("n", WORLDS)
def test_formulas_for_blocks_of_different_sizes(n: int) -> None:
    blocks = [(7 * r) % 5 for r in range(n)]
    ranks = range(n)
    assert_exact(
        cost.ring_all_gather_v_cost(blocks), [ring_all_gather_v(r, n, blocks) for r in ranks]
    )
    assert_exact(
        cost.direct_all_gather_cost(blocks), [direct_all_gather(r, n, blocks) for r in ranks]
    )
    same = [24] * n
    assert_exact(
        cost.pairwise_all_to_all_cost(same), [pairwise_all_to_all(r, n, same, same) for r in ranks]
    )
    received = [s for s in direct_gather(0, n, 0, same).steps if isinstance(s, Receive)]
    assert cost.direct_gather_cost(same).messages == len(received)
    assert cost.direct_gather_cost(same).sent_nbytes == sum(s.region.nbytes for s in received)


@pytest.mark.parametrize("n", WORLDS)
def test_the_bcube_formula_is_exact_for_tensors_that_divide_and_a_bound_for_others(n: int) -> None:
    for factors in choice.cube_factors(n):
        for size in (4 * n, 400 * n):
            assert_exact(
                cost.bcube_all_reduce_cost(n, factors, size, 4),
                [bcube_all_reduce(r, n, factors, size, 4) for r in range(n)],
            )
        for size in (4, 36, 4004):
            formula = cost.bcube_all_reduce_cost(n, factors, size, 4)
            real = busiest([bcube_all_reduce(r, n, factors, size, 4) for r in range(n)])
            assert real.messages <= formula.messages
            assert real.combined_nbytes <= formula.combined_nbytes


@pytest.mark.parametrize("n", WORLDS)
def test_the_ring_reduce_formula_is_a_close_bound(n: int) -> None:
    for size in SIZES:
        formula = cost.ring_reduce_cost(n, size, 4)
        real = busiest([ring_reduce(r, n, 0, size, 4) for r in range(n)])
        assert real.messages <= formula.messages <= real.messages + 2
        assert real.sent_nbytes <= formula.sent_nbytes <= 2 * real.sent_nbytes


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 13, 64, 1024])
def test_small_tensors_take_fewer_messages_than_gloo_s_ring_and_large_ones_no_more_bytes(
    n: int,
) -> None:
    small = traffic(choice.all_reduce(0, n, 4 * n, 4))
    assert small.messages < traffic(ring_all_reduce(0, n, 4 * n, 4)).messages
    large = traffic(choice.all_reduce(0, n, 64 * MIB, 4))
    assert large.sent_nbytes <= 1.01 * traffic(ring_all_reduce(0, n, 64 * MIB, 4)).sent_nbytes


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 12])
def test_all_ranks_choose_the_same_algorithm(n: int) -> None:
    """Whatever is sent must be received: the messages of every pair match in number and size."""
    for size in (0, 4, 1024, 40_000, 300_000, 3 * MIB):
        families = [
            [choice.all_reduce(r, n, size, 4) for r in range(n)],
            [choice.reduce(r, n, n - 1, size, 4) for r in range(n)],
            [choice.broadcast(r, n, n - 1, size) for r in range(n)],
            [choice.all_gather(r, n, size) for r in range(n)],
            [choice.all_gather_v(r, n, [size + i for i in range(n)]) for r in range(n)],
            [choice.reduce_scatter(r, n, size, 4) for r in range(n)],
        ]
        for plans in families:
            for sender in range(n):
                for receiver in range(n):
                    sent = [
                        s.region.nbytes
                        for s in plans[sender].steps
                        if isinstance(s, Send) and s.to == receiver
                    ]
                    wanted = [
                        s.region.nbytes
                        for s in plans[receiver].steps
                        if isinstance(s, Receive) and s.source == sender
                    ]
                    assert sent == wanted
