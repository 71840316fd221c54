"""Work: the handle of a collective that was issued with async_op."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Me, Ranks, assert_each_rank, assert_that, covers, needs, world_sizes
from conformance.cases.collectives.perform import issue
from conformance.cases.collectives.waits import tick, wait_for_ticks
from conformance.cases.parameters import ops
from conformance.cases.polling import rounds_of_messages
from conformance.cases.raising import returned
from conformance.harness.outcome import Died, Raised
from conformance.oracle.collectives import Call, after, before

OPS = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
]
LISTS = [pytest.param(op, marks=needs(f"op:{op}")) for op in OPS]
SCATTERS = [
    pytest.param("reduce_scatter", marks=needs("op:reduce_scatter")),
    pytest.param("reduce_scatter_tensor", marks=needs("op:reduce_scatter_tensor")),
]


def start(me: Me, op: str) -> tuple[Any, list[Tensor]]:
    """A collective with async_op; its Work and the tensors that it fills."""
    buffers = before(Call(op), me.rank, me.world_size)
    given = [x.to(me.device) for x in buffers.given]
    taken = [x.to(me.device) for x in buffers.taken]
    return issue(Call(op), given, taken, async_op=True), taken


def type_of_return_value(me: Me, op: str) -> str:
    """Of what type is what the blocking form of the operation returns."""
    if op == "barrier":
        return type(dist.barrier()).__name__
    buffers = before(Call(op), me.rank, me.world_size)
    given = [x.to(me.device) for x in buffers.given]
    taken = [x.to(me.device) for x in buffers.taken]
    return type(issue(Call(op), given, taken)).__name__


@covers("work/blocking-returns-none")
@pytest.mark.parametrize(
    "op", [*LISTS, *SCATTERS, pytest.param("barrier", marks=needs("op:barrier"))]
)
@world_sizes(2)
def test_blocking_forms_return_nothing(ranks: Ranks, op: str) -> None:
    assert_each_rank(ranks.run(type_of_return_value, op), ["NoneType"] * 2)


def waits(me: Me, op: str, timeouts: list[timedelta]) -> list[object]:
    """What wait returns the first time, again, and then with these timeouts."""
    work, _ = start(me, op)
    return [work.wait(), work.wait(), *(work.wait(timeout) for timeout in timeouts)]


@covers("work/wait")
@pytest.mark.parametrize("op", [*LISTS, *SCATTERS])
@world_sizes(2)
def test_wait_says_true(ranks: Ranks, op: str) -> None:
    takes_timeouts = ranks.target.capabilities.has("feature:timeouts")
    timeouts = [timedelta(seconds=30)] if takes_timeouts else []
    assert_each_rank(ranks.run(waits, op, timeouts), [[True] * (2 + len(timeouts))] * 2)


def polls_in_vain(me: Me, op: str) -> bool:
    """Whether is_completed stays false for seconds after all ranks have issued the operation.

    Sleeping in between gives the operation a chance to end.
    """
    work, _ = start(me, op)
    tick(me.store, "issued", of=me.world_size)
    wait_for_ticks(me.store, "issued")
    give_up_at = time.monotonic() + 5.0
    while not work.is_completed():
        if time.monotonic() > give_up_at:
            return True
        time.sleep(1e-3)
    return False


@covers("work/completes-unwaited")
@pytest.mark.parametrize("op", LISTS)
@world_sizes(2)
def test_it_completes_although_nobody_waits(ranks: Ranks, op: str) -> None:
    check_that_it_completes(ranks, op)


@covers("reduce_scatter/completes-unwaited")
@world_sizes(2)
def test_reduce_scatter_completes_although_nobody_waits(ranks: Ranks) -> None:
    check_that_it_completes(ranks, "reduce_scatter")


@covers("reduce_scatter_tensor/completes-unwaited")
@world_sizes(2)
def test_reduce_scatter_tensor_completes_although_nobody_waits(ranks: Ranks) -> None:
    check_that_it_completes(ranks, "reduce_scatter_tensor")


def check_that_it_completes(ranks: Ranks, op: str) -> None:
    for rank, in_vain in enumerate(ranks.run(polls_in_vain, op)):
        assert_that(not in_vain, f"is_completed of {op} never became true", rank)


def completed_early(me: Me) -> bool:
    """Whether rank 0's all_reduce was complete before rank 1 joined in."""
    x = torch.ones(3, device=me.device)
    if me.rank:
        me.store.wait(["looked"])
        dist.all_reduce(x)
        return False
    work = dist.all_reduce(x, async_op=True)
    early = any(work.is_completed() for _ in rounds_of_messages(me, 20))
    me.store.set("looked", "")
    work.wait()
    return early


@covers("work/not-completed-early")
@world_sizes(2, 3)
def test_it_is_not_complete_before_all_have_joined_in(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(completed_early), [False] * ranks.world_size)


