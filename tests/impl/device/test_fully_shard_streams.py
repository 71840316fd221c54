"""`impl.fully_shard` on the simulated device: what its streams, events and lifetimes are for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import impl.fully_shard
from impl.device import handle_for, substituted_handle
from impl.fully_shard import api, fully_shard
from impl.fully_shard.mesh import Division
from impl.testing.device.group import ImaginedGroup
from impl.testing.device.handles import SimulatedHandle
from impl.testing.device.schedule import Drawn, Eager
from impl.testing.device.simulated import SimulatedDevice
from tests.impl.device.left_out import (
    Program,
    assert_right,
    host_values,
    never_run,
    not_missed,
    run,
    sources_of,
)

ON_DEVICE: Any = {"device": "cpu"}
CPU = torch.device("cpu")
LOW = torch.bfloat16
SHARDS = 2

FILES = sources_of(impl.fully_shard)
PROGRAMS: dict[str, Program] = {}
Changes = Callable[[nn.Sequential, int], None]  # of a model, before a step


@contextmanager
def on_the_device(device: SimulatedDevice, replicas: int = 1) -> Iterator[DeviceMesh]:
    """Rank 0 of a mesh of two shards, perhaps of several replicas, and imagined groups."""
    ranks = torch.arange(replicas * SHARDS).view(replicas, SHARDS)
    names = ("replicas", "shards")
    if replicas == 1:
        ranks, names = ranks[0], names[1:]
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)
    shards: Any = ImaginedGroup(device, SHARDS, "shards")
    copies: Any = ImaginedGroup(device, replicas, "replicas") if replicas > 1 else None

    with (
        substituted_handle(SimulatedHandle(device)),
        mock.patch.object(api, "read_mesh", lambda mesh: Division(mesh, shards, copies)),
        device,
        moving(device),
    ):
        yield mesh


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


def model_on(mesh: DeviceMesh, **options: Any) -> Any:
    """Three layers, each a unit, and a root with a layer of its own."""
    torch.manual_seed(3)
    units = [nn.Linear(4, 4, **ON_DEVICE) for _ in range(3)]
    for unit in units:
        fully_shard(unit, mesh=mesh, **options)
    return fully_shard(nn.Sequential(*units, nn.Linear(4, 2, **ON_DEVICE)), mesh=mesh, **options)


def train(
    device: SimulatedDevice,
    *,
    replicas: int = 1,
    before_step: Changes = lambda model, step: None,
    **options: Any,
) -> list[Tensor]:
    """Shards on the host after some steps."""
    with on_the_device(device, replicas) as mesh:
        model = model_on(mesh, **options)
        for step in range(3):
            before_step(model, step)
            x = torch.arange(8.0, **ON_DEVICE).view(2, 4) * 0.1 + step
            model(x).square().sum().backward()
            take_step(model)
            del x
        return shards_of(device, model)


@torch.no_grad()
def take_step(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            local_of(param).sub_(local_of(param.grad), alpha=0.1)
            param.grad = None


def local_of(dtensor: Any) -> Tensor:
    local: Tensor = dtensor._local_tensor
    return local


def shards_of(device: SimulatedDevice, model: nn.Module) -> list[Tensor]:
    return host_values(device, *(local_of(param).detach() for param in model.parameters()))


def program(name: str, **kwargs: Any) -> None:
    PROGRAMS[name] = functools.partial(train, **kwargs)


def accumulate(model: Any, step: int) -> None:
    model.set_requires_gradient_sync(step == 2)


def accumulate_shards(model: Any, step: int) -> None:
    model.set_requires_all_reduce(step == 2)


def prefetch(model: Any, step: int) -> None:
    model.set_modules_to_forward_prefetch([model[0], model[1]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])


def halve(row: Tensor) -> None:
    row.mul_(0.5)


def call_hooks(model: Any, step: int) -> None:
    for module in (model, model[0], model[1]):
        module.set_all_reduce_hook(halve)


def read_by_hand(model: Any, step: int) -> None:
    """Whole parameters change on the current stream right before they are gathered."""
    model[1].unshard()
    model[1].reshard()
    with torch.no_grad():
        local_of(model[0].weight).mul_(1.5)
    handle = model[0].unshard(async_op=True)
    handle.wait()


def tell_of_the_optimizer(model: Any, step: int) -> None:
    """The optimizer of the last step has ended; other work of this stream need not be waited for."""
    model.set_post_optim_event(handle_for(CPU).record_event())


def keep_several_inputs(model: Any, step: int) -> None:
    model.set_reduce_scatter_max_input_buffers(2)


program("usual")
program("whole_between", reshard_after_forward=False)
program("replicas", replicas=2)
program("replicas_accumulate", replicas=2, before_step=accumulate_shards)
program("replicas_with_hook", replicas=2, before_step=call_hooks)
program("accumulate", before_step=accumulate)
program("prefetch", before_step=prefetch)
program("hook", before_step=call_hooks)
program("by_hand", before_step=read_by_hand)
program("several_inputs", before_step=keep_several_inputs)
program("low_precision", mp_policy=MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=LOW))
program("replicas_low", replicas=2, mp_policy=MixedPrecisionPolicy(reduce_dtype=LOW))
program("offload", offload_policy=CPUOffloadPolicy())
program("after_optimizer", before_step=tell_of_the_optimizer)


class Branches(nn.Module):
    """Runs both of two layers, and returns what the second one made."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4, **ON_DEVICE)
        self.unused = nn.Linear(4, 4, **ON_DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return torch.relu(self.used(x))


def an_unused_branch(device: SimulatedDevice) -> list[Tensor]:
    """The last backward gathers a unit early whose own does not come."""
    with on_the_device(device) as mesh:
        torch.manual_seed(3)
        model = nn.Sequential(Branches(), nn.Linear(4, 2, **ON_DEVICE))
        for module in (model[0].used, model[0].unused, model[1], model):
            fully_shard(module, mesh=mesh)
        for _ in range(2):
            model(torch.arange(8.0, **ON_DEVICE).view(2, 4)).sum().backward()
            with torch.no_grad():
                for param in model.parameters():
                    local_of(param).mul_(0.5)
            take_step(model)
        return shards_of(device, model)


PROGRAMS["an_unused_branch"] = an_unused_branch


@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_order_that_the_events_permit_gives_the_same(name: str, seed: int) -> None:
    assert_right(run(PROGRAMS[name], Drawn(seed)), _in_order(name))


@functools.cache
def _in_order(name: str) -> Any:
    return run(PROGRAMS[name], Eager())


def test_every_wait_record_and_pin_is_needed() -> None:
    removed, unmissed = not_missed(PROGRAMS, FILES)
    print(f"impl.fully_shard: {removed} removed, {removed - len(unmissed)} found")
    assert unmissed == []
    assert never_run(PROGRAMS, FILES) == []
