"""DDP's static_graph: averaging, unused parameters, no_sync, and errors if the graph changes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.spec.ddp.accumulation_runs import accumulate_everywhere, micro_batches
from conformance.spec.ddp.models import WIDTH, Branching, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.training_runs import Options, batches, mine, take_steps, train
from conformance.spec.raising import assert_raised

DOCS = "torch 2.13 docs, DistributedDataParallel"
REDUCER = "torch, reducer.cpp"

chapter = Chapter("ddp")


BYTE = 2**-20
STATIC: Options = {"static_graph": True}


@chapter.must(
    "ddp/static-graph/values",
    "With static_graph, every step averages gradients, including the first.",
    source=f"{DOCS}, argument static_graph; Lightning#18086",
    rests_on="ddp/average",
)
@world_sizes(2, 3)
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": BYTE}, {"gradient_as_bucket_view": True}],
    ids=lambda options: "-".join(options) or "default",
)
def test_every_step_averages(ranks: Ranks, options: Options) -> None:
    steps = batches(ranks.world_size, 4, (2, WIDTH))
    train(ranks, Recipe(Perceptron), steps, {**STATIC, **options})


@chapter.must(
    "ddp/static-graph/unused-parameters",
    "With static_graph, parameters that go unused in every step keep their gradient, and those "
    "that one rank uses in every step have the mean, without a search.",
    source=f"{DOCS}, argument static_graph; pytorch#97030",
    rests_on="ddp/static-graph/values",
)
@world_sizes(2)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
@pytest.mark.parametrize(
    "uses", [[[2, 0]] * 2, [[2, 0], [2]], [[0], [2, 0]]], ids=["nowhere", "on-rank-0", "on-rank-1"]
)
def test_parameters_go_unused(ranks: Ranks, view: bool, uses: list[list[int]]) -> None:
    steps = [[(normal((2, WIDTH), 10 * i + r), uses[r]) for r in range(2)] for i in range(6)]
    train(ranks, Recipe(Branching), steps, {**STATIC, "gradient_as_bucket_view": view})


class Repeating(nn.Module):
    """One layer, several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.last = nn.Linear(WIDTH, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x).tanh()
        y: Tensor = self.last(x)
        return y


@chapter.must(
    "ddp/static-graph/used-several-times",
    "With static_graph, a parameter may be used several times in a step, also by several forward "
    "passes.",
    source="torch 2.13, test_static_graph_multi_forward",
    rests_on="ddp/static-graph/values",
)
@world_sizes(2)
def test_a_layer_that_is_used_three_times(ranks: Ranks) -> None:
    train(ranks, Recipe(Repeating), batches(2, 4, (2, WIDTH)), {**STATIC, "bucket_cap_mb": BYTE})


@chapter.must(
    "ddp/static-graph/no-sync-first",
    "With static_graph, training may begin with a backward pass inside no_sync, and no later "
    "step loses its synchronisation.",
    source="pytorch#187732",
    rests_on="ddp/static-graph/values",
)
@world_sizes(2)
@pytest.mark.parametrize("pattern", [[False, True], [False, False, True]], ids=str)
def test_the_first_pass_is_not_synchronised(ranks: Ranks, pattern: list[bool]) -> None:
    accumulate_everywhere(ranks, Recipe(Perceptron), STATIC, micro_batches(2, 3, pattern))


@chapter.must(
    "ddp/static-graph/no-sync-later",
    "With static_graph, gradients may be accumulated inside no_sync after a first synchronised "
    "step.",
    source="pytorch#187732",
    rests_on="ddp/static-graph/values",
)
@world_sizes(2)
def test_accumulation_after_the_first_step(ranks: Ranks) -> None:
    first = micro_batches(2, 1, [True])
    later = micro_batches(2, 3, [False, False, True])
    accumulate_everywhere(ranks, Recipe(Perceptron), STATIC, first + later)


def use(uses: Sequence[Sequence[int]]) -> Any:
    return [
        [(normal((2, WIDTH), 10 * i + r), used) for r in range(2)] for i, used in enumerate(uses)
    ]


CHANGED = "training graph has changed in this iteration"


@chapter.must(
    "ddp/static-graph/used-then-unused",
    "With static_graph, a parameter that is used in the first step and not later makes a later "
    "forward or backward raise RuntimeError 'training graph has changed in this iteration'.",
    source=f"{REDUCER}; torch 2.13, test_invalid_static_graph",
    needs="dtype:float64",
)
@world_sizes(2)
def test_a_parameter_is_not_used_any_more(ranks: Ranks) -> None:
    steps = use([[0, 1], [0, 1], [0], [0, 1]])
    args = [(Recipe(Branching), STATIC, mine(steps, r)) for r in range(2)]
    assert_raised(ranks.outcomes_each(take_steps, args), RuntimeError, match=CHANGED)


@chapter.must(
    "ddp/static-graph/unused-then-used",
    "With static_graph, a parameter that is unused in the first step and used later makes "
    "backward raise RuntimeError 'training graph has changed in this iteration'.",
    source=f"{REDUCER}; torch 2.13, test_invalid_static_graph",
    needs="dtype:float64",
)
@world_sizes(2)
def test_a_parameter_is_used_after_all(ranks: Ranks) -> None:
    steps = use([[0], [0], [0, 1], [0]])
    args = [(Recipe(Branching), STATIC, mine(steps, r)) for r in range(2)]
    assert_raised(ranks.outcomes_each(take_steps, args), RuntimeError, match=CHANGED)


def set_later(me: Me, steps: int) -> list[Tensor]:
    """Gradients of a graph that is declared static after so many steps; two more follow."""
    module = Recipe(Perceptron)(seed=me.rank).to(me.device)
    model = me.ddp(module)
    grads = []
    for i in range(steps + 2):
        if i == steps:
            model._set_static_graph()
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), 10 * i + me.rank).to(me.device))).backward()
        grad = module.get_parameter("layers.0.weight").grad
        assert grad is not None
        grads.append(grad.clone())
    return grads


@chapter.should(
    "ddp/static-graph/set-in-time",
    "_set_static_graph before the first step is the same as the argument; after it, it raises "
    "RuntimeError 'should be called before training loop starts'.",
    source=f"{REDUCER}, set_static_graph; torch 2.13, test_static_graph_api_cpu",
    rests_on="ddp/static-graph/values",
)
@world_sizes(2)
def test_when_it_may_be_set(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(set_later, 0), what="gradients")
    late = ranks.outcomes(set_later, 1)
    assert_raised(late, RuntimeError, match="should be called before training loop starts")


def warnings_of(me: Me) -> list[list[str]]:
    said = []
    for options in ({}, {"find_unused_parameters": True}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = me.ddp(Perceptron().to(me.device), static_graph=True, **options)
            if not options:
                model._set_static_graph()
        said.append([str(warning.message) for warning in caught])
    return said


@chapter.should(
    "ddp/static-graph/warnings",
    "Setting a static graph twice warns, and so does find_unused_parameters together with it.",
    source="observed, torch 2.13.0, _set_static_graph",
    needs="dtype:float64",
)
@world_sizes(1)
def test_needless_settings_warn(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks.run(warnings_of)):
        for got, words in zip(
            said, ("no need to set it again", "will detect unused parameters"), strict=True
        ):
            assert_that(any(words in one for one in got), f"{words!r} is not in {got}", rank)
