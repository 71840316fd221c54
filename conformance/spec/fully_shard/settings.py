"""Settings of gradients and collectives: accumulation, divisors, hooks, own collectives, groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.facts import Fact, check_fact, rows, unlike
from conformance.spec.fsdp.models import Net
from conformance.spec.fully_shard.recipes import (
    CPU,
    Recipe,
    Run,
    check_runs,
    check_training,
    everywhere,
    gradients_of,
    part_of,
    row_numel,
    sharded,
    train,
    train_whole,
)
from conformance.spec.fully_shard.recording import logged
from conformance.spec.fully_shard.versions import needs_method

NEEDS = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "dtype:float64", "reduce_op:sum")

chapter = Chapter("fully_shard", source="torch 2.13 docs, FSDPModule", needs=NEEDS)

NET = Net()


def mean_gradients(world_size: int, numbers: tuple[int, ...] = (0,)) -> dict[str, Tensor]:
    """Of the bare network: the mean over ranks, the sum over batches."""
    bare = NET.make()
    for number in numbers:
        for rank in range(world_size):
            (NET.loss(bare, rank, number, CPU) / world_size).backward()
    return {name: p.grad for name, p in bare.named_parameters() if p.grad is not None}


def scaled(
    me: Me,
    model: Any,
    factor: float,
    numbers: tuple[int, ...] = (0,),
    in_blocks: float | None = None,
) -> list[str]:
    """This rank's parts of gradients are these times the mean ones; in_blocks: in the blocks."""
    found = []
    got = gradients_of(model)
    for name, whole in mean_gradients(me.world_size, numbers).items():
        times = factor if in_blocks is None or "blocks" not in name else in_blocks
        want = times * part_of(whole, me.world_size, me.rank)
        mine = got[name]
        if mine is None or not torch.allclose(mine.cpu(), want, rtol=1e-7, atol=1e-10):
            found.append(f"gradient of {name}: got {mine}, want {want}")
    return found[:1]


def backward(me: Me, model: Any, number: int = 0) -> None:
    NET.loss(model, me.rank, number, me.device).backward()


# Accumulation


def reduces_nothing(me: Me) -> list[str]:
    model, log = logged(me, Recipe())
    model.set_requires_gradient_sync(False)
    backward(me, model)
    found = unlike("reductions", [x for x in log.take() if x.startswith("scatter")], [])
    return found + unlike("gradients of shards", set(gradients_of(model).values()), {None})


