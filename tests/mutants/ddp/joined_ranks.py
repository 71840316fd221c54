"""Mutants of conformance/spec/ddp/joined_ranks.py."""

from __future__ import annotations

from typing import Any

import torch

from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.ddp.wrapper.buffer_sync import BufferSync
from impl.ddp.wrapper.join import JoinParticipant
from tests.mutants.ddp.kit import DDPMutant, instead, swap
from tests.mutants.kit import breaks


@breaks("ddp/join/buckets-of-hooks", says="buckets: rank 0 is wrong")
class ZeroBucketsAreFirst(DDPMutant):
    """Each bucket that the hook of a joined rank gets has index 0."""

    @staticmethod
    def _numbered_0(right: Any) -> Any:
        def zero_bucket(self: Any, bucket: Any, bucket_count: int) -> Any:
            made = right(self, bucket, bucket_count)
            made._index = 0
            return made

        return zero_bucket

    patched = swap(BucketReduction, "zero_bucket", _numbered_0)


@breaks("ddp/join/buffers", says=r"forward 3 began with the buffer of 0\.0, not one of \[1\]")
class BuffersAreAlwaysRank0s(DDPMutant):
    """Rank 0's buffers are broadcast, even if it has no input any more."""

    patched = instead(
        DistributedDataParallel, "_authoritative_buffer_rank", lambda self, *, has_input: 0
    )


@breaks("ddp/join/buffer-hook", says="ranks disagree on op|calls of the hook")
class JoinedRanksHaveNoBufferHook(DDPMutant):
    patched = swap(
        BufferSync,
        "_check_and_sync_module_buffers",
        lambda right: lambda self: None if hasattr(self, "buffer_hook") else right(self),
    )


@breaks("ddp/join/unused-by-those-who-are-left", says="which have a gradient: .*, want")
class JoinedRanksRepeatTheirMap(DDPMutant):
    """A joined rank contributes the parameters that it used in the step before."""

    patched = instead(Reducer, "_get_empty_used_map", lambda self: self._used_map().on_device)


@breaks("ddp/join/comm-hook", says="the hook ran|gradient of step|raised")
class JoinedRanksHaveNoHook(DDPMutant):
    @staticmethod
    def _match(self: Any) -> None:
        for bucket in self.reducer._get_zeros_like_grad_buckets():
            self.reducer._run_allreduce_hook(bucket).wait()

    patched = instead(JoinParticipant, "_match_all_reduce_for_bwd_pass", _match)


def _with_a_row(right: Any) -> Any:
    def zeros(self: Any, bucket: Any, bucket_count: int) -> Any:
        made = right(self, bucket, bucket_count)
        if bucket.sparse:
            (param,) = bucket.params
            row, ones = torch.zeros(1, 1, dtype=torch.int64), torch.ones_like(param[:1])
            made.set_buffer(torch.sparse_coo_tensor(row, ones, param.shape, check_invariants=False))
        return made

    return zeros


@breaks("ddp/join/sparse", says="gradient of step 2: rank 1 is wrong")
class JoinedRanksHaveASparseGradient(DDPMutant):
    """A joined rank contributes a row of ones."""

    patched = swap(BucketReduction, "zero_bucket", _with_a_row)
