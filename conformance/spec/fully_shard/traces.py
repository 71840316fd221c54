"""Which collectives units issue: their order, their sizes, and those that torch's own issues."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.checks.traces import assert_same_trace
from conformance.spec.facts import rows
from conformance.spec.fsdp.models import Net
from conformance.spec.fully_shard.recipes import Recipe, row_numel
from conformance.spec.fully_shard.recording import log_of_a_step, trace_of

NEEDS = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "dtype:float64", "reduce_op:sum")
BF16 = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "dtype:bfloat16", "reduce_op:avg")
REPLICAS = (*NEEDS, "op:all_reduce")
TORCH = "observed, torch 2.13.0, a recorded process group"

chapter = Chapter("fully_shard", source="torch 2.13 docs, fully_shard", needs=NEEDS)

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def both_traces(me: Me, recipe: Recipe) -> tuple[list[str], list[str]]:
    """The trace of the target's fully_shard, and that of torch's."""
    return trace_of(me, recipe), trace_of(me, recipe, torchs)


def check_traces(ranks: Ranks, recipe: Recipe) -> None:
    for got, want in ranks.run(both_traces, recipe):
        assert_that(bool(want), "torch issued nothing")
        assert_same_trace(got, want)


def numels_of(recipe: Recipe, count: int) -> tuple[int, list[int]]:
    """Elements of a rank's part of the root's unit, and of each block's."""
    network: Any = recipe.net.make()
    blocks = [row_numel(block.parameters(), count) for block in network.blocks]
    return row_numel(network.parameters(), count) - sum(blocks), blocks


@chapter.must(
    "fully_shard/gathers-in-forward",
    "In a forward each unit is gathered once, when its forward begins: all of its parameters in "
    "one all-gather, each padded to the size of the first rank's shard.",
    rests_on="fully_shard/earlier-calls",
)
@chapter.must(
    "fully_shard/gathers-in-backward",
    "In a backward each unit but the root is gathered once more, in the reverse order.",
    source="torch 2.13 docs, fully_shard, reshard_after_forward",
)
@chapter.must(
    "fully_shard/scatters-in-backward",
    "In a backward the gradients of each unit are reduced and scattered once, together and padded, "
    "in the reverse order, the root's at the end.",
)
@chapter.must(
    "fully_shard/same-calls",
    "All ranks of fully_shard issue the same collectives with the same sizes, whatever their "
    "batches.",
    source="torch 2.13 docs: collectives are called by all ranks",
)
@world_sizes(2, 3, 4, at_least=2)
def test_a_step(ranks: Ranks) -> None:
    recipe = Recipe(net=Net(blocks=3))
    got = ranks.run(log_of_a_step, recipe)
    assert_same_on_all_ranks(got, what="what is issued")
    root, blocks = numels_of(recipe, ranks.world_size)
    forward, backward = got[0]
    assert_same_trace(forward, [f"gather {n}" for n in (root, *blocks)], "forward")
    kinds = {kind: [x for x in backward if x.startswith(kind)] for kind in ("gather", "scatter")}
    assert_same_trace(kinds["gather"], [f"gather {n}" for n in blocks[::-1]], "backward gathers")
    wanted = [f"scatter {n}" for n in (*blocks[::-1], root)]
    assert_same_trace(kinds["scatter"], wanted, "backward scatters")
    assert_that(len(backward) == sum(map(len, kinds.values())), f"backward issues {backward}")


TRACED = rows(
    (
        chapter.must(
            "fully_shard/trace",
            "Training issues the collectives that it issues under torch's fully_shard, in the same "
            "order and with the same dtypes and numbers of elements.",
            source=TORCH,
        ),
        Recipe(net=Net(blocks=3)),
    ),
    (
        chapter.must(
            "fully_shard/trace-of-layers",
            "Units within units issue torch's collectives in torch's order.",
            source=TORCH,
        ),
        Recipe(units="layers", net=Net(nested=True)),
    ),
    (
        chapter.must(
            "fully_shard/trace-of-a-list",
            "A unit of several modules issues torch's collectives in torch's order.",
            source=TORCH,
        ),
        Recipe(units="list"),
    ),
    (
        chapter.must(
            "fully_shard/trace-when-kept",
            "With reshard_after_forward=False, torch's collectives are issued in torch's order.",
            source=TORCH,
        ),
        Recipe(kwargs={"reshard_after_forward": False}),
    ),
    (
        chapter.must(
            "fully_shard/trace-when-freed",
            "With reshard_after_forward=True, torch's collectives are issued in torch's order.",
            source=TORCH,
        ),
        Recipe(kwargs={"reshard_after_forward": True}),
    ),
    (
        chapter.must(
            "fully_shard/trace-of-accumulation",
            "Backwards with and without synchronization issue torch's collectives in torch's "
            "order.",
            source=TORCH,
        ),
        Recipe(backwards=(False, True)),
    ),
    (
        chapter.must(
            "fully_shard/trace-of-two-forwards",
            "Two forwards before a backward issue torch's collectives in torch's order.",
            source=TORCH,
        ),
        Recipe(forwards=2),
    ),
    (
        chapter.must(
            "fully_shard/trace-when-frozen",
            "With frozen parameters and a frozen unit, torch's collectives are issued in torch's "
            "order.",
            source=TORCH,
        ),
        Recipe(net=Net(frozen="block")),
    ),
    (
        chapter.must(
            "fully_shard/trace-in-low-precision",
            "Under a mixed precision policy, torch's collectives are issued in torch's order, with "
            "its dtypes.",
            source=TORCH,
            needs=BF16,
        ),
        Recipe(net=Net(dtype="float32"), kwargs={"mp_policy": LOW}),
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("recipe", TRACED)
def test_torchs_collectives(ranks: Ranks, recipe: Recipe) -> None:
    check_traces(ranks, recipe)


OF_REPLICAS = rows(
    (
        chapter.must(
            "fully_shard/trace-of-replicas",
            "Over a mesh of replicas, torch's collectives are issued in torch's order, in each of "
            "the two groups.",
            source=TORCH,
            needs=REPLICAS,
        ),
        Recipe(replicas=2, units="root"),
    ),
    (
        chapter.must(
            "fully_shard/trace-of-accumulation-over-replicas",
            "Accumulation over a mesh of replicas issues torch's collectives in torch's order.",
            source=TORCH,
            needs=REPLICAS,
        ),
        Recipe(replicas=2, backwards=(False, True)),
    ),
)


@world_sizes(4)
@pytest.mark.parametrize("recipe", OF_REPLICAS)
def test_torchs_collectives_over_replicas(ranks: Ranks, recipe: Recipe) -> None:
    check_traces(ranks, recipe)
