"""Work objects of async collectives: wait, completion, result, futures, callbacks, threads."""

from __future__ import annotations

import threading
import time
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
    assert_each_rank,
    assert_that,
    covers,
    deadline,
    needs,
    not_probed,
    world_sizes,
)
from conformance.checks import first_difference
from conformance.oracle.collectives import COLLECTIVES, Call, after, before
from conformance.spec.collectives.perform import Seen, issue, perform_async
from conformance.spec.collectives.store_sync import tick, wait_for_ticks
from conformance.spec.parameters import ops
from conformance.spec.waiting import let_the_device_finish, rounds_of_messages

chapter = Chapter("collectives")


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


@chapter.must(
    "work/blocking-returns-none",
    "A collective without async_op returns None.",
    source="torch 2.13 docs, all_reduce: 'None, if not async_op'",
    rests_on="all_reduce/async",
)
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


@chapter.must(
    "work/wait",
    "wait returns True once the operation is complete, every time it is called.",
    source="torch 2.13 docs, Work.wait",
    rests_on="all_reduce/async",
)
@pytest.mark.parametrize("op", [*LISTS, *SCATTERS])
@world_sizes(2)
def test_wait_says_true(ranks: Ranks, op: str) -> None:
    takes_timeouts = ranks.target.capabilities.has("feature:timeouts")
    timeouts = [timedelta(seconds=30)] if takes_timeouts else []
    assert_each_rank(ranks.run(waits, op, timeouts), [[True] * (2 + len(timeouts))] * 2)


def wait_twice(me: Me, call: Call) -> tuple[Seen, Seen]:
    """The tensors after each of two waits."""
    pending = perform_async(me, call)
    pending.work.wait()
    first = pending.tensors()
    pending.work.wait()
    return first, pending.tensors()


AVERAGED = ("all_reduce", "reduce_scatter_tensor")


@covers("work/wait")
@pytest.mark.parametrize(
    "call",
    [
        *(pytest.param(Call(op), marks=needs(f"op:{op}"), id=op) for op in COLLECTIVES),
        *(
            pytest.param(
                Call(op, reduce_op="avg"), marks=needs(f"op:{op}", "reduce_op:avg"), id=f"{op}-avg"
            )
            for op in AVERAGED
        ),
    ],
)
@world_sizes(2)
def test_a_second_wait_changes_nothing(ranks: Ranks, call: Call) -> None:
    for rank, (first, second) in enumerate(ranks.run(wait_twice, call)):
        changed = first_difference(second, first)
        assert_that(not changed, f"a second wait has changed tensors: {changed}", rank)


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


@chapter.must(
    "work/completes-unwaited",
    "is_completed becomes true even if no thread waits.",
    source="torch 2.13 docs, Work.is_completed; pytorch#30723",
    rests_on="all_reduce/async",
)
@pytest.mark.parametrize("op", LISTS)
@world_sizes(2)
def test_it_completes_although_nobody_waits(ranks: Ranks, op: str) -> None:
    check_that_it_completes(ranks, op)


@chapter.must(
    "reduce_scatter/completes-unwaited",
    "The Work of reduce_scatter completes without a wait.",
    source="torch 2.13 docs, is_completed; pytorch#30723",
    needs=("op:reduce_scatter", "reduce_op:sum"),
    rests_on="reduce_scatter/async",
)
@world_sizes(2)
def test_reduce_scatter_completes_although_nobody_waits(ranks: Ranks) -> None:
    check_that_it_completes(ranks, "reduce_scatter")


@chapter.must(
    "reduce_scatter_tensor/completes-unwaited",
    "The Work of reduce_scatter_tensor completes without a wait.",
    source="torch 2.13 docs, is_completed; pytorch#30723",
    needs=("op:reduce_scatter_tensor", "reduce_op:sum"),
    rests_on="reduce_scatter_tensor/async",
)
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


@chapter.must(
    "work/not-completed-early",
    "is_completed is false as long as another rank's contribution is missing.",
    source="torch 2.13 docs, Work.is_completed",
    needs="feature:nonblocking",
    rests_on="all_reduce/async",
)
@world_sizes(2, 3)
def test_it_is_not_complete_before_all_have_joined_in(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(completed_early), [False] * ranks.world_size)


def success(me: Me, op: str) -> tuple[bool, object]:
    work, _ = start(me, op)
    work.wait()
    let_the_device_finish(me)
    return work.is_success(), work.exception()


@chapter.must(
    "work/success",
    "After an operation that succeeded, is_success is true and exception is None.",
    source="torch 2.13 docs, Work.is_success, Work.exception",
    rests_on="all_reduce/async",
)
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


