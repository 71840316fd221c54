"""Invalid arguments of collectives: errors on every rank, and the group stays usable."""

from __future__ import annotations

import inspect
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
    adapts,
    assert_each_rank,
    assert_same_on_all_ranks,
    assert_that,
    needs,
    not_probed,
    world_sizes,
)
from conformance.oracle.collectives import Call
from conformance.spec.collectives.perform import Seen, assert_taken, perform
from conformance.spec.collectives.wrong_calls import (
    ALL_GATHER,
    ALL_TO_ALL,
    GATHER,
    INTO_TENSOR,
    MIXED,
    NOT_TENSORS,
    OUTSIDE,
    REDUCE_SCATTER,
    ROOTS,
    SCATTER,
    SCATTER_TENSOR,
    SPLITS,
    Kit,
    all_gather_into_longer_ones,
    all_gather_into_too_few,
    all_to_all_of_too_few,
    all_to_all_single_of_odd_rows,
    broadcast_from_outside_of_the_group,
    gather_into_longer_ones,
    gather_into_too_many,
    operation_of,
    reduce_scatter_into_shorter_ones,
    reduce_scatter_of_too_few,
    reduce_to_outside,
    scatter_of_longer_ones,
    scatter_of_too_many,
    splits_for_too_many_ranks,
    splits_of_too_few_rows,
)
from conformance.spec.groups.membership_sums import sum_marks, sum_of_marks
from conformance.torch_private import sequence_number

chapter = Chapter("collectives", source="observed, torch 2.13.0 gloo")


def told(me: Me, call: Callable[[Kit], None]) -> tuple[str, str]:
    """Kind and words of what the wrong call raises; ("", "") if it is taken."""
    try:
        call(Kit(me))
    except (TypeError, ValueError, RuntimeError) as error:
        kinds = (TypeError, ValueError, RuntimeError)
        return next(kind.__name__ for kind in kinds if isinstance(error, kind)), str(error)
    return "", ""


def check_refused(
    ranks: Ranks, call: Callable[[Kit], None], kinds: tuple[str, ...], words: str = ""
) -> None:
    shown = inspect.getsource(call).split("\n", 1)[1].strip()
    wanted = " or ".join(kinds) + (f" with {words!r}" if words else "")
    for rank, (kind, said) in enumerate(ranks.run(told, call)):
        happened = f"raised {kind}: {said}" if kind else "was taken"
        assert_that(
            kind in kinds and words in said,
            f"{shown}\nshould raise {wanted}, and {happened}",
            rank,
        )


# What a backend says of its own, whichever of them it prefers.
ANY_KIND = ("ValueError", "RuntimeError", "TypeError")


def named(call: Callable[[Kit], None]) -> str:
    return call.__name__


@chapter.must(
    "arguments/not-a-tensor",
    "Passing something other than a tensor, or than a list of tensors, raises a TypeError that "
    "names the parameter.",
    source="torch 2.13, distributed_c10d: 'Expected parameter `tensor` of type torch.Tensor'",
)
@pytest.mark.parametrize("call", NOT_TENSORS, ids=named)
@world_sizes(2)
def test_something_else_than_tensors(ranks: Ranks, call: Callable[[Kit], None]) -> None:
    check_refused(ranks, call, ("TypeError",), "Expected parameter")


@chapter.must(
    "arguments/mixed-dtypes",
    "Inputs and outputs of different dtypes raise a ValueError.",
    source="test_c10d_common.py, _test_tensor_dtype_mismatch: 'tensors with different dtypes'",
)
@pytest.mark.parametrize("call", MIXED, ids=named)
@world_sizes(2)
def test_mixed_dtypes(ranks: Ranks, call: Callable[[Kit], None]) -> None:
    check_refused(ranks, call, ("ValueError",), "tensors with different dtypes")


