"""all_reduce of sparse tensors: async, subgroups, gradients; other ops; ranks that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    deadline,
    not_probed,
    world_sizes,
)
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import Outcome, Raised, Returned
from conformance.oracle.sparse import Entries, dense_sum
from conformance.spec.raising import assert_raised

chapter = Chapter("sparse", needs=("op:all_reduce", "feature:sparse"))


def _entries(rank: int, number: int) -> Entries:
    return Entries((6,), 1, ((rank,), (number,)), (rank + 1, 10 * number))


def reduce_several(me: Me) -> list[Tensor]:
    """Three sparse tensors and two dense ones under way at once, waited for backwards."""
    sparse = [_entries(me.rank, i).tensor().to(me.device) for i in range(3)]
    dense = [torch.full((4,), float(me.rank * (i + 1)), device=me.device) for i in range(2)]
    mixed = [sparse[0], dense[0], sparse[1], dense[1], sparse[2]]
    works = [dist.all_reduce(x, async_op=True) for x in mixed]
    for work in reversed(works):
        work.wait()
    return [x.to_dense() if x.is_sparse else x for x in mixed]


@chapter.must(
    "sparse/several-at-once",
    "Several reductions of sparse and dense tensors in progress at once do not mix their indices "
    "and values.",
    source="horovod#3813",
    rests_on=("sparse/sum", "all_reduce/sum"),
)
@world_sizes(1, 2, 3)
def test_several_reductions_at_once(ranks: Ranks) -> None:
    n = ranks.world_size
    total = float(sum(range(n)))
    sparse = [dense_sum([_entries(rank, i).tensor() for rank in range(n)]) for i in range(3)]
    dense = [torch.full((4,), total * (i + 1)) for i in range(2)]
    want = [sparse[0], dense[0], sparse[1], dense[1], sparse[2]]
    assert_same_on_all_ranks(ranks.run(reduce_several), want=want)


def one_rank_goes_ahead(me: Me, ahead: int) -> Tensor:
    """The others issue the call only after the one that goes ahead has come back from it."""
    x = _entries(me.rank, 5).tensor().to(me.device)
    if me.rank != ahead:
        me.store.wait(["issued"])
    try:
        work = dist.all_reduce(x, async_op=True)
    finally:
        me.store.set("issued", "")
    work.wait()
    return x.to_dense()


@chapter.must(
    "sparse/async",
    "With async_op the call returns before the other ranks have joined in, and the tensor holds "
    "the sum once wait has returned.",
    source="torch 2.13 docs, all_reduce: 'Async work handle, if async_op is set to True'",
    needs=("op:all_reduce", "feature:sparse", "feature:nonblocking"),
    rests_on="sparse/sum",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("ahead", ["first", "last"])
def test_the_call_returns_before_the_others_have_come(ranks: Ranks, ahead: str) -> None:
    n = ranks.world_size
    want = dense_sum([_entries(rank, 5).tensor() for rank in range(n)])
    got = ranks.run(one_rank_goes_ahead, 0 if ahead == "first" else n - 1)
    assert_same_on_all_ranks(got, want=want)


def reduce_in_a_subgroup(me: Me) -> Tensor | None:
    """Among all ranks but 0."""
    group = dist.new_group(list(range(1, me.world_size)))
    if me.rank == 0:
        return None
    x = _entries(me.rank, 5).tensor().to(me.device)
    dist.all_reduce(x, group=group)
    return x.to_dense()


@chapter.must(
    "sparse/subgroup",
    "In a subgroup, only the members' tensors are summed.",
    source="torch 2.13 docs, all_reduce: 'The process group to work on'",
    rests_on="sparse/sum",
)
@world_sizes(2, 3, 4)
def test_a_subgroup_sums_its_own(ranks: Ranks) -> None:
    tensors = [_entries(rank, 5).tensor() for rank in range(ranks.world_size)]
    want = [None] + [dense_sum(tensors[1:])] * (len(tensors) - 1)
    assert_each_rank(ranks.run(reduce_in_a_subgroup), want)


def ask_the_handle(me: Me) -> list[Tensor]:
    """The result of the handle, the value of its future, and the tensor."""
    x = _entries(me.rank, 5).tensor().to(me.device)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    future: Any = work.get_future().wait()
    value = future[0] if isinstance(future, list) else future
    return [work.result()[0].to_dense(), value.to_dense(), x.to_dense()]


@chapter.must(
    "sparse/result",
    "The result of the handle and the value of its future are the reduced tensor.",
    source="pytorch#22036, which added Work.result for it",
    rests_on="sparse/sum",
)
@world_sizes(1, 2, 3)
def test_the_handle_has_the_result(ranks: Ranks) -> None:
    want = dense_sum([_entries(rank, 5).tensor() for rank in range(ranks.world_size)])
    assert_same_on_all_ranks(ranks.run(ask_the_handle), want=[want] * 3)


def reduce_a_gradient(me: Me) -> tuple[bool, Tensor]:
    """The gradient of an embedding: whether it is sparse afterwards, and what it holds."""
    table = torch.nn.Embedding(5, 2, sparse=True, device=me.device)
    rows = torch.tensor([me.rank, 4, 4], device=me.device)
    table(rows).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None
    dist.all_reduce(gradient)
    return gradient.is_sparse, gradient.to_dense()


@chapter.must(
    "sparse/gradients",
    "The sparse gradient of an embedding is reduced in place, without being converted to a dense "
    "tensor.",
    source="pytorch#22037, sparse gradients",
    rests_on=("sparse/hybrid", "sparse/in-place"),
)
@world_sizes(1, 2, 3)
def test_the_gradient_of_an_embedding(ranks: Ranks) -> None:
    n = ranks.world_size
    want = torch.zeros(5, 2)
    want[:n] = 1
    want[4] = 2 * n
    assert_same_on_all_ranks(ranks.run(reduce_a_gradient), want=(True, want))


def reduce_by(me: Me, name: str, dtype: str) -> Tensor:
    """Dense in value: every rank holds every index."""
    x = Entries((3,), 1, ((0,), (1,), (2,)), (me.rank + 1, 4, 7 - me.rank))
    sparse = x.tensor(getattr(torch, dtype)).to(me.device)
    dist.all_reduce(sparse, op=getattr(dist.ReduceOp, name))
    return sparse.to_dense()


def _elementwise(name: str, world_size: int, dtype: str) -> Tensor:
    rows = [[rank + 1, 4, 7 - rank] for rank in range(world_size)]
    x = torch.tensor(rows, dtype=getattr(torch, dtype))
    match name:
        case "AVG":
            exact = x.sum(0).double() / world_size
            return (exact if x.is_floating_point() else exact.trunc()).to(x.dtype)
        case "MIN":
            return x.amin(0)
        case "MAX":
            return x.amax(0)
        case _:
            return x.prod(0)


@chapter.must(
    "sparse/other-operations",
    "Any operation other than SUM either gives the same result as for dense tensors, or is "
    "refused on every rank with a RuntimeError that says that only SUM works.",
    source="horovod#2279; torch/csrc/distributed/c10d/ProcessGroupGloo.cpp",
    rests_on="sparse/sum",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("dtype", ["int64", "float32"])
@pytest.mark.parametrize("name", ["AVG", "MIN", "MAX", "PRODUCT"])
@not_probed()
def test_other_operations_are_right_or_refused(ranks: Ranks, name: str, dtype: str) -> None:
    outcomes = ranks.outcomes(reduce_by, name, dtype)
    got = [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]
    if not got:
        assert_raised(outcomes, RuntimeError, match="only works with.*SUM")
        return
    if len(got) < len(outcomes):
        raise RanksFailed(f"{name} of sparse tensors, which some ranks know", outcomes)
    n = ranks.world_size
    assert_same_on_all_ranks(got, want=_elementwise(name, n, dtype), within_ulps=n)


def reduce_what_differs(me: Me, inputs: list[Tensor]) -> None:
    dist.all_reduce(inputs[me.rank].to(me.device))


_DIFFERENT_SHAPES = {
    "sizes": (Entries((4,), 1, ((0,),), (1,)), Entries((5,), 1, ((0,),), (1,))),
    "dimensions": (Entries((4,), 1, ((0,),), (1,)), Entries((4, 4), 2, ((0, 1),), (1,))),
}


@chapter.must(
    "sparse/shapes-differ",
    "Ranks whose tensors differ in shape or in the number of sparse dimensions all get an error "
    "that names shapes or dimensions.",
    source="torch/csrc/distributed/c10d/ProcessGroupGloo.cpp",
    rests_on="sparse/sum",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("what", _DIFFERENT_SHAPES)
@not_probed()
def test_different_shapes_raise_everywhere(ranks: Ranks, what: str) -> None:
    most, last = (entries.tensor() for entries in _DIFFERENT_SHAPES[what])
    inputs = [most] * (ranks.world_size - 1) + [last]
    outcomes = ranks.outcomes(reduce_what_differs, inputs)
    assert_raised(outcomes, match="(?i)dimension|shape")


@chapter.must(
    "sparse/dtypes-differ",
    "Ranks whose tensors differ in dtype all get an error, and no process ends.",
    source="observed, torch 2.13.0 gloo, which ends a process",
    needs=("op:all_reduce", "feature:sparse", "feature:mismatch_errors"),
    rests_on="sparse/sum",
)
@world_sizes(2, 3)
@deadline(5)
@not_probed()
def test_different_dtypes_raise_everywhere(ranks: Ranks) -> None:
    entries = Entries((4,), 1, ((0,), (1,)), (1, 2))
    inputs = [entries.tensor(torch.float32)] * (ranks.world_size - 1)
    inputs.append(entries.tensor(torch.float64))
    assert_raised(ranks.outcomes(reduce_what_differs, inputs))


def use_elsewhere(me: Me, name: str) -> list[Tensor]:
    """Another collective than all_reduce, with rank 0 as its root."""
    x = _entries(me.rank, 5).tensor().to(me.device)
    out = [_entries(me.rank, 5).tensor().to(me.device) for _ in range(me.world_size)]
    calls: dict[str, Callable[[], object]] = {
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "all_gather": lambda: dist.all_gather(out, x),
        "send": lambda: dist.send(x, 1) if me.rank == 0 else dist.recv(x, 0),
    }
    calls[name]()
    return [y.to_dense() for y in (out if name == "all_gather" else [x])]


def _elsewhere(name: str, world_size: int) -> list[list[Tensor] | None]:
    """What each rank ends with; None where it does not matter."""
    all_of_them = [_entries(rank, 5).tensor() for rank in range(world_size)]
    own = [x.to_dense() for x in all_of_them]
    others = range(1, world_size)
    if name == "all_gather":
        return [own] * world_size
    if name == "reduce":
        return [[dense_sum(all_of_them)], *(None for _ in others)]
    return [[own[0]] for _ in own]


@chapter.must(
    "sparse/other-collectives",
    "broadcast, reduce, all_gather and send of a sparse tensor are right, or refused before "
    "anything is sent.",
    source="observed, torch 2.13.0: no kernel for sparse tensors",
    needs="feature:sparse",
    rests_on="sparse/sum",
)
@world_sizes(2)
@pytest.mark.parametrize("name", ["broadcast", "reduce", "all_gather", "send"])
@not_probed()
def test_other_collectives_are_right_or_refused(ranks: Ranks, name: str) -> None:
    outcomes = ranks.outcomes(use_elsewhere, name)
    if all(isinstance(outcome, Raised) for outcome in outcomes):
        return
    for rank, want in enumerate(_elsewhere(name, ranks.world_size)):
        outcome: Outcome = outcomes[rank]
        if not isinstance(outcome, Returned):
            raise RanksFailed(f"{name} of sparse tensors", outcomes)
        if want is not None:
            assert_each_rank([outcome.value], [want], ranks=[rank])
