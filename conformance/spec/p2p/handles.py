"""Work objects of isend and irecv: nonblocking calls, completion, wait timeouts, futures."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

import pytest
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
    deadline,
    needs,
    not_probed,
    world_sizes,
)
from conformance.oracle.messages import content
from conformance.spec.p2p.posting import post
from conformance.spec.waiting import all_are_here, let_the_device_finish, rounds_of_messages

chapter = Chapter("p2p")


_LARGE = 1 << 20


def return_before_the_other_side_comes(me: Me) -> Tensor:
    """Each rank posts before the other one may do anything, first the send, then the receive."""
    sent = content(me.rank, _LARGE).to(me.device)
    got = torch.zeros(_LARGE, device=me.device)
    if me.rank == 0:
        sending = post(sent, 1, is_send=True)
        receiving = post(got, 1, is_send=False)
        me.store.set("posted", "1")
    else:
        me.store.wait(["posted"])
        receiving = post(got, 0, is_send=False)
        sending = post(sent, 0, is_send=True)
    sending.wait()
    receiving.wait()
    return got


@chapter.must(
    "p2p/does-not-block",
    "isend and irecv return without waiting for the other side, however large the tensor.",
    source="torch 2.13 docs, isend: 'Send a tensor asynchronously'",
    rests_on="p2p/delivers",
)
@world_sizes(2)
@deadline(20)
def test_posting_does_not_wait_for_the_other_side(ranks: Ranks) -> None:
    got = ranks.run(return_before_the_other_side_comes)
    assert_each_rank(got, [content(1, _LARGE), content(0, _LARGE)])


def everybody_sends_first(me: Me) -> list[Tensor]:
    """To all others at once, and only then a receive from each."""
    others = [rank for rank in range(me.world_size) if rank != me.rank]
    sent = content(me.rank, _LARGE // 4).to(me.device)
    works = [post(sent, peer, is_send=True) for peer in others]
    got = []
    for peer in others:
        x = torch.zeros(_LARGE // 4, device=me.device)
        dist.recv(x, peer)
        got.append(x)
    for work in works:
        work.wait()
    return got


@chapter.must(
    "p2p/both-send-first",
    "Ranks that all isend large tensors to each other before any of them receives do not deadlock.",
    source="torch 2.13 docs, isend",
    rests_on="p2p/delivers",
)
@world_sizes(2, 4)
@deadline(20)
def test_everybody_may_send_before_anybody_receives(ranks: Ranks) -> None:
    n = ranks.world_size
    got = ranks.run(everybody_sends_first)
    want = [[content(src, _LARGE // 4) for src in range(n) if src != dst] for dst in range(n)]
    assert_each_rank(got, want)


def drop_the_handles(me: Me, numel: int) -> list[Tensor]:
    """Rank 0 keeps neither handles nor tensors of three messages, and lives on."""
    got: list[Tensor] = []
    if me.rank == 0:
        for i in range(3):
            dist.isend(content(i, numel).to(me.device), 1)
        me.store.set("posted", "1")
        me.store.wait(["received"])
    else:
        me.store.wait(["posted"])
        for _ in range(3):
            x = torch.zeros(numel, device=me.device)
            dist.recv(x, 0)
            got.append(x)
        me.store.set("received", "1")
    return got


@chapter.must(
    "p2p/dropped-handles",
    "A message arrives even if its isend handle was dropped.",
    source="gloo#308",
    rests_on="p2p/order",
)
@world_sizes(2)
@deadline(4)
@pytest.mark.parametrize("numel", [4, _LARGE], ids=["small", "large"])
def test_messages_with_dropped_handles_arrive(ranks: Ranks, numel: int) -> None:
    got = ranks.run(drop_the_handles, numel)
    assert_each_rank(got[1:], [[content(i, numel) for i in range(3)]], ranks=[1])


def poll_until_completed(me: Me, limit_s: float) -> tuple[bool, bool]:
    """Whether a send and a receive say that they are over, without a wait."""
    sending = post(content(me.rank, 8).to(me.device), 1 - me.rank, is_send=True)
    receiving = post(torch.zeros(8, device=me.device), 1 - me.rank, is_send=False)
    all_are_here(me, "posted")
    give_up_at = time.monotonic() + limit_s
    while time.monotonic() < give_up_at:
        if sending.is_completed() and receiving.is_completed():
            break
        time.sleep(1e-3)
    states = sending.is_completed(), receiving.is_completed()
    sending.wait()
    receiving.wait()
    return states


@chapter.must(
    "p2p/completes-without-wait",
    "is_completed of an isend and of an irecv becomes true by itself once the message has been "
    "transferred.",
    source="pytorch#30723",
    rests_on="p2p/delivers",
)
@world_sizes(2)
def test_polling_sees_the_end_of_a_message(ranks: Ranks) -> None:
    # Five seconds stand for ever: the message itself takes less than a thousandth of that.
    for rank, (sent, received) in enumerate(ranks.run(poll_until_completed, 5.0)):
        assert_that(sent, "isend never became completed without a wait", rank)
        assert_that(received, "irecv never became completed without a wait", rank)


def look_when_it_is_completed(me: Me, limit_s: float) -> tuple[bool, Tensor]:
    """Whether a receive becomes completed, and what its tensor holds at that moment."""
    got = torch.zeros(_LARGE, device=me.device)
    sending = post(content(me.rank, _LARGE).to(me.device), 1 - me.rank, is_send=True)
    receiving = post(got, 1 - me.rank, is_send=False)
    give_up_at = time.monotonic() + limit_s
    while not receiving.is_completed() and time.monotonic() < give_up_at:
        time.sleep(1e-4)
    seen = receiving.is_completed(), got.clone()
    sending.wait()
    receiving.wait()
    return seen


@chapter.must(
    "p2p/completed-is-written",
    "Once is_completed of an irecv is true, its tensor holds the whole message, even if wait was "
    "not called.",
    source="torch 2.13 docs, Work.is_completed",
    rests_on="p2p/completes-without-wait",
)
@world_sizes(2)
def test_what_is_completed_has_arrived(ranks: Ranks) -> None:
    got = ranks.run(look_when_it_is_completed, 5.0)
    for rank, (completed, _) in enumerate(got):
        assert_that(completed, "irecv never became completed without a wait", rank)
    assert_each_rank([held for _, held in got], [content(1, _LARGE), content(0, _LARGE)])


def ask_before_anything_was_sent(me: Me) -> bool:
    """Whether a receive says that it is over although nothing was sent yet."""
    x = torch.zeros(4, device=me.device)
    if me.rank == 0:
        work = post(x, 1, is_send=False)
        early = any(work.is_completed() for _ in rounds_of_messages(me, 20))
        me.store.set("asked", "1")
        work.wait()
        return early
    me.store.wait(["asked"])
    dist.send(x, 0)
    return False


@chapter.must(
    "p2p/incomplete-before-the-message",
    "is_completed of an irecv is false while nothing has been sent.",
    source="torch 2.13 docs, Work.is_completed",
    rests_on="p2p/delivers",
)
@world_sizes(2)
def test_a_receive_is_not_over_before_the_message(ranks: Ranks) -> None:
    early, _ = ranks.run(ask_before_anything_was_sent)
    assert_that(not early, "irecv was completed before anything had been sent", 0)


def look_at_the_handle(me: Me, waits: int) -> list[object]:
    """Wait, then ask the handle for everything that it knows."""
    x = content(0, 4).to(me.device) if me.rank == 0 else torch.zeros(4, device=me.device)
    work = post(x, 1 - me.rank, is_send=me.rank == 0)
    for _ in range(waits):
        work.wait()
    let_the_device_finish(me)
    return [work.is_completed(), work.is_success(), work.exception(), x]


@chapter.must(
    "p2p/handle-after-wait",
    "After wait a handle is completed, successful and without an exception.",
    source="torch 2.13 docs, Work",
    rests_on="p2p/delivers",
)
@world_sizes(2)
def test_a_handle_after_wait_is_completed_and_successful(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(look_at_the_handle, 1), [[True, True, None, content(0, 4)]] * 2)


@chapter.should(
    "p2p/wait-twice",
    "wait on a handle that was waited for already returns at once.",
    source="torch 2.13 docs, Work.wait; the handles of torch 2.13.0 gloo's collectives do",
    rests_on="p2p/handle-after-wait",
)
@world_sizes(2)
@deadline(4)
def test_waiting_once_more_is_harmless(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(look_at_the_handle, 2), [[True, True, None, content(0, 4)]] * 2)


def ask_for_the_source(me: Me) -> int:
    """In the group of all ranks, last first: the group rank of global rank 0."""
    work = post(torch.zeros(1, device=me.device), (me.rank + 1) % me.world_size, is_send=True)
    receive = post(torch.zeros(1, device=me.device), (me.rank - 1) % me.world_size, is_send=False)
    receive.wait()
    work.wait()
    return receive.source_rank()


@chapter.must(
    "p2p/source-rank",
    "The handle of a receive gives the sender's rank in the group.",
    source="torch 2.13, Work.source_rank",
    rests_on="p2p/delivers",
)
@world_sizes(2, 3)
def test_a_receive_knows_its_source(ranks: Ranks) -> None:
    n = ranks.world_size
    assert_each_rank(ranks.run(ask_for_the_source), [(rank - 1) % n for rank in range(n)])


def ask_for_future_and_result(me: Me) -> tuple[list[Tensor], bool]:
    x = content(0, 4).to(me.device) if me.rank == 0 else torch.zeros(4, device=me.device)
    work = post(x, 1 - me.rank, is_send=me.rank == 0)
    future = work.get_future()
    future.wait()
    work.wait()
    return list(work.result()) if me.rank == 1 else [x], future.done()


@chapter.should(
    "p2p/future-and-result",
    "A handle's future completes, and its result is the tensor that was received.",
    source="torch 2.13 docs, Work.get_future and Work.result",
    needs="feature:work_result",
    rests_on="p2p/delivers",
)
@world_sizes(2)
def test_a_receive_has_a_future_and_a_result(ranks: Ranks) -> None:
    got = ranks.run(ask_for_future_and_result)
    assert_each_rank(got, [([content(0, 4)], True)] * 2)


def wait_for_a_peer_that_never_comes(me: Me, is_send: bool) -> None:
    """Rank 0 waits for 100 ms for a message that no other rank posts, and gives up.

    The message is large, so most targets do not buffer it. Where one does, the send is over, and
    rank 1 can have the message later.
    """
    numel = 1 << 22
    if me.rank == 0:
        work = post(content(0, numel).to(me.device), 1, is_send=is_send)
        began = time.monotonic()
        try:
            over = work.wait(timedelta(milliseconds=100))
        except RuntimeError:
            took_s = time.monotonic() - began
            assert_that(took_s > 0.075, f"wait gave up after {took_s:.3f} s of 0.1 s", me.rank)
            me.store.set("end", "gave up")
            return
        assert_that(is_send, "wait returned, and nothing had been sent", me.rank)
        assert_that(over and work.is_completed(), "wait returned before the send was over", me.rank)
        me.store.set("end", "sent")
    elif me.store.get("end") == b"sent":
        got = torch.zeros(numel, device=me.device)
        dist.recv(got, 0)
        assert_that(torch.equal(got.cpu(), content(0, numel)), "another message came", me.rank)


@chapter.must(
    "p2p/wait-timeout",
    "wait(timeout) on a receive without a matching send raises soon after its timeout, and not "
    "before; on a send it does the same, or the send is complete, where sends are buffered.",
    source="pytorch#40948 and pytorch#41265; observed, torch 2.13.0 gloo",
    needs="feature:timeouts",
    rests_on="p2p/delivers",
)
@world_sizes(2)
@deadline(10)
@pytest.mark.parametrize("is_send", [True, False], ids=["isend", "irecv"])
@not_probed()
def test_wait_gives_up_after_its_timeout(ranks: Ranks, is_send: bool) -> None:
    ranks.run(wait_for_a_peer_that_never_comes, is_send)


def wait_for_a_late_peer(me: Me, is_send: bool) -> bool:
    """Rank 0 begins to wait, for up to a minute, before rank 1 posts its side; did it end well?"""
    x = torch.zeros(1 << 22, device=me.device)
    if me.rank == 0:
        work = post(x, 1, is_send=is_send)
        me.store.set("rank 0 waits", "1")
        return bool(work.wait(timedelta(minutes=1)))
    me.store.wait(["rank 0 waits"])
    time.sleep(0.1)  # being late
    return bool(post(x, 0, is_send=not is_send).wait())


@covers("p2p/wait-timeout")
@world_sizes(2)
@pytest.mark.parametrize("is_send", [True, False], ids=["isend", "irecv"])
def test_wait_has_the_patience_of_its_timeout(ranks: Ranks, is_send: bool) -> None:
    assert_each_rank(ranks.run(wait_for_a_late_peer, is_send), [True, True])


def _how_it_ended(future: torch.futures.Future[list[Tensor]]) -> str:
    try:
        future.wait()
    except Exception:
        return "raised"
    return "returned"


def ask_the_futures_of_failures(me: Me) -> list[str]:
    """Rank 0 posts two receives that get no message: how their futures end, of which the first one
    is taken at once, and the other one after the failure."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    if me.rank:
        me.store.wait(["over"])
        return []
    try:
        works = [dist.irecv(torch.zeros(3, device=me.device), 1, group=group) for _ in range(2)]
        early, late = works
        assert early is not None and late is not None
        future = early.get_future()
        for work in (early, late):
            with contextlib.suppress(RuntimeError):
                work.wait()
        return [_how_it_ended(future), _how_it_ended(late.get_future())]
    finally:
        me.store.set("over", "")


@covers("work/failed-future")
@world_sizes(2)
@deadline(10)
@needs("op:send", "feature:work_result")
@not_probed()
def test_the_future_of_a_failed_receive_says_so(ranks: Ranks) -> None:
    got = ranks.run(ask_the_futures_of_failures)
    assert_each_rank(got[:1], [["raised", "raised"]], what="futures taken before and after")
