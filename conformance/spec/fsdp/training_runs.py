"""Trains under the target's FSDP, trains the bare module in one process, and compares them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy

from conformance import CheckFailed, Me, Ranks
from conformance.oracle.near import Near
from conformance.spec.fsdp.models import Block, Net
from conformance.spec.tolerance import assert_near

CPU = torch.device("cpu")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
HYBRIDS = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
both_kinds = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])  # use_orig_params
_POLICIES = {"root": None, "blocks": ModuleWrapPolicy({Block}), "every": always_wrap_policy}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model, how it is wrapped and how it is trained, as plain data.

    orig: use_orig_params.
    wrap: what becomes a unit: "root", "blocks" (and the root) or "every" module.
    micro_batches: backward passes before each step of the optimizer; with no_sync all but the last
        one are not synchronized.
    forwards: forward passes before each backward.
    kwargs: further arguments of the wrapper.
    """

    net: Net = field(default_factory=Net)
    strategy: str = "FULL_SHARD"
    orig: bool = False
    wrap: str = "blocks"
    optimizer: str = "sgd"
    steps: int = 3
    micro_batches: int = 1
    no_sync: bool = False
    forwards: int = 1
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def wrapped(self, me: Me, cls: Any = None, seed: int = 0, **kwargs: Any) -> Any:
        """The network under the target's FSDP, or under `cls`."""
        return self.around(me, self.net.make(seed), cls, **kwargs)

    def around(self, me: Me, network: nn.Module, cls: Any = None, **kwargs: Any) -> Any:
        """A network that the case has made itself, wrapped in the same way."""
        return wrap(
            me,
            network,
            cls,
            sharding_strategy=ShardingStrategy[self.strategy],
            use_orig_params=self.orig,
            auto_wrap_policy=self.policy,
            **{**self.kwargs, **kwargs},
        )

    @property
    def policy(self) -> Any:
        """Which modules are wrapped, as FSDP takes it."""
        return _POLICIES[self.wrap]

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(model.parameters(), lr=0.02)
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def numbers(self, step: int) -> list[list[int]]:
        """Numbers of the batches of a step: of each backward, one for each of its forwards."""
        each = range(self.forwards)
        return [[100 * step + 10 * micro + k for k in each] for micro in range(self.micro_batches)]


def wrap(me: Me, module: nn.Module, cls: Any = None, **kwargs: Any) -> Any:
    """The module under the target's FSDP, or under `cls`, on this rank's device."""
    if cls is None:
        return me.fsdp(module, **kwargs)
    return cls(module, **{"device_id": me.device, **kwargs})


def inner_unit(me: Me) -> Any:
    """One below the root, of a model that has run forward and backward."""
    model = Recipe().wrapped(me)
    Net().loss(model, me.rank, 0, me.device).backward()
    return type(model).fsdp_modules(model)[1]


def both(me: Me) -> tuple[Any, Any]:
    """The target's FSDP class (None stands for it) and torch's."""
    return None, TorchFSDP


@dataclass(frozen=True, slots=True)
class Run:
    """What training gave on one rank: losses of all forwards, then parameters in full."""

    losses: list[Tensor]
    params: dict[str, Tensor]


def train_step(
    me: Me, recipe: Recipe, model: Any, optimizer: torch.optim.Optimizer, step: int
) -> list[Tensor]:
    """One step of the optimizer; the losses of its forwards."""
    losses = []
    for micro, numbers in enumerate(recipe.numbers(step)):
        waits = recipe.no_sync and micro < recipe.micro_batches - 1
        with model.no_sync() if waits else contextlib.nullcontext():
            ours = [recipe.net.loss(model, me.rank, number, me.device) for number in numbers]
            torch.stack(ours).sum().backward()
        losses += [loss.detach() for loss in ours]
    optimizer.step()
    optimizer.zero_grad()
    return losses


def train(me: Me, recipe: Recipe, **kwargs: Any) -> Run:
    """All steps of the recipe on this rank."""
    model = recipe.wrapped(me, **kwargs)
    optimizer = recipe.optimizer_of(model)
    losses = [
        loss
        for step in range(recipe.steps)
        for loss in train_step(me, recipe, model, optimizer, step)
    ]
    return Run(losses, full_parameters(model))


