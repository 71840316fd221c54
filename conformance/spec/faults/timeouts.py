"""Timeouts of groups, collectives, messages, wait() and joining; recovery.

None of these cases is probed: a target without timeouts waits for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
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
    covers,
    deadline,
    needs,
    not_probed,
    world_sizes,
)
from conformance.spec.faults.giving_up import (
    GROUP_TIMEOUT_S,
    RETURNED,
    try_all,
    wait_at_a_root,
    wait_in_coalesced_calls,
    wait_in_every_collective,
)
from conformance.spec.faults.operations import ALL_NEEDED
from conformance.spec.groups.membership_sums import mark, sum_marks, sum_of_marks
from conformance.spec.groups.starting import start
from conformance.spec.torch_versions import needs_argument

chapter = Chapter("faults", needs="feature:timeouts")

pytestmark = not_probed()


@chapter.must(
    "timeouts/of-the-group",
    "Ranks that wait in a collective for a rank that does not arrive get a RuntimeError once the "
    "group's timeout is over, and not before.",
    source="torch 2.13 docs, init_process_group, timeout",
    rests_on="new_group/members",
)
@world_sizes(2, 3)
@deadline(20)
@needs(*ALL_NEEDED)
def test_every_collective_gives_up(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(wait_in_every_collective), want={})


@covers("timeouts/of-the-group")
@world_sizes(2, 3)
@deadline(20)
@needs("op:broadcast", "op:scatter", "op:reduce", "op:gather")
def test_rooted_collectives_give_up(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(wait_at_a_root), want={})


@covers("timeouts/of-the-group")
@world_sizes(2, 3)
@deadline(20)
@needs(
    "feature:coalescing", "op:all_reduce", "op:all_gather_into_tensor", "op:reduce_scatter_tensor"
)
def test_coalesced_collectives_give_up(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(wait_in_coalesced_calls), want={})


def wait_for_messages(me: Me) -> dict[str, str]:
    """Rank 1 neither sends nor receives."""
    x = torch.ones(1 << 22, device=me.device)
    calls: dict[str, Callable[[Any], object]] = {
        "send": lambda group: dist.send(x, 1, group=group),
        "recv": lambda group: dist.recv(x.clone(), 1, group=group),
    }
    wrong = try_all(me, ["send", "recv"], {} if me.rank == 1 else calls)
    if wrong.get("send") == RETURNED:
        del wrong["send"]  # where sends are buffered
    return wrong


@chapter.must(
    "timeouts/point-to-point",
    "A blocking recv without a matching send ends with a RuntimeError once the group's timeout "
    "is over; a send without a matching receive does the same, or is complete at once, where "
    "sends are buffered.",
    source="torch 2.13 docs, init_process_group, timeout",
    rests_on="p2p/delivers",
)
@world_sizes(2)
@deadline(20)
@needs("op:send")
def test_messages_give_up(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(wait_for_messages), want={})


def wait_for_anybody(me: Me) -> dict[str, str]:
    """Rank 0 waits for a message from any rank; no rank sends one."""
    x = torch.ones(4, device=me.device)
    calls = {"recv": lambda group: dist.recv(x, group=group)}
    return try_all(me, ["recv"], {} if me.rank else calls)


@covers("timeouts/point-to-point")
@world_sizes(2, 3)
@deadline(20)
@needs("op:send", "feature:any_source")
def test_a_receive_from_anybody_gives_up(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(wait_for_anybody), want={})


def _issued_barrier(group: Any, timeout: timedelta) -> Any:
    return dist.barrier(group, async_op=True, timeout=timeout)


def wait_briefly(me: Me, how: str) -> None:
    """Rank 0 waits for 200 ms in a group with the timeout of the harness, which is minutes."""
    brief = timedelta(milliseconds=200)
    if me.rank == 0:
        calls: dict[str, Callable[[], object]] = {
            "wait": lambda: dist.all_reduce(mark(me), async_op=True).wait(brief),
            "barrier": lambda: dist.barrier(timeout=brief),
            "issued barrier": lambda: _issued_barrier(None, brief).wait(),
        }
        began_s = time.monotonic()
        with pytest.raises(RuntimeError):
            calls[how]()
        took_s = time.monotonic() - began_s
        assert_that(took_s > 0.15, f"{how} gave up after {took_s:.3f} s of 0.2 s", me.rank)
        me.store.set("rank 0 is through", "1")
    me.store.wait(["rank 0 is through"])


def wait_patiently(me: Me, how: str) -> None:
    """Rank 0 waits, for up to a minute, before rank 1 comes."""
    minute = timedelta(minutes=1)
    calls: dict[str, Callable[[], object]] = {
        "wait": lambda: dist.all_reduce(mark(me), async_op=True).wait(minute),
        "barrier": lambda: dist.barrier(timeout=minute),
    }
    if me.rank == 0:
        me.store.set("rank 0 waits", "1")
    else:
        me.store.wait(["rank 0 waits"])
        time.sleep(0.1)  # being late
    calls[how]()


@chapter.must(
    "timeouts/of-wait",
    "wait(timeout) on the handle of a collective that cannot complete raises once this timeout "
    "is over, and not before, however long the group's timeout is.",
    source="pytorch#40948 and pytorch#41265",
    rests_on="all_reduce/sum",
)
@world_sizes(2)
def test_wait_has_the_patience_of_its_timeout(ranks: Ranks) -> None:
    ranks.run(wait_patiently, "wait")


@chapter.must(
    "timeouts/of-barrier",
    "The timeout that is passed to a barrier applies to this barrier.",
    source="torch 2.13 docs, barrier, timeout",
    rests_on="all_reduce/sum",
)
@world_sizes(2)
@needs("op:barrier")
@needs_argument(dist.barrier, "timeout")
def test_a_barrier_has_the_patience_of_its_timeout(ranks: Ranks) -> None:
    ranks.run(wait_patiently, "barrier")


@covers("timeouts/of-wait")
@world_sizes(2)
@deadline(10)
def test_wait_has_a_timeout_of_its_own(ranks: Ranks) -> None:
    ranks.run(wait_briefly, "wait")


@covers("timeouts/of-barrier")
@world_sizes(2)
@deadline(10)
@needs("op:barrier")
@needs_argument(dist.barrier, "timeout")
@pytest.mark.parametrize("how", ["barrier", "issued barrier"])
def test_a_barrier_has_a_timeout_of_its_own(ranks: Ranks, how: str) -> None:
    ranks.run(wait_briefly, how)


def wait_longer_than_the_group(me: Me, is_issued: bool) -> None:
    """Rank 0 waits, for up to a minute, and rank 1 comes when the group's timeout is over."""
    group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    sum_marks(me, group)
    minute = timedelta(minutes=1)
    if me.rank == 0:
        me.store.set("rank 0 waits", "1")
    else:
        me.store.wait(["rank 0 waits"])
        time.sleep(GROUP_TIMEOUT_S + 0.5)  # being late
    if is_issued:
        _issued_barrier(group, minute).wait()
    else:
        dist.barrier(group, timeout=minute)


