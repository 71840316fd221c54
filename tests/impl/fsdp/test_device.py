"""The device handle on CPU: streams that hold one unfinished collective each."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from impl.device import (
    AcceleratorHandle,
    HostHandle,
    HostStream,
    handle_for,
    storage_numel,
    substituted_handle,
)
from impl.fsdp.step.limiter import FreeEventQueue


class FakeWork:
    """A collective that ends when it is waited for."""

    def __init__(self, log: list[str], name: str, error: Exception | None = None) -> None:
        self._log, self._name, self._error = log, name, error

    def wait(self) -> bool:
        if self._error is not None:
            raise self._error
        self._log.append(f"{self._name} done")
        return True


class Device:
    """A host handle, and a log of what happened on it."""

    def __init__(self) -> None:
        self.handle = HostHandle()
        self.log: list[str] = []

    def stream(self) -> HostStream:
        stream = self.handle.new_stream()
        assert isinstance(stream, HostStream)
        return stream

    def collective(self, name: str, *tensors: torch.Tensor, error: Exception | None = None) -> None:
        def start(async_op: bool) -> dist.Work | None:
            self.log.append(f"{name} starts" if async_op else f"{name} runs")
            return cast(dist.Work, FakeWork(self.log, name, error)) if async_op else None

        self.handle.start_collective(start, reads=tensors, writes=())

    def note(self, text: str) -> None:
        self.handle.enqueue(lambda: self.log.append(text))


@pytest.fixture
def device() -> Device:
    return Device()


def test_on_the_default_stream_everything_happens_at_once(device: Device) -> None:
    device.collective("gather")
    device.note("compute")
    assert device.log == ["gather runs", "compute"]


def test_work_behind_a_collective_waits_until_somebody_waits(device: Device) -> None:
    side = device.stream()
    with device.handle.use_stream(side):
        device.collective("gather")
        device.note("free")
    device.note("compute")
    assert device.log == ["gather starts", "compute"]
    device.handle.current_stream().wait_stream(side)
    assert device.log == ["gather starts", "compute", "gather done", "free"]
    assert not side.is_busy


def test_collectives_start_in_program_order(device: Device) -> None:
    first, second = device.stream(), device.stream()
    with device.handle.use_stream(first):
        device.collective("a")
        device.note("behind a")
    with device.handle.use_stream(second):
        device.collective("b")
    with device.handle.use_stream(first):
        device.collective("c")
    assert device.log == ["a starts", "b starts", "a done", "behind a", "c starts"]


def test_an_event_waits_for_what_came_before_it(device: Device) -> None:
    side = device.stream()
    with device.handle.use_stream(side):
        early = device.handle.record_event()
        device.collective("a")
        late = device.handle.record_event()
    early.synchronize()
    assert device.log == ["a starts"]
    device.handle.current_stream().wait_event(late)
    assert device.log == ["a starts", "a done"]


def test_flush_finishes_the_current_stream(device: Device) -> None:
    side = device.stream()
    with device.handle.use_stream(side):
        device.collective("a")
        device.handle.flush()
        device.note("behind a")
    assert device.log == ["a starts", "a done", "behind a"]


def test_a_storage_in_use_is_not_freed_before_the_end(device: Device) -> None:
    used, unused = torch.ones(4), torch.ones(4)
    side = device.stream()
    with device.handle.use_stream(side):
        device.collective("a", used)
    device.handle.free_storage(unused)
    busy = [side.is_busy]
    device.handle.free_storage(used)
    busy.append(side.is_busy)
    assert busy == [True, False]
    assert (storage_numel(used), storage_numel(unused)) == (0, 0)


def test_storages_are_freed_while_another_thread_begins_collectives(device: Device) -> None:
    streams = [device.stream() for _ in range(20)]
    is_over = threading.Event()

    def begin_and_complete() -> None:
        while not is_over.is_set():
            for stream in streams:
                with device.handle.use_stream(stream):
                    device.collective("a", torch.ones(1))
            for stream in streams:
                stream.complete()

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=begin_and_complete)
    thread.start()
    try:
        for _ in range(20_000):
            device.handle.free_storage(torch.ones(1))
    finally:
        sys.setswitchinterval(usual)
        is_over.set()
        thread.join()


def test_a_stream_that_is_dropped_in_the_middle_is_forgotten(device: Device) -> None:
    with device.handle.use_stream(device.stream()):
        device.collective("a", torch.ones(1))
    gc.collect()
    device.handle.free_storage(torch.ones(1))
    assert device.handle._busy == {}


def test_a_failed_collective_raises_once_and_drops_what_is_behind(device: Device) -> None:
    side = device.stream()
    with device.handle.use_stream(side):
        device.collective("a", error=RuntimeError("peer lost"))
        device.note("behind")
    with pytest.raises(RuntimeError, match="peer lost"):
        side.synchronize()
    side.synchronize()
    assert device.log == ["a starts"]


def test_what_is_held_back_runs_without_grad(device: Device) -> None:
    side = device.stream()
    seen: list[bool] = []
    with device.handle.use_stream(side):
        device.collective("a")
        device.handle.enqueue(lambda: seen.append(torch.is_grad_enabled()))
    side.synchronize()
    assert seen == [False]


def test_allocating_and_freeing() -> None:
    handle, tensor = HostHandle(), torch.ones(3)
    handle.free_storage(tensor)
    handle.free_storage(tensor)
    assert storage_numel(tensor) == 0
    handle.alloc_storage(tensor, 3)
    handle.alloc_storage(tensor, 3)
    assert storage_numel(tensor) == 3
    with pytest.raises(AssertionError, match="resized to be 0"):
        handle.alloc_storage(tensor, 4)
    with pytest.raises(AssertionError, match="sole occupant"):
        handle.free_storage(torch.ones(3)[1:])


def test_ranks_per_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert HostHandle().ranks_per_node() == 3
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert HostHandle().ranks_per_node() == 1


def test_handles_are_shared_and_can_be_substituted() -> None:
    cpu = torch.device("cpu")
    other = HostHandle()
    assert handle_for(cpu) is handle_for(cpu)
    with substituted_handle(other):
        assert handle_for(cpu) is other
    assert handle_for(cpu) is not other


class FakeAcceleratorModule:
    """As much of `torch.cuda` as can be told without a device."""

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 2

    def device_count(self) -> int:
        return 4


def test_an_accelerator_is_reached_through_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mtia", FakeAcceleratorModule())
    handle = AcceleratorHandle(torch.device("mtia"))
    assert handle.is_available()
    assert handle.current_device() == torch.device("mtia", 2)
    assert handle.ranks_per_node() == 4
    ran: list[Any] = []
    handle.enqueue(lambda: ran.append("kernel"))
    handle.start_collective(lambda async_op: ran.append(async_op), reads=(), writes=())
    assert ran == ["kernel", False]


def test_an_unknown_device_type_is_refused() -> None:
    with pytest.raises(AttributeError, match="does not have a corresponding backend"):
        AcceleratorHandle(torch.device("vulkan"))


def test_the_rate_limiter_lets_two_frees_be_pending() -> None:
    queue = FreeEventQueue()
    events = [HostStream().record_event() for _ in range(3)]
    queue.enqueue(events[0])
    assert queue.dequeue_if_needed() is None
    queue.enqueue(events[1])
    queue.enqueue(events[2])
    assert queue.dequeue_if_needed() is events[0]
    assert queue.dequeue_if_needed() is events[1]
    assert queue.dequeue_if_needed() is None
