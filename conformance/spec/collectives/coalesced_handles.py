"""Work objects of asynchronous coalesced collectives: nonblocking calls, completion and results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch.distributed as dist
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, needs, world_sizes
from conformance.oracle.collectives import Call, after, before
from conformance.spec.collectives.perform import everyone, issue
from conformance.spec.waiting import within_patience

chapter = Chapter("collectives", needs=("feature:coalescing", "feature:nonblocking"))

SHAPES = [(3,), (2, 2), (5, 1)]
SALTS = range(4)  # of calls in a row; each has other contributions
OTHERS_ISSUE_WITHIN_S = 10.0  # the ranks after this one have yet to issue the calls


@dataclass(frozen=True, slots=True)
class Way:
    """Several calls in one.

    op: of each.
    in_a_manager: by a coalescing manager, or by a function that takes a list.
    """

    op: str
    in_a_manager: bool = True

    def calls(self, salt: int) -> list[Call]:
        return [Call(self.op, shape, salt=salt + 10 * i) for i, shape in enumerate(SHAPES)]


def issued(
    calls: list[Call],
    tensors: list[tuple[list[Tensor], list[Tensor]]],
    way: Way,
    group: dist.ProcessGroup,
) -> tuple[Callable[[], object], Callable[[], bool]]:
    """How to wait for all of them, and how to ask whether they are complete."""
    if not way.in_a_manager:
        outputs = [taken[0] for _, taken in tensors]
        work = dist.all_reduce_coalesced(outputs, group=group, async_op=True)
        return work.wait, work.done
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for call, (given, taken) in zip(calls, tensors, strict=True):
            issue(call, given, taken, group, async_op=True)
    return manager.wait, lambda: all(work.is_completed() for work in manager.works)


def in_turns(me: Me, way: Way, waits: bool, members: tuple[int, ...]) -> list[list[Tensor]]:
    """The results of some coalesced calls, each issued when the rank before has issued it."""
    group = everyone() if len(members) == me.world_size else dist.new_group(list(members))
    if me.rank not in members:
        return []
    results = []
    rank = members.index(me.rank)
    for salt in SALTS:
        calls = way.calls(salt)
        buffers = [before(call, rank, len(members)) for call in calls]
        tensors = [
            ([x.to(me.device) for x in b.given], [x.to(me.device) for x in b.taken])
            for b in buffers
        ]
        if rank:
            me.store.wait([f"call {salt}, {rank - 1} of {members}"])
        wait, is_complete = issued(calls, tensors, way, group)
        me.store.set(f"call {salt}, {rank} of {members}", "")
        if waits:
            wait()
        else:
            assert within_patience(is_complete, OTHERS_ISSUE_WITHIN_S), "it is never complete"
        results.append([taken[0] for _, taken in tensors])
    return results


def check(ranks: Ranks, way: Way, *, waits: bool) -> None:
    """Of four ranks, three make the calls as a group of their own, too."""
    all_ranks = tuple(range(ranks.world_size))
    for members in (all_ranks, all_ranks[1:]) if len(all_ranks) == 4 else (all_ranks,):
        n = len(members)
        want = [
            [[after(call, rank, n).taken[0] for call in way.calls(salt)] for salt in SALTS]
            for rank in range(n)
        ]
        got = ranks.run(in_turns, way, waits, members)
        assert_each_rank([got[rank] for rank in members], want, ranks=members)


REDUCE = pytest.param(Way("all_reduce"), id="all_reduce")
LIST = pytest.param(Way("all_reduce", in_a_manager=False), id="list")
GATHER = pytest.param(
    Way("all_gather_into_tensor"),
    id="all_gather_into_tensor",
    marks=needs("op:all_gather_into_tensor"),
)
SCATTER = pytest.param(
    Way("reduce_scatter_tensor"),
    id="reduce_scatter_tensor",
    marks=needs("op:reduce_scatter_tensor"),
)


@chapter.must(
    "coalescing/in-turns",
    "Asynchronous coalesced calls return before other ranks have joined in, one after another, and "
    "the results are there once they were waited for.",
    source="derived; torch 2.13, _coalescing_manager",
    rests_on="coalescing/async",
)
@pytest.mark.parametrize("way", [REDUCE, LIST, GATHER, SCATTER])
@world_sizes(2, 3, 4)
def test_coalesced_calls_in_turns(ranks: Ranks, way: Way) -> None:
    check(ranks, way, waits=True)


@chapter.must(
    "coalescing/completes-unwaited",
    "Coalesced all_reduces and gathers complete without a wait, and the results are there then.",
    source="torch 2.13 docs, Work.is_completed",
    rests_on="coalescing/in-turns",
)
@pytest.mark.parametrize("way", [REDUCE, LIST, GATHER])
@world_sizes(2, 3, 4)
def test_coalesced_calls_complete_without_a_wait(ranks: Ranks, way: Way) -> None:
    check(ranks, way, waits=False)
