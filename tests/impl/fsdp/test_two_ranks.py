"""Two ranks: what must hold although torch does otherwise, full gradients, offloading."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

import impl.gloo  # noqa: F401  # registers pygloo
from impl.fsdp import FullyShardedDataParallel
from impl.transport.shm import arena
from tests.impl.fsdp.models import (
    BLOCK_POLICY,
    differences,
    full_params,
    loss_of,
    make_model,
    sgd,
    train_step,
)
from tests.impl.fsdp.ranks import Ranks

FSDP = FullyShardedDataParallel
FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
KINDS = [(strategy, orig) for strategy in (FULL, GRAD_OP) for orig in (False, True)]
LOW = MixedPrecision(param_dtype=torch.bfloat16)


def each_kind(check: Callable[..., None], rank: int) -> None:
    for strategy, use_orig_params in KINDS:
        torch.manual_seed(0)
        check(rank, {"sharding_strategy": strategy, "use_orig_params": use_orig_params})


# What torch 2.13 gets wrong


def check_step_after_eval(rank: int, settings: dict[str, Any]) -> None:
    """The parameters of a no-grad forward, still in memory, are not used after a step."""
    for write in ("step", "copy"):
        model = FSDP(nn.Linear(3, 2), **settings)
        optimizer = sgd(model)
        x = torch.ones(2, 3)
        model(x).sum().backward()
        with torch.no_grad():
            before = model(x)
            if write == "step":
                optimizer.step()
            else:
                for param in model.parameters():
                    param.sub_(0.5)
            after = model(x)
        assert not torch.equal(before, after)
        params = full_params(model)
        assert torch.equal(after, nn.functional.linear(x, params["weight"], params["bias"]))


def test_a_step_after_a_no_grad_forward_counts(two_ranks: Ranks) -> None:
    two_ranks.run(run_step_after_eval)


def run_step_after_eval(rank: int, world_size: int) -> None:
    each_kind(check_step_after_eval, rank)


def run_eval_in_full_precision(rank: int, world_size: int) -> None:
    with mock.patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}):
        model = FSDP(nn.Linear(3, 2), mixed_precision=LOW)
        optimizer = sgd(model)
        outputs = []
        for _ in range(2):
            model.eval()
            with torch.no_grad():
                outputs.append(model(torch.ones(2, 3)))
            model.train()
            model(torch.ones(2, 3)).float().sum().backward()
            optimizer.step()
        assert outputs[0].dtype == torch.float32
        assert not torch.equal(outputs[0], outputs[1])


def test_eval_in_full_precision_sees_every_step(two_ranks: Ranks) -> None:
    two_ranks.run(run_eval_in_full_precision)


def check_dropped_forward(rank: int, settings: dict[str, Any]) -> None:
    """A forward without a backward must not cost the next backward its reduction."""
    models = [FSDP(make_model(), mixed_precision=LOW, **settings) for _ in range(2)]
    optimizers = [sgd(model) for model in models]
    for step in range(2):
        loss_of(models[1], rank, 9)
        for model, optimizer in zip(models, optimizers, strict=True):
            train_step(model, optimizer, rank, step)
    assert differences(full_params(models[0]), full_params(models[1])) == []


def run_dropped_forward(rank: int, world_size: int) -> None:
    each_kind(check_dropped_forward, rank)


def test_a_forward_whose_result_is_dropped(two_ranks: Ranks) -> None:
    two_ranks.run(run_dropped_forward)


class Branches(nn.Module):
    """Two units of which the loss may leave one out."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.used = FSDP(nn.Linear(3, 3), **settings)
        self.optional = FSDP(nn.Linear(3, 3), **settings)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.optional(x)


