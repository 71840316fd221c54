"""Which receive gets which message: tags, order, many pending, groups, collectives, threads."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    covers,
    deadline,
    needs,
    not_probed,
    world_sizes,
)
from conformance.oracle.data import dtype_named
from conformance.oracle.messages import Message, Post, content, posts, received
from conformance.spec.p2p.posting import post
from conformance.spec.parameters import dtypes

chapter = Chapter("p2p")


def behind(count: int, x: Tensor) -> Tensor:
    """The same values, `count` elements behind the start of their memory."""
    return torch.cat((x[:count], x))[count:]


def numbered(tag: int, dtype: str) -> Tensor:
    """Four whole numbers that each dtype has."""
    return (content(tag, 4) * 2 % 251).to(dtype_named(dtype))


def receive_the_later_tag_first(
    me: Me, tags: tuple[int, ...], dtype: str = "float32"
) -> list[Tensor]:
    """Rank 0 sends under each tag in turn; rank 1 receives them in the opposite order. Every other
    tensor begins behind the start of its memory."""
    if me.rank == 0:
        given = [behind(i % 2, numbered(tag, dtype).to(me.device)) for i, tag in enumerate(tags)]
        works = [post(x, 1, tag, is_send=True) for x, tag in zip(given, tags, strict=True)]
        for work in works:
            work.wait()
        return []
    got = []
    for index, tag in enumerate(reversed(tags)):
        x = behind(index % 2, torch.zeros(4, dtype=dtype_named(dtype), device=me.device))
        dist.recv(x, 0, tag=tag)
        got.append(x)
    return got


@chapter.must(
    "p2p/tags",
    "A receive takes a message of its own tag, even if messages of other tags came before.",
    source="torch 2.13 docs, send: 'Tag to match send with remote recv'; pytorch#94819",
    rests_on="p2p/delivers",
)
@world_sizes(2)
@pytest.mark.parametrize("tags", [(1, 2), (0, 7, 3), (1, 257, 65537), (2**31 - 1, 0)], ids=str)
def test_a_receive_takes_its_own_tag(ranks: Ranks, tags: tuple[int, ...]) -> None:
    got = ranks.run(receive_the_later_tag_first, tags)
    assert_each_rank(got[1:], [[numbered(tag, "float32") for tag in reversed(tags)]], ranks=[1])


@covers("p2p/tags")
@world_sizes(2)
@pytest.mark.parametrize("bit", [8, 12, 15, 16, 20, 23, 24, 28, 30])
def test_tags_that_differ_in_one_bit(ranks: Ranks, bit: int) -> None:
    tags = (5, 5 + 2**bit)
    got = ranks.run(receive_the_later_tag_first, tags)
    assert_each_rank(got[1:], [[numbered(tag, "float32") for tag in reversed(tags)]], ranks=[1])


@covers("p2p/tags")
@world_sizes(2)
@pytest.mark.parametrize("dtype", dtypes("bfloat16", "float16", "float64", "int32", "int64"))
def test_a_receive_of_any_dtype_takes_its_own_tag(ranks: Ranks, dtype: str) -> None:
    got = ranks.run(receive_the_later_tag_first, (1, 2), dtype)
    assert_each_rank(got[1:], [[numbered(tag, dtype) for tag in (2, 1)]], ranks=[1])


def three_messages(me: Me, numel: int) -> list[Tensor]:
    """Rank 0 has three messages under way before rank 1 takes the first."""
    buffers = [content(i, numel) if me.rank == 0 else torch.zeros(numel) for i in range(3)]
    buffers = [x.to(me.device) for x in buffers]
    if me.rank == 0:
        works = [post(x, 1, 0, is_send=True) for x in buffers]
        me.store.set("all posted", "1")
    else:
        me.store.wait(["all posted"])
        works = [post(x, 0, 0, is_send=False) for x in buffers]
    for work in reversed(works):
        work.wait()
    return buffers


@chapter.must(
    "p2p/order",
    "Messages from one rank to another under one tag arrive in the order in which they were sent.",
    source="torch 2.13 docs, batch_isend_irecv: 'The ordering does matter for multiple operations "
    "between the same pair of ranks in the same direction'",
    rests_on="p2p/delivers",
)
@world_sizes(2)
@pytest.mark.parametrize("numel", [1, 100_000], ids=["small", "large"])
def test_messages_of_one_tag_keep_their_order(ranks: Ranks, numel: int) -> None:
    want = [content(i, numel) for i in range(3)]
    assert_each_rank(ranks.run(three_messages, numel), [want, want])


_UNEQUAL = (1 << 20, 1, 1 << 18, 2)  # elements


def messages_of_unequal_sizes(me: Me) -> list[Tensor]:
    """Rank 0 has all of them under way before rank 1 takes the first."""
    buffers = [content(i, n) if me.rank == 0 else torch.zeros(n) for i, n in enumerate(_UNEQUAL)]
    buffers = [x.to(me.device) for x in buffers]
    if me.rank == 0:
        works = [post(x, 1, 0, is_send=True) for x in buffers]
        me.store.set("all posted", "1")
    else:
        me.store.wait(["all posted"])
        works = [post(x, 0, 0, is_send=False) for x in buffers]
    for work in works:
        work.wait()
    return buffers


@chapter.must(
    "p2p/order-of-sizes",
    "A small message does not overtake a large one that was sent earlier to the same rank under "
    "the same tag.",
    source="torch 2.13 docs, batch_isend_irecv: 'The ordering does matter'; derived: transports "
    "that send small messages at once and large ones when they are asked for",
    rests_on=("p2p/order", "p2p/does-not-block"),
)
@world_sizes(2)
@deadline(20)
def test_no_message_overtakes_a_larger_one(ranks: Ranks) -> None:
    want = [content(i, n) for i, n in enumerate(_UNEQUAL)]
    assert_each_rank(ranks.run(messages_of_unequal_sizes), [want, want])


_IN_A_ROW = 2 * (1, 1 << 20, 300_007, 2, 1 << 18, 3, 4, 5)  # elements: up to 4 MiB


def receive_the_last_of_another_tag_first(me: Me, source: int | None) -> list[Tensor]:
    """Rank 0 sends many messages under one tag, and then one under another tag, which rank 1
    receives before all others."""
    if me.rank == 0:
        given = [content(i, n).to(me.device) for i, n in enumerate((*_IN_A_ROW, 1))]
        tags = [3] * len(_IN_A_ROW) + [4]
        works = [post(x, 1, tag, is_send=True) for x, tag in zip(given, tags, strict=True)]
        for work in works:
            work.wait()
        return []
    got = [torch.zeros(n, device=me.device) for n in (*_IN_A_ROW, 1)]
    dist.recv(got[-1], 0, tag=4)
    for x in got[:-1]:
        dist.recv(x, source, tag=3)
    return got


BY_NAME_OR_NOT = [
    pytest.param(0, marks=covers("p2p/tags", "p2p/order"), id="named"),
    pytest.param(
        None,
        marks=[covers("p2p/any-source-each-once"), needs("feature:any_source"), not_probed()],
        id="any",
    ),
]


@world_sizes(2)
@deadline(20)
@pytest.mark.parametrize("source", BY_NAME_OR_NOT)
def test_many_messages_wait_behind_one_of_another_tag(ranks: Ranks, source: int | None) -> None:
    want = [content(i, n) for i, n in enumerate((*_IN_A_ROW, 1))]
    assert_each_rank(
        ranks.run(receive_the_last_of_another_tag_first, source)[1:], [want], ranks=[1]
    )


def receives_are_posted_first(me: Me) -> list[Tensor]:
    """Rank 1 has three receives of different sizes waiting before the first message is sent."""
    buffers = [content(i, i + 1) if me.rank == 0 else torch.zeros(i + 1) for i in range(3)]
    buffers = [x.to(me.device) for x in buffers]
    if me.rank == 0:
        me.store.wait(["all posted"])
        works = [post(x, 1, 5, is_send=True) for x in buffers]
    else:
        works = [post(x, 0, 5, is_send=False) for x in buffers]
        me.store.set("all posted", "1")
    for work in works:
        work.wait()
    return buffers


@covers("p2p/order")
@world_sizes(2)
def test_waiting_receives_are_served_in_their_order(ranks: Ranks) -> None:
    want = [content(i, i + 1) for i in range(3)]
    assert_each_rank(ranks.run(receives_are_posted_first), [want, want])


_MANY = 300


def many_pending(me: Me, first: int) -> Tensor:
    """One rank posts all of its sides before the other one posts the first."""
    buffers = torch.arange(float(_MANY), device=me.device) * (me.rank == 0)
    if me.rank != first:
        me.store.wait(["all posted"])
    works = [post(x, 1 - me.rank, is_send=me.rank == 0) for x in buffers.split(1)]
    if me.rank == first:
        me.store.set("all posted", "1")
    for work in works:
        work.wait()
    return buffers


@chapter.must(
    "p2p/many-pending",
    "Hundreds of messages between two ranks may be in progress at once, whichever side posts its "
    "part first.",
    source="derived: order/many-pending, for messages",
    rests_on=("p2p/order", "p2p/does-not-block"),
)
@world_sizes(2)
@pytest.mark.parametrize("first", [0, 1], ids=["sends first", "receives first"])
def test_hundreds_of_messages_at_once(ranks: Ranks, first: int) -> None:
    assert_each_rank(ranks.run(many_pending, first), [torch.arange(float(_MANY))] * 2)


def many_in_a_row(me: Me) -> Tensor:
    """1,100 messages of one element, a hundred at a time."""
    elements = torch.arange(1100.0, device=me.device) * (me.rank == 0)
    for hundred in elements.split(100):
        for work in [post(x, 1 - me.rank, is_send=me.rank == 0) for x in hundred.split(1)]:
            work.wait()
    return elements


@chapter.must(
    "p2p/many-in-a-row",
    "After a thousand messages between two ranks, the next one arrives like the first.",
    source="derived: order/many-in-a-row, for messages",
    rests_on="p2p/many-pending",
)
@world_sizes(2)
def test_a_thousand_messages_in_a_row(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(many_in_a_row), [torch.arange(1100.0)] * 2)


def run_program(me: Me, programs: list[list[Post]], waits: list[list[int]]) -> list[Tensor]:
    """Post everything in the given order, then wait in another one. Returns what was received."""
    mine = programs[me.rank]
    buffers = [content(p.number, p.numel) if p.is_send else torch.zeros(p.numel) for p in mine]
    buffers = [x.to(me.device) for x in buffers]
    works = [post(x, p.peer, p.tag, is_send=p.is_send) for x, p in zip(buffers, mine, strict=True)]
    for index in waits[me.rank]:
        if index < len(works):
            works[index].wait()
    return [x for x, p in zip(buffers, mine, strict=True) if not p.is_send]


@st.composite
def messages(draw: st.DrawFn, world_size: int) -> list[Message]:
    """Up to a dozen messages over few channels, so that they meet; some empty, some large."""
    rank = st.integers(0, world_size - 1)
    found = draw(st.lists(st.tuples(rank, rank, st.sampled_from([0, 1, 9])), max_size=12))
    numel = st.sampled_from([0, 1, 2, 33, 20_000])
    return [Message(src, dst, tag, draw(numel)) for src, dst, tag in found if src != dst]


@chapter.must(
    "p2p/any-order-of-posts",
    "Matching sends and receives complete in whatever order each rank posts them and waits for "
    "them.",
    source="torch 2.13 docs, isend and irecv",
    rests_on=("p2p/delivers", "p2p/tags", "p2p/order"),
)
@world_sizes(2, 3, 4, at_least=2)
@given(data=st.data())
@settings(max_examples=20)
def test_any_matching_program_of_messages_completes(ranks: Ranks, data: st.DataObject) -> None:
    n = ranks.world_size
    program = data.draw(messages(n))
    orders = [data.draw(st.permutations(range(2 * len(program)))) for _ in range(n)]
    waits = [data.draw(st.permutations(range(2 * len(program)))) for _ in range(n)]
    programs = posts(program, orders)
    got = ranks.run(run_program, programs, waits)
    assert_each_rank(got, [received(mine) for mine in programs])


def send_in_two_groups(me: Me) -> list[Tensor]:
    """Rank 0 sends in group A and then in group B; rank 1 receives in B first."""
    groups = [dist.new_group(), dist.new_group()]
    buffers = [content(i, 3) if me.rank == 0 else torch.zeros(3) for i in range(2)]
    buffers = [x.to(me.device) for x in buffers]
    if me.rank == 0:
        works = [dist.isend(x, 1, group=g) for x, g in zip(buffers, groups, strict=True)]
        for work in works:
            assert work is not None
            work.wait()
    elif me.rank == 1:
        for index in (1, 0):
            dist.recv(buffers[index], 0, group=groups[index])
    return buffers


@chapter.must(
    "p2p/groups-are-apart",
    "Messages between the same ranks under the same tag do not mix when they are sent in "
    "different groups.",
    source="torch 2.13 docs, new_group",
    rests_on="p2p/delivers",
)
@world_sizes(2, 3)
def test_messages_of_two_groups_do_not_mix(ranks: Ranks) -> None:
    sent = [content(i, 3) for i in range(2)]
    others = [[torch.zeros(3)] * 2] * (ranks.world_size - 2)
    assert_each_rank(ranks.run(send_in_two_groups), [sent, sent, *others])


def collectives_between(me: Me, tag: int) -> tuple[Tensor, list[Tensor]]:
    """A message is under way during three collectives; the receive comes after them."""
    sums = [torch.full((4,), float(me.rank + i), device=me.device) for i in range(3)]
    got = torch.zeros(4, device=me.device)
    right, left = (me.rank + 1) % me.world_size, (me.rank - 1) % me.world_size
    sent = content(me.rank, 4).to(me.device)
    sending = post(sent, right, tag, is_send=True)
    reductions = [dist.all_reduce(x, async_op=True) for x in sums]
    receiving = post(got, left, tag, is_send=False)
    for work in (receiving, sending, *reductions):
        work.wait()
    return got, sums


@chapter.must(
    "p2p/beside-collectives",
    "Messages and collectives in progress in one group at the same time do not disturb each "
    "other, whatever the tag.",
    source="torch 2.13 docs, send: 'Tag to match send with remote recv'",
    rests_on=("p2p/delivers", "all_reduce/sum"),
)
@world_sizes(2, 3, 4, at_least=2)
@pytest.mark.parametrize("tag", [0, 1, 2], ids=lambda tag: f"tag{tag}")
def test_messages_and_collectives_do_not_disturb_each_other(ranks: Ranks, tag: int) -> None:
    n = ranks.world_size
    sums = [torch.full((4,), float(sum(range(n)) + n * i)) for i in range(3)]
    got = ranks.run(collectives_between, tag)
    assert_each_rank(got, [(content((rank - 1) % n, 4), sums) for rank in range(n)])


def exchange_from_threads(me: Me, threads: int, rounds: int) -> list[list[Tensor]]:
    """Each thread exchanges messages with the same thread of the other rank."""
    got: list[list[Tensor]] = [[] for _ in range(threads)]

    def work(tag: int) -> None:
        for i in range(rounds):
            sent = content(100 * me.rank + 10 * tag + i, 8).to(me.device)
            x = torch.zeros(8, device=me.device)
            sending = post(sent, 1 - me.rank, tag, is_send=True)
            dist.recv(x, 1 - me.rank, tag=tag)
            sending.wait()
            got[tag].append(x)

    running = [threading.Thread(target=work, args=(tag,)) for tag in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return got


@chapter.should(
    "p2p/threads",
    "Threads of one process may exchange messages at the same time, each under its own tag.",
    source="observed, torch 2.13.0 gloo",
    rests_on="p2p/tags",
)
@world_sizes(2)
@deadline(20)
def test_threads_exchange_messages_under_tags_of_their_own(ranks: Ranks) -> None:
    want = [
        [[content(100 * peer + 10 * tag + i, 8) for i in range(5)] for tag in range(3)]
        for peer in (1, 0)
    ]
    assert_each_rank(ranks.run(exchange_from_threads, 3, 5), want)