@chapter.must(
    "arguments/one-root",
    "Naming a root by both a global and a group rank, or by neither where there is no default, "
    "raises a ValueError.",
    source="torch 2.13, _canonicalize_group_rank",
)
@pytest.mark.parametrize("call", ROOTS, ids=named)
@world_sizes(2)
def test_no_root_or_two(ranks: Ranks, call: Callable[[Kit], None]) -> None:
    check_refused(ranks, call, ("ValueError",), "specify")


@chapter.must(
    "arguments/root-in-group",
    "A root that is not a rank of the group is refused on every rank.",
    source="torch 2.13: 'invalid root rank', 'is not part of group'",
)
@not_probed()
@pytest.mark.parametrize(
    "call", [pytest.param(c, marks=needs(f"op:{operation_of(c)}")) for c in OUTSIDE], ids=named
)
@world_sizes(2)
def test_a_root_outside(ranks: Ranks, call: Callable[[Kit], None]) -> None:
    check_refused(ranks, call, ANY_KIND)


@chapter.must(
    "arguments/all_gather",
    "all_gather refuses a list whose length is not the size of the group, or that contains a "
    "tensor of another size.",
    source="observed, torch 2.13.0 gloo: 'invalid output tensor list', 'invalid tensor size'",
    needs="op:all_gather",
    rests_on="all_gather/values",
)
@pytest.mark.parametrize("call", ALL_GATHER, ids=named)
@world_sizes(2)
def test_wrong_outputs_of_all_gather(ranks: Ranks, call: Callable[[Kit], None]) -> None:
    check_refused(ranks, call, ANY_KIND)


@not_probed()
@chapter.must(
    "arguments/all_gather_into_tensor",
    "all_gather_into_tensor refuses an output of another size or dtype.",
    needs="op:all_gather_into_tensor",
    rests_on="all_gather_into_tensor/concatenated",
)
@pytest.mark.parametrize("call", INTO_TENSOR, ids=named)
@world_sizes(2)
def test_wrong_outputs_of_all_gather_into_tensor(ranks: Ranks, call: Callable[[Kit], None]) -> None:
    check_refused(ranks, call, ANY_KIND)


@not_probed()
@chapter.must(
    "arguments/gather",
    "gather refuses a list that is missing on the destination, present on another rank, or of a "
    "wrong length or size.",
    source="torch 2.13, _validate_output_list_for_rank; observed, torch 2.13.0 gloo",
    needs="op:gather",
    rests_on="gather/values",
)
@pytest.mark.parametrize("call", GATHER, ids=named)
@world_sizes(2)
def test_wrong_lists_of_gather(ranks: Ranks, call: Callable[[Kit], None]) -> None:
    check_refused(ranks, call, ANY_KIND)


@not_probed()
@chapter.must(
    "arguments/scatter",
    "scatter refuses a list that is missing on the source, present on another rank, or of a "
    "wrong length or size.",
    source="torch 2.13, scatter; observed, torch 2.13.0 gloo",
    needs="op:scatter",
    rests_on="scatter/values",
)
@pytest.mark.parametrize("call", SCATTER, ids=named)
@world_sizes(2)
def test_wrong_lists_of_scatter(ranks: Ranks, call: Callable[[Kit], None]) -> None:
    check_refused(ranks, call, ANY_KIND)


@not_probed()
@chapter.must(
    "arguments/reduce_scatter",
    "reduce_scatter refuses a list whose length is not the size of the group, or whose tensors "
    "all have another size than the output.",
    needs="op:reduce_scatter",
    rests_on="reduce_scatter/sum",
)
@pytest.mark.parametrize("call", REDUCE_SCATTER, ids=named)
@world_sizes(2)
def test_wrong_inputs_of_reduce_scatter(ranks: Ranks, call: Callable[[Kit], None]) -> None:
    check_refused(ranks, call, ANY_KIND)


@not_probed()
@chapter.must(
    "arguments/reduce_scatter-output",
    "reduce_scatter refuses, before anything is sent, an output whose size differs from that of "
    "the rank's own tensor in the list.",
    needs="op:reduce_scatter",
    rests_on="reduce_scatter/sum",
)
@world_sizes(2)
def test_wrong_output_of_reduce_scatter(ranks: Ranks) -> None:
    check_refused(ranks, reduce_scatter_into_shorter_ones, ANY_KIND)


