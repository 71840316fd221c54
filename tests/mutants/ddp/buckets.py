"""Mutants of conformance/spec/ddp/buckets.py."""

from __future__ import annotations

from typing import Any

from impl.ddp.buckets import agreement as bucket_agreement
from impl.ddp.buckets import assignment as bucketing
from impl.ddp.buckets.assignment import BucketCaps
from impl.ddp.iteration import reducer
from impl.ddp.iteration.readiness import LaunchOrder, Readiness
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper import api
from tests.mutants.ddp.kit import DDPMutant, instead, swap
from tests.mutants.kit import breaks

BUCKETS = r"buckets of step \d"


@breaks("ddp/buckets/initial-with-search", says=BUCKETS)
class InitialBucketsAreInRegistrationOrder(DDPMutant):
    patched = swap(
        api,
        "compute_bucket_assignment_by_size",
        lambda right: lambda *args: tuple(part[::-1] for part in right(*args)),
    )


@breaks("ddp/buckets/initial", says="buckets of step 1")
class LimitsTheFirstStepToo(DDPMutant):
    patched = instead(BucketCaps, "initial_limits", lambda self, **options: [self.bucket_bytes_cap])


@breaks("ddp/buckets/rebuilt", says="buckets of step 2")
class NeverRebuilds(DDPMutant):
    patched = instead(Reducer, "_rebuild_buckets", lambda self: False)


@breaks("ddp/buckets/rebuilt-once", says="buckets of step")
class RebuildsAlways(DDPMutant):
    patched = instead(Reducer, "_should_rebuild", lambda self: True)


@breaks("ddp/buckets/order-of-rank-0", says="is wrong|differ|disagree")
class EachRankInItsOwnOrder(DDPMutant):
    patched = instead(reducer, "agree_on_buckets", lambda group, buckets, device: buckets)


def _cut_by_own_sizes(right: Any) -> Any:
    def agree(group: Any, buckets: list[list[int]], device: Any) -> list[list[int]]:
        sent = [index for bucket in right(group, buckets, device) for index in bucket]
        return bucket_agreement.decode(sent, [len(bucket) for bucket in buckets])

    return agree


@breaks("ddp/buckets/order-of-rank-0", says="is wrong|differ|disagree|raised")
class BucketSizesAreEachRanksOwn(DDPMutant):
    """Rank 0 decides on the order of parameters, and each rank on the sizes of buckets."""

    patched = swap(reducer, "agree_on_buckets", _cut_by_own_sizes)


def _in_own_order(right: Any) -> Any:
    def agree(group: Any, buckets: list[list[int]], device: Any) -> list[list[int]]:
        own = [index for bucket in buckets for index in bucket]
        return [sorted(bucket, key=own.index) for bucket in right(group, buckets, device)]

    return agree


@breaks("ddp/buckets/order-of-rank-0", says="gradient of .* is wrong")
class FillsBucketsInItsOwnOrder(DDPMutant):
    """Buckets are the same sets everywhere, and each rank has its own places in them."""

    patched = swap(reducer, "agree_on_buckets", _in_own_order)


def with_limits(change: Any) -> Any:
    """Rebuilt buckets are filled against other limits."""
    return swap(
        reducer,
        "assign_in_ready_order",
        lambda right: (
            lambda params, order, limits, sparse: right(params, order, change(limits), sparse)
        ),
    )


@breaks("ddp/buckets/cap", says="buckets of step 2")
class FillsBucketsToTwiceTheCap(DDPMutant):
    patched = with_limits(lambda limits: [2 * limit for limit in limits])


@breaks("ddp/buckets/small-first-bucket", says="buckets of step 2")
class NoSmallFirstBucket(DDPMutant):
    patched = with_limits(lambda limits: limits[-1:])


@breaks("ddp/buckets/cap-list", says="buckets of step 2")
class LimitsInReverse(DDPMutant):
    patched = with_limits(lambda limits: limits[::-1])


@breaks("ddp/buckets/one-dtype", says=BUCKETS)
class OneLimitForAllDtypes(DDPMutant):
    patched = swap(
        bucketing,
        "assign",
        lambda right: lambda gradients, limits, **options: right(gradients, limits[-1:], **options),
    )


@breaks("ddp/buckets/gradients-stay-whole", says=BUCKETS)
class LargeGradientsHaveTheirOwnBucket(DDPMutant):
    """A bucket that a large gradient would close is closed before it."""

    @staticmethod
    def _assign(right: Any) -> Any:
        def assign(params: Any, order: Any, limits: Any, sparse: Any) -> Any:
            large = [i for i in order if params[i].nbytes >= limits[-1]]
            return right(params, [*large, *(i for i in order if i not in large)], limits, sparse)

        return assign

    patched = swap(reducer, "assign_in_ready_order", _assign)


@breaks("ddp/buckets/each-parameter-once", says=r"reduced \[|is wrong|raised")
class ReducesBucketsTwice(DDPMutant):
    patched = swap(
        BucketReduction, "start", lambda right: lambda *args: (right(*args), right(*args))[0]
    )


class _AsTheyComplete(LaunchOrder):
    """Launches whatever is complete."""

    def begin(self) -> None:
        super().begin()
        self.done: set[int] = set()

    def take_ready(self, readiness: Readiness) -> list[int]:
        complete = [i for i, left in enumerate(readiness.missing_count) if left == 0]
        ready = [i for i in complete if i not in self.done]
        self.done.update(ready)
        self.next_bucket = len(self.done)
        return ready


@breaks("ddp/buckets/launched-in-order", says=f"{BUCKETS}|Expected to have finished reduction")
class LaunchesAsTheyComplete(DDPMutant):
    @staticmethod
    def patched() -> Any:
        from unittest import mock

        from impl.ddp.iteration import backward_pass

        return mock.patch.multiple(backward_pass, LaunchOrder=_AsTheyComplete)


def _all_at_once(self: LaunchOrder, readiness: Readiness) -> list[int]:
    if any(readiness.missing_count) or self.next_bucket:
        return []
    self.next_bucket = len(readiness.missing_count)
    return list(range(self.next_bucket))


@breaks("ddp/buckets/launched-early", says="early: rank 0 is wrong|Expected to have finished")
class LaunchesAtTheEnd(DDPMutant):
    patched = instead(LaunchOrder, "take_ready", _all_at_once)
