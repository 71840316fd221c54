"""Errors for ranks whose calls differ in size, dtype, op or root, also at debug level DETAIL.

torch asks callers never to do this, and its backends hang, crash or mix the bytes. A target that
claims `feature:mismatch_errors` tells every rank instead; nothing of this is asked of any other.

Every case makes a group with a timeout of its own, so that ranks which wait for each other are told
in the end. None is probed: what does not compare calls has no way of refusing them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_that,
    covers,
    deadline,
    needs,
    not_probed,
    world_sizes,
)
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import Outcome, Returned
from conformance.oracle.collectives import COLLECTIVES, Call
from conformance.spec.collectives.kinds import each
from conformance.spec.collectives.perform import perform
from conformance.spec.collectives.strategies import REDUCING, ROOTED

chapter = Chapter("collectives", source="derived", needs="feature:mismatch_errors")


pytestmark = not_probed()

_TIMEOUT = timedelta(seconds=3)

_FROM_A_SOURCE = ("broadcast", "scatter")

# What is said of two different calls: patterns, as groups write torch's names in several ways.
_ALL_REDUCE_OF_FLOATS = (r"(?i)\ball_?reduce\b", r"(?i)\bfloat(32)?\b", r"\b8\b")
_REDUCE_OF_INTEGERS = (r"(?i)\breduce\b", r"(?i)\b(int64|long)\b")
_ROOT = r"(?i)root|\bsrc|\bdst|source|destination"


def tensor(me: Me, numel: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((numel,), me.rank + 2, dtype=dtype, device=me.device)


def error_of(call: Callable[[], Any]) -> str:
    """The words of the error that the call raises, "" if it returns."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def is_last(me: Me) -> bool:
    return me.rank == me.world_size - 1


def other_splits(me: Me) -> str:
    """Every rank sends two rows to each; the last one expects another split of as many."""
    group = dist.new_group(timeout=_TIMEOUT)
    n = me.world_size
    even = [2] * n
    received = [3, 1, *even[2:]] if is_last(me) else even
    x, y = tensor(me, 2 * n), tensor(me, 2 * n)
    return error_of(lambda: dist.all_to_all_single(y, x, received, even, group=group))


def other_call(me: Me, shape: list[int], group: dist.ProcessGroup | None = None) -> str:
    """The last rank reduces 15 integers of this shape, and all others all-reduce 8 floats."""
    group = group or dist.new_group(timeout=_TIMEOUT)
    if is_last(me):
        integers = tensor(me, 15, torch.int64).view(shape)
        return error_of(lambda: dist.reduce(integers, 0, group=group))
    return error_of(lambda: dist.all_reduce(tensor(me), group=group))


def other_call_of_the_last(me: Me, call: Call, others: Call) -> str:
    """The last rank makes this call, and all others make theirs."""
    group = dist.new_group(timeout=_TIMEOUT)
    mine = call if is_last(me) else others
    return error_of(lambda: perform(me, mine, group=group))


def words_of_all(outcomes: list[Outcome]) -> list[str]:
    """What each rank was told. Ranks that died or hang are the target's failure."""
    if not all(isinstance(o, Returned) for o in outcomes):
        raise RanksFailed("a call that the ranks do not agree on", outcomes)
    return [o.value for o in outcomes if isinstance(o, Returned)]


def check_that_all_are_told(
    ranks: Ranks, function: Callable[..., str], *said: str, args: Sequence[object] = ()
) -> None:
    for rank, words in enumerate(words_of_all(ranks.outcomes(function, *args))):
        assert_that(bool(words), "returned as if all ranks had made the same call", rank)
        for pattern in said:
            found = re.search(pattern, words) is not None
            assert_that(found, f"was told nothing of {pattern!r}: {words!r}", rank)


def check_that_the_difference_is_told(ranks: Ranks, call: Call, *said: str, **other: Any) -> None:
    """The last rank's call is another one in these fields."""
    calls = replace(call, **other), call
    check_that_all_are_told(ranks, other_call_of_the_last, *said, args=calls)


def check_that_both_calls_are_told(
    ranks: Ranks, function: Callable[[Me, list[int]], str], shape: list[int]
) -> None:
    """Every rank is told what the last one calls, and what the others call, whole."""
    patterns = [
        *_ALL_REDUCE_OF_FLOATS,
        *_REDUCE_OF_INTEGERS,
        rf"\b{', ?'.join(map(str, shape))}\b",
        rf"(?i)\brank {ranks.world_size - 1}\b",
    ]
    for rank, words in enumerate(words_of_all(ranks.outcomes(function, shape))):
        assert_that(bool(words), "returned as if all ranks had made the same call", rank)
        for pattern in patterns:
            found = re.search(pattern, words) is not None
            assert_that(found, f"was told nothing of {pattern!r}: {words!r}", rank)


@chapter.must(
    "mismatch/numel",
    "If ranks pass tensors with different numbers of elements to a collective, every rank gets an "
    "error.",
    source="nccl#1394",
    rests_on="all_reduce/sum",
)
@deadline(20)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", each(op for op in COLLECTIVES if op not in _FROM_A_SOURCE))
def test_different_numbers_of_elements(ranks: Ranks, op: str) -> None:
    check_that_the_difference_is_told(ranks, Call(op, shape=(4,)), shape=(8,))


@chapter.must(
    "mismatch/broadcast-numel",
    "If ranks expect other numbers of elements from a broadcast or scatter than its source has, "
    "every rank gets an error.",
    rests_on="broadcast/values",
)
@deadline(20)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", each(_FROM_A_SOURCE))
def test_a_longer_tensor_than_the_sources(ranks: Ranks, op: str) -> None:
    check_that_the_difference_is_told(ranks, Call(op, shape=(4,)), shape=(8,))