@not_probed()
@chapter.must(
    "arguments/reduce_scatter_tensor",
    "reduce_scatter_tensor refuses an input of another size or dtype.",
    needs="op:reduce_scatter_tensor",
    rests_on="reduce_scatter_tensor/concatenated",
)
@pytest.mark.parametrize("call", SCATTER_TENSOR, ids=named)
@world_sizes(2)
def test_wrong_inputs_of_reduce_scatter_tensor(ranks: Ranks, call: Callable[[Kit], None]) -> None:
    check_refused(ranks, call, ANY_KIND)


@not_probed()
@chapter.must(
    "arguments/all_to_all",
    "all_to_all refuses lists whose length is not the size of the group.",
    source="observed, torch 2.13.0 gloo: 'does not match world size'",
    needs="op:all_to_all",
    rests_on="all_to_all/values",
)
@pytest.mark.parametrize("call", ALL_TO_ALL, ids=named)
@world_sizes(2)
def test_wrong_lists_of_all_to_all(ranks: Ranks, call: Callable[[Kit], None]) -> None:
    check_refused(ranks, call, ANY_KIND)


@not_probed()
@chapter.must(
    "arguments/splits",
    "all_to_all_single refuses split sizes whose number is not the size of the group, or whose "
    "sum is not the size of the first dimension.",
    source="torch 2.13, checkSplitSizes: 'Number of tensor splits not equal to group size', 'Split "
    "sizes doesn't match total dim 0 size'",
    needs="op:all_to_all_single",
    rests_on="all_to_all_single/uneven",
)
@pytest.mark.parametrize("call", SPLITS, ids=named)
@world_sizes(2)
def test_wrong_splits(ranks: Ranks, call: Callable[[Kit], None]) -> None:
    check_refused(ranks, call, ANY_KIND)


@not_probed()
@chapter.must(
    "arguments/even-splits",
    "all_to_all_single without split sizes refuses a first dimension that is not divisible by "
    "the number of ranks.",
    source="torch 2.13 docs, all_to_all_single: 'must divide equally by world_size'",
    needs="op:all_to_all_single",
    rests_on="all_to_all_single/even",
)
@world_sizes(2, 3)
def test_rows_that_do_not_divide(ranks: Ranks) -> None:
    check_refused(ranks, all_to_all_single_of_odd_rows, ANY_KIND)


# Wrong calls of two ranks, and what is said of them.
WORDS = {
    broadcast_from_outside_of_the_group: "invalid root rank: 2",
    reduce_to_outside: "invalid root rank: 2",
    all_gather_into_too_few: "invalid output tensor list at index 0 (expected length 2, got 1)",
    all_gather_into_longer_ones: "invalid tensor size at index",
    gather_into_too_many: "Incorrect output list size 3. Output list size should be 2",
    gather_into_longer_ones: "invalid tensor size at index",
    scatter_of_too_many: "Incorrect input list size 3. Input list size should be 2",
    scatter_of_longer_ones: "invalid tensor size at index",
    reduce_scatter_of_too_few: "invalid input tensor list size, must be world size",
    all_to_all_of_too_few: "input tensor list size 1 does not match world size 2",
    splits_of_too_few_rows: "Split sizes doesn't match total dim 0 size",
    splits_for_too_many_ranks: "Number of tensor splits not equal to group size",
}
WORDED = [
    pytest.param(call, words, marks=needs(f"op:{operation_of(call)}"), id=call.__name__)
    for call, words in WORDS.items()
]


@chapter.should(
    "arguments/torch-words",
    "When the backend refuses a call, its message contains the words, and the wrong numbers, that "
    "the messages of torch's own backends contain.",
    rests_on=("arguments/all_gather", "arguments/root-in-group"),
)
@adapts()
@not_probed()
@pytest.mark.parametrize(("call", "words"), WORDED)
@world_sizes(2)
def test_the_words_of_torch(ranks: Ranks, call: Callable[[Kit], None], words: str) -> None:
    check_refused(ranks, call, ANY_KIND, words)


