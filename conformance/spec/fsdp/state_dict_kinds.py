"""Kinds of FSDP state dicts, and helpers that save, load and compare optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    ShardedOptimStateDictConfig,
    StateDictType,
)

from conformance.spec.fsdp.training_runs import Recipe, check_tensors, step_whole

FULL = StateDictType.FULL_STATE_DICT
SHARDED = StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT
ON_DEVICE = FullOptimStateDictConfig(offload_to_cpu=False)
SHARDS = ShardedOptimStateDictConfig(offload_to_cpu=False)


def adam(**kwargs: Any) -> Recipe:
    return Recipe(optimizer="adam", steps=2, **kwargs)


def saved(model: Any, optimizer: torch.optim.Optimizer, kind: Any, config: Any) -> dict[str, Any]:
    """The optimizer state dict of one kind."""
    cls = type(model)
    with cls.state_dict_type(model, kind, None, config):
        state: dict[str, Any] = cls.optim_state_dict(model, optimizer)
    return state


def loadable(
    model: Any, optimizer: torch.optim.Optimizer, state: Any, kind: Any, config: Any
) -> dict[str, Any]:
    """What the optimizer can load of a state dict of one kind."""
    cls = type(model)
    with cls.state_dict_type(model, kind, None, config):
        turned: dict[str, Any] = cls.optim_state_dict_to_load(model, optimizer, state)
    return turned


def tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every entry of an optimizer state dict's state, as one flat mapping, sorted."""
    return {
        f"{name}.{key}": torch.as_tensor(value)
        for name, entries in sorted(state["state"].items())
        for key, value in sorted(entries.items())
    }


def bare_training(recipe: Recipe, world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The bare module and its optimizer after the recipe's steps."""
    model = recipe.net.make()
    optimizer = recipe.optimizer_of(model)
    for step in range(recipe.steps):
        step_whole(recipe, model, optimizer, world_size, step)
    return model, optimizer


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The bare module's optimizer state, under names."""
    state = optimizer.state
    named = {name: dict(state[p]) for name, p in model.named_parameters() if p in state}
    return tensors({"state": named})


def rows_of(state: Any) -> dict[str, Tensor]:
    """The rows that this rank holds of each sharded entry."""
    rows = {}
    for name, value in state.items():
        if hasattr(value, "to_local"):
            rows[name] = value.to_local().clone()
        elif type(value) is not Tensor:
            shards = [shard.tensor for shard in value.local_shards()]
            rows[name] = torch.cat(shards) if shards else torch.empty(0)
    return rows


def check_rows(parts: list[dict[str, Tensor]], want: dict[str, Tensor], within: float) -> None:
    """The rows that ranks hold, one after the other, are the whole of each tensor."""
    for name, whole in want.items():
        rows = [mine[name] for mine in parts if mine[name].numel()]
        check_tensors([{name: torch.cat(rows)}], [{name: whole}], within)