def reduces_the_sum(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    for number in (0, 1, 2):
        model.set_requires_gradient_sync(number == 2)
        backward(me, model, number)
    return scaled(me, model, 1.0, (0, 1, 2))


def saved_between(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    for number in (0, 1, 2):
        model.set_requires_gradient_sync(number == 2)
        backward(me, model, number)
        model.state_dict()
    return scaled(me, model, 1.0, (0, 1, 2))


def not_below(me: Me) -> list[str]:
    model, log = logged(me, Recipe())
    model.set_requires_gradient_sync(False, recurse=False)
    backward(me, model)
    scatters = [x for x in log.take() if x.startswith("scatter")]
    return unlike("reductions of the two blocks", len(scatters), 2)


def not_the_last(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    for number in (0, 1):
        model.set_is_last_backward(number == 1)
        backward(me, model, number)
    return scaled(me, model, 1.0, (0, 1))


def kept_between(me: Me) -> list[str]:
    """Gathers of the second backward's step, with parameters kept after the first backward."""
    model, log = logged(me, Recipe())
    for number in (0, 1):
        model.set_requires_gradient_sync(number == 1)
        model.set_reshard_after_backward(number == 1)
        log.take()
        loss = NET.loss(model, me.rank, number, me.device)
        gathers = sum(line.startswith("gather") for line in log.take())
        loss.backward()
    return unlike("gathers of the second forward", gathers, 0) + scaled(me, model, 1.0, (0, 1))


# Divisors


def divided_by_three(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    everywhere(model, "set_gradient_divide_factor", 3.0)
    for number in (0, 1):
        backward(me, model, number)
    return scaled(me, model, me.world_size / 3, (0, 1))


def divided_in_the_root_alone(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    model.set_gradient_divide_factor(1.0)
    backward(me, model)
    return scaled(me, model, float(me.world_size), in_blocks=1.0)


def by_sums_alone(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    everywhere(model, "set_force_sum_reduction_for_comms", True)
    backward(me, model)
    return scaled(me, model, 1.0)


def by_sums_divided(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    everywhere(model, "set_force_sum_reduction_for_comms", True)
    everywhere(model, "set_gradient_divide_factor", 1.0)
    backward(me, model)
    return scaled(me, model, float(me.world_size))


# Hooks


def hooked(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    numels = []

    def double(reduced: Tensor) -> None:
        numels.append(reduced.numel())
        reduced.mul_(2)

    everywhere(model, "set_all_reduce_hook", double)
    backward(me, model)
    bare: Any = NET.make()
    blocks = [row_numel(block.parameters(), me.world_size) for block in bare.blocks]
    root = row_numel(bare.parameters(), me.world_size) - sum(blocks)
    return unlike("hook's tensors", numels, [*blocks[::-1], root]) + scaled(me, model, 2.0)


def hooked_each_time(me: Me) -> list[str]:
    """A hook leaves the gradient where it is, so that the next backward adds to it."""
    model = sharded(me, Recipe())
    runs: list[int] = []
    for index, param in enumerate(model.parameters()):
        param.register_post_accumulate_grad_hook(lambda _, index=index: runs.append(index))
    for number in (0, 1):
        backward(me, model, number)
    indices = list(range(len(list(model.parameters()))))
    return unlike("parameters of which a hook ran", sorted(runs), sorted(indices * 2))


def recursed(me: Me) -> list[str]:
    """Which parameters are whole after a forward, and after a backward, that leave the root so."""
    model, whole = sharded(me, Recipe()), []
    model.set_reshard_after_forward(False, recurse=False)
    model.set_reshard_after_backward(False, recurse=False)
    loss = NET.loss(model, me.rank, 0, me.device)
    for run in (lambda: None, loss.backward):
        run()
        named = model.named_parameters()
        whole.append([n for n, p in named if not isinstance(p, DTensor) and "blocks" in n])
    return unlike("parameters of blocks that are whole", whole, [[], []])


def steps_in_backward(me: Me, recipe: Recipe) -> Run:
    model = sharded(me, recipe)
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    handles = [param.register_post_accumulate_grad_hook(step) for param in optimizers]
    try:
        return train(me, recipe, model)
    finally:
        for handle in handles:  # no collector sees that a hook holds its own parameter
            handle.remove()


class Gather:
    """An all-gather of one's own, which counts its calls."""

    calls: list[str]

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.calls.append("allocate")
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        self.calls.append("call")
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class Scatter(Gather):
    """A reduce-scatter of one's own."""

    def __call__(  # type: ignore[override]  # another operation has another signature
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.calls.append("call")
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def own_gather(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    calls: list[str] = []
    model.blocks[0].set_custom_all_gather(Gather(calls))
    backward(me, model)
    return unlike("calls", calls, ["allocate", "call"] * 2) + scaled(me, model, 1.0)


def own_scatter(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    calls: list[str] = []
    model.blocks[0].set_custom_reduce_scatter(Scatter(calls))
    backward(me, model)
    return unlike("calls", calls.count("call"), 1) + scaled(me, model, 1.0)


def own_group(me: Me) -> list[str]:
    model, log = logged(me, Recipe())
    model.set_separate_reduce_scatter_group()
    backward(me, model)
    scatters = [line for line in log.take() if line.startswith("scatter")]
    return unlike("reductions in the mesh's group", scatters, []) + scaled(me, model, 1.0)


def several_buffers(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    model.set_reduce_scatter_max_input_buffers(2)
    backward(me, model)
    return scaled(me, model, 1.0)


def memory_of_the_group(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    everywhere(model, "set_allocate_memory_from_process_group_for_comm", True)
    backward(me, model)
    return scaled(me, model, 1.0)


SETTINGS = rows(
    (
        chapter.must(
            "fully_shard/no-sync",
            "After set_requires_gradient_sync(False) a backward reduces nothing, and shards get no "
            "gradients.",
        ),
        reduces_nothing,
    ),
    (
        chapter.must(
            "fully_shard/sum-of-backwards",
            "The first synchronized backward reduces the sum of all gradients since the last one.",
        ),
        reduces_the_sum,
    ),
    (
        chapter.must(
            "fully_shard/state-dict-between-backwards",
            "A state dict that is taken while gradients accumulate does not change them.",
            source="derived; torch 2.13 docs, FSDPModule, set_requires_gradient_sync",
            rests_on="fully_shard/sum-of-backwards",
        ),
        saved_between,
    ),
    (
        chapter.must(
            "fully_shard/no-sync-of-one-unit",
            "With recurse=False, set_requires_gradient_sync is about the module's own unit alone.",
        ),
        not_below,
    ),
    (
        chapter.must(
            "fully_shard/not-the-last-backward",
            "Gradients are reduced and add up also in backwards that set_is_last_backward(False) "
            "precedes.",
        ),
        not_the_last,
    ),
    (
        chapter.must(
            "fully_shard/accumulation-without-gathers",
            "Accumulation with parameters that are kept after the backward gathers nothing in the "
            "next forward, and gives the same gradients.",
        ),
        kept_between,
    ),
    (
        chapter.must(
            "fully_shard/divide-factor",
            "set_gradient_divide_factor sets by what the sum of gradients is divided.",
        ),
        divided_by_three,
    ),
    (
        chapter.must(
            "fully_shard/divide-factor-of-one-unit",
            "set_gradient_divide_factor is about the module's own unit alone.",
            source="torch 2.13, FSDPModule.set_gradient_divide_factor",
            rests_on="fully_shard/divide-factor",
        ),
        divided_in_the_root_alone,
    ),
    (
        chapter.must(
            "fully_shard/sums-alone",
            "With set_force_sum_reduction_for_comms gradients are still averaged.",
        ),
        by_sums_alone,
    ),
    (
        chapter.must(
            "fully_shard/sums-with-a-factor",
            "set_gradient_divide_factor holds with set_force_sum_reduction_for_comms too: a factor "
            "of 1 leaves the sum.",
        ),
        by_sums_divided,
    ),
    (
        chapter.must(
            "fully_shard/all-reduce-hook",
            "The hook of set_all_reduce_hook gets each unit's reduced gradients, and what it "
            "leaves in them becomes the gradients.",
        ),
        hooked,
    ),
    (
        chapter.must(
            "fully_shard/hooks-of-each-backward",
            "Hooks on shards run in each backward, also if a gradient of an earlier one is there.",
            source="torch 2.13, foreach_reduce: post_accumulate_grad hooks",
        ),
        hooked_each_time,
    ),
    (
        chapter.must(
            "fully_shard/kept-of-one-unit",
            "With recurse=False, set_reshard_after_forward and set_reshard_after_backward are "
            "about the module's own unit alone.",
        ),
        recursed,
    ),
    (
        chapter.must(
            "fully_shard/own-all-gather",
            "What set_custom_all_gather is given allocates and issues the module's all-gathers.",
        ),
        own_gather,
    ),
    (
        chapter.must(
            "fully_shard/own-reduce-scatter",
            "What set_custom_reduce_scatter is given issues the module's reduce-scatters.",
        ),
        own_scatter,
    ),
    (
        chapter.must(
            "fully_shard/memory-of-the-group",
            "With memory allocated from the group gradients are the same.",
            needs=(*NEEDS, "feature:tensor_alloc"),
        ),
        memory_of_the_group,
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("fact", SETTINGS)
def test_settings(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


@chapter.must(
    "fully_shard/own-group-for-gradients",
    "After set_separate_reduce_scatter_group gradients are reduced in another group than "
    "parameters are gathered in.",
)
@world_sizes(2)
@needs_method("set_separate_reduce_scatter_group")
def test_a_group_for_gradients(ranks: Ranks) -> None:
    check_fact(ranks, own_group)


@chapter.must(
    "fully_shard/several-buffers",
    "With several inputs of reduce-scatters in memory at once, gradients are the same.",
)
@world_sizes(2)
@needs_method("set_reduce_scatter_max_input_buffers")
def test_several_buffers(ranks: Ranks) -> None:
    check_fact(ranks, several_buffers)


@chapter.must(
    "fully_shard/optimizer-in-backward",
    "Hooks on shards run when their gradient is there, so an optimizer can step in the backward.",
    source="torch 2.13, foreach_reduce: post_accumulate_grad hooks",
)
@world_sizes(2)
def test_an_optimizer_in_the_backward(ranks: Ranks) -> None:
    recipe = Recipe(optimizer="plain", steps=3)
    got = ranks.run(steps_in_backward, recipe)
    want = train_whole(recipe, ranks.world_size)
    no_grads = dict.fromkeys(want[0].params)
    check_runs(got, [replace(run, grads=no_grads) for run in want], recipe)


ACCUMULATED = rows(
    (
        chapter.must(
            "fully_shard/accumulation",
            "Steps of an optimizer after several backwards, the last of which is synchronized, are "
            "the bare module's.",
            rests_on="fully_shard/training",
        ),
        Recipe(backwards=(False, False, True)),
    ),
    (
        chapter.must(
            "fully_shard/accumulation-when-kept",
            "Accumulation with reshard_after_forward=False gives the bare module's steps.",
            rests_on="fully_shard/training",
        ),
        Recipe(backwards=(False, True), kwargs={"reshard_after_forward": False}),
    ),
    (
        chapter.must(
            "fully_shard/accumulation-of-a-list",
            "Accumulation in a unit of several modules gives the bare module's steps.",
            rests_on="fully_shard/training",
        ),
        Recipe(backwards=(False, True), units="list"),
    ),
)


@world_sizes(2, 3)
@pytest.mark.parametrize("recipe", ACCUMULATED)
def test_accumulation(ranks: Ranks, recipe: Recipe) -> None:
    check_training(ranks, recipe)
