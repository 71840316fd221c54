"""all_reduce of sparse COO tensors: values, indices, dtypes, strides, hybrid or uncoalesced."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance import (
    Chapter,
    CheckFailed,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    not_probed,
    world_sizes,
)
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import Raised, Returned
from conformance.oracle.sparse import Entries, dense_sum

PULL = "pytorch#22036, sparse all_reduce of gloo"

chapter = Chapter("sparse", needs=("op:all_reduce", "feature:sparse"))


@dataclass(frozen=True, slots=True)
class Parts:
    """What a sparse tensor consists of. It can be sent even where the parts contradict each other.

    is_coalesced: what the tensor says of itself.
    """

    indices: Tensor
    values: Tensor
    shape: tuple[int, ...]
    is_coalesced: bool


def reduce_one(me: Me, inputs: list[Tensor]) -> Parts:
    """The sum of the ranks' tensors, as it lies in the tensor that was passed."""
    x = inputs[me.rank].to(me.device)
    dist.all_reduce(x)
    return Parts(x._indices(), x._values(), tuple(x.shape), x.is_coalesced())


def _densely(got: list[Parts]) -> list[Tensor]:
    return [_dense(rank, parts) for rank, parts in enumerate(got)]


def _dense(rank: int, parts: Parts) -> Tensor:
    try:
        x = torch.sparse_coo_tensor(
            parts.indices,
            parts.values,
            parts.shape,
            is_coalesced=parts.is_coalesced,
            check_invariants=True,
        )
    except RuntimeError as error:
        raise CheckFailed(f"the sum of rank {rank} contradicts itself: {error}", rank) from error
    return x.to_dense()


def _two_a_rank(n: int) -> list[Entries]:
    """Rank r holds the indices r and r + 1 of n + 2."""
    return [Entries((n + 2,), 1, ((r,), (r + 1,)), (r + 1, 10 * r + 3)) for r in range(n)]


