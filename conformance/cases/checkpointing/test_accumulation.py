"""Several backward passes for one step, and ranks that choose checkpoints by themselves."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from conformance import Me, Ranks, assert_same_on_all_ranks, covers, world_sizes
from conformance.cases.checkpointing.networks import (
    EVERY_LAYER,
    NON_REENTRANT,
    ONCE,
    REENTRANT,
)
from conformance.cases.checkpointing.training import (
    CAP,
    VIEWS,
    Options,
    batch,
    loss_of,
    take_steps,
    whole_steps,
)
from conformance.cases.ddp.training import assert_trained
from conformance.cases.near import assert_near
from conformance.oracle.near import Near

both_kinds = pytest.mark.parametrize("how", [REENTRANT, NON_REENTRANT])


def accumulate(me: Me, how: str, options: Options, leading: int) -> list[dict[str, Tensor]]:
    """Gradients of two rounds: some backward passes without exchange, then one with it."""
    network = ONCE.make(how).to(me.device)
    model = me.ddp(network, **options)
    rounds = []
    for i in range(2):
        network.zero_grad()
        for k in range(leading + 1):
            x = batch(me.rank, 10 * i + k).to(me.device).requires_grad_()
            with model.no_sync() if k < leading else nullcontext():
                loss_of(model(x)).backward()
        grads = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
        rounds.append({name: grad.clone() for name, grad in grads.items()})
    return rounds


@covers("checkpointing/accumulation")
@world_sizes(2, 3)
@both_kinds
@pytest.mark.parametrize("options", VIEWS, ids=["copies", "views"])
def test_gradients_that_add_up_before_they_are_exchanged(
    ranks: Ranks, how: str, options: Options
) -> None:
    leading = 2
    got = ranks.run(accumulate, how, options, leading)
    for i in range(2):
        network = ONCE.make("")
        for rank in range(ranks.world_size):
            for k in range(leading + 1):
                (loss_of(network(batch(rank, 10 * i + k))) / ranks.world_size).backward()
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None
            near = [Near.relative(parameter.grad, 1e-9)] * ranks.world_size
            assert_near([mine[i][name] for mine in got], near, f"round {i + 1}, {name}")
    assert_same_on_all_ranks(got)


@covers("checkpointing/a-ranks-own-choice")
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
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


@covers("checkpointing/input-without-gradient")
@world_sizes(2)
def test_the_first_layer_of_a_model(ranks: Ranks) -> None:
    got = ranks.run(train_on_constants, NON_REENTRANT)
    [want] = whole_steps(EVERY_LAYER, 2, 1)
    for name, grad in want.grads.items():
        assert grad is not None
        near = [Near.relative(grad, 1e-9)] * 2
        assert_near([mine.get(name) for mine in got], near, f"gradient of {name}")


def differentiate_input(me: Me, how: str, around: bool) -> Tensor:
    """The gradient of this rank's input, which no other rank has a part in."""
    network = EVERY_LAYER.make("" if around else how).to(me.device)
    model = me.ddp(network, **CAP)
    x = batch(me.rank, 0).to(me.device).requires_grad_()
    if around:
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=how == REENTRANT)
    else:
        y = model(x)
    loss_of(y).backward()
    assert x.grad is not None
    return x.grad


@covers("checkpointing/input-gradient")
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
