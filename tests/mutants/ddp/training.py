"""Mutants of conformance/spec/ddp/training.py."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist

from impl.ddp.buckets.bucket import Bucket
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper import api, module_sync
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.torch_private import debug_is_detail
from tests.mutants.ddp.kit import (
    DDPMutant,
    afterwards,
    beforehand,
    constructor,
    instead,
    swap,
    together,
)
from tests.mutants.kit import breaks


def world_size(reduction: BucketReduction) -> int:
    return int(reduction.group.size())


@breaks("ddp/average", says="gradient of .* rank 0 is wrong")
class AddsUpInsteadOfAveraging(DDPMutant):
    patched = instead(BucketReduction, "_divisor", lambda self: None)


@breaks("ddp/debug-detail", says="gradient of .* rank 0 is wrong")
class AddsUpInDetail(DDPMutant):
    patched = swap(
        BucketReduction,
        "_divisor",
        lambda right: lambda self: None if debug_is_detail() else right(self),
    )


@breaks("ddp/whole-batch", says="gradient of .* in step 1: rank 0 is wrong")
class ForgetsTheLastRank(DDPMutant):
    @staticmethod
    def _forget(reduction: BucketReduction, bucket: Bucket, *_: Any) -> None:
        last = reduction.group.rank() == reduction.group.size() - 1
        if last and bucket.buffer is not None:
            bucket.buffer.zero_()

    patched = beforehand(BucketReduction, "start", _forget)


def _disturb(reduction: BucketReduction, bucket: Bucket) -> None:
    for param in bucket.params:
        if param.grad is not None and reduction.group.rank() == 1:
            param.grad.mul_(1 + 2**-50)


@breaks("ddp/same-bits", says=r"rank 1 \(got\) and rank 0 \(want\) differ")
class RanksRoundDifferently(DDPMutant):
    patched = afterwards(BucketReduction, "deliver", _disturb)


@breaks("ddp/initial-state", says="state: rank 1 is wrong")
class EachRankKeepsItsOwnModel(DDPMutant):
    patched = instead(api, "sync_module_states", lambda *args, **kwargs: None)


@breaks("ddp/state-dict", says="names and state|Error.s. in loading state_dict")
class StateDictWithoutPrefix(DDPMutant):
    patched = swap(
        DistributedDataParallel,
        "state_dict",
        lambda right: lambda self, *args, **kwargs: self.module.state_dict(),
    )


@breaks("ddp/arguments", says="arguments: rank 0 is wrong")
class DropsKeywordArguments(DDPMutant):
    patched = swap(
        DistributedDataParallel,
        "forward",
        lambda right: lambda self, *args, **kwargs: right(self, *args),
    )


@breaks("ddp/process-group", says="gradient of .* is wrong")
class AveragesOverTheWorld(DDPMutant):
    patched = swap(
        BucketReduction,
        "__init__",
        lambda right: (
            lambda self, group, *args: right(
                self, dist.distributed_c10d._get_default_group(), *args
            )
        ),
    )


def _divide_late(reduction: BucketReduction, bucket: Bucket) -> None:
    for param in bucket.params:
        if param.grad is not None and reduction.hook is None:
            param.grad.div_(world_size(reduction))


@breaks("ddp/half-precision", says="gradient: rank 0 is wrong")
class DividesAfterAdding(DDPMutant):
    @staticmethod
    def patched() -> Any:
        stack = contextlib.ExitStack()
        stack.enter_context(instead(BucketReduction, "_divisor", lambda self: None)())
        stack.enter_context(afterwards(BucketReduction, "deliver", _divide_late)())
        return stack


def _conjugate(reduction: BucketReduction, bucket: Bucket) -> None:
    for param in bucket.params:
        if param.grad is not None and param.is_complex():
            param.grad.copy_(param.grad.conj())


@breaks("ddp/complex", says="gradient of")
class ConjugatesComplexGradients(DDPMutant):
    patched = afterwards(BucketReduction, "deliver", _conjugate)


def _narrow(reduction: BucketReduction, bucket: Bucket) -> None:
    for param in bucket.params:
        if param.grad is not None and param.dtype == torch.float64:
            param.grad.copy_(param.grad.half())


@breaks("ddp/dtypes", says="gradient of second")
class LosesPrecisionOfDoubles(DDPMutant):
    patched = afterwards(BucketReduction, "deliver", _narrow)


@breaks("ddp/device-mesh", says="mesh and group: rank 0 was to raise")
class IgnoresTheMeshBesideAGroup(DDPMutant):
    patched = swap(
        api,
        "choose_group",
        lambda right: lambda module, group, mesh: right(module, group, None if group else mesh),
    )


@breaks("ddp/parameters-in-place", says="the same, as many, all: rank 0 is wrong")
class WrapsACopy(DDPMutant):
    patched = constructor(
        lambda right: lambda self, module, **options: right(self, copy.deepcopy(module), **options)
    )


def _round(reduction: BucketReduction, bucket: Bucket) -> None:
    for param in bucket.params:
        if param.grad is not None and reduction.group.size() == 1:
            param.grad.copy_(param.grad.float())


@breaks("ddp/world-of-one", says="steps: rank 0 is wrong")
class OneRankAveragesInSinglePrecision(DDPMutant):
    patched = afterwards(BucketReduction, "deliver", _round)


@breaks("ddp/each-rank-weighs-the-same", says="gradient of .* in step 1")
class EachSampleWeighsTheSame(DDPMutant):
    """A rank's gradients count by the size of its batch."""

    @staticmethod
    def _weigh(ddp: Any, x: Any, *_: Any) -> None:
        total = torch.tensor([len(x)])
        dist.all_reduce(total, group=ddp.process_group)
        ddp.reducer._reduction.weight = int(total) / len(x) if len(x) else float("inf")

    patched = together(
        beforehand(DistributedDataParallel, "forward", _weigh),
        instead(BucketReduction, "_divisor", lambda self: self.weight),
    )


