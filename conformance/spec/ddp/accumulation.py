"""Backward passes of all kinds: without synchronisation, several, again, elsewhere."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance import (
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    deadline,
    not_probed,
    world_sizes,
)
from conformance.harness.traces import record
from conformance.spec.ddp.accumulating import accumulate_everywhere, micro_batches
from conformance.spec.ddp.models import WIDTH, Branching, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.observing import unannotated
from conformance.spec.ddp.training_runs import Options, assert_grads, batches, train
from conformance.spec.raising import assert_raised
from conformance.spec.torch_versions import needs_batched_grad_copy

BYTE = 2**-20
SEARCH: Options = {"find_unused_parameters": True}


@covers("ddp/no-sync/accumulates")
@world_sizes(1, 2, 3)
def test_micro_batches(ranks: Ranks) -> None:
    steps = micro_batches(ranks.world_size, 3, [False, False, False, True])
    accumulate_everywhere(ranks, Recipe(Perceptron), {}, steps)


@covers("ddp/no-sync/accumulates")
@world_sizes(2)
@pytest.mark.parametrize("pattern", [[True, False, True], [False, True]], ids=str)
def test_synchronised_steps_between(ranks: Ranks, pattern: list[bool]) -> None:
    """What is averaged already is the same on all ranks, so averaging it again changes nothing."""
    steps = micro_batches(2, 3, pattern)
    accumulate_everywhere(ranks, Recipe(Perceptron), {"bucket_cap_mb": 20 * BYTE}, steps)


@covers("ddp/no-sync/bucket-views")
@world_sizes(2)
@pytest.mark.parametrize("pattern", [[False, False, True], [True, False, True]], ids=str)
def test_views_of_buckets(ranks: Ranks, pattern: list[bool]) -> None:
    steps = micro_batches(2, 3, pattern)
    accumulate_everywhere(ranks, Recipe(Perceptron), {"gradient_as_bucket_view": True}, steps)


@covers("ddp/gradients/large")
@world_sizes(2)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_large_gradients_accumulate(ranks: Ranks, view: bool) -> None:
    steps = micro_batches(2, 3, [True, False, True])
    recipe = Recipe(Perceptron, ((WIDTH, 1 << 14, 1),))
    accumulate_everywhere(ranks, recipe, {"gradient_as_bucket_view": view}, steps)


@covers("ddp/no-sync/every-parameter")
@world_sizes(2)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_the_synchronised_pass_uses_other_parameters(ranks: Ranks, view: bool) -> None:
    uses = [([0, 1], False), ([2], True)]
    steps = [
        [
            [(sync, (normal((2, WIDTH), 50 * i + 10 * r), used)) for used, sync in uses]
            for r in range(2)
        ]
        for i in range(2)
    ]
    options = {**SEARCH, "gradient_as_bucket_view": view, "bucket_cap_mb": BYTE}
    accumulate_everywhere(ranks, Recipe(Branching), options, steps)


@covers("ddp/no-sync/first")
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, SEARCH], ids=str)
def test_training_begins_without_synchronisation(ranks: Ranks, options: Options) -> None:
    steps = micro_batches(2, 3, [False, False, True])
    accumulate_everywhere(ranks, Recipe(Perceptron), options, steps)


def operations_of_passes(me: Me, raises: bool) -> list[int]:
    """How many collectives each of some backward passes issued."""
    group = record()
    model = me.ddp(Recipe(Perceptron)().to(me.device), process_group=group)
    x = normal((2, WIDTH), me.rank).to(me.device)
    counts = []

    def backward() -> None:
        loss = loss_of(model(x))
        group.take()
        loss.backward()
        counts.append(len(group.take()))

    backward()
    with contextlib.suppress(KeyError), model.no_sync():
        backward()
        with model.no_sync():
            backward()
        backward()
        if raises:
            raise KeyError
    backward()
    return counts


@covers("ddp/no-sync/silent", "ddp/no-sync/nested")
@world_sizes(2)
@pytest.mark.parametrize("raises", [False, True], ids=["ends", "raises"])
def test_nothing_is_issued(ranks: Ranks, raises: bool) -> None:
    for rank, counts in enumerate(ranks.run(operations_of_passes, raises)):
        issued = [bool(count) for count in counts]
        wanted = [True, False, False, False, True]
        assert_that(issued == wanted, f"collectives of each pass: {counts}", rank)


def hook_calls(me: Me, steps: int) -> list[tuple[int, Tensor]]:
    """How often the hook was called in each step, and the gradient after it."""
    module = Recipe(Perceptron, ((WIDTH, 1),))().to(me.device)
    model = me.ddp(module)
    calls = [0]

    @unannotated
    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls[0] += 1
        buffer = bucket.buffer().div_(me.world_size)
        work: Any = dist.all_reduce(buffer, async_op=True)
        future: torch.futures.Future[Tensor] = work.get_future().then(lambda f: f.value()[0])
        return future

    model.register_comm_hook(None, hook)
    seen = []
    for _ in range(steps):
        model.zero_grad()
        calls[0] = 0
        with model.no_sync():
            model(torch.full((1, WIDTH), 1.0 + me.rank).double().to(me.device)).sum().backward()
        model(torch.full((1, WIDTH), 3.0 + me.rank).double().to(me.device)).sum().backward()
        grad = module.get_parameter("layers.0.weight").grad
        assert grad is not None
        seen.append((calls[0], grad.clone()))
    return seen


@covers("ddp/no-sync/comm-hook")
@world_sizes(2)
def test_a_hook_sees_all_that_was_added_up(ranks: Ranks) -> None:
    want = (1, torch.full((1, WIDTH), 5.0, dtype=torch.float64))
    assert_same_on_all_ranks(ranks.run(hook_calls, 3), [want] * 3, what="calls and gradient")


@covers("ddp/backward/without-zero-grad")
@world_sizes(2, 3)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_means_add_up(ranks: Ranks, view: bool) -> None:
    steps = micro_batches(ranks.world_size, 2, [True, True, True])
    accumulate_everywhere(ranks, Recipe(Perceptron), {"gradient_as_bucket_view": view}, steps)


@covers("ddp/backward/zero-grad")
@world_sizes(2)
@pytest.mark.parametrize("set_to_none", [False, True], ids=["zeros", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        pytest.param({"batched_grad_copy": True}, marks=needs_batched_grad_copy),
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_both_ways_of_zeroing(ranks: Ranks, options: Options, set_to_none: bool) -> None:
    steps = batches(2, 3, (2, WIDTH))
    train(ranks, Recipe(Perceptron), steps, options, set_to_none=set_to_none)


def gradients_of(me: Me, way: str, options: Options, steps: int = 2) -> list[Tensor]:
    """The gradient of one parameter after each step of an unusual kind."""
    module = Recipe(Perceptron)(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    grads = []
    for i in range(steps):
        model.zero_grad()
        WAYS[way](model, [normal((2, WIDTH), 50 * i + 10 * j + me.rank) for j in range(3)])
        grad = module.get_parameter("layers.0.weight").grad
        assert grad is not None
        grads.append(grad.detach().clone())
    return grads


def one_backward_of_two(model: nn.Module, xs: list[Tensor]) -> None:
    (loss_of(model(xs[0])) + loss_of(model(xs[1]))).backward()


def a_backward_for_each(model: nn.Module, xs: list[Tensor]) -> None:
    losses = [loss_of(model(x)) for x in xs]
    for loss in losses:
        loss.backward()


def twice_the_same(model: nn.Module, xs: list[Tensor]) -> None:
    loss = loss_of(model(xs[0]))
    loss.backward(retain_graph=True)
    loss.backward()


def in_a_thread(model: nn.Module, xs: list[Tensor]) -> None:
    thread = threading.Thread(target=loss_of(model(xs[0])).backward)
    thread.start()
    thread.join()


def in_eval_mode(model: nn.Module, xs: list[Tensor]) -> None:
    model.eval()
    loss_of(model(xs[0])).backward()


def with_graph(model: nn.Module, xs: list[Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss_of(model(xs[0])).backward(create_graph=True)


WAYS = {
    way.__name__: way
    for way in (
        one_backward_of_two,
        a_backward_for_each,
        twice_the_same,
        in_a_thread,
        in_eval_mode,
    )
}


def assert_as_in_one_process(ranks: Ranks, way: str, options: Options, steps: int = 2) -> None:
    got = ranks.run(gradients_of, way, options, steps)
    n = ranks.world_size
    for i in range(steps):
        module = Recipe(Perceptron)()
        for r in range(n):
            WAYS[way](module, [normal((2, WIDTH), 50 * i + 10 * j + r) for j in range(3)])
        want = module.get_parameter("layers.0.weight").grad
        assert want is not None
        assert_grads([mine[i] for mine in got], want.detach() / n, f"gradient of step {i + 1}")


@covers("ddp/backward/several-forwards")
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, SEARCH, {"static_graph": True}], ids=str)
def test_several_forwards_and_one_backward(ranks: Ranks, options: Options) -> None:
    assert_as_in_one_process(ranks, "one_backward_of_two", options, 3)


@covers("ddp/backward/several-forwards-then-several-backwards")
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, SEARCH], ids=str)
def test_several_forwards_and_a_backward_for_each(ranks: Ranks, options: Options) -> None:
    assert_as_in_one_process(ranks, "a_backward_for_each", options)


@covers("ddp/backward/retained-graph")
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, SEARCH], ids=str)
def test_backward_twice(ranks: Ranks, options: Options) -> None:
    assert_as_in_one_process(ranks, "twice_the_same", options)


@covers("ddp/backward/another-thread")
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, SEARCH, {"static_graph": True}], ids=str)
def test_backward_in_a_thread(ranks: Ranks, options: Options) -> None:
    assert_as_in_one_process(ranks, "in_a_thread", options)


@covers("ddp/backward/in-eval-mode")
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, SEARCH, {"static_graph": True}], ids=str)
def test_backward_in_eval_mode(ranks: Ranks, options: Options) -> None:
    assert_as_in_one_process(ranks, "in_eval_mode", options, 3)


def with_graph_twice(me: Me, widths: tuple[int, ...]) -> tuple[bool, Tensor]:
    """Whether the averaged gradient can be differentiated again; its values."""
    module = Recipe(WithoutBias, (widths,))().to(me.device)
    model = me.ddp(module)
    for i in range(2):
        module.zero_grad()
        with_graph(model, [normal((2, WIDTH), 10 * i + me.rank).to(me.device)])
    weight = module.get_parameter("0.weight")
    grad = weight.grad
    assert grad is not None
    if grad.requires_grad:
        (second,) = torch.autograd.grad(grad.sum(), weight)
    for parameter in module.parameters():
        parameter.grad = None  # a cycle of gradient and parameter would outlive this function
    return grad.requires_grad and bool(second.abs().sum() > 0), grad.detach()


class WithoutBias(nn.Sequential):
    """Linear layers without bias, in float64."""

    def __init__(self, widths: Sequence[int]) -> None:
        pairs = itertools.pairwise(widths)
        super().__init__(*(nn.Linear(m, n, bias=False).double() for m, n in pairs))


def assert_differentiable(ranks: Ranks, widths: tuple[int, ...]) -> None:
    got = ranks.run(with_graph_twice, widths)
    assert_same_on_all_ranks([able for able, _ in got], True, what="can be differentiated")
    module = Recipe(WithoutBias, (widths,))()
    for r in range(ranks.world_size):
        (loss_of(module(normal((2, WIDTH), 10 + r))) / ranks.world_size).backward()
    want = module.get_parameter("0.weight").grad
    assert_grads([grad for _, grad in got], want, "gradient")


@covers("ddp/backward/create-graph")
@world_sizes(2)
def test_create_graph(ranks: Ranks) -> None:
    assert_differentiable(ranks, (WIDTH, 2))


@covers("ddp/backward/create-graph-of-several-parameters")
@world_sizes(2)
def test_create_graph_with_two_parameters(ranks: Ranks) -> None:
    assert_differentiable(ranks, (WIDTH, 4, 2))


def grad_without_backward(me: Me) -> tuple[Tensor, int, bool, Tensor]:
    """What autograd.grad returns and issues, whether .grad is None; then a step's gradient."""
    group = record()
    module = Recipe(Perceptron, ((WIDTH, 1),))().to(me.device)
    model = me.ddp(module, process_group=group)
    weight = module.get_parameter("layers.0.weight")
    x = torch.full((1, WIDTH), 1.0 + 2 * me.rank, dtype=torch.float64, device=me.device)
    output = model(x)
    group.take()
    (local,) = torch.autograd.grad(output.sum(), weight)
    issued = len(group.take())
    untouched = weight.grad is None
    model(x).sum().backward()
    assert weight.grad is not None
    return local, issued, untouched, weight.grad


