"""Mutants of conformance/spec/comm_hooks/refusals.py."""

from __future__ import annotations

from typing import Any

import torch

from impl.ddp.iteration import reduction
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper import hook_registration
from tests.mutants.ddp.kit import DDPMutant, beforehand, instead, swap
from tests.mutants.kit import breaks


def completed(value: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(value)
    return future


@breaks("comm_hooks/registered-twice", says="was to raise")
class TakesASecondHook(DDPMutant):
    patched = beforehand(
        BucketReduction, "set_hook", lambda self, *_, **__: setattr(self, "hook", None)
    )


@breaks("comm_hooks/not-callable", says="was to raise|does not match")
@breaks("comm_hooks/annotations", says="was to raise")
class TakesAnythingForAHook(DDPMutant):
    patched = instead(hook_registration, "why_unusable", lambda *args: None)


def _lenient(state_of: Any) -> Any:
    """A way to run hooks in which what goes wrong becomes the bucket's buffer."""

    def run(hook: Any, state: Any, bucket: Any) -> Any:
        try:
            future = hook(state, bucket)
        except ArithmeticError:
            return completed(bucket.buffer())
        return future if isinstance(future, torch.futures.Future) else completed(bucket.buffer())

    return run


@breaks("comm_hooks/returns-no-future", says="was to raise")
@breaks("comm_hooks/returns-none", says="was to raise")
@breaks("comm_hooks/raises", says="was to raise")
class HooksThatFailMeanUnchanged(DDPMutant):
    patched = swap(reduction, "run_hook", _lenient)


def _forgiving(right: Any) -> Any:
    def result_of(bucket: Any, **options: Any) -> Any:
        try:
            return right(bucket, **options)
        except (RuntimeError, ArithmeticError):
            return bucket.buffer

    return result_of


@breaks("comm_hooks/future-of-no-tensor", says="was to raise")
@breaks("comm_hooks/future-raises", says="was to raise")
class FuturesThatFailMeanUnchanged(DDPMutant):
    patched = swap(reduction, "result_of", _forgiving)


def _of_first_buckets(right: Any) -> Any:
    def result_of(bucket: Any, **how: Any) -> Any:
        try:
            return right(bucket, **how)
        except Exception:
            if bucket.index == 0:
                raise
            return bucket.buffer

    return result_of


@breaks("comm_hooks/future-raises", says="was to raise")
class ForgetsErrorsOfLaterBuckets(DDPMutant):
    """The errors of futures are raised for the first bucket alone."""

    patched = swap(reduction, "result_of", _of_first_buckets)
