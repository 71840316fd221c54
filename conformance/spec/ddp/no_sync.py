"""DDP's no_sync(): gradient accumulation without collectives, unused parameters, and hooks."""

from __future__ import annotations

import contextlib
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
from conformance.harness.traces import record
from conformance.spec.ddp.accumulation_runs import accumulate_everywhere, micro_batches
from conformance.spec.ddp.models import WIDTH, Branching, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.observing import unannotated
from conformance.spec.ddp.training_runs import Options

DOCS = "torch 2.13 docs, DistributedDataParallel"
REDUCER = "torch, reducer.cpp"

chapter = Chapter("ddp")


BYTE = 2**-20
SEARCH: Options = {"find_unused_parameters": True}


@chapter.must(
    "ddp/no-sync/accumulates",
    "Inside no_sync, each rank accumulates its own gradients, and the first synchronised "
    "backward pass afterwards averages all that was accumulated.",
    source=f"{DOCS}, no_sync",
    rests_on="ddp/average",
)
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


@chapter.must(
    "ddp/no-sync/bucket-views",
    "With gradient_as_bucket_view, gradients accumulate inside no_sync and are averaged as "
    "without it.",
    source="torch 2.13, test_accumulate_gradients_no_sync_grad_is_view",
    rests_on="ddp/no-sync/accumulates",
)
@world_sizes(2)
@pytest.mark.parametrize("pattern", [[False, False, True], [True, False, True]], ids=str)
def test_views_of_buckets(ranks: Ranks, pattern: list[bool]) -> None:
    steps = micro_batches(2, 3, pattern)
    accumulate_everywhere(ranks, Recipe(Perceptron), {"gradient_as_bucket_view": True}, steps)


def gradients_of_two_passes(me: Me) -> list[Tensor]:
    """The attribute is False in the first pass, and True in the second."""
    module = nn.Linear(2, 1, bias=False).double().to(me.device)
    model = me.ddp(module)
    x = torch.full((1, 2), me.rank + 1.0, dtype=torch.float64, device=me.device)
    grads = []
    for sync in (False, True):
        model.require_backward_grad_sync = sync
        model(x).sum().backward()
        assert module.weight.grad is not None
        grads.append(module.weight.grad.clone())
    return grads


@chapter.should(
    "ddp/no-sync/attribute",
    "While require_backward_grad_sync is False, as frameworks set it, backward passes accumulate "
    "as inside no_sync.",
    source="torch, distributed.py: no_sync sets it; Lightning and Accelerate do",
    rests_on="ddp/no-sync/accumulates",
)
@world_sizes(2)
def test_the_attribute_is_set_by_hand(ranks: Ranks) -> None:
    for rank, grads in enumerate(ranks.run(gradients_of_two_passes)):
        want = [torch.full((1, 2), value).double() for value in (rank + 1.0, 3.0)]
        assert_same_on_all_ranks([grads], want, what=f"gradients on rank {rank}")


@chapter.must(
    "ddp/gradients/large",
    "Gradients of several hundred KiB are averaged like small ones: if they accumulate, if they "
    "are views of buckets, and if some ranks do not use the parameter.",
    source=f"{DOCS}: no size is named; implementations treat large gradients apart",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_large_gradients_accumulate(ranks: Ranks, view: bool) -> None:
    steps = micro_batches(2, 3, [True, False, True])
    recipe = Recipe(Perceptron, ((WIDTH, 1 << 14, 1),))
    accumulate_everywhere(ranks, recipe, {"gradient_as_bucket_view": view}, steps)


@chapter.must(
    "ddp/no-sync/every-parameter",
    "With find_unused_parameters, what was accumulated inside no_sync is averaged for every "
    "parameter, also if the synchronised pass uses other parameters.",
    source="pytorch#69031",
    rests_on="ddp/no-sync/accumulates",
)
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


@chapter.must(
    "ddp/no-sync/first",
    "Training may begin inside no_sync, with every way of handling unused parameters.",
    source="pytorch#187732",
    rests_on="ddp/no-sync/accumulates",
)
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


@chapter.must(
    "ddp/no-sync/silent",
    "A backward pass inside no_sync issues no collective.",
    source=f"{DOCS}, no_sync; FunASR#3472",
    needs="dtype:float64",
)
@chapter.must(
    "ddp/no-sync/nested",
    "no_sync may be nested and restores the previous setting at its end, also after an exception.",
    source="torch 2.13, no_sync",
    rests_on="ddp/no-sync/silent",
)
@world_sizes(2)
@pytest.mark.parametrize("raises", [False, True], ids=["ends", "raises"])
def test_nothing_is_issued(ranks: Ranks, raises: bool) -> None:
    for rank, counts in enumerate(ranks.run(operations_of_passes, raises)):
        issued = [bool(count) for count in counts]
        wanted = [True, False, False, False, True]
        assert_that(issued == wanted, f"collectives of each pass: {counts}", rank)


def drop_then_accumulate(me: Me, options: Options) -> list[tuple[int, Tensor, Tensor]]:
    """In each step: what the pass inside no_sync issued, its gradient, and that of the next pass.
    Before it comes a forward pass outside, whose output is dropped."""
    group = record()
    module = Recipe(Perceptron, ((WIDTH, 1),))().to(me.device)
    model = me.ddp(module, process_group=group, **options)
    weight = module.get_parameter("layers.0.weight")
    seen = []
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, WIDTH), 9.0).double().to(me.device))
        group.take()
        with model.no_sync():
            model(torch.full((1, WIDTH), 1.0 + me.rank).double().to(me.device)).sum().backward()
        issued = len(group.take())
        assert weight.grad is not None
        accumulated = weight.grad.clone()
        model(torch.full((1, WIDTH), 3.0 + me.rank).double().to(me.device)).sum().backward()
        seen.append((issued, accumulated, weight.grad.clone()))
    return seen


@chapter.must(
    "ddp/no-sync/after-a-dropped-forward",
    "A backward pass inside no_sync issues no collective either after a forward pass outside of it "
    "whose output was dropped.",
    source=f"{DOCS}, no_sync: gradients will be accumulated without synchronisation",
    rests_on=("ddp/no-sync/silent", "ddp/no-sync/forward-decides"),
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, SEARCH, {"gradient_as_bucket_view": True}], ids=str)
def test_an_output_was_dropped_before(ranks: Ranks, options: Options) -> None:
    for rank, steps in enumerate(ranks.run(drop_then_accumulate, options)):
        for i, (issued, accumulated, averaged) in enumerate(steps):
            assert_that(issued == 0, f"step {i + 1}: {issued} collectives inside no_sync", rank)
            right = bool((accumulated == 1.0 + rank).all() and (averaged == 5.0).all())
            values = f"{accumulated.tolist()}, then {averaged.tolist()}"
            assert_that(right, f"step {i + 1}: gradients {values}", rank)


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


@chapter.must(
    "ddp/no-sync/comm-hook",
    "A communication hook is called only in the synchronised pass, with all that was accumulated.",
    source="torch 2.13, test_accumulate_gradients_no_sync_allreduce_hook",
    rests_on="ddp/no-sync/accumulates",
)
@world_sizes(2)
def test_a_hook_sees_all_that_was_added_up(ranks: Ranks) -> None:
    want = (1, torch.full((1, WIDTH), 5.0, dtype=torch.float64))
    assert_same_on_all_ranks(ranks.run(hook_calls, 3), [want] * 3, what="calls and gradient")
