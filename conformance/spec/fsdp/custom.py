"""Trains models that a case wraps in FSDP itself, and compares them with the bare module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from conformance import Me, Ranks
from conformance.oracle.data import seeded_generator
from conformance.spec.fsdp.training_runs import CPU, Run, check_runs, full_parameters, wrap

# Wraps a part of a model; for the bare module it hands the part back.
Unit = Callable[[nn.Module], Any]
Make = Callable[[Unit], Any]
# (model, rank, step, device, scale): forward and backward passes of one step. A gradient is that of
# `scale` times the losses, which are returned.
Passes = Callable[[Any, int, int, torch.device, float], list[Tensor]]


def linear(inputs: int, outputs: int, seed: int) -> nn.Linear:
    """A layer in float64 with the same parameters in every process."""
    with seeded_generator(seed):
        return nn.Linear(inputs, outputs).double()


def inputs(rank: int, step: int, width: int = 3, rows: int = 2) -> Tensor:
    """Differs between ranks and steps."""
    generator = torch.Generator().manual_seed(100 * step + rank + 1)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


def train_custom(
    me: Me,
    make: Make,
    passes: Passes,
    strategy: str = "FULL_SHARD",
    orig: bool = False,
    steps: int = 3,
    kwargs: Mapping[str, Any] | None = None,
) -> Run:
    """Steps of SGD on this rank; then parameters in full."""

    def unit(module: nn.Module) -> Any:
        return wrap(
            me,
            module,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=orig,
            **(kwargs or {}),
        )

    model = make(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        losses += [loss.detach() for loss in passes(model, me.rank, step, me.device, 1.0)]
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, full_parameters(model))


def train_custom_whole(make: Make, passes: Passes, world_size: int, steps: int = 3) -> list[Run]:
    """What every rank should get: the bare module on the mean of all ranks' losses."""
    model = make(lambda module: module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[list[Tensor]] = [[] for _ in range(world_size)]
    for step in range(steps):
        for rank, mine in enumerate(losses):
            mine += [loss.detach() for loss in passes(model, rank, step, CPU, 1 / world_size)]
        optimizer.step()
        optimizer.zero_grad()
    params = {name: param.detach() for name, param in model.named_parameters()}
    return [Run(mine, params) for mine in losses]


def check_custom(
    ranks: Ranks,
    make: Make,
    passes: Passes,
    strategy: str = "FULL_SHARD",
    orig: bool = False,
    steps: int = 3,
) -> None:
    """Every rank's training is like the bare module's."""
    got = ranks.run(train_custom, make, passes, strategy, orig, steps)
    check_runs(got, train_custom_whole(make, passes, ranks.world_size, steps))
