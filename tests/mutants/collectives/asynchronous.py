"""Mutants of conformance/spec/collectives/asynchronous.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from conformance.power.handles import Done
from conformance.verdict import Verdict
from tests.mutants.collectives.kit import AroundTorch, mapped
from tests.mutants.kit import ForwardingGroup, breaks


@breaks("all_reduce/nonblocking", says=r"waited in", verdict=Verdict.TIMEOUT)
@breaks("reduce/nonblocking", says=r"waited in", verdict=Verdict.TIMEOUT)
@breaks("broadcast/nonblocking", says=r"waited in", verdict=Verdict.TIMEOUT)
@breaks("all_gather/nonblocking", says=r"waited in", verdict=Verdict.TIMEOUT)
@breaks(
    "all_gather_into_tensor/nonblocking",
    says=r"waited in all_gather",
    verdict=Verdict.TIMEOUT,
)
@breaks("gather/nonblocking", says=r"waited in", verdict=Verdict.TIMEOUT)
@breaks("scatter/nonblocking", says=r"waited in", verdict=Verdict.TIMEOUT)
@breaks("reduce_scatter/nonblocking", says=r"waited in", verdict=Verdict.TIMEOUT)
@breaks(
    "reduce_scatter_tensor/nonblocking",
    says=r"waited in reduce_scatter",
    verdict=Verdict.TIMEOUT,
)
@breaks("all_to_all/nonblocking", says=r"waited in", verdict=Verdict.TIMEOUT)
@breaks(
    "all_to_all_single/nonblocking", says=r"waited in all_to_all_single", verdict=Verdict.TIMEOUT
)
class BlocksAlthoughAsynchronous(AroundTorch):
    """With async_op, each call returns only when the operation is complete."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        work = right(taken, *rest)
        work.wait()
        return work


@breaks("all_reduce/async", says=r"rank 0 is wrong")
@breaks("all_gather/async", says=r"rank 0 is wrong\nat \[0\]")
@breaks("all_gather_into_tensor/async", says=r"rank 0 is wrong")
@breaks("gather/async", says=r"rank 0 is wrong\nat \[0\]")
@breaks("reduce/async", says=r"rank 0 is wrong")
@breaks("reduce_scatter/async", says=r"rank 0 is wrong")
@breaks("reduce_scatter_tensor/async", says=r"rank 0 is wrong")
@breaks("scatter/async", says=r"rank 0 is wrong")
class AsynchronousResultsStayInACopy(AroundTorch):
    """With async_op, the operation runs on copies, which are never copied back."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        is_async = rest[-1].asyncOp
        return right(mapped(Tensor.clone, taken) if is_async else taken, *rest)


@breaks("all_to_all/async", says=r"rank \d is wrong")
@breaks("all_to_all_single/async", says=r"rank \d is wrong")
class AsyncAllToAllDoesNothing(ForwardingGroup):
    """An asynchronous all_to_all returns a handle and exchanges nothing."""

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return Done() if opts.asyncOp else super().alltoall(outputs, inputs, opts)

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        if opts.asyncOp:
            return Done()
        return super().all_to_all_single(output, tensor, out, into, opts)


@breaks("broadcast/async", says=r"rank \d is wrong")
class AsyncBroadcastDoesNothing(ForwardingGroup):
    """An asynchronous broadcast returns a handle and sends nothing."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return Done() if opts.asyncOp else super().broadcast(tensors, opts)
