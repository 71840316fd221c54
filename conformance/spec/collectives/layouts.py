"""Views: tensors that start in the middle of their memory, have gaps, or lie in another order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance import Me, Ranks, assert_each_rank, assert_that, covers, not_probed, world_sizes
from conformance.oracle.collectives import Call, after, before
from conformance.oracle.data import sample
from conformance.oracle.layout import Layout
from conformance.oracle.reduction import reduced
from conformance.spec.collectives.perform import (
    Placement,
    all_gather_into_tensor,
    assert_nothing_else,
    assert_taken,
    issue,
    perform,
    reduce_scatter_tensor,
)
from conformance.spec.collectives.strategies import calls, offsets, placements, strides

ONE_TENSOR = [
    pytest.param("all_reduce", marks=covers("all_reduce/strided")),
    pytest.param("reduce", marks=covers("reduce/strided")),
    pytest.param("broadcast", marks=covers("broadcast/strided")),
]
INPUT_AND_OUTPUT = [
    pytest.param("all_gather", marks=covers("all_gather/strided")),
    pytest.param("all_gather_into_tensor", marks=covers("all_gather_into_tensor/strided")),
    pytest.param("gather", marks=covers("gather/strided")),
    pytest.param("scatter", marks=covers("scatter/strided")),
    pytest.param("reduce_scatter", marks=covers("reduce_scatter/strided")),
    pytest.param("reduce_scatter_tensor", marks=covers("reduce_scatter_tensor/strided")),
    pytest.param("all_to_all", marks=covers("all_to_all/strided")),
]
STRIDED = [*ONE_TENSOR, *INPUT_AND_OUTPUT]

COLUMN = Placement(Layout(1, 2, step=2), Layout(1, 2, step=2))
TRANSPOSED = Placement(Layout(order=(1, 0)), Layout(order=(1, 0)))
DENSE = Placement()
STRIDED_SINGLE = pytest.param("all_to_all_single", marks=covers("all_to_all_single/strided"))


@pytest.mark.parametrize("op", STRIDED)
@world_sizes(2, 3)
def test_views_of_one_kind_on_each_rank(ranks: Ranks, op: str) -> None:
    """Every second element, a transposed matrix, and a dense one, each on another rank."""
    call = Call(op, (3, 2))
    kinds = [(COLUMN, TRANSPOSED, DENSE)[rank % 3] for rank in range(ranks.world_size)]
    seen = ranks.run_each(perform, [(call, placement) for placement in kinds])
    assert_taken(call, seen)
    assert_nothing_else(call, seen, kinds)


@pytest.mark.parametrize("op", STRIDED)
@world_sizes(3)
@given(data=st.data())
@settings(max_examples=40)
def test_views_of_any_kind(ranks: Ranks, op: str, data: st.DataObject) -> None:
    n = ranks.world_size
    call = data.draw(calls(op, ranks.target, n), label="call")
    kinds = data.draw(st.lists(placements(strides), min_size=n, max_size=n), label="placements")
    seen = ranks.run_each(perform, [(call, placement) for placement in kinds])
    assert_taken(call, seen)
    assert_nothing_else(call, seen, kinds)


def perform_or_refuse(me: Me, call: Call, placement: Placement) -> object:
    """What `perform` shows, or the words of the refusal."""
    try:
        return perform(me, call, placement)
    except (ValueError, RuntimeError) as error:
        return str(error)


@not_probed()
@pytest.mark.parametrize("op", [STRIDED_SINGLE])
@world_sizes(2, 3)
@pytest.mark.parametrize("side", ["given", "taken"])
def test_all_to_all_single_reads_views_or_refuses_them(ranks: Ranks, op: str, side: str) -> None:
    call = Call(op, (3, 2))
    view = Layout(1, 2, step=2)
    placement = Placement(given=view) if side == "given" else Placement(taken=view)
    seen = ranks.run(perform_or_refuse, call, placement)
    if all(isinstance(one, str) for one in seen):
        assert_that(all("contiguous" in one for one in seen), f"refused with {seen[0]!r}")
        return
    assert_taken(call, seen)
    assert_nothing_else(call, seen, [placement] * ranks.world_size)


def expanded(x: Tensor) -> Tensor:
    """The same with all columns like the first one, which alone is in memory."""
    return x[:, :1].clone().expand(x.shape)


def perform_on_expanded(me: Me, call: Call) -> list[Tensor] | str:
    """What was taken when what is given has strides of zero, or the words of the refusal."""
    buffers = before(call, me.rank, me.world_size)
    given = [expanded(x.to(me.device)) for x in buffers.given]
    taken = [x.to(me.device) for x in buffers.taken]
    try:
        issue(call, given, taken)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return taken


@not_probed()
@pytest.mark.parametrize("op", [*INPUT_AND_OUTPUT, STRIDED_SINGLE])
@world_sizes(2, 3)
def test_inputs_whose_elements_share_memory(ranks: Ranks, op: str) -> None:
    n = ranks.world_size
    call = Call(op, (3, 2))
    got = ranks.run(perform_on_expanded, call)
    if op == "all_to_all_single" and all(isinstance(one, str) for one in got):
        assert_that(all("contiguous" in one for one in got), f"refused with {got[0]!r}")
        return
    want = [[expanded(x) for x in after(call, rank, n).taken] for rank in range(n)]
    assert_each_rank(got, want, what=f"{call} of expanded tensors")


ONLY_OUTPUTS = [
    pytest.param("all_reduce", marks=covers("all_reduce/only-outputs")),
    pytest.param("reduce", marks=covers("reduce/only-outputs")),
    pytest.param("broadcast", marks=covers("broadcast/only-outputs")),
    pytest.param("all_gather", marks=covers("all_gather/only-outputs")),
    pytest.param("all_gather_into_tensor", marks=covers("all_gather_into_tensor/only-outputs")),
    pytest.param("gather", marks=covers("gather/only-outputs")),
    pytest.param("scatter", marks=covers("scatter/only-outputs")),
    pytest.param("reduce_scatter", marks=covers("reduce_scatter/only-outputs")),
    pytest.param("reduce_scatter_tensor", marks=covers("reduce_scatter_tensor/only-outputs")),
    pytest.param("all_to_all", marks=covers("all_to_all/only-outputs")),
    pytest.param("all_to_all_single", marks=covers("all_to_all_single/only-outputs")),
]


@pytest.mark.parametrize("op", ONLY_OUTPUTS)
@world_sizes(2, 3)
@given(data=st.data())
@settings(max_examples=25)
def test_nothing_but_the_outputs_changes(ranks: Ranks, op: str, data: st.DataObject) -> None:
    n = ranks.world_size
    call = data.draw(calls(op, ranks.target, n), label="call")
    kinds = data.draw(st.lists(placements(offsets), min_size=n, max_size=n), label="placements")
    seen = ranks.run_each(perform, [(call, placement) for placement in kinds])
    assert_nothing_else(call, seen, kinds)


def gathered_into_rows(me: Me) -> Tensor:
    """The list is made of the rows of one matrix."""
    matrix = torch.full((me.world_size, 3), -1.0, device=me.device)
    dist.all_gather(list(matrix.unbind()), sample((3,), "float32", me.rank).to(me.device))
    return matrix


@covers("all_gather/views-of-one-tensor")
@world_sizes(1, 2, 3)
def test_all_gather_into_the_rows_of_a_matrix(ranks: Ranks) -> None:
    n = ranks.world_size
    want = torch.stack([sample((3,), "float32", rank) for rank in range(n)])
    assert_each_rank(ranks.run(gathered_into_rows), [want] * n)


def gathered_in_place(me: Me) -> list[Tensor]:
    """The input is the rank's own tensor of the list."""
    outputs = [torch.full((3,), -1.0, device=me.device) for _ in range(me.world_size)]
    outputs[me.rank].copy_(sample((3,), "float32", me.rank))
    dist.all_gather(outputs, outputs[me.rank])
    return outputs


