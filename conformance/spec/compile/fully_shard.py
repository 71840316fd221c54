"""fully_shard under torch.compile: the training of one process, the calls of the model without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from conformance import Chapter, Me, Ranks, assert_that, not_probed, world_sizes
from conformance.checks.traces import assert_same_trace
from conformance.harness.traces import record
from conformance.spec.compile.facts import compiler
from conformance.spec.fsdp.models import Net
from conformance.spec.fully_shard.recipes import (
    Recipe,
    Run,
    check_runs,
    mesh_over,
    sharded,
    train,
    train_whole,
)
from conformance.spec.fully_shard.recording import run

NEEDS = (
    *("feature:compiled_calls", "op:all_gather_into_tensor", "op:reduce_scatter_tensor"),
    *("dtype:float64", "reduce_op:sum"),
)
IN_BF16 = (*NEEDS, "dtype:bfloat16", "reduce_op:avg")

chapter = Chapter("compile", source="torch 2.13 docs, fully_shard and torch.compile", needs=NEEDS)

TRAINED = Recipe(net=Net(blocks=2))
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def with_compiled(me: Me, recipe: Recipe, parts: str, mesh: Any = None) -> Any:
    """The recipe's model, of which each block is compiled, or the whole.

    parts: "blocks", before they are sharded; "root", after that; "" for none.
    """
    network = recipe.net.make(device=me.device)
    if parts == "blocks":
        for block in network.blocks:
            block.compile(backend="aot_eager")
    model = sharded(me, recipe, network, mesh)
    if parts == "root":
        model.compile(backend="eager")
    return model


def train_compiled(me: Me, recipe: Recipe, parts: str) -> tuple[Run, list[str]]:
    """What training gives, and names of the state dict."""
    with compiler():
        model = with_compiled(me, recipe, parts)
        return train(me, recipe, model), list(model.state_dict())


@chapter.must(
    "compile/fully_shard/trained",
    "fully_shard of a model whose blocks are compiled, or that is compiled as a whole, trains as "
    "one process does, and its state dict has the names of the module.",
    rests_on="fully_shard/losses",
)
@world_sizes(2)
@not_probed()
@pytest.mark.parametrize("parts", ["blocks", "root"])
def test_trained(ranks: Ranks, parts: str) -> None:
    got = ranks.run(train_compiled, TRAINED, parts)
    check_runs([run for run, _ in got], train_whole(TRAINED, ranks.world_size), TRAINED)
    names = list(TRAINED.net.make().state_dict())
    for rank, (_, found) in enumerate(got):
        assert_that(found == names, f"names are {found}, not {names}", rank)


def calls(me: Me, recipe: Recipe, parts: str) -> list[str]:
    group = record()
    with compiler():
        run(me, recipe, with_compiled(me, recipe, parts, mesh_over(me, group)))
    return [str(issued) for issued in group.take()]


@chapter.must(
    "compile/fully_shard/calls",
    "fully_shard of a model whose blocks are compiled issues the collectives that it issues "
    "without the compiler, in the same order.",
)
@chapter.must(
    "compile/fully_shard/mixed-precision",
    "Compiled blocks under a MixedPrecisionPolicy gather and reduce in its dtypes.",
    needs=IN_BF16,
)
@world_sizes(2)
@not_probed()
def test_calls(ranks: Ranks) -> None:
    recipe = Recipe(net=Net(blocks=2, dtype="float32"), kwargs={"mp_policy": LOW}, steps=1)
    plain = ranks.run(calls, recipe, "")
    for got, want in zip(ranks.run(calls, recipe, "blocks"), plain, strict=True):
        assert_that(any("bfloat16" in call for call in want), "nothing is gathered in bfloat16")
        assert_same_trace(got, want, "compiled")
