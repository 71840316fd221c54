"""Faults of what all collectives share, each seen in several of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.verdict import Verdict
from tests.mutants.collectives.kit import AroundImpl, AroundTorch, all_of, mapped
from tests.mutants.kit import ForwardingGroup, breaks


@breaks("all_gather_into_tensor/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
@breaks("all_reduce/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
@breaks("broadcast/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
@breaks("gather/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
@breaks("reduce/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
@breaks("reduce_scatter/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
@breaks("reduce_scatter_tensor/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
@breaks("scatter/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
class LeavesTheOddElementOut(AroundImpl):
    """Works on pairs: of an odd number of elements, the last one is left as it was."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        is_odd = any(x.numel() % 2 for x in all_of(taken, *rest))
        before = mapped(Tensor.clone, all_of(taken))
        work = right(taken, *rest)
        work.wait()
        for x, old in zip(all_of(taken), before, strict=True):
            if is_odd and x.numel():
                last = (-1,) * x.dim()
                x[last] = old[last]
        return work


@breaks("all_gather_into_tensor/strided", says=r"is wrong")
@breaks("reduce/strided", says=r"is wrong")
@breaks("reduce_scatter/strided", says=r"is wrong")
@breaks("reduce_scatter_tensor/strided", says=r"is wrong")
class LeavesTheResultInADenseCopy(AroundImpl):
    """What comes in for a strided view is put into a dense copy of it, and stays there."""

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
    """The element behind a result is overwritten, where there is memory behind it."""

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
    """What is to be filled is zeroed before what is given is read."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        has_inputs = len(rest) > 1
        return right(mapped(Tensor.zero_, taken) if has_inputs else taken, *rest)


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
    """Each call returns when all is done."""

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
    """With async_op the work is done on copies, and nobody brings them back."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        is_async = rest[-1].asyncOp
        return right(mapped(Tensor.clone, taken) if is_async else taken, *rest)


@breaks("all_gather_into_tensor/empty", says=r"raised RuntimeError: nothing to send")
@breaks("broadcast/empty", says=r"raised RuntimeError: nothing to send")
@breaks("gather/empty", says=r"raised RuntimeError: nothing to send")
@breaks("reduce_scatter/empty", says=r"raised RuntimeError: nothing to send")
@breaks("reduce_scatter_tensor/empty", says=r"raised RuntimeError: nothing to send")
@breaks("scatter/empty", says=r"raised RuntimeError: nothing to send")
class RefusesTensorsWithoutElements(AroundTorch):
    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        if any(x.numel() == 0 for x in all_of(taken, *rest)):
            raise RuntimeError("nothing to send")
        return right(taken, *rest)


@breaks("all_gather/subgroup", says=r"rank 1 is wrong\nat \[0\]")
@breaks("all_gather_into_tensor/subgroup", says=r"rank 1 is wrong")
@breaks("gather/subgroup", says=r"rank 1 is wrong\nat \[0\]")
@breaks("reduce/subgroup", says=r"rank 1 is wrong")
@breaks("reduce_scatter/subgroup", says=r"rank 1 is wrong")
@breaks("reduce_scatter_tensor/subgroup", says=r"rank 1 is wrong")
@breaks("scatter/subgroup", says=r"rank 1 is wrong")
class CountsMembersFromTheEnd(ForwardingGroup):
    """A group of some ranks has its last member's part first, and reduces to the last one."""

    def in_order(self, parts: Any) -> Any:
        """Of a list, or of a tensor that is made of as many blocks."""
        if self.size() == dist.get_world_size():
            return parts
        if isinstance(parts, Tensor):
            return parts.view(self.size(), -1).flip(0).view(parts.shape)
        return list(reversed(parts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().allgather([self.in_order(one) for one in outputs], inputs, opts)

    def all_gather_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        work = super().all_gather_single(output, tensor, opts)
        work.wait()
        output.copy_(self.in_order(output))
        return work

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().gather([self.in_order(one) for one in outputs], inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().scatter(outputs, [self.in_order(one) for one in inputs], opts)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        opts.rootRank = self.in_order(range(self.size()))[opts.rootRank]
        return super().reduce(tensors, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().reduce_scatter(outputs, [self.in_order(one) for one in inputs], opts)

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        return super().reduce_scatter_single(output, self.in_order(tensor), opts)
