"""Gradients under DDP: strides, bucket views, accumulation, clipping norm, delayed all-reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.spec.ddp.models import WIDTH, Convolving, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.training_runs import (
    Options,
    assert_grads,
    batches,
    train,
)

REDUCER = "torch, reducer.cpp"
DOCS = "torch 2.13 docs, DistributedDataParallel"

chapter = Chapter("ddp")


BYTE = 2**-20
VIEW: Options = {"gradient_as_bucket_view": True}


def strides_of(me: Me, recipe: Recipe, shape: list[int], options: Options) -> list[Any]:
    """Strides of each parameter and its gradient, after two steps."""
    module = recipe(seed=0).to(me.device)
    model = me.ddp(module, **options)
    for i in range(2):
        loss_of(model(normal(shape, i + me.rank).to(me.device))).backward()
    return [
        (p.stride(), p.grad.stride() if p.grad is not None else None) for p in module.parameters()
    ]


@chapter.must(
    "ddp/gradients/strides",
    "A gradient has the strides of its parameter, if that is dense; so channels-last parameters "
    "have channels-last gradients, of the right values.",
    source=f"{REDUCER}, the gradient layout contract; torch 2.13, test_grad_layout_1devicemodule",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("channels_last", [True, False], ids=["channels_last", "contiguous"])
def test_strides(ranks: Ranks, channels_last: bool) -> None:
    recipe = Recipe(Convolving, ("float64", channels_last))
    train(ranks, recipe, batches(2, 3, (2, 2, 4, 4)), {"bucket_cap_mb": 100 * BYTE})
    for rank, pairs in enumerate(ranks.run(strides_of, recipe, [2, 2, 4, 4], {})):
        for own, grad in pairs:
            assert_that(grad == own, f"a gradient of strides {grad} for {own}", rank)


@chapter.must(
    "ddp/gradients/bucket-views-strides",
    "Gradients that are views of buckets have the parameter's strides as well.",
    source=f"{REDUCER}, initialize_bucket_views",
    rests_on=("ddp/gradients/bucket-views", "ddp/gradients/strides"),
)
@world_sizes(2)
def test_strides_of_views(ranks: Ranks) -> None:
    recipe = Recipe(Convolving)
    train(ranks, recipe, batches(2, 3, (2, 2, 4, 4)), VIEW)
    for rank, pairs in enumerate(ranks.run(strides_of, recipe, [2, 2, 4, 4], VIEW)):
        for own, grad in pairs:
            assert_that(grad == own, f"a gradient of strides {grad} for {own}", rank)


class Gaps(nn.Module):
    """A parameter that is every second column of a matrix, and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.every_second = nn.Parameter(torch.rand(WIDTH, 4).double()[:, ::2])
        self.transposed = nn.Parameter(torch.rand(2, WIDTH).double().t())
        self.plain = nn.Parameter(torch.rand(2).double())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.every_second) * (x @ self.transposed) + self.plain


@chapter.should(
    "ddp/gradients/strides-with-gaps",
    "A parameter that is a view with gaps, or expanded, is averaged element by element.",
    source=f"{REDUCER}, the gradient layout contract: row-major otherwise",
    rests_on="ddp/gradients/strides",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, VIEW], ids=["apart", "view"])
def test_parameters_with_gaps(ranks: Ranks, options: Options) -> None:
    train(ranks, Recipe(Gaps), batches(2, 3, (2, WIDTH)), options)


def storages(me: Me, options: Options, set_to_none: bool) -> list[list[int]]:
    """After each step, the address of the storage that each gradient lies in."""
    module = Recipe(Perceptron, ((WIDTH, 4, 2),))().to(me.device)
    model = me.ddp(module, **options)
    seen = []
    keep = []  # so that no address is given out again
    for i in range(5):
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model(normal((2, WIDTH), i).to(me.device))).backward()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        keep += [grad.detach() for grad in grads]
        seen.append([grad.untyped_storage().data_ptr() for grad in grads])
    return seen


@chapter.must(
    "ddp/gradients/bucket-views",
    "With gradient_as_bucket_view gradients are views of few large buffers after the first "
    "step, and without it they are not.",
    source=f"{DOCS}, argument gradient_as_bucket_view",
    rests_on="ddp/average",
)
@world_sizes(2)
def test_gradients_are_views_if_asked_for(ranks: Ranks) -> None:
    for rank, seen in enumerate(ranks.run(storages, VIEW, False)):
        assert_that(len(set(seen[-1])) == 1, f"{len(set(seen[-1]))} storages of 4 views", rank)
    for rank, seen in enumerate(ranks.run(storages, {}, False)):
        assert_that(len(set(seen[-1])) == 4, f"4 gradients in {len(set(seen[-1]))} storages", rank)