@covers("ddp/backward/autograd-grad-is-local")
@world_sizes(2)
def test_autograd_grad_is_local(ranks: Ranks) -> None:
    for rank, (local, issued, untouched, grad) in enumerate(ranks.run(grad_without_backward)):
        own = bool((local == 1 + 2 * rank).all())
        assert_that(own, f"autograd.grad returned {local.tolist()}", rank)
        assert_that(issued == 0, f"autograd.grad issued {issued} collectives", rank)
        assert_that(untouched, "autograd.grad set .grad", rank)
        assert_that(bool((grad == 2).all()), f"the next gradient is {grad.tolist()}", rank)


def gradient_of_input(me: Me) -> Tensor:
    model = me.ddp(Recipe(Perceptron)().to(me.device))
    x = normal((2, WIDTH), me.rank).to(me.device).requires_grad_()
    loss_of(model(x)).backward()
    assert x.grad is not None
    return x.grad


@covers("ddp/backward/input-gradient")
@world_sizes(2)
def test_gradients_of_inputs_stay_local(ranks: Ranks) -> None:
    for rank, got in enumerate(ranks.run(gradient_of_input)):
        x = normal((2, WIDTH), rank).requires_grad_()
        loss_of(Recipe(Perceptron)()(x)).backward()
        assert_grads([got], x.grad, f"gradient of rank {rank}'s input")


