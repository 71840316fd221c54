"""batch_isend_irecv and P2POp: results, order, subgroups and invalid arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, covers, deadline, world_sizes
from conformance.oracle.messages import content

chapter = Chapter("p2p", source="torch 2.13 docs, batch_isend_irecv")


def ring(me: Me, receive_first: bool) -> Tensor:
    """To the right and from the left, in one batch."""
    got = torch.zeros(4, device=me.device)
    sent = content(me.rank, 4).to(me.device)
    right, left = (me.rank + 1) % me.world_size, (me.rank - 1) % me.world_size
    batch = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(batch[::-1] if receive_first else batch):
        work.wait()
    return got


@chapter.must(
    "p2p/batch",
    "batch_isend_irecv carries out every operation of its list and returns handles that can be "
    "waited for.",
    rests_on="p2p/delivers",
)
@world_sizes(2, 3, 5, at_least=2)
@pytest.mark.parametrize("receive_first", [False, True], ids=["send first", "receive first"])
def test_a_batch_goes_around_a_ring(ranks: Ranks, receive_first: bool) -> None:
    n = ranks.world_size
    got = ranks.run(ring, receive_first)
    assert_each_rank(got, [content((rank - 1) % n, 4) for rank in range(n)])


def tagged(me: Me) -> list[Tensor]:
    """Both ranks send by falling tags what the other one receives by rising tags."""
    got, batch = [torch.zeros(4, device=me.device) for _ in range(3)], []
    for tag in (2, 1, 0):
        sent = content(10 * me.rank + tag, 4).to(me.device)
        batch.append(dist.P2POp(dist.isend, sent, 1 - me.rank, tag=tag))
    batch += [dist.P2POp(dist.irecv, got[tag], 1 - me.rank, tag=tag) for tag in range(3)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return got


@chapter.must(
    "p2p/batch-tags",
    "In a batch each message goes to the receive of its tag, whatever the order of both.",
    source="torch 2.13 docs, P2POp: tag, 'Tag to match send with recv'",
    rests_on=("p2p/batch", "p2p/tags"),
)
@world_sizes(2)
def test_a_batch_with_tags(ranks: Ranks) -> None:
    got = ranks.run(tagged)
    assert_each_rank(got, [[content(10 * (1 - r) + tag, 4) for tag in range(3)] for r in range(2)])


def all_pairs(me: Me) -> list[Tensor]:
    """All pairs of ranks exchange tensors of different sizes, in one batch per rank."""
    n = me.world_size
    got = [torch.zeros(10 * src + me.rank, device=me.device) for src in range(n)]
    batch = []
    for peer in range(n):
        if peer != me.rank:
            numel = 10 * me.rank + peer
            batch.append(dist.P2POp(dist.irecv, got[peer], peer))
            batch.append(dist.P2POp(dist.isend, content(numel, numel).to(me.device), peer))
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return [x for src, x in enumerate(got) if src != me.rank]


@covers("p2p/batch")
@world_sizes(2, 4)
def test_a_batch_between_all_pairs(ranks: Ranks) -> None:
    n = ranks.world_size
    got = ranks.run(all_pairs)
    want = [
        [content(10 * src + dst, 10 * src + dst) for src in range(n) if src != dst]
        for dst in range(n)
    ]
    assert_each_rank(got, want)


def many_to_the_right(me: Me) -> Tensor:
    """Forty messages to the right and from the left, in one batch."""
    sent, got = content(me.rank, 80).view(40, 2).to(me.device), torch.zeros(40, 2, device=me.device)
    right, left = (me.rank + 1) % me.world_size, (me.rank - 1) % me.world_size
    batch = []
    for x, y in zip(sent.unbind(), got.unbind(), strict=True):
        batch += [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return got


@covers("p2p/batch")
@world_sizes(2, 3)
def test_a_batch_of_many(ranks: Ranks) -> None:
    n = ranks.world_size
    want = [content((rank - 1) % n, 80).view(40, 2) for rank in range(n)]
    assert_each_rank(ranks.run(many_to_the_right), want)


def several_in_one_direction(me: Me) -> list[Tensor]:
    """Four large messages each way; all receives come first in one rank's list, last in the
    other's."""
    numel = 100_000
    got = [torch.zeros(numel, device=me.device) for _ in range(4)]
    peer = 1 - me.rank
    sends = [
        dist.P2POp(dist.isend, content(10 * me.rank + i, numel).to(me.device), peer)
        for i in range(4)
    ]
    receives = [dist.P2POp(dist.irecv, x, peer) for x in got]
    batch = receives + sends if me.rank == 0 else sends + receives
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return got


