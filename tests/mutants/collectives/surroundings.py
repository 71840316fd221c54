"""Mutants of conformance/spec/collectives/surroundings.py."""

from __future__ import annotations

import os
import select
import signal
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.power.handles import Relayed
from tests.mutants.kit import ForwardingGroup, breaks


@breaks(
    "work/leaves-the-process-alone", says="rank 0 finds changed: torch's random generator, grad"
)
class DrawsAndStopsGradients(ForwardingGroup):
    """A broadcast picks its tree at random; an all_reduce runs, and leaves, without gradients."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        torch.rand(())
        return super().broadcast(tensors, opts)

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        torch.set_grad_enabled(False)
        return super().allreduce(tensors, opts)


@breaks("work/leaves-the-process-alone", says="rank 0 finds changed: working directory, environ")
class ChangesTheWorkingDirectory(ForwardingGroup):
    """A group changes the working directory and the environment of the process."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, timeout)
        os.chdir("/")
        os.environ["GROUP_AT"] = "/"


@breaks("surroundings/defaults", says=r"raised RuntimeError: a buffer of torch\.float64")
class ReducesInTheDefaultDtype(ForwardingGroup):
    """A buffer is of the dtype that torch makes tensors of."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        buffer = torch.empty(tensors[0].numel())
        if tensors[0].is_floating_point() and buffer.dtype is not tensors[0].dtype:
            raise RuntimeError(f"a buffer of {buffer.dtype} for a tensor of {tensors[0].dtype}")
        return super().allreduce(tensors, opts)


@breaks("surroundings/defaults", says=r"raised RuntimeError: a buffer on meta")
class BuffersAreOnTheDefaultDevice(ForwardingGroup):
    """A group has a buffer, which is where torch makes tensors."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, timeout)
        buffer = torch.zeros(1)
        if buffer.device.type != "cpu":
            raise RuntimeError(f"a buffer on {buffer.device}")


@breaks("surroundings/inference-mode", says=r"raised RuntimeError: Inference tensors cannot be")
class SavesForBackward(ForwardingGroup):
    """What is broadcast is kept for a backward pass that never comes."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].is_inference():
            raise RuntimeError("Inference tensors cannot be saved for backward.")
        return super().broadcast(tensors, opts)


@breaks("surroundings/parameters", says=r"raised RuntimeError: a leaf Variable that requires grad")
class DividesInPlace(ForwardingGroup):
    """A sum is finished by an operation that autograd sees."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        work = super().allreduce(tensors, opts)
        work.wait()
        with torch.enable_grad():
            tensors[0].div_(1)
        return work


@breaks("surroundings/no-history", says=r"outputs require gradients after Call\(op='all_gather'")
class CopiesWithAutograd(ForwardingGroup):
    """What comes in is copied from what goes out by an operation that autograd sees."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        work = super().allgather(outputs, inputs, opts)
        work.wait()
        with torch.enable_grad():
            outputs[0][self.rank()].copy_(inputs[0])
        return work


class _Interruptible(Relayed):
    """Its wait ends when a signal comes."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        readable, writable = os.pipe()
        os.set_blocking(writable, False)
        usual = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        try:
            while not self.inner.is_completed():
                if select.select([readable], [], [], 1e-4)[0]:
                    raise RuntimeError("Interrupted system call")
        finally:
            signal.set_wakeup_fd(usual)
            os.close(readable)
            os.close(writable)
        return super().wait(timeout)


@breaks("surroundings/signals", says=r"rank 0  raised RuntimeError: Interrupted system call")
class SignalsEndOperations(ForwardingGroup):
    """An operation ends when the process handles a signal."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return _Interruptible(super().allreduce(tensors, opts))


@breaks("surroundings/many-descriptors", says=r"raised ValueError: filedescriptor out of range")
class WatchesDescriptorsWithSelect(ForwardingGroup):
    """Connections are watched by select, which takes descriptors below 1024."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, timeout)
        readable, writable = os.pipe()
        try:
            select.select([readable], [], [], 0)
        finally:
            os.close(readable)
            os.close(writable)


def _say_goodbye(group: ForkedChildrenReleaseTheParentsGroup | None) -> None:
    if group is not None:
        os.write(group.writable, b"goodbye")


@breaks("surroundings/forked-children", says=r"raised RuntimeError: the connection was closed")
class ForkedChildrenReleaseTheParentsGroup(ForwardingGroup):
    """A forked child releases what it has inherited, as if it were its parent."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, timeout)
        self.readable, self.writable = os.pipe()
        os.set_blocking(self.readable, False)
        group = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _say_goodbye(group()))

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if select.select([self.readable], [], [], 0)[0]:
            raise RuntimeError("the connection was closed")
        return super().allreduce(tensors, opts)

    def __del__(self) -> None:
        os.close(self.readable)
        os.close(self.writable)