@chapter.must(
    "ddp/gradients/bucket-views-stay",
    "With gradient_as_bucket_view, gradients stay views of the same memory in later steps, after "
    "zero_grad with and without set_to_none.",
    source="fairscale#354 and pytorch#96439",
    rests_on="ddp/gradients/bucket-views",
)
@world_sizes(2)
@pytest.mark.parametrize("set_to_none", [False, True], ids=["zeros", "none"])
def test_views_stay_where_they_are(ranks: Ranks, set_to_none: bool) -> None:
    """Buckets are rebuilt before the second step."""
    for rank, seen in enumerate(ranks.run(storages, VIEW, set_to_none)):
        places = {address for addresses in seen[1:] for address in addresses}
        assert_that(len(places) == 1, f"gradients were in {len(places)} buffers", rank)


def gradient_given(me: Me, options: Options) -> Tensor:
    """One that was there, plus what backward adds."""
    module = nn.Linear(WIDTH, 1, bias=False).double().to(me.device)
    model = me.ddp(module, **options)
    for _ in range(2):
        module.weight.grad = torch.full_like(module.weight, 10.0 * (me.rank + 1))
        x = torch.full((1, WIDTH), 1.0 + me.rank, dtype=torch.float64, device=me.device)
        model(x).sum().backward()
    return module.weight.grad  # type: ignore[return-value]  # it has one


@chapter.must(
    "ddp/gradients/given-beforehand",
    "A gradient that the user set beforehand is added to, and the sum is averaged.",
    source=f"{REDUCER}: what is in .grad is reduced",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, VIEW], ids=["apart", "view"])
def test_gradients_that_were_there(ranks: Ranks, options: Options) -> None:
    want = torch.full((1, WIDTH), 16.5, dtype=torch.float64)
    assert_same_on_all_ranks(ranks.run(gradient_given, options), want, what="gradient")


def kept_objects(me: Me, options: Options) -> list[bool]:
    module = Recipe(Perceptron)().to(me.device)
    model = me.ddp(module, **options)
    before: list[Any] = []
    same = []
    for i in range(4):
        loss_of(model(normal((2, WIDTH), i).to(me.device))).backward()
        now = [p.grad for p in module.parameters()]
        if i > 1:
            same.append(all(a is b for a, b in zip(now, before, strict=True)))
        before = now
    return same


@chapter.must(
    "ddp/gradients/accumulate-in-place",
    "Without zero_grad a gradient stays the same tensor from step to step.",
    source="torch 2.13: references to gradients stay valid",
    rests_on="ddp/backward/without-zero-grad",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, VIEW], ids=["apart", "view"])
def test_gradients_stay_the_same_objects(ranks: Ranks, options: Options) -> None:
    assert_same_on_all_ranks(ranks.run(kept_objects, options), [True, True], what="the same")


@chapter.should(
    "ddp/gradients/batched-copy",
    "batched_grad_copy changes no gradient by more than rounding.",
    source=f"{DOCS}, argument batched_grad_copy",
    rests_on="ddp/average",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("options", [{}, VIEW, {"bucket_cap_mb": 50 * BYTE}], ids=str)
def test_batched_copies(ranks: Ranks, options: Options) -> None:
    steps = batches(ranks.world_size, 3, (2, WIDTH))
    train(ranks, Recipe(Perceptron), steps, {**options, "batched_grad_copy": True})


def clipped(me: Me, cap: float) -> tuple[Tensor, Tensor]:
    module = Recipe(Perceptron)(seed=me.rank).to(me.device)
    model = me.ddp(module, bucket_cap_mb=cap)
    for i in range(3):
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), 10 * i + me.rank).to(me.device))).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    grad = module.get_parameter("layers.1.weight").grad
    assert grad is not None
    return norm, grad


