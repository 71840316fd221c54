"""Copies of a DDP wrapper by pickle or deepcopy: averaging, options and communication hooks."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, world_sizes
from conformance.spec.ddp.models import WIDTH, Branching, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.training_runs import Options, assert_grads
from conformance.spec.raising import assert_raised

OBSERVED = "observed, torch 2.13.0"

chapter = Chapter("ddp")


def save(model: Any, group: Any = None) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def copied(me: Me, way: str, options: Options) -> tuple[bool, list[Tensor]]:
    """Whether copy and original have parameters of their own; gradients of both."""
    module = Recipe(Perceptron)(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    loss_of(model(normal((2, WIDTH), 5).to(me.device))).backward()
    twin = save(model) if way == "pickle" else copy.deepcopy(model)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    apart = all(a.data_ptr() != b.data_ptr() for a, b in pairs)
    for _ in range(3):
        for each in (model, twin):
            each.zero_grad()
            loss_of(each(normal((2, WIDTH), me.rank).to(me.device))).backward()
    return apart, [each.module.layers[0].weight.grad for each in (model, twin)]


@chapter.must(
    "ddp/copies/pickle",
    "A wrapper on the default group can be saved and loaded, and the loaded wrapper averages "
    "gradients.",
    source="pytorch#3023; torch 2.13, __getstate__",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_saved_and_loaded(ranks: Ranks, options: Options) -> None:
    assert_copies_average(ranks, "pickle", options)


@chapter.must(
    "ddp/copies/pickle-of-a-static-graph",
    "A loaded wrapper whose graph was declared static averages gradients in every step, "
    "including the first.",
    source="torch 2.13, __setstate__ declares the graph static again",
    rests_on=("ddp/copies/pickle", "ddp/static-graph/values"),
)
@world_sizes(2)
def test_saved_and_loaded_with_a_static_graph(ranks: Ranks) -> None:
    assert_copies_average(ranks, "pickle", {"static_graph": True})


@chapter.should(
    "ddp/copies/deepcopy",
    "copy.deepcopy gives a wrapper with parameters of its own, and both wrappers average "
    "gradients.",
    source=f"{OBSERVED}: __getstate__ serves copies too",
    rests_on="ddp/average",
)
@world_sizes(2)
def test_copied(ranks: Ranks) -> None:
    assert_copies_average(ranks, "copy", {})


def assert_copies_average(ranks: Ranks, way: str, options: Options) -> None:
    got = ranks.run(copied, way, options)
    assert_same_on_all_ranks([apart for apart, _ in got], True, what="apart")
    module = Recipe(Perceptron)()
    for r in range(2):
        (loss_of(module(normal((2, WIDTH), r))) / 2).backward()
    want = module.get_parameter("layers.0.weight").grad
    for i, who in enumerate(("original", "copy")):
        assert_grads([grads[i] for _, grads in got], want, f"gradient of the {who}")


def summing(group: Any, bucket: Any) -> Any:
    work: Any = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


summing.__annotations__.clear()  # torch would have them name its own GradBucket


OPTIONS_OF_COPIES: dict[str, Options] = {
    "search": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "caps": {"bucket_cap_mb": 2**-20},
    "buffers": {"broadcast_buffers": False},
    "ignored": {},
}


def shown(me: Me, kind: str, model: Any) -> bool | int:
    """What some steps show of an option."""
    calls = [0]
    if kind == "caps":
        model.register_comm_hook(calls, counting)
    branches = model.module.branches
    model.module.mark.fill_(me.rank)
    for i in range(3):
        model.zero_grad()
        calls[0] = 0
        x = torch.full((1, WIDTH), 1.0 + i + me.rank, dtype=torch.float64, device=me.device)
        outputs = model(x, [0] if kind == "search" else [0, 1])
        sum(output.sum() for output in outputs).backward()
    first, second = branches[0].weight.grad, branches[1].weight.grad
    if kind == "search":
        return second is None
    if kind == "views":
        same: bool = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        return same
    if kind == "buffers":
        return bool(model.module.mark == me.rank)
    return calls[0] if kind == "caps" else bool((second == 3.0 + me.rank).all())


def counting(calls: list[int], bucket: Any) -> Any:
    calls[0] += 1
    return summing(None, bucket)


counting.__annotations__.clear()


def options_of_a_copy(me: Me, kind: str) -> tuple[bool | int, bool | int]:
    """What a wrapper shows of an option, and what the one that was saved and loaded does."""
    module = Recipe(Branching, (2,))()
    module.register_buffer("mark", torch.zeros(()))
    module = module.to(me.device)
    if kind == "ignored":
        wrapper: Any = type(me.ddp(nn.Linear(1, 1).to(me.device)))
        wrapper._set_params_and_buffers_to_ignore_for_model(module, ["branches.1.weight"])
    model = me.ddp(module, **OPTIONS_OF_COPIES[kind])
    twin = save(model)
    return shown(me, kind, model), shown(me, kind, twin)


@chapter.must(
    "ddp/copies/options",
    "A wrapper that was saved and loaded keeps its options: the search for unused parameters, "
    "gradients that are views, bucket caps, no broadcast of buffers, and ignored names.",
    source="torch, distributed.py: __setstate__ builds the reducer with what was saved",
    rests_on="ddp/copies/pickle",
)
@world_sizes(2)
@pytest.mark.parametrize("kind", OPTIONS_OF_COPIES)
def test_copies_keep_their_options(ranks: Ranks, kind: str) -> None:
    wanted = 2 if kind == "caps" else True
    assert_same_on_all_ranks(ranks.run(options_of_a_copy, kind), (wanted, wanted), what="shown")


def copied_with_a_hook(me: Me) -> list[Tensor]:
    """Gradients of the original, of its copy, and of the copy once it has the hook too."""
    model = me.ddp(Recipe(Perceptron)().to(me.device))
    model.register_comm_hook(None, summing)
    twin = copy.deepcopy(model)
    grads = []
    for number, each in enumerate((model, twin, twin)):
        if number == 2:
            each.register_comm_hook(None, summing)
        each.zero_grad()
        loss_of(each(normal((2, WIDTH), me.rank).to(me.device))).backward()
        grads.append(each.module.layers[0].weight.grad)
    return grads


@chapter.should(
    "ddp/copies/hook",
    "A copy of a wrapper with a communication hook averages gradients, until a hook is "
    "registered on the copy itself.",
    source=f"{OBSERVED}: __setstate__ makes a reducer without a hook",
    rests_on="ddp/copies/deepcopy",
)
@world_sizes(2)
def test_copied_with_a_hook(ranks: Ranks) -> None:
    module = Recipe(Perceptron)()
    for rank in range(2):
        loss_of(module(normal((2, WIDTH), rank))).backward()
    summed = module.get_parameter("layers.0.weight").grad
    assert summed is not None
    got = ranks.run(copied_with_a_hook)
    for i, want in enumerate((summed, summed / 2, summed)):
        assert_grads([grads[i] for grads in got], want, f"gradient {i}")


def save_with_group(me: Me) -> None:
    save(me.ddp(Recipe(Perceptron)().to(me.device), process_group=dist.new_group()))


@chapter.must(
    "ddp/copies/pickle-of-another-group",
    "Saving a wrapper on another group raises RuntimeError 'DDP Pickling/Unpickling are only "
    "supported'.",
    source="torch 2.13, _check_default_group",
    needs="dtype:float64",
)
@world_sizes(2)
def test_saving_needs_the_default_group(ranks: Ranks) -> None:
    words = "DDP Pickling/Unpickling are only supported when using DDP with the default"
    assert_raised(ranks.outcomes(save_with_group), RuntimeError, match=words)
