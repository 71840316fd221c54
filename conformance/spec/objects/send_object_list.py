"""send_object_list and recv_object_list: delivery, batches, subgroups and wrong peers."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from conformance import Chapter, Me, Ranks, assert_each_rank, covers, world_sizes
from conformance.spec.objects.payloads import things_of
from conformance.spec.torch_versions import needs_argument

chapter = Chapter("objects")


def pass_things_on(me: Me, arguments: dict[str, Any]) -> tuple[int, list[Any]] | None:
    """Rank 0 sends its things to the last rank."""
    last = me.world_size - 1
    mine = things_of(me.rank)
    if me.rank == 0:
        dist.send_object_list(mine, last, **arguments)
    elif me.rank == last:
        mine = ["before"] * len(mine)
        return dist.recv_object_list(mine, 0, **arguments), mine
    return None


@chapter.must(
    "send_object_list/delivers",
    "recv_object_list fills its list with the objects that send_object_list was given, and "
    "returns the global rank of the sender.",
    source="torch 2.13 docs, send_object_list and recv_object_list",
    needs=("dtype:uint8", "dtype:int64"),
    rests_on=("p2p/delivers", "p2p/order"),
)
@world_sizes(2, 3)
def test_objects_are_sent_and_received(ranks: Ranks) -> None:
    last = ranks.world_size - 1
    assert_each_rank(ranks.run(pass_things_on, {})[-1:], [(0, things_of(0))], ranks=[last])


@chapter.must(
    "send_object_list/batch",
    "With use_batch, the same objects are sent and received by batch_isend_irecv; the sender is a "
    "global rank in a subgroup, too.",
    source="torch 2.13 docs, send_object_list",
    rests_on=("send_object_list/delivers", "p2p/batch"),
)
@world_sizes(2, 3)
@needs_argument(dist.send_object_list, "use_batch")
def test_objects_are_sent_in_batches(ranks: Ranks) -> None:
    last = ranks.world_size - 1
    got = ranks.run(pass_things_on, {"use_batch": True})
    assert_each_rank(got[-1:], [(0, things_of(0))], ranks=[last])


def two_lists_to_each(me: Me) -> list[Any]:
    """Rank 0 sends two lists to every other rank, of other lengths to each."""
    got: list[Any] = []
    if me.rank == 0:
        for peer in range(1, me.world_size):
            dist.send_object_list([peer] * peer, peer)
            dist.send_object_list([f"second to {peer}"], peer)
    else:
        got = [[None] * me.rank, [None]]
        for told in got:
            dist.recv_object_list(told, 0)
    return got


@covers("send_object_list/delivers")
@world_sizes(2, 3, 4, at_least=2)
def test_lists_arrive_in_their_order(ranks: Ranks) -> None:
    want: list[Any] = [[[r] * r, [f"second to {r}"]] for r in range(1, ranks.world_size)]
    assert_each_rank(ranks.run(two_lists_to_each), [[], *want])


def send_in_a_subgroup(me: Me, by_group_rank: bool) -> tuple[int, list[Any]] | None:
    """From global rank 2, group rank 1, to global rank 1, group rank 0."""
    group = dist.new_group([1, 2])
    told = [f"from {me.rank}"]
    if me.rank == 2:
        peer: dict[str, Any] = {"group_dst": 0} if by_group_rank else {"dst": 1}
        dist.send_object_list(told, group=group, **peer)
    elif me.rank == 1:
        peer = {"group_src": 1} if by_group_rank else {"src": 2}
        return dist.recv_object_list(told, group=group, **peer), told
    return None


@covers("send_object_list/delivers")
@world_sizes(3, 4)
@pytest.mark.parametrize("by_group_rank", [False, True], ids=["global rank", "group rank"])
def test_objects_are_sent_in_a_subgroup(ranks: Ranks, by_group_rank: bool) -> None:
    got = ranks.run(send_in_a_subgroup, by_group_rank)
    assert_each_rank(got[1:2], [(2, ["from 2"])], ranks=[1])


def send_batches_in_a_subgroup(me: Me) -> tuple[int, list[Any]] | None:
    """As above, by batch_isend_irecv."""
    group = dist.new_group([1, 2])
    told = [f"from {me.rank}", me.rank]
    if me.rank == 2:
        dist.send_object_list(told, 1, group=group, use_batch=True)
    elif me.rank == 1:
        return dist.recv_object_list(told, 2, group=group, use_batch=True), told
    return None


@covers("send_object_list/batch")
@world_sizes(3)
@needs_argument(dist.send_object_list, "use_batch")
def test_objects_are_sent_in_batches_in_a_subgroup(ranks: Ranks) -> None:
    got = ranks.run(send_batches_in_a_subgroup)
    assert_each_rank(got[1:2], [(2, ["from 2", 2])], ranks=[1])


def name_no_peer(me: Me) -> None:
    with pytest.raises(ValueError, match="Invalid destination rank"):
        dist.send_object_list([1], me.rank)
    with pytest.raises(ValueError, match="Invalid source rank"):
        dist.recv_object_list([1], me.rank)
    with pytest.raises(ValueError, match="Must specify"):
        dist.send_object_list([1])


@chapter.must(
    "send_object_list/arguments",
    "Naming the rank itself as peer, or no peer at all, raises a ValueError.",
    source="torch/distributed/distributed_c10d.py of torch 2.13, send_object_list and "
    "recv_object_list",
)
@world_sizes(1, 2)
def test_wrong_peers_are_refused(ranks: Ranks) -> None:
    ranks.run(name_no_peer)
