"""Two ranks: shards that are written while a gathered copy of them may be in memory."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy, StateDictType

from impl.fsdp import FullyShardedDataParallel, collectives
from tests.impl.fsdp.models import (
    differences,
    full_params,
    loss_of,
    make_model,
    wrapped,
)
from tests.impl.fsdp.ranks import Ranks

FSDP = FullyShardedDataParallel
KINDS = [
    (strategy, orig)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    for orig in (False, True)
]
each_kind = pytest.mark.parametrize(("strategy", "orig"), KINDS)


def write(params: Iterable[Tensor], how: str) -> None:
    """Double `params`, in one of the ways that users do."""
    for param in params:
        if how == "data.copy_":
            param.data.copy_(param.data * 2)
        elif how == "data =":
            param.data = param.data * 2
        else:
            with torch.no_grad():
                param.mul_(2)


def run_written_between_evaluations(
    rank: int, world_size: int, strategy: ShardingStrategy, orig: bool
) -> None:
    for how in ("data.copy_", "data =", "in place"):
        if how == "data =" and not orig:
            continue  # replaces the flat parameter's shard, which would go unnoticed
        model, bare = wrapped(strategy, orig), make_model()
        write(bare.parameters(), how)
        with torch.no_grad():
            loss_of(model, rank, 0)
            write(model.parameters(), how)
            assert torch.equal(loss_of(model, rank, 0), loss_of(bare, rank, 0)), how
        assert differences(full_params(model), dict(bare.named_parameters())) == [], how


@each_kind
def test_what_is_written_between_evaluations_counts(
    two_ranks: Ranks, strategy: ShardingStrategy, orig: bool
) -> None:
    two_ranks.run(run_written_between_evaluations, strategy, orig)


def run_written_before_summoning(
    rank: int, world_size: int, strategy: ShardingStrategy, orig: bool
) -> None:
    """A forward with gradients keeps parameters; the shards are the truth all the same."""
    model, bare = wrapped(strategy, orig), make_model()
    write(bare.parameters(), "data.copy_")
    params = list(model.parameters())  # those that an optimizer has
    loss = loss_of(model, rank, 0)
    write(params, "data.copy_")
    with FSDP.summon_full_params(model):
        pass
    assert differences(full_params(model), dict(bare.named_parameters())) == []
    loss.backward()


@each_kind
def test_what_is_written_before_summoning_is_not_undone(
    two_ranks: Ranks, strategy: ShardingStrategy, orig: bool
) -> None:
    two_ranks.run(run_written_before_summoning, strategy, orig)


def run_assigned_state_dicts(
    rank: int, world_size: int, strategy: ShardingStrategy, orig: bool
) -> None:
    for kind in StateDictType:
        source, model = wrapped(strategy, orig), wrapped(strategy, orig)
        write(source.parameters(), "data.copy_")
        params = list(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ShardedTensor warns about its own internals
            for each in (source, model):
                FSDP.set_state_dict_type(each, kind)
            model.load_state_dict(copy.deepcopy(dict(source.state_dict())), assign=True)
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        assert torch.equal(loss_of(model, rank, 0), loss_of(source, rank, 0)), kind
        assert differences(full_params(source), full_params(model)) == [], kind


@each_kind
def test_state_dicts_that_are_assigned(
    two_ranks: Ranks, strategy: ShardingStrategy, orig: bool
) -> None:
    two_ranks.run(run_assigned_state_dicts, strategy, orig)


class Gathers:
    """How many all-gathers are issued inside the context."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Gathers:
        right = collectives.all_gather

        def counted(*args: Any) -> None:
            self.count += 1
            right(*args)

        self._patch = mock.patch.object(collectives, "all_gather", counted)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def run_steps_of_optimizers(
    rank: int, world_size: int, strategy: ShardingStrategy, orig: bool
) -> list[int]:
    """All-gathers of a forward after a step of another optimizer, and after one of the model's."""
    model = wrapped(strategy, orig)
    elsewhere = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    counts = []
    for optimizer in (elsewhere, torch.optim.SGD(model.parameters(), lr=0.1)):
        loss_of(model, rank, 0)
        if rank == 0 or optimizer is not elsewhere:
            optimizer.step()
        with Gathers() as gathers:
            loss_of(model, rank, 0)
        counts.append(gathers.count)
    return counts


@each_kind
def test_only_the_models_own_optimizer_makes_it_gather_again(
    two_ranks: Ranks, strategy: ShardingStrategy, orig: bool
) -> None:
    freed, all_units = 3 if strategy == ShardingStrategy.FULL_SHARD else 0, 4
    counts = two_ranks.run(run_steps_of_optimizers, strategy, orig)
    assert counts == [[freed, all_units]] * 2


def run_cleared_late(rank: int, world_size: int) -> None:
    """Gradients are cleared while the modules show plain tensors."""
    for set_to_none in (True, False):
        model = FSDP(
            nn.Linear(3, 2),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            use_orig_params=True,
        )
        x = torch.ones(2, 3)
        model(x).sum().backward()
        output = model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.zero_grad(set_to_none)
        output.sum().backward()
        for param in model.parameters():
            assert param.grad is None or torch.equal(param.grad, torch.full_like(param, 2.0))


def test_gradients_cleared_before_the_backward(two_ranks: Ranks) -> None:
    two_ranks.run(run_cleared_late)