@covers("timeouts/of-barrier")
@world_sizes(2)
@deadline(15)
@needs("op:barrier")
@needs_argument(dist.barrier, "timeout")
@pytest.mark.parametrize("is_issued", [False, True], ids=["waiting", "issued"])
def test_a_barrier_may_wait_longer_than_its_group(ranks: Ranks, is_issued: bool) -> None:
    ranks.run(wait_longer_than_the_group, is_issued)


def use_two_timeouts(me: Me) -> list[Tensor]:
    """One group gives up after two seconds, and one made before it does not: a late rank finds
    its partner still there. This group and the default one keep working."""
    patient = dist.new_group()
    hasty = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    x = mark(me)
    if me.rank == 0:
        work = dist.all_reduce(x, group=patient, async_op=True)
        with pytest.raises(RuntimeError):
            dist.all_reduce(mark(me), group=hasty)
        me.store.set("the hasty group gave up", "1")
        work.wait()
    else:
        me.store.wait(["the hasty group gave up"])
        dist.all_reduce(x, group=patient)
    return [x, sum_marks(me, patient), sum_marks(me)]


@chapter.must(
    "timeouts/of-each-group",
    "A group has the timeout that it was made with, whatever the default group's timeout is; when "
    "it is over, other groups keep working.",
    source="torch 2.13 docs, new_group, timeout",
    rests_on="timeouts/of-the-group",
)
@world_sizes(2)
@deadline(15)
def test_each_group_has_its_own_timeout(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(use_two_timeouts), want=[sum_of_marks([0, 1])] * 3)