def raise_in_backward(me: Me) -> None:
    module = Recipe(Perceptron)().to(me.device)
    model = me.ddp(module)

    def refuse(_: Tensor) -> None:
        raise ArithmeticError(f"refused by rank {me.rank}")

    module.get_parameter("layers.0.weight").register_hook(refuse)
    loss_of(model(normal((2, WIDTH), me.rank).to(me.device))).backward()


@covers("ddp/backward/error-in-backward")
@world_sizes(1, 2)
def test_errors_come_out_of_backward(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(raise_in_backward)
    assert_raised(outcomes, ArithmeticError, match="refused by rank")


def lose_a_rank(me: Me, options: Options) -> None:
    """Two steps together; in the third one the last rank is killed between forward and backward."""
    model = me.ddp(Recipe(Perceptron)().to(me.device), **options)
    for i in range(3):
        model.zero_grad()
        loss = loss_of(model(normal((2, WIDTH), 10 * i + me.rank).to(me.device)))
        if i == 2 and me.rank == me.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()


@covers("ddp/backward/lost-rank")
@world_sizes(2)
@deadline(10)
@not_probed()
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, SEARCH], ids=str)
def test_a_rank_is_lost(ranks: Ranks, options: Options) -> None:
    assert_raised(ranks.outcomes(lose_a_rank, options), RuntimeError, but={1})


