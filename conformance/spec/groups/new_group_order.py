"""The order of ranks in a new group: sorted, or as listed with sort_ranks=False."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    covers,
    needs,
    world_sizes,
)
from conformance.spec.groups.membership_sums import mark, sum_of_marks
from conformance.spec.torch_versions import needs_argument

chapter = Chapter("groups")

_keeps_order = needs_argument(dist.new_group, "sort_ranks")


def look_at_the_order(me: Me, members: list[int], arguments: dict[str, Any]) -> list[Any]:
    """The ranks of the group, this rank's number in it, and what a gathering has at each place."""
    group = dist.new_group(members, **arguments)
    if me.rank not in members:
        return []
    gathered: list[Any] = [None] * len(members)
    dist.all_gather_object(gathered, me.rank, group=group)
    return [dist.get_process_group_ranks(group), dist.get_rank(group), gathered]


@chapter.must(
    "new_group/sorted-ranks",
    "Ranks given in any order become group ranks in ascending order.",
    source="torch 2.13 docs, new_group, sort_ranks",
    rests_on=("new_group/members", "all_gather_object/gathers"),
)
@world_sizes(2, 3, 4, at_least=2)
def test_ranks_are_sorted(ranks: Ranks) -> None:
    n = ranks.world_size
    order = list(range(n))
    got = ranks.run(look_at_the_order, order[1:] + order[:1], {})
    assert_each_rank(got, [[order, rank, order] for rank in order])


@chapter.must(
    "new_group/given-order",
    "With sort_ranks=False, the order of the list is the order of the group, in every collective "
    "and for roots.",
    source="pytorch#192777; torch 2.13 docs, new_group, sort_ranks",
    rests_on=("new_group/members", "all_gather_object/gathers"),
)
@world_sizes(2, 3, 4, at_least=2)
@_keeps_order
def test_the_given_order_is_kept(ranks: Ranks) -> None:
    n = ranks.world_size
    order = [n - 1, *range(n - 1)]
    got = ranks.run(look_at_the_order, order, {"sort_ranks": False})
    assert_each_rank(got, [[order, order.index(rank), order] for rank in range(n)])


def use_the_given_order(me: Me, order: list[int]) -> tuple[Tensor, Tensor, Tensor] | None:
    """reduce_scatter, a broadcast from the last of the list, and an all_gather."""
    group = dist.new_group(order, sort_ranks=False)
    if me.rank not in order:
        return None
    n = len(order)
    chunks = [torch.full((2,), 10.0 * place + me.rank, device=me.device) for place in range(n)]
    share = torch.zeros(2, device=me.device)
    dist.reduce_scatter(share, chunks, group=group)
    told = torch.full((2,), float(me.rank), device=me.device)
    dist.broadcast(told, order[-1], group=group)
    gathered = [torch.zeros(2, device=me.device) for _ in order]
    dist.all_gather(gathered, torch.full((2,), float(me.rank), device=me.device), group=group)
    return share, told, torch.stack(gathered)


@covers("new_group/given-order")
@world_sizes(3, 4, 5)
@needs("op:reduce_scatter", "op:all_gather")
@_keeps_order
def test_collectives_keep_the_given_order(ranks: Ranks) -> None:
    n = ranks.world_size
    order = [2, 0, *range(n - 1, 2, -1)]  # without rank 1
    got = ranks.run(use_the_given_order, order)
    total = float(sum(order))
    want: list[tuple[Tensor, ...] | None] = []
    for rank in range(n):
        if rank not in order:
            want.append(None)
            continue
        share = torch.full((2,), 10.0 * order.index(rank) * len(order) + total)
        gathered = torch.tensor(order, dtype=torch.float32).unsqueeze(1).expand(-1, 2)
        want.append((share, torch.full((2,), float(order[-1])), gathered.contiguous()))
    assert_each_rank(got, want)


