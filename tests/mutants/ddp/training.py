"""DDP that averages wrongly, or does not hand through what it is given."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from impl.ddp.buckets.bucket import Bucket
from impl.ddp.iteration.autograd_hooks import AccumulatorHooks
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper import api, outputs
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.torch_private import debug_is_detail
from tests.mutants.ddp.kit import DDPFault, afterwards, beforehand, instead, swap
from tests.mutants.kit import breaks


def world_size(reduction: BucketReduction) -> int:
    return int(reduction.group.size())


@breaks("ddp/average", says="gradient of .* rank 0 is wrong")
class AddsUpInsteadOfAveraging(DDPFault):
    patched = instead(BucketReduction, "_divisor", lambda self: None)


@breaks("ddp/debug-detail", says="gradient of .* rank 0 is wrong")
class AddsUpInDetail(DDPFault):
    patched = swap(
        BucketReduction,
        "_divisor",
        lambda right: lambda self: None if debug_is_detail() else right(self),
    )


@breaks("ddp/whole-batch", says="gradient of .* in step 1: rank 0 is wrong")
class ForgetsTheLastRank(DDPFault):
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
class RanksRoundDifferently(DDPFault):
    patched = afterwards(BucketReduction, "deliver", _disturb)


@breaks("ddp/initial-state", says="state: rank 1 is wrong")
class EachRankKeepsItsOwnModel(DDPFault):
    patched = instead(api, "sync_module_states", lambda *args, **kwargs: None)


@breaks("ddp/state-dict", says="names and state|Error.s. in loading state_dict")
class StateDictWithoutPrefix(DDPFault):
    patched = swap(
        DistributedDataParallel,
        "state_dict",
        lambda right: lambda self, *args, **kwargs: self.module.state_dict(),
    )


@breaks("ddp/arguments", says="arguments: rank 0 is wrong")
class DropsKeywordArguments(DDPFault):
    patched = swap(
        DistributedDataParallel,
        "forward",
        lambda right: lambda self, *args, **kwargs: right(self, *args),
    )


@breaks("ddp/outputs", says="output: rank 0 is wrong")
class TuplesBecomeLists(DDPFault):
    patched = swap(
        DistributedDataParallel,
        "forward",
        lambda right: (
            lambda *args, **kwargs: list(y) if type(y := right(*args, **kwargs)) is tuple else y
        ),
    )


@breaks("ddp/dataclass-output", says="mark a variable ready only once")
class DoesNotOpenDataclasses(DDPFault):
    patched = swap(
        api,
        "find_tensors",
        lambda right: lambda y: [] if dataclasses.is_dataclass(y) else outputs.find_tensors(y),
    )


@breaks("ddp/nested-outputs", says="mark a variable ready only once|gradient of")
class LooksAtTheFirstOutputAlone(DDPFault):
    patched = swap(api, "find_tensors", lambda right: lambda y: list(right(y))[:1])


@breaks("ddp/process-group", says="gradient of .* is wrong")
class AveragesOverTheWorld(DDPFault):
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
class DividesAfterAdding(DDPFault):
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
class ConjugatesComplexGradients(DDPFault):
    patched = afterwards(BucketReduction, "deliver", _conjugate)


def _narrow(reduction: BucketReduction, bucket: Bucket) -> None:
    for param in bucket.params:
        if param.grad is not None and param.dtype == torch.float64:
            param.grad.copy_(param.grad.half())


@breaks("ddp/dtypes", says="gradient of second")
class LosesPrecisionOfDoubles(DDPFault):
    patched = afterwards(BucketReduction, "deliver", _narrow)


@breaks("ddp/inference", says="another output")
class AnotherOutputWithoutGradMode(DDPFault):
    patched = swap(
        DistributedDataParallel,
        "forward",
        lambda right: lambda *args: right(*args) * (1 if torch.is_grad_enabled() else 2),
    )


@breaks("ddp/module-hooks", says="calls: rank 0 is wrong")
class RunsTheModuleTwice(DDPFault):
    @staticmethod
    def _twice(right: Any) -> Any:
        def forward(self: Any, *args: Any) -> Any:
            with torch.no_grad():
                self.module(*args)
            return right(self, *args)

        return forward

    patched = swap(DistributedDataParallel, "forward", _twice)


@breaks("ddp/constructed-without-grad-mode", says="gradient: rank 0 is wrong")
class NeedsGradModeAtConstruction(DDPFault):
    @staticmethod
    def _hear_nothing(reducer: Reducer, *_: Any) -> None:
        if not torch.is_grad_enabled():
            reducer._hooks.remove()

    patched = afterwards(Reducer, "__init__", _hear_nothing)


@breaks("ddp/converted-module", says="not averaged")
class DoesNotSeeConversions(DDPFault):
    patched = instead(AccumulatorHooks, "are_stale", lambda self: False)


@breaks("ddp/functional-call", says="the result is|was touched")
class ComputesWithItsOwnParameters(DDPFault):
    patched = swap(
        DistributedDataParallel,
        "forward",
        lambda right: lambda self, *args: right(self, *args) * 0 + 3,
    )


@breaks("ddp/functional-transforms", says="AttributeError")
class TakesTransformsForSteps(DDPFault):
    patched = instead(api, "transforms_are_active", lambda: False)


def _double(reduction: BucketReduction, bucket: Bucket, *_: Any) -> None:
    if bucket.buffer is not None:
        bucket.buffer.mul_(2)


@breaks("ddp/interop", says="gradient of .* rank 0 is wrong")
class CountsTwiceAmongOthers(DDPFault):
    patched = beforehand(BucketReduction, "start", _double)