@chapter.must(
    "ddp/gradients/norm",
    "clip_grad_norm_ on averaged gradients gives the norm of the whole batch's gradient, and "
    "clips the same on all ranks, however buckets are filled.",
    source="fairscale#517",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("cap", [25, BYTE], ids=["one-bucket", "buckets"])
def test_norms(ranks: Ranks, cap: float) -> None:
    got = ranks.run(clipped, cap)
    module = Recipe(Perceptron)()
    for r in range(2):
        (loss_of(module(normal((2, WIDTH), 20 + r))) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    assert_grads([n for n, _ in got], norm, "norm")
    want = module.get_parameter("layers.1.weight").grad
    assert_grads([grad for _, grad in got], want, "clipped gradient")


FLOATS = Recipe(Perceptron, ((WIDTH, 4, 2), "float32"))


def delayed(me: Me, part: list[int]) -> list[list[Tensor]]:
    """Gradients of all parameters after each step, on the ranks of this part."""
    group = dist.new_group(part)
    if me.rank not in part:
        return []
    module = FLOATS(seed=me.rank).to(me.device)
    model = me.ddp(
        module,
        process_group=group,
        delay_all_reduce_named_params=list(module.named_parameters())[2:],
        param_to_hook_all_reduce=module.get_parameter("layers.0.weight"),
    )
    seen = []
    for i in range(3):
        model.zero_grad()
        x = normal((2, WIDTH), 10 * i + me.rank, "float32")
        loss_of(model(x.to(me.device))).backward()
        seen.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    model.__dict__.clear()  # a hook on its own parameter keeps torch's wrapper and its group alive
    return seen


@chapter.should(
    "ddp/gradients/delayed",
    "With delay_all_reduce_named_params, the gradients of those parameters are averaged as well, "
    "together, once the gradient of param_to_hook_all_reduce is ready, and before backward "
    "returns.",
    source="torch 2.13, argument delay_all_reduce_named_params",
    rests_on="ddp/average",
)
@world_sizes(3)
@pytest.mark.parametrize("part", [[0, 1, 2], [0, 1]], ids=["all", "part"])
def test_delayed_gradients(ranks: Ranks, part: list[int]) -> None:
    got = ranks.run(delayed, part)[: len(part)]
    for i in range(3):
        module = FLOATS()
        for r in part:
            loss = loss_of(module(normal((2, WIDTH), 10 * i + r, "float32")))
            (loss / len(part)).backward()
        for j, parameter in enumerate(module.parameters()):
            what = f"gradient {j} of step {i + 1}"
            assert_grads([mine[i][j] for mine in got], parameter.grad, what, within=1e-5)


class LargeAndSmall(nn.Module):
    """The gradient of `large` is there before that of `small`, and takes longer to reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.ones(1))
        self.large = nn.Parameter(torch.zeros(1 << 22))

    def forward(self, factor: float) -> Tensor:
        return ((self.large + self.small) * factor).sum()


def delayed_and_large(me: Me) -> Tensor:
    """Some elements of a delayed gradient, as soon as backward has returned."""
    module = LargeAndSmall().to(me.device)
    model = me.ddp(
        module,
        delay_all_reduce_named_params=[("large", module.large)],
        param_to_hook_all_reduce=module.small,
    )
    model(me.rank + 1.0).backward()
    assert module.large.grad is not None
    some = module.large.grad[:: 1 << 16].clone()
    dist.barrier()  # no rank leaves while another one's reduction may be running
    model.__dict__.clear()
    return some


@covers("ddp/gradients/delayed")
@world_sizes(2)
def test_delayed_gradients_are_there_when_backward_returns(ranks: Ranks) -> None:
    assert_grads(ranks.run(delayed_and_large), torch.full((64,), 1.5), "delayed gradient")


def delayed_and_kept(me: Me) -> list[Tensor]:
    """Both delayed gradients after two steps, between which the first one is dropped."""
    module = FLOATS(seed=0).to(me.device)
    named = list(module.named_parameters())
    model = me.ddp(
        module, delay_all_reduce_named_params=named[2:], param_to_hook_all_reduce=named[0][1]
    )
    params = [param for _, param in named[2:]]
    for i in range(2):
        params[0].grad = None
        x = normal((2, WIDTH), 10 * i + me.rank, "float32")
        loss_of(model(x.to(me.device))).backward()
    seen = [param.grad.clone() for param in params if param.grad is not None]
    model.__dict__.clear()  # as in `delayed`
    return seen


@covers("ddp/gradients/delayed")
@world_sizes(2)
def test_delayed_gradients_of_which_one_was_dropped(ranks: Ranks) -> None:
    """It begins at zero again, and the other one adds up."""
    module = FLOATS(seed=0)
    params = list(module.parameters())[2:]
    for i in range(2):
        params[0].grad = None
        for r in range(2):
            (loss_of(module(normal((2, WIDTH), 10 * i + r, "float32"))) / 2).backward()
    got = ranks.run(delayed_and_kept)
    for j, what in enumerate(("dropped", "kept")):
        assert_grads([mine[j] for mine in got], params[j].grad, f"{what} gradient", within=1e-5)
