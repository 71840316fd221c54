"""all_reduce with SUM: its values, the same bits on every rank, and its rounding error."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    covers,
    needs,
    world_sizes,
)
from conformance.oracle.data import noise
from conformance.oracle.reduction import rounded
from conformance.spec.collectives.contributions import mine, sum_of_all
from conformance.spec.parameters import dtypes
from conformance.spec.tolerance import assert_near

chapter = Chapter("collectives", needs=("op:all_reduce", "reduce_op:sum"))


def all_reduced(me: Me) -> Tensor:
    x = mine(me)
    dist.all_reduce(x)
    return x


@chapter.must(
    "all_reduce/sum",
    "all_reduce with SUM leaves the sum of all ranks' tensors on every rank.",
    source="torch 2.13 docs, all_reduce",
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_all_reduce_adds_one_contribution_per_rank(ranks: Ranks) -> None:
    got = ranks.run(all_reduced)
    assert_each_rank(got, [sum_of_all(ranks.world_size)] * ranks.world_size)


def all_reduced_noise(me: Me, dtype: str, numel: int) -> Tensor:
    """Where the order of the additions matters."""
    x = noise((numel,), dtype, me.rank).to(me.device)
    dist.all_reduce(x)
    return x


FLOATS = dtypes("float16", "bfloat16", "float32", "float64")


@chapter.must(
    "all_reduce/same-bits",
    "After all_reduce every rank's tensor holds the same bits.",
    source="torch 2.13 docs, all_reduce: 'bitwise identical in all processes'",
    rests_on="all_reduce/sum",
)
@world_sizes(2, 3, 5, at_least=2)
@pytest.mark.parametrize("dtype", FLOATS)
def test_all_reduce_leaves_the_same_bits_everywhere(ranks: Ranks, dtype: str) -> None:
    assert_same_on_all_ranks(ranks.run(all_reduced_noise, dtype, 1003))


@chapter.must(
    "all_reduce/rounding",
    "The rounding error of a floating-point SUM is no larger than that of adding in the tensors' "
    "dtype can be, in some order.",
    source="pytorch#152300, gloo#446",
    rests_on="all_reduce/sum",
)
@world_sizes(2, 3, 5, at_least=2)
@pytest.mark.parametrize("dtype", FLOATS)
def test_all_reduce_rounds_no_more_than_addition_does(ranks: Ranks, dtype: str) -> None:
    got = ranks.run(all_reduced_noise, dtype, 1003)
    n = ranks.world_size
    want = rounded("sum", [noise((1003,), dtype, rank) for rank in range(n)])
    assert_near(got, [want] * n, f"the sum in {dtype}")


def all_reduced_halves(me: Me, numel: int) -> Tensor:
    """Numbers up to the greatest that float16 has."""
    x = halves(me.rank, numel).to(me.device)
    dist.all_reduce(x)
    return x


def halves(rank: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.rand(numel, generator=generator) * 131008 - 65504).to(torch.float16)


@covers("all_reduce/rounding")
@needs("dtype:float16")
@world_sizes(2)
def test_the_sum_of_two_is_their_sum_to_the_last_bit(ranks: Ranks) -> None:
    numel = 100_003
    got = ranks.run(all_reduced_halves, numel)
    assert_each_rank(got, [halves(0, numel) + halves(1, numel)] * 2)