def gradient_without_hooks(me: Me) -> Tensor:
    module = Recipe(Perceptron, ((WIDTH, 1),))().to(me.device)
    model = me.ddp(module)
    model._remove_autograd_hooks()
    x = torch.full((1, WIDTH), 1.0 + 2 * me.rank, dtype=torch.float64, device=me.device)
    model(x).sum().backward()
    grad = module.get_parameter("layers.0.weight").grad
    assert grad is not None
    return grad


@covers("ddp/backward/removed-hooks")
@world_sizes(2)
def test_removed_hooks(ranks: Ranks) -> None:
    for rank, grad in enumerate(ranks.run(gradient_without_hooks)):
        own = bool((grad == 1 + 2 * rank).all())
        assert_that(own, f"the gradient is {grad.tolist()}", rank)


def train_pair(me: Me, steps: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    first = Recipe(Perceptron)(seed=1).to(me.device)
    second = Recipe(Perceptron, ((2, 3),))(seed=2).to(me.device)
    wrapped = [me.ddp(first), me.ddp(second)]
    grads = []
    for x in steps:
        for model in wrapped:
            model.zero_grad()
        loss_of(wrapped[1](wrapped[0](x.to(me.device)))).backward()
        pair = [m.get_parameter("layers.0.weight").grad for m in (first, second)]
        grads.append((pair[0].clone(), pair[1].clone()))  # type: ignore[union-attr]  # they have
    return grads


@covers("ddp/backward/two-wrappers")
@world_sizes(2)
def test_two_wrapped_modules(ranks: Ranks) -> None:
    steps = [[normal((2, WIDTH), 10 * i + r) for i in range(3)] for r in range(2)]
    got = ranks.run_each(train_pair, [(mine,) for mine in steps])
    for i in range(3):
        first, second = Recipe(Perceptron)(seed=1), Recipe(Perceptron, ((2, 3),))(seed=2)
        for mine in steps:
            (loss_of(second(first(mine[i]))) / 2).backward()
        for j, module in enumerate((first, second)):
            want = module.get_parameter("layers.0.weight").grad
            assert_grads([pairs[i][j] for pairs in got], want, f"module {j}, step {i + 1}")


def wrap_again(me: Me) -> Tensor:
    module = Recipe(Perceptron, ((WIDTH, 1),))().to(me.device)
    x = torch.full((1, WIDTH), 1.0 + 2 * me.rank, dtype=torch.float64, device=me.device)
    for _ in range(3):
        module.zero_grad()
        model = me.ddp(module)
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
        del model
        gc.collect()
    grad = module.get_parameter("layers.0.weight").grad
    assert grad is not None
    return grad


@covers("ddp/backward/wrapped-again")
@world_sizes(2)
def test_a_module_is_wrapped_again(ranks: Ranks) -> None:
    want = torch.full((1, WIDTH), 2.0, dtype=torch.float64)
    assert_same_on_all_ranks(ranks.run(wrap_again), want, what="gradient")
