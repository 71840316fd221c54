"""Activation checkpoints under DDP: reused, tied or alternating layers, and what steps exchange."""

from __future__ import annotations

import pytest

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.harness.traces import Issued, record
from conformance.spec.checkpointing.networks import (
    DYNAMIC,
    DYNAMIC_TIED,
    EVERY_TIED,
    NON_REENTRANT,
    ONCE,
    REENTRANT,
    TWICE,
    TWICE_TIED,
    Recipe,
)
from conformance.spec.checkpointing.training import (
    CAP,
    EVERY,
    SEARCHING,
    STATIC,
    Options,
    batch,
    loss_of,
    train_and_compare,
)

SUITE = "torch, test_c10d_common.py"

chapter = Chapter("checkpointing", needs="device:autocast")


@chapter.must(
    "checkpointing/twice",
    "One layer may run in several non-reentrant checkpoints of a forward pass, as a stage of a "
    "pipeline does.",
    source=f"{SUITE}, test_ddp_checkpointing_twice",
    rests_on="checkpointing/once",
)
@world_sizes(2, 3)
def test_a_layer_that_runs_twice(ranks: Ranks) -> None:
    train_and_compare(ranks, TWICE, NON_REENTRANT, EVERY)


@chapter.must(
    "checkpointing/twice-static",
    "With a static graph one layer may run in several reentrant checkpoints.",
    source=f"{SUITE}, test_ddp_checkpointing_twice_static_graph",
    rests_on="checkpointing/once",
)
@world_sizes(2, 3)
def test_a_layer_that_runs_twice_in_a_static_graph(ranks: Ranks) -> None:
    train_and_compare(ranks, TWICE, REENTRANT, STATIC)


@chapter.must(
    "checkpointing/shared-weights",
    "A weight that layers share may be used in several non-reentrant checkpoints, and its "
    "gradient is the sum over its uses.",
    source=f"{SUITE}, test_ddp_checkpointing_dynamic_weight_sharing",
    rests_on="checkpointing/twice",
)
@world_sizes(2)
@pytest.mark.parametrize("recipe", [TWICE_TIED, EVERY_TIED], ids=["twice", "in two layers"])
def test_weights_in_several_checkpoints(ranks: Ranks, recipe: Recipe) -> None:
    train_and_compare(ranks, recipe, NON_REENTRANT, EVERY)


@chapter.must(
    "checkpointing/shared-weights-static",
    "With a static graph a weight that layers share may be used in several reentrant checkpoints.",
    source=f"{SUITE}, test_ddp_checkpointing_twice_weight_sharing",
    rests_on="checkpointing/twice-static",
)
@world_sizes(2)
@pytest.mark.parametrize("recipe", [TWICE_TIED, EVERY_TIED], ids=["twice", "in two layers"])
def test_weights_in_several_checkpoints_of_a_static_graph(ranks: Ranks, recipe: Recipe) -> None:
    train_and_compare(ranks, recipe, REENTRANT, STATIC)


@chapter.must(
    "checkpointing/by-turns",
    "With find_unused_parameters and non-reentrant checkpoints, a module may run a different "
    "layer at each step.",
    source=f"{SUITE}, test_ddp_checkpointing_dynamic_module",
    rests_on="checkpointing/unused-parameters",
)
@world_sizes(2, 3)
def test_layers_that_run_by_turns(ranks: Ranks) -> None:
    train_and_compare(ranks, DYNAMIC, NON_REENTRANT, SEARCHING, steps=4)


@chapter.must(
    "checkpointing/by-turns-shared-weights",
    "With find_unused_parameters and non-reentrant checkpoints, a module whose layers share a "
    "weight may run a different layer at each step.",
    source=f"{SUITE}, test_ddp_checkpointing_dynamic_weight_sharing",
    rests_on="checkpointing/by-turns",
)
@world_sizes(2)
def test_layers_of_one_weight_that_run_by_turns(ranks: Ranks) -> None:
    train_and_compare(ranks, DYNAMIC_TIED, NON_REENTRANT, SEARCHING, steps=4)