@breaks("ddp/shared-parameters", says="gradient of encode.weight")
class LeavesSharedParametersOut(DDPMutant):
    @staticmethod
    def _once(right: Any) -> Any:
        def managed(module: Any, ignored: Any) -> Any:
            named = list(module.named_parameters(remove_duplicate=False))
            twice = {name for name, p in named if sum(p is other for _, other in named) > 1}
            return right(module, {*ignored, *twice})

        return managed

    patched = swap(api, "managed_parameters", _once)


@breaks("ddp/frozen-parameters", says=r"gradient of layers\.1")
class FrozenParametersHaveZeros(DDPMutant):
    @staticmethod
    def _fill(ddp: Any, *_: Any) -> None:
        for param in ddp.module.parameters():
            if not param.requires_grad:
                param.grad = torch.zeros_like(param)

    patched = afterwards(DistributedDataParallel, "_post_forward", _fill)


def _refuse_empty(_: Any, params: Any, *__: Any) -> None:
    if any(param.numel() == 0 for param in params):
        raise RuntimeError("a parameter has no elements")


@breaks("ddp/zero-features", says="raised RuntimeError: a parameter has no elements")
class RefusesEmptyParameters(DDPMutant):
    patched = beforehand(Reducer, "__init__", _refuse_empty)


@breaks("ddp/average", says=r"gradient of .* rank 0 is wrong")
class AveragesOverFourAtMost(DDPMutant):
    """The sum of the gradients of more than four ranks is divided by four."""

    patched = swap(
        BucketReduction,
        "_divisor",
        lambda right: lambda self: min(right(self), 4) if right(self) else None,
    )


def _without_scalars(right: Any) -> Any:
    def broadcast(group: Any, tensors: Any, *args: Any) -> None:
        right(group, [tensor for tensor in tensors if tensor.dim()], *args)

    return broadcast


@breaks("ddp/initial-state", says=r"state: rank \d is wrong[\s\S]*scale")
class ScalarsStayLocal(DDPMutant):
    """Parameters and buffers without dimensions are not broadcast."""

    patched = swap(module_sync, "broadcast_coalesced", _without_scalars)
