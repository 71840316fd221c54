"""Mutants of conformance/spec/collectives/empty.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from conformance.verdict import Verdict
from tests.mutants.collectives.kit import AroundTorch, all_of
from tests.mutants.kit import ForwardingGroup, breaks


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
