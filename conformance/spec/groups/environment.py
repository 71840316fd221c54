"""Debug level (TORCH_DISTRIBUTED_DEBUG) and node-local rank (LOCAL_RANK) from the environment."""

from __future__ import annotations

import os

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
    covers,
    needs,
    world_sizes,
)
from conformance.spec.groups.membership_sums import mark, sum_marks, sum_of_marks
from conformance.spec.groups.starting import start

chapter = Chapter("groups")


_LEVELS = {
    "OFF": "OFF",
    "off": "OFF",
    "oFf": "OFF",
    "INFO": "INFO",
    "Info": "INFO",
    "DETAIL": "DETAIL",
    "dEtAiL": "DETAIL",
}


def read_levels(me: Me) -> dict[str, str]:
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
    dist.set_debug_level_from_env()
    seen = {"not set": dist.get_debug_level().name}
    for text in _LEVELS:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = text
        dist.set_debug_level_from_env()
        seen[text] = dist.get_debug_level().name
    for wrong in ("foo", "0", "-1", "DETAILS"):
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = wrong
        with pytest.raises(ValueError, match="The value of TORCH_DISTRIBUTED_DEBUG must"):
            dist.set_debug_level_from_env()
    return seen


@chapter.must(
    "debug_level/from-environment",
    "set_debug_level_from_env reads OFF, INFO or DETAIL, in upper or lower case, from "
    "TORCH_DISTRIBUTED_DEBUG; it takes OFF if the variable is not set, and refuses other words "
    "with a ValueError.",
    source="test_c10d_common.py, debug level",
)
@world_sizes(1)
def test_the_debug_level_comes_from_the_environment(bare_ranks: Ranks) -> None:
    assert_each_rank(bare_ranks.run(read_levels), [{"not set": "OFF", **_LEVELS}])


def set_levels(me: Me) -> list[str]:
    seen = []
    for level in (dist.DebugLevel.INFO, dist.DebugLevel.DETAIL, dist.DebugLevel.OFF):
        dist.set_debug_level(level)
        seen.append(dist.get_debug_level().name)
    return seen


@chapter.must(
    "debug_level/set",
    "get_debug_level returns the level that set_debug_level was given.",
    source="torch 2.13 docs, set_debug_level",
)
@world_sizes(1)
def test_the_debug_level_is_what_was_set(bare_ranks: Ranks) -> None:
    assert_each_rank(bare_ranks.run(set_levels), [["INFO", "DETAIL", "OFF"]])


def work_in_detail(me: Me) -> list[Tensor]:
    """A few operations in groups that were made at the level DETAIL."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    start(me, "in detail")
    group = dist.new_group()
    told = mark(me)
    dist.broadcast(told, 0)
    got = mark(me)
    if me.world_size > 1:
        right, left = (me.rank + 1) % me.world_size, (me.rank - 1) % me.world_size
        sending = dist.isend(mark(me), right)
        dist.recv(got, left)
        assert sending is not None
        sending.wait()
    dist.barrier()
    late = mark(me)
    work = dist.all_reduce(late, async_op=True)
    work.wait()
    return [sum_marks(me), sum_marks(me, group), told, got, late]


@chapter.must(
    "debug_level/detail",
    "Groups made at debug level DETAIL give the same results as others.",
    source="torch 2.13 docs, TORCH_DISTRIBUTED_DEBUG",
    rests_on=("all_reduce/sum", "p2p/delivers"),
)
@world_sizes(1, 2, 3)
@needs("op:send", "feature:sequence_numbers")
def test_groups_at_the_level_detail_give_the_same(bare_ranks: Ranks) -> None:
    n = bare_ranks.world_size
    total, first = sum_of_marks(range(n)), sum_of_marks([0])
    want = [[total, total, first, sum_of_marks([(rank - 1) % n]), total] for rank in range(n)]
    assert_each_rank(bare_ranks.run(work_in_detail), want)


def ask_for_the_local_rank(me: Me) -> list[int]:
    os.environ.pop("LOCAL_RANK", None)
    with pytest.raises(RuntimeError, match="LOCAL_RANK"):
        dist.get_node_local_rank()
    seen = [dist.get_node_local_rank(fallback_rank=7)]
    os.environ["LOCAL_RANK"] = str(me.rank + 2)
    return [*seen, dist.get_node_local_rank(), dist.get_node_local_rank(fallback_rank=7)]


@chapter.must(
    "node_local_rank/from-environment",
    "get_node_local_rank returns LOCAL_RANK, or without it the fallback that was given; without "
    "either it raises a RuntimeError that names LOCAL_RANK.",
    source="test_c10d_common.py, local rank",
)
@world_sizes(1, 2)
def test_the_local_rank_comes_from_the_environment(bare_ranks: Ranks) -> None:
    want = [[7, rank + 2, rank + 2] for rank in range(bare_ranks.world_size)]
    assert_each_rank(bare_ranks.run(ask_for_the_local_rank), want)


def leave_levels_alone(me: Me) -> tuple[str, bool]:
    return dist.get_debug_level().name, torch.is_grad_enabled()


@covers("debug_level/set")
@world_sizes(1)
def test_a_case_finds_the_debug_level_at_its_default(bare_ranks: Ranks) -> None:
    assert_same_on_all_ranks(bare_ranks.run(leave_levels_alone), want=("OFF", True))
