"""Counts of missing gradients per bucket, and the complete buckets that are reduced next, in order.

Pure: counters and flags, no tensors. A backward pass is a walk through this table:

    state of a gradient    event                   next state    effect
    missing                it was accumulated      ready         its bucket has one fewer missing
    missing                it is known as unused   ready         its bucket has one fewer missing
    ready                  either                  (error)       "mark a variable ready only once"

A bucket with nothing missing is complete. Buckets are launched strictly in their order, because all
ranks must issue the same collectives in the same order while each completes its buckets in its own:

    bucket            0         1         2
    complete          no        yes       no        take_ready() -> []
    0 completes       yes       yes       no        take_ready() -> [0, 1]
    2 completes       yes       yes       yes       take_ready() -> [2], and all are launched
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ReadyTwiceError(Exception):
    """A gradient became ready a second time. The argument is its index."""


class Readiness:
    """Counts, bucket by bucket, the gradients that a backward pass has yet to produce."""

    def __init__(self, buckets: Sequence[Sequence[int]]) -> None:
        self.bucket_of = [0] * (1 + max((i for indices in buckets for i in indices), default=-1))
        for bucket, indices in enumerate(buckets):
            for index in indices:
                self.bucket_of[index] = bucket
        self._sizes = [len(indices) for indices in buckets]
        self.begin()

    def begin(self) -> None:
        """A backward pass begins: every gradient is missing."""
        self.missing_count = list(self._sizes)  # by bucket
        self._ready = bytearray(len(self.bucket_of))  # by gradient

    def mark(self, indices: Iterable[int]) -> list[int]:
        """Gradients are ready. The buckets that this completes, in the order of completion.

        Raises:
            ReadyTwiceError: one of them was ready before.
        """
        ready, bucket_of, missing_count = self._ready, self.bucket_of, self.missing_count
        completed = []
        for index in indices:
            if ready[index]:
                raise ReadyTwiceError(index)
            ready[index] = 1
            bucket = bucket_of[index]
            left = missing_count[bucket] - 1
            missing_count[bucket] = left
            if left == 0:
                completed.append(bucket)
        return completed

    def missing(self) -> list[int]:
        """The gradients that have not become ready, by index."""
        return [index for index, ready in enumerate(self._ready) if not ready]


class LaunchOrder:
    """Says which buckets may be reduced now: the next ones in order that are complete."""

    def __init__(self, bucket_count: int) -> None:
        self._bucket_count = bucket_count
        self.begin()

    def begin(self) -> None:
        self.next_bucket = 0

    @property
    def all_launched(self) -> bool:
        return self.next_bucket == self._bucket_count

    def take_ready(self, readiness: Readiness) -> list[int]:
        """The buckets to launch now, in order. Each is named once a backward pass."""
        first = self.next_bucket
        while not self.all_launched and readiness.missing_count[self.next_bucket] == 0:
            self.next_bucket += 1
        return list(range(first, self.next_bucket))
