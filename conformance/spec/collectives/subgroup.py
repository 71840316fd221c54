"""Collectives in subgroups without rank 0, with roots as global ranks or group ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, covers, world_sizes
from conformance.oracle.collectives import Call
from conformance.oracle.data import sample
from conformance.spec.collectives.perform import Seen, assert_taken, perform
from conformance.spec.parameters import by_operation

chapter = Chapter("collectives", source="torch 2.13 docs, groups")


OPS = by_operation(
    chapter.must(
        "all_reduce/subgroup",
        "all_reduce in a group reduces only over the members of that group.",
        needs=("op:all_reduce", "reduce_op:sum"),
        rests_on="all_reduce/sum",
    ),
    chapter.must(
        "reduce/subgroup",
        "reduce in a group takes the destination's global rank as dst, or its rank in the group as "
        "group_dst.",
        source="torch 2.13 docs, reduce",
        needs=("op:reduce", "reduce_op:sum"),
        rests_on="reduce/sum",
    ),
    chapter.must(
        "broadcast/subgroup",
        "broadcast in a group takes the source's global rank as src, or its rank in the group as "
        "group_src.",
        source="torch 2.13 docs, broadcast",
        needs="op:broadcast",
        rests_on="broadcast/values",
    ),
    chapter.must(
        "all_gather/subgroup",
        "all_gather in a group gathers from its members, in the order of their ranks in it.",
        needs="op:all_gather",
        rests_on="all_gather/values",
    ),
    chapter.must(
        "all_gather_into_tensor/subgroup",
        "all_gather_into_tensor in a group gathers from its members, in the order of their "
        "ranks in it.",
        needs="op:all_gather_into_tensor",
        rests_on="all_gather_into_tensor/concatenated",
    ),
    chapter.must(
        "gather/subgroup",
        "gather in a group takes the destination's global rank as dst, or its rank in the group as "
        "group_dst.",
        source="torch 2.13 docs, gather",
        needs="op:gather",
        rests_on="gather/values",
    ),
    chapter.must(
        "scatter/subgroup",
        "scatter in a group takes the source's global rank as src, or its rank in the group as "
        "group_src.",
        source="torch 2.13 docs, scatter",
        needs="op:scatter",
        rests_on="scatter/values",
    ),
    chapter.must(
        "reduce_scatter/subgroup",
        "reduce_scatter in a group reduces over its members; the i-th one gets the i-th part.",
        needs=("op:reduce_scatter", "reduce_op:sum"),
        rests_on="reduce_scatter/sum",
    ),
    chapter.must(
        "reduce_scatter_tensor/subgroup",
        "reduce_scatter_tensor in a group reduces over its members; the i-th one gets the i-th "
        "part.",
        needs=("op:reduce_scatter_tensor", "reduce_op:sum"),
        rests_on="reduce_scatter_tensor/concatenated",
    ),
    chapter.must(
        "all_to_all/subgroup",
        "all_to_all in a group exchanges between its members, in the order of their ranks in it.",
        needs="op:all_to_all",
        rests_on="all_to_all/values",
    ),
    chapter.must(
        "all_to_all_single/subgroup",
        "all_to_all_single in a group exchanges between its members, in the order of their "
        "ranks in it.",
        needs="op:all_to_all_single",
        rests_on="all_to_all_single/even",
    ),
)


def perform_in_group(me: Me, members: list[int], calls: list[Call]) -> list[Seen] | None:
    """The members make the calls; the others, nothing."""
    group = dist.new_group(members)
    if me.rank not in members:
        return None
    return [perform(me, call, group=group) for call in calls]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("members", [[1, 3], [1, 2, 3]], ids=str)
@world_sizes(4)
def test_members_alone_take_part(ranks: Ranks, op: str, members: list[int]) -> None:
    """Roots are global ranks here: `perform` translates them."""
    roots = range(len(members)) if op in ("reduce", "broadcast", "gather", "scatter") else [0]
    calls = [Call(op, (3,), root=root, salt=root) for root in roots]
    got = ranks.run(perform_in_group, members, calls)
    for index, call in enumerate(calls):
        assert_taken(call, [got[rank][index] for rank in members], ranks=members)


def by_group_rank(me: Me, op: str) -> Tensor | None:
    """The last member of [1, 3] is the root, by its rank in the group."""
    members = [1, 3]
    group = dist.new_group(members)
    x = sample((3,), "float32", me.rank).to(me.device)
    if me.rank not in members:
        return None
    at_root = me.rank == 3
    match op:
        case "broadcast":
            dist.broadcast(x, group=group, group_src=1)
        case "reduce":
            dist.reduce(x, group=group, group_dst=1)
        case "gather":
            outputs = [torch.zeros_like(x) for _ in members]
            dist.gather(x, outputs if at_root else None, group=group, group_dst=1)
            x = torch.cat(outputs) if at_root else x
        case _:
            parts = [sample((3,), "float32", me.rank, salt=i).to(me.device) for i in range(2)]
            dist.scatter(x, parts if at_root else None, group=group, group_src=1)
    return x


def expected_by_group_rank(op: str, rank: int) -> Tensor:
    own, first, last = (sample((3,), "float32", r) for r in (rank, 1, 3))
    match op:
        case "broadcast":
            return last
        case "reduce":
            return first + last
        case "gather":
            return torch.cat([first, last]) if rank == 3 else own
    return sample((3,), "float32", 3, salt=0 if rank == 1 else 1)


ROOTED = [
    pytest.param("broadcast", marks=covers("broadcast/subgroup")),
    pytest.param("reduce", marks=covers("reduce/subgroup")),
    pytest.param("gather", marks=covers("gather/subgroup")),
    pytest.param("scatter", marks=covers("scatter/subgroup")),
]


@pytest.mark.parametrize("op", ROOTED)
@world_sizes(4)
def test_a_root_by_its_rank_in_the_group(ranks: Ranks, op: str) -> None:
    got = ranks.run(by_group_rank, op)
    judged = [3] if op == "reduce" else [1, 3]
    want = [expected_by_group_rank(op, r) for r in judged]
    assert_each_rank([got[r] for r in judged], want, ranks=judged)
