"""Work objects of collectives that time out or fail: wait, exception, futures, a dead rank."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, assert_that, loses_ranks, world_sizes
from conformance.harness.outcome import Died, Raised
from conformance.spec.collectives.store_sync import tick, wait_for_ticks
from conformance.spec.raising import returned

chapter = Chapter("collectives")


def one_waits_too_short(me: Me) -> tuple[str, Tensor]:
    """Rank 0 gives up, then rank 1 joins in, then rank 0 waits again."""
    x = torch.ones(3, device=me.device)
    if me.rank:
        me.store.wait(["gave up"])
        dist.all_reduce(x)
        return "", x
    work = dist.all_reduce(x, async_op=True)
    words = "returned"
    try:
        work.wait(timedelta(milliseconds=50))
    except RuntimeError as error:
        words = str(error)
    finally:
        me.store.set("gave up", "")
    try:
        work.wait()
    except RuntimeError:
        return words, torch.full_like(x, float("nan"))
    return words, x


@chapter.must(
    "work/wait-timeout",
    "wait with a timeout raises if the operation is not complete by then.",
    source="pytorch#40948, pytorch#41265",
    needs="feature:timeouts",
    rests_on="all_reduce/async",
)
@world_sizes(2)
def test_wait_gives_up_at_its_timeout(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(one_waits_too_short)
    # Whether rank 1 gets through is another requirement; it must come back in any case.
    refused = {1} if isinstance(outcomes[1], Raised) else ()
    words, _ = returned(outcomes, "giving up and waiting again", but=refused)[0]
    assert_that("timed out" in words.lower(), f"wait ended with {words!r}", 0)


@chapter.should(
    "work/wait-after-timeout",
    "After wait has timed out, the operation continues, and can be waited for again.",
    source="observed, torch 2.13.0 gloo",
    needs="feature:timeouts",
    rests_on="work/wait-timeout",
)
@world_sizes(2)
def test_the_operation_goes_on_after_a_wait_has_given_up(ranks: Ranks) -> None:
    got = [x for _, x in ranks.run(one_waits_too_short)]
    assert_each_rank(got, [torch.full((3,), 2.0)] * 2)


def alone_in_a_group(me: Me) -> tuple[str, bool, bool, str]:
    """Rank 0 issues a collective that no other rank joins; what its Work says then."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    if me.rank:
        me.store.wait(["over"])
        return "", False, False, ""
    x = torch.ones(3, device=me.device)
    words = "returned"
    try:
        work = dist.all_reduce(x, group=group, async_op=True)
        try:
            work.wait()
        except RuntimeError as error:
            words = str(error)
        return words, work.is_completed(), work.is_success(), str(work.exception())
    finally:
        me.store.set("over", "")


@chapter.must(
    "work/group-timeout",
    "A collective whose peers do not join within the group's timeout raises a RuntimeError that "
    "says so.",
    source="torch 2.13 docs, init_process_group, new_group: timeout",
    needs="feature:timeouts",
    rests_on="all_reduce/async",
)
@world_sizes(2, 3)
def test_a_collective_that_nobody_joins_times_out(ranks: Ranks) -> None:
    words = ranks.run(alone_in_a_group)[0][0]
    assert_that("timed out" in words.lower(), f"wait ended with {words!r}", 0)


@chapter.must(
    "work/failure-is-told",
    "The Work of an operation that failed reports it: wait raises, is_success is false, and "
    "exception is the error.",
    source="torch 2.13 docs, Work.wait, Work.exception; derived",
    needs="feature:timeouts",
    rests_on="work/group-timeout",
)
@world_sizes(2)
def test_the_work_of_a_failed_collective_says_so(ranks: Ranks) -> None:
    words, completed, succeeded, exception = ranks.run(alone_in_a_group)[0]
    assert_that(words != "returned", "wait returned although the collective had failed", 0)
    assert_that(completed, "is_completed is false after the failure", 0)
    assert_that(not succeeded, "is_success is true after the failure", 0)
    assert_that("timed out" in exception.lower(), f"exception is {exception!r}", 0)


def ask_the_future_of_a_failure(me: Me) -> tuple[bool, str]:
    """Rank 0 issues a collective that no other rank joins; whether its future ends, and how."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    if me.rank:
        me.store.wait(["over"])
        return True, ""
    try:
        work = dist.all_reduce(torch.ones(3, device=me.device), group=group, async_op=True)
        future = work.get_future()
        with contextlib.suppress(RuntimeError):
            work.wait()
        give_up_at = time.monotonic() + 5
        while not future.done():
            if time.monotonic() > give_up_at:
                return False, ""
            time.sleep(1e-3)
        try:
            future.wait()
        except Exception as error:
            return True, type(error).__name__
        return True, "no error"
    finally:
        me.store.set("over", "")


@chapter.must(
    "work/failed-future",
    "The future of an operation that failed is done as well, and its wait raises.",
    source="torch 2.13 docs, Work.get_future; torch's Reducer waits for futures alone",
    needs="feature:timeouts",
    rests_on=("work/future", "work/group-timeout"),
)
@world_sizes(2)
def test_the_future_of_a_failed_collective_says_so(ranks: Ranks) -> None:
    is_done, error = ranks.run(ask_the_future_of_a_failure)[0]
    assert_that(is_done, "the future is not done although the collective had failed", 0)
    assert_that(error != "no error", "the future's wait returned although the collective failed", 0)


def last_rank_dies(me: Me) -> str:
    """The others' error when the last rank ends instead of joining in."""
    x = torch.ones(3, device=me.device)
    group = dist.new_group(timeout=timedelta(seconds=5))
    tick(me.store, "has the group", of=me.world_size)
    wait_for_ticks(me.store, "has the group")
    if me.rank == me.world_size - 1:
        os._exit(7)
    try:
        dist.all_reduce(x, group=group, async_op=True).wait()
    except RuntimeError as error:
        return str(error)
    return "returned"


@chapter.must(
    "work/peer-gone",
    "wait raises if a rank of the group has died before it made its contribution.",
    source="derived",
    needs="feature:timeouts",
    rests_on="all_reduce/async",
)
@world_sizes(2, 3)
@loses_ranks()
def test_wait_raises_when_a_rank_has_died(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(last_rank_dies)
    died = {ranks.world_size - 1} if isinstance(outcomes[-1], Died) else ()
    for rank, words in enumerate(returned(outcomes, "waiting for a rank that dies", but=died)):
        assert_that(words != "returned", "wait ended well without the last rank", rank)