def come_late_again_and_again(me: Me) -> list[Tensor]:
    """Five operations to which rank 1 comes a little late: longer in all than the timeout."""
    group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    sums = []
    for number in range(5):
        if me.rank == 1:
            me.store.wait([f"rank 0 is waiting for number {number}"])
            time.sleep(GROUP_TIMEOUT_S / 4)  # this is what it means to be late
        else:
            me.store.set(f"rank 0 is waiting for number {number}", "1")
        sums.append(sum_marks(me, group))
    return sums


@chapter.must(
    "timeouts/late-is-not-lost",
    "A rank that arrives within the timeout causes no error, and the timeout starts anew for "
    "each operation.",
    source="torch 2.13 docs, init_process_group, timeout",
    rests_on="timeouts/of-the-group",
)
@world_sizes(2)
@deadline(15)
def test_a_late_rank_does_no_harm(ranks: Ranks) -> None:
    got = ranks.run(come_late_again_and_again)
    assert_same_on_all_ranks(got, want=[sum_of_marks([0, 1])] * 5)


def miss_a_rank(me: Me, where: str) -> None:
    """The last rank does not come to make the group."""
    missing = me.world_size - 1
    timeout = timedelta(milliseconds=500)
    if where == "new_group":
        start(me, "all")
    if me.rank != missing:
        calls: dict[str, Callable[[], object]] = {
            "new_group": lambda: dist.new_group(timeout=timeout),
            "init_process_group": lambda: start(me, "without the last", timeout=timeout),
        }
        try:
            with pytest.raises(RuntimeError):
                calls[where]()
        finally:
            me.store.set(f"rank {me.rank} is through", "1")
    me.store.wait([f"rank {rank} is through" for rank in range(missing)])


@chapter.must(
    "timeouts/joining",
    "init_process_group and new_group raise if a rank does not arrive within their timeout.",
    source="torch 2.13 docs, init_process_group and new_group, timeout",
    rests_on="all_reduce/sum",
)
@world_sizes(2, 3)
@deadline(15)
@pytest.mark.parametrize("where", ["init_process_group", "new_group"])
def test_nobody_waits_for_ever_for_a_member(bare_ranks: Ranks, where: str) -> None:
    bare_ranks.run(miss_a_rank, where)


def recover_from_a_timeout(me: Me) -> tuple[Tensor, Tensor]:
    """An operation that rank 1 does not come to; then both ranks make a new default group."""
    start(me, "before", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    before = sum_marks(me)
    if me.rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(mark(me))
        me.store.set("rank 0 is through", "1")
    me.store.wait(["rank 0 is through"])
    dist.destroy_process_group()
    start(me, "after")
    return before, sum_marks(me)


@chapter.must(
    "timeouts/recovery",
    "After a timeout the group can be destroyed, and the same ranks can make a new one.",
    source="torch elastic, restarts",
    rests_on=("timeouts/of-the-group", "init/again"),
)
@world_sizes(2)
@deadline(15)
def test_ranks_recover_from_a_timeout(bare_ranks: Ranks) -> None:
    got = bare_ranks.run(recover_from_a_timeout)
    assert_same_on_all_ranks(got, want=(sum_of_marks([0, 1]), sum_of_marks([0, 1])))
