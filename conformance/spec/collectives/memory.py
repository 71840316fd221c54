"""Memory after complete collectives: groups keep none of their tensors, and use does not grow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_that, world_sizes
from conformance.oracle.collectives import Buffers, Call, before
from conformance.spec.collectives.perform import issue, placed_tensors, views_of
from conformance.spec.parameters import ops
from conformance.spec.retention import Kept, assert_nothing_kept, kept_after

chapter = Chapter("collectives", source="derived: a job issues millions of them")


def kept_after_collectives(me: Me, op: str) -> Kept:
    """Every other one is asynchronous."""
    async_op = False

    @cache
    def example(elements: int) -> tuple[Call, Buffers]:
        call = Call(op, (elements,))
        return call, before(call, me.rank, me.world_size)

    def operation(elements: int) -> Sequence[Tensor]:
        nonlocal async_op
        async_op = not async_op
        call, buffers = example(elements)
        given = [x.to(me.device, copy=True) for x in buffers.given]
        taken = [x.to(me.device, copy=True) for x in buffers.taken]
        work = issue(call, given, taken, async_op=async_op)
        if async_op:
            work.wait()
        return [*given, *taken]

    return kept_after(me, operation)


def resized_afterwards(me: Me, op: str) -> list[int]:
    """Bytes of the tensors' storages, when these have been resized to nothing after the call."""
    call = Call(op, (64,))
    given, taken = (views_of(placed) for placed in placed_tensors(me, call))
    issue(call, given, taken)
    storages = [x.untyped_storage() for x in (*given, *taken)]
    for storage in storages:
        storage.resize_(0)
    return [storage.nbytes() for storage in storages]


OPS = [
    "all_reduce",
    *ops("reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *ops("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
]


@chapter.must(
    "work/storage-can-be-resized",
    "After a collective the storages of its tensors can be resized, as FSDP does in each pass.",
    source="torch 2.13, torch.distributed.utils: _free_storage",
    rests_on="all_reduce/sum",
)
@pytest.mark.parametrize("op", OPS)
@world_sizes(2)
def test_storages_can_be_resized(ranks: Ranks, op: str) -> None:
    for rank, left in enumerate(ranks.run(resized_afterwards, op)):
        assert_that(not any(left), f"storages of {left} bytes", rank)


@chapter.must(
    "work/keeps-nothing",
    "When collectives are complete and their handles are dropped, the group holds none of their "
    "tensors, except for a few of the last ones, and memory does not grow with the number of "
    "collectives.",
    rests_on="all_reduce/async",
)
@pytest.mark.parametrize("op", OPS)
@world_sizes(2)
def test_past_collectives(ranks: Ranks, op: str) -> None:
    assert_nothing_kept(ranks.run(kept_after_collectives, op))
