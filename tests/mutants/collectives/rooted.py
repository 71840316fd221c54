"""Faults of calls with several tensors, of calls that differ between ranks, and of gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.nn import functional

from tests.mutants.kit import ForwardingGroup, Patch, breaks
from tests.mutants.replacing import Replacing


@breaks("all_reduce_coalesced/values", says=r"rank 0 is wrong\nat \[1\]")
class ReducesTheFirstOfSeveral(ForwardingGroup):
    """Of several tensors the first alone is reduced."""

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        return super().allreduce_coalesced(tensors[:1], opts)


@breaks("all_reduce_coalesced/mixed-dtypes-refused", says=r"rank 0 is wrong\nat \[0\]")
class CoercesMixedDtypes(Replacing):
    """Tensors of several dtypes go through that of the first."""

    @staticmethod
    def all_reduce_coalesced(right: Any, tensors: Any, *args: Any, **how: Any) -> Any:
        same = [x.to(tensors[0].dtype) for x in tensors]
        future = right(same, *args, **how)
        for x, y in zip(tensors, same, strict=True):
            x.copy_(y)
        return future


@breaks("all_gather_coalesced/values", says=r"rank 0 is wrong\nat \[0\]\[0\]")
class GathersListsBackwards(ForwardingGroup):
    """The list of the last rank comes first."""

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().allgather_coalesced(list(reversed(outputs)), inputs, opts)


@breaks("coalescing/all_reduce", says=r"rank 0 is wrong\nat \[0\]")
class ManagersReduceTheLast(Replacing):
    """A reduction in a manager takes the place of the one before."""

    @staticmethod
    def all_reduce(right: Any, tensor: Any, *args: Any, **how: Any) -> Any:
        work = right(tensor, *args, **how)
        group = distributed_c10d._group_or_default_group(how.get("group"))
        collected = distributed_c10d._world.pg_coalesce_state.get(group, [])
        del collected[:-1]
        return work


@breaks("all_reduce_coalesced/reduce-ops", says=r"rank 0 is wrong")
@breaks("coalescing/reduce-op", says=r"op=min[\s\S]*rank 0 is wrong")
class ManagersAlwaysAdd(ForwardingGroup):
    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        opts.reduceOp = dist.ReduceOp.SUM
        return super().allreduce_coalesced(tensors, opts)


@breaks("coalescing/other-operations", says=r"rank 0 is wrong\nat \[0\]")
class ReducesInManagersAreDoubled(Replacing):
    """A reduce is made when it is called, and once more at the end of the manager."""

    @staticmethod
    def reduce(right: Any, tensor: Any, *args: Any, **how: Any) -> Any:
        work = right(tensor, *args, **how)
        group = distributed_c10d._group_or_default_group(how.get("group"))
        if group in distributed_c10d._world.pg_coalesce_state:
            right(tensor, *args, **how)
        return work


@breaks("gather/list-at-destination-only", says=r"raised ValueError: every rank needs a list")
class GatherNeedsListsEverywhere(Replacing):
    @staticmethod
    def gather(right: Any, tensor: Any, gather_list: Any = None, *args: Any, **how: Any) -> Any:
        if gather_list is None:
            raise ValueError("every rank needs a list")
        return right(tensor, gather_list, *args, **how)


@breaks("autograd/all_gather", says=r"rank 0 is wrong")
class KeepsItsOwnGradient(Patch):
    """Backward of an all_gather takes this rank's own gradient for that of all."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def own(ctx: Any, *gradients: Any) -> Any:
            return None, gradients[dist.get_rank(ctx.group)]

        with mock.patch.object(functional._AllGather, "backward", staticmethod(own)):
            yield


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("no gradient")


@breaks("functional/avg-gradient", says=r"was refused with 'no gradient'")
class HasNoGradient(Patch):
    """Backward of a functional average raises, and does not say what is not supported."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        right = _functional_collectives.all_reduce

        def all_reduce(x: Any, op: str, *args: Any, **how: Any) -> Any:
            result = right(x, op, *args, **how)
            return _NoGradient.apply(result) if op == "avg" else result  # type: ignore[no-untyped-call]  # torch's

        with mock.patch.object(_functional_collectives, "all_reduce", all_reduce):
            yield


class _SumOfGradients(torch.autograd.Function):
    """A mean over the ranks, whose backward adds up and does not divide."""

    @staticmethod
    def forward(ctx: Any, _x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total, None


@breaks("functional/avg-gradient", says=r"rank 0 is wrong")
@breaks("functional/avg-gradient-works", says=r"rank 0 is wrong")
class AverageHasTheGradientOfASum(Patch):
    """The gradient of a functional average is the sum of all ranks' gradients."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        right = _functional_collectives.all_reduce

        def all_reduce(x: Any, op: str, *args: Any, **how: Any) -> Any:
            if op != "avg":
                return right(x, op, *args, **how)
            mean = _functional_collectives.wait_tensor(right(x.detach(), op, *args, **how))
            return _SumOfGradients.apply(x, mean)  # type: ignore[no-untyped-call]  # torch's

        with mock.patch.object(_functional_collectives, "all_reduce", all_reduce):
            yield


@breaks("mismatch/numel", says=r"returned as if all ranks had made the same call")
class ReducesWhatFits(ForwardingGroup):
    """Ranks with different numbers of elements reduce the smaller one.

    It claims what impl claims: torch's gloo does not say that it compares calls.
    """

    base = "impl"

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        [x] = tensors
        fewest = torch.tensor([x.numel()])
        how: Any = dist.AllreduceOptions()
        how.reduceOp = dist.ReduceOp.MIN
        self.inner.allreduce([fewest], how).wait()
        return super().allreduce([x.view(-1)[: int(fewest)]], opts)
