"""ReduceOp semantics in all collectives: MIN, bitwise, AVG, PREMUL_SUM; integers, NaN, bool."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    covers,
    needs,
    world_sizes,
)
from conformance.oracle.collectives import Call
from conformance.oracle.data import positive, sample
from conformance.oracle.reduction import is_defined, reduced
from conformance.spec.collectives.perform import (
    REDUCE_OPS,
    Seen,
    assert_taken,
    perform,
    reduce_scatter_tensor,
)
from conformance.spec.parameters import dtypes, ops, reduce_ops

DOCS = "torch 2.13 docs, ReduceOp"

chapter = Chapter("collectives")


COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
REDUCING = ops(*COLLECTIVES)

OPS = [
    pytest.param(
        "product",
        marks=chapter.must(
            "reductions/product",
            "PRODUCT multiplies.",
            source=DOCS,
            needs="reduce_op:product",
            rests_on="all_reduce/sum",
        ),
    ),
    pytest.param(
        "min",
        marks=chapter.must(
            "reductions/min",
            "MIN keeps the least value.",
            source=DOCS,
            needs="reduce_op:min",
            rests_on="all_reduce/sum",
        ),
    ),
    pytest.param(
        "max",
        marks=chapter.must(
            "reductions/max",
            "MAX keeps the greatest value.",
            source=DOCS,
            needs="reduce_op:max",
            rests_on="all_reduce/sum",
        ),
    ),
    pytest.param(
        "band",
        marks=chapter.must(
            "reductions/band",
            "BAND combines the bits of integers by AND.",
            source=f"{DOCS}; torchcomms#2082",
            needs="reduce_op:band",
            rests_on="all_reduce/sum",
        ),
    ),
    pytest.param(
        "bor",
        marks=chapter.must(
            "reductions/bor",
            "BOR combines the bits of integers by OR.",
            source=f"{DOCS}; torchcomms#2082",
            needs="reduce_op:bor",
            rests_on="all_reduce/sum",
        ),
    ),
    pytest.param(
        "bxor",
        marks=chapter.must(
            "reductions/bxor",
            "BXOR combines the bits of integers by exclusive OR.",
            source=f"{DOCS}; torchcomms#2082",
            needs="reduce_op:bxor",
            rests_on="all_reduce/sum",
        ),
    ),
]

# One integer and two floating-point dtypes of different widths: of each, the first that the target
# claims.
DTYPES = (
    ("int32", "int64", "int16", "int8", "uint8"),
    ("float16", "bfloat16", "float32"),
    ("float64", "float32"),
)


def claimed_dtypes(ranks: Ranks, reduce_op: str) -> list[str]:
    """Those that the operation is defined for; without one, the case says nothing."""
    claims = ranks.target.capabilities.dtypes
    firsts = (next((name for name in names if name in claims), "") for names in DTYPES)
    found = [name for name in dict.fromkeys(firsts) if name and is_defined(reduce_op, name)]
    if not found:
        pytest.skip(f"no dtype is claimed that has {reduce_op}")
    return found


@pytest.mark.parametrize("op", REDUCING)
@pytest.mark.parametrize("reduce_op", OPS)
@world_sizes(2, 3, 5)
def test_a_reduce_operation_in_each_collective(ranks: Ranks, op: str, reduce_op: str) -> None:
    for dtype in claimed_dtypes(ranks, reduce_op):
        call = Call(op, (7,), dtype, reduce_op)
        assert_taken(call, ranks.run(perform, call))


def all_reduced(me: Me, contributions: list[Tensor], op: str) -> Tensor:
    """Rank r contributes the r-th tensor."""
    x = contributions[me.rank].to(me.device)
    dist.all_reduce(x, REDUCE_OPS[op])
    return x


def reduced_everywhere(me: Me, contributions: list[Tensor], op: str) -> list[Tensor]:
    """The same reduction by each collective that the target has, on rank 0 where it has one
    destination."""
    mine, reduce_op = contributions[me.rank].to(me.device), REDUCE_OPS[op]
    by_all_reduce = mine.clone()
    dist.all_reduce(by_all_reduce, reduce_op)
    results = [by_all_reduce]
    if me.target.capabilities.has("op:reduce"):
        by_reduce = mine.clone()
        dist.reduce(by_reduce, 0, reduce_op)
        results += [by_reduce] if me.rank == 0 else []
    if me.target.capabilities.has("op:reduce_scatter"):
        by_reduce_scatter = torch.empty_like(mine)
        dist.reduce_scatter(by_reduce_scatter, [mine] * me.world_size, reduce_op)
        results.append(by_reduce_scatter)
    if me.target.capabilities.has("op:reduce_scatter_tensor"):
        by_reduce_scatter_tensor = torch.empty_like(mine)
        reduce_scatter_tensor(
            by_reduce_scatter_tensor, torch.cat([mine] * me.world_size), reduce_op
        )
        results.append(by_reduce_scatter_tensor)
    if me.target.capabilities.has("feature:coalescing"):
        together = [mine.clone(), mine.clone()]
        dist.all_reduce_coalesced(together, reduce_op)
        results += together
    return results


def check_everywhere(ranks: Ranks, contributions: list[Tensor], op: str, want: Tensor) -> None:
    got = ranks.run(reduced_everywhere, contributions, op)
    assert_each_rank(got, [[want] * len(one) for one in got], what=op)


@chapter.must(
    "reductions/integers-wrap",
    "Integer SUM and PRODUCT wrap around as the dtype's own arithmetic does.",
    source="observed, torch 2.13.0 gloo",
    needs=("reduce_op:sum", "reduce_op:product"),
    rests_on="all_reduce/sum",
)
@world_sizes(3)
@pytest.mark.parametrize("op", ["sum", "product"])
@pytest.mark.parametrize(
    "dtype", dtypes("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
)
def test_integers_wrap_around(ranks: Ranks, op: str, dtype: str) -> None:
    """Three times 100 is 44 in uint8, and nothing stops at the greatest value."""
    kind = getattr(torch, dtype)
    greatest = torch.iinfo(kind).max
    values = [[100, greatest, 3], [100, 1, greatest], [100, greatest, greatest]]
    contributions = [torch.tensor(v, dtype=kind) for v in values]
    check_everywhere(ranks, contributions, op, reduced(op, contributions))


@chapter.must(
    "reductions/integers-are-exact",
    "Integers are reduced as integers: no bit of an int64 is lost.",
    source="torch 2.13 docs, ReduceOp",
    needs=("reduce_op:sum", "reduce_op:max"),
    rests_on="all_reduce/sum",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("dtype", dtypes("int32", "uint32", "int64", "uint64"))
def test_no_bit_of_an_integer_is_lost(ranks: Ranks, op: str, dtype: str) -> None:
    """Neither float32 nor float64 can tell these numbers apart."""
    big = (1 << 24) + 1 if dtype.endswith("32") else (1 << 53) + 1
    contributions = [
        torch.tensor([big + rank, big - 2 * rank, rank], dtype=getattr(torch, dtype))
        for rank in range(ranks.world_size)
    ]
    check_everywhere(ranks, contributions, op, reduced(op, contributions))


@chapter.must(
    "reductions/unsigned-order",
    "MIN and MAX compare unsigned integers as unsigned: values in the upper half of the range "
    "are the greater ones.",
    source="torch 2.13 docs, ReduceOp, torch.minimum",
    needs=("reduce_op:min", "reduce_op:max"),
    rests_on="all_reduce/sum",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", dtypes("uint8", "uint16", "uint32", "uint64"))
def test_the_upper_half_of_an_unsigned_range(ranks: Ranks, op: str, dtype: str) -> None:
    """Each rank has the greatest values where the others have small ones."""
    kind = getattr(torch, dtype)
    greatest = torch.iinfo(kind).max
    n = ranks.world_size
    contributions = [
        torch.tensor(
            [greatest - rank if i % n == rank else 5 + rank for i in range(9)]
            + [greatest // 2 + rank, greatest - rank],
            dtype=kind,
        )
        for rank in range(n)
    ]
    check_everywhere(ranks, contributions, op, reduced(op, contributions))


integers = st.integers(-(1 << 63), (1 << 63) - 1)


@covers("reductions/integers-are-exact")
@needs("dtype:int64")
@world_sizes(3)
@given(rows=st.lists(st.tuples(integers, integers, integers), min_size=1, max_size=9))
@settings(max_examples=20)
def test_any_integers(ranks: Ranks, rows: list[tuple[int, int, int]]) -> None:
    contributions = [torch.tensor(column) for column in zip(*rows, strict=True)]
    got = ranks.run(all_reduced, contributions, "sum")
    assert_same_on_all_ranks(got, want=reduced("sum", contributions))


@chapter.must(
    "reductions/infinities",
    "SUM treats infinities and NaN as IEEE 754 does: inf - inf is NaN, and a sum beyond the "
    "greatest number is inf.",
    source="IEEE 754; observed, torch 2.13.0 gloo",
    needs="reduce_op:sum",
    rests_on="all_reduce/sum",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("dtype", dtypes("float16", "float32", "float64"))
def test_infinities_and_nan_in_a_sum(ranks: Ranks, dtype: str) -> None:
    inf, nan = math.inf, math.nan
    kind = getattr(torch, dtype)
    greatest = torch.finfo(kind).max
    first = [inf, inf, -inf, nan, greatest, 1.0]
    last = [inf, -inf, 1.0, 1.0, greatest, nan]
    contributions = [torch.zeros(6, dtype=kind) for _ in range(ranks.world_size)]
    contributions[0], contributions[-1] = (
        torch.tensor(first, dtype=kind),
        torch.tensor(last).to(kind),
    )
    want = torch.tensor([inf, nan, -inf, nan, inf, nan], dtype=kind)
    check_everywhere(ranks, contributions, "sum", want)


@chapter.should(
    "reductions/subnormals",
    "Subnormal numbers are summed as they are, and not flushed to zero.",
    source="IEEE 754; observed, torch 2.13.0 gloo",
    needs="reduce_op:sum",
    rests_on="all_reduce/sum",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("dtype", dtypes("float16", "bfloat16", "float32", "float64"))
def test_numbers_too_small_to_be_normal(ranks: Ranks, dtype: str) -> None:
    """Multiples of the least number there is; the last sum is the least normal number."""
    kind = getattr(torch, dtype)
    info = torch.finfo(kind)
    least = info.smallest_normal * info.eps
    steps = round(1 / info.eps)
    contributions = [
        torch.tensor([least, (rank + 1) * least, -3 * least, 0.0], dtype=kind)
        for rank in range(ranks.world_size)
    ]
    contributions[0][3] = (steps - 1) * least
    contributions[-1][3] = least
    total = sum(range(1, ranks.world_size + 1))
    multiples = [ranks.world_size, total, -3 * ranks.world_size, steps]
    want = torch.tensor([m * least for m in multiples], dtype=kind)
    check_everywhere(ranks, contributions, "sum", want)


@chapter.should(
    "reductions/nan-in-min-max",
    "A NaN on any rank is the result of MIN and MAX, whichever rank has it.",
    source="as torch.minimum and torch.maximum have it; torch 2.13 docs, torch.maximum",
    needs=("reduce_op:min", "reduce_op:max"),
    rests_on=("reductions/min", "reductions/max"),
)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", reduce_ops("min", "max"))
@pytest.mark.parametrize("dtype", dtypes("float16", "float32", "float64"))
def test_nan_is_the_least_and_the_greatest(ranks: Ranks, op: str, dtype: str) -> None:
    """Element r is NaN on rank r alone, and the last one nowhere."""
    n = ranks.world_size
    kind = getattr(torch, dtype)
    contributions = [torch.arange(n + 1).to(kind) + rank for rank in range(n)]
    for rank, x in enumerate(contributions):
        x[rank] = math.nan
    check_everywhere(ranks, contributions, op, reduced(op, contributions))


BOOL_OPS = reduce_ops("sum", "product", "min", "max", "band", "bor", "bxor")


@chapter.must(
    "reductions/bool",
    "For bool, SUM, MAX and BOR mean any, PRODUCT, MIN and BAND mean all, and BXOR means an odd "
    "number.",
    source="observed, torch 2.13.0 gloo",
    needs=("dtype:bool", "reduce_op:sum", "reduce_op:product", "reduce_op:bxor"),
    rests_on="all_reduce/sum",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", BOOL_OPS)
def test_bool(ranks: Ranks, op: str) -> None:
    """Every combination of two ranks; the third has both for each."""
    columns = [[0, 0, 1, 1, 0, 1], [0, 1, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1]]
    contributions = [torch.tensor(c, dtype=torch.bool) for c in columns[: ranks.world_size]]
    want = reduced(op, contributions)
    got = ranks.run(truths_everywhere, contributions, op)
    assert_each_rank(got, [[want.tolist()] * len(one) for one in got], what=op)


def truths_everywhere(me: Me, contributions: list[Tensor], op: str) -> list[list[bool]]:
    """As Python sees them, whatever byte stands for true; after calls with other values."""
    reduced_everywhere(me, [~x for x in contributions], op)
    return [x.tolist() for x in reduced_everywhere(me, contributions, op)]


def bytes_everywhere(me: Me, contributions: list[Tensor], op: str) -> list[Tensor]:
    return [x.view(torch.uint8) for x in reduced_everywhere(me, contributions, op)]


@chapter.must(
    "reductions/bool-bytes",
    "Every byte of a reduced bool tensor is 0 or 1.",
    source="torch's bool has no other values: others make comparisons contradict each other",
    needs=("dtype:bool", "reduce_op:sum"),
    rests_on="reductions/bool",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", BOOL_OPS)
def test_the_bytes_of_a_bool(ranks: Ranks, op: str) -> None:
    contributions = [torch.ones(5, dtype=torch.bool)] * ranks.world_size
    want = reduced(op, contributions).view(torch.uint8)
    got = ranks.run(bytes_everywhere, contributions, op)
    assert_each_rank(got, [[want] * len(one) for one in got], what=op)


@chapter.must(
    "reductions/average",
    "AVG divides the sum by the number of ranks of the group, and by nothing else.",
    source="torch 2.13 docs, ReduceOp: 'AVG divides values by the world size'; torchcomms#287, "
    "pytorch#162338",
    needs="reduce_op:avg",
    rests_on="all_reduce/sum",
)
@needs("dtype:float64")
@world_sizes(1, 2, 3)
@pytest.mark.parametrize("op", REDUCING)
def test_average(ranks: Ranks, op: str) -> None:
    """Five elements: neither dividing by them nor not dividing at all goes unnoticed."""
    call = Call(op, (5,), "float64", "avg")
    assert_taken(call, ranks.run(perform, call), within_ulps=ranks.world_size)


@covers("reductions/average")
@world_sizes(2, 3)
@pytest.mark.parametrize("dtype", dtypes("float16", "bfloat16", "float32", "float64"))
def test_average_of_positive_numbers(ranks: Ranks, dtype: str) -> None:
    """Dividing before adding is as good as dividing after it: nothing cancels."""
    n = ranks.world_size
    contributions = [positive((5,), dtype, rank) for rank in range(n)]
    got = ranks.run(all_reduced, contributions, "avg")
    assert_same_on_all_ranks(got, want=reduced("avg", contributions), within_ulps=n)


@covers("reductions/average")
@needs("dtype:complex64")
@world_sizes(2)
def test_average_of_complex_numbers(ranks: Ranks) -> None:
    contributions = [sample((5,), "complex64", rank) for rank in range(2)]
    got = ranks.run(all_reduced, contributions, "avg")
    assert_same_on_all_ranks(got, want=reduced("avg", contributions))


def averaged_in_group(me: Me, call: Call) -> Seen | None:
    group = dist.new_group([1, 2])
    return perform(me, call, group=group) if me.rank in (1, 2) else None


@covers("reductions/average")
@needs("dtype:float64")
@world_sizes(4)
@pytest.mark.parametrize("op", REDUCING)
def test_average_divides_by_the_ranks_of_the_group(ranks: Ranks, op: str) -> None:
    call = Call(op, (5,), "float64", "avg")
    seen = ranks.run(averaged_in_group, call)[1:3]
    assert_taken(call, seen, within_ulps=2, ranks=[1, 2])


@chapter.should(
    "reductions/average-of-integers",
    "AVG of integers is their sum divided by the number of ranks, truncated towards zero.",
    source="InfiniCCL#37; NCCL's ncclAvg",
    needs="reduce_op:avg",
    rests_on="reductions/average",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("dtype", dtypes("uint8", "int8", "int32", "int64"))
def test_average_of_integers(ranks: Ranks, dtype: str) -> None:
    """Of those that have a sign, also sums below zero that the number of ranks does not divide."""
    kind = getattr(torch, dtype)
    contributions = []
    for rank in range(ranks.world_size):
        values = [4 + 2 * rank, rank, 7, 10 * rank]
        if kind.is_signed:
            values += [-20 - rank * rank, -5 if rank == 0 else 0, -1 - 2 * rank, 1 - 3 * rank]
        contributions.append(torch.tensor(values, dtype=kind))
    check_everywhere(ranks, contributions, "avg", reduced("avg", contributions))


@chapter.should(
    "reductions/average-in-range",
    "AVG of finite numbers of the dtype is finite, even if their sum is not.",
    source="NCCL's ncclAvg divides first; pytorch#57410 for what goes wrong otherwise",
    needs="reduce_op:avg",
    rests_on="reductions/average",
)
@needs("dtype:float16")
@world_sizes(2, 3)
def test_average_of_the_greatest_numbers(ranks: Ranks) -> None:
    contributions = [torch.tensor([60000.0, 1.0]).half() for _ in range(ranks.world_size)]
    got = ranks.run(all_reduced, contributions, "avg")
    assert_same_on_all_ranks(got, want=contributions[0], within_ulps=ranks.world_size)


def premultiplied(me: Me, factor: float) -> Tensor:
    op = dist._make_nccl_premul_sum(factor)
    x = torch.full((3,), me.rank + 1.0, device=me.device)
    dist.all_reduce(x, op)
    return x


@chapter.must(
    "reductions/premul-sum",
    "PREMUL_SUM multiplies by its factor before it adds.",
    source="torch 2.13 docs, ReduceOp",
    needs="reduce_op:premul_sum",
    rests_on="all_reduce/sum",
)
@world_sizes(2, 3)
def test_premul_sum(ranks: Ranks) -> None:
    got = ranks.run(premultiplied, 0.5)
    n = ranks.world_size
    assert_same_on_all_ranks(got, want=torch.full((3,), 0.5 * n * (n + 1) / 2))
