"""Runs `impl.gloo` on the simulated device, and records which host memory it touches.

    device = SimulatedDevice()
    with simulated_gloo(device), device:
        group = watched(ProcessGroupGloo(...), device)
        group.allreduce([x]).wait()

Every tensor counts as one of the device. Product code runs unchanged; what is replaced is the
device handle. Three things are added around it: worker threads are seen, waiting for a work orders
the waiting thread after the worker, and the communicator's accesses to host memory are noted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._pytree import tree_leaves

from impl.device import substituted_handle
from impl.gloo import ProcessGroupGloo
from impl.gloo.operations.reductions import Reductions
from impl.gloo.queue.executor import Executor
from impl.gloo.queue.issuing import as_list
from impl.gloo.queue.work import CollectiveWork, GlooWork
from impl.testing.device.handles import SimulatedHandle
from impl.testing.device.memory import Elements
from impl.testing.device.simulated import SimulatedDevice
from impl.transport.base import CallInfo, Combine, Communicator, Deadline, Pace, PacedCommunicator


@contextlib.contextmanager
def simulated_gloo(device: SimulatedDevice) -> Iterator[None]:
    """Inside, groups stage every tensor through `device`."""
    run_job, complete, wait = Executor._run_job, GlooWork.complete, GlooWork.wait

    def run_job_seen(self: Executor, work: CollectiveWork, job: Callable[[], object]) -> Any:
        with device.seen():
            return run_job(self, work, job)

    def complete_and_tell(self: GlooWork, error: BaseException | None) -> Any:
        self.__dict__["known_when_done"] = device.hand_over()
        return complete(self, error)

    def wait_and_know(self: GlooWork, *timeout: Any) -> bool:
        try:
            return wait(self, *timeout)
        finally:
            device.take_over(self.__dict__.get("known_when_done", {}))

    def allreduce(self: Reductions, tensors: Any, opts: Any = None, *args: Any, **more: Any) -> Any:
        """Without the short cut for CPU tensors."""
        return self._allreduce_any(as_list(tensors), opts, *args, **more)

    with contextlib.ExitStack() as stack:
        stack.enter_context(substituted_handle(SimulatedHandle(device)))
        for owner, name, replacement in (
            (Executor, "_run_job", run_job_seen),
            (GlooWork, "complete", complete_and_tell),
            (GlooWork, "wait", wait_and_know),
            (Reductions, "allreduce", allreduce),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def watched(group: ProcessGroupGloo, device: SimulatedDevice) -> ProcessGroupGloo:
    """The same group, whose accesses to host memory are noted."""
    group._comm = WatchedCommunicator(group._comm, device)
    return group


_ONLY_READ = {
    "all_gather": "input",
    "all_gather_v": "input",
    "reduce_scatter": "input",
    "all_to_all": "input",
    "gather": "input",
    "scatter": "inputs",
    "post_send": "tensor",
}
_NEVER_TOUCHED_HERE = ("post_recv",)  # written later, by another thread


class WatchedCommunicator:
    """Hands everything to another communicator and notes which memory that touches."""

    def __init__(self, inner: Communicator, device: SimulatedDevice) -> None:
        self._inner = inner
        self._device = device

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found) or name in _NEVER_TOUCHED_HERE:
            return found

        def call(*args: Any) -> Any:
            only_read = self._only_read(name, args)
            for tensor in tree_leaves(args):
                if isinstance(tensor, Tensor):
                    self._touch(tensor, name, writes=id(tensor) not in only_read)
            with self._device.naming(False):  # what a transport makes for itself is on the host
                return found(*args)

        return call

    def _only_read(self, name: str, args: tuple[Any, ...]) -> set[int]:
        if name == "post_send":
            return {id(args[0])}
        if name not in _ONLY_READ:
            return set()
        return {id(tensor) for tensor in tree_leaves(args[1]) if isinstance(tensor, Tensor)}

    def all_reduce_paced(
        self, tensor: Tensor, combine: Combine, call: CallInfo, until: Deadline, pace: Pace
    ) -> None:
        assert isinstance(self._inner, PacedCommunicator)
        watched_pace = _WatchedPace(pace, tensor, self._touch)
        with self._device.naming(False):
            self._inner.all_reduce_paced(tensor, combine, call, until, watched_pace)

    def _touch(self, tensor: Tensor, what: str, *, writes: bool) -> None:
        memory = self._device.memory_of(tensor)
        if memory is not None:
            self._device.touch_on_host(Elements.of(tensor, memory), what, writes=writes)


class _WatchedPace:
    """Notes the elements that a pace has made readable, and those that are final."""

    def __init__(self, inner: Pace, tensor: Tensor, touch: Callable[..., None]) -> None:
        self._inner = inner
        self._tensor = tensor
        self._touch = touch
        self._read_stop = 0
        self._written_stop = 0

    def will_read(self, stop: int) -> None:
        self._inner.will_read(stop)
        self._touch(self._tensor[self._read_stop : stop], "all_reduce", writes=False)
        self._read_stop = stop

    def has_written(self, stop: int) -> None:
        self._touch(self._tensor[self._written_stop : stop], "all_reduce", writes=True)
        self._written_stop = stop
        self._inner.has_written(stop)
