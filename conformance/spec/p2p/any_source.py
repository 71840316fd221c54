"""recv and irecv without a source: the sender's rank, order, tags and subgroups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_that,
    covers,
    not_probed,
    world_sizes,
)
from conformance.oracle.messages import content

chapter = Chapter("p2p", needs="feature:any_source")


def one_from_each(me: Me) -> dict[int, Tensor]:
    """The last rank takes one message of every other rank, in any order."""
    last = me.world_size - 1
    if me.rank != last:
        dist.send(content(me.rank, 6).to(me.device), last)
        return {}
    got = {}
    for _ in range(last):
        x = torch.zeros(6, device=me.device)
        got[dist.recv(x)] = x
    return dict(sorted(got.items()))


@not_probed()
@chapter.must(
    "p2p/any-source",
    "recv without a source takes a message from any rank that sent one, and returns the global "
    "rank of the sender.",
    source="torch 2.13 docs, recv: 'Will receive from any process if unspecified'",
    rests_on="p2p/delivers",
)
@world_sizes(2, 3, 4, at_least=2)
def test_recv_from_anybody_returns_the_sender(ranks: Ranks) -> None:
    got = ranks.run(one_from_each)
    assert_each_rank(got[-1:], [{src: content(src, 6) for src in range(ranks.world_size - 1)}])


def only_the_late_one(me: Me) -> int:
    """Rank 0 receives from any source before any rank has sent; only the last rank sends."""
    x = torch.zeros(2, device=me.device)
    if me.rank == 0:
        work = dist.irecv(x)
        me.store.set("waiting", "1")
        assert work is not None
        work.wait()
        return work.source_rank()
    if me.rank == me.world_size - 1:
        me.store.wait(["waiting"])
        dist.send(content(0, 2).to(me.device), 0)
    return me.world_size - 1


@not_probed()
@covers("p2p/any-source", "p2p/source-rank")
@world_sizes(2, 3)
def test_a_waiting_receive_takes_whoever_comes(ranks: Ranks) -> None:
    n = ranks.world_size
    assert_each_rank(ranks.run(only_the_late_one), [n - 1] * n)


def a_stream_from_each(me: Me, count: int) -> dict[int, list[Tensor]]:
    """Rank 0 takes `count` messages of every other rank, without saying from whom."""
    got: dict[int, list[Tensor]] = {src: [] for src in range(1, me.world_size)}
    if me.rank == 0:
        for _ in range(count * (me.world_size - 1)):
            x = torch.zeros(3, device=me.device)
            got[dist.recv(x)].append(x)
    else:
        for i in range(count):
            dist.send(content(10 * me.rank + i, 3).to(me.device), 0)
    return got


@not_probed()
@chapter.must(
    "p2p/any-source-each-once",
    "Receives without a source get every message of every sender once, and the messages of one "
    "sender in their order.",
    source="torch 2.13 docs, recv",
    rests_on=("p2p/any-source", "p2p/order"),
)
@world_sizes(2, 3, 4, at_least=2)
def test_messages_from_anybody_come_once_and_in_order(ranks: Ranks) -> None:
    n = ranks.world_size
    got = ranks.run(a_stream_from_each, 5)
    want = {src: [content(10 * src + i, 3) for i in range(5)] for src in range(1, n)}
    assert_each_rank(got[:1], [want])


def anybody_under_a_tag(me: Me) -> list[Tensor]:
    """Two messages under two tags are there before the first receive from any source."""
    if me.rank == 0:
        works = [dist.isend(content(tag, 2).to(me.device), 1, tag=tag) for tag in (4, 3)]
        me.store.set("sent", "1")
        for work in works:
            assert work is not None
            work.wait()
        return []
    me.store.wait(["sent"])
    got = [torch.zeros(2, device=me.device) for _ in range(2)]
    for x, tag in zip(got, (3, 4), strict=True):
        dist.recv(x, tag=tag)
    return got


@not_probed()
@chapter.must(
    "p2p/any-source-tag",
    "A receive without a source takes only messages of its own tag.",
    source="torch 2.13 docs, irecv",
    rests_on=("p2p/any-source", "p2p/tags"),
)
@world_sizes(2)
def test_a_receive_from_anybody_keeps_to_its_tag(ranks: Ranks) -> None:
    got = ranks.run(anybody_under_a_tag)
    assert_each_rank(got[1:], [[content(3, 2), content(4, 2)]], ranks=[1])


def named_and_unnamed(me: Me) -> list[int]:
    """Rank 0 names rank 1 first, so what it receives from any source can only be from rank 2."""
    x = torch.zeros(1, device=me.device)
    if me.rank == 0:
        return [dist.recv(x, 1), dist.recv(x)]
    dist.send(x, 0)
    return []


@not_probed()
@covers("p2p/any-source-each-once")
@world_sizes(3)
def test_named_and_unnamed_receives_share_out_the_messages(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(named_and_unnamed)[:1], [[1, 2]])


def sources_of_handles(me: Me) -> list[tuple[int, int]]:
    """For two receives of rank 0: the source that the handle tells, and the one in the message."""
    if me.rank:
        dist.send(torch.tensor([float(me.rank)], device=me.device), 0)
        return []
    buffers = [torch.zeros(1, device=me.device) for _ in range(2)]
    works = [dist.irecv(x) for x in buffers]
    for work in works:
        assert work is not None
        work.wait()
    return [(w.source_rank() if w else -1, int(x)) for w, x in zip(works, buffers, strict=True)]


@not_probed()
@chapter.must(
    "p2p/source-of-each-handle",
    "The handle of a receive without a source returns the sender of its own message, even after "
    "later messages were received.",
    source="torch 2.13, Work.source_rank",
    rests_on=("p2p/any-source-each-once", "p2p/source-rank"),
)
@world_sizes(3)
def test_each_handle_tells_its_own_source(ranks: Ranks) -> None:
    told = ranks.run(sources_of_handles)[0]
    right = all(source == sender for source, sender in told)
    assert_that(
        right, f"the handles tell {[s for s, _ in told]}, sent by {[s for _, s in told]}", 0
    )


def anybody_in_a_subgroup(me: Me) -> tuple[int, int] | None:
    """In the group of all ranks but 0, the last rank receives from the first but one."""
    members = list(range(1, me.world_size))
    group = dist.new_group(members)
    x = torch.zeros(2, device=me.device)
    if me.rank == 1:
        dist.send(x, members[-1], group=group)
        dist.send(x, members[-1], group=group)
    elif me.rank == members[-1]:
        source = dist.recv(x, group=group)
        work = dist.irecv(x, group=group)
        assert work is not None
        work.wait()
        return source, work.source_rank()
    return None


@not_probed()
@chapter.must(
    "p2p/any-source-in-a-subgroup",
    "In a subgroup, recv without a source returns the sender's global rank, while the handle of "
    "an irecv gives the sender's rank in the group.",
    source="torch/distributed/distributed_c10d.py of torch 2.13, recv",
    rests_on=("p2p/any-source", "p2p/subgroup-peers"),
)
@world_sizes(3, 4)
def test_the_source_in_a_subgroup_is_a_global_rank(ranks: Ranks) -> None:
    got = ranks.run(anybody_in_a_subgroup)[-1]
    assert_that(got == (1, 0), f"recv returned {got[0]}, want 1; the handle {got[1]}, want 0")
