"""Work objects of every collective: completion, wait timeouts, failures, futures and threads.

Rules of other chapters, whose first cases are of all_reduce. In these cases one rank waits, in each
operation, for something that the other ranks bring: rank 0, unless they say another one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    adapts,
    assert_each_rank,
    assert_that,
    covers,
    deadline,
    needs,
    not_probed,
    world_sizes,
)
from conformance.oracle.collectives import COLLECTIVES, Call, after, before
from conformance.spec.collectives.kinds import claimed, each
from conformance.spec.collectives.perform import issue
from conformance.spec.collectives.store_sync import appears
from conformance.spec.collectives.work import flat
from conformance.spec.waiting import rounds_of_messages, within_patience

chapter = Chapter("collectives")


KINDS = (*COLLECTIVES, "barrier")
# Those that torch makes of others have fewer answers; rules of their own say so.
MADE_OF_OTHERS = ("reduce_scatter", "reduce_scatter_tensor")
OF_THEIR_OWN = [kind for kind in KINDS if kind not in MADE_OF_OTHERS]
WITH_RESULTS = [kind for kind in OF_THEIR_OWN if kind != "barrier"]


def call_of(kind: str, world_size: int, waiting: int = 0) -> Call:
    """One that gives this rank of the group something of another one."""
    root = (waiting + 1) % world_size if kind in ("broadcast", "scatter") else waiting
    return Call(kind, (3, 2), root=root)


@dataclass(frozen=True, slots=True)
class Begun:
    work: Any
    taken: list[Tensor]


def begin(me: Me, kind: str, group: Any = None, waiting: int = 0) -> Begun:
    """group: of the first ranks; None is that of all."""
    if kind == "barrier":
        return Begun(dist.barrier(group, async_op=True), [])
    size = dist.get_world_size(group)
    call = call_of(kind, size, waiting)
    buffers = before(call, me.rank, size)
    given = [x.to(me.device) for x in buffers.given]
    taken = [x.to(me.device) for x in buffers.taken]
    return Begun(issue(call, given, taken, group, async_op=True), taken)


def left_for(kind: str, world_size: int, waiting: int = 0) -> list[Tensor]:
    """What the waiting rank has then."""
    if kind == "barrier":
        return []
    return list(after(call_of(kind, world_size, waiting), waiting, world_size).taken)


def succeed_twice(me: Me, kind: str, group: Any) -> None:
    """Two calls of all members, so that the next one is the group's third."""
    for _ in range(2):
        begin(me, kind, group).work.wait()


def sizes_of_groups(world_size: int) -> Sequence[int]:
    """How many of the first ranks an operation is tried with: all, and all but the last one."""
    return (world_size,) if world_size == 2 else (world_size - 1, world_size)


def completed_early(me: Me, kind: str) -> bool:
    """Whether rank 0's operation was complete before the others came."""
    if me.rank:
        me.store.wait(["looked"])
        begin(me, kind).work.wait()
        return False
    try:
        begun = begin(me, kind)
        early = any(begun.work.is_completed() for _ in rounds_of_messages(me, 20))
    finally:
        me.store.set("looked", "")
    begun.work.wait()
    return early


@covers("work/not-completed-early")
@needs("feature:nonblocking")
@world_sizes(2)
@pytest.mark.parametrize("kind", each(KINDS))
def test_none_is_complete_before_all_have_come(ranks: Ranks, kind: str) -> None:
    assert_each_rank(ranks.run(completed_early, kind), [False] * 2)


def found_by_threads(me: Me, kind: str) -> list[list[Tensor]]:
    """Rank 0 waits in three threads before the others come; what each of them found."""
    if me.rank:
        me.store.wait(["waiting"])
        begin(me, kind).work.wait()
        return []
    begun = begin(me, kind)
    found: list[list[Tensor]] = []

    def wait() -> None:
        begun.work.wait()
        found.append([x.clone() for x in begun.taken])

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    me.store.set("waiting", "")
    for thread in threads:
        thread.join()
    return found


