"""Memory leaks of FSDP: models that nothing refers to, and growth from step to step."""

from __future__ import annotations

import weakref

import pytest
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from conformance import Chapter, Me, Ranks, assert_that, world_sizes
from conformance.spec.fsdp.custom import inputs, linear
from conformance.spec.fsdp.training_runs import STRATEGIES, both_kinds, wrap
from conformance.spec.growth import assert_steady, growth
from conformance.spec.waiting import wait_until_freed

chapter = Chapter("fsdp")


def let_go_of_a_model(me: Me, strategy: str, orig: bool, step_first: bool) -> bool:
    """Whether a model is freed whose last forward had no backward."""
    strategies = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": orig}
    inner = wrap(me, linear(3, 3, 1), **strategies)
    model = wrap(me, nn.Sequential(inner, linear(3, 2, 2)), **strategies)
    x = inputs(me.rank, 0).to(me.device)
    if step_first:
        model(x).sum().backward()
    model(x)
    seen = weakref.ref(model)
    del inner, model
    wait_until_freed(seen)
    left = seen()
    if left is None:
        return True
    left(x).sum().backward()  # what held it ends, or it would stay with its group
    return False


@chapter.must(
    "fsdp/freed-with-the-model",
    "A model that nothing refers to is freed, even if its last forward had no backward.",
    source="derived: a script that evaluates without no_grad and then makes its next model",
)
@world_sizes(2)
@both_kinds
@pytest.mark.parametrize("step_first", [False, True], ids=["new", "trained"])
def test_a_model_goes_without_a_backward(ranks: Ranks, step_first: bool, orig: bool) -> None:
    for strategy in STRATEGIES:
        for rank, freed in enumerate(ranks.run(let_go_of_a_model, strategy, orig, step_first)):
            assert_that(
                freed, f"{strategy}: rank {rank} still has a model without references", rank
            )


def steps_taken(me: Me, strategy: str, orig: bool) -> float:
    return growth(
        me,
        lambda layer: me.fsdp(
            layer, sharding_strategy=ShardingStrategy[strategy], use_orig_params=orig
        ),
    )


@chapter.must(
    "fsdp/steady-memory",
    "Memory use does not grow from one training step to the next.",
    source="observed, torch 2.13.0",
)
@world_sizes(2)
@both_kinds
def test_memory_does_not_grow(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        assert_steady(ranks.run(steps_taken, strategy, orig))
