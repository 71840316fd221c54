"""torch's `fully_shard` on the simulated device: most of its waits are needed."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_init,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
    _fully_shard,
)

from impl.testing.device.schedule import Eager
from impl.testing.device.simulated import (
    SimulatedDevice,
    SimulatedEvent,
    SimulatedStream,
    Site,
)
from tests.impl.device.fully_sharded import (
    FullyShardedPrograms,
    imagined_groups,
    imagined_mesh,
    moving,
)
from tests.impl.device.left_out import as_it_is, assert_right, not_missed, run

# Those that reach all calls; offloading pins memory by an accelerator that torch knows.
NAMES = (
    *("usual", "prefetch", "hook", "by_hand", "several_inputs", "after_optimizer"),
    *("replicas_accumulate", "replicas_low", "an_unused_branch"),
)

# Others order the same: the stream that gathers also waits for the one that copies before it, and
# what ends last waits for what it was made of.
NOT_NEEDED = {
    "self._comm_ctx.all_gather_stream.wait_stream(current_stream)",
    "self._comm_ctx.all_gather_stream.wait_event(event)",
    "self._comm_ctx.all_gather_stream.wait_event(all_gather_state.event)",
    "self.comm_ctx.all_gather_stream.wait_event(event)",
    "self._device_handle.current_stream().wait_event(rs_state.event)",
    "post_reduce_stream.record_event(),",
    "all_reduce_event = all_reduce_stream.record_event()",
}


class DeviceModule:
    """The simulated device as torch's modules of devices are, such as `torch.cuda`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    def current_device(self) -> str:
        return "cpu"

    def Stream(self, priority: int = 0) -> SimulatedStream:  # noqa: N802  # torch's name
        return self._device.new_stream()

    def Event(self) -> SimulatedEvent:  # noqa: N802  # torch's name
        return self._device.new_event()

    def current_stream(self) -> SimulatedStream:
        return self._device.current_stream()

    def stream(self, stream: SimulatedStream) -> Any:
        return self._device.use_stream(stream)


@contextmanager
def surroundings(device: SimulatedDevice, replicas: int) -> Iterator[DeviceMesh]:
    shards, copies = imagined_groups(device, replicas)
    groups = [shards] if copies is None else [copies, shards]
    module = DeviceModule(device)

    def allocate(tensor: Tensor) -> None:
        if not tensor.untyped_storage().nbytes():
            device.resize(tensor, tensor.numel())

    def free(tensor: Tensor) -> None:
        if tensor.untyped_storage().nbytes():
            device.resize(tensor, 0)

    replaced: list[tuple[Any, str, Any]] = [
        *((owner, "_get_device_handle", lambda kind: module) for owner in _WITH_HANDLES),
        (_fully_shard, "_get_device_from_mesh", lambda mesh: torch.device("cpu")),
        (DeviceMesh, "get_group", lambda mesh, dim=0: groups[dim or 0]),
        (_fsdp_param.FSDPParam, "_init_shard_mesh", lambda param: imagined_mesh(1)),
        *((owner, "alloc_storage", allocate) for owner in (_fsdp_param, _fsdp_param_group)),
        (_fsdp_param, "free_storage", free),
        (torch.accelerator, "current_stream", device.current_stream),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in replaced:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(device)
        stack.enter_context(moving(device))
        yield imagined_mesh(replicas)


_WITH_HANDLES = (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state)
_ALL = FullyShardedPrograms(fully_shard, surroundings).all
PROGRAMS = {name: _ALL[name] for name in NAMES}


@pytest.mark.parametrize("name", PROGRAMS)
def test_late_kernels_give_what_early_ones_do(name: str) -> None:
    assert_right(as_it_is(PROGRAMS[name]), run(PROGRAMS[name], Eager()))


def test_each_other_wait_and_record_is_needed() -> None:
    files = {site.file for name in PROGRAMS for site in as_it_is(PROGRAMS[name]).sites}
    own_files = [file for file in files if "_fully_shard" in file]
    removed, unmissed = not_missed(PROGRAMS, own_files, but=orders_what_others_order)
    print(f"torch's fully_shard: {removed} removed, {removed - len(unmissed)} found")
    assert removed >= 16
    assert unmissed == []


def orders_what_others_order(site: Site) -> bool:
    return linecache.getline(site.file, site.line).strip() in NOT_NEEDED