@covers("work/wait-in-threads")
@needs("feature:nonblocking")
@world_sizes(2)
@pytest.mark.parametrize("kind", each(OF_THEIR_OWN))
def test_threads_wait_for_each_operation(ranks: Ranks, kind: str) -> None:
    found = ranks.run(found_by_threads, kind)[0]
    assert_each_rank([found], [[left_for(kind, 2)] * 3], what=kind, ranks=[0])


@dataclass(frozen=True, slots=True)
class Waited:
    """How a rank's waits for one operation ended: "returned", or the error's words.

    again: of a second wait, when the other rank had come. found: by it.
    """

    briefly: str
    again: str
    found: list[Tensor]


def outcome(wait: Any, *args: Any) -> str:
    try:
        wait(*args)
    except RuntimeError as error:
        return str(error) or type(error).__name__
    return "returned"


def waits_briefly(n: int, world_size: int) -> int:
    """Of the first n ranks, the one that does: the last one, where that may be another root."""
    return n - 1 if n == world_size > 2 else 0


def wait_briefly(me: Me, kind: str) -> dict[int, Waited]:
    """One rank gives up before the others come, then waits again: in groups of these sizes."""
    groups = {n: dist.new_group(list(range(n))) for n in sizes_of_groups(me.world_size)}
    ended = {}
    for n, group in groups.items():
        if me.rank >= n:
            continue
        succeed_twice(me, kind, group)
        over, waiting = f"gave up in {n}", waits_briefly(n, me.world_size)
        if me.rank != waiting:
            me.store.wait([over])
            with contextlib.suppress(RuntimeError):  # the waiting rank may have left it
                begin(me, kind, group, waiting).work.wait()
            continue
        try:
            begun = begin(me, kind, group, waiting)
            briefly = outcome(begun.work.wait, timedelta(milliseconds=30))
        finally:
            me.store.set(over, "")
        again = outcome(begun.work.wait)
        ended[n] = Waited(briefly, again, [x.clone() for x in begun.taken])
    return ended


@covers("work/wait-timeout")
@needs("feature:timeouts", "feature:nonblocking")
@not_probed()
@world_sizes(2, 4)
@pytest.mark.parametrize("kind", each(OF_THEIR_OWN))
def test_each_wait_gives_up_at_its_timeout(ranks: Ranks, kind: str) -> None:
    check_that_it_gives_up(ranks, kind)


@chapter.must(
    "reduce_scatter/wait-timeout",
    "wait with a timeout raises if a reduce_scatter or reduce_scatter_tensor is not complete by "
    "then.",
    source="torch 2.13 docs, Work.wait",
    needs=("op:reduce_scatter", "reduce_op:sum", "feature:timeouts", "feature:nonblocking"),
    rests_on="reduce_scatter/async",
)
@not_probed()
@deadline(10)
@world_sizes(2, 4)
@pytest.mark.parametrize("kind", each(MADE_OF_OTHERS))
def test_the_wait_of_a_scatter_gives_up_at_its_timeout(ranks: Ranks, kind: str) -> None:
    check_that_it_gives_up(ranks, kind)


def check_that_it_gives_up(ranks: Ranks, kind: str) -> None:
    for rank, seen in enumerate(ranks.run(wait_briefly, kind)):
        for n, waited in seen.items():
            words = waited.briefly
            said = f"wait for {kind} of {n} ranks ended with {words!r}"
            assert_that(says_timeout(words), said, rank)


def says_timeout(words: str) -> bool:
    return "timed out" in words.lower() or "timeout" in words.lower()


@covers("work/wait-after-timeout")
@needs("feature:timeouts", "feature:nonblocking")
@not_probed()
@world_sizes(2)
@pytest.mark.parametrize("kind", each(OF_THEIR_OWN))
def test_each_operation_goes_on_after_a_wait_has_given_up(ranks: Ranks, kind: str) -> None:
    for n, waited in ranks.run(wait_briefly, kind)[0].items():
        what, words = f"{kind} of {n} ranks", waited.again
        assert_that(words == "returned", f"the second wait for {what} ended with {words!r}", 0)
        assert_each_rank([waited.found], [left_for(kind, n)], what=what, ranks=[0])