def success(me: Me, op: str) -> tuple[bool, object]:
    work, _ = start(me, op)
    work.wait()
    return work.is_success(), work.exception()


@covers("work/success")
@pytest.mark.parametrize("op", [*LISTS, *SCATTERS])
@world_sizes(2)
def test_success(ranks: Ranks, op: str) -> None:
    assert_each_rank(ranks.run(success, op), [(True, None)] * 2)


def flat(values: Any) -> Tensor:
    """All tensors of nested lists, in order, as one row."""
    if isinstance(values, Tensor):
        return values.detach().reshape(-1).cpu()
    parts = [flat(value) for value in values]
    return torch.cat(parts) if parts else torch.empty(0)


def result(me: Me, op: str) -> Tensor:
    work, _ = start(me, op)
    work.wait()
    return flat(work.result())


def check_flat_outputs(got: list[Tensor], op: str) -> None:
    """The output tensors of each rank; of reduce, only the destination's are known."""
    n = len(got)
    judged = [0] if op == "reduce" else range(n)
    want = [flat(after(Call(op), rank, n).taken) for rank in judged]
    assert_each_rank([got[rank] for rank in judged], want, ranks=judged)


@covers("work/result")
@pytest.mark.parametrize("op", LISTS)
@world_sizes(2)
def test_the_result_is_the_outputs(ranks: Ranks, op: str) -> None:
    check_flat_outputs(ranks.run(result, op), op)


def future_value(me: Me, op: str) -> Tensor:
    work, _ = start(me, op)
    future = work.get_future()
    value = flat(future.wait())
    assert future.done()
    assert torch.equal(value, flat(future.value()))
    work.wait()
    return value


@covers("work/future")
@pytest.mark.parametrize("op", LISTS)
@world_sizes(2)
def test_the_future_holds_the_outputs(ranks: Ranks, op: str) -> None:
    check_flat_outputs(ranks.run(future_value, op), op)


@covers("reduce_scatter/future")
@world_sizes(2)
def test_the_future_of_reduce_scatter(ranks: Ranks) -> None:
    check_flat_outputs(ranks.run(future_value, "reduce_scatter"), "reduce_scatter")


@covers("reduce_scatter_tensor/future")
@world_sizes(2)
def test_the_future_of_reduce_scatter_tensor(ranks: Ranks) -> None:
    check_flat_outputs(ranks.run(future_value, "reduce_scatter_tensor"), "reduce_scatter_tensor")


def chained(me: Me) -> list[float]:
    """What two callbacks in a row make of the result."""
    x = torch.full((2,), me.rank + 1.0, device=me.device)
    future = dist.all_reduce(x, async_op=True).get_future()
    tenfold = future.then(lambda done: [10 * value for value in done.value()])
    named = tenfold.then(lambda done: [value + 1 for value in done.value()[0].tolist()])
    values: list[float] = named.wait()
    return values


@covers("work/future-then")
@world_sizes(2, 3)
def test_callbacks_see_the_result(ranks: Ranks) -> None:
    n = ranks.world_size
    assert_each_rank(ranks.run(chained), [[10 * n * (n + 1) / 2 + 1] * 2] * n)


def futures_at_any_time(me: Me) -> list[Tensor]:
    """The values of futures that were asked for before and after the end."""
    x = torch.full((2,), me.rank + 1.0, device=me.device)
    work = dist.all_reduce(x, async_op=True)
    futures = [work.get_future(), work.get_future()]
    work.wait()
    futures += [work.get_future(), work.get_future()]
    return [flat(future.wait()) for future in futures]


@covers("work/future-at-any-time")
@world_sizes(2, 3)
def test_futures_may_be_asked_for_at_any_time(ranks: Ranks) -> None:
    n = ranks.world_size
    total = torch.full((2,), n * (n + 1) / 2)
    assert_each_rank(ranks.run(futures_at_any_time), [[total] * 4] * n)


def one_callback_raises(me: Me) -> tuple[str, float, float]:
    """The error of the broken future, what the callback after it saw, and another reduction."""
    x = torch.ones(2, device=me.device)
    future = dist.all_reduce(x, async_op=True).get_future()

    def fail(done: Any) -> None:
        raise KeyError("raised by the callback")

    broken = future.then(fail)
    sound = future.then(lambda done: float(done.value()[0][0]))
    words = "returned"
    try:
        broken.wait()
    except (RuntimeError, KeyError) as error:
        words = str(error)
    seen = sound.wait()
    dist.all_reduce(x)
    return words, seen, float(x[0])


@covers("work/callback-that-raises")
@world_sizes(2, 3)
def test_a_callback_that_raises_harms_nobody_else(ranks: Ranks) -> None:
    n = ranks.world_size
    got = ranks.run(one_callback_raises)
    for rank, (words, _, _) in enumerate(got):
        assert_that("raised by the callback" in words, f"its future {words!r}", rank)
    assert_each_rank([seen for _, *seen in got], [[float(n), float(n * n)]] * n)