def check_no_sync_then_unused(rank: int, settings: dict[str, Any]) -> None:
    """What `no_sync()` accumulated is reduced by the next synchronizing backward, used or not."""
    branches = Branches(**settings)
    model = FSDP(branches, **settings)
    x = torch.ones(1, 3) * (rank + 1)
    with model.no_sync():
        used, optional = model(x)
        (used.sum() + optional.sum()).backward()
    used, optional = model(x)
    used.sum().backward()
    weight_grads = [
        unit._handle.flat_param.grad for unit in (branches.used, branches.optional) if unit._handle
    ]
    assert all(grad is not None for grad in weight_grads)
    mean = 1.5
    gathered = [torch.zeros(6) for _ in range(2)]
    assert weight_grads[1] is not None
    dist.all_gather(gathered, weight_grads[1][:6])
    assert gathered[0].tolist() == [mean] * 6


def run_no_sync_then_unused(rank: int, world_size: int) -> None:
    each_kind(check_no_sync_then_unused, rank)


def test_accumulated_gradients_of_a_unit_that_is_then_unused(two_ranks: Ranks) -> None:
    two_ranks.run(run_no_sync_then_unused)


def channels_last_convolution() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Conv2d(3, 4, 2)
    module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
    return module


def run_channels_last(rank: int, world_size: int) -> None:
    """Gradients and optimizer state of parameters in another memory order."""
    x = torch.arange(96.0).reshape(2, 3, 4, 4) * 0.01
    for strategy in (FULL, ShardingStrategy.NO_SHARD):
        bare, wrapped = (channels_last_convolution() for _ in range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NO_SHARD is deprecated
            model = FSDP(wrapped, sharding_strategy=strategy, use_orig_params=True)
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (bare, model)]
        for _ in range(3):
            for module, optimizer in zip((bare, model), optimizers, strict=True):
                module(x).pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            saved = FSDP.optim_state_dict(model, optimizers[1])
            FSDP.optim_state_dict_to_load(model, optimizers[1], saved, load_directly=True)
        full = full_params(model)
        assert all(torch.allclose(full[n], p) for n, p in bare.named_parameters())


def test_channels_last_parameters(two_ranks: Ranks) -> None:
    two_ranks.run(run_channels_last)