@chapter.must(
    "p2p/batch-order",
    "Receives before sends in a batch do not deadlock, and operations between one pair of ranks "
    "in one direction match in their order.",
    rests_on=("p2p/batch", "p2p/order"),
)
@world_sizes(2)
@deadline(20)
def test_a_batch_keeps_the_order_of_each_direction(ranks: Ranks) -> None:
    got = ranks.run(several_in_one_direction)
    want = [[content(10 * peer + i, 100_000) for i in range(4)] for peer in (1, 0)]
    assert_each_rank(got, want)


def batch_in_a_subgroup(me: Me, by_group_rank: bool) -> Tensor:
    """In the group of all ranks but 0, each rank sends to the next member."""
    members = list(range(1, me.world_size))
    group = dist.new_group(members)
    got = torch.zeros(2, device=me.device)
    if me.rank not in members:
        return got
    mine = members.index(me.rank)
    to, source = (mine + 1) % len(members), (mine - 1) % len(members)
    sent = content(me.rank, 2).to(me.device)
    if by_group_rank:
        batch = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=to),
            dist.P2POp(dist.irecv, got, group=group, group_peer=source),
        ]
    else:
        batch = [
            dist.P2POp(dist.isend, sent, members[to], group),
            dist.P2POp(dist.irecv, got, members[source], group),
        ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return got


@chapter.must(
    "p2p/batch-in-a-subgroup",
    "P2POp takes its peer as a global rank or as group_peer, a rank of its group.",
    source="torch 2.13 docs, P2POp",
    rests_on=("p2p/batch", "p2p/subgroup-peers"),
)
@world_sizes(3, 4)
@pytest.mark.parametrize("by_group_rank", [False, True], ids=["global ranks", "group ranks"])
def test_a_batch_in_a_subgroup(ranks: Ranks, by_group_rank: bool) -> None:
    n = ranks.world_size
    got = ranks.run(batch_in_a_subgroup, by_group_rank)
    before = [n - 1, *range(1, n - 1)]
    assert_each_rank(got, [torch.zeros(2), *(content(src, 2) for src in before)])


def batch_badly(me: Me) -> None:
    x = torch.zeros(1, device=me.device)
    peer = 1 - me.rank
    other_group = dist.new_group()
    send: Any = dist.send  # not of the type that P2POp is declared to take
    refused: list[tuple[type[Exception], Callable[[], object]]] = [
        (ValueError, lambda: dist.P2POp(send, x, peer)),
        (TypeError, lambda: dist.P2POp(dist.isend, [x], peer)),  # type: ignore[arg-type]  # on purpose
        (ValueError, lambda: dist.P2POp(dist.isend, x)),
        (ValueError, lambda: dist.P2POp(dist.isend, x, peer, group_peer=peer)),
        (ValueError, lambda: dist.batch_isend_irecv([x])),  # type: ignore[list-item]  # on purpose
        (
            ValueError,
            lambda: dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, x, peer),
                    dist.P2POp(dist.irecv, x, peer, other_group),
                ]
            ),
        ),
    ]
    for number, (kind, call) in enumerate(refused):
        try:
            call()
        except kind:
            continue
        pytest.fail(f"call {number} was accepted")


@chapter.must(
    "p2p/batch-arguments",
    "P2POp and batch_isend_irecv raise a ValueError for operations other than isend and irecv, "
    "for objects that are not a P2POp, and for operations of different groups.",
    source="torch/distributed/distributed_c10d.py of torch 2.13, _check_op and _check_p2p_op_list",
)
@world_sizes(2)
def test_bad_batches_are_refused(ranks: Ranks) -> None:
    ranks.run(batch_badly)
