"""`impl.gloo`'s staging on the simulated device: streams, events, lifetimes, pinned memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from impl.errors import PeerLost
from impl.gloo import Options, ProcessGroupGloo
from impl.gloo.memory import cuda_staging
from impl.testing.device.schedule import Drawn, Eager
from impl.testing.device.simulated import SimulatedDevice
from impl.testing.device.watched_gloo import simulated_gloo, watched
from tests.impl.device.left_out import (
    Program,
    assert_right,
    host_values,
    never_run,
    not_missed,
    run,
)

SEGMENT_NBYTES = 1024
ON_DEVICE: Any = {"device": "cpu"}  # naming a device is what puts a tensor on the simulated one
STAGING = "impl/gloo/memory/cuda_staging.py"


@contextmanager
def one_rank(device: SimulatedDevice) -> Iterator[ProcessGroupGloo]:
    """A group of one rank in shared memory, with segments that small tensors have several of."""
    options = Options(timedelta(seconds=20), "shm", segment_nbytes=4096)
    with (
        mock.patch.object(cuda_staging, "SEGMENT_NBYTES", SEGMENT_NBYTES),
        simulated_gloo(device),
    ):
        group = watched(ProcessGroupGloo(dist.HashStore(), 0, 1, options=options, name="g"), device)
        try:
            with device:
                yield group
        finally:
            group.shutdown()


PROGRAMS: dict[str, Program] = {}


def program(
    body: Callable[[SimulatedDevice, ProcessGroupGloo], list[Tensor]],
) -> Callable[[SimulatedDevice, ProcessGroupGloo], list[Tensor]]:
    """Register a program: what it does with a group, and the tensors that it returns."""

    @functools.wraps(body)
    def whole(device: SimulatedDevice) -> list[Tensor]:
        with one_rank(device) as group:
            return host_values(device, *body(device, group))

    PROGRAMS[body.__name__] = whole
    return body


@program
def sum_in_place(device: SimulatedDevice, group: ProcessGroupGloo) -> list[Tensor]:
    x = torch.arange(8.0, **ON_DEVICE) + 1
    group.allreduce([x]).wait()
    return [x * 2]


@program
def sum_of_complex_and_strided(device: SimulatedDevice, group: ProcessGroupGloo) -> list[Tensor]:
    x = torch.arange(12.0, **ON_DEVICE).view(3, 4).t()
    z = torch.complex(x, -x).conj()
    for tensor in (x, z):
        group.allreduce([tensor]).wait()
    return [x * 2, torch.view_as_real(z * 2)]


@program
def large_sum_in_segments(device: SimulatedDevice, group: ProcessGroupGloo) -> list[Tensor]:
    x = torch.arange(3000.0, **ON_DEVICE)
    y = torch.arange(600.0, **ON_DEVICE)  # several segments, but one round through shared memory
    works = [group.allreduce([x]), group.allreduce([y])]
    for work in works:
        work.wait()
    return [x * 2, y * 2]


@program
def large_sum_that_fails_half_way(device: SimulatedDevice, group: ProcessGroupGloo) -> list[Tensor]:
    """The tensor is filled anew at once, and no part of the sum comes into it any more."""

    def fail(flat: Tensor, combine: Any, call: Any, until: Any, pace: Any) -> None:
        pace.will_read(1000)
        pace.has_written(1000)
        raise PeerLost("rank 1 is gone")

    x = torch.arange(3000.0, **ON_DEVICE)
    with mock.patch.object(group._comm, "all_reduce_paced", fail), pytest.raises(PeerLost):
        group.allreduce([x]).wait()
    x.fill_(5.0)
    return [x + 1]


@program
def wait_on_another_stream(device: SimulatedDevice, group: ProcessGroupGloo) -> list[Tensor]:
    """The tensor goes back to its own stream, which waited for nothing."""
    x = torch.arange(8.0, **ON_DEVICE)
    work = group.allreduce([x])
    side = device.new_stream("side")
    with device.use_stream(side):
        work.wait()
        y = x * 2
        device.record_stream(x, side)
    del x, work
    device.current_stream().wait_stream(side)
    device.record_stream(y, device.current_stream())
    return [y + 1]


@program
def input_dropped_after_the_call(device: SimulatedDevice, group: ProcessGroupGloo) -> list[Tensor]:
    x = torch.arange(8.0, **ON_DEVICE)
    out = torch.zeros(8, **ON_DEVICE)
    work = group.all_gather_single(out, x)
    del x
    in_its_memory = torch.ones(8, **ON_DEVICE)
    work.wait()
    return [out * 2, in_its_memory]


@program
def result_nobody_waits_for(device: SimulatedDevice, group: ProcessGroupGloo) -> list[Tensor]:
    x = torch.arange(8.0, **ON_DEVICE)
    work = group.allreduce([x])
    group.barrier().wait()  # the host has done its part, and no stream has heard of it
    del x, work
    return [torch.ones(8, **ON_DEVICE)]


@program
def input_reused_after_the_wait(device: SimulatedDevice, group: ProcessGroupGloo) -> list[Tensor]:
    x = torch.arange(8.0, **ON_DEVICE)
    group.broadcast([x], root=0).wait()
    x.zero_()
    return [x]


@program
def output_still_in_use_at_the_call(
    device: SimulatedDevice, group: ProcessGroupGloo
) -> list[Tensor]:
    x = torch.arange(8.0, **ON_DEVICE)
    out = torch.ones(8, **ON_DEVICE)
    side = device.new_stream("side")
    side.wait_stream(device.current_stream())
    with device.use_stream(side):
        before = out * 3
        # the input is there already: what is to be waited for is the kernel above
        work = group.all_gather_single(out, x)
    work.wait()
    device.current_stream().wait_stream(side)
    device.record_stream(before, device.current_stream())
    device.record_stream(out, side)
    return [out * 2, before + 1]


@program
def callbacks_of_a_future(device: SimulatedDevice, group: ProcessGroupGloo) -> list[Tensor]:
    x = torch.arange(8.0, **ON_DEVICE)
    future = group.allreduce([x]).get_future()
    tripled: Tensor = future.then(lambda done: done.value()[0] * 3).wait()
    device.record_stream(tripled, device.current_stream())
    device.record_stream(x, device.current_stream())
    return [tripled + 1, x]


@program
def sum_of_sparse(device: SimulatedDevice, group: ProcessGroupGloo) -> list[Tensor]:
    x = torch.eye(4, **ON_DEVICE).to_sparse()
    group.allreduce([x]).wait()
    dense = x.to_dense()
    del x
    side = device.new_stream("side")
    with device.use_stream(side):  # which has not heard of the kernel that reads the first sum
        y = torch.eye(4, **ON_DEVICE).to_sparse()
        group.allreduce([y]).wait()
    device.current_stream().wait_stream(side)
    return [dense * 2, y]


@program
def sparse_waited_for_elsewhere(device: SimulatedDevice, group: ProcessGroupGloo) -> list[Tensor]:
    """The tensor's old entries belong to a stream that waits for nothing."""
    x = torch.eye(4, **ON_DEVICE).to_sparse()
    work = group.allreduce([x])
    side = device.new_stream("side")
    with device.use_stream(side):
        work.wait()
        dense = x.to_dense()
    del x, work
    in_its_memory = torch.ones(8, **ON_DEVICE)
    device.current_stream().wait_stream(side)
    device.record_stream(dense, device.current_stream())
    return [dense + 1, in_its_memory]