def traces(me: Me, recipe: Recipe, how: str, options: Options) -> list[list[Issued]]:
    """What each step issues."""
    group = record()
    model = me.ddp(recipe.make(how).to(me.device), process_group=group, **options)
    steps = []
    for i in range(3):
        group.take()
        x = batch(me.rank, i).to(me.device).requires_grad_()
        loss_of(model(x)).backward()
        steps.append(group.take())
    return steps


@chapter.must(
    "checkpointing/reduced-once",
    "Each gradient is exchanged once per step, when it is complete, however often backward adds "
    "to it.",
    source="pytorch#81296; torch, reducer.cpp: delay_all_reduce of a static graph",
    rests_on=("checkpointing/shared-weights", "checkpointing/shared-weights-static"),
)
@world_sizes(2)
@pytest.mark.parametrize(
    ("how", "options"),
    [(REENTRANT, {"static_graph": True}), (NON_REENTRANT, {})],
    ids=["reentrant", "non-reentrant"],
)
@pytest.mark.parametrize("recipe", [TWICE_TIED, EVERY_TIED, ONCE], ids=["twice", "tied", "once"])
def test_every_gradient_is_reduced_once(
    ranks: Ranks, recipe: Recipe, how: str, options: Options
) -> None:
    whole = sum(parameter.numel() for parameter in recipe.make(how).parameters())
    for rank, steps in enumerate(ranks.run(traces, recipe, how, {**CAP, **options})):
        for i, trace in enumerate(steps):
            # A static graph's first step also adds up, in int32, which parameters were used.
            reduced = [issued for issued in trace if issued.tensors[0][0] == "float64"]
            total = sum(issued.numel for issued in reduced)
            shown = ", ".join(map(str, reduced))
            what = f"step {i + 1} reduced {total} gradients of {whole}: {shown}"
            assert_that(total == whole, what, rank)


def count_hooks(me: Me, recipe: Recipe, how: str, wrapped: bool) -> list[dict[str, int]]:
    """How often each parameter's hook saw its gradient complete, step by step."""
    network = recipe.make(how).to(me.device)
    model = me.ddp(network, static_graph=True) if wrapped else network
    counts = dict.fromkeys((name for name, _ in network.named_parameters()), 0)

    def count(name: str) -> None:
        counts[name] += 1

    for name, parameter in network.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: count(name))
    steps = []
    for i in range(2):
        x = batch(me.rank, i).to(me.device).requires_grad_()
        loss_of(model(x)).backward()
        steps.append(dict(counts))
        counts.update(dict.fromkeys(counts, 0))
    return steps


@chapter.should(
    "checkpointing/parameter-hooks",
    "A hook on a parameter sees its gradient accumulate as often as without the wrapper: once "
    "for non-reentrant checkpoints, once for each backward pass within backward for reentrant.",
    source="pytorch#81296; observed, torch 2.13.0",
    rests_on=("checkpointing/shared-weights", "checkpointing/shared-weights-static"),
)
@world_sizes(2)
@pytest.mark.parametrize("how", [REENTRANT, NON_REENTRANT])
@pytest.mark.parametrize("recipe", [EVERY_TIED, ONCE], ids=["tied", "once"])
def test_hooks_fire_as_they_do_without_the_wrapper(ranks: Ranks, recipe: Recipe, how: str) -> None:
    alone = ranks.run(count_hooks, recipe, how, False)
    got = ranks.run(count_hooks, recipe, how, True)
    assert_same_on_all_ranks(got, alone[0], what="calls of each parameter's hook")


@chapter.must(
    "checkpointing/no-more-communication",
    "Recomputing a part inside the wrapper adds no communication: a step issues the same "
    "collectives as without checkpoints.",
    source="observed, torch 2.13.0: the wrapper's forward does not run again",
    rests_on="checkpointing/once",
)
@world_sizes(2)
@pytest.mark.parametrize("how", [REENTRANT, NON_REENTRANT])
@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
def test_recomputation_exchanges_nothing(ranks: Ranks, how: str, static: bool) -> None:
    options = {**CAP, "static_graph": static}
    want = ranks.run(traces, ONCE, "", options)
    assert_that(all(want[0]), "a step without checkpoints issued no collective")
    assert_same_on_all_ranks(ranks.run(traces, ONCE, how, options), want[0], what="operations")
