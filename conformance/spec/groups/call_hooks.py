"""Hooks before and after each call of a group: when they are called, with what, and which ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    world_sizes,
)
from conformance.oracle.collectives import COLLECTIVES, Call, before
from conformance.spec.collectives.kinds import each
from conformance.spec.collectives.perform import everyone, issue
from conformance.spec.groups.membership_sums import mark, sum_marks, sum_of_marks
from conformance.spec.torch_versions import needs_method

chapter = Chapter(
    "groups",
    source="torch 2.15, c10d/Hooks.hpp and ProcessGroup.register_pre_hook",
    needs="feature:call_hooks",
)
pytestmark = needs_method(dist.ProcessGroup, "register_pre_hook")

HOOK, OTHER = 7, 3

# What hooks call a collective.
NAMES = {
    "all_reduce": "ALLREDUCE",
    "reduce": "REDUCE",
    "broadcast": "BROADCAST",
    "all_gather": "ALLGATHER",
    "all_gather_into_tensor": "ALLGATHER_BASE",
    "gather": "GATHER",
    "scatter": "SCATTER",
    "reduce_scatter": "REDUCE_SCATTER",
    "reduce_scatter_tensor": "REDUCE_SCATTER_BASE",
    "all_to_all": "ALLTOALL",
    "all_to_all_single": "ALLTOALL_BASE",
}
ROOTED = ("reduce", "broadcast", "gather", "scatter")
IN_PLACE = ("all_reduce", "reduce", "broadcast")
Seen = tuple[str, bool, list[int], list[int], int]


@contextmanager
def hooked(
    group: Any,
    pre: Callable[[Any], object] | None = None,
    post: Callable[[Any], object] | None = None,
    number: int = HOOK,
) -> Iterator[None]:
    """With these hooks, until the end."""
    if pre is not None:
        group.register_pre_hook(number, pre)
    if post is not None:
        group.register_post_hook(number, post)
    try:
        yield
    finally:
        group.unregister_pre_hook(number)
        group.unregister_post_hook(number)


@dataclass(frozen=True, slots=True)
class Fired:
    """What hooks saw of some calls.

    pre: name, whether it is asynchronous, elements of each input and output, and the root.
    post: name, whether it is asynchronous, and whether there is a handle.
    are_paired: whether the numbers of the calls after them are those before them, each once.
    """

    pre: list[Seen]
    post: list[tuple[str, bool, bool]]
    are_paired: bool


def fired(group: Any, calls: Callable[[], object]) -> Fired:
    pre: list[Any] = []
    post: list[Any] = []
    with hooked(group, pre.append, post.append):
        calls()
        numbers = [seen.op_id for seen in pre]
        are_paired = numbers == [seen.op_id for seen in post] and len(set(numbers)) == len(numbers)
        return Fired(
            [
                (
                    seen.name.name,
                    seen.async_op,
                    [x.numel() for x in seen.input_tensors],
                    [x.numel() for x in seen.output_tensors],
                    seen.root,
                )
                for seen in pre
            ],
            [(seen.name.name, seen.async_op, seen.work is not None) for seen in post],
            are_paired,
        )


def hooks_of(me: Me, op: str, asynchronous: bool, members: Sequence[int] | None) -> Fired | None:
    """What hooks saw of one collective, with the last rank of the group as its root."""
    group = dist.group.WORLD if members is None else dist.new_group(list(members))
    if members is not None and me.rank not in members:
        return None
    size = dist.get_world_size(group)
    call = Call(op, root=size - 1)
    buffers = before(call, dist.get_rank(group), size)
    given, taken = ([x.to(me.device) for x in xs] for xs in (buffers.given, buffers.taken))

    def collective() -> None:
        work = issue(call, given, taken, group, async_op=asynchronous)
        if asynchronous:
            work.wait()

    return fired(group, collective)


def expected(op: str, asynchronous: bool, rank: int, size: int) -> Fired:
    call = Call(op, root=size - 1)
    buffers = before(call, rank, size)
    inputs, outputs = ([x.numel() for x in xs] for xs in (buffers.given, buffers.taken))
    if op in IN_PLACE:
        inputs, outputs = outputs, []
    root = call.root if op in ROOTED else -1
    name = NAMES[op]
    return Fired(
        [(name, asynchronous, inputs, outputs, root)], [(name, asynchronous, True)], are_paired=True
    )


@chapter.must(
    "call_hooks/of-each-collective",
    "The hooks of a group are called once for each collective: before it with its name, whether it "
    "is asynchronous, its inputs, outputs and root, and after it with its handle and the same "
    "number.",
    rests_on="all_reduce/sum",
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("op", each(COLLECTIVES))
@world_sizes(2, 3)
def test_hooks_see_each_collective(ranks: Ranks, op: str, asynchronous: bool) -> None:
    n = ranks.world_size
    want = [expected(op, asynchronous, rank, n) for rank in range(n)]
    assert_each_rank(ranks.run(hooks_of, op, asynchronous, None), want)


@chapter.must(
    "call_hooks/of-a-subgroup",
    "Hooks of a subgroup see the root of a call by its rank in that group.",
    rests_on=("call_hooks/of-each-collective", "new_group/members"),
)
@pytest.mark.parametrize("op", each(ROOTED))
@world_sizes(3)
def test_roots_are_ranks_of_the_group(ranks: Ranks, op: str) -> None:
    want = [None, *(expected(op, False, rank, 2) for rank in range(2))]
    assert_each_rank(ranks.run(hooks_of, op, False, (1, 2)), want)


def hooks_of_a_barrier(me: Me) -> Fired:
    return fired(dist.group.WORLD, dist.barrier)


@chapter.must(
    "call_hooks/of-a-barrier",
    "A barrier is a call like any other, without tensors.",
    needs="op:barrier",
    rests_on="call_hooks/of-each-collective",
)
@world_sizes(2)
def test_hooks_see_a_barrier(ranks: Ranks) -> None:
    want = Fired([("BARRIER", False, [], [], -1)], [("BARRIER", False, True)], are_paired=True)
    assert_same_on_all_ranks(ranks.run(hooks_of_a_barrier), want=want)


def hooks_of_messages(me: Me) -> Fired:
    """Rank 0 sends to rank 1, which receives."""
    x = torch.ones(3, device=me.device)
    blocking, other, peer = (
        (dist.send, dist.isend, 1) if me.rank == 0 else (dist.recv, dist.irecv, 0)
    )

    def messages() -> None:
        blocking(x, peer)
        work = other(x, peer)
        assert work is not None
        work.wait()

    return fired(dist.group.WORLD, messages)


@chapter.must(
    "call_hooks/of-messages",
    "Hooks see a send with its tensor as input, and a receive with its tensor as output, both with "
    "the peer in the place of the root.",
    needs="op:send",
    rests_on=("call_hooks/of-each-collective", "p2p/delivers"),
)
@world_sizes(2)
def test_hooks_see_messages(ranks: Ranks) -> None:
    sends = Fired([("SEND", True, [3], [], 1)] * 2, [("SEND", True, True)] * 2, are_paired=True)
    receives = Fired([("RECV", True, [], [3], 0)] * 2, [("RECV", True, True)] * 2, are_paired=True)
    assert_each_rank(ranks.run(hooks_of_messages), [sends, receives])


def hooks_of_functional(me: Me) -> list[str]:
    names: list[str] = []
    with hooked(dist.group.WORLD, lambda seen: names.append(seen.name.name)):
        functional.all_reduce(mark(me), "sum", everyone()).sum().item()
    return names


@chapter.must(
    "call_hooks/of-functional-collectives",
    "Hooks of a group also see the calls that functional collectives make.",
    needs=("op:all_reduce", "reduce_op:sum"),
    rests_on=("call_hooks/of-each-collective", "functional/all_reduce"),
)
@world_sizes(2)
def test_hooks_see_functional_collectives(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(hooks_of_functional), want=["ALLREDUCE"])


def hooks_of_coalesced(me: Me) -> Fired:
    tensors = [mark(me), mark(me)]

    def coalesced() -> None:
        with dist._coalescing_manager():
            for x in tensors:
                dist.all_reduce(x)

    return fired(dist.group.WORLD, coalesced)


@chapter.should(
    "call_hooks/of-coalesced-calls",
    "All reductions that a coalescing manager joins are one call for the hooks, with the inputs of "
    "all of them.",
    source="observed, torch 2.15.0 gloo",
    needs=("feature:coalescing", "op:all_reduce", "reduce_op:sum"),
    rests_on=("call_hooks/of-each-collective", "coalescing/all_reduce"),
)
@world_sizes(2)
def test_hooks_see_coalesced_calls_as_one(ranks: Ranks) -> None:
    name = "ALLREDUCE_COALESCED"
    numel = sum_of_marks(range(2)).numel()
    want = Fired([(name, False, [numel, numel], [], -1)], [(name, False, True)], are_paired=True)
    assert_same_on_all_ranks(ranks.run(hooks_of_coalesced), want=want)


def values_before_and_after(me: Me) -> list[Tensor]:
    seen: list[Tensor] = []
    x = mark(me)

    def when_it_is_complete(call: Any) -> None:
        call.work.wait()
        seen.append(x.clone())

    def at_first(call: Any) -> None:
        seen.append(call.input_tensors[0].clone())

    with hooked(dist.group.WORLD, at_first, when_it_is_complete):
        dist.all_reduce(x, async_op=True)
    return seen


@chapter.must(
    "call_hooks/around-the-call",
    "The tensors that a hook before a call sees are the caller's, as they were before it; when the "
    "handle that a hook after it is given has been waited for, they hold the result.",
    needs=("op:all_reduce", "reduce_op:sum"),
    rests_on="call_hooks/of-each-collective",
)
@world_sizes(2)
def test_hooks_are_called_before_and_after(ranks: Ranks) -> None:
    n = ranks.world_size
    want = [[sum_of_marks([rank]), sum_of_marks(range(n))] for rank in range(n)]
    assert_each_rank(ranks.run(values_before_and_after), want)


def order_of_hooks(me: Me) -> list[str]:
    """Hooks come and go."""
    said: list[str] = []
    group: Any = dist.group.WORLD

    def says(word: str) -> Callable[[Any], None]:
        return lambda _: said.append(word)

    with (
        hooked(group, says("seventh"), says("after, seventh")),
        hooked(group, says("third"), says("after, third"), OTHER),
    ):
        sum_marks(me)
        said.append("replaced")
        group.register_pre_hook(HOOK, says("another"))
        sum_marks(me)
        said.append("without the third")
        group.unregister_pre_hook(OTHER)
        group.unregister_pre_hook(OTHER)
        sum_marks(me)
    said.append("without any")
    sum_marks(me)
    return said


@chapter.must(
    "call_hooks/by-number",
    "Several hooks are called in the order of their numbers; one takes the place of another of the "
    "same number; one that was taken away is not called any more, and to take it away twice is no "
    "error.",
    needs=("op:all_reduce", "reduce_op:sum"),
    rests_on="call_hooks/of-each-collective",
)
@world_sizes(2)
def test_hooks_go_by_numbers(ranks: Ranks) -> None:
    after = ["after, third", "after, seventh"]
    want = [
        *("third", "seventh", *after),
        *("replaced", "third", "another", *after),
        *("without the third", "another", *after),
        "without any",
    ]
    assert_same_on_all_ranks(ranks.run(order_of_hooks), want=want)


def hooks_of_another_group(me: Me) -> int:
    calls: list[Any] = []
    other = dist.new_group()
    with hooked(dist.group.WORLD, calls.append, calls.append):
        sum_marks(me, other)
    return len(calls)


@chapter.must(
    "call_hooks/of-one-group",
    "Hooks of a group see no calls of another one, even of the same ranks.",
    needs=("op:all_reduce", "reduce_op:sum"),
    rests_on=("call_hooks/of-each-collective", "new_group/members"),
)
@world_sizes(2)
def test_hooks_belong_to_their_group(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(hooks_of_another_group), want=0)


class RefusedError(Exception):
    """What a hook raises."""


def after_a_hook_has_raised(me: Me, is_before: bool) -> tuple[str, Tensor, Tensor]:
    """What came of it: what was raised, the tensor, and a sum afterwards."""

    def refuses(_: Any) -> None:
        raise RefusedError(f"not on rank {me.rank}")

    x = mark(me)
    raised = "nothing"
    with hooked(dist.group.WORLD, *([refuses] if is_before else [None, refuses])):
        try:
            dist.all_reduce(x)
        except RefusedError as error:
            raised = str(error)
    return raised, x, sum_marks(me)


@chapter.must(
    "call_hooks/raise-before",
    "What a hook before a call raises is raised by the call, which is not made; the group works "
    "afterwards.",
    source="observed, torch 2.15.0 gloo",
    needs=("op:all_reduce", "reduce_op:sum"),
    rests_on="call_hooks/of-each-collective",
)
@world_sizes(2)
def test_a_hook_refuses_a_call(ranks: Ranks) -> None:
    n = ranks.world_size
    total = sum_of_marks(range(n))
    want = [(f"not on rank {rank}", sum_of_marks([rank]), total) for rank in range(n)]
    assert_each_rank(ranks.run(after_a_hook_has_raised, True), want)


@chapter.must(
    "call_hooks/raise-after",
    "What a hook after a call raises is raised by the call; the group works afterwards.",
    source="observed, torch 2.15.0 gloo",
    needs=("op:all_reduce", "reduce_op:sum"),
    rests_on="call_hooks/of-each-collective",
)
@world_sizes(2)
def test_a_hook_raises_after_a_call(ranks: Ranks) -> None:
    n = ranks.world_size
    got = ranks.run(after_a_hook_has_raised, False)
    total = sum_of_marks(range(n))
    want = [(f"not on rank {rank}", total) for rank in range(n)]
    assert_each_rank([(raised, after) for raised, _, after in got], want)
