"""DDP's _update_process_group: another group between steps, also after an error in backward."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, world_sizes
from conformance.spec.ddp.models import WIDTH, Branching, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.training_runs import Options, assert_grads

OBSERVED = "observed, torch 2.13.0"

chapter = Chapter("ddp")


def regrouped(me: Me, fail_first: bool, options: Options) -> list[Tensor]:
    """Gradients of one branch in groups of one rank each, then in the default group."""
    alone = [dist.new_group([r]) for r in range(me.world_size)][me.rank]
    module = Recipe(Branching, (2,))(seed=0).to(me.device)
    model = me.ddp(module, **options)
    grads = []
    for group in (alone, dist.group.WORLD):
        if fail_first:
            model.zero_grad()
            loss_of(model(normal((2, WIDTH), me.rank).to(me.device), [0])).backward()
        model._update_process_group(group)
        for _ in range(3):
            model.zero_grad()
            loss_of(model(normal((2, WIDTH), me.rank).to(me.device), [0, 1])).backward()
        grad = module.get_parameter("branches.1.weight").grad
        assert grad is not None
        grads.append(grad.clone())
    return grads


def assert_regrouped(ranks: Ranks, *, fail_first: bool, **options: Any) -> None:
    got = ranks.run(regrouped, fail_first, options)
    wants = []
    for r in range(2):
        module = Recipe(Branching, (2,))()
        loss_of(module(normal((2, WIDTH), r), [0, 1])).backward()
        grad = module.get_parameter("branches.1.weight").grad
        assert grad is not None
        wants.append(grad)
    for rank, (alone, _) in enumerate(got):
        assert_grads([alone], wants[rank], f"rank {rank}'s gradient in a group of its own")
    assert_grads([both for _, both in got], (wants[0] + wants[1]) / 2, "gradient in both's group")


@chapter.should(
    "ddp/update-group/average",
    "After _update_process_group gradients are averaged over the new group.",
    source="torch 2.13, test_ddp_update_process_group_new_group and _default_group",
    rests_on="ddp/process-group",
)
@world_sizes(2)
def test_another_group(ranks: Ranks) -> None:
    assert_regrouped(ranks, fail_first=False)


@chapter.should(
    "ddp/update-group/static-graph",
    "After _update_process_group, gradients of a static graph are averaged over the new group, "
    "also if the graph was recorded in another group.",
    source=f"{OBSERVED}: reset_state keeps which parameters the static graph uses",
    rests_on=("ddp/update-group/average", "ddp/static-graph/values"),
)
@world_sizes(2)
def test_another_group_for_a_static_graph(ranks: Ranks) -> None:
    assert_regrouped(ranks, fail_first=False, static_graph=True)


@chapter.should(
    "ddp/update-group/after-an-unfinished-step",
    "_update_process_group makes training possible again after a step that was not finished.",
    source="torch 2.13, test_ddp_update_process_group_no_find_unused",
    rests_on="ddp/update-group/average",
)
@world_sizes(2)
def test_another_group_after_an_unfinished_step(ranks: Ranks) -> None:
    assert_regrouped(ranks, fail_first=True)


def buffer_regrouped(me: Me) -> Tensor:
    """A buffer that held the rank, after a forward pass in groups of ranks 0, and 1 and 2."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    module = Recipe(Perceptron)(seed=0).to(me.device)
    module.register_buffer("held", torch.zeros(2, device=me.device))
    model = me.ddp(module)
    model._update_process_group(groups[min(me.rank, 1)])
    module.get_buffer("held").fill_(me.rank)
    model(normal((2, WIDTH), me.rank).to(me.device))
    return module.get_buffer("held").clone()


@chapter.should(
    "ddp/update-group/buffers",
    "After _update_process_group, buffers have the values of the new group's first rank before "
    "each forward pass.",
    source="torch 2.13, DistributedDataParallel._update_process_group and _sync_buffers",
    rests_on=("ddp/update-group/average", "ddp/buffers/before-forward"),
)
@world_sizes(3)
def test_buffers_in_another_group(ranks: Ranks) -> None:
    want = [torch.full((2,), float(first)) for first in (0, 1, 1)]
    assert_each_rank(ranks.run(buffer_regrouped), want, what="buffer")


class RaisingBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Any:
        raise ArithmeticError("refused by backward")


def go_on_after_an_error(me: Me, options: Options) -> list[Any]:
    """Gradients, or None, after each of some steps that do not use the last branch. Before them, a
    backward pass that used all branches raised on every rank."""
    module = Recipe(Branching)(seed=me.rank).to(me.device)
    model = me.ddp(module, find_unused_parameters=True, **options)
    refused: Any = RaisingBackward.apply
    with contextlib.suppress(ArithmeticError):
        x = normal((2, WIDTH), me.rank).to(me.device).requires_grad_()
        loss_of(model(refused(x), [0, 1, 2])).backward()
    model._update_process_group(dist.new_group(list(range(me.world_size))))
    seen = []
    for i in range(3):
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), 10 * i + me.rank).to(me.device), [0, 1])).backward()
        seen.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])
    return seen


@chapter.should(
    "ddp/update-group/after-an-error-in-backward",
    "_update_process_group makes training possible again after a backward pass that raised while "
    "gradients were being reduced, and parameters that this pass used no longer count as used.",
    source="pytorch#128092",
    rests_on=("ddp/update-group/average", "ddp/unused/everywhere"),
)
@world_sizes(2)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_another_group_after_an_error(ranks: Ranks, view: bool) -> None:
    module = Recipe(Branching)()
    for _ in range(5):  # what is still under way may be quick, or not
        got = ranks.run(go_on_after_an_error, {"gradient_as_bucket_view": view})
        for i in range(3):
            module.zero_grad()
            for rank in range(2):
                (loss_of(module(normal((2, WIDTH), 10 * i + rank), [0, 1])) / 2).backward()
            for j, param in enumerate(module.parameters()):
                grads = [steps[i][j] for steps in got]
                assert_grads(grads, param.grad, f"gradient {j} in step {i + 1}")
