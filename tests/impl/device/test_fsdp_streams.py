"""`impl.fsdp` on the simulated device: what its streams, events and lifetimes are needed for."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)

import impl.fsdp
from impl.device import substituted_handle
from impl.fsdp import FullyShardedDataParallel
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
pytestmark = pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")

FILES = sources_of(impl.fsdp)
PROGRAMS: dict[str, Program] = {}


@contextmanager
def on_the_device(device: SimulatedDevice) -> Iterator[None]:
    with substituted_handle(SimulatedHandle(device)), device:
        yield


def wrapped(
    device: SimulatedDevice, layers: int = 2, on_host: bool = False, **kwargs: Any
) -> FullyShardedDataParallel:
    """Some layers, each a unit, and a root."""
    where = {} if on_host else ON_DEVICE
    torch.manual_seed(3)
    group: Any = ImaginedGroup(device, 2)
    if kwargs.get("sharding_strategy") is ShardingStrategy.HYBRID_SHARD:
        group = (group, ImaginedGroup(device, 2, "between nodes"))
    kwargs = {"process_group": group, "device_id": CPU, **kwargs}
    units = [FullyShardedDataParallel(nn.Linear(4, 4, **where), **kwargs) for _ in range(layers)]
    return FullyShardedDataParallel(nn.Sequential(*units, nn.Linear(4, 2, **where)), **kwargs)


def train(
    device: SimulatedDevice,
    *,
    steps: int = 2,
    accumulate: bool = False,
    **kwargs: Any,
) -> list[Tensor]:
    """Parameters on the host after some steps."""
    with on_the_device(device):
        model = wrapped(device, **kwargs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            x = torch.arange(8.0, **ON_DEVICE).view(2, 4) * 0.1 + step
            if accumulate:
                with model.no_sync():
                    model(x).sum().backward()
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            del x
        return host_values(device, *(param.detach() for param in model.parameters()))


def program(name: str, **kwargs: Any) -> None:
    PROGRAMS[name] = functools.partial(train, **kwargs)


program("full_shard")
program("orig_params", use_orig_params=True)
program("shard_grad_op", sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
program("no_shard", sharding_strategy=ShardingStrategy.NO_SHARD)
program("hybrid", sharding_strategy=ShardingStrategy.HYBRID_SHARD)
program("low_precision", mixed_precision=MixedPrecision(param_dtype=LOW, reduce_dtype=LOW))
program("low_gradients", mixed_precision=MixedPrecision(reduce_dtype=LOW))
program(
    "no_shard_low",
    sharding_strategy=ShardingStrategy.NO_SHARD,
    mixed_precision=MixedPrecision(param_dtype=LOW),
)
program("offload", on_host=True, cpu_offload=CPUOffload(offload_params=True))
program(
    "no_shard_offload",
    on_host=True,
    sharding_strategy=ShardingStrategy.NO_SHARD,
    use_orig_params=True,
    cpu_offload=CPUOffload(offload_params=True),
)
program("prefetch", forward_prefetch=True, backward_prefetch=BackwardPrefetch.BACKWARD_POST)
program("accumulate", accumulate=True)
program(
    "hybrid_low",
    sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    mixed_precision=MixedPrecision(reduce_dtype=LOW),
)
program(
    "hybrid_offload",
    on_host=True,
    sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    cpu_offload=CPUOffload(offload_params=True),
)
program(
    "offload_low_accumulate",
    on_host=True,
    accumulate=True,
    cpu_offload=CPUOffload(offload_params=True),
    mixed_precision=MixedPrecision(param_dtype=LOW),
)


class Branches(nn.Module):
    """Runs both of two units, and returns what the first one made."""

    def __init__(self, used: nn.Module, unused: nn.Module) -> None:
        super().__init__()
        self.used = used
        self.unused = unused

    def forward(self, x: Tensor) -> Tensor:
        out = self.used(x)
        self.unused(x)
        return torch.relu(out)


def an_unused_branch(device: SimulatedDevice) -> list[Tensor]:
    """The backward of one unit gathers the next one early, which then has none."""
    with on_the_device(device):
        group: Any = ImaginedGroup(device, 2)
        kwargs: Any = {"process_group": group, "device_id": CPU}
        torch.manual_seed(3)
        units = [FullyShardedDataParallel(nn.Linear(4, 4, **ON_DEVICE), **kwargs) for _ in "ab"]
        tail = FullyShardedDataParallel(nn.Linear(4, 4, **ON_DEVICE), **kwargs)
        model = FullyShardedDataParallel(nn.Sequential(Branches(*units), tail), **kwargs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.arange(8.0, **ON_DEVICE).view(2, 4)
        for _ in range(2):
            with model.no_sync():
                model(x).sum().backward()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return host_values(device, *(param.detach() for param in model.parameters()))


PROGRAMS["an_unused_branch"] = an_unused_branch


class Skipping(nn.Module):
    """Runs the second of two units while nothing is to be skipped."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        return out if self.skips else self.second(out)


def a_skipped_unit(device: SimulatedDevice) -> list[Tensor]:
    """A unit that is gathered early and then not run; its parameters are read nevertheless."""
    with on_the_device(device):
        kwargs: Any = {"process_group": ImaginedGroup(device, 2), "device_id": CPU}
        kwargs["forward_prefetch"] = True
        torch.manual_seed(3)
        units = [FullyShardedDataParallel(nn.Linear(4, 4, **ON_DEVICE), **kwargs) for _ in "ab"]
        module = Skipping(*units)
        model = FullyShardedDataParallel(module, **kwargs)
        x = torch.arange(8.0, **ON_DEVICE).view(2, 4)
        model(x).sum().backward()
        module.skips = True
        out = model(x)
        seen = [param.detach() * 2 for param in model.parameters()]
        out.sum().backward()
        return host_values(device, *seen)


PROGRAMS["a_skipped_unit"] = a_skipped_unit


def evaluate_and_summon(device: SimulatedDevice) -> list[Tensor]:
    """Forwards without gradients, and work on the whole parameters between them."""
    with on_the_device(device):
        model = wrapped(device)
        x = torch.arange(8.0, **ON_DEVICE).view(2, 4)
        with torch.no_grad():
            before = model(x)
            with FullyShardedDataParallel.summon_full_params(model):
                for param in model.parameters():
                    param.mul_(2)
            after = model(x)
        return host_values(device, before, after)


PROGRAMS["evaluate_and_summon"] = evaluate_and_summon


def memory_while_the_host_runs_ahead(device: SimulatedDevice) -> list[Tensor]:
    """The most bytes that were in use when the device executes as late as it can."""
    with on_the_device(device), torch.no_grad():
        model = wrapped(device, layers=8)
        x = torch.zeros(2, 4, **ON_DEVICE)
        device.synchronize()
        device.bytes_max = device.bytes_now
        start = device.bytes_now
        model(x)
        return [torch.tensor(device.bytes_max - start)]


@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_order_that_the_events_permit_gives_the_same(name: str, seed: int) -> None:
    assert_right(run(PROGRAMS[name], Drawn(seed)), _in_order(name))


@functools.cache
def _in_order(name: str) -> Any:
    return run(PROGRAMS[name], Eager())


def test_every_wait_record_and_pin_is_needed() -> None:
    programs = {**PROGRAMS, "memory_while_the_host_runs_ahead": memory_while_the_host_runs_ahead}
    removed, unmissed = not_missed(programs, FILES)
    print(f"impl.fsdp: {removed} removed, {removed - len(unmissed)} found")
    assert removed >= 17
    assert unmissed == []
    assert never_run(PROGRAMS, FILES) == []