def right_calls_after_wrong_ones(me: Me) -> list[tuple[Call, Seen]]:
    """After each refusal a right call of the same operation, and what it leaves."""
    calls = [*NOT_TENSORS, *MIXED, *ROOTS, *OUTSIDE, *ALL_GATHER, *INTO_TENSOR, *GATHER, *SCATTER]
    calls += [*REDUCE_SCATTER, *SCATTER_TENSOR, *ALL_TO_ALL, *SPLITS]
    # What the target does not claim may make one rank refuse and another wait.
    claims = me.target.capabilities
    calls = [call for call in calls if claims.has(f"op:{operation_of(call)}")]
    made = []
    for number, call in enumerate(calls):
        told(me, call)
        right = Call(operation_of(call), (2,), salt=number)
        made.append((right, perform(me, right)))
    return made


@chapter.must(
    "arguments/group-survives",
    "The group stays usable after every rank has made a wrong call that was refused, also for "
    "the same operation.",
    rests_on="all_reduce/sum",
)
@world_sizes(2, 3)
def test_the_group_can_be_used_after_a_refusal(ranks: Ranks) -> None:
    for of_all in zip(*ranks.run(right_calls_after_wrong_ones), strict=True):
        assert_taken(of_all[0][0], [seen for _, seen in of_all])


def alone_in_wrong_calls(me: Me) -> tuple[Tensor, int | None]:
    """Only rank 0 makes wrong calls. The sum of a right call after them, and the group's sequence
    number, if the target has these."""
    sum_marks(me)
    if me.rank == 0:
        for call in (all_gather_into_too_few, all_gather_into_longer_ones):
            told(me, call)
    total = sum_marks(me)
    group: Any = dist.group.WORLD
    counts = me.target.capabilities.has("feature:sequence_numbers")
    return total, sequence_number(group) if counts else None


@chapter.should(
    "arguments/refused-on-one-rank",
    "A wrong call that one rank alone makes, and that is refused, does not count: the next calls "
    "of all ranks match, and their sequence numbers are equal.",
    rests_on=("arguments/all_gather", "arguments/group-survives"),
)
@world_sizes(2, 3)
def test_the_group_can_be_used_after_a_refusal_on_one_rank(ranks: Ranks) -> None:
    got = ranks.run(alone_in_wrong_calls)
    want = sum_of_marks(range(ranks.world_size))
    assert_same_on_all_ranks([total for total, _ in got], want, what="sum")
    assert_same_on_all_ranks([number for _, number in got], what="sequence number")


def gathered_as_parts(me: Me) -> list[Tensor]:
    """A complex tensor goes into real ones of twice as many elements, and the other way round."""
    mine = torch.tensor([1 + 2j, 3 - 1j], device=me.device) * (me.rank + 1)
    real = [torch.zeros(2, 2, device=me.device) for _ in range(me.world_size)]
    dist.all_gather(real, mine)
    whole = [torch.zeros_like(mine) for _ in range(me.world_size)]
    dist.all_gather(whole, torch.view_as_real(mine))
    return [*real, *whole]


@not_probed()
@chapter.must(
    "arguments/complex-and-its-parts",
    "all_gather gathers complex tensors into real ones that hold their real and imaginary parts, "
    "and the other way round.",
    source="test_c10d_common.py, _test_tensor_dtype_complex",
    needs=("op:all_gather", "dtype:complex64"),
    rests_on="all_gather/values",
)
@world_sizes(2, 3)
def test_complex_tensors_beside_their_parts(ranks: Ranks) -> None:
    n = ranks.world_size
    each = [torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1) for rank in range(n)]
    want = [torch.view_as_real(x).clone() for x in each] + each
    assert_each_rank(ranks.run(gathered_as_parts), [want] * n)
