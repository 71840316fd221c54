"""DDP backward passes: accumulated, repeated, create_graph, autograd.grad, errors, two wrappers."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    deadline,
    loses_ranks,
    not_probed,
    world_sizes,
)
from conformance.harness.traces import record
from conformance.spec.ddp.accumulation_runs import accumulate_everywhere, micro_batches
from conformance.spec.ddp.models import WIDTH, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.training_runs import Options, assert_grads, batches, train
from conformance.spec.raising import assert_raised
from conformance.spec.torch_versions import needs_batched_grad_copy

DOCS = "torch 2.13 docs, DistributedDataParallel"
REDUCER = "torch, reducer.cpp"

chapter = Chapter("ddp")


BYTE = 2**-20
SEARCH: Options = {"find_unused_parameters": True}


@chapter.must(
    "ddp/backward/without-zero-grad",
    "Without zero_grad between synchronised backward passes, their means add up.",
    source=f"{REDUCER}: what is there already is the same on all ranks, so its mean is itself; "
    "open-instruct#1498",
    rests_on="ddp/average",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_means_add_up(ranks: Ranks, view: bool) -> None:
    steps = micro_batches(ranks.world_size, 2, [True, True, True])
    accumulate_everywhere(ranks, Recipe(Perceptron), {"gradient_as_bucket_view": view}, steps)


@chapter.must(
    "ddp/backward/zero-grad",
    "zero_grad with and without set_to_none gives the same training, also if gradients are views "
    "of buckets.",
    source="pytorch#96439, fairscale#354",
    rests_on="ddp/average",
)
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
        xs = [normal((2, WIDTH), 50 * i + 10 * j + me.rank).to(me.device) for j in range(3)]
        WAYS[way](model, xs)
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


@chapter.must(
    "ddp/backward/several-forwards",
    "Several forward passes may come before one backward pass through all of them.",
    source="torch 2.13, test_static_graph_multi_forward",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, SEARCH, {"static_graph": True}], ids=str)
def test_several_forwards_and_one_backward(ranks: Ranks, options: Options) -> None:
    assert_as_in_one_process(ranks, "one_backward_of_two", options, 3)


@chapter.must(
    "ddp/backward/several-forwards-then-several-backwards",
    "After several forward passes, a backward pass for each of them averages its gradients.",
    source="pytorch#47260",
    rests_on="ddp/backward/without-zero-grad",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, SEARCH], ids=str)
def test_several_forwards_and_a_backward_for_each(ranks: Ranks, options: Options) -> None:
    assert_as_in_one_process(ranks, "a_backward_for_each", options)


@chapter.must(
    "ddp/backward/retained-graph",
    "The gradients of a second backward pass through a retained graph are averaged as well.",
    source="torch 2.13 docs, retain_graph; pytorch#47260",
    rests_on="ddp/backward/without-zero-grad",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, SEARCH], ids=str)
def test_backward_twice(ranks: Ranks, options: Options) -> None:
    assert_as_in_one_process(ranks, "twice_the_same", options)


@chapter.must(
    "ddp/backward/another-thread",
    "backward may run in another thread than forward.",
    source=f"{REDUCER}: hooks run where autograd runs",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, SEARCH, {"static_graph": True}], ids=str)
def test_backward_in_a_thread(ranks: Ranks, options: Options) -> None:
    assert_as_in_one_process(ranks, "in_a_thread", options)


@chapter.must(
    "ddp/backward/in-eval-mode",
    "In eval mode, too, backward averages gradients, as for training with frozen statistics.",
    source=f"{REDUCER}: whether gradients are exchanged depends on grad mode and no_sync alone",
    rests_on="ddp/average",
)
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


@chapter.must(
    "ddp/backward/create-graph",
    "backward(create_graph=True) averages the first gradients and leaves them differentiable.",
    source="torch 2.13, test_ddp_create_graph; pytorch#63812",
    rests_on="ddp/average",
)
@world_sizes(2)
def test_create_graph(ranks: Ranks) -> None:
    assert_differentiable(ranks, (WIDTH, 2))


@chapter.should(
    "ddp/backward/create-graph-of-several-parameters",
    "backward(create_graph=True) works for a bucket of more than one parameter as well.",
    source="torch 2.13 warns, and goes on: 'not well-supported'; pytorch#63929",
    rests_on="ddp/backward/create-graph",
)
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


@chapter.must(
    "ddp/backward/autograd-grad-is-local",
    "torch.autograd.grad returns this rank's own gradients, issues nothing, leaves .grad alone, "
    "and the next step is right.",
    source=f"{DOCS}: it does not work with autograd.grad; pytorch#47562",
    rests_on="ddp/average",
)
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


@chapter.must(
    "ddp/backward/input-gradient",
    "The gradient of an input is this rank's own, not averaged.",
    source=f"{DOCS}: gradients of parameters are averaged",
    needs="dtype:float64",
)
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


@chapter.should(
    "ddp/backward/error-in-backward",
    "An exception in every rank's backward pass comes out of it unchanged.",
    source="observed, torch 2.13.0, test_ddp_python_error_logged",
    needs="dtype:float64",
)
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


@chapter.must(
    "ddp/backward/lost-rank",
    "If a rank dies before its part of an exchange, backward raises RuntimeError on the other "
    "ranks; none of them continues with its own gradients.",
    source="observed, torch 2.13.0 gloo",
    needs="feature:peer_loss",
    rests_on=("ddp/average", "peer_loss/of-a-pair"),
)
@world_sizes(2)
@deadline(10)
@loses_ranks()
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


@chapter.should(
    "ddp/backward/removed-hooks",
    "After _remove_autograd_hooks, gradients stay local.",
    source="torch 2.13, test_ddp_remove_autograd_hooks",
    rests_on="ddp/average",
)
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


@chapter.must(
    "ddp/backward/two-wrappers",
    "Two wrapped modules in one model, one after the other, are both averaged.",
    source="GANs and encoder-decoder models; pytorch#23425",
    rests_on="ddp/average",
)
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


@chapter.must(
    "ddp/backward/wrapped-again",
    "A module whose wrapper was deleted can be wrapped again, and is averaged once.",
    source=f"{REDUCER}, the destructor removes its hooks",
    rests_on="ddp/average",
)
@world_sizes(2)
def test_a_module_is_wrapped_again(ranks: Ranks) -> None:
    want = torch.full((1, WIDTH), 2.0, dtype=torch.float64)
    assert_same_on_all_ranks(ranks.run(wrap_again), want, what="gradient")
