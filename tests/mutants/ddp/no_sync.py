"""Mutants of conformance/spec/ddp/no_sync.py."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from impl.ddp.iteration.grad_copy import GradientCopier
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.wrapper.api import DistributedDataParallel
from tests.mutants.ddp.kit import DDPMutant, afterwards, forget, instead, swap, together
from tests.mutants.kit import breaks


def _forget(reducer: Reducer) -> None:
    for param in reducer.params:
        param.grad = None


@breaks("ddp/no-sync/first", says="gradient of .* in step 1")
class BeginsWithTheFirstSynchronisedPass(DDPMutant):
    """Gradients that were accumulated before the first synchronised pass are dropped."""

    patched = afterwards(
        Reducer,
        "prepare_for_backward",
        lambda self, *_: _forget(self) if self.iteration == 1 else None,
    )


@breaks("ddp/no-sync/bucket-views", says="gradient of .* in step 1")
class DividesOnlyCopiedGradients(DDPMutant):
    """A gradient that lives in its bucket already is not divided."""

    patched = swap(
        GradientCopier,
        "_scale",
        lambda right: (
            lambda self, slots, copied, resident, divisor: (
                right(self, slots, copied, resident, divisor) if copied else None
            )
        ),
    )


@breaks("ddp/no-sync/comm-hook", says="calls and gradient")
class HooksSeeTheLastPassAlone(DDPMutant):
    patched = afterwards(
        Reducer,
        "prepare_for_backward",
        lambda self, *_: _forget(self) if self._reduction.hook is not None else None,
    )


def _if_there(right: Any) -> Any:
    def copy_one_in(self: Any, param: Any, view: Any, divisor: int | None) -> None:
        if param.grad is not None:
            right(self, param, view, divisor)

    return copy_one_in


@breaks("ddp/gradients/large", says="gradient of .* in step 2: rank 0 is wrong")
class LeavesOldLargeGradientsInBuckets(DDPMutant):
    """A large gradient that a rank does not have counts as what its bucket still holds."""

    patched = swap(GradientCopier, "copy_one_in", _if_there)


@breaks("ddp/no-sync/silent", says="collectives of each pass")
class SynchronisesAlways(DDPMutant):
    patched = instead(DistributedDataParallel, "no_sync", lambda self: contextlib.nullcontext())


@breaks(
    "ddp/no-sync/after-a-dropped-forward", says="collectives inside no_sync|raised RuntimeError"
)
class SynchronisesWhicheverBackwardIsNext(DDPMutant):
    """A forward pass whose output was dropped makes the next backward pass a synchronised one."""

    patched = instead(Reducer, "backward_of_no_sync_begins", lambda self: None)


@contextlib.contextmanager
def _no_sync(ddp: Any) -> Any:
    ddp.require_backward_grad_sync = False
    try:
        yield
    finally:
        ddp.require_backward_grad_sync = True


@breaks("ddp/no-sync/nested", says="collectives of each pass")
class NoSyncEndsWithTheInnerOne(DDPMutant):
    patched = instead(DistributedDataParallel, "no_sync", _no_sync)


@breaks("ddp/no-sync/accumulates", says="gradient of .* in step 1")
class ForgetsWhatWasAddedUp(DDPMutant):
    patched = afterwards(Reducer, "prepare_for_backward", forget)


@breaks("ddp/no-sync/every-parameter", says="gradient of|has one")
class SynchronisesWhatTheLastPassUsed(DDPMutant):
    @staticmethod
    def _clear(reducer: Reducer) -> None:
        if reducer._reduction.used is not None:
            reducer._reduction.used.clear()

    patched = afterwards(Reducer, "_expect_backward", _clear)


def _by_hand(right: Any) -> Any:
    def forward(self: Any, output: Any) -> Any:
        is_outside = not getattr(self, "is_in_no_sync", False)
        with mock.patch.object(
            self, "require_backward_grad_sync", is_outside or self.require_backward_grad_sync
        ):
            return right(self, output)

    return forward


def _noting(right: Any) -> Any:
    @contextlib.contextmanager
    def no_sync(self: Any) -> Any:
        self.is_in_no_sync = True
        with right(self):
            yield
        self.is_in_no_sync = False

    return no_sync


@breaks("ddp/no-sync/attribute", says="gradients on rank 0")
class BelievesNoSyncAlone(DDPMutant):
    """require_backward_grad_sync counts only inside no_sync."""

    patched = together(
        swap(DistributedDataParallel, "_post_forward", _by_hand),
        swap(DistributedDataParallel, "no_sync", _noting),
    )
