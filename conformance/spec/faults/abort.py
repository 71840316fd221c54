"""Abort of a process group: pending and later operations raise, and other groups keep working."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_that,
    deadline,
    not_probed,
    world_sizes,
)
from conformance.spec.groups.membership_sums import mark, sum_marks, sum_of_marks

chapter = Chapter("faults", needs="feature:timeouts")

pytestmark = not_probed()


def abort_what_waits(me: Me) -> list[str]:
    """A thread of rank 0 waits in a group that no other rank joins, until it is aborted. Returns
    what did not go as it should."""
    doomed, other = dist.new_group(), dist.new_group()
    wrong: list[str] = []
    if me.rank == 0:
        work = dist.all_reduce(mark(me), group=doomed, async_op=True)

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError:
                return
            wrong.append("the wait returned")

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        doomed.abort()
        waiter.join()
        me.store.set("rank 0 has aborted", "1")
    me.store.wait(["rank 0 has aborted"])
    if not torch.equal(sum_marks(me, other).cpu(), sum_of_marks(range(me.world_size))):
        wrong.append("another group is wrong")
    return wrong


@chapter.should(
    "abort/ends-what-waits",
    "abort of a group makes every operation raise that this rank is waiting for in the group.",
    source="torch 2.13, ProcessGroup.abort; 'currently only works with the NCCL backend'",
    needs="feature:abort",
    rests_on="all_reduce/sum",
)
@world_sizes(2)
@deadline(5)
def test_abort_ends_what_waits(ranks: Ranks) -> None:
    for rank, wrong in enumerate(ranks.run(abort_what_waits)):
        assert_that(not wrong, "; ".join(wrong), rank)


def go_on_after_an_abort(me: Me) -> None:
    doomed = dist.new_group()
    sum_marks(me, doomed)
    me.store.set(f"rank {me.rank} has summed", "1")
    if me.rank == 0:
        me.store.wait([f"rank {rank} has summed" for rank in range(me.world_size)])
        doomed.abort()
        for _ in range(2):
            with pytest.raises(RuntimeError):
                dist.all_reduce(mark(me), group=doomed)
        me.store.set("rank 0 is through", "1")
    me.store.wait(["rank 0 is through"])
    dist.destroy_process_group(doomed)
    sum_marks(me)


@chapter.should(
    "abort/ends-the-group",
    "After an abort the rank's later operations in this group raise, other groups work, and "
    "everything can be destroyed.",
    source="torch 2.13, ProcessGroup.abort",
    needs="feature:abort",
    rests_on="abort/ends-what-waits",
)
@world_sizes(2)
@deadline(5)
def test_abort_ends_the_group(ranks: Ranks) -> None:
    ranks.run(go_on_after_an_abort)
