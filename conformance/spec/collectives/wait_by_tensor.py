"""wait_tensor on outputs of async collectives instead of Work.wait; torch's registry of works."""

from __future__ import annotations

import pytest
import torch.distributed._functional_collectives as functional
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_that, needs, world_sizes
from conformance.oracle.collectives import Call, before
from conformance.spec.collectives.perform import Seen, assert_taken, issue, seen_of
from conformance.torch_private import registered_works

chapter = Chapter(
    "collectives",
    source="torch 2.13, allow_inflight_collective_as_graph_input_ctx and its test in upstream's "
    "test_c10d_process_group.py",
)

OPERATIONS = (
    *("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
    *("reduce_scatter_tensor", "all_to_all_single"),
)


def buffers_of(me: Me, call: Call) -> tuple[list[Tensor], list[Tensor]]:
    buffers = before(call, me.rank, me.world_size)
    return [x.to(me.device) for x in buffers.given], [x.to(me.device) for x in buffers.taken]


def wait_for_outputs(me: Me, call: Call) -> Seen:
    """Rank 0 goes ahead, and the others come when it is about to wait."""
    given, taken = buffers_of(me, call)
    with functional.allow_inflight_collective_as_graph_input_ctx():
        if me.rank:
            me.store.wait(["issued"])
        try:
            work = issue(call, given, taken, async_op=True)
        finally:
            me.store.set("issued", "")
        waited = [functional.wait_tensor(x) for x in taken]
        seen = seen_of(given, waited)
        work.wait()
    return seen


@chapter.must(
    "wait_tensor/waits",
    "Inside of allow_inflight_collective_as_graph_input_ctx, wait_tensor on an output of an "
    "asynchronous collective returns when the result is there.",
    needs=("feature:wait_by_tensor", "feature:nonblocking"),
    rests_on="all_reduce/async",
)
@needs(*(f"op:{op}" for op in OPERATIONS))
@world_sizes(2, 3)
@pytest.mark.parametrize("op", OPERATIONS)
def test_outputs_can_be_waited_for(ranks: Ranks, op: str) -> None:
    call = Call(op, (3, 2))
    assert_taken(call, ranks.run(wait_for_outputs, call))


def works_that_stay(me: Me, call: Call) -> int:
    """How many more works torch keeps for `wait_tensor`, once the handle was waited for."""
    given, taken = buffers_of(me, call)
    with functional.allow_inflight_collective_as_graph_input_ctx():
        at_first = registered_works()
        issue(call, given, taken, async_op=True).wait()
        stay = registered_works() - at_first
        for x in taken:
            functional.wait_tensor(x)  # what stays would be told as an error at the rank's end
    return stay


@chapter.must(
    "wait_tensor/forgets",
    "Once the handle of such a call was waited for, torch does not keep its work any more.",
    needs="feature:wait_by_tensor",
    rests_on="wait_tensor/waits",
)
@needs(*(f"op:{op}" for op in OPERATIONS))
@world_sizes(2)
@pytest.mark.parametrize("op", OPERATIONS)
def test_works_that_were_waited_for_are_forgotten(ranks: Ranks, op: str) -> None:
    for rank, stay in enumerate(ranks.run(works_that_stay, Call(op, (3, 2)))):
        assert_that(stay == 0, f"{stay} more works are registered after wait of {op}", rank)
