"""Peers of messages: global or group ranks, the rank itself, invalid peers, tags and sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, deadline, not_probed, world_sizes
from conformance.oracle.messages import content
from conformance.spec.p2p.posting import post

chapter = Chapter("p2p")


def message_to_myself(me: Me, receive_first: bool) -> Tensor:
    got = torch.zeros(3, device=me.device)
    sent = content(me.rank, 3).to(me.device)
    kinds = (False, True) if receive_first else (True, False)
    works = [post(sent if is_send else got, me.rank, is_send=is_send) for is_send in kinds]
    for work in works:
        work.wait()
    return got


@chapter.should(
    "p2p/to-oneself",
    "isend and irecv deliver a message from a rank to itself.",
    source="torch 2.13 docs, isend: 'Unlike send, which is blocking, isend allows src == dst rank'",
    rests_on="p2p/delivers",
)
@world_sizes(1, 2)
@deadline(10)
@pytest.mark.parametrize("receive_first", [False, True], ids=["isend first", "irecv first"])
def test_a_rank_can_send_to_itself(ranks: Ranks, receive_first: bool) -> None:
    got = ranks.run(message_to_myself, receive_first)
    assert_each_rank(got, [content(rank, 3) for rank in range(ranks.world_size)])


def block_on_myself(me: Me) -> None:
    x = torch.zeros(1, device=me.device)
    with pytest.raises(ValueError, match="Invalid destination rank"):
        dist.send(x, me.rank)
    with pytest.raises(ValueError, match="Invalid destination rank"):
        dist.send(x, group_dst=me.rank)


@chapter.must(
    "p2p/blocking-to-oneself",
    "send and recv with the rank itself as peer raise a ValueError that says which rank is "
    "invalid.",
    source="torch/distributed/distributed_c10d.py of torch 2.13, send and recv",
)
@world_sizes(1, 2)
def test_a_blocking_send_to_oneself_is_refused(ranks: Ranks) -> None:
    ranks.run(block_on_myself)


def name_the_peer_wrongly(me: Me) -> None:
    x = torch.zeros(1, device=me.device)
    sends: list[Callable[..., object]] = [dist.isend, dist.send]
    for send in sends:
        with pytest.raises(ValueError, match="Can't specify both"):
            send(x, 1 - me.rank, group_dst=1 - me.rank)
        with pytest.raises(ValueError, match="Must specify"):
            send(x)
    receives: list[Callable[..., object]] = [dist.irecv, dist.recv]
    for receive in receives:
        with pytest.raises(ValueError, match="Can't specify both"):
            receive(x, 1 - me.rank, group_src=1 - me.rank)


@chapter.must(
    "p2p/peer-arguments",
    "A peer is given as a global rank or as a rank of the group: both at once, or neither for a "
    "send, raise a ValueError.",
    source="torch 2.13 docs, send: 'Invalid to specify both dst and group_dst'",
)
@world_sizes(2)
def test_a_peer_is_named_in_one_way(ranks: Ranks) -> None:
    ranks.run(name_the_peer_wrongly)


def send_no_tensor(me: Me) -> None:
    calls: list[Callable[..., object]] = [dist.isend, dist.irecv, dist.send, dist.recv]
    for value in ([torch.zeros(1)], "text", 3, None):
        for call in calls:
            with pytest.raises(TypeError, match=r"torch\.Tensor"):
                call(value, 1 - me.rank)


@chapter.must(
    "p2p/needs-a-tensor",
    "Anything other than a tensor is refused with a TypeError.",
    source="torch/distributed/distributed_c10d.py of torch 2.13, isend and irecv",
)
@world_sizes(2)
def test_only_tensors_can_be_sent(ranks: Ranks) -> None:
    ranks.run(send_no_tensor)


def exchange(me: Me, x: Tensor) -> float:
    """What comes from the other of two ranks."""
    sent = post(x, 1 - me.rank, is_send=True)
    received = torch.empty_like(x)
    dist.recv(received, 1 - me.rank)
    sent.wait()
    return received.item()


def use_a_negative_tag(me: Me, is_send: bool) -> float:
    """What arrives afterwards, by right calls."""
    x = torch.full((1,), float(me.rank), device=me.device)
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)\btag\b"):
        post(x, 1 - me.rank, -1, is_send=is_send)
    return exchange(me, x)


@chapter.should(
    "p2p/negative-tag",
    "A negative tag is refused, on the rank that gives it, with an error that speaks of the tag, "
    "and the group keeps working.",
    source="observed, torch 2.13.0 gloo",
    rests_on="p2p/delivers",
)
@world_sizes(2)
@not_probed()
@pytest.mark.parametrize("is_send", [True, False], ids=["isend", "irecv"])
def test_a_negative_tag_is_refused(ranks: Ranks, is_send: bool) -> None:
    assert_each_rank(ranks.run(use_a_negative_tag, is_send), [1.0, 0.0])


def send_after_what_is_no_tag(me: Me, tag: Any) -> float:
    x = torch.full((1,), float(me.rank), device=me.device)
    for is_send in (True, False):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            post(x, 1 - me.rank, tag, is_send=is_send)
    return exchange(me, x)


@chapter.should(
    "p2p/no-tag",
    "A tag that is not a 32-bit integer is refused with a TypeError, ValueError or OverflowError, "
    "and the group keeps working.",
    source="observed, torch 2.13.0 gloo: 'incompatible function arguments'",
    rests_on="p2p/delivers",
)
@world_sizes(2)
@not_probed()
@pytest.mark.parametrize("tag", [1.0, "1", 1 << 31], ids=["float", "text", "of 33 bits"])
def test_what_is_no_tag_is_refused(ranks: Ranks, tag: Any) -> None:
    assert_each_rank(ranks.run(send_after_what_is_no_tag, tag), [1.0, 0.0])


def talk_to_nobody(me: Me, peer: int, is_send: bool) -> None:
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        post(torch.zeros(1, device=me.device), peer, is_send=is_send).wait()


@chapter.must(
    "p2p/peer-out-of-range",
    "A peer that does not exist in the world is refused with an error, and the process does not "
    "end.",
    source="torch 2.13 docs, isend; torch 2.13.0 gloo reads past its table of peers",
    needs="op:send",
)
@world_sizes(2)
@deadline(4)
@not_probed()
@pytest.mark.parametrize(
    ("peer", "is_send"),
    [(2, True), (1 << 30, False), (-1, False)],
    ids=["isend one past the last", "irecv far past the last", "irecv negative"],
)
def test_a_peer_that_does_not_exist_is_refused(ranks: Ranks, peer: int, is_send: bool) -> None:
    ranks.run(talk_to_nobody, peer, is_send)


def messages_of_another_size(me: Me, sent: int, received: int) -> None:
    """The receiver must not take a message of another size for its own."""
    if me.rank == 0:
        work = post(torch.ones(sent, device=me.device), 1, is_send=True)
        me.store.wait(["receiver is done"])
        del work
        return
    try:
        with pytest.raises((RuntimeError, ValueError)):
            dist.recv(torch.zeros(received, device=me.device), 0)
    finally:
        me.store.set("receiver is done", "1")


@chapter.must(
    "p2p/longer-message",
    "A receive whose tensor is smaller than the message raises, and the process does not end.",
    source="gloo: 'Received data size doesn't match expected size', which ends the process",
    needs="feature:mismatch_errors",
    rests_on="p2p/delivers",
)
@world_sizes(2)
@deadline(5)
@not_probed()
def test_a_message_longer_than_the_tensor_is_refused(ranks: Ranks) -> None:
    ranks.run(messages_of_another_size, 8, 4)


@chapter.must(
    "p2p/shorter-message",
    "A receive whose tensor is larger than the message raises instead of leaving the end of the "
    "tensor unchanged.",
    source="torch 2.13 docs, recv; torch 2.13.0 gloo accepts it without a word",
    needs="feature:mismatch_errors",
    rests_on="p2p/delivers",
)
@world_sizes(2)
@deadline(5)
@not_probed()
def test_a_message_shorter_than_the_tensor_is_refused(ranks: Ranks) -> None:
    ranks.run(messages_of_another_size, 4, 8)


_HOW_TO_NAME = ["global ranks", "group ranks"]


def exchange_in_a_subgroup(me: Me, by_group_rank: bool) -> Tensor:
    """In the group of all ranks but 0, each member sends to the one before it."""
    members = list(range(1, me.world_size))
    group = dist.new_group(members)
    got = torch.zeros(3, device=me.device)
    if me.rank not in members:
        return got
    mine = members.index(me.rank)
    to, source = (mine - 1) % len(members), (mine + 1) % len(members)
    sent = content(me.rank, 3).to(me.device)
    if by_group_rank:
        work = dist.isend(sent, group=group, group_dst=to)
        returned = dist.recv(got, group=group, group_src=source)
    else:
        work = dist.isend(sent, members[to], group=group)
        returned = dist.recv(got, members[source], group=group)
    assert work is not None
    work.wait()
    assert returned == members[source], f"recv returned {returned}, want {members[source]}"
    return got


@chapter.must(
    "p2p/subgroup-peers",
    "In a subgroup dst and src are global ranks, group_dst and group_src are ranks of the group.",
    source="torch 2.13 docs, send: 'Destination rank on global process group (regardless of group "
    "argument)'",
    rests_on="p2p/delivers",
)
@world_sizes(3, 4)
@pytest.mark.parametrize("by_group_rank", [False, True], ids=_HOW_TO_NAME)
def test_peers_in_a_subgroup(ranks: Ranks, by_group_rank: bool) -> None:
    n = ranks.world_size
    got = ranks.run(exchange_in_a_subgroup, by_group_rank)
    after = [2, *range(3, n), 1]
    assert_each_rank(got, [torch.zeros(3), *(content(src, 3) for src in after)])


def talk_past_the_group(me: Me) -> None:
    """Rank 0 is not in the group of the others."""
    group = dist.new_group(list(range(1, me.world_size)))
    x = torch.zeros(1, device=me.device)
    if me.rank == 0:
        return
    calls: list[Callable[..., object]] = [dist.isend, dist.send, dist.irecv, dist.recv]
    for call in calls:
        with pytest.raises(ValueError, match="not part of group"):
            call(x, 0, group=group)


@chapter.must(
    "p2p/peer-outside-the-group",
    "A global rank outside the subgroup is refused with a ValueError that says 'not part of "
    "group'.",
    source="torch/distributed/distributed_c10d.py of torch 2.13, get_group_rank",
)
@world_sizes(2, 3)
def test_a_peer_outside_the_group_is_refused(ranks: Ranks) -> None:
    ranks.run(talk_past_the_group)
