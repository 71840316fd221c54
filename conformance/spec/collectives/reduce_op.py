"""ReduceOp objects: their class, copies, pickles and equality."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
import torch.distributed as dist

from conformance import Chapter, Me, Ranks, assert_each_rank, world_sizes
from conformance.spec.collectives.perform import REDUCE_OPS

chapter = Chapter("collectives")


def all_kinds() -> dict[str, Any]:
    """Members, what is made of members, and what a factory makes, each by a name for the report."""
    wrapped = {f"ReduceOp({name})": dist.ReduceOp(member) for name, member in REDUCE_OPS.items()}
    scaled = {
        f"premul_sum({factor})": dist._make_nccl_premul_sum(factor)
        for factor in (2.0, torch.tensor(1.5))
    }
    return {**scaled, **wrapped, **REDUCE_OPS}


def not_instances(me: Me) -> list[str]:
    return [name for name, op in all_kinds().items() if not isinstance(op, dist.ReduceOp)]


@chapter.must(
    "reduce_op/is-a-reduce-op",
    "Every member of ReduceOp, and the result of a factory, is an instance of ReduceOp.",
    source="pytorch#87191",
)
@world_sizes(1)
def test_all_kinds_are_instances(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(not_instances), [[]])


def unequal_copies(me: Me) -> list[str]:
    ops = all_kinds().items()
    return [name for name, op in ops if copy.copy(op) != op or copy.deepcopy(op) != op]


@chapter.must(
    "reduce_op/copies", "A copy and a deep copy of a ReduceOp equal it.", source="pytorch#87303"
)
@world_sizes(1)
def test_copies_are_equal(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(unequal_copies), [[]])


def unequal_after_pickle(me: Me) -> list[str]:
    ops = all_kinds().items()
    return [name for name, op in ops if pickle.loads(pickle.dumps(op)) != op]


@chapter.must(
    "reduce_op/pickles",
    "A ReduceOp equals itself after it was pickled and unpickled.",
    source="pytorch#90072; test_c10d_common.py, ReduceOpTest",
)
@world_sizes(1)
def test_pickled_ones_are_equal(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(unequal_after_pickle), [[]])


def wrong_comparisons(me: Me) -> list[str]:
    """Each member against itself, the others and things that are no operation."""
    wrong = []
    for name, member in REDUCE_OPS.items():
        wrapped: Any = dist.ReduceOp(member)
        if wrapped != member or wrapped != dist.ReduceOp(member):
            wrong.append(f"{name} differs from itself")
        wrong += [
            f"{name} equals {other}"
            for other, its in REDUCE_OPS.items()
            if other != name and wrapped == dist.ReduceOp(its)
        ]
        wrong += [f"{name} equals {alien!r}" for alien in (None, "sum", 0) if wrapped == alien]
    return wrong


@chapter.must(
    "reduce_op/equality",
    "A ReduceOp equals the member that it was made of, and nothing that is not a ReduceOp.",
    source="pytorch#90072",
)
@world_sizes(1)
def test_equality(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(wrong_comparisons), [[]])