def wait_patiently(me: Me, kinds: Sequence[str]) -> list[tuple[str, list[Tensor]]]:
    """Rank 0 waits a minute at most for each operation; the other rank is late for each."""
    ended = []
    for kind in kinds:
        if me.rank:
            appears(me.store, f"{kind} is over")
            begin(me, kind).work.wait()
        else:
            begun = begin(me, kind)
            ended.append((outcome(begun.work.wait, timedelta(minutes=1)), list(begun.taken)))
            me.store.set(f"{kind} is over", "")
    return ended


@covers("work/wait-timeout")
@needs("feature:timeouts", "feature:nonblocking")
@adapts()
@not_probed()
@world_sizes(2)
def test_each_wait_has_all_of_its_timeout(ranks: Ranks) -> None:
    kinds = claimed(KINDS, ranks.target)
    got = ranks.run(wait_patiently, kinds)[0]
    for kind, ended in zip(kinds, got, strict=True):
        want = ("returned", left_for(kind, 2))
        assert_each_rank([ended], [want], what=f"{kind}, waited for up to a minute", ranks=[0])


@dataclass(frozen=True, slots=True)
class Failed:
    """What the handle of a failed operation says: of wait, its other questions, and its future."""

    wait: str
    is_completed: bool
    is_success: bool
    exception: str
    future: str


_GROUP_TIMEOUT_S = 3.0  # long enough to make the groups within it on a busy machine


def alone_in_each(
    me: Me, kinds: Sequence[str], with_futures: bool = False
) -> dict[tuple[int, str], Failed]:
    """Rank 0 issues every operation, each in a group of its own, and no other rank does: by how
    many ranks are in the group, and the operation."""
    timeout = timedelta(seconds=_GROUP_TIMEOUT_S)
    tried = [(n, kind) for n in sizes_of_groups(me.world_size) for kind in kinds]
    groups = [dist.new_group(list(range(n)), timeout=timeout) for n, _ in tried]
    # All of these first: a backend with one thread cannot go on behind an operation that waits.
    for (n, kind), group in zip(tried, groups, strict=True):
        if me.rank < n:
            succeed_twice(me, kind, group)
    if me.rank:
        me.store.wait(["over"])
        return {}
    try:
        works = [
            begin(me, kind, group).work for (_, kind), group in zip(tried, groups, strict=True)
        ]
        futures = [work.get_future() for work in works] if with_futures else []
        waits = [outcome(work.wait) for work in works]
        within_patience(lambda: all(future.done() for future in futures))
        return {
            case: Failed(
                wait,
                work.is_completed(),
                work.is_success(),
                str(work.exception()),
                how_it_ended(future) if future else "",
            )
            for case, wait, work, future in zip_longest(tried, waits, works, futures)
        }
    finally:
        me.store.set("over", "")


def how_it_ended(future: Any) -> str:
    if not future.done():
        return "is not done"
    try:
        future.wait()
    except Exception:
        return "raised"
    return "returned"


def failures(
    ranks: Ranks, kinds: Sequence[str], with_futures: bool = False
) -> Iterator[tuple[str, Failed]]:
    """Of those that the target claims: which one, and what was told."""
    told = ranks.run(alone_in_each, claimed(kinds, ranks.target), with_futures)[0]
    return ((f"{kind} of {n} ranks", failed) for (n, kind), failed in told.items())


@covers("work/group-timeout")
@needs("feature:timeouts", "feature:nonblocking")
@adapts()
@not_probed()
@deadline(30)
@world_sizes(2, 4)
def test_each_operation_that_is_not_joined_times_out(ranks: Ranks) -> None:
    for kind, told in failures(ranks, KINDS):
        assert_that(says_timeout(told.wait), f"wait for {kind} ended with {told.wait!r}", 0)


