"""DDP and memory: tensors that users move to other memory or formats, and what the wrapper keeps.

Also: wrappers that are freed, and memory that does not grow from step to step.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, assert_that, covers, world_sizes
from conformance.spec.ddp.lifetime import every_option, let_go, steps_taken
from conformance.spec.ddp.models import WIDTH, Convolving, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.training_runs import Options, assert_grads
from conformance.spec.growth import assert_steady

chapter = Chapter("ddp")

STEPS = 4


def move_gradients(me: Me, options: Options) -> list[list[Tensor]]:
    """Gradients after each of some steps; between steps they are halved in other memory."""
    module = Recipe(Perceptron)(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    seen = []
    for i in range(STEPS):
        loss_of(model(normal((2, WIDTH), 10 * i + me.rank).to(me.device))).backward()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        seen.append([grad.clone() for grad in grads])
        for grad in grads:
            grad.data = grad.data / 2
    return seen


@chapter.must(
    "ddp/gradients/other-memory",
    "If the user moves a gradient to other memory, as by grad.data = ..., its new contents are "
    "added to and averaged, also with gradient_as_bucket_view.",
    source="torch 2.13: assigning to .data; Module.to does it for gradients",
    rests_on="ddp/gradients/given-beforehand",
)
@world_sizes(2)
@every_option
def test_gradients_in_other_memory(ranks: Ranks, options: Options) -> None:
    got = ranks.run(move_gradients, options)
    module = Recipe(Perceptron)()
    for i in range(STEPS):
        for rank in range(ranks.world_size):
            x = normal((2, WIDTH), 10 * i + rank)
            (loss_of(module(x)) / ranks.world_size).backward()
        for j, param in enumerate(module.parameters()):
            grads = [steps[i][j] for steps in got]
            assert_grads(grads, param.grad, f"gradient {j} in step {i + 1}")
            assert param.grad is not None
            param.grad /= 2


def move_parameters(module: nn.Module) -> None:
    """Half of each parameter in its place, in one vector for all of them."""
    params = list(module.parameters())
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params).detach() / 2, params)


def replace_parameters(me: Me, options: Options) -> list[list[Tensor]]:
    """Gradients after each of some steps, between which parameters are halved in other memory."""
    module = Recipe(Perceptron)(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    seen = []
    for i in range(STEPS):
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), 10 * i + me.rank).to(me.device))).backward()
        seen.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
        move_parameters(module)
    return seen


@chapter.must(
    "ddp/parameters-in-other-memory",
    "Between steps, parameters may be given other values in other memory, as by param.data = "
    "...: the next step computes with these values and is averaged.",
    source="torch 2.13 docs, vector_to_parameters; weights that are averaged and put in place",
    rests_on="ddp/average",
)
@world_sizes(2)
@every_option
def test_parameters_in_other_memory(ranks: Ranks, options: Options) -> None:
    got = ranks.run(replace_parameters, options)
    module = Recipe(Perceptron)()
    for i in range(STEPS):
        module.zero_grad()
        for rank in range(ranks.world_size):
            x = normal((2, WIDTH), 10 * i + rank)
            (loss_of(module(x)) / ranks.world_size).backward()
        for j, param in enumerate(module.parameters()):
            grads = [steps[i][j] for steps in got]
            assert_grads(grads, param.grad, f"gradient {j} in step {i + 1}")
        move_parameters(module)


SHAPE = (2, 2, 4, 4)


def change_format(me: Me, options: Options, when: int, set_to_none: bool) -> list[list[Tensor]]:
    """Gradients after each of some steps, before one of which the module becomes channels-last."""
    module = Recipe(Convolving, ("float64", False))(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    seen = []
    for i in range(STEPS):
        if i == when:
            model.to(memory_format=torch.channels_last)
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model(normal(SHAPE, 10 * i + me.rank).to(me.device))).backward()
        seen.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    return seen


@chapter.must(
    "ddp/gradients/memory-format-later",
    "After the memory format of the module was changed, gradients are averaged element by "
    "element, as before.",
    source="pytorch#47163: parameters whose strides have changed since construction",
    rests_on="ddp/gradients/strides",
)
@world_sizes(2)
@every_option
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_another_memory_format(ranks: Ranks, options: Options, set_to_none: bool) -> None:
    for when in (0, 1, 2):
        got = ranks.run(change_format, options, when, set_to_none)
        module = Recipe(Convolving, ("float64", False))()
        for i in range(STEPS):
            module.zero_grad()
            for rank in range(ranks.world_size):
                (loss_of(module(normal(SHAPE, 10 * i + rank))) / ranks.world_size).backward()
            for j, param in enumerate(module.parameters()):
                grads = [steps[i][j] for steps in got]
                what = f"gradient {j} in step {i + 1}, channels-last from step {when + 1} on"
                assert_grads(grads, param.grad, what)


@chapter.must(
    "ddp/freed-with-its-user",
    "A wrapper that has trained is freed when nothing refers to it any more, with its module and "
    "the parameters, also if its last forward pass raised.",
    source="pytorch#63752",
    rests_on="ddp/average",
)
@world_sizes(1, 2)
@every_option
def test_a_wrapper_is_let_go(ranks: Ranks, options: Options) -> None:
    for rank, left in enumerate(ranks.run(let_go, options)):
        assert_that(not left, f"still there: {', '.join(left)}", rank)


@covers("ddp/freed-with-its-user")
@world_sizes(1)
def test_a_wrapper_whose_forward_raised_is_let_go(ranks: Ranks) -> None:
    for rank, left in enumerate(ranks.run(let_go, {}, False, True)):
        assert_that(not left, f"still there: {', '.join(left)}", rank)


@chapter.must(
    "ddp/steady-memory",
    "Memory use does not grow from one training step to the next, whatever the options.",
    source="observed, torch 2.13.0; torch 2.13 docs, DistributedDataParallel: memory of "
    "gradients and buckets",
    rests_on="ddp/average",
)
@world_sizes(2)
@every_option
def test_memory_does_not_grow(ranks: Ranks, options: Options) -> None:
    assert_steady(ranks.run(steps_taken, options))
