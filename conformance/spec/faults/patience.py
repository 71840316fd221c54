"""Timeouts that must not fire too early: after a shorter one, for late ranks, and of days."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    deadline,
    needs,
    not_probed,
    world_sizes,
)
from conformance.oracle.messages import content
from conformance.spec.collectives.monitored_barrier import monitored_barrier
from conformance.spec.faults.giving_up import Ending, call_at_once, ending_of
from conformance.spec.faults.operations import ALL_NEEDED, OPERATIONS
from conformance.spec.groups.membership_sums import mark, sum_marks, sum_of_marks
from conformance.spec.groups.starting import start
from conformance.spec.torch_versions import needs_argument

chapter = Chapter("faults")


pytestmark = not_probed()

# Long enough for what ranks do together on a busy machine.
_BRIEF_S = 3.0

# Longer than five and ten seconds, which are common defaults of a library below.
_LATE_S = 11.0


def be_hasty_once(me: Me, how: str) -> Tensor:
    """Both ranks come to one operation within its timeout; rank 1 comes to the next one when more
    than that timeout is over."""
    brief = timedelta(seconds=_BRIEF_S)
    calls: dict[str, Callable[[], object]] = {
        "wait": lambda: dist.all_reduce(mark(me), async_op=True).wait(brief),
        "barrier": lambda: dist.barrier(timeout=brief),
        "monitored_barrier": lambda: monitored_barrier(None, brief),
    }
    sum_marks(me)
    calls[how]()
    if me.rank == 1:
        me.store.wait(["rank 0 goes on"])
        time.sleep(1.5 * _BRIEF_S)
    else:
        me.store.set("rank 0 goes on", "1")
    return sum_marks(me)


@chapter.must(
    "timeouts/for-one-operation",
    "The timeout of a wait or of a barrier applies only to it: the operations that follow have "
    "the group's timeout.",
    source="torch 2.13 docs, Work.wait and barrier, timeout",
    needs="feature:timeouts",
    rests_on=("timeouts/of-wait", "timeouts/of-barrier"),
)
@world_sizes(2)
@deadline(20)
@pytest.mark.parametrize(
    "how",
    [
        "wait",
        pytest.param(
            "barrier", marks=[needs("op:barrier"), needs_argument(dist.barrier, "timeout")]
        ),
        pytest.param("monitored_barrier", marks=needs("op:monitored_barrier")),
    ],
)
def test_a_timeout_is_for_one_operation(ranks: Ranks, how: str) -> None:
    assert_same_on_all_ranks(ranks.run(be_hasty_once, how), want=sum_of_marks([0, 1]))


def _calls(me: Me, what: str) -> dict[str, Callable[..., object]]:
    """What each rank calls, by name; rank 0 cannot be through with any before rank 1 has come."""
    if what == "recv":
        return {"recv": _receive(me, 1)}
    if what == "recv_anysource":
        return {"recv without source": _receive(me, None)}
    calls: dict[str, Callable[..., object]] = {n: partial(c, me) for n, c in OPERATIONS.items()}
    for name in ("broadcast", "scatter"):
        calls[name] = partial(OPERATIONS[name], me, root=1)
    return calls if what == "each at once" else {what: calls[what]}


def _receive(me: Me, source: int | None) -> Callable[..., object]:
    """What rank 0 does, from rank 1, and what rank 1 does."""
    message = content(1, 1000).to(me.device)

    def receive(group: Any = None) -> None:
        x = torch.zeros_like(message)
        dist.recv(x, source, group=group)
        assert_that(x.equal(message), "the message is wrong", me.rank)

    return receive if me.rank == 0 else partial(dist.send, message, 0)


def _what_was_wrong(me: Me, ending: Ending) -> str:
    took_s = ending.ended_s - ending.began_s
    if ending.error is not None:
        return f"raised {ending.error!r} after {took_s:.1f} s"
    ended_early = me.rank == 0 and took_s < 0.75 * _LATE_S
    return f"ended after {took_s:.1f} s without rank 1" if ended_early else ""


def wait_for_a_late_rank(me: Me, what: str) -> dict[str, str]:
    """Rank 1 comes to all of them when rank 0 has waited for eleven seconds.

    Returns what went wrong with which.
    """
    calls = _calls(me, what)
    minute = timedelta(minutes=1)
    groups = {name: dist.new_group(timeout=minute) for name in calls} if len(calls) > 1 else {}
    if me.rank == 1:
        me.store.wait(["rank 0 waits"])
        time.sleep(_LATE_S)
    else:
        me.store.set("rank 0 waits", "1")
    if groups:
        endings = call_at_once(calls, groups)
    else:
        endings = {name: ending_of(call) for name, call in calls.items()}
    wrong = {name: _what_was_wrong(me, ending) for name, ending in endings.items()}
    return {name: text for name, text in wrong.items() if text}


@chapter.must(
    "timeouts/ten-seconds-late",
    "A rank may come ten seconds late to any operation, if the group's timeout is longer: the "
    "other ranks wait for it.",
    source="torch 2.13 docs, init_process_group, timeout",
    rests_on="all_reduce/sum",
)
@world_sizes(2)
@deadline(30)
@pytest.mark.parametrize(
    "what",
    [
        "all_reduce",
        pytest.param("each at once", marks=needs("feature:nonblocking", *ALL_NEEDED)),
        pytest.param("recv", marks=needs("op:send")),
        pytest.param("recv_anysource", marks=needs("op:send", "feature:any_source")),
    ],
)
def test_a_rank_may_come_ten_seconds_late(ranks: Ranks, what: str) -> None:
    assert_same_on_all_ranks(ranks.run(wait_for_a_late_rank, what), want={})


def join_late(me: Me, where: str) -> Tensor:
    """The last rank makes the group when the others have waited for it for eleven seconds."""
    if where == "new_group":
        start(me, "all")
    if me.rank == me.world_size - 1:
        me.store.wait([f"rank {rank} comes" for rank in range(me.rank)])
        time.sleep(_LATE_S)
    else:
        me.store.set(f"rank {me.rank} comes", "1")
    if where == "new_group":
        return sum_marks(me, dist.new_group())
    start(me, "all")
    return sum_marks(me)


@chapter.must(
    "timeouts/joining-late",
    "init_process_group and new_group wait for a rank that arrives ten seconds late but within "
    "their timeout.",
    source="torch 2.13 docs, init_process_group and new_group, timeout",
    rests_on="all_reduce/sum",
)
@world_sizes(2)
@pytest.mark.parametrize("where", ["init_process_group", "new_group"])
def test_a_rank_may_join_late(bare_ranks: Ranks, where: str) -> None:
    assert_same_on_all_ranks(bare_ranks.run(join_late, where), want=sum_of_marks([0, 1]))


def have_all_the_time(me: Me, days: int) -> list[Tensor]:
    """In a default group and another one, with this timeout, rank 1 is a little late."""
    start(me, "here", timeout=timedelta(days=days))
    groups = [None, dist.new_group(timeout=timedelta(days=days))]
    sums = []
    for number, group in enumerate(groups):
        if me.rank == 1:
            me.store.wait([f"rank 0 waits in group {number}"])
            time.sleep(0.1)  # being late
        else:
            me.store.set(f"rank 0 waits in group {number}", "1")
        sums.append(sum_marks(me, group))
    return sums


@chapter.must(
    "timeouts/of-days",
    "A timeout of days, or of a year, is honoured in full.",
    source="derived: the seconds of a timedelta leave out its days, and 32 bits of milliseconds "
    "hold 25 days",
    rests_on="all_reduce/sum",
)
@world_sizes(2)
@pytest.mark.parametrize("days", [1, 30, 365])
def test_a_timeout_may_be_long(bare_ranks: Ranks, days: int) -> None:
    got = bare_ranks.run(have_all_the_time, days)
    assert_same_on_all_ranks(got, want=[sum_of_marks([0, 1])] * 2)
