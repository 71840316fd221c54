"""Two ranks: passes that follow one another in unusual ways, and passes that fail."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

from impl.fsdp import FullyShardedDataParallel
from tests.impl.fsdp.models import (
    differences,
    full_params,
    loss_of,
    make_model,
    sgd,
    wrapped,
)
from tests.impl.fsdp.ranks import Ranks

FSDP = FullyShardedDataParallel
STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
KINDS = list(itertools.product(STRATEGIES, (False, True)))


# Several backwards


def first_then_second(losses: list[Tensor]) -> None:
    losses[0].backward()
    losses[1].backward()


def second_then_first(losses: list[Tensor]) -> None:
    losses[1].backward()
    losses[0].backward()


def first_twice(losses: list[Tensor]) -> None:
    losses[0].backward(retain_graph=True)
    losses[0].backward()


ORDERS: list[Callable[[list[Tensor]], None]] = [first_then_second, second_then_first, first_twice]


def run_several_backwards(rank: int, world_size: int) -> None:
    for (strategy, orig), backwards in itertools.product(KINDS, ORDERS):
        model, bare = wrapped(strategy, orig), make_model()
        optimizers = sgd(model), sgd(bare)
        for step in range(2):
            backwards([loss_of(model, rank, 2 * step + i) for i in range(2)])
            for other in range(2):
                backwards([loss_of(bare, other, 2 * step + i) / 2 for i in range(2)])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, param in full_params(model).items():
            expected = bare.get_parameter(name)
            assert torch.allclose(param, expected, atol=1e-6), (strategy, orig, backwards, name)
        assert not any(
            unit._handle.points_to_unsharded for unit in FSDP.fsdp_modules(model) if unit._handle
        )


def test_several_backwards_in_an_iteration(two_ranks: Ranks) -> None:
    two_ranks.run(run_several_backwards)


def run_several_backwards_in_other_settings(rank: int, world_size: int) -> None:
    """The same gradients as from passes that alternate."""
    settings: list[dict[str, Any]] = [
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
        {"cpu_offload": CPUOffload(offload_params=True)},
    ]
    for (strategy, orig), kwargs in itertools.product(KINDS, settings):
        models = [wrapped(strategy, orig, **kwargs) for _ in range(2)]
        first_then_second([loss_of(models[0], rank, i) for i in range(2)])
        for i in range(2):
            loss_of(models[1], rank, i).backward()
        for model in models:
            sgd(model).step()
        found = differences(full_params(models[0]), full_params(models[1]))
        assert found == [], (strategy, orig, kwargs)


def test_several_backwards_in_low_precision_and_offloaded(two_ranks: Ranks) -> None:
    two_ranks.run(run_several_backwards_in_other_settings)


def run_several_backwards_without_synchronizing(rank: int, world_size: int) -> None:
    for strategy, orig in KINDS:
        models = [wrapped(strategy, orig) for _ in range(2)]
        with models[0].no_sync():
            first_then_second([loss_of(models[0], rank, i) for i in range(2)])
        with models[1].no_sync():
            for i in range(2):
                loss_of(models[1], rank, i).backward()
        for model in models:
            loss_of(model, rank, 2).backward()
            sgd(model).step()
        found = differences(full_params(models[0]), full_params(models[1]))
        assert found == [], (strategy, orig)


def test_several_backwards_under_no_sync(two_ranks: Ranks) -> None:
    two_ranks.run(run_several_backwards_without_synchronizing)


# Errors


class _Failing(torch.autograd.Function):
    """Does nothing forward, and raises backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("not today")


def fail_in_the_backward(model: nn.Module, rank: int) -> None:
    """A pass whose backward raises when the last block's gradient is there."""
    fail: Any = _Failing.apply
    block = model.get_submodule("_fsdp_wrapped_module.blocks.1")
    hook = block.register_forward_hook(lambda _module, _args, out: fail(out))
    loss = loss_of(model, rank, 7)
    hook.remove()
    with pytest.raises(KeyError, match="not today"):
        loss.backward()