def send_along_the_given_order(me: Me, order: list[int], by_group_rank: bool) -> Any:
    """Each rank's message goes to the next one of the list, around its end."""
    group = dist.new_group(order, sort_ranks=False)
    if me.rank not in order:
        return None
    n, place = len(order), order.index(me.rank)
    following, preceding = (place + 1) % n, (place - 1) % n
    sent, got = mark(me), torch.full_like(mark(me), -1.0)
    if by_group_rank:
        work = dist.isend(sent, group=group, group_dst=following)
        source = dist.recv(got, group=group, group_src=preceding)
    else:
        work = dist.isend(sent, order[following], group=group)
        source = dist.recv(got, order[preceding], group=group)
    assert work is not None
    work.wait()
    return got, source


@chapter.must(
    "new_group/given-order-of-peers",
    "With sort_ranks=False, group_dst and group_src of messages are ranks in the order of the "
    "list; dst and src are global ranks.",
    source="torch 2.13 docs, new_group, sort_ranks",
    needs="op:send",
    rests_on=("new_group/given-order", "p2p/subgroup-peers"),
)
@world_sizes(3, 4)
@pytest.mark.parametrize("by_group_rank", [False, True], ids=["global", "of the group"])
@_keeps_order
def test_messages_keep_the_given_order(ranks: Ranks, by_group_rank: bool) -> None:
    order = [2, 0, *range(ranks.world_size - 1, 2, -1), 1]
    got = ranks.run(send_along_the_given_order, order, by_group_rank)
    before = {rank: order[place - 1] for place, rank in enumerate(order)}
    want = [(sum_of_marks([before[rank]]), before[rank]) for rank in range(ranks.world_size)]
    assert_each_rank(got, want)


# No order is its own inverse, so places that are looked up the wrong way round are other ones.
_ORDERS = {4: [0, 3, 1, 2], 5: [1, 4, 2, 3]}


def exchange_in_the_given_order(me: Me, order: list[int]) -> list[Tensor] | None:
    """What each collective with a chunk for each place gives."""
    group = dist.new_group(order, sort_ranks=False)
    if me.rank not in order:
        return None
    n = len(order)
    x = 100.0 * me.rank + torch.arange(2.0 * n, device=me.device)
    scattered, exchanged, gathered = (torch.zeros_like(y) for y in (x[:2], x, x))
    dist.reduce_scatter_tensor(scattered, x, group=group)
    dist.all_to_all_single(exchanged, x, group=group)
    dist.all_gather_into_tensor(gathered, x[:2], group=group)
    collected = [torch.zeros_like(x[:2]) for _ in order] if me.rank == order[1] else []
    dist.gather(x[:2], collected or None, order[1], group=group)
    share = torch.zeros_like(x[:2])
    chunks = list(x.view(n, 2)) if me.rank == order[1] else None
    dist.scatter(share, chunks, order[1], group=group)
    total = x[:2].clone()
    dist.reduce(total, order[2], group=group)
    return [scattered, exchanged, gathered, share, *collected, *[total] * (me.rank == order[2])]


def exchanged_in_the_given_order(rank: int, order: list[int]) -> list[Tensor] | None:
    """What that has to be."""
    if rank not in order:
        return None
    n, place = len(order), order.index(rank)
    first, own = torch.arange(2.0), torch.arange(2.0 * n)[2 * place : 2 * place + 2]
    total = 100.0 * sum(order)
    collected = [100.0 * member + first for member in order]
    return [
        total + n * own,
        torch.cat([100.0 * member + own for member in order]),
        torch.cat(collected),
        100.0 * order[1] + own,
        *(collected if rank == order[1] else []),
        *([total + n * first] if rank == order[2] else []),
    ]


@covers("new_group/given-order")
@world_sizes(4, 5)
@needs(
    *("op:reduce_scatter_tensor", "op:all_to_all_single", "op:all_gather_into_tensor"),
    *("op:gather", "op:scatter", "op:reduce"),
)
@_keeps_order
def test_chunks_go_by_the_given_order(ranks: Ranks) -> None:
    order = _ORDERS[ranks.world_size]
    want = [exchanged_in_the_given_order(rank, order) for rank in range(ranks.world_size)]
    assert_each_rank(ranks.run(exchange_in_the_given_order, order), want)
