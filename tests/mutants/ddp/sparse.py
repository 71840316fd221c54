"""Mutants of conformance/spec/ddp/sparse.py."""

from __future__ import annotations

from typing import Any

from impl.ddp.buckets.bucket import Bucket
from impl.ddp.buckets.factory import empty_sparse_gradient
from impl.ddp.iteration.comm_hooks import sum_hook
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from tests.mutants.ddp.kit import DDPMutant, afterwards, beforehand, instead, replace, swap
from tests.mutants.kit import breaks


@breaks("ddp/sparse/bucket-of-its-own", says="buckets of two steps")
class HooksAreForDenseGradients(DDPMutant):
    """A sparse gradient is summed without the communication hook."""

    @staticmethod
    def _run(right: Any) -> Any:
        def run(self: Any, bucket: Any) -> Any:
            if bucket.buffer().is_sparse:
                return sum_hook(self.group, bucket).then(lambda done: done.value()[0])
            return right(self, bucket)

        return run

    patched = swap(BucketReduction, "run_hook", _run)


@breaks("ddp/sparse/average", says="gradient of step 1: rank 0 is wrong")
class HalvesSparseGradients(DDPMutant):
    """Sparse gradients are halved before the sum, as if there were two ranks."""

    @staticmethod
    def _halve(reduction: BucketReduction, bucket: Bucket) -> None:
        assert bucket.buffer is not None
        bucket.buffer = bucket.buffer * (reduction.group.size() / 2)

    patched = afterwards(BucketReduction, "take_sparse", _halve)


@breaks("ddp/sparse/added-embeddings", says="gradient of .* in step 1: rank 0 is wrong")
class DividesSparseGradientsWhereTheyAre(DDPMutant):
    """What autograd gives for a sparse gradient is divided, not a copy of it."""

    @staticmethod
    def _divide(_: BucketReduction, bucket: Bucket) -> None:
        for param in bucket.params:
            if param.grad is not None and param.grad.is_sparse:
                param.grad._values().div_(2)

    patched = afterwards(BucketReduction, "take_sparse", _divide)


@breaks("ddp/sparse/unused-on-a-rank", says="gradient of step 1: rank 1 is wrong")
class RanksWithoutASparseGradientGetNone(DDPMutant):
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
class ConvertsDenseGradientsToSparse(DDPMutant):
    """A dense gradient where a sparse one is expected is made one."""

    patched = beforehand(BucketReduction, "take_sparse", _sparsify)


@breaks("ddp/sparse/metadata", says="rows: rank 0 is wrong")
class NeedsNoMetadata(DDPMutant):
    patched = instead(Reducer, "_set_sparse_metadata", lambda self, metadata: None)


@breaks("ddp/sparse/training", says="sparse: rank 0 is wrong")
@breaks("ddp/sparse/average", says="sparse: rank 0 is wrong")
class DenseInsteadOfSparse(DDPMutant):
    patched = replace(lambda grad: grad.to_dense() if grad.is_sparse else grad)