def waited_for_in_threads(me: Me) -> list[Tensor]:
    """Rank 0 waits in three threads before the others join in; what each of them found."""
    x = torch.ones(3, device=me.device)
    if me.rank:
        me.store.wait(["waiting"])
        for _ in rounds_of_messages(me, 20):
            pass
        dist.all_reduce(x)
        return []
    work = dist.all_reduce(x, async_op=True)
    found: list[Tensor] = []

    def wait() -> None:
        work.wait()
        found.append(x.clone())

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    me.store.set("waiting", "")
    for thread in threads:
        thread.join()
    return found


@covers("work/wait-in-threads")
@world_sizes(2, 3)
def test_threads_wait_for_one_operation(ranks: Ranks) -> None:
    n = ranks.world_size
    others: list[list[Tensor]] = [[]] * (n - 1)
    want = [[torch.full((3,), float(n))] * 3, *others]
    assert_each_rank(ranks.run(waited_for_in_threads), want)


def inputs_are_dropped(me: Me, call: Call) -> list[Tensor]:
    """Rank 0's inputs are gone, and their memory is used otherwise, before the others join in."""
    buffers = before(call, me.rank, me.world_size)
    taken = [x.to(me.device) for x in buffers.taken]
    if me.rank:
        me.store.wait(["dropped"])
    try:
        given = [x.to(me.device, copy=True) for x in buffers.given]
        work = issue(call, given, taken, async_op=True)
        del given
        others = [
            torch.full_like(x, 99, device=me.device) for x in buffers.given for _ in range(20)
        ]
    finally:
        me.store.set("dropped", "")
    work.wait()
    del others
    return taken


@covers("work/dropped-inputs")
@pytest.mark.parametrize(
    "op",
    ops(
        "all_gather",
        "all_gather_into_tensor",
        "gather",
        "scatter",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "all_to_all",
        "all_to_all_single",
    ),
)
@world_sizes(2)
def test_inputs_may_be_dropped(ranks: Ranks, op: str) -> None:
    call = Call(op, (1000,), root=1 if op == "gather" else 0)
    got = ranks.run(inputs_are_dropped, call)
    want = [list(after(call, rank, 2).taken) for rank in range(2)]
    assert_each_rank(got, want, what=str(call))


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


@covers("work/wait-timeout")
@world_sizes(2)
def test_wait_gives_up_at_its_timeout(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(one_waits_too_short)
    # Whether rank 1 gets through is another requirement; it must come back in any case.
    refused = {1} if isinstance(outcomes[1], Raised) else ()
    words, _ = returned(outcomes, "giving up and waiting again", but=refused)[0]
    assert_that("timed out" in words.lower(), f"wait ended with {words!r}", 0)


@covers("work/wait-after-timeout")
@world_sizes(2)
def test_the_operation_goes_on_after_a_wait_has_given_up(ranks: Ranks) -> None:
    got = [x for _, x in ranks.run(one_waits_too_short)]
    assert_each_rank(got, [torch.full((3,), 2.0)] * 2)


def alone_in_a_group(me: Me) -> tuple[str, bool, bool, str]:
    """Rank 0 issues a collective that nobody joins; what its Work says then."""
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


@covers("work/group-timeout")
@world_sizes(2, 3)
def test_a_collective_that_nobody_joins_times_out(ranks: Ranks) -> None:
    words = ranks.run(alone_in_a_group)[0][0]
    assert_that("timed out" in words.lower(), f"wait ended with {words!r}", 0)


@covers("work/failure-is-told")
@world_sizes(2)
def test_the_work_of_a_failed_collective_says_so(ranks: Ranks) -> None:
    words, completed, succeeded, exception = ranks.run(alone_in_a_group)[0]
    assert_that(words != "returned", "wait returned although the collective had failed", 0)
    assert_that(completed, "is_completed is false after the failure", 0)
    assert_that(not succeeded, "is_success is true after the failure", 0)
    assert_that("timed out" in exception.lower(), f"exception is {exception!r}", 0)


def ask_the_future_of_a_failure(me: Me) -> tuple[bool, str]:
    """Rank 0 issues a collective that nobody joins; whether its future ends, and how."""
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


@covers("work/failed-future")
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


@covers("work/peer-gone")
@world_sizes(2, 3)
def test_wait_raises_when_a_rank_has_died(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(last_rank_dies)
    died = {ranks.world_size - 1} if isinstance(outcomes[-1], Died) else ()
    for rank, words in enumerate(returned(outcomes, "waiting for a rank that dies", but=died)):
        assert_that(words != "returned", "wait ended well without the last rank", rank)
