"""Trains under fully_shard, trains the bare module in one process, and compares them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from conformance import CheckFailed, Me, Ranks
from conformance.oracle.near import Near, epsilon
from conformance.spec.fsdp.models import Net
from conformance.spec.tolerance import assert_near

CPU = torch.device("cpu")
ROUNDINGS = 64  # how many may add up in one step


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model, how it is sharded and how it is trained, as plain data.

    units: to what fully_shard is applied: "root", "blocks" (and the root), "layers" (every module
        that has parameters of its own, and the root), "list" (all blocks in one call, and the
        root).
    replicas: how many copies there are of each shard.
    kwargs: further arguments of fully_shard.
    calls: methods of all sharded modules that are called before the training, with arguments.
    backwards: of each backward before a step of the optimizer, whether gradients are synchronized.
    forwards: forward passes before each backward.
    optimizer: "sgd" with momentum, "plain" without, or "adam".
    within: by how much values may differ, as a share of the largest element.
    """

    net: Net = field(default_factory=Net)
    units: str = "blocks"
    replicas: int = 1
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    calls: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    optimizer: str = "sgd"
    steps: int = 2
    backwards: tuple[bool, ...] = (True,)
    forwards: int = 1
    within: float = 1e-9

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(model.parameters(), lr=0.02)
        momentum = 0.0 if self.optimizer == "plain" else 0.9
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    def numbers(self, step: int) -> list[list[int]]:
        """Numbers of the batches of a step: of each backward, one for each of its forwards."""
        each, several = range(self.forwards), range(len(self.backwards))
        return [[100 * step + 10 * index + k for k in each] for index in several]


def mesh_of(me: Me, replicas: int = 1) -> DeviceMesh:
    """All ranks, in so many replicas: rows of the mesh, which are neighbours."""
    if replicas == 1:
        return init_device_mesh(me.device.type, (me.world_size,))
    shape = (replicas, me.world_size // replicas)
    return init_device_mesh(me.device.type, shape, mesh_dim_names=("replica", "shard"))


def mesh_over(me: Me, *groups: dist.ProcessGroup, sizes: tuple[int, ...] = ()) -> DeviceMesh:
    """A mesh of groups that exist: one that spans all ranks; or of replicas, then of shards, with
    the sizes of both."""
    kind = me.device.type
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], kind)
    ranks = torch.arange(me.world_size).view(sizes)
    names = ("replica", "shard")
    return DeviceMesh.from_group(list(groups), kind, mesh=ranks, mesh_dim_names=names)


def units_in(network: nn.Module, units: str) -> list[Any]:
    """To what fully_shard is applied before the root."""
    blocks: Any = network.blocks
    if units == "layers":
        modules = list(network.modules())[:0:-1]
        return [m for m in modules if any(True for _ in m.parameters(recurse=False))]
    return {"root": [], "blocks": list(blocks), "list": [list(blocks)]}[units]


def sharded(
    me: Me, recipe: Recipe, network: Any = None, mesh: DeviceMesh | None = None, shard: Any = None
) -> Any:
    """The network after the recipe's calls of fully_shard.

    network: by default that of the recipe. mesh: by default as the recipe says.
    shard: another fully_shard than the target's.
    """
    network = recipe.net.make(device=me.device) if network is None else network
    kwargs = {"mesh": mesh or mesh_of(me, recipe.replicas), **recipe.kwargs}
    for unit in units_in(network, recipe.units):
        (shard or me.fully_shard)(unit, **kwargs)
    model = (shard or me.fully_shard)(network, **kwargs)
    for method, args in recipe.calls:
        everywhere(model, method, *args)
    return model


