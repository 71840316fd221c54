"""Programs of `fully_shard`, ours or torch's, on rank 0 of an imagined mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from impl.testing.device.group import ImaginedGroup
from impl.testing.device.simulated import SimulatedDevice
from tests.impl.device.left_out import Program, host_values

ON_DEVICE: Any = {"device": "cpu"}
LOW = torch.bfloat16
SHARDS = 2

# Given the device and the number of replicas: what a `fully_shard` needs to run there. Inside, the
# mesh; its groups are those of `imagined_groups`.
Surroundings = Callable[[SimulatedDevice, int], AbstractContextManager[DeviceMesh]]
Changes = Callable[[SimulatedDevice, Any, int], None]  # of a model, before a step


def imagined_mesh(replicas: int) -> DeviceMesh:
    """Of replicas by shards, or of shards alone if there is one replica."""
    ranks = torch.arange(replicas * SHARDS).view(replicas, SHARDS)
    options: Any = {"_init_backend": False, "_rank": 0}
    if replicas == 1:
        return DeviceMesh("cpu", ranks[0], mesh_dim_names=("shards",), **options)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("replicas", "shards"), **options)


def imagined_groups(device: SimulatedDevice, replicas: int) -> tuple[Any, Any]:
    """The group of the shards and, if there are several, that of the replicas."""
    shards = ImaginedGroup(device, SHARDS, "shards")
    return shards, ImaginedGroup(device, replicas, "replicas") if replicas > 1 else None


@contextmanager
def moving(device: SimulatedDevice) -> Iterator[None]:
    """The device has the host's name here, so torch would leave tensors where they are."""
    ordinary_to = Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], torch.device):
            return torch.empty_like(tensor, device=args[0]).copy_(tensor, **kwargs)
        return ordinary_to(tensor, *args, **kwargs)

    def cpu(tensor: Tensor) -> Tensor:
        return device.fetch(tensor)

    with mock.patch.object(Tensor, "to", to), mock.patch.object(Tensor, "cpu", cpu):
        yield


class Branches(nn.Module):
    """Runs both of two layers, and returns what the second one made."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4, **ON_DEVICE)
        self.unused = nn.Linear(4, 4, **ON_DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return torch.relu(self.used(x))


class FullyShardedPrograms:
    """Programs by name. Each returns its shards on the host, after some steps."""

    def __init__(self, fully_shard: Any, surroundings: Surroundings) -> None:
        self._fully_shard = fully_shard
        self._surroundings = surroundings
        low = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=LOW)
        low_gradients = MixedPrecisionPolicy(reduce_dtype=LOW)
        train = functools.partial
        self.all: dict[str, Program] = {
            "usual": train(self.train),
            "whole_between": train(self.train, reshard_after_forward=False),
            "replicas": train(self.train, replicas=2),
            "replicas_accumulate": train(self.train, replicas=2, before_step=accumulate_shards),
            "replicas_with_hook": train(self.train, replicas=2, before_step=call_hooks),
            "replicas_low": train(self.train, replicas=2, mp_policy=low_gradients),
            "accumulate": train(self.train, before_step=accumulate),
            "prefetch": train(self.train, before_step=prefetch),
            "hook": train(self.train, before_step=call_hooks),
            "by_hand": train(self.train, before_step=gather_by_hand),
            "several_inputs": train(self.train, before_step=keep_several_inputs),
            "low_precision": train(self.train, mp_policy=low),
            "offload": train(self.train, offload_policy=CPUOffloadPolicy()),
            "after_optimizer": train(self.train, before_step=tell_of_the_optimizer),
            "an_unused_branch": self.an_unused_branch,
        }

    def train(
        self,
        device: SimulatedDevice,
        *,
        replicas: int = 1,
        before_step: Changes = lambda device, model, step: None,
        **options: Any,
    ) -> list[Tensor]:
        """Three layers, each a unit, and a root with a layer of its own."""
        with self._surroundings(device, replicas) as mesh:
            torch.manual_seed(3)
            units = [nn.Linear(4, 4, **ON_DEVICE) for _ in range(3)]
            model = nn.Sequential(*units, nn.Linear(4, 2, **ON_DEVICE))
            for module in (*units, model):
                self._fully_shard(module, mesh=mesh, **options)
            for step in range(3):
                before_step(device, model, step)
                x = torch.arange(8.0, **ON_DEVICE).view(2, 4) * 0.1 + step
                model(x).square().sum().backward()
                take_step(model)
                del x
            return shards_of(device, model)

    def an_unused_branch(self, device: SimulatedDevice) -> list[Tensor]:
        """The last backward gathers a unit early whose own does not come."""
        with self._surroundings(device, 1) as mesh:
            torch.manual_seed(3)
            branches = Branches()
            model = nn.Sequential(branches, nn.Linear(4, 2, **ON_DEVICE))
            for module in (branches.used, branches.unused, model[1], model):
                self._fully_shard(module, mesh=mesh)
            for _ in range(2):
                model(torch.arange(8.0, **ON_DEVICE).view(2, 4)).sum().backward()
                with torch.no_grad():
                    for param in model.parameters():
                        local_of(param).mul_(0.5)
                take_step(model)
            return shards_of(device, model)


@torch.no_grad()
def take_step(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            local_of(param).sub_(local_of(param.grad), alpha=0.1)
            param.grad = None


def local_of(dtensor: Any) -> Tensor:
    """Not by `to_local`, which autograd would take part in."""
    local: Tensor = dtensor._local_tensor
    return local


def shards_of(device: SimulatedDevice, model: nn.Module) -> list[Tensor]:
    return host_values(device, *(local_of(param).detach() for param in model.parameters()))


def accumulate(device: SimulatedDevice, model: Any, step: int) -> None:
    model.set_requires_gradient_sync(step == 2)


def accumulate_shards(device: SimulatedDevice, model: Any, step: int) -> None:
    model.set_requires_all_reduce(step == 2)


def prefetch(device: SimulatedDevice, model: Any, step: int) -> None:
    model.set_modules_to_forward_prefetch([model[0], model[1]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])


def call_hooks(device: SimulatedDevice, model: Any, step: int) -> None:
    def halve(row: Tensor) -> None:
        row.mul_(0.5)

    for module in (model, model[0], model[1]):
        module.set_all_reduce_hook(halve)


def gather_by_hand(device: SimulatedDevice, model: Any, step: int) -> None:
    """Also right after the shards have changed on the current stream."""
    model[1].unshard()
    model[1].reshard()
    with torch.no_grad():
        local_of(model[0].weight).mul_(1.5)
    model[0].unshard(async_op=True).wait()


def tell_of_the_optimizer(device: SimulatedDevice, model: Any, step: int) -> None:
    """Its work ends here; what comes later on this stream need not be waited for."""
    model.set_post_optim_event(device.current_stream().record_event())


def keep_several_inputs(device: SimulatedDevice, model: Any, step: int) -> None:
    model.set_reduce_scatter_max_input_buffers(2)
