"""reduce_scatter and reduce_scatter_tensor: results; uneven, concatenated or stacked inputs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, not_probed, world_sizes
from conformance.spec.collectives.contributions import mine, sum_of_all
from conformance.spec.collectives.perform import reduce_scatter_tensor
from conformance.spec.parameters import reduce_ops

chapter = Chapter(
    "collectives",
    source="torch 2.13 docs, reduce_scatter_single: 'a stack of the output tensors'",
    needs=("op:reduce_scatter_tensor", "reduce_op:sum"),
)


def reduce_scattered(me: Me) -> Tensor:
    output = torch.full_like(mine(me), -1.0)
    dist.reduce_scatter(output, [mine(me, salt=to) for to in range(me.world_size)])
    return output


@chapter.must(
    "reduce_scatter/sum",
    "reduce_scatter with SUM leaves on rank i the sum of all ranks' i-th tensors.",
    source="torch 2.13 docs, reduce_scatter",
    needs=("op:reduce_scatter", "reduce_op:sum"),
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_reduce_scatter_adds_each_ranks_own_part(ranks: Ranks) -> None:
    n = ranks.world_size
    assert_each_rank(ranks.run(reduce_scattered), [sum_of_all(n, salt=rank) for rank in range(n)])


def reduce_scattered_unevenly(me: Me, op: str) -> Tensor:
    """The i-th tensor has i rows, its elements i + rank."""
    inputs = [
        torch.full((to, 3), float(to + me.rank), device=me.device) for to in range(me.world_size)
    ]
    output = torch.full_like(inputs[me.rank], -1.0)
    dist.reduce_scatter(output, inputs, getattr(dist.ReduceOp, op.upper()))
    return output


@chapter.must(
    "reduce_scatter/uneven",
    "reduce_scatter takes lists whose tensors differ in size: rank i's output has the size of "
    "the i-th tensor.",
    source="observed, torch 2.13.0 gloo",
    needs=("op:reduce_scatter", "reduce_op:sum", "feature:reduce_scatter_v"),
    rests_on="reduce_scatter/sum",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", reduce_ops("sum", "max"))
def test_reduce_scatter_of_parts_of_different_sizes(ranks: Ranks, op: str) -> None:
    n = ranks.world_size
    offset, factor = {"sum": (sum(range(n)), n), "max": (n - 1, 1)}[op]
    want = [torch.full((rank, 3), float(offset + factor * rank)) for rank in range(n)]
    assert_each_rank(ranks.run(reduce_scattered_unevenly, op), want)


def reduce_scattered_from_one(me: Me, stacked: bool) -> Tensor:
    parts = [mine(me, salt=to) for to in range(me.world_size)]
    output = torch.full_like(mine(me), -1.0)
    reduce_scatter_tensor(output, torch.stack(parts) if stacked else torch.cat(parts))
    return output


@chapter.must(
    "reduce_scatter_tensor/concatenated",
    "reduce_scatter_tensor with SUM splits its input along the first dimension into one part for "
    "each rank, and leaves on rank i the sum of all ranks' i-th parts.",
    source="torch 2.13 docs, reduce_scatter_single",
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_reduce_scatter_tensor_cuts_along_the_first_dimension(ranks: Ranks) -> None:
    n = ranks.world_size
    got = ranks.run(reduce_scattered_from_one, False)
    assert_each_rank(got, [sum_of_all(n, salt=rank) for rank in range(n)])


@chapter.must(
    "reduce_scatter_tensor/stacked",
    "reduce_scatter_tensor also takes an input with an additional first dimension whose size is "
    "that of the group.",
    rests_on="reduce_scatter_tensor/concatenated",
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_reduce_scatter_tensor_takes_a_stack(ranks: Ranks) -> None:
    n = ranks.world_size
    got = ranks.run(reduce_scattered_from_one, True)
    assert_each_rank(got, [sum_of_all(n, salt=rank) for rank in range(n)])


def reduce_scattered_number(me: Me) -> Tensor | None:
    """None where it is refused."""
    output = torch.tensor(-1.0, device=me.device)
    numbers = torch.arange(me.world_size, dtype=torch.float32, device=me.device) + 10 * me.rank
    try:
        reduce_scatter_tensor(output, numbers)
    except (RuntimeError, ValueError):
        return None
    return output


@not_probed()
@chapter.must(
    "reduce_scatter_tensor/zero-dimensional",
    "reduce_scatter_tensor takes a zero-dimensional output, or refuses it.",
    rests_on="reduce_scatter_tensor/concatenated",
)
@world_sizes(1, 3)
def test_reduce_scatter_tensor_of_numbers(ranks: Ranks) -> None:
    n = ranks.world_size
    got = ranks.run(reduce_scattered_number)
    if all(number is None for number in got):
        return
    tens = 10 * sum(range(n))
    assert_each_rank(got, [torch.tensor(float(n * rank + tens)) for rank in range(n)])


def reduce_scattered_by_name(me: Me, name: str) -> Tensor:
    output = torch.full_like(mine(me), -1.0)
    parts = [mine(me, salt=to) for to in range(me.world_size)]
    getattr(dist, name)(output, torch.cat(parts))
    return output


@chapter.must(
    "reduce_scatter_tensor/both-names",
    "reduce_scatter_tensor and reduce_scatter_single are the same operation.",
    source="torch 2.13 docs, reduce_scatter_tensor",
    rests_on="reduce_scatter_tensor/concatenated",
)
@world_sizes(2, 3)
@pytest.mark.parametrize(
    "name", [n for n in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, n)]
)
def test_reduce_scatter_tensor_by_either_name(ranks: Ranks, name: str) -> None:
    n = ranks.world_size
    got = ranks.run(reduce_scattered_by_name, name)
    assert_each_rank(got, [sum_of_all(n, salt=rank) for rank in range(n)])
