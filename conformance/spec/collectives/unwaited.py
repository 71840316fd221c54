"""Async collectives without wait(): polling is_completed, dropped Work objects, and barriers."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, covers, needs, world_sizes
from conformance.oracle.collectives import Call, after, before, receives
from conformance.spec.collectives.perform import issue
from conformance.spec.parameters import ops
from conformance.spec.waiting import PATIENCE_S, within_patience

chapter = Chapter("collectives", source="derived: p2p/dropped-handles, for collectives")

OTHERS = [
    "all_reduce",
    *ops("reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *ops("all_to_all", "all_to_all_single"),
]


def polled(me: Me, call: Call, patience_s: float) -> tuple[bool, list[Tensor]]:
    """Whether it was completed by itself, and the outputs at that moment."""
    buffers = before(call, me.rank, me.world_size)
    taken = [x.to(me.device) for x in buffers.taken]
    work = issue(call, [x.to(me.device) for x in buffers.given], taken, async_op=True)
    completed = within_patience(work.is_completed, patience_s)
    seen = [x.clone() for x in taken]
    work.wait()
    return completed, seen


def check_polled(ranks: Ranks, op: str, numel: int, *, must_complete: bool) -> None:
    n = ranks.world_size
    call = Call(op, (numel,))
    got = ranks.run(polled, call, PATIENCE_S if must_complete else 0.5)
    judged = [r for r in range(n) if receives(call, r) and (must_complete or got[r][0])]
    assert_each_rank(
        [got[rank] for rank in judged],
        [(True, list(after(call, rank, n).taken)) for rank in judged],
        what=f"{call}: completed, and outputs at that moment",
        ranks=judged,
    )


few_and_many = pytest.mark.parametrize("numel", [5, 30_000], ids=["few", "many"])


@chapter.must(
    "work/completed-is-written",
    "Once is_completed is true, the outputs hold the result, even if wait was not called.",
    source="torch 2.13 docs, Work.is_completed",
    rests_on="work/completes-unwaited",
)
@world_sizes(2, 3)
@few_and_many
@pytest.mark.parametrize("op", OTHERS)
def test_what_is_completed_is_written(ranks: Ranks, op: str, numel: int) -> None:
    check_polled(ranks, op, numel, must_complete=True)


@chapter.must(
    "reduce_scatter/completed-is-written",
    "Once the Work of reduce_scatter or reduce_scatter_tensor reports completion, without a "
    "wait, the output holds the result.",
    source="torch 2.13 docs, is_completed",
    needs=("op:reduce_scatter", "reduce_op:sum"),
    rests_on="reduce_scatter/async",
)
@world_sizes(2)
@few_and_many
@pytest.mark.parametrize("op", ops("reduce_scatter", "reduce_scatter_tensor"))
def test_what_a_scatter_has_completed_is_written(ranks: Ranks, op: str, numel: int) -> None:
    """Of those that never say so nothing is expected here."""
    check_polled(ranks, op, numel, must_complete=False)


def dropped(me: Me, call: Call) -> list[Tensor]:
    """The outputs of an operation whose handle nobody has, as soon as they are right, or in the
    end; all ranks stay until all have looked."""
    buffers = before(call, me.rank, me.world_size)
    taken = [x.to(me.device) for x in buffers.taken]
    issue(call, [x.to(me.device) for x in buffers.given], taken, async_op=True)
    if receives(call, me.rank):
        want = after(call, me.rank, me.world_size).taken
        pairs = list(zip(taken, want, strict=True))
        within_patience(lambda: all(torch.equal(x.cpu(), y) for x, y in pairs))
    seen = [x.clone() for x in taken]
    dist.barrier()
    return seen


@chapter.must(
    "work/dropped-handles",
    "The outputs of an operation get their values even if its handle was dropped.",
    rests_on="all_reduce/async",
)
@needs("op:barrier")
@world_sizes(2, 3)
@pytest.mark.parametrize("op", [*OTHERS, *ops("reduce_scatter")])
def test_results_arrive_although_handles_are_dropped(ranks: Ranks, op: str) -> None:
    check_dropped(ranks, op)


@chapter.must(
    "reduce_scatter_tensor/dropped-handles",
    "The output of reduce_scatter_tensor gets its values even if the handle was dropped.",
    needs=("op:reduce_scatter_tensor", "reduce_op:sum"),
    rests_on="reduce_scatter_tensor/async",
)
@needs("op:barrier")
@world_sizes(2)
def test_a_scatter_arrives_although_its_handle_is_dropped(ranks: Ranks) -> None:
    check_dropped(ranks, "reduce_scatter_tensor")


def check_dropped(ranks: Ranks, op: str) -> None:
    n = ranks.world_size
    call = Call(op, (5,))
    got = ranks.run(dropped, call)
    judged = [rank for rank in range(n) if receives(call, rank)]
    want = [list(after(call, rank, n).taken) for rank in judged]
    assert_each_rank([got[rank] for rank in judged], want, what=str(call), ranks=judged)


def polled_barrier(me: Me) -> bool:
    work = dist.barrier(async_op=True)
    completed = within_patience(work.is_completed)
    work.wait()
    return completed


@covers("work/completes-unwaited")
@needs("op:barrier")
@world_sizes(2, 3)
def test_a_barrier_completes_although_nobody_waits(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(polled_barrier), [True] * ranks.world_size)


def barrier_of_one_who_waits_later(me: Me) -> bool:
    """Whether the others passed the barrier that rank 0 had issued and not waited for yet."""
    if me.rank:
        me.store.wait(["issued"])
        dist.barrier()
        me.store.set(f"rank {me.rank} has passed", "")
        return True
    work = dist.barrier(async_op=True)
    me.store.set("issued", "")
    try:
        others = [f"rank {rank} has passed" for rank in range(1, me.world_size)]
        me.store.wait(others, timedelta(seconds=PATIENCE_S))
        passed = True
    except dist.DistStoreError:
        passed = False
    work.wait()
    return passed


@chapter.must(
    "barrier/entered-when-issued",
    "With async_op, a rank has entered the barrier once it has issued it: the other ranks pass "
    "before its handle is waited for.",
    source="torch 2.13 docs, synchronous and asynchronous collective operations",
    needs="op:barrier",
    rests_on="barrier/async",
)
@world_sizes(2, 3)
def test_others_pass_a_barrier_before_its_handle_is_waited_for(ranks: Ranks) -> None:
    got = ranks.run(barrier_of_one_who_waits_later)
    assert_each_rank(got, [True] * ranks.world_size, what="whether the others have passed")
