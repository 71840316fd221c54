"""Broadcast, gathers, scatter, all-to-all and barrier: every byte where it belongs."""

from __future__ import annotations

import numpy as np
import pytest

from impl.schedules.barrier import dissemination_barrier
from impl.schedules.logarithmic import binomial_broadcast, bruck_all_gather
from impl.schedules.pairwise import (
    direct_all_gather,
    direct_gather,
    direct_scatter,
    pairwise_all_to_all,
)
from impl.schedules.ring import chain_broadcast, ring_all_gather, ring_all_gather_v
from impl.schedules.steps import Fence, Receive, Send
from tests.impl.schedules.groups import (
    EMPTY,
    WORLDS,
    contributions,
    run_in_place,
    run_out_of_place,
)

SEGMENT = 64


@pytest.mark.parametrize("world_size", WORLDS)
def test_broadcast_copies_the_root_s_bytes(world_size: int) -> None:
    for root in {0, world_size // 3, world_size - 1}:
        for numel in (0, 1, 3, 100):
            given = contributions(world_size, numel)
            for plans in (
                [binomial_broadcast(r, world_size, root, 4 * numel) for r in range(world_size)],
                [
                    chain_broadcast(r, world_size, root, 4 * numel, SEGMENT)
                    for r in range(world_size)
                ],
            ):
                for got in run_in_place(plans, given, seed=root):
                    np.testing.assert_array_equal(got, given[root])


@pytest.mark.parametrize("world_size", WORLDS)
def test_all_gather_collects_the_blocks_of_all_ranks(world_size: int) -> None:
    for nbytes in (0, 1, 2, 5, 400):
        given = [each.view(np.uint8)[:nbytes] for each in contributions(world_size, 100)]
        blocks = [nbytes] * world_size
        for plans in (
            [ring_all_gather(r, world_size, nbytes) for r in range(world_size)],
            [ring_all_gather_v(r, world_size, blocks) for r in range(world_size)],
            [direct_all_gather(r, world_size, blocks) for r in range(world_size)],
            [bruck_all_gather(r, world_size, nbytes) for r in range(world_size)],
        ):
            for got in run_out_of_place(plans, given, [nbytes * world_size] * world_size):
                np.testing.assert_array_equal(got, np.concatenate(given))


@pytest.mark.parametrize("world_size", WORLDS)
def test_all_gather_v_and_gather_take_blocks_of_any_size(world_size: int) -> None:
    sizes = [(5 * r) % 7 for r in range(world_size)]  # some are empty
    given = [each[:size] for each, size in zip(contributions(world_size, 7), sizes, strict=True)]
    blocks = [4 * size for size in sizes]
    everything = np.concatenate(given)
    for plans in (
        [ring_all_gather_v(r, world_size, blocks) for r in range(world_size)],
        [direct_all_gather(r, world_size, blocks) for r in range(world_size)],
    ):
        for got in run_out_of_place(plans, given, [sum(sizes)] * world_size):
            np.testing.assert_array_equal(got, everything)
    for root in {0, world_size - 1}:
        plans = [direct_gather(r, world_size, root, blocks) for r in range(world_size)]
        numels = [sum(sizes) if r == root else 0 for r in range(world_size)]
        np.testing.assert_array_equal(run_out_of_place(plans, given, numels)[root], everything)


@pytest.mark.parametrize("world_size", WORLDS)
def test_scatter_gives_each_rank_its_block(world_size: int) -> None:
    for root in {0, world_size - 1}:
        for numel in (0, 1, 6):
            whole = contributions(1, numel * world_size)[0]
            given = [whole if r == root else EMPTY for r in range(world_size)]
            plans = [direct_scatter(r, world_size, root, 4 * numel) for r in range(world_size)]
            got = run_out_of_place(plans, given, [numel] * world_size)
            np.testing.assert_array_equal(np.concatenate(got), whole)


@pytest.mark.parametrize("world_size", WORLDS)
def test_all_to_all_transposes_parts_of_any_size(world_size: int) -> None:
    sizes = [[(3 * r + 5 * d) % 6 for d in range(world_size)] for r in range(world_size)]
    given = [each[: sum(sizes[r])] for r, each in enumerate(contributions(world_size, 6 * 32))]
    columns = [[sizes[s][r] for s in range(world_size)] for r in range(world_size)]
    plans = [
        pairwise_all_to_all(r, world_size, [4 * n for n in columns[r]], [4 * n for n in sizes[r]])
        for r in range(world_size)
    ]
    got = run_out_of_place(plans, given, [sum(column) for column in columns])
    parts = [np.split(each, np.cumsum(sizes[r])[:-1]) for r, each in enumerate(given)]
    for rank in range(world_size):
        want = np.concatenate([parts[source][rank] for source in range(world_size)])
        np.testing.assert_array_equal(got[rank], want)


@pytest.mark.parametrize("world_size", WORLDS)
def test_barrier_makes_every_rank_hear_from_every_other(world_size: int) -> None:
    """Follow what is known: a message carries what its sender had heard when its round began."""
    plans = [dissemination_barrier(r, world_size) for r in range(world_size)]
    run_in_place(plans, [EMPTY] * world_size, seed=world_size)
    heard = [{r} for r in range(world_size)]
    round_count = max(sum(isinstance(s, Fence) for s in plan.steps) for plan in plans)
    for i in range(round_count):
        before = [set(known) for known in heard]
        for rank, plan in enumerate(plans):
            receive, send, fence = plan.steps[3 * i : 3 * i + 3]
            assert isinstance(receive, Receive)
            assert isinstance(send, Send)
            assert isinstance(fence, Fence)
            heard[rank] |= before[receive.source]
    assert all(known == set(range(world_size)) for known in heard)
