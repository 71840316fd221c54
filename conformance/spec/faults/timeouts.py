"""Timeouts of groups, collectives, messages, wait() and joining; set_timeout; recovery.

None of these cases is probed: a target without timeouts waits for ever.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    covers,
    deadline,
    needs,
    not_probed,
    world_sizes,
)
from conformance.spec.faults.operations import ALL_NEEDED, OPERATIONS
from conformance.spec.groups.membership_sums import mark, sum_marks, sum_of_marks
from conformance.spec.groups.starting import start
from conformance.spec.torch_versions import needs_argument

chapter = Chapter("faults", needs="feature:timeouts")


pytestmark = not_probed()

# Long enough to make a group within it on a busy machine.
_GROUP_TIMEOUT_S = 3.0

_RETURNED = "returned"


@dataclass(frozen=True)
class _Ending:
    """When a call began and ended, on a clock that all ranks have, and how; "" if by giving up."""

    began_s: float
    ended_s: float
    how: str


def _ending_of(call: Callable[[], object]) -> _Ending:
    began_s = time.time()
    try:
        call()
        how = _RETURNED
    except RuntimeError:
        how = ""
    except Exception as error:
        how = f"raised {error!r}"
    return _Ending(began_s, time.time(), how)


def _try_all(
    me: Me,
    names: Sequence[str],
    calls: Mapping[str, Callable[[Any], object]],
    *,
    changed: bool = False,
) -> dict[str, str]:
    """Make every call at once, each in a thread and a group of its own; those that end wrongly.

    No other rank ends them, and they should end by themselves when the timeout of the rank that
    began first is over.

    names: of all groups, the same on every rank.
    calls: those of this rank, which may be none: then it makes the groups, and waits until the
        other ranks are through.
    changed: the groups have the timeout from set_timeout, after a first operation.
    """
    timeout = timedelta(seconds=_GROUP_TIMEOUT_S)
    groups: dict[str, Any] = {
        name: dist.new_group(timeout=timedelta(minutes=5) if changed else timeout) for name in names
    }
    for group in groups.values() if changed else ():
        sum_marks(me, group)
        group.set_timeout(timeout)
    endings: dict[str, _Ending] = {}

    def attempt(name: str) -> None:
        endings[name] = _ending_of(lambda: calls[name](groups[name]))

    threads = [threading.Thread(target=attempt, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    began_s = {name: ending.began_s for name, ending in endings.items()}
    me.store.set(f"rank {me.rank} is through", json.dumps(began_s))
    began_by_rank = [
        json.loads(me.store.get(f"rank {rank} is through")) for rank in range(me.world_size)
    ]
    wrong = {}
    for name, ending in endings.items():
        first_s = min(began[name] for began in began_by_rank if name in began)
        took_s = ending.ended_s - first_s
        if ending.how:
            wrong[name] = ending.how
        elif took_s < 0.75 * _GROUP_TIMEOUT_S:  # a quarter for coarse timers
            wrong[name] = f"gave up after {took_s:.2f} s of {_GROUP_TIMEOUT_S} s"
    return wrong


def wait_in_every_collective(me: Me, changed: bool = False) -> dict[str, str]:
    """The last rank comes to none of them."""
    # A root's sends, and a gathering's contributions, may be complete before others need them.
    one_sided = {"broadcast", "scatter", "reduce", "gather"}
    names = [name for name in OPERATIONS if name not in one_sided]
    absent = me.rank == me.world_size - 1
    calls = {} if absent else {name: partial(OPERATIONS[name], me) for name in names}
    return _try_all(me, names, calls, changed=changed)


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


def wait_at_a_root(me: Me, changed: bool = False) -> dict[str, str]:
    """Rooted collectives whose root, or a contributor to whose root, does not come."""
    absent = me.world_size - 1
    names = ["broadcast", "scatter", "reduce", "gather"]
    if me.rank == absent:
        return _try_all(me, names, {}, changed=changed)
    x = torch.ones(4, device=me.device)
    outputs = [torch.zeros(4, device=me.device) for _ in range(me.world_size)]
    calls: dict[str, Callable[[Any], object]] = {
        "broadcast": lambda group: dist.broadcast(x.clone(), absent, group=group),
        "scatter": lambda group: dist.scatter(x.clone(), None, absent, group=group),
    }
    if me.rank == 0:
        calls |= {
            "reduce": lambda group: dist.reduce(x.clone(), 0, group=group),
            "gather": lambda group: dist.gather(x, outputs, 0, group=group),
        }
    return _try_all(me, names, calls, changed=changed)


@covers("timeouts/of-the-group")
@world_sizes(2, 3)
@deadline(20)
@needs("op:broadcast", "op:scatter", "op:reduce", "op:gather")
def test_rooted_collectives_give_up(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(wait_at_a_root), want={})


def wait_for_messages(me: Me) -> dict[str, str]:
    """Rank 1 neither sends nor receives."""
    x = torch.ones(1 << 22, device=me.device)
    calls: dict[str, Callable[[Any], object]] = {
        "send": lambda group: dist.send(x, 1, group=group),
        "recv": lambda group: dist.recv(x.clone(), 1, group=group),
    }
    wrong = _try_all(me, ["send", "recv"], {} if me.rank == 1 else calls)
    if wrong.get("send") == _RETURNED:
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
    return _try_all(me, ["recv"], {} if me.rank else calls)


@covers("timeouts/point-to-point")
@world_sizes(2, 3)
@deadline(20)
@needs("op:send", "feature:any_source")
def test_a_receive_from_anybody_gives_up(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(wait_for_anybody), want={})


def wait_briefly(me: Me, how: str) -> None:
    """Rank 0 waits for 200 ms in a group with the timeout of the harness, which is minutes."""
    brief = timedelta(milliseconds=200)
    if me.rank == 0:
        calls: dict[str, Callable[[], object]] = {
            "wait": lambda: dist.all_reduce(mark(me), async_op=True).wait(brief),
            "barrier": lambda: dist.barrier(timeout=brief),
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
def test_a_barrier_has_a_timeout_of_its_own(ranks: Ranks) -> None:
    ranks.run(wait_briefly, "barrier")


def shorten_the_timeout(me: Me, where: str, how: str) -> None:
    """From minutes to 200 ms for one operation that no other rank joins."""
    start(me, "here")
    group: Any = dist.group.WORLD if where == "default" else dist.new_group()
    sum_marks(me, group)
    if me.rank == 0:
        group.set_timeout(timedelta(milliseconds=200))
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(mark(me), group=group),
            "wait": lambda: dist.all_reduce(mark(me), group=group, async_op=True).wait(),
            "recv": lambda: dist.recv(mark(me), 1, group=group),
        }
        with pytest.raises(RuntimeError):
            calls[how]()
        me.store.set("rank 0 is through", "1")
    me.store.wait(["rank 0 is through"])


_HOW = [
    pytest.param("all_reduce", marks=covers("timeouts/changed")),
    pytest.param("wait", marks=covers("timeouts/changed")),
    pytest.param(
        "recv",
        marks=chapter.should(
            "timeouts/shortened-for-messages",
            "A shorter timeout set by set_timeout applies to a recv that follows.",
            source="torch 2.13, ProcessGroup.set_timeout: 'Sets the default timeout for all future "
            "operations.'",
            rests_on=("timeouts/changed", "timeouts/point-to-point"),
        ),
    ),
]


@world_sizes(2)
@deadline(10)
@pytest.mark.parametrize("how", _HOW)
@pytest.mark.parametrize("where", ["default", "subgroup"])
def test_a_shorter_timeout_counts(bare_ranks: Ranks, where: str, how: str) -> None:
    bare_ranks.run(shorten_the_timeout, where, how)


def lengthen_the_timeout(me: Me, names: Sequence[str]) -> list[Tensor | str]:
    """From two seconds to minutes; rank 1 comes to everything when two seconds are over. Returns
    what each operation brought, or its error."""
    short, long = timedelta(seconds=_GROUP_TIMEOUT_S), timedelta(minutes=5)
    start(me, "here", timeout=short)
    groups: dict[str, Any] = {
        name: dist.group.WORLD if name == "default group" else dist.new_group(timeout=short)
        for name in names
    }
    for group in groups.values():
        sum_marks(me, group)
        group.set_timeout(long)
    brought: dict[str, Tensor | str] = {}

    def attempt(name: str) -> None:
        x, group = mark(me), groups[name]
        try:
            if name == "wait":
                dist.all_reduce(x, group=group, async_op=True).wait()
            elif name != "recv":
                dist.all_reduce(x, group=group)
            elif me.rank == 0:
                dist.recv(x, 1, group=group)
            else:
                dist.send(x, 0, group=group)
        except RuntimeError as error:
            brought[name] = f"raised {error!r}"
        else:
            brought[name] = x

    if me.rank == 1:
        me.store.wait(["rank 0 begins"])
        time.sleep(_GROUP_TIMEOUT_S + 0.5)  # this is what it means to be late
    me.store.set(f"rank {me.rank} begins", "1")
    threads = [threading.Thread(target=attempt, args=(name,)) for name in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [brought[name] for name in names]


@chapter.must(
    "timeouts/changed",
    "set_timeout of a group, the default one or another, applies to the collectives that follow, "
    "whether it is shorter or longer than before, and whether they are blocking or asynchronous.",
    source="pytorch#167052; torch 2.13, ProcessGroup.set_timeout",
    rests_on="timeouts/of-the-group",
)
@world_sizes(2)
@deadline(20)
def test_a_longer_timeout_counts(bare_ranks: Ranks) -> None:
    got = bare_ranks.run(lengthen_the_timeout, ["default group", "all_reduce", "wait"])
    assert_same_on_all_ranks(got, want=[sum_of_marks([0, 1])] * 3)


@covers("timeouts/changed")
@world_sizes(2)
@deadline(20)
@needs(*ALL_NEEDED)
@pytest.mark.parametrize("wait", [wait_in_every_collective, wait_at_a_root])
def test_a_shorter_timeout_counts_for_every_collective(
    ranks: Ranks, wait: Callable[[Me, bool], dict[str, str]]
) -> None:
    assert_same_on_all_ranks(ranks.run(wait, True), want={})


@chapter.should(
    "timeouts/lengthened-for-messages",
    "A longer timeout set by set_timeout applies to a recv that follows.",
    source="torch 2.13, ProcessGroup.set_timeout: 'Sets the default timeout for all future "
    "operations.'",
    rests_on=("timeouts/changed", "timeouts/point-to-point"),
)
@world_sizes(2)
@deadline(20)
@needs("op:send")
def test_a_longer_timeout_counts_for_messages(bare_ranks: Ranks) -> None:
    got = bare_ranks.run(lengthen_the_timeout, ["recv"])
    assert_same_on_all_ranks(got, want=[sum_of_marks([1])])


def use_two_timeouts(me: Me) -> list[Tensor]:
    """One group gives up after two seconds, and one made before it does not: a late rank finds
    its partner still there. This group and the default one keep working."""
    patient = dist.new_group()
    hasty = dist.new_group(timeout=timedelta(seconds=_GROUP_TIMEOUT_S))
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
    group = dist.new_group(timeout=timedelta(seconds=_GROUP_TIMEOUT_S))
    sums = []
    for number in range(5):
        if me.rank == 1:
            me.store.wait([f"rank 0 is waiting for number {number}"])
            time.sleep(_GROUP_TIMEOUT_S / 4)  # this is what it means to be late
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
    start(me, "before", timeout=timedelta(seconds=_GROUP_TIMEOUT_S))
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
