"""Collectives that take views for what they are not, write where they should not, or keep all."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.verdict import Verdict
from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupFault, breaks


def as_if_dense(x: Tensor) -> Tensor:
    """The first bytes of a view's memory, taken for the view."""
    dense = torch.empty(x.shape).stride()
    if x.storage_offset() + x.numel() > x.untyped_storage().nbytes() // x.element_size():
        return x
    return x.as_strided(x.shape, dense)


@breaks("all_reduce/strided", says=r"rank 0 is wrong")
class ReducesACopy(GroupFault, ProcessGroupGloo):
    """The dense copy of a view is reduced, and the view is not."""

    base = "impl"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return super().allreduce([x.contiguous() for x in tensors], opts)


@breaks("broadcast/strided", says=r"is wrong")
class BroadcastsAsIfDense(GroupFault, ProcessGroupGloo):
    base = "impl"

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return super().broadcast([as_if_dense(x) for x in tensors], opts)


@breaks("scatter/strided", says=r"is wrong")
class ScattersAsIfDense(GroupFault, ProcessGroupGloo):
    base = "impl"

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return super().scatter(outputs, [[as_if_dense(x) for x in one] for one in inputs], opts)


@breaks("gather/strided", says=r"is wrong")
class GathersAsIfDense(ForwardingGroup):
    """The input's memory is sent in the order in which it lies."""

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().gather(outputs, [as_if_dense(x) for x in inputs], opts)


@breaks("all_gather/strided", says=r"is wrong")
class AllGathersAsIfDense(ForwardingGroup):
    """The input's memory is sent in the order in which it lies."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().allgather(outputs, [as_if_dense(x) for x in inputs], opts)


@breaks("reduce/other-ranks-untouched", says=r"rank \d is wrong")
class LeavesPartialSums(GroupFault, ProcessGroupGloo):
    """The last element of the other ranks' tensors holds a partial sum."""

    base = "impl"

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        work = super().reduce(tensors, opts)
        work.wait()
        if self.rank() != opts.rootRank:
            tensors[0].view(-1)[-1:] += 1
        return work


@breaks("reduce/other-ranks-untouched", says=r"large_reduced_on_each[\s\S]*rank \d is wrong")
class LeavesPartialSumsOfPieces(GroupFault, ProcessGroupGloo):
    """What travels in pieces is added up where it passes."""

    base = "impl"

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        work = super().reduce(tensors, opts)
        work.wait()
        if self.rank() != opts.rootRank and tensors[0].numel() > 1 << 16:
            tensors[0].add_(1)
        return work


@breaks("reduce/other-ranks-untouched", says=r"reduce[\s\S]*rank \d is wrong")
class LeavesPartialSumsOfIntegers(GroupFault, ProcessGroupGloo):
    """Integers are added up where they pass."""

    base = "impl"

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        work = super().reduce(tensors, opts)
        work.wait()
        if self.rank() != opts.rootRank and tensors[0].dtype is torch.int64:
            tensors[0].add_(1)
        return work


@breaks("all_gather_into_tensor/only-outputs", says=r"the memory around the tensors: rank \d")
class WritesPastTheEnd(ForwardingGroup):
    """The element behind the output is overwritten."""

    def all_gather_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        work = super().all_gather_single(output, tensor, opts)
        work.wait()
        memory = torch.empty(0, dtype=output.dtype).set_(output.untyped_storage())
        memory[output.storage_offset() + output.numel() :][:1].zero_()
        return work


@breaks("reduce_scatter/only-outputs", says=r"what was only read: rank \d is wrong")
class ReducesItsInputs(ForwardingGroup):
    """The inputs are used for partial sums."""

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        work = super().reduce_scatter(outputs, inputs, opts)
        work.wait()
        inputs[0][-1].copy_(outputs[0])
        return work


@breaks("all_gather/views-of-one-tensor", says=r"rank 0 is wrong")
class FillsCopiesOfViews(ForwardingGroup):
    """Outputs that are part of a larger tensor are replaced by copies."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        whole = [x.nbytes == x.untyped_storage().nbytes() for x in outputs[0]]
        copies = [x if w else x.clone() for x, w in zip(outputs[0], whole, strict=True)]
        return super().allgather([copies], inputs, opts)


@breaks("all_gather_into_tensor/in-place", says=r"rank 0 is wrong")
class ClearsTheOutputFirst(ForwardingGroup):
    """An input inside of the output is gone before it is read."""

    def all_gather_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        return super().all_gather_single(output.zero_(), tensor, opts)


@breaks("reduce_scatter_tensor/in-place", says=r"rank 0 is wrong")
class ReceivesInTheOutput(ForwardingGroup):
    """What is large passes through the output before the input has been read."""

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        if tensor.nbytes > 1 << 16:
            output.zero_()
        return super().reduce_scatter_single(output, tensor, opts)


@breaks("all_gather/aliased-outputs", says=r"was accepted")
class TakesOneTensorTwice(GroupFault, ProcessGroupGloo):
    """A list in which one tensor stands for two ranks holds what came last."""

    base = "impl"

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        apart = [x.clone() for x in outputs[0]]
        work = super().allgather([apart], inputs, opts)
        work.wait()
        for output, x in zip(outputs[0], apart, strict=True):
            output.copy_(x)
        return work


@breaks("all_gather/empty", says=r"died: SIGFPE", verdict=Verdict.CRASHED)
class DividesByTheNumberOfElements(ForwardingGroup):
    """all_gather of nothing ends the process."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if inputs[0].numel() == 0:
            os.kill(os.getpid(), signal.SIGFPE)
        return super().allgather(outputs, inputs, opts)


@breaks("reduce/empty", says=r"raised RuntimeError: nothing to reduce")
class ReducesOnlySomething(ForwardingGroup):
    """A reduce of no elements is an error."""

    def reduce(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].numel() == 0:
            raise RuntimeError("nothing to reduce")
        return super().reduce(tensors, opts)


@breaks("all_reduce/empty", says=r"raised RuntimeError: nothing to reduce")
class RejectsEmptyTensors(ForwardingGroup):
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].numel() == 0:
            raise RuntimeError("nothing to reduce")
        return super().allreduce(tensors, opts)


class _Keeps(ForwardingGroup):
    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, timeout)
        self.kept: list[Tensor] = []


@breaks("work/keeps-nothing", says=r"rank 0 still has tensors of 100 of 100 operations")
class RemembersWhatItReduced(_Keeps):
    """A list of all that was ever issued, to tell of it when something fails."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        self.kept += tensors
        return super().allreduce(tensors, opts)


@breaks("work/keeps-nothing", says=r"rank 0 has \d\d MiB more after 64 operations of 1 MiB")
class AStageForEachBroadcast(_Keeps):
    """What is broadcast is copied to memory that nobody ever frees."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        self.kept += [tensor.clone() for tensor in tensors]
        return super().broadcast(tensors, opts)


@breaks("p2p/keeps-nothing", says=r"rank 0 still has tensors of 100 of 100 operations")
class RemembersWhatItSent(_Keeps):
    """A message is kept in case it must be sent again."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        self.kept += tensors
        return super().send(tensors, dst, tag)


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
class GoesElsewhere(ForwardingGroup):
    """A group works in its own directory, and says so."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, timeout)
        os.chdir("/")
        os.environ["GROUP_AT"] = "/"