def everywhere(model: nn.Module, method: str, *args: Any, **kwargs: Any) -> None:
    """Call a method of each sharded module."""
    for module in model.modules():
        if hasattr(module, method):
            getattr(module, method)(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Run:
    """What training gave on one rank: losses of all forwards; then what it has of the gradients of
    the last step and of the parameters, None for a gradient that is not there."""

    losses: list[Tensor]
    grads: dict[str, Tensor | None]
    params: dict[str, Tensor]


def local(tensor: Any) -> Tensor:
    """A copy of what this rank has of a tensor."""
    tensor = tensor.detach()
    mine: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return mine.clone()


def shards_of(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of each parameter."""
    return {name: local(param) for name, param in model.named_parameters()}


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """This rank's part of each gradient."""
    named = model.named_parameters()
    return {name: None if p.grad is None else local(p.grad) for name, p in named}


def backward_passes(me: Me, recipe: Recipe, model: Any, step: int) -> list[Tensor]:
    """The forwards and backwards of a step; the losses of the forwards."""
    losses = []
    for syncs, numbers in zip(recipe.backwards, recipe.numbers(step), strict=True):
        if len(set(recipe.backwards)) > 1:
            model.set_requires_gradient_sync(syncs)
        ours = [recipe.net.loss(model, me.rank, number, me.device) for number in numbers]
        torch.stack(ours).sum().backward()
        losses += [loss.detach() for loss in ours]
    return losses


def train(me: Me, recipe: Recipe, model: Any = None) -> Run:
    """All steps of the recipe on this rank."""
    model = sharded(me, recipe) if model is None else model
    optimizer = recipe.optimizer_of(model)
    losses, grads = [], {}
    for step in range(recipe.steps):
        losses += backward_passes(me, recipe, model, step)
        grads = gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, grads, shards_of(model))


def train_whole(recipe: Recipe, world_size: int, network: Any = None) -> list[Run]:
    """The same steps of the bare module in this process, on the mean of all ranks' losses: what
    each rank's forwards give, and gradients and parameters in full."""
    model = recipe.net.make() if network is None else network
    optimizer = recipe.optimizer_of(model)
    losses: list[list[Tensor]] = [[] for _ in range(world_size)]
    grads: dict[str, Tensor | None] = {}
    for step in range(recipe.steps):
        for numbers in recipe.numbers(step):
            for rank, mine in enumerate(losses):
                ours = [recipe.net.loss(model, rank, number, CPU) for number in numbers]
                (torch.stack(ours).sum() / world_size).backward()
                mine += [loss.detach() for loss in ours]
        named = model.named_parameters()
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in named}
        optimizer.step()
        optimizer.zero_grad()
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    return [Run(mine, grads, params) for mine in losses]


def part_of(whole: Tensor, count: int, index: int, dim: int = 0) -> Tensor:
    """What one of several ranks has of a tensor that is divided as `torch.chunk` does."""
    parts = whole.chunk(count, dim)
    return parts[index] if index < len(parts) else whole.narrow(dim, 0, 0)


def row_numel(params: Iterable[Tensor], count: int) -> int:
    """Elements of one rank's part of the all-gather of whole parameters: padded shards."""
    return sum(-(-len(p) // count) * p[:1].numel() for p in params)


def check_training(ranks: Ranks, recipe: Recipe) -> None:
    """Every rank has the losses of the bare module, and its part of gradients and parameters."""
    check_runs(ranks.run(train, recipe), train_whole(recipe, ranks.world_size), recipe)


def check_runs(got: Sequence[Run], want: Sequence[Run], recipe: Recipe) -> None:
    """Each rank's run is as wanted.

    The first loss depends on no gradient. Then come gradients and parameters: a wrong gradient
    shows there first, and by way of that in all later losses.
    """
    first, *later = range(len(want[0].losses))
    _check_loss(first, got, want, recipe.within)
    for what in ("grads", "params"):
        check_shards([getattr(run, what) for run in got], getattr(want[0], what), recipe, what)
    for index in later:
        _check_loss(index, got, want, recipe.within)


def _check_loss(index: int, got: Sequence[Run], want: Sequence[Run], within: float) -> None:
    wanted = [Near.relative(run.losses[index], within) for run in want]
    assert_near([run.losses[index] for run in got], wanted, f"loss of forward {index + 1}")


def check_shards(
    got: Sequence[Mapping[str, Tensor | None]],
    want: Mapping[str, Tensor | None],
    recipe: Recipe,
    what: str,
    dims: Mapping[str, int] | None = None,
) -> None:
    """Each rank has its part of each of the wanted tensors.

    dims: along which dimension each is divided, the first by default.
    """
    for rank, mine in enumerate(got):
        if list(mine) != list(want):
            raise CheckFailed(f"{what}: got {list(mine)}, want {list(want)}", rank)
    count = len(got) // recipe.replicas
    noise = _rounding([whole for whole in want.values() if whole is not None])
    for name, whole in want.items():
        of_all = [mine[name] for mine in got]
        if whole is None:
            for rank, part in enumerate(of_all):
                if part is not None:
                    raise CheckFailed(f"{what} of {name}: got a tensor, want None", rank)
            continue
        dim = (dims or {}).get(name, 0)
        allowed = Near.relative(whole, recipe.within).within + noise
        near = [
            Near(part_of(whole.double(), count, rank % count, dim), allowed, whole.dtype)
            for rank in range(len(got))
        ]
        assert_near(of_all, near, f"{what} of {name}")


def _rounding(tensors: Sequence[Tensor]) -> float:
    """What is left of a gradient that is zero but for rounding: it grows with the other ones."""
    return max((ROUNDINGS * epsilon(t.dtype) * _largest(t) for t in tensors), default=0.0)


def _largest(tensor: Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0
