"""Collectives on strided and offset views; memory that must not change; in-place all_gather."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, assert_that, not_probed, world_sizes
from conformance.oracle.collectives import Call, after, before
from conformance.oracle.data import sample
from conformance.oracle.layout import Layout
from conformance.oracle.reduction import reduced
from conformance.spec.collectives.perform import (
    Placement,
    Seen,
    all_gather_into_tensor,
    assert_nothing_else,
    assert_taken,
    issue,
    perform,
    perform_async,
    reduce_scatter_tensor,
)
from conformance.spec.collectives.strategies import calls, offsets, placements, strides
from conformance.spec.parameters import by_operation

chapter = Chapter("collectives")


ONE_TENSOR = by_operation(
    chapter.must(
        "all_reduce/strided",
        "all_reduce reduces the elements of a strided view, whatever the strides on other ranks.",
        source="Megatron-LM#5337; torch 2.13 docs, all_reduce: 'the function operates in-place'",
        needs=("op:all_reduce", "reduce_op:sum"),
        rests_on="all_reduce/shapes",
    ),
    chapter.must(
        "reduce/strided",
        "reduce reduces the elements of a strided view, whatever the strides on other ranks.",
        source="torch 2.13 docs, reduce: 'the function operates in-place'",
        needs=("op:reduce", "reduce_op:sum"),
        rests_on="reduce/shapes",
    ),
    chapter.must(
        "broadcast/strided",
        "broadcast reads and writes the elements of strided views.",
        source="pytorch#192920",
        needs="op:broadcast",
        rests_on="broadcast/shapes",
    ),
)
INPUT_AND_OUTPUT = by_operation(
    chapter.must(
        "all_gather/strided",
        "all_gather reads and writes the elements of strided views.",
        source="torch 2.13 docs, all_gather",
        needs="op:all_gather",
        rests_on="all_gather/shapes",
    ),
    chapter.must(
        "all_gather_into_tensor/strided",
        "all_gather_into_tensor reads and writes the elements of strided views.",
        source="torch 2.13 docs, all_gather_single",
        needs="op:all_gather_into_tensor",
        rests_on="all_gather_into_tensor/shapes",
    ),
    chapter.must(
        "gather/strided",
        "gather reads and writes the elements of strided views.",
        source="pytorch#158903",
        needs="op:gather",
        rests_on="gather/shapes",
    ),
    chapter.must(
        "scatter/strided",
        "scatter reads and writes the elements of strided views.",
        source="pytorch#24836",
        needs="op:scatter",
        rests_on="scatter/shapes",
    ),
    chapter.must(
        "reduce_scatter/strided",
        "reduce_scatter reads and writes the elements of strided views.",
        source="torch 2.13 docs, reduce_scatter",
        needs=("op:reduce_scatter", "reduce_op:sum"),
        rests_on="reduce_scatter/shapes",
    ),
    chapter.must(
        "reduce_scatter_tensor/strided",
        "reduce_scatter_tensor reads and writes the elements of strided views.",
        source="torch 2.13 docs, reduce_scatter_single",
        needs=("op:reduce_scatter_tensor", "reduce_op:sum"),
        rests_on="reduce_scatter_tensor/shapes",
    ),
    chapter.must(
        "all_to_all/strided",
        "all_to_all reads and writes the elements of strided views.",
        source="torch 2.13 docs, all_to_all",
        needs="op:all_to_all",
        rests_on="all_to_all/shapes",
    ),
)
STRIDED = [*ONE_TENSOR, *INPUT_AND_OUTPUT]

COLUMN = Placement(Layout(1, 2, step=2), Layout(1, 2, step=2))
TRANSPOSED = Placement(Layout(order=(1, 0)), Layout(order=(1, 0)))
DENSE = Placement()
OF_FIVE = [
    Placement(Layout(order=(4, 1, 3, 0, 2)), Layout(1, 2, order=(2, 0, 4, 3, 1))),
    Placement(Layout(1, 2, order=(0, 1, 2, 4, 3), step=2), Layout(order=(3, 4, 0, 1, 2))),
    DENSE,
]
STRIDED_SINGLE = pytest.param(
    "all_to_all_single",
    marks=chapter.must(
        "all_to_all_single/strided",
        "all_to_all_single reads and writes the elements of strided views, or refuses them.",
        source="observed, torch 2.13.0 gloo: 'Tensors must be contiguous'",
        needs="op:all_to_all_single",
        rests_on="all_to_all_single/shapes",
    ),
)


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
def test_views_of_five_dimensions(ranks: Ranks, op: str) -> None:
    call = Call(op, (2, 3, 1, 4, 3))
    seen = ranks.run_each(perform, [(call, placement) for placement in OF_FIVE])
    assert_taken(call, seen)
    assert_nothing_else(call, seen, OF_FIVE)


def side_by_side(me: Me, calls: Sequence[Call], placement: Placement) -> list[Seen]:
    """All of them pending at once."""
    pending = [perform_async(me, call, placement) for call in calls]
    for each in pending:
        each.work.wait()
    return [each.seen() for each in pending]


@pytest.mark.parametrize("op", STRIDED)
@world_sizes(2)
@pytest.mark.parametrize("placement", [COLUMN, TRANSPOSED], ids=["column", "transposed"])
def test_views_of_one_size_side_by_side(ranks: Ranks, op: str, placement: Placement) -> None:
    """Four calls that may need memory of the same size to work in."""
    calls = [Call(op, (3, 2), salt=salt) for salt in range(4)]
    by_rank = ranks.run(side_by_side, calls, placement)
    for call, seen in zip(calls, zip(*by_rank, strict=True), strict=True):
        assert_taken(call, seen)
        assert_nothing_else(call, seen, [placement] * len(seen))


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


ONLY_OUTPUTS = by_operation(
    chapter.must(
        "all_reduce/only-outputs",
        "all_reduce of a view does not change the memory before and after it.",
        source="torch 2.13 docs, all_reduce",
        needs=("op:all_reduce", "reduce_op:sum"),
        rests_on="all_reduce/sum",
    ),
    chapter.must(
        "reduce/only-outputs",
        "reduce of a view does not change the memory before and after it.",
        source="torch 2.13 docs, reduce",
        needs=("op:reduce", "reduce_op:sum"),
        rests_on="reduce/sum",
    ),
    chapter.must(
        "broadcast/only-outputs",
        "broadcast changes neither the source's tensor nor the memory around any rank's view.",
        source="torch 2.13 docs, broadcast",
        needs="op:broadcast",
        rests_on="broadcast/values",
    ),
    chapter.must(
        "all_gather/only-outputs",
        "all_gather changes neither its input nor the memory around input and outputs.",
        source="torch 2.13 docs, all_gather",
        needs="op:all_gather",
        rests_on="all_gather/values",
    ),
    chapter.must(
        "all_gather_into_tensor/only-outputs",
        "all_gather_into_tensor changes neither its input nor the memory around input and output.",
        source="torch 2.13 docs, all_gather_single",
        needs="op:all_gather_into_tensor",
        rests_on="all_gather_into_tensor/concatenated",
    ),
    chapter.must(
        "gather/only-outputs",
        "gather changes neither its inputs nor the memory around inputs and outputs.",
        source="torch 2.13 docs, gather",
        needs="op:gather",
        rests_on="gather/values",
    ),
    chapter.must(
        "scatter/only-outputs",
        "scatter changes neither its inputs nor the memory around inputs and outputs.",
        source="torch 2.13 docs, scatter",
        needs="op:scatter",
        rests_on="scatter/values",
    ),
    chapter.must(
        "reduce_scatter/only-outputs",
        "reduce_scatter changes neither its inputs nor the memory around inputs and output.",
        source="torch 2.13 docs, reduce_scatter",
        needs=("op:reduce_scatter", "reduce_op:sum"),
        rests_on="reduce_scatter/sum",
    ),
    chapter.must(
        "reduce_scatter_tensor/only-outputs",
        "reduce_scatter_tensor changes neither its input nor the memory around input and output.",
        source="torch 2.13 docs, reduce_scatter_single",
        needs=("op:reduce_scatter_tensor", "reduce_op:sum"),
        rests_on="reduce_scatter_tensor/concatenated",
    ),
    chapter.must(
        "all_to_all/only-outputs",
        "all_to_all changes neither its inputs nor the memory around inputs and outputs.",
        source="torch 2.13 docs, all_to_all",
        needs="op:all_to_all",
        rests_on="all_to_all/values",
    ),
    chapter.must(
        "all_to_all_single/only-outputs",
        "all_to_all_single changes neither its input nor the memory around input and output.",
        source="torch 2.13 docs, all_to_all_single",
        needs="op:all_to_all_single",
        rests_on="all_to_all_single/even",
    ),
)


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


@chapter.must(
    "all_gather/views-of-one-tensor",
    "all_gather's list may consist of views of one tensor that do not overlap.",
    source="torch 2.13 docs, all_gather",
    needs="op:all_gather",
    rests_on="all_gather/values",
)
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


@chapter.must(
    "all_gather/in-place",
    "all_gather's input may be the rank's own tensor of the list.",
    source="observed, torch 2.13.0 gloo",
    needs="op:all_gather",
    rests_on="all_gather/values",
)
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


@chapter.should(
    "all_gather/aliased-outputs",
    "all_gather refuses a list in which the same tensor is the output for two ranks.",
    source="pytorch#14632, torchcomms#2553",
    needs="op:all_gather",
    rests_on="all_gather/values",
)
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


@chapter.must(
    "all_gather_into_tensor/in-place",
    "all_gather_into_tensor's input may be the rank's own part of the output.",
    source="observed, torch 2.13.0 gloo; FSDP's all-gather relies on it",
    needs="op:all_gather_into_tensor",
    rests_on="all_gather_into_tensor/concatenated",
)
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


@chapter.must(
    "reduce_scatter_tensor/in-place",
    "reduce_scatter_tensor's output may be the rank's own part of the input; the other parts do "
    "not change.",
    source="observed, torch 2.13.0 gloo",
    needs=("op:reduce_scatter_tensor", "reduce_op:sum"),
    rests_on="reduce_scatter_tensor/concatenated",
)
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
