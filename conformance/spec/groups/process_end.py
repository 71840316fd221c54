"""How a process ends that has used a group and destroyed it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    deadline,
    not_probed,
    world_sizes,
)
from conformance.spec.separate_programs import LIMIT_S, run_in_programs

chapter = Chapter("groups")


def reduce_once(me: Me) -> list[float]:
    x = torch.ones(2, device=me.device)
    dist.all_reduce(x)
    return x.tolist()


@chapter.must(
    "destroy/process-ends",
    "A process that has destroyed its groups ends when its program is over, with exit code 0.",
    source="torch 2.13 docs, Distributed communication package, Shutdown",
    rests_on="destroy/one-group",
)
@not_probed()
@world_sizes(2)
@deadline(LIMIT_S + 30)
def test_a_program_ends(bare_ranks: Ranks) -> None:
    assert_same_on_all_ranks(run_in_programs(bare_ranks, reduce_once), want=[2.0, 2.0])
