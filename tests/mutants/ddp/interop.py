"""Mutants of conformance/spec/ddp/interop.py."""

from __future__ import annotations

from typing import Any

from impl.ddp.buckets.bucket import Bucket
from impl.ddp.iteration.reduction import BucketReduction
from tests.mutants.ddp.kit import DDPMutant, beforehand
from tests.mutants.kit import breaks


def _double(reduction: BucketReduction, bucket: Bucket, *_: Any) -> None:
    if bucket.buffer is not None:
        bucket.buffer.mul_(2)


@breaks("ddp/interop", says="gradient of .* rank 0 is wrong")
class CountsTwiceAmongOthers(DDPMutant):
    patched = beforehand(BucketReduction, "start", _double)