def run_backward_that_raises(rank: int, world_size: int) -> None:
    for (strategy, orig), accumulates in itertools.product(KINDS, (False, True)):
        model, undisturbed = (wrapped(strategy, orig) for _ in range(2))
        before = full_params(model)
        for _ in range(2):
            if accumulates:  # earlier gradients are dropped with those that were added to them
                loss_of(model, rank, 5).backward()
            fail_in_the_backward(model, rank)
        assert differences(before, full_params(model)) == []
        for step in range(2):
            for other in (model, undisturbed):
                optimizer = sgd(other)
                loss_of(other, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        found = differences(full_params(undisturbed), full_params(model))
        assert found == [], (strategy, orig, accumulates)


def test_a_backward_that_raises_leaves_the_module_usable(two_ranks: Ranks) -> None:
    two_ranks.run(run_backward_that_raises)


def run_gradients_after_a_failed_backward(rank: int, world_size: int) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)},
        {"cpu_offload": CPUOffload(offload_params=True)},
    ]
    for (strategy, orig), kwargs in itertools.product(KINDS, settings):
        if strategy == ShardingStrategy.NO_SHARD:
            continue
        model = wrapped(strategy, orig, **kwargs)
        fail_in_the_backward(model, rank)
        # What was being reduced is not complete: an optimizer must not find it.
        shown = [param for param in model.parameters() if param.is_leaf]
        assert all(param.grad is None for param in shown), (strategy, orig, kwargs)


def test_a_failed_backward_shows_no_unfinished_gradients(two_ranks: Ranks) -> None:
    two_ranks.run(run_gradients_after_a_failed_backward)


def run_uses_after_a_failed_backward(rank: int, world_size: int) -> None:
    expected = make_model()
    for strategy, orig in KINDS:
        uses: list[Callable[[Any], Any]] = [
            lambda model: model.state_dict(),
            lambda model: model.load_state_dict(copy.deepcopy(expected.state_dict())),
            lambda model: model.apply(lambda module: None),
            lambda model: model.no_sync().__enter__(),
            full_params,
        ]
        for use in uses:
            model = wrapped(strategy, orig)
            fail_in_the_backward(model, rank)
            use(model)
            assert all(param.grad is None for param in model.parameters())
            assert differences(dict(expected.named_parameters()), full_params(model)) == []


def test_after_a_failed_backward_everything_else_works_too(two_ranks: Ranks) -> None:
    two_ranks.run(run_uses_after_a_failed_backward)


class _Skipping(nn.Module):
    """Its second layer runs only while nothing is to be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(4, 4)
        self.second: nn.Module = nn.Linear(4, 1 << 16)
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        return out if self.skips else self.second(out)


def run_prefetched_and_skipped(rank: int, world_size: int) -> None:
    module = _Skipping()
    for param in module.parameters():
        nn.init.constant_(param, 0.5)
    strategy = ShardingStrategy.SHARD_GRAD_OP
    kwargs: dict[str, Any] = {"sharding_strategy": strategy, "device_id": torch.device("cpu")}
    module.first, module.second = (
        FSDP(layer, forward_prefetch=True, **kwargs) for layer in (module.first, module.second)
    )
    model = FSDP(module, forward_prefetch=True, **kwargs)
    model(torch.ones(1, 4)).sum().backward()  # tells the order
    module.skips = True
    for _ in range(5):
        out = model(torch.ones(1, 4))
        assert all(bool((param == 0.5).all()) for param in model.parameters())
        out.sum().backward()


def test_what_was_prefetched_and_skipped_is_complete(two_ranks: Ranks) -> None:
    two_ranks.run(run_prefetched_and_skipped)


def run_forward_that_raises_after_prefetching(rank: int, world_size: int) -> None:
    for strategy, orig in KINDS:
        model = wrapped(strategy, orig, forward_prefetch=True)
        loss_of(model, rank, 0).backward()  # tells the order
        handles = [unit._handle for unit in FSDP.fsdp_modules(model) if unit._handle is not None]
        hook = model.blocks[0].module.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, rank, 1)
        hook.remove()
        assert not any(handle.points_to_unsharded or handle.is_prefetched for handle in handles)
        if strategy != ShardingStrategy.NO_SHARD:
            assert not any(handle.holds_unsharded for handle in handles)
        for param in model.parameters():
            assert isinstance(param, nn.Parameter)
        loss_of(model, rank, 1).backward()


def test_a_forward_that_raises_frees_what_was_gathered_early(two_ranks: Ranks) -> None:
    two_ranks.run(run_forward_that_raises_after_prefetching)


def run_forward_while_summoned(rank: int, world_size: int) -> None:
    for strategy, orig in KINDS:
        model = wrapped(strategy, orig)
        before, expected = full_params(model), loss_of(model, rank, 0)
        for writeback in (True, False):
            works = strategy == ShardingStrategy.NO_SHARD or (orig and not writeback)
            with (
                contextlib.nullcontext()
                if works
                else pytest.raises(AssertionError, match="forward while"),
                FSDP.summon_full_params(model, writeback=writeback),
            ):
                assert torch.equal(loss_of(model, rank, 0), expected)
            assert differences(before, full_params(model)) == []
        loss_of(model, rank, 0).backward()


def test_a_forward_while_parameters_are_summoned(two_ranks: Ranks) -> None:
    """It must not leave shards where the end of the context writes full parameters back."""
    two_ranks.run(run_forward_while_summoned)
