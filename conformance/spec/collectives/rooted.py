"""broadcast, reduce, gather and scatter: results for every root, other ranks, default roots."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, covers, world_sizes
from conformance.oracle.collectives import after
from conformance.oracle.data import sample
from conformance.spec.collectives.contributions import SHAPE, mine, of, sum_of_all
from conformance.spec.collectives.perform import perform
from conformance.spec.collectives.strategies import calls, placements, strides

chapter = Chapter("collectives")


def broadcast_from_each(me: Me) -> list[Tensor]:
    """One broadcast from each rank in turn."""
    results = []
    for source in range(me.world_size):
        x = mine(me, salt=source)
        dist.broadcast(x, src=source)
        results.append(x)
    return results


@chapter.must(
    "broadcast/values",
    "broadcast gives every rank the source's values, whichever rank is the source.",
    source="torch 2.13 docs, broadcast",
    needs="op:broadcast",
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_broadcast_copies_the_source(ranks: Ranks) -> None:
    got = ranks.run(broadcast_from_each)
    want = [of(source, salt=source) for source in range(ranks.world_size)]
    assert_each_rank(got, [want] * ranks.world_size)


def broadcast_other_shape(me: Me) -> Tensor:
    shape = (6,) if me.rank else (2, 3)
    x = sample(shape, "float32", me.rank).to(me.device)
    dist.broadcast(x, src=0)
    return x


@chapter.must(
    "broadcast/same-numel",
    "broadcast needs the same number of elements on all ranks, not the same shape.",
    source="torch 2.13 docs, broadcast: 'must have the same number of elements in all processes'",
    needs="op:broadcast",
    rests_on="broadcast/values",
)
@world_sizes(2, 3)
def test_broadcast_fills_a_tensor_of_another_shape(ranks: Ranks) -> None:
    got = ranks.run(broadcast_other_shape)
    want = of(0)
    assert_each_rank(got, [want] + [want.flatten()] * (ranks.world_size - 1))


def reduced_on_each(me: Me) -> list[Tensor]:
    """One reduce to each rank in turn."""
    results = []
    for destination in range(me.world_size):
        x = mine(me, salt=destination)
        dist.reduce(x, dst=destination)
        results.append(x)
    return results


@chapter.must(
    "reduce/sum",
    "reduce with SUM leaves the sum of all ranks' tensors on the destination, whichever rank "
    "that is.",
    source="torch 2.13 docs, reduce",
    needs=("op:reduce", "reduce_op:sum"),
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_reduce_adds_on_the_destination(ranks: Ranks) -> None:
    got = ranks.run(reduced_on_each)
    n = ranks.world_size
    at_destination = [got[rank][rank] for rank in range(n)]
    assert_each_rank(at_destination, [sum_of_all(n, salt=rank) for rank in range(n)])


@chapter.should(
    "reduce/other-ranks-untouched",
    "reduce leaves the tensors of all ranks but the destination as they were.",
    source="pytorch#21480, pytorch#76527",
    needs=("op:reduce", "reduce_op:sum"),
    rests_on="reduce/sum",
)
@world_sizes(2, 3, 5, at_least=2)
def test_reduce_leaves_the_other_ranks_tensors(ranks: Ranks) -> None:
    got = ranks.run(reduced_on_each)
    n = ranks.world_size
    elsewhere = [[x for to, x in enumerate(got[rank]) if to != rank] for rank in range(n)]
    want = [[of(rank, salt=to) for to in range(n) if to != rank] for rank in range(n)]
    assert_each_rank(elsewhere, want)


LARGE = (100_003,)  # so many that they travel in pieces


def large_reduced_on_each(me: Me) -> list[bool]:
    """Whether this rank's own contribution is still there after a reduce to each rank in turn."""
    kept = []
    for destination in range(me.world_size):
        x = sample(LARGE, "float32", me.rank, salt=destination).to(me.device)
        before = x.clone()
        dist.reduce(x, dst=destination)
        kept.append(torch.equal(x, before))
    return kept


@covers("reduce/other-ranks-untouched")
@world_sizes(2, 3, 5, at_least=2)
def test_reduce_leaves_large_tensors_too(ranks: Ranks) -> None:
    n = ranks.world_size
    want = [[to != rank for to in range(n)] for rank in range(n)]
    assert_each_rank(ranks.run(large_reduced_on_each), want)


@covers("reduce/other-ranks-untouched")
@world_sizes(2, 3)
@given(data=st.data())
@settings(max_examples=40)
def test_reduce_of_any_kind_leaves_the_other_ranks_tensors(
    ranks: Ranks, data: st.DataObject
) -> None:
    n = ranks.world_size
    call = data.draw(calls("reduce", ranks.target, n), label="call")
    kinds = data.draw(st.lists(placements(strides), min_size=n, max_size=n), label="placements")
    seen = ranks.run_each(perform, [(call, placement) for placement in kinds])
    elsewhere = [rank for rank in range(n) if rank != call.root]
    want = [after(call, rank, n).taken for rank in elsewhere]
    got = [seen[rank].taken for rank in elsewhere]
    assert_each_rank(got, want, what=str(call), ranks=elsewhere)


