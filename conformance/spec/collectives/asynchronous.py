"""async_op=True in each collective: the call does not block, and wait() gives the result."""

from __future__ import annotations

import pytest

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.oracle.collectives import Call, before
from conformance.spec.collectives.perform import Seen, assert_taken, issue, seen_of
from conformance.spec.parameters import by_operation

chapter = Chapter(
    "collectives", source="torch 2.13 docs, synchronous and asynchronous collective operations"
)


OPS = by_operation(
    chapter.must(
        "all_reduce/async",
        "all_reduce with async_op returns a handle, and the tensor holds the result once wait has "
        "returned.",
        needs=("op:all_reduce", "reduce_op:sum"),
        rests_on="all_reduce/sum",
    ),
    chapter.must(
        "reduce/async",
        "reduce with async_op returns a handle, and the destination holds the result once wait has "
        "returned.",
        needs=("op:reduce", "reduce_op:sum"),
        rests_on="reduce/sum",
    ),
    chapter.must(
        "broadcast/async",
        "broadcast with async_op returns a handle, and the tensor holds the result once wait has "
        "returned.",
        needs="op:broadcast",
        rests_on="broadcast/values",
    ),
    chapter.must(
        "all_gather/async",
        "all_gather with async_op returns a handle, and the list holds the result once wait has "
        "returned.",
        needs="op:all_gather",
        rests_on="all_gather/values",
    ),
    chapter.must(
        "all_gather_into_tensor/async",
        "all_gather_into_tensor with async_op returns a handle, and the output holds the result "
        "once wait has returned.",
        needs="op:all_gather_into_tensor",
        rests_on="all_gather_into_tensor/concatenated",
    ),
    chapter.must(
        "gather/async",
        "gather with async_op returns a handle, and the list holds the result once wait has "
        "returned.",
        needs="op:gather",
        rests_on="gather/values",
    ),
    chapter.must(
        "scatter/async",
        "scatter with async_op returns a handle, and the tensor holds the result once wait has "
        "returned.",
        needs="op:scatter",
        rests_on="scatter/values",
    ),
    chapter.must(
        "reduce_scatter/async",
        "reduce_scatter with async_op returns a handle, and the output holds the result once wait "
        "has returned.",
        needs=("op:reduce_scatter", "reduce_op:sum"),
        rests_on="reduce_scatter/sum",
    ),
    chapter.must(
        "reduce_scatter_tensor/async",
        "reduce_scatter_tensor with async_op returns a handle, and the output holds the result "
        "once wait has returned.",
        needs=("op:reduce_scatter_tensor", "reduce_op:sum"),
        rests_on="reduce_scatter_tensor/concatenated",
    ),
    chapter.must(
        "all_to_all/async",
        "all_to_all with async_op returns a handle, and the outputs hold the result once wait has "
        "returned.",
        needs="op:all_to_all",
        rests_on="all_to_all/values",
    ),
    chapter.must(
        "all_to_all_single/async",
        "all_to_all_single with async_op returns a handle, and the output holds the result once "
        "wait has returned.",
        needs="op:all_to_all_single",
        rests_on="all_to_all_single/even",
    ),
)
OPERATIONS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather"),
    *("scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
)
NONBLOCKING = by_operation(
    *[
        chapter.must(
            f"{op}/nonblocking",
            f"{op} with async_op returns before the other ranks have joined in.",
            needs="feature:nonblocking",
            rests_on=f"{op}/async",
        )
        for op in OPERATIONS
    ]
)


def issue_and_wait(me: Me, call: Call) -> Seen:
    buffers = before(call, me.rank, me.world_size)
    given = [x.to(me.device) for x in buffers.given]
    taken = [x.to(me.device) for x in buffers.taken]
    issue(call, given, taken, async_op=True).wait()
    return seen_of(given, taken)


@pytest.mark.parametrize("op", OPS)
@world_sizes(2, 3)
def test_the_result_is_there_once_wait_has_returned(ranks: Ranks, op: str) -> None:
    call = Call(op, (3, 2))
    assert_taken(call, ranks.run(issue_and_wait, call))


def one_rank_goes_ahead(me: Me, call: Call, ahead: int) -> Seen:
    """The others issue the call only after the one that goes ahead has come back from it."""
    buffers = before(call, me.rank, me.world_size)
    given = [x.to(me.device) for x in buffers.given]
    taken = [x.to(me.device) for x in buffers.taken]
    if me.rank != ahead:
        me.store.wait(["issued"])
    try:
        work = issue(call, given, taken, async_op=True)
    finally:
        me.store.set("issued", "")
    work.wait()
    return seen_of(given, taken)


@pytest.mark.parametrize("op", NONBLOCKING)
@pytest.mark.parametrize("ahead", [0, 1], ids=["root-ahead", "other-ahead"])
@world_sizes(3)
def test_the_call_returns_before_the_others_have_come(ranks: Ranks, op: str, ahead: int) -> None:
    call = Call(op, (3, 2))
    assert_taken(call, ranks.run(one_rank_goes_ahead, call, ahead))
