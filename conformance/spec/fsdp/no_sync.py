"""FSDP's no_sync and gradients that accumulate, with every strategy and kind of parameters."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, world_sizes
from conformance.spec.fsdp.custom import inputs, linear, train_custom, train_custom_whole
from conformance.spec.fsdp.small_models import branches, one_pass
from conformance.spec.fsdp.small_models import two_layers as two_units
from conformance.spec.fsdp.training_runs import (
    CPU,
    HYBRIDS,
    STRATEGIES,
    Recipe,
    both_kinds,
    check_runs,
    check_tensors,
    check_training,
    full_parameters,
    inner_unit,
    train_in_halves,
    train_whole,
    wrap,
)
from conformance.spec.raising import assert_raised

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


def no_sync_inner(me: Me) -> None:
    with inner_unit(me).no_sync():
        pass


@chapter.must(
    "fsdp/no-sync-of-inner-unit",
    "no_sync on an inner instance raises RuntimeError '`no_sync()` on inner FSDP instances is "
    "not supported'.",
    source="torch 2.13, no_sync",
)
@world_sizes(2)
def test_no_sync_of_an_inner_unit(ranks: Ranks) -> None:
    words = r"`no_sync\(\)` on inner FSDP instances is not supported"
    assert_raised(ranks.outcomes(no_sync_inner), RuntimeError, match=words)


@chapter.must(
    "fsdp/no-sync",
    "Gradients that accumulate under no_sync, and those of the synchronized backward after it, "
    "add up to the mean over all ranks, with every strategy.",
    source=f"{DOCS}, no_sync",
)
@world_sizes(2, 3)
def test_accumulating_without_synchronizing(ranks: Ranks) -> None:
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(strategy=strategy, micro_batches=3, no_sync=True))


@chapter.must(
    "fsdp/no-sync-original-parameters",
    "With use_orig_params=True, no_sync accumulates as well, and the optimizer finds gradients "
    "of its parameters' shapes.",
    source="pytorch#90546 and pytorch#100180",
)
@world_sizes(2, 3)
def test_accumulating_original_parameters(ranks: Ranks) -> None:
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(strategy=strategy, orig=True, micro_batches=3, no_sync=True))


@chapter.must(
    "fsdp/no-sync-hybrid",
    "With hybrid sharding, the gradients that several backwards accumulate, under no_sync or "
    "not, are averaged over the replicas too.",
    source="derived: each microbatch has to get into the all-reduce",
)
@world_sizes(4)
@pytest.mark.parametrize("no_sync", [False, True], ids=["synchronized", "no_sync"])
def test_accumulating_in_replicas(ranks: Ranks, no_sync: bool) -> None:
    for strategy in HYBRIDS:
        recipe = Recipe(strategy=strategy, micro_batches=2, no_sync=no_sync, steps=2)
        check_runs(ranks.run(train_in_halves, recipe), train_whole(recipe, 4))


def middle_one_waits(
    model: Any, rank: int, step: int, device: torch.device, scale: float
) -> list[Tensor]:
    """Three passes, of which the second one is under no_sync if the model has that."""
    waits = getattr(model, "no_sync", contextlib.nullcontext)
    losses = []
    for i, context in enumerate((contextlib.nullcontext, waits, contextlib.nullcontext)):
        with context():
            losses += one_pass(model, rank, 3 * step + i, device, scale)
    return losses


@chapter.must(
    "fsdp/no-sync-after-a-reduction",
    "A backward under no_sync keeps the gradients that an earlier synchronized one has reduced: "
    "after the next synchronized one, those of all three add up to the mean over all ranks.",
    source=f"derived; {DOCS}, no_sync: it accumulates",
    rests_on=("fsdp/no-sync", "fsdp/no-sync-original-parameters"),
)
@world_sizes(2)
@both_kinds
def test_no_sync_after_a_reduction(ranks: Ranks, orig: bool) -> None:
    want = train_custom_whole(two_units, middle_one_waits, ranks.world_size)
    for strategy in STRATEGIES:
        check_runs(ranks.run(train_custom, two_units, middle_one_waits, strategy, orig), want)


def looked_at_while_waiting(
    model: Any, rank: int, step: int, device: torch.device, scale: float
) -> list[Tensor]:
    """Two passes, of which the first one is under no_sync; full parameters between them."""
    is_sharded = hasattr(model, "no_sync")
    with model.no_sync() if is_sharded else contextlib.nullcontext():
        losses = one_pass(model, rank, 2 * step, device, scale)
    if is_sharded:
        full_parameters(model)
    return losses + one_pass(model, rank, 2 * step + 1, device, scale)


@chapter.must(
    "fsdp/no-sync-and-full-parameters",
    "summon_full_params leaves the gradients that were accumulated under no_sync: after the next "
    "synchronized backward they are in the mean over all ranks.",
    source=f"derived; {DOCS}, no_sync and summon_full_params",
    rests_on=("fsdp/no-sync", "fsdp/no-sync-original-parameters"),
)
@world_sizes(2)
@both_kinds
def test_full_parameters_between_accumulating_passes(ranks: Ranks, orig: bool) -> None:
    want = train_custom_whole(two_units, looked_at_while_waiting, ranks.world_size)
    for strategy in STRATEGIES:
        got = ranks.run(train_custom, two_units, looked_at_while_waiting, strategy, orig)
        check_runs(got, want)


def accumulate_then_leave_out(me: Me, orig: bool) -> dict[str, Tensor]:
    """Parameters after a step of SGD on what no_sync accumulated, and one branch once more."""

    def unit(module: nn.Module) -> Any:
        return wrap(me, module, use_orig_params=orig)

    model = branches(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate(model, me.rank, me.device, 1.0, model.no_sync)
    optimizer.step()
    return full_parameters(model)


def accumulate(model: Any, rank: int, device: torch.device, scale: float, waits: Any) -> None:
    with waits():
        used, optional = model(inputs(rank, 0).to(device))
        (scale * (used.pow(2).sum() + optional.pow(2).sum())).backward()
    used, _ = model(inputs(rank, 1).to(device))
    (scale * used.pow(2).sum()).backward()


@chapter.must(
    "fsdp/no-sync-then-unused",
    "The gradients that a unit accumulated under no_sync are reduced by the next synchronized "
    "backward, even if that backward does not reach the unit.",
    source="derived; torch 2.13 raises",
)
@world_sizes(2)
@both_kinds
def test_accumulating_and_then_not_used(ranks: Ranks, orig: bool) -> None:
    bare = branches(lambda module: module)
    for rank in range(ranks.world_size):
        accumulate(bare, rank, CPU, 1 / ranks.world_size, contextlib.nullcontext)
    torch.optim.SGD(bare.parameters(), lr=0.1).step()
    want = {name: param.detach() for name, param in bare.named_parameters()}
    check_tensors(ranks.run(accumulate_then_leave_out, orig), [want] * ranks.world_size)


def two_layers() -> nn.Sequential:
    return nn.Sequential(linear(3, 3, 1), linear(3, 2, 2))


def loss_of_layers(model: nn.Module, rank: int, device: torch.device) -> Tensor:
    output: Tensor = model(inputs(rank, 0).to(device))
    return output.pow(2).sum()


def accumulate_after_thawing(me: Me, strategy: str) -> dict[str, Tensor]:
    """Parameters after a step of SGD on two backwards, the first one under no_sync.

    One before them had the first layer frozen; its gradients were seen and dropped.
    """
    layers = two_layers()
    model = wrap(me, layers, use_orig_params=True, sharding_strategy=ShardingStrategy[strategy])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layers[0].requires_grad_(False)
    loss_of_layers(model, me.rank, me.device).backward()
    full_parameters(model)  # where the wrapper finds that the frozen layer has no gradient
    optimizer.zero_grad()
    layers[0].requires_grad_(True)
    with model.no_sync():
        loss_of_layers(model, me.rank, me.device).backward()
    loss_of_layers(model, me.rank, me.device).backward()
    optimizer.step()
    return full_parameters(model)


@chapter.must(
    "fsdp/no-sync-after-thawing",
    "A parameter that was frozen and is trained again keeps the gradients that it accumulates "
    "under no_sync.",
    source=f"derived; {DOCS}, no_sync and use_orig_params",
    rests_on=("fsdp/no-sync-original-parameters", "fsdp/freezing-and-thawing"),
)
@world_sizes(1, 2)
def test_accumulating_after_thawing(ranks: Ranks) -> None:
    bare = two_layers()
    for rank in range(ranks.world_size):
        (2 * loss_of_layers(bare, rank, CPU) / ranks.world_size).backward()
    torch.optim.SGD(bare.parameters(), lr=0.1).step()
    want = {name: param.detach() for name, param in bare.named_parameters()}
    for strategy in STRATEGIES:
        got = ranks.run(accumulate_after_thawing, strategy)
        check_tensors(got, [want] * ranks.world_size)


class Gain(nn.Module):
    """One element."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.gain * x).sum()


def accumulate_one_element(me: Me) -> float:
    """The gradient's sum over all ranks after two backwards."""
    model = wrap(me, Gain())
    for _ in range(2):
        model(torch.ones(1, device=me.device)).backward()
    total = torch.zeros(1, device=me.device)
    for param in model.parameters():
        if param.grad is not None and me.rank == 0:
            total += param.grad.sum()
    dist.all_reduce(total)
    return total.item()


@chapter.must(
    "fsdp/one-element-accumulates",
    "Gradients of a unit of one element accumulate like others, although its chunk has the size "
    "of the whole.",
    source="derived; torch 2.13 takes one for the other by the size",
)
@world_sizes(2, 3)
def test_one_element(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(accumulate_one_element), 2.0, what="gradient")