@chapter.must(
    "sparse/sum",
    "all_reduce of sparse COO tensors leaves the sum of all ranks' tensors on every rank.",
    source=PULL,
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_sparse_tensors_are_summed(ranks: Ranks) -> None:
    inputs = [entries.tensor().coalesce() for entries in _two_a_rank(ranks.world_size)]
    got = ranks.run(reduce_one, inputs)
    assert_same_on_all_ranks(_densely(got), want=dense_sum(inputs))


def reduce_and_look(me: Me) -> tuple[bool, int, int, tuple[int, ...], str]:
    """Whether the very object holds the sum, and what kind of tensor it is then."""
    x = Entries((4, 3, 2), 2, ((me.rank, 1),), (1,)).tensor(torch.float64).to(me.device)
    held = x
    dist.all_reduce(x)
    total = float(held.to_dense().sum())
    summed = total == 3.0 * me.world_size  # 1 + 2 from each rank
    return summed, held.sparse_dim(), held.dense_dim(), tuple(held.shape), str(held.dtype)


@chapter.must(
    "sparse/in-place",
    "The tensor object that was passed holds the sum afterwards, and it is still sparse, of its "
    "shape, sparse dimensions and dtype.",
    source="pytorch#31413 and pytorch#31511",
    rests_on="sparse/sum",
)
@world_sizes(1, 2, 3)
def test_the_tensor_that_was_passed_holds_the_sum(ranks: Ranks) -> None:
    got = ranks.run(reduce_and_look)
    assert_same_on_all_ranks(got, want=(True, 2, 1, (4, 3, 2), "torch.float64"))


def reduce_to_parts(me: Me) -> tuple[Tensor, Tensor]:
    """Numbers whose sum depends on the order of summation. Returns indices and values."""
    indices = torch.randint(0, 9, (1, 20), generator=me.generator)
    values = torch.randn(20, generator=me.generator) * 10.0**me.rank
    x = torch.sparse_coo_tensor(indices, values, (9,)).to(me.device)
    dist.all_reduce(x)
    x = x.coalesce()
    return x.indices(), x.values()


@chapter.must(
    "sparse/same-bits",
    "Every rank ends with the same indices in the same order and the same bits of values.",
    source="torch 2.13 docs, all_reduce: 'bitwise identical in all processes'",
    rests_on="sparse/sum",
)
@world_sizes(2, 3, 4, at_least=2)
def test_every_rank_ends_with_the_same_bits(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(reduce_to_parts))


@chapter.must(
    "sparse/uncoalesced",
    "An index that occurs several times in a rank's tensor contributes the sum of its values.",
    source="torch 2.13 docs, sparse COO tensors: uncoalesced tensors",
    rests_on="sparse/sum",
)
@world_sizes(1, 2, 3)
def test_an_index_may_stand_several_times(ranks: Ranks) -> None:
    inputs = [
        Entries((4,), 1, ((3,), (1,), (1,), (rank,)), (1, 20, 300, 5000)).tensor()
        for rank in range(ranks.world_size)
    ]
    got = ranks.run(reduce_one, inputs)
    assert_same_on_all_ranks(_densely(got), want=dense_sum(inputs))


@chapter.must(
    "sparse/hybrid",
    "Tensors with dense dimensions besides sparse ones are summed as well.",
    source=PULL,
    rests_on="sparse/sum",
)
@world_sizes(1, 2, 3)
@pytest.mark.parametrize("sparse_dim", [1, 2], ids=lambda dim: f"{dim} sparse")
def test_dense_dimensions_are_summed_too(ranks: Ranks, sparse_dim: int) -> None:
    inputs = [
        Entries((3, 3, 2, 2), sparse_dim, ((rank,) * sparse_dim, (2,) * sparse_dim), (1, 7))
        for rank in range(ranks.world_size)
    ]
    tensors = [entries.tensor() for entries in inputs]
    got = ranks.run(reduce_one, tensors)
    assert_same_on_all_ranks(_densely(got), want=dense_sum(tensors))


def strided_parts(rank: int, how: str) -> Tensor:
    """Three elements of two numbers each, of which a rank has one index for itself."""
    indices = torch.tensor([[rank, 2], [1, 0], [0, 1]])
    match how:
        case "columns":
            values = (torch.arange(6.0) + rank).view(2, 3).t()
        case "gaps":
            values = (torch.arange(12.0) + rank).view(3, 4)[:, ::2]
        case "one":
            indices, values = indices[:1], (torch.arange(4.0) + rank).view(1, 4)[:, ::2]
        case _:
            values = torch.tensor(1.0 + rank).expand(3, 2)
    return torch.sparse_coo_tensor(indices.t(), values, (3, 3, 2), check_invariants=True)


def reduce_strided(me: Me, how: str) -> Tensor:
    x = strided_parts(me.rank, how).to(me.device)
    dist.all_reduce(x)
    return x.to_dense()


@chapter.must(
    "sparse/strided",
    "Indices and values may have any strides, such as the values of a gradient have if the "
    "output was transposed or summed.",
    source="torch 2.13 docs, sparse COO tensors: constructed of any tensors",
    rests_on="sparse/hybrid",
)
@world_sizes(1, 2, 3)
@pytest.mark.parametrize("how", ["columns", "gaps", "one", "expanded"])
def test_parts_of_any_strides(ranks: Ranks, how: str) -> None:
    inputs = [strided_parts(rank, how) for rank in range(ranks.world_size)]
    assert_same_on_all_ranks(ranks.run(reduce_strided, how), want=dense_sum(inputs))


@chapter.must(
    "sparse/differing-counts",
    "Ranks may hold different numbers of elements, including none at all.",
    source="pytorch#23917",
    rests_on="sparse/sum",
)
@world_sizes(2, 3, 4, at_least=2)
@pytest.mark.parametrize("most_on", ["first", "last"])
@pytest.mark.parametrize(("name", "least"), [("float32", 0), ("int64", 2**40)])
def test_ranks_hold_different_numbers_of_elements(
    ranks: Ranks, most_on: str, name: str, least: int
) -> None:
    n = ranks.world_size
    counts = [0, *(3 * rank + 1 for rank in range(1, n))]
    counts = counts[::-1] if most_on == "first" else counts
    inputs = [
        Entries(
            (7, 2),
            2,
            tuple((i % 7, i % 2) for i in range(count)),
            tuple(range(least, least + count)),
        )
        for count in counts
    ]
    tensors = [entries.tensor(getattr(torch, name)) for entries in inputs]
    got = ranks.run(reduce_one, tensors)
    assert_same_on_all_ranks(_densely(got), want=dense_sum(tensors))


@chapter.must(
    "sparse/all-empty",
    "If no rank holds an element, the result holds none, also for shapes with a zero.",
    source="observed, torch 2.13.0 gloo",
    rests_on="sparse/differing-counts",
)
@world_sizes(1, 2, 3)
@pytest.mark.parametrize(
    ("shape", "sparse_dim"),
    [((5,), 1), ((3, 2), 1), ((0,), 1), ((2, 0, 3), 2), ((3, 0), 1)],
    ids=str,
)
def test_nothing_plus_nothing_is_nothing(
    ranks: Ranks, shape: tuple[int, ...], sparse_dim: int
) -> None:
    inputs = [Entries(shape, sparse_dim, (), ()).tensor()] * ranks.world_size
    got = ranks.run(reduce_one, inputs)
    assert_same_on_all_ranks(_densely(got), want=torch.zeros(shape))
    for rank, parts in enumerate(got):
        count = parts.indices.size(1)
        assert_that(count == 0, f"{count} elements came from nowhere", rank)


def _sum_of(ranks: Ranks, name: str) -> None:
    dtype = getattr(torch, name)
    inputs = [entries.tensor(dtype) for entries in _two_a_rank(ranks.world_size)]
    got = ranks.run(reduce_one, inputs)
    assert_same_on_all_ranks(_densely(got), want=dense_sum(inputs))


@chapter.must(
    "sparse/dtypes",
    "Sums of float32, float64, bfloat16 and of integers of 8, 32 and 64 bits are right.",
    source="observed, torch 2.13.0 gloo",
    rests_on="sparse/sum",
)
@world_sizes(2, 3)
@pytest.mark.parametrize(
    "name", ["float32", "float64", "bfloat16", "uint8", "int8", "int32", "int64"]
)
def test_sums_of_every_dtype(ranks: Ranks, name: str) -> None:
    _sum_of(ranks, name)


@chapter.should(
    "sparse/float16",
    "float16 is reduced as a sparse tensor, as it is as a dense one.",
    source="torch 2.13 docs, all_reduce names no dtypes; torch 2.13.0 gloo refuses it",
    needs=("op:all_reduce", "feature:sparse", "dtype:float16"),
    rests_on="sparse/sum",
)
@world_sizes(2, 3)
def test_sums_of_float16(ranks: Ranks) -> None:
    _sum_of(ranks, "float16")


@chapter.must(
    "sparse/complex",
    "Sums of complex tensors are right, or refused on every rank.",
    source="torch 2.13, all_reduce takes dense complex tensors for pairs of real ones",
    needs=("op:all_reduce", "feature:sparse", "dtype:complex64"),
    rests_on="sparse/sum",
)
@world_sizes(2, 3)
@not_probed()
def test_sums_of_complex_numbers_are_right_or_refused(ranks: Ranks) -> None:
    entries = _two_a_rank(ranks.world_size)
    inputs = [each.tensor(torch.complex64) * (1 + 2j) for each in entries]
    outcomes = ranks.outcomes(reduce_one, inputs)
    if all(isinstance(outcome, Raised) for outcome in outcomes):
        return
    got = [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]
    if len(got) < len(outcomes):
        raise RanksFailed("a sum of complex numbers", outcomes)
    want = dense_sum([each.tensor() for each in entries]) * (1 + 2j)
    assert_same_on_all_ranks(_densely(got), want=want)


@chapter.should(
    "sparse/many-dimensions",
    "Tensors may have more than four sparse and more than four dense dimensions.",
    source="pytorch#19146 assumes it; torch 2.13.0 gloo fails an internal assertion",
    rests_on="sparse/hybrid",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("sparse_dim", [1, 5], ids=["5 dense", "5 sparse"])
def test_more_than_four_dimensions(ranks: Ranks, sparse_dim: int) -> None:
    shape = (3, *[2] * 5) if sparse_dim == 1 else (3, *[2] * 4)
    inputs = [
        Entries(shape, sparse_dim, ((rank,) + (1,) * (sparse_dim - 1),), (rank + 1,)).tensor()
        for rank in range(ranks.world_size)
    ]
    got = ranks.run(reduce_one, inputs)
    assert_same_on_all_ranks(_densely(got), want=dense_sum(inputs))


def keep_the_parts(me: Me) -> tuple[Tensor, Tensor]:
    """The tensors that a sparse one was built from, after it was reduced."""
    indices = torch.tensor([[me.rank, 2]], device=me.device)
    values = torch.tensor([1.0 + me.rank, 2.0], device=me.device)
    x = torch.sparse_coo_tensor(indices, values, (5,), device=me.device)
    dist.all_reduce(x)
    return indices, values


@chapter.must(
    "sparse/parts-untouched",
    "The tensors of indices and values that the sparse tensor was built from keep their values.",
    source="observed, torch 2.13.0 gloo",
    rests_on="sparse/sum",
)
@world_sizes(1, 2, 3)
def test_indices_and_values_keep_their_values(ranks: Ranks) -> None:
    want = [
        (torch.tensor([[rank, 2]]), torch.tensor([1.0 + rank, 2.0]))
        for rank in range(ranks.world_size)
    ]
    assert_each_rank(ranks.run(keep_the_parts), want)


def reduce_many(me: Me, numel: int) -> Tensor:
    """Rank 0 has few elements, the others every third one of a long vector."""
    places = torch.arange(me.rank, numel, 3 if me.rank else 1000, device=me.device)
    x = torch.sparse_coo_tensor(places[None], places % 1009 + 1.0, (numel,), device=me.device)
    dist.all_reduce(x)
    return x.to_dense()


@chapter.must(
    "sparse/many-elements",
    "Tensors of many thousand elements are summed, also if one rank has few of them.",
    source="derived: a batch of words",
    rests_on="sparse/sum",
)
@world_sizes(2, 3)
def test_many_elements(ranks: Ranks) -> None:
    n, numel = ranks.world_size, 100_003
    want = torch.zeros(numel)
    index = torch.arange(numel)
    for rank in range(n):
        places = slice(rank, None, 3 if rank else 1000)
        want[places] += (index % 1009 + 1.0)[places]
    assert_same_on_all_ranks(ranks.run(reduce_many, numel), want=want)


def reduce_far_apart(me: Me) -> tuple[Tensor, Tensor]:
    """One element of all ranks, and one of each, beyond 32 bits. Returns indices and values."""
    indices = torch.tensor([[5, (me.rank + 1) << 33]], device=me.device)
    values = torch.tensor([1.0, me.rank + 2.0], device=me.device)
    x = torch.sparse_coo_tensor(indices, values, (1 << 40,), device=me.device)
    dist.all_reduce(x)
    x = x.coalesce()
    return x.indices(), x.values()


@chapter.must(
    "sparse/large-indices",
    "Indices have 64 bits: a dimension may be larger than 2**32.",
    source="torch 2.13 docs, sparse COO tensors: indices are int64",
    rests_on="sparse/sum",
)
@world_sizes(1, 2, 3)
def test_indices_beyond_32_bits(ranks: Ranks) -> None:
    n = ranks.world_size
    indices = torch.tensor([[5, *((rank + 1) << 33 for rank in range(n))]])
    values = torch.tensor([float(n), *(rank + 2.0 for rank in range(n))])
    assert_same_on_all_ranks(ranks.run(reduce_far_apart), want=(indices, values))


@st.composite
def contributions(draw: st.DrawFn, world_size: int) -> list[Entries]:
    """One shape, and each rank's own elements in it; indices may repeat."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    sparse_dim = draw(st.integers(1, len(shape)))
    index = st.tuples(*(st.integers(0, size - 1) for size in shape[:sparse_dim]))
    drawn = []
    for _ in range(world_size):
        elements = draw(st.lists(st.tuples(index, st.integers(-9, 9)), max_size=6))
        drawn.append(
            Entries(shape, sparse_dim, tuple(i for i, _ in elements), tuple(v for _, v in elements))
        )
    return drawn


@covers("sparse/sum", "sparse/same-bits")
@world_sizes(2, 3)
@given(data=st.data())
@settings(max_examples=20)
def test_any_sparse_tensors_of_one_shape_are_summed(ranks: Ranks, data: st.DataObject) -> None:
    entries = data.draw(contributions(ranks.world_size))
    tensors = [e.tensor() for e in entries]
    got = ranks.run(reduce_one, tensors)
    assert_same_on_all_ranks(_densely(got), want=dense_sum(tensors))