@program
def message_to_oneself(device: SimulatedDevice, group: ProcessGroupGloo) -> list[Tensor]:
    x = torch.arange(8.0, **ON_DEVICE)
    sending = group.send([x], 0, 5)
    out = torch.zeros(8, **ON_DEVICE)
    receiving = group.recv([out], 0, 5)
    sending.wait()
    x.zero_()
    receiving.wait()
    return [out * 2]


@program
def lists_of_tensors(device: SimulatedDevice, group: ProcessGroupGloo) -> list[Tensor]:
    x = torch.arange(8.0, **ON_DEVICE)
    outs = [torch.zeros(8, **ON_DEVICE) for _ in range(4)]
    group.allgather([outs[:1]], [x]).wait()
    group.reduce_scatter([outs[1]], [[x]]).wait()
    group.alltoall([outs[2]], [x]).wait()
    group.scatter([outs[3]], [[x]], root=0).wait()
    group.allreduce_coalesced([x]).wait()
    return [sum(outs, start=torch.zeros(8, **ON_DEVICE)), x * 2]


@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_order_that_the_events_permit_gives_the_same(name: str, seed: int) -> None:
    assert_right(run(PROGRAMS[name], Drawn(seed)), _in_order(name))


@functools.cache
def _in_order(name: str) -> Any:
    """On a device that is faster than the host, where nothing can be out of order."""
    return run(PROGRAMS[name], Eager())


def test_results_are_what_they_would_be_on_the_host() -> None:
    want = {
        "sum_in_place": [2.0 * torch.arange(1.0, 9)],
        "large_sum_in_segments": [2.0 * torch.arange(3000.0), 2.0 * torch.arange(600.0)],
        "callbacks_of_a_future": [3 * torch.arange(8.0) + 1, torch.arange(8.0)],
        "sum_of_sparse": [2 * torch.eye(4), torch.eye(4)],
        "message_to_oneself": [2 * torch.arange(8.0)],
    }
    for name, expected in want.items():
        for got, value in zip(_in_order(name).results, expected, strict=True):
            torch.testing.assert_close(got, value)


def test_every_wait_record_and_pin_is_needed() -> None:
    removed, unmissed = not_missed(PROGRAMS, [STAGING])
    print(f"impl.gloo staging: {removed} removed, {removed - len(unmissed)} found")
    assert removed >= 14
    assert unmissed == []
    assert never_run(PROGRAMS, [STAGING]) == []


def test_copies_and_exchange_of_a_large_tensor_overlap() -> None:
    """The first segment is exchanged while the last one is still on its way to the host."""
    device = SimulatedDevice()
    pending: list[int] = []
    with one_rank(device) as group:
        x = torch.arange(3000.0, **ON_DEVICE)
        will_read = cuda_staging.SegmentPace.will_read

        def note(pace: cuda_staging.SegmentPace, stop: int) -> None:
            will_read(pace, stop)
            pending.append(len(pace._waiting))

        with mock.patch.object(cuda_staging.SegmentPace, "will_read", note):
            group.allreduce([x]).wait()
    assert len(pending) == 3  # rounds of 4096 bytes
    assert pending == sorted(pending, reverse=True)
    assert pending[0] > 0
    assert pending[-1] == 0