@chapter.must(
    "work/result",
    "result returns the output tensors, in order.",
    source="observed, torch 2.13.0 gloo",
    needs="feature:work_result",
    rests_on="all_reduce/async",
)
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


@chapter.must(
    "work/future",
    "get_future returns a future whose value is the list of the output tensors.",
    source="torch 2.13 docs, Work.get_future",
    rests_on="all_reduce/async",
)
@pytest.mark.parametrize("op", LISTS)
@world_sizes(2)
def test_the_future_holds_the_outputs(ranks: Ranks, op: str) -> None:
    check_flat_outputs(ranks.run(future_value, op), op)


@chapter.must(
    "reduce_scatter/future",
    "The Work of reduce_scatter has a future with the output.",
    source="torch 2.13 docs, get_future",
    needs=("op:reduce_scatter", "reduce_op:sum"),
    rests_on="reduce_scatter/async",
)
@world_sizes(2)
def test_the_future_of_reduce_scatter(ranks: Ranks) -> None:
    check_flat_outputs(ranks.run(future_value, "reduce_scatter"), "reduce_scatter")


@chapter.must(
    "reduce_scatter_tensor/future",
    "The Work of reduce_scatter_tensor has a future with the output.",
    source="torch 2.13 docs, get_future",
    needs=("op:reduce_scatter_tensor", "reduce_op:sum"),
    rests_on="reduce_scatter_tensor/async",
)
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


@chapter.must(
    "work/future-then",
    "A callback that is chained to the future sees the result.",
    source="torch 2.13 docs, Work.get_future",
    rests_on="work/future",
)
@world_sizes(2, 3)
def test_callbacks_see_the_result(ranks: Ranks) -> None:
    n = ranks.world_size
    assert_each_rank(ranks.run(chained), [[10 * n * (n + 1) / 2 + 1] * 2] * n)


def reduced_in_a_callback(me: Me) -> list[float]:
    """A callback reduces the result once more, and waits for it, before the caller waits."""
    x = torch.full((2,), me.rank + 1.0, device=me.device)

    def reduce_again(done: Any) -> Any:
        again = done.value()[0].clone()
        return dist.all_reduce(again, async_op=True).get_future().wait()[0]

    chained = dist.all_reduce(x, async_op=True).get_future().then(reduce_again)
    values: list[float] = chained.wait().tolist()
    return values


@chapter.must(
    "work/callback-waits",
    "A callback of a collective's future may issue another collective of the group and wait for "
    "it, as DDP's PowerSGD hook does.",
    source="torch 2.13, powerSGD_hook",
    rests_on="work/future-then",
)
@world_sizes(2, 3)
@deadline(10)
@not_probed()
def test_a_callback_may_wait_for_a_collective(ranks: Ranks) -> None:
    n = ranks.world_size
    assert_each_rank(ranks.run(reduced_in_a_callback), [[n * n * (n + 1) / 2] * 2] * n)


def futures_at_any_time(me: Me) -> list[Tensor]:
    """The values of futures that were asked for before and after the end."""
    x = torch.full((2,), me.rank + 1.0, device=me.device)
    work = dist.all_reduce(x, async_op=True)
    futures = [work.get_future(), work.get_future()]
    work.wait()
    futures += [work.get_future(), work.get_future()]
    return [flat(future.wait()) for future in futures]


@chapter.must(
    "work/future-at-any-time",
    "get_future may be called before and after the operation is complete, and more than once: "
    "each future gets the outputs.",
    source="torch 2.13 docs, Work.get_future",
    rests_on="work/future",
)
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


@chapter.must(
    "work/callback-that-raises",
    "A callback that raises fails only the future that then returned for it: other callbacks are "
    "called, and the group keeps working.",
    source="torch 2.13 docs, torch.futures.Future.then",
    rests_on="work/future-then",
)
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


@chapter.must(
    "work/wait-in-threads",
    "Several threads may wait for one operation, whichever thread issued it, and each wait "
    "returns when the outputs hold the result.",
    source="derived: an operation that one thread issues for another",
    needs="feature:nonblocking",
    rests_on="work/wait",
)
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


@chapter.must(
    "work/dropped-inputs",
    "Inputs of an asynchronous operation may be dropped after the call: the operation keeps them "
    "alive as long as it needs them.",
    source="derived: dist.all_gather(outputs, x.float(), async_op=True)",
    needs="feature:nonblocking",
    rests_on="all_reduce/async",
)
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
