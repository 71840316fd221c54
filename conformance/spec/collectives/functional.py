"""Functional collectives: results, waiting on first use, unchanged inputs, and torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    assert_that,
    needs,
    not_probed,
    world_sizes,
)
from conformance.oracle.data import sample
from conformance.oracle.reduction import reduced
from conformance.spec.collectives.perform import everyone
from conformance.spec.parameters import reduce_ops

SOURCE = "torch 2.13, torch.distributed._functional_collectives"

chapter = Chapter("collectives", source=SOURCE)


MATRIX = (4, 6)
CUBE = (6, 12, 6)


def mine(me: Me, shape: tuple[int, ...] = MATRIX) -> Tensor:
    return sample(shape, "float32", me.rank).to(me.device)


def all_of(world_size: int, shape: tuple[int, ...] = MATRIX) -> list[Tensor]:
    return [sample(shape, "float32", rank) for rank in range(world_size)]


def reduced_functionally(me: Me, op: str) -> Tensor:
    result: Tensor = functional.wait_tensor(functional.all_reduce(mine(me), op, everyone()))
    return result


@chapter.must(
    "functional/all_reduce",
    "The functional all_reduce returns the reduced tensor.",
    rests_on="all_reduce/async",
)
@world_sizes(1, 2, 3)
@pytest.mark.parametrize("op", reduce_ops("sum", "max"))
def test_all_reduce(ranks: Ranks, op: str) -> None:
    got = ranks.run(reduced_functionally, op)
    assert_same_on_all_ranks(got, want=reduced(op, all_of(ranks.world_size)))


def reduce_what_nobody_waited_for(me: Me, how: str) -> Tensor:
    given = torch.full((3,), me.rank + 1.0, device=me.device)
    pending: Tensor = functional.all_reduce(given, "sum", everyone())
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(pending),
        "async": lambda: dist.all_reduce(pending, async_op=True).wait(),
        "broadcast": lambda: dist.broadcast(pending, 0),
    }
    calls[how]()
    return pending + torch.zeros_like(given)


@chapter.must(
    "functional/unwaited-in-place",
    "The result of a functional collective can be passed to the other collectives before it has "
    "been waited for.",
    source=f"{SOURCE}, AsyncCollectiveTensor",
    rests_on="functional/all_reduce",
)
@world_sizes(2)
@pytest.mark.parametrize(
    "how", ["all_reduce", "async", pytest.param("broadcast", marks=needs("op:broadcast"))]
)
def test_what_nobody_waited_for(ranks: Ranks, how: str) -> None:
    got = ranks.run(reduce_what_nobody_waited_for, how)
    want = torch.full((3,), 3.0 if how == "broadcast" else 6.0)
    assert_same_on_all_ranks(got, want=want)


def compile_and_call(me: Me, how: str) -> Tensor:
    calls: dict[str, Callable[[Tensor], object]] = {
        "all_reduce": lambda y: dist.all_reduce(y, async_op=True).wait(),
        "broadcast": lambda y: dist.broadcast(y, 1),
        "messages": lambda y: (dist.recv if me.rank == 0 else dist.send)(y, 1 - me.rank),
    }

    def doubled(x: Tensor) -> Tensor:
        y = x * 2
        calls[how](y)
        return y + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where the compiler gives up; that it may
        compiled = torch.compile(doubled, backend="eager")
        result: Tensor = compiled(torch.full((3,), me.rank + 1.0, device=me.device))
    return result


@chapter.should(
    "functional/compiled",
    "A function that torch.compile has compiled may call the collectives and point-to-point "
    "operations of torch.distributed, including those that the compiler does not know.",
    source="torch 2.13, torch.compile: what cannot be traced breaks the graph",
    needs="feature:compiled_calls",
    rests_on=("functional/all_reduce", "broadcast/values", "p2p/delivers"),
)
@world_sizes(2)
@not_probed()
@pytest.mark.parametrize(
    "how",
    [
        "all_reduce",
        pytest.param("broadcast", marks=needs("op:broadcast")),
        pytest.param("messages", marks=needs("op:send")),
    ],
)
def test_collectives_in_a_compiled_function(ranks: Ranks, how: str) -> None:
    got = ranks.run(compile_and_call, how)
    want = torch.full((3,), 7.0 if how == "all_reduce" else 5.0)
    assert_same_on_all_ranks(got, want=want)


def broadcast_functionally(me: Me) -> Tensor:
    source = me.world_size - 1
    result: Tensor = functional.wait_tensor(functional.broadcast(mine(me), source, everyone()))
    return result


@chapter.must(
    "functional/broadcast",
    "The functional broadcast returns the source's tensor.",
    rests_on="broadcast/async",
)
@world_sizes(1, 2, 3)
def test_broadcast(ranks: Ranks) -> None:
    got = ranks.run(broadcast_functionally)
    assert_same_on_all_ranks(got, want=all_of(ranks.world_size)[-1])


def gathered_functionally(me: Me, dim: int) -> Tensor:
    gathered = functional.all_gather_tensor(mine(me, CUBE), dim, everyone())
    result: Tensor = functional.wait_tensor(gathered)
    return result


@chapter.must(
    "functional/all_gather_tensor",
    "The functional all_gather_tensor concatenates along any dimension.",
    needs="feature:coalescing",
    rests_on="all_gather_into_tensor/async",
)
@world_sizes(1, 2, 3)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_all_gather_tensor(ranks: Ranks, dim: int) -> None:
    got = ranks.run(gathered_functionally, dim)
    assert_same_on_all_ranks(got, want=torch.cat(all_of(ranks.world_size, CUBE), dim))


def scattered_functionally(me: Me, dim: int, shape: tuple[int, ...]) -> Tensor:
    result: Tensor = functional.wait_tensor(
        functional.reduce_scatter_tensor(mine(me, shape), "sum", dim, everyone())
    )
    return result


@chapter.must(
    "functional/reduce_scatter_tensor",
    "The functional reduce_scatter_tensor splits along any dimension.",
    needs="feature:coalescing",
    rests_on="reduce_scatter_tensor/async",
)
@world_sizes(1, 2, 3)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_reduce_scatter_tensor(ranks: Ranks, dim: int) -> None:
    got = ranks.run(scattered_functionally, dim, CUBE)
    total = reduced("sum", all_of(ranks.world_size, CUBE))
    want = [part.contiguous() for part in total.chunk(ranks.world_size, dim)]
    assert_each_rank(got, want)


def splits(rank: int, world_size: int) -> list[int]:
    """Rows that a rank sends to each: none to itself, 1 to the next one, and so on."""
    return [(to - rank) % world_size for to in range(world_size)]


def exchanged_functionally(me: Me) -> Tensor:
    n = me.world_size
    sent = splits(me.rank, n)
    received = [splits(source, n)[me.rank] for source in range(n)]
    x = mine(me, (sum(sent), 2))
    result: Tensor = functional.wait_tensor(
        functional.all_to_all_single(x, received, sent, everyone())
    )
    return result


@chapter.must(
    "functional/all_to_all_single",
    "The functional all_to_all_single returns an output with the given split sizes.",
    rests_on="all_to_all_single/async",
)
@world_sizes(2, 3)
def test_all_to_all_single(ranks: Ranks) -> None:
    n = ranks.world_size
    rows = sum(range(n))
    cut = [torch.split(x, splits(r, n)) for r, x in enumerate(all_of(n, (rows, 2)))]
    want = [torch.cat([parts[rank] for parts in cut]) for rank in range(n)]
    assert_each_rank(ranks.run(exchanged_functionally), want)


def permuted(me: Me) -> Tensor:
    """Each rank sends to the next one."""
    to = [(rank + 1) % me.world_size for rank in range(me.world_size)]
    result: Tensor = functional.wait_tensor(
        functional.permute_tensor(mine(me, (6,)), to, everyone())
    )
    return result


@chapter.must(
    "functional/permute_tensor",
    "permute_tensor sends each rank's tensor to the rank that the permutation names.",
    rests_on="all_to_all_single/async",
)
@world_sizes(2, 3)
def test_permute_tensor(ranks: Ranks) -> None:
    n = ranks.world_size
    each = all_of(n, (6,))
    assert_each_rank(ranks.run(permuted), [each[(rank - 1) % n] for rank in range(n)])


def together(me: Me) -> list[list[Tensor]]:
    """Two tensors through each of the coalesced forms."""
    n, group = me.world_size, everyone()
    xs = [mine(me, (n, 2)), mine(me, (2 * n,)) * 2]
    every: list[Any] = [
        functional.all_reduce_coalesced(xs, "sum", group),
        functional.all_gather_into_tensor_coalesced(xs, group),
        functional.reduce_scatter_tensor_coalesced(xs, "sum", [0, 0], group),
    ]
    return [[functional.wait_tensor(x) for x in results] for results in every]


@chapter.must(
    "functional/coalesced",
    "The functional coalesced collectives return one result for each tensor.",
    needs="feature:coalescing",
    rests_on="all_reduce_coalesced/values",
)
@world_sizes(1, 2, 3)
def test_coalesced(ranks: Ranks) -> None:
    n = ranks.world_size
    each = [all_of(n, (n, 2)), [x * 2 for x in all_of(n, (2 * n,))]]
    sums = [reduced("sum", of_one) for of_one in each]
    joined = [torch.cat(of_one) for of_one in each]
    want = [[sums, joined, [total.chunk(n)[rank] for total in sums]] for rank in range(n)]
    assert_each_rank(ranks.run(together), want)


def inputs_after(me: Me) -> list[Tensor]:
    """The input of each functional collective, after it."""
    group = everyone()
    calls: list[Callable[[Tensor], Any]] = [
        lambda x: functional.all_reduce(x, "sum", group),
        lambda x: functional.broadcast(x, 0, group),
        lambda x: functional.all_gather_tensor(x, 0, group),
        lambda x: functional.reduce_scatter_tensor(x, "sum", 0, group),
        lambda x: functional.all_to_all_single(x, None, None, group),
    ]
    inputs = [mine(me, (6, 2)) for _ in calls]
    for call, x in zip(calls, inputs, strict=True):
        functional.wait_tensor(call(x))
    return inputs


@chapter.must(
    "functional/input-untouched",
    "Functional collectives do not change their input.",
    rests_on="functional/all_reduce",
)
@needs(
    "op:broadcast", "op:all_gather_into_tensor", "op:reduce_scatter_tensor", "op:all_to_all_single"
)
@needs("feature:coalescing")
@world_sizes(2, 3)
def test_inputs_stay(ranks: Ranks) -> None:
    want = [[x] * 5 for x in all_of(ranks.world_size, (6, 2))]
    assert_each_rank(ranks.run(inputs_after), want)


def used_and_waited(me: Me) -> tuple[bool, bool, Tensor]:
    """Whether the result is an AsyncCollectiveTensor, and a plain tensor after wait_tensor; and its
    double, computed without an explicit wait."""
    result = functional.all_reduce(mine(me), "sum", everyone())
    is_async = isinstance(result, functional.AsyncCollectiveTensor)
    doubled = result * 2
    plain = functional.wait_tensor(functional.all_reduce(mine(me), "sum", everyone()))
    return is_async, type(plain) is Tensor, doubled


@chapter.must(
    "functional/waits-at-use",
    "The result of a functional collective is an AsyncCollectiveTensor that is waited for when "
    "it is first used, and wait_tensor turns it into a plain tensor.",
    rests_on="functional/all_reduce",
)
@world_sizes(2, 3)
def test_results_wait_when_they_are_used(ranks: Ranks) -> None:
    got = ranks.run(used_and_waited)
    for rank, (is_async, is_plain, _) in enumerate(got):
        assert_that(is_async, "the result is no AsyncCollectiveTensor", rank)
        assert_that(is_plain, "wait_tensor gives no plain tensor", rank)
    want = reduced("sum", all_of(ranks.world_size)) * 2
    assert_same_on_all_ranks([doubled for _, _, doubled in got], want=want)


def in_a_group(me: Me) -> Tensor | None:
    group = dist.new_group([1, 2])
    if me.rank not in (1, 2):
        return None
    result: Tensor = functional.wait_tensor(functional.all_reduce(mine(me), "sum", group))
    return result


@chapter.must(
    "functional/subgroup",
    "Functional collectives work in a group of some of the ranks.",
    rests_on=("functional/all_reduce", "all_reduce/subgroup"),
)
@world_sizes(4)
def test_in_a_group_of_some(ranks: Ranks) -> None:
    total = reduced("sum", all_of(4)[1:3])
    assert_each_rank(ranks.run(in_a_group), [None, total, total, None])