def run_loss_without_the_root(rank: int, world_size: int) -> None:
    """The root's outputs are not in the loss: the backward pass is finished nevertheless."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = FSDP(nn.Linear(3, 3))
            self.outer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.inner(x)
            out: Tensor = self.outer(x)
            return out

    keeps = Keeps()
    model = FSDP(keeps)
    for _ in range(2):
        model(torch.ones(1, 3))
        keeps.kept.sum().backward()
        handle = keeps.inner._handle
        assert handle is not None
        assert handle.flat_param.grad is not None
        assert not handle.holds_unsharded


def test_a_loss_that_the_root_does_not_produce(two_ranks: Ranks) -> None:
    two_ranks.run(run_loss_without_the_root)


def run_full_gradients(rank: int, world_size: int) -> None:
    bare = make_model()
    torch.stack([loss_of(bare, r, 0) / 2 for r in range(2)]).sum().backward()
    for strategy in (FULL, GRAD_OP):
        model = FSDP(
            make_model(),
            auto_wrap_policy=BLOCK_POLICY,
            sharding_strategy=strategy,
            use_orig_params=True,
        )
        loss_of(model, rank, 0).backward()
        with FSDP.summon_full_params(model, with_grads=True):
            for name, param in model.named_parameters():
                expected = bare.get_parameter(name).grad
                assert param.grad is not None
                assert expected is not None
                assert torch.allclose(param.grad, expected, atol=1e-6)
                param.grad.mul_(2)
        norm = model.clip_grad_norm_(1e9)
        expected_norm = nn.utils.clip_grad_norm_(bare.parameters(), 1e9) * 2
        assert torch.allclose(norm, expected_norm)
        loss_of(model, rank, 0).backward()
        model.zero_grad()
        with FSDP.summon_full_params(model, with_grads=True):
            assert all(param.grad is None for param in model.parameters())


def test_full_gradients(two_ranks: Ranks) -> None:
    two_ranks.run(run_full_gradients)


# Offloading, writeback, synchronization


def check_offload(rank: int, settings: dict[str, Any]) -> None:
    """The same as without, also for gradients that accumulate."""
    results = []
    for offload in (None, CPUOffload(offload_params=True)):
        torch.manual_seed(0)
        model = FSDP(make_model(), auto_wrap_policy=BLOCK_POLICY, cpu_offload=offload, **settings)
        optimizer = sgd(model)
        for step in range(2):
            loss_of(model, rank, step).backward()
            train_step(model, optimizer, rank, step + 10)
        results.append(full_params(model))
    assert differences(results[0], results[1]) == []


def run_offload(rank: int, world_size: int) -> None:
    each_kind(check_offload, rank)


def test_offloaded_parameters(two_ranks: Ranks) -> None:
    two_ranks.run(run_offload)


def run_writeback(rank: int, world_size: int) -> None:
    module = nn.Linear(4, 3)
    model = FSDP(module, use_orig_params=True)
    optimizer = sgd(model)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    for param in model.parameters():
        param.data = torch.full_like(param, 2.0)
        if param.grad is not None:
            param.grad = torch.full_like(param, 5.0)
    optimizer.step()
    assert model(x).detach().unique().tolist() == [7.5]
    for value in (1.0, 2.0):  # the second time without a step in between
        module.weight = nn.Parameter(torch.full_like(module.weight, value))
        assert model(x).detach().unique().tolist() == [4 * value + 1.5]
    if module.weight.numel():
        module.weight = nn.Parameter(torch.ones(99))
        with pytest.raises(RuntimeError, match="Cannot writeback when the parameter shape changes"):
            model(x)


def test_replaced_parameters_are_written_back(two_ranks: Ranks) -> None:
    two_ranks.run(run_writeback)


def run_change_between_passes(rank: int, world_size: int) -> None:
    model = FSDP(nn.Linear(4, 3), use_orig_params=True, sharding_strategy=GRAD_OP)
    out = model(torch.ones(2, 4)).sum()
    model.module.weight = nn.Parameter(torch.ones(3, 4))
    with pytest.raises(
        AssertionError, match="changing the parameters between forward and backward"
    ):
        out.backward()


def test_parameters_replaced_between_forward_and_backward(two_ranks: Ranks) -> None:
    two_ranks.run(run_change_between_passes)


# With memory from the group


def trained_on_pygloo(rank: int, world_size: int, limit: str, orig: bool) -> tuple[Any, ...]:
    """Whether the shards are registered, and the parameters after some steps."""
    with mock.patch.dict(os.environ, {arena.LIMIT_VARIABLE: limit}):
        group = dist.new_group(backend="pygloo")
        torch.manual_seed(0)
        # one unit needs padding, and all of them go past one segment
        module = nn.Sequential(nn.Linear(700, 901), nn.Linear(901, 700))
        model = FSDP(module, process_group=group, use_orig_params=orig)
        mine, first = arena.current(), max(model.parameters(), key=lambda param: param.numel())
        registered = mine is not None and mine.offset_of(first.data_ptr(), first.nbytes) > 0
        optimizer = sgd(model)
        for number in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 700), 1.0 + rank + number)).mean().backward()
            optimizer.step()
        trained = [param.detach().clone() for param in model.parameters()]
        del model, first, optimizer
        dist.destroy_process_group(group)
    return registered, trained


@pytest.mark.parametrize("orig", [False, True])
def test_shards_lie_in_memory_of_the_group(two_ranks: Ranks, orig: bool) -> None:
    in_arena = two_ranks.run(trained_on_pygloo, "", orig)
    ordinary = two_ranks.run(trained_on_pygloo, "0", orig)
    for (registered, params), (unregistered, others) in zip(in_arena, ordinary, strict=True):
        assert registered
        assert not unregistered
        assert all(torch.equal(one, other) for one, other in zip(params, others, strict=True))