def gathered_on_each(me: Me, elsewhere: list[Tensor] | None) -> list[list[Tensor]]:
    """One gather to each rank in turn; an empty list where this rank is not the destination.

    elsewhere: what the other ranks give for the list.
    """
    results = []
    for destination in range(me.world_size):
        here = me.rank == destination
        outputs = [torch.full_like(mine(me), -1.0) for _ in range(me.world_size)] if here else []
        dist.gather(mine(me, salt=destination), outputs if here else elsewhere, dst=destination)
        results.append(outputs)
    return results


def check_gathered(ranks: Ranks, elsewhere: list[Tensor] | None) -> None:
    got = ranks.run(gathered_on_each, elsewhere)
    n = ranks.world_size
    want = [
        [[of(source, salt=to) for source in range(n)] if to == rank else [] for to in range(n)]
        for rank in range(n)
    ]
    assert_each_rank(got, want)


@chapter.must(
    "gather/values",
    "gather puts rank i's tensor into the i-th tensor of the destination's list, whichever rank "
    "the destination is.",
    source="torch 2.13 docs, gather",
    needs="op:gather",
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_gather_puts_the_ranks_in_order(ranks: Ranks) -> None:
    check_gathered(ranks, [])


@chapter.must(
    "gather/list-at-destination-only",
    "gather needs gather_list on the destination, and only there.",
    source="torch 2.13 docs, gather; pytorch#25463",
    needs="op:gather",
    rests_on="gather/values",
)
@world_sizes(2, 3)
def test_gather_without_a_list_elsewhere(ranks: Ranks) -> None:
    check_gathered(ranks, None)


def gathered_by_default(me: Me) -> list[Tensor]:
    outputs = [torch.full_like(mine(me), -1.0) for _ in range(me.world_size)]
    dist.gather(mine(me), outputs if me.rank == 0 else None)
    return outputs if me.rank == 0 else []


@chapter.must(
    "gather/default-destination",
    "gather without a destination gathers on rank 0.",
    source="torch 2.13 docs, gather",
    needs="op:gather",
    rests_on="gather/values",
)
@world_sizes(1, 3)
def test_gather_goes_to_rank_0_by_default(ranks: Ranks) -> None:
    got = ranks.run(gathered_by_default)
    n = ranks.world_size
    assert_each_rank(got, [[of(rank) for rank in range(n)]] + [[]] * (n - 1))


def gathered_complex(me: Me) -> list[Tensor]:
    x = sample(SHAPE, "complex64", me.rank).to(me.device)
    outputs = [torch.zeros_like(x) for _ in range(me.world_size)] if me.rank == 0 else None
    dist.gather(x, outputs)
    return outputs or []


@chapter.should(
    "gather/complex",
    "gather takes complex tensors.",
    source="torch 2.13 docs, scatter, all_gather: 'Complex tensors are supported'",
    needs=("op:gather", "dtype:complex64"),
    rests_on="gather/values",
)
@world_sizes(1, 2, 3)
def test_gather_takes_complex_tensors(ranks: Ranks) -> None:
    got = ranks.run(gathered_complex)
    n = ranks.world_size
    want = [sample(SHAPE, "complex64", rank) for rank in range(n)]
    assert_each_rank(got, [want] + [[]] * (n - 1))


def scattered_from_each(me: Me, elsewhere: list[Tensor] | None) -> list[Tensor]:
    """One scatter from each rank in turn.

    elsewhere: what the other ranks give for the list.
    """
    results = []
    for source in range(me.world_size):
        here = me.rank == source
        inputs = [mine(me, salt=to) for to in range(me.world_size)]
        output = torch.full_like(mine(me), -1.0)
        dist.scatter(output, inputs if here else elsewhere, src=source)
        results.append(output)
    return results


def check_scattered(ranks: Ranks, elsewhere: list[Tensor] | None) -> None:
    got = ranks.run(scattered_from_each, elsewhere)
    n = ranks.world_size
    want = [[of(source, salt=rank) for source in range(n)] for rank in range(n)]
    assert_each_rank(got, want)


@chapter.must(
    "scatter/values",
    "scatter gives rank i the i-th tensor of the source's list, whichever rank the source is.",
    source="torch 2.13 docs, scatter",
    needs="op:scatter",
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_scatter_deals_the_list_out(ranks: Ranks) -> None:
    check_scattered(ranks, [])


@chapter.must(
    "scatter/list-at-source-only",
    "scatter needs scatter_list on the source, and only there.",
    source="torch 2.13 docs, scatter",
    needs="op:scatter",
    rests_on="scatter/values",
)
@world_sizes(2, 3)
def test_scatter_without_a_list_elsewhere(ranks: Ranks) -> None:
    check_scattered(ranks, None)


def scattered_by_default(me: Me) -> Tensor:
    inputs = [mine(me, salt=to) for to in range(me.world_size)]
    output = torch.full_like(mine(me), -1.0)
    dist.scatter(output, inputs if me.rank == 0 else None)
    return output


@chapter.must(
    "scatter/default-source",
    "scatter without a source scatters from rank 0.",
    source="torch 2.13 docs, scatter",
    needs="op:scatter",
    rests_on="scatter/values",
)
@world_sizes(1, 3)
def test_scatter_comes_from_rank_0_by_default(ranks: Ranks) -> None:
    got = ranks.run(scattered_by_default)
    assert_each_rank(got, [of(0, salt=rank) for rank in range(ranks.world_size)])
