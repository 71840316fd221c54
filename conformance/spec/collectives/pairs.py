"""Two collectives of any kinds back to back: completion, reused tensors and chained results.

Every ordered pair of operations is tried. Ranks do not arrive together: the last one comes when the
others have issued what they can without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    adapts,
    assert_each_rank,
    assert_that,
    needs,
    world_sizes,
)
from conformance.oracle.collectives import COLLECTIVES, Call, after, before, receives
from conformance.oracle.data import sample
from conformance.oracle.programs import BETWEEN, IN_PLACE, Program, Step, run_alone
from conformance.spec.collectives.kinds import COALESCED, claimed, each
from conformance.spec.collectives.perform import issue
from conformance.spec.collectives.programs import run_program
from conformance.spec.collectives.store_sync import appears, tick, wait_for_ticks
from conformance.spec.collectives.strategies import ROOTED
from conformance.spec.parameters import ops
from conformance.spec.waiting import let_the_device_finish

chapter = Chapter("collectives", source="derived")


SHAPE = (4,)
# "send" is a message to the next rank and one from the rank before.
KINDS = (*COLLECTIVES, "barrier", "send", COALESCED)


EACH_KIND = each(KINDS)


@dataclass(frozen=True, slots=True)
class Begun:
    """An operation that was issued. given: what it may still read."""

    works: list[Any] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)
    taken: list[Tensor] = field(default_factory=list)

    def waited(self) -> list[Tensor]:
        """What it has filled, once its handles have been waited for."""
        for work in self.works:
            work.wait()
        return [x.clone() for x in self.taken]


def begin(me: Me, kind: str, salt: int, *, async_op: bool) -> Begun:
    if kind == "barrier":
        return Begun(handles(dist.barrier(async_op=async_op)))
    if kind == "send":
        x = sample(SHAPE, "float32", me.rank, salt).to(me.device)
        y = torch.zeros(SHAPE, device=me.device)
        sending = dist.isend(x, (me.rank + 1) % me.world_size)
        source = (me.rank - 1) % me.world_size
        if async_op:
            return Begun(handles(sending, dist.irecv(y, source)), [x], [y])
        dist.recv(y, source)
        return Begun(handles(sending), [x], [y])
    if kind == COALESCED:
        xs = [sample(SHAPE, "float32", me.rank, salt + i).to(me.device) for i in range(2)]
        with dist._coalescing_manager(async_ops=async_op) as manager:
            for x in xs:
                dist.all_reduce(x)
        return Begun([manager] if async_op else [], [], xs)
    call = call_of(kind, salt, me.world_size)
    buffers = before(call, me.rank, me.world_size)
    given = [x.to(me.device) for x in buffers.given]
    taken = [x.to(me.device) for x in buffers.taken]
    return Begun(handles(issue(call, given, taken, async_op=async_op)), given, taken)


def handles(*works: Any) -> list[Any]:
    return [work for work in works if work is not None]


def call_of(kind: str, salt: int, world_size: int) -> Call:
    """Roots of a pair are different ranks."""
    return Call(kind, SHAPE, root=salt % world_size if kind in ROOTED else 0, salt=salt)


def left_by(kind: str, salt: int, rank: int, world_size: int) -> list[Tensor] | None:
    """What `begin` fills in the end; None where nothing is said of it."""
    if kind == "barrier":
        return []
    if kind == "send":
        return [sample(SHAPE, "float32", (rank - 1) % world_size, salt)]
    if kind == COALESCED:
        sums = [Call("all_reduce", SHAPE, salt=salt + i) for i in range(2)]
        return [after(one, rank, world_size).taken[0] for one in sums]
    call = call_of(kind, salt, world_size)
    return list(after(call, rank, world_size).taken) if receives(call, rank) else None


# How two operations are waited for. Of each way: whether the second blocks, and whether the first
# is waited for before it.
WAYS = {
    "the second blocks": (True, False),
    "in order": (False, True),
    "in reverse order": (False, False),
}


def in_pairs(
    me: Me, first: str, made: Sequence[tuple[str, str]], gated: bool
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """What the first operation and each second one have left once they had been waited for.

    made: second operations, each with a way.
    gated: the last rank comes when the others have issued what does not block.
    """
    seen = []
    for number, (second, way) in enumerate(made):
        blocks, is_first_waited_first = WAYS[way]
        is_late = gated and me.rank == me.world_size - 1
        if is_late:
            wait_for_ticks(me.store, f"{number} issued")
        try:
            one = begin(me, first, 1, async_op=True)
            other = None if blocks else begin(me, second, 3, async_op=True)
        finally:
            if gated and not is_late:
                tick(me.store, f"{number} issued", of=me.world_size - 1)
        other = other or begin(me, second, 3, async_op=False)
        if is_first_waited_first:
            seen.append((one.waited(), other.waited()))
        else:
            of_the_second = other.waited()
            seen.append((one.waited(), of_the_second))
    return seen


@chapter.must(
    "order/pairs",
    "An operation that is issued while another one of the group is pending, blocking or not, gets "
    "its own result, and so does the other one, whatever the two are, and in whichever order they "
    "are waited for.",
    rests_on="order/issued",
)
@adapts()
@world_sizes(2, 3)
@pytest.mark.parametrize("first", EACH_KIND)
def test_two_operations_of_any_kinds(ranks: Ranks, first: str) -> None:
    n = ranks.world_size
    made = [(second, way) for second in claimed(KINDS, ranks.target) for way in WAYS]
    gated = ranks.target.capabilities.has("feature:nonblocking")
    got = ranks.run(in_pairs, first, made, gated)
    for number, (second, way) in enumerate(made):
        for index, (kind, salt) in enumerate([(first, 1), (second, 3)]):
            want = [left_by(kind, salt, rank, n) for rank in range(n)]
            judged = [rank for rank in range(n) if want[rank] is not None]
            assert_each_rank(
                [got[rank][number][index] for rank in judged],
                [want[rank] for rank in judged],
                what=f"{first}, then {second} ({way}): the result of {kind}",
                ranks=judged,
            )


def passed_a_barrier(me: Me, kind: str, gated: bool) -> tuple[list[bool], list[Tensor]]:
    """Which handles of an operation were completed behind a barrier, and what it had filled."""
    is_late = gated and me.rank == me.world_size - 1
    if is_late:
        wait_for_ticks(me.store, "issued")
    try:
        begun = begin(me, kind, 1, async_op=True)
    finally:
        if gated and not is_late:
            tick(me.store, "issued", of=me.world_size - 1)
    dist.barrier()
    let_the_device_finish(me)
    seen = [work.is_completed() for work in begun.works], [x.clone() for x in begun.taken]
    begun.waited()
    return seen


# What torch's Work of a reduce_scatter or of messages says has requirements of its own.
BEFORE_A_BARRIER = [kind for kind in COLLECTIVES if not kind.startswith("reduce_scatter")]


@chapter.should(
    "barrier/after-pending",
    "Once a rank has passed a barrier, the collectives that it had issued in the group before are "
    "complete on it: is_completed is true, and the outputs hold the results.",
    source="torch 2.13, ProcessGroupGloo::barrier: 'Wait on prior work to complete'",
    needs="op:barrier",
    rests_on=("barrier/waits-for-all", "order/pairs"),
)
@world_sizes(3)
@pytest.mark.parametrize("kind", ops(*BEFORE_A_BARRIER))
def test_nothing_is_pending_behind_a_barrier(ranks: Ranks, kind: str) -> None:
    n = ranks.world_size
    gated = ranks.target.capabilities.has("feature:nonblocking")
    got = ranks.run(passed_a_barrier, kind, gated)
    want = [left_by(kind, 1, rank, n) for rank in range(n)]
    judged = [rank for rank in range(n) if want[rank] is not None]
    assert_each_rank(
        [got[rank] for rank in judged],
        [([True], want[rank]) for rank in judged],
        what=f"{kind} behind a barrier: completed, and outputs",
        ranks=judged,
    )


def early_barriers(me: Me, kinds: Sequence[str], late: int) -> list[str]:
    """Operations behind which a rank left the barrier before the late one came; told by that."""
    early = []
    for kind in kinds:
        begin(me, kind, 1, async_op=False).waited()
        if me.rank == late:
            wait_for_ticks(me.store, f"coming behind {kind}")
            if appears(me.store, f"left behind {kind}"):
                early.append(kind)
        else:
            tick(me.store, f"coming behind {kind}", of=me.world_size - 1)
        dist.barrier()
        me.store.set(f"left behind {kind}", "")
    return early


@chapter.must(
    "barrier/behind-a-collective",
    "A barrier right behind another operation in which all ranks have taken part waits for all of "
    "them too.",
    source="torch 2.13 docs, barrier; derived: a rank may do something in between",
    needs="op:barrier",
    rests_on=("barrier/waits-for-all", "order/pairs"),
)
@adapts()
@world_sizes(3)
@pytest.mark.parametrize("late", [0, 2])
def test_a_barrier_behind_each_operation(ranks: Ranks, late: int) -> None:
    kinds = [kind for kind in claimed(KINDS, ranks.target) if kind != "barrier"]
    early = ranks.run(early_barriers, kinds, late)[late]
    words = f"a rank left the barrier before rank {late} had come, behind {', '.join(early)}"
    assert_that(not early, words, late)


def overwritten_at_once(me: Me, made: Sequence[tuple[Call, bool]]) -> list[list[Tensor]]:
    """Every rank overwrites all its tensors as soon as it can; what it found in them before.

    The last rank comes when the others have done so, or a short while after they have come: some
    operations need it.

    made: calls, each with whether it is asynchronous.
    """
    is_late = me.rank == me.world_size - 1
    found = []
    for number, (call, async_op) in enumerate(made):
        buffers = before(call, me.rank, me.world_size)
        given = [x.to(me.device, copy=True) for x in buffers.given]
        taken = [x.to(me.device, copy=True) for x in buffers.taken]
        if is_late:
            appears(me.store, f"{number} overwritten all")
        work = issue(call, given, taken, async_op=async_op)
        if async_op:
            work.wait()
        found.append([x.clone() for x in taken])
        for x in (*given, *taken):
            x.fill_(99)
        if not is_late:
            tick(me.store, f"{number} overwritten", of=me.world_size - 1)
    return found


@chapter.must(
    "order/overwritten-at-once",
    "As soon as a collective has returned on a rank, or its handle was waited for, the rank may "
    "overwrite the tensors that it gave and those that it got: the other ranks get what they held "
    "before.",
    source="torch 2.13 docs, synchronous and asynchronous collective operations",
    rests_on="all_reduce/async",
)
@world_sizes(3)
@pytest.mark.parametrize("op", ops(*COLLECTIVES))
def test_tensors_may_be_overwritten_at_once(ranks: Ranks, op: str) -> None:
    n = ranks.world_size
    made = [
        (Call(op, (numel,), root=root), async_op)
        for root in ([0, n - 1] if op in ROOTED else [0])
        for numel in (5, 30_000)
        for async_op in (False, True)
    ]
    got = ranks.run(overwritten_at_once, made)
    for number, (call, async_op) in enumerate(made):
        judged = [rank for rank in range(n) if receives(call, rank)]
        assert_each_rank(
            [got[rank][number] for rank in judged],
            [list(after(call, rank, n).taken) for rank in judged],
            what=f"{call}, async_op={async_op}",
            ranks=judged,
        )


def one_after_the_other(first: str, second: str, world_size: int, deferred: bool) -> Program:
    """The second operation reads, and writes if it works in place, what the first has written."""
    place = 1 if second in IN_PLACE else 2
    steps = (
        Step(first, source=1 if first in IN_PLACE else 0, target=1, root=0, deferred=deferred),
        Step(second, source=1, target=place, root=1, deferred=deferred),
    )
    return Program((tuple(range(world_size)),), steps)


def run_programs(me: Me, programs: Sequence[Program]) -> list[list[Tensor]]:
    return [run_program(me, program) for program in programs]


@chapter.must(
    "order/chained",
    "What a collective has written may be the input of the next one at once, whatever the two are.",
    rests_on="order/programs",
)
@adapts()
@needs("dtype:int64")
@world_sizes(3)
@pytest.mark.parametrize("first", [p for p in EACH_KIND if p.values[0] in (*IN_PLACE, *BETWEEN)])
def test_a_result_is_the_next_input(ranks: Ranks, first: str) -> None:
    n = ranks.world_size
    made = {
        f"{first}, then {second} of its result, {how}": one_after_the_other(
            first, second, n, how == "async"
        )
        for second in claimed((*IN_PLACE, *BETWEEN), ranks.target)
        for how in ("blocking", "async")
    }
    got = ranks.run(run_programs, list(made.values()))
    for number, (what, program) in enumerate(made.items()):
        seen = [got[rank][number] for rank in range(n)]
        assert_each_rank(seen, run_alone(program), what=what)


def one_input_of_two(me: Me, op: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What two calls leave that are pending at once, and what the second one leaves alone.

    Rank 0 gives both the same tensors, the others do not.
    """
    root = me.world_size - 1 if op == "gather" else 0
    calls = [Call(op, SHAPE, root=root, salt=salt) for salt in (1, 3)]
    buffers = [before(call, me.rank, me.world_size) for call in calls]
    given = [[x.to(me.device) for x in one.given] for one in buffers]
    if me.rank == 0:
        given[1] = given[0]
    taken = [[x.to(me.device, copy=True) for x in buffers[i].taken] for i in (0, 1, 1)]
    works = [issue(calls[i], given[i], taken[i], async_op=True) for i in (0, 1)]
    for work in works:
        work.wait()
    issue(calls[1], [x.clone() for x in given[1]], taken[2])
    return taken[0], taken[1], taken[2]


@chapter.must(
    "order/one-input-of-two",
    "One tensor may be the input of two pending collectives: each has a result of its own.",
    rests_on="order/pairs",
)
@world_sizes(3)
@pytest.mark.parametrize("op", ops(*(op for op in COLLECTIVES if op not in IN_PLACE)))
def test_two_collectives_read_one_tensor(ranks: Ranks, op: str) -> None:
    for rank, (first, second, alone) in enumerate(ranks.run(one_input_of_two, op)):
        root = ranks.world_size - 1 if op == "gather" else 0
        want = list(after(Call(op, SHAPE, root=root, salt=1), rank, ranks.world_size).taken)
        assert_each_rank([first], [want], what="the first result", ranks=[rank])
        assert_each_rank([second], [alone], what="the second result", ranks=[rank])
