"""Mutants of conformance/spec/collectives/layouts.py."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from conformance.power.handles import Relayed
from impl.gloo import ProcessGroupGloo
from tests.mutants.collectives.kit import (
    AroundImpl,
    AroundTorch,
    all_of,
    inputs_mapped,
    mapped,
    zeros_if_expanded,
)
from tests.mutants.kit import ForwardingGroup, GroupMutant, breaks


class _CopiesBack(Relayed):
    def __init__(self, inner: Any, buffer: Tensor, view: Tensor) -> None:
        super().__init__(inner)
        self.buffer, self.view = buffer, view

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = super().wait(timeout)
        self.view.copy_(self.buffer.view(self.view.shape))
        return done


@breaks("all_reduce/strided", says=r"is wrong")
class StridedSumsShareABuffer(ForwardingGroup):
    """All that are pending and have the same size are summed in the same memory."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        [view] = tensors
        if view.is_contiguous():
            return super().allreduce(tensors, opts)
        buffers = self.__dict__.setdefault("buffers", {})
        buffer = buffers.setdefault((view.numel(), view.dtype), view.new_empty(view.numel()))
        buffer.copy_(view.reshape(-1))
        return _CopiesBack(super().allreduce([buffer], opts), buffer, view)


@breaks("all_gather_into_tensor/strided", says=r"is wrong")
@breaks("reduce/strided", says=r"is wrong")
@breaks("reduce_scatter/strided", says=r"is wrong")
@breaks("reduce_scatter_tensor/strided", says=r"is wrong")
class LeavesTheResultInADenseCopy(AroundImpl):
    """The result for a strided view is written to a dense copy of it, and stays there."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        return right(mapped(lambda x: x.contiguous(), taken), *rest)


@breaks("all_gather/only-outputs", says=r"the memory around the tensors: rank \d is wrong")
@breaks("all_reduce/only-outputs", says=r"the memory around the tensors: rank \d is wrong")
@breaks("broadcast/only-outputs", says=r"the memory around the tensors: rank \d is wrong")
@breaks("gather/only-outputs", says=r"the memory around the tensors: rank \d is wrong")
@breaks("reduce/only-outputs", says=r"the memory around the tensors: rank \d is wrong")
@breaks("reduce_scatter_tensor/only-outputs", says=r"the memory around the tensors: rank \d is")
@breaks("scatter/only-outputs", says=r"the memory around the tensors: rank \d is wrong")
class WritesOneElementMore(AroundTorch):
    """The element after a result is overwritten, if there is memory after it."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        work = right(taken, *rest)
        work.wait()
        for x in all_of(taken):
            memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
            memory[x.storage_offset() + x.numel() :][:1].zero_()
        return work


@breaks("all_gather/in-place", says=r"rank 0 is wrong\nat \[0\]")
@breaks("reduce_scatter_tensor/in-place", says=r"rank 0 is wrong")
class ClearsResultsFirst(AroundTorch):
    """Outputs are zeroed before inputs are read."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        has_inputs = len(rest) > 1
        return right(mapped(Tensor.zero_, taken) if has_inputs else taken, *rest)


def as_if_dense(x: Tensor) -> Tensor:
    """The first bytes of a view's memory, taken for the view."""
    dense = torch.empty(x.shape).stride()
    if x.storage_offset() + x.numel() > x.untyped_storage().nbytes() // x.element_size():
        return x
    return x.as_strided(x.shape, dense)


@breaks("all_to_all/strided", says=r"is wrong")
@breaks("all_to_all_single/strided", says=r"is wrong")
class ExchangesAsIfDense(GroupMutant, ProcessGroupGloo):
    """The inputs' memory is sent in the order in which it lies."""

    base = "impl"

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return super().alltoall(outputs, [as_if_dense(x) for x in inputs], opts)

    def all_to_all_single(
        self, output: Any, tensor: Any, out: Any = (), into: Any = (), opts: Any = None
    ) -> Any:
        return super().all_to_all_single(output, as_if_dense(tensor), out, into, opts)


@breaks("all_to_all/only-outputs", says=r"what was only read: rank \d is wrong")
@breaks("all_to_all_single/only-outputs", says=r"what was only read: rank \d is wrong")
class AllToAllOverwritesItsInputs(ForwardingGroup):
    """What comes in lies in the inputs too."""

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        work = super().alltoall(outputs, inputs, opts)
        work.wait()
        for output, tensor in zip(outputs, inputs, strict=True):
            tensor.copy_(output)
        return work

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        work = super().all_to_all_single(output, tensor, out, into, opts)
        work.wait()
        rows = min(len(output), len(tensor))
        tensor[:rows] = output[:rows]
        return work


@breaks("all_gather/strided", says=r"of expanded tensors: rank 0 is wrong")
@breaks("scatter/strided", says=r"of expanded tensors: rank 0 is wrong")
@breaks("all_to_all_single/strided", says=r"of expanded tensors: rank 0 is wrong")
class ReadsZerosForExpandedTensors(AroundImpl):
    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        return right(taken, *inputs_mapped(zeros_if_expanded, *rest))


@breaks("all_reduce/strided", says=r"rank 0 is wrong")
class ReducesACopy(GroupMutant, ProcessGroupGloo):
    """The dense copy of a view is reduced, and the view is not."""

    base = "impl"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return super().allreduce([x.contiguous() for x in tensors], opts)


@breaks("broadcast/strided", says=r"is wrong")
class BroadcastsAsIfDense(GroupMutant, ProcessGroupGloo):
    base = "impl"

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return super().broadcast([as_if_dense(x) for x in tensors], opts)


@breaks("scatter/strided", says=r"is wrong")
class ScattersAsIfDense(GroupMutant, ProcessGroupGloo):
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
class TakesOneTensorTwice(GroupMutant, ProcessGroupGloo):
    """A list in which the same tensor is the output for two ranks is accepted."""

    base = "impl"

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        apart = [x.clone() for x in outputs[0]]
        work = super().allgather([apart], inputs, opts)
        work.wait()
        for output, x in zip(outputs[0], apart, strict=True):
            output.copy_(x)
        return work


@breaks("all_gather/strided", says=r"shape=\(2, 3, 1, 4, 3\)[\s\S]*is wrong")
class TurnsViewsOfFiveDimensions(AroundImpl):
    """What is read from a view of five dimensions has the last two of them exchanged."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        def turned(x: Tensor) -> Tensor:
            if x.dim() < 5 or x.is_contiguous():
                return x
            return x.transpose(-1, -2).reshape(x.shape)

        return right(taken, *inputs_mapped(turned, *rest))
