"""DDP that is wrong about gradients of unusual layouts, and about ranks out of input."""

from __future__ import annotations

import contextlib
from typing import Any

from impl.ddp.buckets import layout
from impl.ddp.buckets.bucket import Bucket
from impl.ddp.buckets.factory import empty_sparse_gradient
from impl.ddp.iteration.comm_hooks import sum_hook
from impl.ddp.iteration.grad_copy import GradientCopier
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper.api import DistributedDataParallel
from tests.mutants.ddp.kit import DDPFault, afterwards, beforehand, instead, swap
from tests.mutants.kit import breaks


@breaks("ddp/gradients/strides-with-gaps", says="out of bounds for storage")
class GradientsHaveGapsToo(DDPFault):
    """A gradient has its parameter's strides, whether or not these are dense."""

    patched = instead(layout, "gradient_strides", lambda param: param.stride())


@breaks("ddp/gradients/batched-copy", says="gradient of .* in step 1")
class DividesBatchesTwice(DDPFault):
    @staticmethod
    def _again(copier: Any, slots: Any, copied: Any, resident: Any, divisor: int) -> None:
        if copier.divide_once_per_bucket and slots.whole is not None:
            slots.whole.div_(divisor)

    patched = afterwards(GradientCopier, "_scale", _again)


# ---- sparse gradients


@breaks("ddp/sparse/bucket-of-its-own", says="buckets of two steps")
class HooksAreForDenseGradients(DDPFault):
    """A sparse gradient is added up without the hook."""

    @staticmethod
    def _run(right: Any) -> Any:
        def run(self: Any, bucket: Any) -> Any:
            if bucket.buffer().is_sparse:
                return sum_hook(self.group, bucket).then(lambda done: done.value()[0])
            return right(self, bucket)

        return run

    patched = swap(BucketReduction, "run_hook", _run)


@breaks("ddp/sparse/added-embeddings", says="gradient of .* in step 1: rank 0 is wrong")
class DividesSparseGradientsWhereTheyAre(DDPFault):
    """What autograd gives for a sparse gradient is divided, not a copy of it."""

    @staticmethod
    def _divide(_: BucketReduction, bucket: Bucket) -> None:
        for param in bucket.params:
            if param.grad is not None and param.grad.is_sparse:
                param.grad._values().div_(2)

    patched = afterwards(BucketReduction, "take_sparse", _divide)


@breaks("ddp/sparse/unused-on-a-rank", says="gradient of step 1: rank 1 is wrong")
class WhoHasNoneGetsNothing(DDPFault):
    """A rank without a sparse gradient ends with its own contribution, which is empty."""

    @staticmethod
    def _deliver(right: Any) -> Any:
        def deliver(self: Any, bucket: Bucket, result: Any) -> None:
            (param,) = bucket.params
            right(self, bucket, result if param.grad is not None else empty_sparse_gradient(param))

        return deliver

    patched = swap(BucketReduction, "_deliver_sparse", _deliver)


def _sparsify(_: Any, bucket: Bucket) -> None:
    for param in bucket.params:
        if param.grad is not None and not param.grad.is_sparse:
            param.grad = param.grad.to_sparse(1)


@breaks("ddp/sparse/dense-where-sparse-is-expected", says="rank 0 was to raise")
class MakesItSparse(DDPFault):
    """A dense gradient where a sparse one is expected is made one."""

    patched = beforehand(BucketReduction, "take_sparse", _sparsify)


@breaks("ddp/sparse/metadata", says="rows: rank 0 is wrong")
class NeedsNoMetadata(DDPFault):
    patched = instead(Reducer, "_set_sparse_metadata", lambda self, metadata: None)


# ---- join


@breaks("ddp/join/no-input-at-all", says="parameter 0 at the end")
class WhoNeverBeganCounts(DDPFault):
    """A rank that had no input counts among those that joined last: its model may be the final."""

    patched = swap(
        DistributedDataParallel,
        "_sync_final_model",
        lambda right: (
            lambda self, is_last_joiner: right(self, is_last_joiner or not self.reducer.iteration)
        ),
    )


@breaks("ddp/join/unused-parameters", says="ranks disagree on numel")
class JoinedRanksBeginAtTheEnd(DDPFault):
    """A joined rank takes buckets from the last to the first."""

    patched = swap(
        Reducer, "_get_zeros_like_grad_buckets", lambda right: lambda self: right(self)[::-1]
    )


@breaks("ddp/join/no-sync", says="gradient of step 2 on rank 1")
class JoinKnowsNoNoSync(DDPFault):
    """Inside join() every pass is synchronised."""

    patched = swap(
        DistributedDataParallel,
        "no_sync",
        lambda right: (
            lambda self: contextlib.nullcontext() if self._join_config.enable else right(self)
        ),
    )


def _join_with(**always: Any) -> Any:
    """join() with arguments that cannot be changed."""
    return swap(
        DistributedDataParallel,
        "join",
        lambda right: lambda self, **how: right(self, **{**how, **always}),
    )


@breaks("ddp/join/throw-on-early-termination", says="rank 0 was to raise RuntimeError")
class NeverThrows(DDPFault):
    patched = _join_with(throw_on_early_termination=False)


@breaks("ddp/join/disabled", says="operations: rank 0 is wrong")
class CannotBeDisabled(DDPFault):
    patched = _join_with(enable=True)
