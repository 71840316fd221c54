"""async_op: wait returns when all is done, and the call before the others have come."""

from __future__ import annotations

import pytest

from conformance import Me, Ranks, covers, world_sizes
from conformance.oracle.collectives import Call, before
from conformance.spec.collectives.perform import Seen, assert_taken, issue, seen_of

OPS = [
    pytest.param("all_reduce", marks=covers("all_reduce/async")),
    pytest.param("reduce", marks=covers("reduce/async")),
    pytest.param("broadcast", marks=covers("broadcast/async")),
    pytest.param("all_gather", marks=covers("all_gather/async")),
    pytest.param("all_gather_into_tensor", marks=covers("all_gather_into_tensor/async")),
    pytest.param("gather", marks=covers("gather/async")),
    pytest.param("scatter", marks=covers("scatter/async")),
    pytest.param("reduce_scatter", marks=covers("reduce_scatter/async")),
    pytest.param("reduce_scatter_tensor", marks=covers("reduce_scatter_tensor/async")),
    pytest.param("all_to_all", marks=covers("all_to_all/async")),
    pytest.param("all_to_all_single", marks=covers("all_to_all_single/async")),
]
NONBLOCKING = [
    pytest.param("all_reduce", marks=covers("all_reduce/nonblocking")),
    pytest.param("reduce", marks=covers("reduce/nonblocking")),
    pytest.param("broadcast", marks=covers("broadcast/nonblocking")),
    pytest.param("all_gather", marks=covers("all_gather/nonblocking")),
    pytest.param("all_gather_into_tensor", marks=covers("all_gather_into_tensor/nonblocking")),
    pytest.param("gather", marks=covers("gather/nonblocking")),
    pytest.param("scatter", marks=covers("scatter/nonblocking")),
    pytest.param("reduce_scatter", marks=covers("reduce_scatter/nonblocking")),
    pytest.param("reduce_scatter_tensor", marks=covers("reduce_scatter_tensor/nonblocking")),
    pytest.param("all_to_all", marks=covers("all_to_all/nonblocking")),
    pytest.param("all_to_all_single", marks=covers("all_to_all_single/nonblocking")),
]


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
