"""Activation checkpointing under DDP: no_sync, ranks that differ, and gradients of inputs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, world_sizes
from conformance.oracle.near import Near
from conformance.spec.checkpointing.networks import (
    EVERY_LAYER,
    NON_REENTRANT,
    ONCE,
    REENTRANT,
    both_kinds,
    recomputed,
)
from conformance.spec.checkpointing.training import (
    CAP,
    VIEWS,
    Options,
    batch,
    loss_of,
    take_steps,
    whole_steps,
)
from conformance.spec.ddp.training_runs import assert_trained
from conformance.spec.tolerance import assert_near

chapter = Chapter("checkpointing", needs="device:autocast")


def gradients_of(network: nn.Module) -> dict[str, Tensor]:
    """A copy of each gradient that there is."""
    grads = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return {name: grad.clone() for name, grad in grads.items()}


def accumulate(
    me: Me, how: str, options: Options, leading: int, around: bool
) -> list[list[dict[str, Tensor]]]:
    """Gradients after each pass of two rounds: some without exchange, then one with it.

    around: the checkpoint is around the wrapper, not in the network.
    """
    network = ONCE.make("" if around else how).to(me.device)
    model = me.ddp(network, **options)
    rounds = []
    for i in range(2):
        network.zero_grad()
        passes = []
        for k in range(leading + 1):
            x = batch(me.rank, 10 * i + k).to(me.device).requires_grad_()
            with model.no_sync() if k < leading else nullcontext():
                loss_of(recomputed(model, x, how=how if around else "")).backward()
            passes.append(gradients_of(network))
        rounds.append(passes)
    return rounds


@chapter.must(
    "checkpointing/accumulation",
    "Under no_sync, gradients add up on each rank through checkpoints, whether these are inside "
    "the wrapper or around it, and the next backward outside no_sync exchanges the sums.",
    source="torch 2.13 docs, DistributedDataParallel.no_sync",
    rests_on="checkpointing/once",
)
@world_sizes(2, 3)
@both_kinds
@pytest.mark.parametrize("options", VIEWS, ids=["copies", "views"])
@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
def test_gradients_that_add_up_before_they_are_exchanged(
    ranks: Ranks, how: str, options: Options, around: bool
) -> None:
    leading = 2
    got = ranks.run(accumulate, how, options, leading, around)
    n = ranks.world_size
    for i in range(2):
        own = [ONCE.make("") for _ in range(n)]
        for k in range(leading + 1):
            for rank, network in enumerate(own):
                loss_of(network(batch(rank, 10 * i + k))).backward()
            sums = [gradients_of(network) for network in own]
            for name in sums[0]:
                want = [mine[name] for mine in sums]
                if k == leading:
                    want = [torch.stack(want).mean(0)] * n
                near = [Near.relative(grad, 1e-9) for grad in want]
                grads = [mine[i][k].get(name) for mine in got]
                assert_near(grads, near, f"round {i + 1}, {name} after pass {k + 1}")
    assert_same_on_all_ranks([[passes[-1] for passes in mine] for mine in got])


@chapter.must(
    "checkpointing/a-ranks-own-choice",
    "Ranks with checkpoints of either kind and ranks without any can train together.",
    source="torch, reducer.cpp: buckets are reduced in one order on all ranks",
    rests_on="checkpointing/every-layer",
)
@world_sizes(2, 3)
@pytest.mark.parametrize(
    "kinds",
    [("", NON_REENTRANT, REENTRANT), (REENTRANT, "", ""), (NON_REENTRANT, REENTRANT, "")],
    ids=lambda kinds: ", ".join(kind or "none" for kind in kinds),
)
def test_ranks_with_checkpoints_among_others(ranks: Ranks, kinds: tuple[str, ...]) -> None:
    n = ranks.world_size
    got = ranks.run_each(take_steps, [(EVERY_LAYER, how, CAP) for how in kinds[:n]])
    assert_trained(got, whole_steps(EVERY_LAYER, n, 3))


def train_on_constants(me: Me, how: str) -> dict[str, Tensor]:
    """Gradients of a step whose input requires none, the first layer being checkpointed."""
    network = EVERY_LAYER.make(how).to(me.device)
    model = me.ddp(network, **CAP)
    loss_of(model(batch(me.rank, 0).to(me.device))).backward()
    return gradients_of(network)


@chapter.must(
    "checkpointing/input-without-gradient",
    "In a non-reentrant checkpoint around the first layer, whose input requires no gradient, "
    "that layer's parameters get their gradients.",
    source="torch 2.13 docs, torch.utils.checkpoint: use_reentrant=True needs an input that "
    "requires a gradient",
    rests_on="checkpointing/every-layer",
)
@world_sizes(2)
def test_the_first_layer_of_a_model(ranks: Ranks) -> None:
    got = ranks.run(train_on_constants, NON_REENTRANT)
    [want] = whole_steps(EVERY_LAYER, 2, 1)
    for name, grad in want.grads.items():
        assert grad is not None
        near = [Near.relative(grad, 1e-9)] * 2
        assert_near([mine.get(name) for mine in got], near, f"gradient of {name}")


def differentiate_input(me: Me, how: str, around: bool) -> Tensor:
    """The gradient of this rank's input, which no other rank has a part in.

    around: the checkpoint is around the wrapper, not in the network.
    """
    network = EVERY_LAYER.make("" if around else how).to(me.device)
    model = me.ddp(network, **CAP)
    x = batch(me.rank, 0).to(me.device).requires_grad_()
    loss_of(recomputed(model, x, how=how if around else "")).backward()
    assert x.grad is not None
    return x.grad


@chapter.must(
    "checkpointing/input-gradient",
    "The gradient of a rank's input is its own, and is not averaged with any other rank's.",
    source="torch 2.13 docs, DistributedDataParallel: parameters are synchronized",
    rests_on="checkpointing/once",
)
@world_sizes(2)
@both_kinds
@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
def test_the_input_has_the_ranks_own_gradient(ranks: Ranks, how: str, around: bool) -> None:
    wanted = []
    for rank in range(2):
        x = batch(rank, 0).requires_grad_()
        loss_of(EVERY_LAYER.make("")(x)).backward()
        assert x.grad is not None
        wanted.append(Near.relative(x.grad, 1e-9))
    assert_near(ranks.run(differentiate_input, how, around), wanted, "gradient of the input")
