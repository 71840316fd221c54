"""Mutants of conformance/spec/collectives/empty.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from conformance.verdict import Verdict
from tests.mutants.collectives.kit import AroundTorch, all_of
from tests.mutants.kit import ForwardingGroup, breaks


@breaks("order/large", says=r"is wrong\nat \[0\]: \d+ of 524309 elements differ")
class ReducesOnlyTheFirstMiB(ForwardingGroup):
    """Elements beyond the first MiB are not reduced."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].is_contiguous():
            return super().allreduce([tensors[0].view(-1)[: 1 << 18]], opts)
        return super().allreduce(tensors, opts)


@breaks("order/large", says=r"op='gather'[\s\S]*is wrong\nat \[\d\]: \d of 262147 elements differ")
class GathersOnlyTheFirstMiB(ForwardingGroup):
    """Elements beyond the first MiB of a rank are not gathered."""

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        end = 1 << 18
        first = [[x.view(-1)[:end] for x in one] for one in outputs]
        return super().gather(first, [x.view(-1)[:end] for x in inputs], opts)


@breaks("order/larger-than-buffers", says=r"rank \d is wrong from element \[8388608\] on")
class CountsBytesIn25Bits(ForwardingGroup):
    """Elements beyond 32 MiB are not broadcast."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        within = [x.view(-1)[: (1 << 25) // x.element_size()] for x in tensors]
        return super().broadcast(within, opts)


@breaks("order/world-of-one", says=r"missing connection between rank 0 and rank 0")
class RefusesAGroupOfOneRank(ForwardingGroup):
    """A group of one rank looks for a connection to itself."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if self.size() == 1:
            raise RuntimeError("missing connection between rank 0 and rank 0")
        return super().allreduce(tensors, opts)


@breaks("all_gather_into_tensor/empty", says=r"raised RuntimeError: nothing to send")
@breaks("broadcast/empty", says=r"raised RuntimeError: nothing to send")
@breaks("gather/empty", says=r"raised RuntimeError: nothing to send")
@breaks("reduce_scatter/empty", says=r"raised RuntimeError: nothing to send")
@breaks("reduce_scatter_tensor/empty", says=r"raised RuntimeError: nothing to send")
@breaks("scatter/empty", says=r"raised RuntimeError: nothing to send")
class RefusesTensorsWithoutElements(AroundTorch):
    """Collectives of tensors without elements are refused."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        if any(x.numel() == 0 for x in all_of(taken, *rest)):
            raise RuntimeError("nothing to send")
        return right(taken, *rest)


@breaks("all_to_all/empty", says=r"raised RuntimeError: nothing to exchange")
@breaks("all_to_all_single/empty", says=r"raised RuntimeError: nothing to exchange")
class AllToAllRefusesEmptyTensors(ForwardingGroup):
    """A rank that sends no elements raises an error."""

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if all(x.numel() == 0 for x in inputs):
            raise RuntimeError("nothing to exchange")
        return super().alltoall(outputs, inputs, opts)

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        if tensor.numel() == 0:
            raise RuntimeError("nothing to exchange")
        return super().all_to_all_single(output, tensor, out, into, opts)


@breaks("all_gather/empty", says=r"died: SIGFPE", verdict=Verdict.CRASHED)
class AllGatherOfNothingCrashes(ForwardingGroup):
    """all_gather of tensors without elements ends the process."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if inputs[0].numel() == 0:
            os.kill(os.getpid(), signal.SIGFPE)
        return super().allgather(outputs, inputs, opts)


@breaks("reduce/empty", says=r"raised RuntimeError: nothing to reduce")
class ReduceRefusesEmptyTensors(ForwardingGroup):
    """A reduce of no elements is an error."""

    def reduce(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].numel() == 0:
            raise RuntimeError("nothing to reduce")
        return super().reduce(tensors, opts)


@breaks("all_reduce/empty", says=r"raised RuntimeError: nothing to reduce")
class AllReduceRefusesEmptyTensors(ForwardingGroup):
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].numel() == 0:
            raise RuntimeError("nothing to reduce")
        return super().allreduce(tensors, opts)