@covers("work/failure-is-told")
@needs("feature:timeouts", "feature:nonblocking")
@adapts()
@not_probed()
@deadline(30)
@world_sizes(2, 4)
def test_each_handle_tells_of_a_failure(ranks: Ranks) -> None:
    check_that_failures_are_told(ranks, OF_THEIR_OWN)


@chapter.must(
    "reduce_scatter/failure-is-told",
    "The Work of a reduce_scatter or reduce_scatter_tensor that failed reports it: is_completed "
    "is true, is_success is false, and exception is the error.",
    source="torch 2.13 docs, Work.is_success, Work.exception",
    needs=("op:reduce_scatter", "reduce_op:sum", "feature:timeouts", "feature:nonblocking"),
    rests_on="reduce_scatter/async",
)
@not_probed()
@deadline(30)
@world_sizes(2, 4)
def test_the_handle_of_a_scatter_tells_of_a_failure(ranks: Ranks) -> None:
    check_that_failures_are_told(ranks, MADE_OF_OTHERS)


def check_that_failures_are_told(ranks: Ranks, kinds: Sequence[str]) -> None:
    for kind, told in failures(ranks, kinds):
        assert_that(told.is_completed, f"{kind} failed, and is_completed is false", 0)
        assert_that(not told.is_success, f"{kind} failed, and is_success is true", 0)
        assert_that(told.exception != "None", f"{kind} failed, and exception is None", 0)


@covers("work/failed-future")
@needs("feature:timeouts", "feature:nonblocking")
@adapts()
@not_probed()
@deadline(30)
@world_sizes(2, 4)
def test_each_future_tells_of_a_failure(ranks: Ranks) -> None:
    for kind, told in failures(ranks, OF_THEIR_OWN, with_futures=True):
        assert_that(told.future == "raised", f"{kind} failed, and its future {told.future}", 0)


def waits_of_a_barrier(me: Me) -> tuple[bool, bool]:
    work = dist.barrier(async_op=True)
    return work.wait(), work.wait()


@covers("work/wait")
@needs("op:barrier")
@world_sizes(2)
def test_waits_of_a_barrier_say_true(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(waits_of_a_barrier), [(True, True)] * 2)


def barrier_that_succeeds(me: Me) -> tuple[bool, bool, object]:
    """What is_completed, is_success and exception say."""
    work = dist.barrier(async_op=True)
    work.wait()
    return work.is_completed(), work.is_success(), work.exception()


@covers("work/success")
@needs("op:barrier")
@world_sizes(2)
def test_a_barrier_that_succeeds_says_so(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(barrier_that_succeeds), [(True, True, None)] * 2)


def values_of_futures(me: Me, kind: str) -> list[Tensor]:
    """On rank 0, of two futures asked for before the others came, and of two afterwards; then what
    a callback of each saw. One callback was chained before the others came."""
    if me.rank:
        me.store.wait(["asked"])
        begin(me, kind).work.wait()
        return []
    try:
        begun = begin(me, kind)
        futures = [begun.work.get_future(), begun.work.get_future()]
        seen = [futures[0].then(lambda done: flat(done.value()))]
    finally:
        me.store.set("asked", "")
    begun.work.wait()
    futures += [begun.work.get_future(), begun.work.get_future()]
    seen += [future.then(lambda done: flat(done.value())) for future in futures]
    return [flat(future.wait()) for future in (*futures, *seen)]


@covers("work/future-at-any-time", "work/future-then")
@needs("feature:nonblocking")
@world_sizes(2)
@pytest.mark.parametrize("kind", each(WITH_RESULTS))
def test_futures_and_callbacks_of_each_operation(ranks: Ranks, kind: str) -> None:
    values = ranks.run(values_of_futures, kind)[0]
    assert_each_rank([values], [[flat(left_for(kind, 2))] * 9], what=kind, ranks=[0])
