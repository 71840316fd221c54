"""Rounding error of floating-point reductions: plain, coalesced, managed and functional calls."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
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
    assert_that,
    covers,
    needs,
    world_sizes,
)
from conformance.oracle.collectives import (
    Buffers,
    Call,
    Shape,
    after,
    before,
    receives,
    rounded_after,
)
from conformance.oracle.reduction import ORDERED, is_defined
from conformance.spec.collectives.perform import REDUCE_OPS, everyone, issue
from conformance.spec.parameters import dtypes, ops
from conformance.spec.tolerance import assert_near, assert_nothing_found, difference

chapter = Chapter("collectives")


ROUNDING = ("sum", "product", "avg")
REAL = ("float16", "bfloat16", "float32", "float64")
FLOATS = (*REAL, "complex64", "complex128")

# Carries out calls of one operation and one dtype; returns the result of each.
Way = Callable[[list[Call], list[Buffers]], list[Tensor]]


def one_by_one(calls: list[Call], buffers: list[Buffers]) -> list[Tensor]:
    for call, mine in zip(calls, buffers, strict=True):
        issue(call, list(mine.given), list(mine.taken))
    return [mine.taken[0] for mine in buffers]


def coalesced(calls: list[Call], buffers: list[Buffers]) -> list[Tensor]:
    xs = [mine.taken[0] for mine in buffers]
    dist.all_reduce_coalesced(xs, REDUCE_OPS[calls[0].reduce_op])
    return xs


def managed(calls: list[Call], buffers: list[Buffers]) -> list[Tensor]:
    with dist._coalescing_manager():
        return one_by_one(calls, buffers)


def functionally(calls: list[Call], buffers: list[Buffers]) -> list[Tensor]:
    reduce_op, group = calls[0].reduce_op, everyone()
    if calls[0].op == "all_reduce":
        results = [functional.all_reduce(b.taken[0], reduce_op, group) for b in buffers]
    else:
        results = [
            functional.reduce_scatter_tensor(b.given[0], reduce_op, 0, group) for b in buffers
        ]
    return [functional.wait_tensor(x) for x in results]


def functionally_together(calls: list[Call], buffers: list[Buffers]) -> list[Tensor]:
    reduce_op, group = calls[0].reduce_op, everyone()
    every: Any
    if calls[0].op == "all_reduce":
        xs = [b.taken[0] for b in buffers]
        every = functional.all_reduce_coalesced(xs, reduce_op, group)
    else:
        xs = [b.given[0] for b in buffers]
        dims = [0] * len(xs)
        every = functional.reduce_scatter_tensor_coalesced(xs, reduce_op, dims, group)
    return [functional.wait_tensor(x) for x in every]


def planned(
    ranks: Ranks,
    op: str,
    *,
    reduce_ops: tuple[str, ...] = (*ROUNDING, *ORDERED),
    shapes: tuple[Shape, ...] = ((257,), (3, 50)),
    dtypes: tuple[str, ...] = FLOATS,
) -> list[list[Call]]:
    """For each of the reduce operations, with each of the dtypes, that the target claims: the calls
    that are made together, one for each shape. Without any, the case says nothing."""
    claims = ranks.target.capabilities
    found = [
        [
            Call(op, shape, dtype, reduce_op, noisy=True, salt=salt)
            for salt, shape in enumerate(shapes)
        ]
        for reduce_op, dtype in product(reduce_ops, dtypes)
        if claims.has(f"reduce_op:{reduce_op}")
        and claims.has(f"dtype:{dtype}")
        and is_defined(reduce_op, dtype)
    ]
    if not found:
        pytest.skip(f"no floating-point dtype is claimed that has {', '.join(reduce_ops)}")
    return found


def results(me: Me, plan: list[list[Call]], way: Way) -> list[list[Tensor]]:
    """For each list of calls, the results; of complex tensors, as real ones."""
    found = []
    for calls in plan:
        buffers = [on_device(me, before(call, me.rank, me.world_size)) for call in calls]
        reduced = way(calls, buffers)
        found.append([torch.view_as_real(x) if x.is_complex() else x for x in reduced])
    return found


def on_device(me: Me, buffers: Buffers) -> Buffers:
    given = tuple(x.to(me.device) for x in buffers.given)
    return Buffers(given, tuple(x.to(me.device) for x in buffers.taken))


def check(ranks: Ranks, plan: list[list[Call]], way: Way) -> None:
    """All results are as near as they must be: those of MIN and MAX, bit by bit."""
    n = ranks.world_size
    got = ranks.run(results, plan, way)
    for i, calls in enumerate(plan):
        for j, call in enumerate(calls):
            judged = [rank for rank in range(n) if receives(call, rank)]
            mine, what = [got[rank][i][j] for rank in judged], f"{way.__name__}: {call}"
            if call.reduce_op in ORDERED:
                exact = [after(call, rank, n).taken[0] for rank in judged]
                assert_each_rank(mine, exact, what=what, ranks=judged)
            else:
                near = [rounded_after(call, rank, n) for rank in judged]
                assert_near(mine, near, what, judged)


KINDS = [
    pytest.param(
        ROUNDING,
        marks=chapter.must(
            "reductions/rounding",
            "With each collective that reduces, the rounding error of a floating-point SUM, "
            "PRODUCT or AVG is no larger than that of computing in the tensors' dtype can be, in "
            "some order.",
            source="pytorch#152300, gloo#446",
            needs="reduce_op:sum",
            rests_on="all_reduce/rounding",
        ),
        id="rounding",
    ),
    pytest.param(
        ORDERED,
        marks=chapter.must(
            "reductions/min-max-bits",
            "MIN and MAX return one of the contributions bit for bit.",
            source="torch 2.13 docs, ReduceOp, torch.minimum; IEEE 754: comparing does not round",
            rests_on="all_reduce/sum",
        ),
        id="min-max",
    ),
]
REDUCING = ops("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")


@pytest.mark.parametrize("op", REDUCING)
@pytest.mark.parametrize("reduce_ops", KINDS)
@world_sizes(2, 5)
def test_random_numbers(ranks: Ranks, op: str, reduce_ops: tuple[str, ...]) -> None:
    check(ranks, planned(ranks, op, reduce_ops=reduce_ops, shapes=((257,),)), one_by_one)


@chapter.must(
    "all_reduce_coalesced/precision",
    "all_reduce_coalesced of floating-point tensors rounds no more than arithmetic in their "
    "dtype does; MIN and MAX do not round at all.",
    source="torch 2.13 docs, all_reduce_coalesced; pytorch#152300, gloo#446",
    needs="feature:coalescing",
    rests_on=("all_reduce_coalesced/values", "all_reduce/rounding"),
)
@world_sizes(2, 3)
def test_random_numbers_together(ranks: Ranks) -> None:
    check(ranks, planned(ranks, "all_reduce"), coalesced)


@chapter.must(
    "coalescing/precision",
    "Reductions of floating-point tensors inside a coalescing manager round no more than "
    "arithmetic in their dtype does; MIN and MAX do not round at all.",
    source="torch 2.13, _coalescing_manager; pytorch#152300, gloo#446",
    needs="feature:coalescing",
    rests_on=("coalescing/all_reduce", "all_reduce/rounding"),
)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", ops("all_reduce", "reduce_scatter_tensor"))
def test_random_numbers_in_a_manager(ranks: Ranks, op: str) -> None:
    check(ranks, planned(ranks, op), managed)


@chapter.must(
    "functional/precision",
    "Functional reductions of floating-point tensors round no more than arithmetic in their "
    "dtype does; MIN and MAX do not round at all.",
    source="torch 2.13, torch.distributed._functional_collectives; pytorch#152300, gloo#446",
    rests_on=("functional/all_reduce", "all_reduce/rounding"),
)
@world_sizes(2, 3)
@pytest.mark.parametrize(
    ("way", "op"),
    [
        pytest.param(functionally, "all_reduce"),
        *(
            pytest.param(way, op, marks=needs("feature:coalescing", f"op:{op}"))
            for way, op in [
                (functionally, "reduce_scatter_tensor"),
                (functionally_together, "all_reduce"),
                (functionally_together, "reduce_scatter_tensor"),
            ]
        ),
    ],
)
def test_random_numbers_functionally(ranks: Ranks, way: Way, op: str) -> None:
    check(ranks, planned(ranks, op, dtypes=REAL), way)


RANDOM = 4096  # numbers of a sum; the mean error of so many is at chance within 0.02 of a unit
BIAS_MAX = 0.2  # in units in the last place of each sum; cutting off what is too fine gives 0.5


def positive(rank: int, dtype: torch.dtype) -> Tensor:
    """(RANDOM,), of [1, 2): what each rank adds."""
    generator = torch.Generator().manual_seed(rank)
    return (1 + torch.rand(RANDOM, generator=generator, dtype=torch.float64)).to(dtype)


def summed(me: Me, dtype: torch.dtype) -> Tensor:
    x = positive(me.rank, dtype).to(me.device)
    dist.all_reduce(x)
    return x.cpu()


@chapter.should(
    "reductions/unbiased",
    "Sums of many floating-point numbers are on average neither too small nor too large: they are "
    "rounded to the nearest number, and not cut off.",
    source="IEEE 754: to nearest is the default rounding; torch.add rounds so in every dtype",
    rests_on="all_reduce/rounding",
)
@pytest.mark.parametrize("dtype", dtypes("float16", "bfloat16", "float32"))
@world_sizes(2, 3)
def test_rounding_to_nearest(ranks: Ranks, dtype: str) -> None:
    kind = getattr(torch, dtype)
    exact = torch.stack([positive(rank, kind).double() for rank in range(ranks.world_size)]).sum(0)
    last_place = torch.finfo(kind).eps * exact.log2().floor().exp2()
    for rank, got in enumerate(ranks.run(summed, kind)):
        bias = ((got.double() - exact) / last_place).mean().item()
        said = f"{dtype}: sums are {bias:+.2f} units in the last place off on average"
        assert_that(abs(bias) <= BIAS_MAX, said, rank)


def large_result(me: Me, call: Call) -> str:
    """Where the result is too far off; "" where it is not."""
    mine = on_device(me, before(call, me.rank, me.world_size))
    [got] = one_by_one([call], [mine])
    if not receives(call, me.rank):
        return ""
    return difference(got, rounded_after(call, me.rank, me.world_size))


@pytest.mark.parametrize("dtype", dtypes("float32", "float64"))
@pytest.mark.parametrize(
    ("op", "numel"),
    [
        pytest.param("all_reduce", 524_309, marks=covers("all_reduce/rounding")),
        *(
            pytest.param(op, numel, marks=(covers("reductions/rounding"), needs(f"op:{op}")))
            for op, numel in [
                ("reduce", 524_309),
                ("reduce_scatter", 262_147),
                ("reduce_scatter_tensor", 262_147),
            ]
        ),
    ],
)
@world_sizes(3)
def test_many_random_numbers(ranks: Ranks, op: str, numel: int, dtype: str) -> None:
    call = Call(op, (numel,), dtype, noisy=True)
    found = enumerate(ranks.run(large_result, call))
    assert_nothing_found({rank: wrong for rank, wrong in found if wrong}, str(call))
