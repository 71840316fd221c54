"""Mutants of conformance/spec/ddp/memory.py."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from impl.ddp.buckets.bucket import GradientSlots
from impl.ddp.iteration import grad_copy
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper.api import DistributedDataParallel
from tests.mutants.ddp.kit import DDPMutant, afterwards, beforehand, instead, swap, together
from tests.mutants.kit import breaks

_kept: list[Any] = []


@breaks("ddp/gradients/other-memory", says=r"gradient 0 in step \d: rank 0 is wrong")
class GivesAwayBucketViews(DDPMutant):
    """If the user moves a gradient, the bucket's view moves with it."""

    patched = instead(GradientSlots, "lend", lambda self: self.views)


@breaks("ddp/gradients/memory-format-later", says="gradient 0 in step 1")
class CopiesMemoryAsItLies(DDPMutant):
    """Gradients are read in the order that their parameters had at construction."""

    @staticmethod
    def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source.as_strided(source.shape, target.stride()))

    patched = instead(grad_copy, "foreach_copy_", _copy)


@breaks("ddp/parameters-in-other-memory", says="gradient 0 in step 2: rank 0 is wrong")
class KeepsParametersWhereTheyWere(DDPMutant):
    """Each forward pass puts them back into the memory that they had at construction."""

    @staticmethod
    def _note(ddp: Any, *_: Any, **__: Any) -> None:
        ddp.memory = [param.data for param in ddp.module.parameters()]

    @staticmethod
    def _put_back(ddp: Any, *_: Any, **__: Any) -> None:
        for param, data in zip(ddp.module.parameters(), ddp.memory, strict=True):
            param.data = data

    patched = together(
        afterwards(DistributedDataParallel, "__init__", _note),
        beforehand(DistributedDataParallel, "_pre_forward", _put_back),
    )


def _keeping_what_raised(right: Any) -> Any:
    def end(self: Any, outer: Any) -> None:
        if sys.exc_info()[0] is None:
            right(self, outer)

    return end


@breaks("ddp/freed-with-its-user", says="still there: the wrapper")
class IsInAForwardThatRaised(DDPMutant):
    """After a forward pass that raised, the wrapper goes on counting as the one that runs."""

    patched = swap(DistributedDataParallel, "_end_forward", _keeping_what_raised)


@breaks("ddp/freed-with-its-user", says="still there: the wrapper")
class KeepsAListOfWrappers(DDPMutant):
    patched = afterwards(
        DistributedDataParallel, "__init__", lambda self, *_, **__: _kept.append(self)
    )


@breaks("ddp/steady-memory", says="32 steps have left memory")
class KeepsWhatItSent(DDPMutant):
    @staticmethod
    def _keep(self: BucketReduction, bucket: Any, _: int) -> None:
        if not bucket.sparse:
            _kept.append(bucket.buffer.clone())

    patched = afterwards(BucketReduction, "start", _keep)