def trained(me: Me, recipe: Recipe, cls: Any = None, seed: int = 0, **kwargs: Any) -> Any:
    """A model after the recipe's steps, and its optimizer."""
    model = recipe.wrapped(me, cls, seed, **kwargs)
    optimizer = recipe.optimizer_of(model)
    for step in range(recipe.steps):
        train_step(me, recipe, model, optimizer, step)
    return model, optimizer


def full_parameters(model: Any) -> dict[str, Tensor]:
    """Copies of all parameters in full, by the names that the bare module has for them."""
    with type(model).summon_full_params(model, writeback=False):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def step_whole(
    recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, world_size: int, step: int
) -> list[list[Tensor]]:
    """The same step of the bare module, on the mean of all ranks' losses: [rank][forward]."""
    losses: list[list[Tensor]] = [[] for _ in range(world_size)]
    for numbers in recipe.numbers(step):
        for rank, mine in enumerate(losses):
            ours = [recipe.net.loss(model, rank, number, CPU) for number in numbers]
            (torch.stack(ours).sum() / world_size).backward()
            mine += [loss.detach() for loss in ours]
    optimizer.step()
    optimizer.zero_grad()
    return losses


def train_whole(recipe: Recipe, world_size: int) -> list[Run]:
    """What every rank's training should give: the bare module's, in this process."""
    model = recipe.net.make()
    optimizer = recipe.optimizer_of(model)
    losses: list[list[Tensor]] = [[] for _ in range(world_size)]
    for step in range(recipe.steps):
        for mine, more in zip(
            losses, step_whole(recipe, model, optimizer, world_size, step), strict=True
        ):
            mine += more
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    return [Run(mine, params) for mine in losses]


def mean_gradients(net: Net, world_size: int) -> dict[str, Tensor]:
    """Of the mean of all ranks' losses, for the bare module."""
    bare = net.make()
    for rank in range(world_size):
        (net.loss(bare, rank, 0, CPU) / world_size).backward()
    return {name: p.grad for name, p in bare.named_parameters() if p.grad is not None}


def check_training(ranks: Ranks, recipe: Recipe, within: float = 1e-9) -> None:
    """Every rank has the losses and ends with the parameters of the bare module's training."""
    check_runs(ranks.run(train, recipe), train_whole(recipe, ranks.world_size), within)


def check_runs(got: Sequence[Run], want: Sequence[Run], within: float = 1e-9) -> None:
    """Each rank's run is as wanted, up to a share of the largest element of each tensor.

    A step may bring a parameter near zero: its rounding is that of the step, not of the result.
    The first loss depends on no gradient. Then come the parameters: a wrong gradient shows in its
    own parameter first, and by way of that in all later losses.
    """
    first, *later = range(len(want[0].losses))
    _check_loss(first, got, want, within)
    check_tensors([run.params for run in got], [run.params for run in want], within, least=1e-3)
    for index in later:
        _check_loss(index, got, want, within)


def _check_loss(index: int, got: Sequence[Run], want: Sequence[Run], within: float) -> None:
    wanted = [Near.relative(run.losses[index], within) for run in want]
    assert_near([run.losses[index] for run in got], wanted, f"loss of forward {index + 1}")


def check_tensors(
    got: Sequence[Mapping[str, Tensor]],
    want: Sequence[Mapping[str, Tensor]],
    within: float = 1e-9,
    least: float = 0.0,
) -> None:
    """Each rank has the wanted tensors, by name and in the wanted order.

    within, least: as of `Near.relative`.
    """
    for rank, (mine, wanted) in enumerate(zip(got, want, strict=True)):
        if list(mine) != list(wanted):
            raise CheckFailed(f"got {list(mine)}, want {list(wanted)}", rank)
    for name in want[0]:
        near = [Near.relative(wanted[name], within, least=least) for wanted in want]
        assert_near([mine[name] for mine in got], near, name)


def halves(me: Me) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """For hybrid sharding of four ranks: neighbours share a flat parameter, (0, 2) and (1, 3) have
    the same shard."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return inside[me.rank // 2], between[me.rank % 2]


def train_in_halves(me: Me, recipe: Recipe) -> Run:
    """The recipe with hybrid sharding of four ranks, two by two."""
    return train(me, recipe, process_group=halves(me))