@chapter.must(
    "mismatch/gathered-sizes",
    "If ranks expect different sizes from all_gather, every rank gets an error.",
    rests_on="all_gather/values",
)
@deadline(20)
@world_sizes(2, 3)
def test_different_sizes_to_gather(ranks: Ranks) -> None:
    check_that_the_difference_is_told(ranks, Call("all_gather", shape=(4,)), shape=(8,))


@chapter.must(
    "mismatch/dtype",
    "If ranks pass tensors of different dtypes, every rank gets an error.",
    rests_on="all_reduce/sum",
)
@deadline(20)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", each(COLLECTIVES))
def test_different_dtypes_of_one_width(ranks: Ranks, op: str) -> None:
    check_that_the_difference_is_told(ranks, Call(op), dtype="int32")


@chapter.must(
    "mismatch/reduce-op",
    "If ranks reduce with different operations, every rank gets an error.",
    rests_on="all_reduce/sum",
)
@deadline(20)
@world_sizes(2, 3)
@needs("reduce_op:product")
@pytest.mark.parametrize("op", each(REDUCING))
def test_different_reduce_operations(ranks: Ranks, op: str) -> None:
    check_that_the_difference_is_told(ranks, Call(op), reduce_op="product")


@chapter.must(
    "mismatch/splits",
    "If ranks pass contradictory split sizes to all_to_all_single, every rank gets an error.",
    source="pytorch#177381",
    rests_on="all_to_all_single/uneven",
)
@deadline(20)
@world_sizes(2, 3)
def test_splits_that_contradict_each_other(ranks: Ranks) -> None:
    check_that_all_are_told(ranks, other_splits)


@chapter.must(
    "mismatch/root",
    "If ranks name different roots, every rank gets an error that says so.",
    rests_on="broadcast/values",
)
@deadline(20)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", each(ROOTED))
def test_different_roots(ranks: Ranks, op: str) -> None:
    check_that_the_difference_is_told(ranks, Call(op), _ROOT, root=1)


@covers("mismatch/root")
@deadline(20)
@world_sizes(5)
@needs("op:broadcast")
def test_the_last_of_five_names_another_root(ranks: Ranks) -> None:
    check_that_the_difference_is_told(ranks, Call("broadcast"), _ROOT, root=1)


@chapter.must(
    "mismatch/operation",
    "If ranks call different collectives, every rank gets an error that names both.",
    source="pytorch#100207",
    rests_on="all_reduce/sum",
)
@deadline(20)
@world_sizes(2, 3)
def test_different_operations(ranks: Ranks) -> None:
    check_that_the_difference_is_told(
        ranks, Call("all_reduce"), "all_reduce", "broadcast", op="broadcast"
    )


@chapter.must(
    "mismatch/names-the-ranks",
    "When ranks disagree, the error names the ranks that differ, and every rank's dtype and shape.",
    source="pytorch#100207",
    rests_on=("mismatch/numel", "mismatch/dtype"),
)
@deadline(20)
@world_sizes(2, 3)
def test_every_rank_is_named(ranks: Ranks) -> None:
    names = [f"rank {rank}" for rank in range(ranks.world_size)]
    said = ["float32", "int32", "8", *names]
    check_that_the_difference_is_told(ranks, Call("all_reduce", shape=(8,)), *said, dtype="int32")


@covers("mismatch/names-the-ranks")
@deadline(20)
@world_sizes(2, 3)
def test_different_operations_are_told_with_their_tensors(ranks: Ranks) -> None:
    check_that_both_calls_are_told(ranks, other_call, [3, 5])


def start_in_detail(me: Me) -> None:
    """The default group is made at debug level DETAIL, at which torch compares calls beforehand."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group(
        me.target.backend,
        store=dist.PrefixStore("detail", me.store),
        rank=me.rank,
        world_size=me.world_size,
        timeout=_TIMEOUT,
        pg_options=me.options,
    )


def other_numel_in_detail(me: Me) -> str:
    start_in_detail(me)
    x = tensor(me, 200 if is_last(me) else 100)
    return error_of(lambda: dist.all_reduce(x))


@chapter.must(
    "mismatch/debug-detail",
    "At debug level DETAIL, when ranks disagree, the error shows the calls of both, with their "
    "dtypes and shapes.",
    source="torch 2.13 docs, TORCH_DISTRIBUTED_DEBUG; pytorch#100207",
    rests_on="all_reduce/sum",
)
@deadline(20)
@world_sizes(2, 3)
def test_the_calls_are_named_at_debug_level_detail(bare_ranks: Ranks) -> None:
    last = bare_ranks.world_size - 1
    check_that_all_are_told(bare_ranks, other_numel_in_detail, "100", "200", f"ank {last}")


def other_call_in_detail(me: Me, shape: list[int]) -> str:
    start_in_detail(me)
    return other_call(me, shape, dist.group.WORLD)


@covers("mismatch/debug-detail")
@deadline(20)
@world_sizes(2, 3)
def test_different_operations_are_named_at_debug_level_detail(bare_ranks: Ranks) -> None:
    check_that_both_calls_are_told(bare_ranks, other_call_in_detail, [15])


@chapter.must(
    "mismatch/debug-detail-of-other-dimensions",
    "At debug level DETAIL, when ranks disagree, the error also shows the calls of both if their "
    "tensors differ in the number of dimensions.",
    source="torch 2.13 docs, TORCH_DISTRIBUTED_DEBUG; derived",
    rests_on="mismatch/debug-detail",
)
@deadline(20)
@world_sizes(2, 3)
def test_numbers_of_dimensions_may_differ_at_debug_level_detail(bare_ranks: Ranks) -> None:
    check_that_both_calls_are_told(bare_ranks, other_call_in_detail, [3, 5])