@covers("all_gather/in-place")
@world_sizes(1, 2, 3)
def test_all_gather_from_its_own_output(ranks: Ranks) -> None:
    n = ranks.world_size
    want = [sample((3,), "float32", rank) for rank in range(n)]
    assert_each_rank(ranks.run(gathered_in_place), [want] * n)


def gathered_twice_into_one(me: Me, overlapping: bool) -> str:
    """The words of the refusal, or "" if there was none."""
    memory = torch.zeros(me.world_size + 1, device=me.device)
    first = memory[:2]
    outputs = [memory[i : i + 2] if overlapping else first for i in range(me.world_size)]
    try:
        dist.all_gather(outputs, torch.full((2,), me.rank + 1.0, device=me.device))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@covers("all_gather/aliased-outputs")
@world_sizes(2, 3)
@pytest.mark.parametrize("overlapping", [False, True], ids=["same", "overlapping"])
def test_all_gather_refuses_outputs_that_share_memory(ranks: Ranks, overlapping: bool) -> None:
    for rank, words in enumerate(ranks.run(gathered_twice_into_one, overlapping)):
        assert_that(bool(words), "was accepted: one tensor cannot hold what two ranks gave", rank)


# elements a rank: transports often treat what is large differently
few_and_many = pytest.mark.parametrize("numel", [2, 30_000], ids=["few", "many"])


def gathered_into_one_in_place(me: Me, numel: int) -> Tensor:
    """The input is the rank's own part of the output."""
    output = torch.full((me.world_size * numel,), -1.0, device=me.device)
    mine = output[numel * me.rank : numel * (me.rank + 1)]
    mine.copy_(sample((numel,), "float32", me.rank))
    all_gather_into_tensor(output, mine)
    return output


@covers("all_gather_into_tensor/in-place")
@world_sizes(1, 2, 3)
@few_and_many
def test_all_gather_into_tensor_from_its_own_output(ranks: Ranks, numel: int) -> None:
    n = ranks.world_size
    want = torch.cat([sample((numel,), "float32", rank) for rank in range(n)])
    assert_each_rank(ranks.run(gathered_into_one_in_place, numel), [want] * n)


def reduce_scattered_in_place(me: Me, numel: int) -> Tensor:
    """The output is the rank's own part of the input."""
    parts = sample((me.world_size * numel,), "float32", me.rank).to(me.device)
    reduce_scatter_tensor(parts[numel * me.rank : numel * (me.rank + 1)], parts)
    return parts


@covers("reduce_scatter_tensor/in-place")
@world_sizes(1, 2, 3)
@few_and_many
def test_reduce_scatter_tensor_into_its_own_input(ranks: Ranks, numel: int) -> None:
    n = ranks.world_size
    given_by = [sample((n * numel,), "float32", rank) for rank in range(n)]
    total = reduced("sum", given_by)
    want = [x.clone() for x in given_by]
    for rank, x in enumerate(want):
        own = slice(numel * rank, numel * (rank + 1))
        x[own] = total[own]
    assert_each_rank(ranks.run(reduce_scattered_in_place, numel), want)
