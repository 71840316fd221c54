"""all_gather and all_gather_into_tensor: results, uneven sizes, concatenated or stacked outputs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, covers, world_sizes
from conformance.oracle.data import sample
from conformance.spec.collectives.contributions import mine, of
from conformance.spec.collectives.perform import all_gather_into_tensor

chapter = Chapter("collectives")


def all_gathered(me: Me) -> list[Tensor]:
    outputs = [torch.full_like(mine(me), -1.0) for _ in range(me.world_size)]
    dist.all_gather(outputs, mine(me))
    return outputs


@chapter.must(
    "all_gather/values",
    "all_gather puts rank i's tensor into the i-th tensor of every rank's list.",
    source="torch 2.13 docs, all_gather",
    needs="op:all_gather",
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_all_gather_puts_the_ranks_in_order(ranks: Ranks) -> None:
    n = ranks.world_size
    assert_each_rank(ranks.run(all_gathered), [[of(rank) for rank in range(n)]] * n)


def all_gathered_uneven(me: Me, times: int) -> Tensor:
    """Rank r gives r times as many rows. The outputs lie in one memory, with a row more behind the
    last."""
    rows = [rank * times for rank in range(me.world_size)]
    memory = torch.full((sum(rows) + 1, 3), -1.0, device=me.device)
    outputs = list(memory.split([*rows, 1]))[:-1]
    dist.all_gather(outputs, sample((rows[me.rank], 3), "float32", me.rank).to(me.device))
    return memory


@chapter.must(
    "all_gather/uneven",
    "all_gather takes a tensor of a different size from each rank, if the lists of all ranks "
    "agree on the sizes.",
    source="torch 2.13 docs, all_gather: 'Uneven sized tensors are supported'",
    needs=("op:all_gather", "feature:gather_v"),
    rests_on="all_gather/values",
)
@world_sizes(2, 3, 5, at_least=2)
def test_all_gather_takes_other_sizes_from_other_ranks(ranks: Ranks) -> None:
    check_uneven(ranks, 1)


@covers("all_gather/uneven")
@world_sizes(2, 3)
def test_all_gather_takes_large_tensors_of_other_sizes(ranks: Ranks) -> None:
    """Of several MiB."""
    check_uneven(ranks, 150_001)


def check_uneven(ranks: Ranks, times: int) -> None:
    n = ranks.world_size
    rows = [sample((rank * times, 3), "float32", rank) for rank in range(n)]
    want = torch.cat([*rows, torch.full((1, 3), -1.0)])
    assert_each_rank(ranks.run(all_gathered_uneven, times), [want] * n)


def gathered_into_one(me: Me, stacked: bool) -> Tensor:
    rows = (me.world_size, 2, 3) if stacked else (me.world_size * 2, 3)
    output = torch.full(rows, -1.0, device=me.device)
    all_gather_into_tensor(output, mine(me))
    return output


@chapter.must(
    "all_gather_into_tensor/concatenated",
    "all_gather_into_tensor fills its output with all ranks' tensors, concatenated along the "
    "first dimension.",
    source="torch 2.13 docs, all_gather_single",
    needs="op:all_gather_into_tensor",
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_all_gather_into_tensor_concatenates(ranks: Ranks) -> None:
    n = ranks.world_size
    want = torch.cat([of(rank) for rank in range(n)])
    assert_each_rank(ranks.run(gathered_into_one, False), [want] * n)


@chapter.must(
    "all_gather_into_tensor/stacked",
    "all_gather_into_tensor also takes an output with an additional first dimension whose size "
    "is that of the group.",
    source="torch 2.13 docs, all_gather_single: 'a stack of all the input tensors'",
    needs="op:all_gather_into_tensor",
    rests_on="all_gather_into_tensor/concatenated",
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_all_gather_into_tensor_stacks(ranks: Ranks) -> None:
    n = ranks.world_size
    want = torch.stack([of(rank) for rank in range(n)])
    assert_each_rank(ranks.run(gathered_into_one, True), [want] * n)


def numbers_into_one(me: Me) -> Tensor:
    output = torch.full((me.world_size,), -1.0, device=me.device)
    all_gather_into_tensor(output, torch.tensor(me.rank + 0.5, device=me.device))
    return output


@covers("all_gather_into_tensor/stacked")
@world_sizes(1, 3)
def test_all_gather_into_tensor_stacks_numbers(ranks: Ranks) -> None:
    n = ranks.world_size
    assert_each_rank(ranks.run(numbers_into_one), [torch.arange(n) + 0.5] * n)


def gathered_by_name(me: Me, name: str) -> Tensor:
    output = torch.full((me.world_size * 2, 3), -1.0, device=me.device)
    getattr(dist, name)(output, mine(me))
    return output


@chapter.must(
    "all_gather_into_tensor/both-names",
    "all_gather_into_tensor and all_gather_single are the same operation.",
    source="torch 2.13 docs, all_gather_into_tensor",
    needs="op:all_gather_into_tensor",
    rests_on="all_gather_into_tensor/concatenated",
)
@world_sizes(2, 3)
@pytest.mark.parametrize(
    "name", [n for n in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, n)]
)
def test_all_gather_into_tensor_by_either_name(ranks: Ranks, name: str) -> None:
    n = ranks.world_size
    want = torch.cat([of(rank) for rank in range(n)])
    assert_each_rank(ranks.run(gathered_by_name, name), [want] * n)
