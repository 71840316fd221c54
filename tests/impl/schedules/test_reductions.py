"""All-reduce, reduce and reduce-scatter: right on every rank, in any order of messages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from impl.schedules import choice
from impl.schedules.bcube import bcube_all_reduce, cube_groups, exchange_all_reduce
from impl.schedules.logarithmic import binomial_reduce
from impl.schedules.pairwise import direct_reduce_scatter
from impl.schedules.ring import ring_all_reduce, ring_reduce, ring_reduce_scatter
from impl.schedules.steps import Schedule
from tests.impl.schedules.groups import (
    WORLDS,
    Array,
    contributions,
    run_in_place,
    run_out_of_place,
    same_bits,
)

SIZES = (0, 1, 2, 3, 7, 64, 301)
SEGMENT = 64  # bytes: small enough for several segments a chunk

AllReduce = Callable[[int, int, int], list[Schedule]]


def ring(rank: int, world_size: int, nbytes: int) -> list[Schedule]:
    return [ring_all_reduce(rank, world_size, nbytes, 4, SEGMENT)]


def exchange(rank: int, world_size: int, nbytes: int) -> list[Schedule]:
    ways = choice.cube_factors(world_size) + choice.folded_factors(world_size)
    return [exchange_all_reduce(rank, world_size, factors, nbytes) for factors in ways]


def bcube(rank: int, world_size: int, nbytes: int) -> list[Schedule]:
    ways = [*choice.cube_factors(world_size), (world_size,)]
    return [bcube_all_reduce(rank, world_size, factors, nbytes, 4) for factors in ways]


@pytest.mark.parametrize("make", [ring, exchange, bcube])
@pytest.mark.parametrize("world_size", WORLDS)
def test_all_reduce_adds_every_contribution_once_and_ends_with_the_same_bits(
    make: AllReduce, world_size: int
) -> None:
    for numel in SIZES:
        given = contributions(world_size, numel)
        exact = np.sum(np.array(given, np.float64), axis=0)
        scale = np.sum(np.abs(np.array(given, np.float64)), axis=0)
        variants = zip(*[make(r, world_size, 4 * numel) for r in range(world_size)], strict=True)
        for plans in variants:
            got = run_in_place(plans, given, seed=numel)
            assert same_bits(got)
            assert np.all(np.abs(got[0] - exact) <= 1e-6 * scale)


@pytest.mark.parametrize("make", [ring, exchange, bcube])
def test_all_ranks_agree_on_the_bits_even_of_nans(make: AllReduce) -> None:
    """x86 keeps the payload of the first NaN operand, so the order of operands must be the same."""
    for world_size in (2, 3, 5, 8, 12):
        given = [np.full(9, np.nan, np.float32) for _ in range(world_size)]
        for rank, array in enumerate(given):
            array.view(np.uint32)[:] += np.uint32(rank + 1)
        for plans in zip(*[make(r, world_size, 36) for r in range(world_size)], strict=True):
            got = run_in_place(plans, given, combine=first_operand_s_nan)
            assert same_bits(got)


def first_operand_s_nan(left: Array, right: Array) -> Array:
    return np.where(np.isnan(left), left, right)


def test_ring_all_reduce_adds_in_the_documented_order() -> None:
    given = contributions(3, 6)
    plans = [ring_all_reduce(r, 3, 24, 4) for r in range(3)]
    got = run_in_place(plans, given)[0]
    for chunk in range(3):
        part = slice(2 * chunk, 2 * chunk + 2)
        first, second, third = (given[(chunk + i) % 3][part] for i in range(3))
        np.testing.assert_array_equal(got[part], first + (second + third))


def test_exchange_adds_in_the_order_of_ranks() -> None:
    given = contributions(5, 4)
    direct = run_in_place([exchange_all_reduce(r, 5, (5,), 16) for r in range(5)], given)[0]
    np.testing.assert_array_equal(
        direct, (((given[0] + given[1]) + given[2]) + given[3]) + given[4]
    )
    folded = run_in_place([exchange_all_reduce(r, 5, (2, 2), 16) for r in range(5)], given)[0]
    np.testing.assert_array_equal(
        folded, ((given[0] + given[1]) + given[2]) + (given[3] + given[4])
    )


def test_the_groups_of_a_cube_contain_every_rank_once_a_round() -> None:
    rounds = [cube_groups(r, (3, 2)) for r in range(6)]
    assert [g.members for g in rounds[4]] == [(3, 4, 5), (1, 4)]
    assert all(rounds[r][i].members[rounds[r][i].place] == r for r in range(6) for i in range(2))


@pytest.mark.parametrize("world_size", WORLDS)
def test_reduce_gives_the_root_the_sum(world_size: int) -> None:
    for root in {0, world_size // 2, world_size - 1}:
        for numel in SIZES:
            given = contributions(world_size, numel)
            exact = np.sum(np.array(given, np.float64), axis=0)
            scale = np.sum(np.abs(np.array(given, np.float64)), axis=0)
            for plans in (
                [
                    ring_reduce(r, world_size, root, 4 * numel, 4, SEGMENT)
                    for r in range(world_size)
                ],
                [binomial_reduce(r, world_size, root, 4 * numel) for r in range(world_size)],
            ):
                got = run_in_place(plans, given, seed=root + numel)[root]
                assert np.all(np.abs(got - exact) <= 1e-6 * scale)


def test_binomial_reduce_adds_in_the_documented_order() -> None:
    given = contributions(5, 3)
    got = run_in_place([binomial_reduce(r, 5, 0, 12) for r in range(5)], given)[0]
    np.testing.assert_array_equal(got, ((given[0] + given[1]) + (given[2] + given[3])) + given[4])


@pytest.mark.parametrize("world_size", WORLDS)
def test_reduce_scatter_gives_each_rank_its_chunk(world_size: int) -> None:
    for numel in (0, 1, 2, 5, 70):
        given = contributions(world_size, numel * world_size)
        exact = np.sum(np.array(given, np.float64), axis=0)
        scale = np.sum(np.abs(np.array(given, np.float64)), axis=0)
        for plans in (
            [ring_reduce_scatter(r, world_size, 4 * numel, 4, SEGMENT) for r in range(world_size)],
            [direct_reduce_scatter(r, world_size, 4 * numel) for r in range(world_size)],
        ):
            got = run_out_of_place(plans, given, [numel] * world_size, seed=numel)
            whole = np.concatenate(got)
            assert np.all(np.abs(whole - exact) <= 1e-6 * scale)


def test_direct_reduce_scatter_adds_in_the_order_of_ranks() -> None:
    given = contributions(4, 8)
    plans = [direct_reduce_scatter(r, 4, 8) for r in range(4)]
    whole = np.concatenate(run_out_of_place(plans, given, [2] * 4))
    np.testing.assert_array_equal(whole, ((given[0] + given[1]) + given[2]) + given[3])
