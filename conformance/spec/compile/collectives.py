"""Collectives in compiled functions: results, gradients, and which calls reach the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from conformance import Chapter, Me, Ranks, needs, not_probed, world_sizes
from conformance.harness.recorder import unrecorded
from conformance.harness.traces import RecordingGroup, record
from conformance.spec.collectives.perform import everyone
from conformance.spec.compile.facts import (
    BACKENDS,
    compiled,
    compiler,
    mine,
    settled,
    unlike_eager,
)
from conformance.spec.facts import check_fact, rows, unlike

SOURCE = "torch 2.13, torch.compile of torch.distributed._functional_collectives"
REMAPPED = "torch 2.13, _functional_collectives, traceable_collective_remaps"
NEEDS = ("feature:compiled_calls", "reduce_op:sum")
GATHERS = (*NEEDS, "op:all_gather_into_tensor", "op:reduce_scatter_tensor", "feature:coalescing")
EXCHANGES = (*NEEDS, "op:all_to_all_single")

chapter = Chapter("compile", source=SOURCE, needs=NEEDS)

gathers = needs("op:all_gather_into_tensor", "feature:coalescing")
scatters = needs("op:reduce_scatter_tensor", "feature:coalescing")
exchanges = needs("op:all_to_all_single")


def name_of(group: Any) -> Any:
    """By which compiled functions know a group, whatever its class."""
    return group.group_name


# Results are used without a word of waiting, and go on into the next collective.
FUNCTIONAL: dict[str, Callable[[Tensor, Any], Any]] = {
    "all_reduce": lambda x, g: functional.all_reduce(x.t() + 1, "sum", g).flatten() * 2,
    "broadcast": lambda x, g: functional.broadcast(x, 1, g) * 2,
    "gathers": lambda x, g: functional.all_gather_tensor(
        functional.all_reduce(x, "sum", g).t() + x, 1, g
    ),
    "scatters": lambda x, g: functional.reduce_scatter_tensor(
        functional.all_reduce(x, "sum", g) * x, "sum", 1, g
    ),
    "exchanges": lambda x, g: functional.all_to_all_single(x * 2, None, None, g).sum(0),
    "coalesced": lambda x, g: [
        y + x for y in functional.all_reduce_coalesced([x, x * 2], "sum", g)
    ],
}


def functional_calls(me: Me, name: str) -> list[str]:
    group, call = name_of(everyone()), FUNCTIONAL[name]
    return unlike_eager(lambda x: call(x, group), mine(me))


@chapter.must(
    "compile/functional",
    "Functional collectives in a compiled function return what they return without the compiler, "
    "also where a result is used, reshaped or passed to the next collective without a wait.",
    rests_on="functional/all_reduce",
)
@world_sizes(2)
@not_probed()
@pytest.mark.parametrize(
    "name",
    [
        "all_reduce",
        pytest.param("broadcast", marks=needs("op:broadcast")),
        pytest.param("gathers", marks=gathers),
        pytest.param("scatters", marks=scatters),
        pytest.param("exchanges", marks=exchanges),
        pytest.param("coalesced", marks=needs("feature:coalescing")),
    ],
)
def test_functional(ranks: Ranks, name: str) -> None:
    check_fact(ranks, functional_calls, name)


def reduced(x: Tensor, **how: Any) -> Any:
    y = x * 2
    return unrecorded(dist.all_reduce)(y, **how), y + 1


def largest(x: Tensor) -> Any:
    unrecorded(dist.all_reduce)(x, dist.ReduceOp.MAX)
    return x + 1


def gathered(x: Tensor) -> Any:
    out = x.new_empty(x.size(0) * dist.get_world_size(), x.size(1))
    return unrecorded(dist.all_gather_into_tensor)(out, x + dist.get_rank()), out * 2


def scattered(x: Tensor) -> Any:
    out = x.new_empty(x.size(0) // dist.get_world_size(), x.size(1))
    return unrecorded(dist.reduce_scatter_tensor)(out, x), out * 2


def exchanged(x: Tensor) -> Any:
    out = torch.empty_like(x)
    return unrecorded(dist.all_to_all_single)(out, x), out * 2


def row_reduced(x: Tensor) -> Any:
    flat = x.view(-1)
    unrecorded(dist.all_reduce)(x[1])
    return flat * 2


def part_gathered(x: Tensor) -> Any:
    count = dist.get_world_size() * x.size(0)
    out = x.new_zeros(count + 2, x.size(1))
    unrecorded(dist.all_gather_into_tensor)(out[1:-1], x)
    return out


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    f.__name__: f
    for f in (reduced, largest, gathered, scattered, exchanged, row_reduced, part_gathered)
}


def in_place(me: Me, name: str) -> list[str]:
    return unlike_eager(IN_PLACE[name], mine(me))


@chapter.must(
    "compile/in-place",
    "A collective of torch.distributed in a compiled function writes the tensor that it is given, "
    "and returns None.",
    source=f"{REMAPPED}; pytorch#174280",
    rests_on="all_reduce/sum",
)
@world_sizes(2)
@not_probed()
@pytest.mark.parametrize(
    "name",
    [
        "reduced",
        pytest.param("largest", marks=needs("reduce_op:max")),
        pytest.param("gathered", marks=gathers),
        pytest.param("scattered", marks=scatters),
        pytest.param("exchanged", marks=exchanges),
    ],
)
def test_in_place(ranks: Ranks, name: str) -> None:
    check_fact(ranks, in_place, name)


@chapter.must(
    "compile/in-place/views",
    "A collective in a compiled function that is given a part of a tensor writes this part, which "
    "other views of the tensor show.",
    source=REMAPPED,
    rests_on="compile/in-place",
)
@world_sizes(2)
@not_probed()
@pytest.mark.parametrize("name", ["row_reduced", pytest.param("part_gathered", marks=gathers)])
def test_views(ranks: Ranks, name: str) -> None:
    check_fact(ranks, in_place, name)


def gathered_and_scattered(x: Tensor, weight: Tensor, group: Any) -> Any:
    wide = functional.all_gather_tensor_autograd(x * weight, 0, group)
    mixed = torch.tanh(wide) @ wide.t()
    return functional.reduce_scatter_tensor_autograd(mixed, "sum", 0, group) * 2


def sent_and_returned(x: Tensor, weight: Tensor, group: Any) -> Any:
    sent = functional.all_to_all_single_autograd(x * weight, None, None, group)
    return functional.all_to_all_single_autograd(torch.tanh(sent), None, None, group)


def only_gathered(x: Tensor, weight: Tensor, group: Any) -> Any:
    return functional.wait_tensor(functional.all_gather_tensor_autograd(x * weight, 0, group))


def trained(function: Any, x: Tensor, group: RecordingGroup) -> list[Any]:
    """Output, gradients, and the calls of forward and of backward."""
    x = x.clone().requires_grad_()
    weight = torch.full_like(x[0], 0.5).requires_grad_()
    output = function(x, weight, name_of(group))
    # Each rank asks for a gradient of its own.
    output.backward(torch.ones_like(output) * (1 + dist.get_rank()))
    calls = [str(issued) for issued in group.take()]
    return [settled([output, x.grad, weight.grad]), calls]


def unlike_trained(me: Me, function: Any, which: int, what: str) -> list[str]:
    group, found = record(), list[str]()
    want = trained(function, mine(me), group)
    for backend in BACKENDS:
        with compiler():
            got = trained(compiled(function, backend), mine(me), group)
        found += unlike(f"{what} with {backend}", got[which], want[which])
    return found


def gradients(me: Me, function: Any) -> list[str]:
    return unlike_trained(me, function, 0, "output and gradients")


def calls(me: Me, function: Any) -> list[str]:
    return unlike_trained(me, function, 1, "calls")


@world_sizes(2)
@not_probed()
@pytest.mark.parametrize(
    "about",
    rows(
        (
            chapter.must(
                "compile/gradients/gathers",
                "Gradients go through all_gather_tensor_autograd and "
                "reduce_scatter_tensor_autograd in a compiled function as they do without the "
                "compiler.",
                rests_on="compile/functional",
                needs=GATHERS,
            ),
            (gradients, gathered_and_scattered),
        ),
        (
            chapter.must(
                "compile/gradients/of-outputs",
                "A compiled function whose last call is all_gather_tensor_autograd has the "
                "gradients that it has without the compiler.",
                source=f"{SOURCE}; pytorch#148701",
                rests_on="compile/functional",
                needs=GATHERS,
            ),
            (gradients, only_gathered),
        ),
        (
            chapter.must(
                "compile/gradients/exchanges",
                "Gradients go through all_to_all_single_autograd in a compiled function as they do "
                "without the compiler.",
                rests_on="compile/functional",
                needs=EXCHANGES,
            ),
            (gradients, sent_and_returned),
        ),
        (
            chapter.must(
                "compile/calls",
                "Forward and backward of a compiled function issue the collectives that they issue "
                "without the compiler, once each and in the same order.",
                rests_on="compile/functional",
                needs=GATHERS,
            ),
            (calls, gathered_and_scattered),
        ),
    ),
)
def test_trained(ranks: Ranks, about: Any) -> None:
    fact, function = about
    check_fact(ranks, fact, function)


def used_by_some(x: Tensor, group: Any, is_used: bool) -> Any:
    y = functional.all_reduce(x, "sum", group)
    return y * 2 if is_used else x * 2


def unused(me: Me) -> list[str]:
    """On one rank alone the results are used. Groups are of one rank each, so that a missing call
    keeps no other rank waiting."""
    found: list[str] = []
    own = [record([rank]) for rank in range(me.world_size)][me.rank]
    for backend in BACKENDS:
        for trains in (False, True):
            with compiler():
                run = compiled(used_by_some, backend)
                run(mine(me).requires_grad_(trains), name_of(own), me.rank == 0)
            found += unlike(f"calls with {backend}", len(own.take()), 1)
    return found


@chapter.must(
    "compile/unused-results",
    "A collective in a compiled function is issued on ranks that do not use its result, too.",
    source="torch docs: collectives are called by all ranks of the group",
    rests_on="compile/functional",
)
@world_sizes(2)
@not_probed()
def test_unused_results(ranks: Ranks) -> None:
    check_fact(ranks, unused)


def sum_of_both(x: Tensor, other: Tensor, weight: Tensor, group: Any) -> Any:
    first, second = (functional.all_reduce(y, "sum", group) for y in (x, other))
    return (first * 2 + second) * weight


def equal_inputs(me: Me) -> list[str]:
    """In groups of one rank each, so that a missing call keeps no other rank waiting."""
    found: list[str] = []
    own = [record([rank]) for rank in range(me.world_size)][me.rank]
    x = mine(me)
    for backend in BACKENDS:
        for what, other in (("equal", x), ("different", x + 1)):
            with compiler():
                weight = torch.ones_like(x).requires_grad_()
                compiled(sum_of_both, backend)(x, other, weight, name_of(own))
            found += unlike(f"calls for {what} tensors with {backend}", len(own.take()), 2)
    return found


@chapter.must(
    "compile/equal-inputs",
    "Two calls of a collective in a compiled function stay two where a rank passes the same tensor "
    "to both, as its inputs may be different ones on other ranks.",
    source="torch docs: collectives are called by all ranks of the group",
    rests_on="compile/calls",
)
@world_sizes(2)
@not_probed()
def test_equal_inputs(ranks: Ranks) -> None:
    check_fact(ranks, equal_inputs)


def reshaped(pending: Tensor) -> Tensor:
    return pending.view(-1)


def weighted(pending: Tensor, weight: Tensor) -> Tensor:
    return (pending * weight).t()


def pending_inputs(me: Me) -> list[str]:
    found: list[str] = []
    group = name_of(everyone())

    def result() -> list[Any]:
        x, weight = mine(me).requires_grad_(), mine(me, seed=1).requires_grad_()
        pending = functional.all_gather_tensor_autograd(x, 0, group)
        late = functional.all_reduce(x.detach(), "sum", group)
        output = view(pending).sum() * 2 + (by_weight(late, weight) * 3).sum()
        output.backward()
        return [settled(value) for value in (output, x.grad, weight.grad)]

    view, by_weight = reshaped, weighted
    want = result()
    for backend in BACKENDS:
        with compiler():
            view, by_weight = compiled(reshaped, backend), compiled(weighted, backend)
            found += unlike(f"with {backend}", result(), want)
    return found


@chapter.must(
    "compile/pending-inputs",
    "A compiled function can be given the result of a functional collective that has not been "
    "waited for, and gradients go back through it.",
    source=f"{SOURCE}; pytorch#184980",
    rests_on="functional/waits-at-use",
    needs=GATHERS,
)
@world_sizes(2)
@not_probed()
def test_pending_inputs(ranks: Ranks) -> None:
    check_fact(ranks, pending_inputs)


def in_turn(me: Me) -> list[str]:
    found: list[str] = []
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for backend in BACKENDS:
        with compiler():
            run = compiled(FUNCTIONAL["all_reduce"], backend)
            for group in (everyone(), *pairs, everyone(), pairs[0]):
                if dist.get_rank(group) < 0:
                    continue
                want = FUNCTIONAL["all_reduce"](mine(me), name_of(group))
                got = run(mine(me), name_of(group))
                found += unlike(f"with {backend}", settled(got), settled(want))
    return found


@chapter.must(
    "compile/groups",
    "A compiled function that is called with several groups in turn communicates in the one that "
    "it is given each time.",
    rests_on=("compile/functional", "functional/subgroup"),
)
@world_sizes(3)
@not_probed()
def test_groups(ranks: Ranks) -> None:
    check_fact(ranks, in_turn)


ROWS = ((2, 2, 5), (2, 3, 2))  # of each rank, in each step
# Rows that each rank sends to each, in each step.
ROUTES = (((1, 3), (2, 2)), ((0, 4), (1, 0)), ((2, 0), (3, 1)))


def other_sizes(me: Me) -> list[str]:
    found: list[str] = []
    group = name_of(everyone())

    def averaged(x: Tensor) -> Any:
        return x + functional.all_reduce(x.sum(0), "sum", group)

    for backend in BACKENDS:
        with compiler():
            run = compiled(averaged, backend)
            for count in ROWS[me.rank]:
                x = mine(me, count, 3)
                want = averaged(x)
                found += unlike(f"{count} rows with {backend}", settled(run(x)), settled(want))
    return found


def other_routes(me: Me) -> list[str]:
    found: list[str] = []
    group = name_of(everyone())

    def routed(x: Tensor, received: list[int], sent: list[int]) -> Any:
        return functional.all_to_all_single(x * 2, received, sent, group) + 1

    for backend in BACKENDS:
        with compiler():
            run = compiled(routed, backend)
            for route in ROUTES:
                received, sent = [row[me.rank] for row in route], list(route[me.rank])
                x = mine(me, sum(sent), 3)
                want = routed(x, received, sent)
                got = run(x, received, sent)
                found += unlike(f"{sent} sent with {backend}", settled(got), settled(want))
    return found


@world_sizes(2)
@not_probed()
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "compile/other-sizes",
                "A compiled function with collectives is compiled anew for a size of its input "
                "that changes on one rank alone, and its results stay right on all ranks.",
                rests_on="compile/functional",
            ),
            other_sizes,
        ),
        (
            chapter.must(
                "compile/other-splits",
                "A compiled function sends and receives the rows that its split sizes say, also "
                "when these change from call to call, and are zero.",
                rests_on="compile/functional",
                needs=EXCHANGES,
            ),
            other_routes,
        ),
    ),
)
def test_other_sizes(ranks: Ranks, fact: Any) -> None:
    check_fact(ranks, fact)
