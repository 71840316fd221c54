"""Assignment of gradients to buckets by size limit (`bucket_cap_mb`), initially and in ready order.

Pure: nothing here communicates or touches memory. Gradients of one dtype on one device are laid end
to end until a size limit is reached; then the next bucket of that kind begins. Sparse gradients
cannot be laid end to end, so each has a bucket of its own.

    four float32 parameters of 50 elements, two float64 of 25, alternating; limits 200 and 400 bytes

    index     0     1     2     3     4     5
    dtype     f32   f64   f32   f64   f32   f64
    bytes     200   200   200   200   200   200
    bucket    0     1     2     3     2     3        a limit is reached, not left room for

Semantics: `compute_bucket_assignment_by_size` of torch's reducer.cpp.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from impl.torch_private import DEFAULT_FIRST_BUCKET_BYTES

DEFAULT_BUCKET_CAP_MB = 25
BYTES_PER_MB = 1024 * 1024
NO_SIZE_LIMIT = 0  # what torch reports for the bucket of a sparse gradient


class ErrorLog(Protocol):
    """Where an error is noted before it is raised: DDP's logging data."""

    def set_error_and_log(self, error: str) -> None: ...


@dataclass(frozen=True)
class Gradient:
    """What the assignment needs to know of one parameter."""

    index: int
    nbytes: int
    kind: tuple[torch.dtype, torch.device]  # a bucket holds one kind only
    sparse: bool = False


@dataclass(frozen=True)
class Assignment:
    """Parameter indices bucket by bucket, and the limit that each bucket was filled against."""

    buckets: list[list[int]]
    limits: list[int]


@dataclass
class _Filling:
    """A bucket that still takes gradients."""

    limit_position: int
    indices: list[int] = field(default_factory=list)
    nbytes: int = 0


def assign(
    gradients: Sequence[Gradient], limits: Sequence[int], *, in_ready_order: bool
) -> Assignment:
    """Fill buckets with `gradients`, in their order.

    Each kind walks through `limits` by itself and stays on the last one. A bucket is closed by the
    gradient that reaches the limit, so it may exceed it; a gradient is never split.

    With `in_ready_order`, buckets come in the order in which they were closed; what remains open
    comes last, the kind that was met last first (observed, torch 2.13: ranks of one job must
    agree). Without it buckets are sorted by their smallest index: registration order approximates
    the order of use, and the caller reverses it.
    """
    closed: list[tuple[list[int], int]] = []
    filling: dict[tuple[torch.dtype, torch.device], _Filling] = {}
    for gradient in gradients:
        if gradient.sparse:
            closed.append(([gradient.index], NO_SIZE_LIMIT))
            continue
        bucket = filling.setdefault(gradient.kind, _Filling(limit_position=0))
        bucket.indices.append(gradient.index)
        bucket.nbytes += gradient.nbytes
        limit = limits[bucket.limit_position]
        if bucket.nbytes >= limit:
            closed.append((bucket.indices, limit))
            following = min(bucket.limit_position + 1, len(limits) - 1)
            filling[gradient.kind] = _Filling(limit_position=following)
    closed += [
        (bucket.indices, limits[bucket.limit_position])
        for bucket in reversed(filling.values())
        if bucket.indices
    ]
    if not in_ready_order:
        closed.sort(key=lambda bucket: min(bucket[0]))
    return Assignment([indices for indices, _ in closed], [limit for _, limit in closed])


def compute_bucket_assignment_by_size(
    tensors: Sequence[torch.Tensor],
    bucket_size: Sequence[int],
    expect_sparse_gradient: Sequence[bool] = (),
    tensor_indices: Sequence[int] = (),
    logger: ErrorLog | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Assign `tensors` to buckets; the same signature and result as torch's function.

    Args:
        tensors: dense tensors, in the order in which buckets are to be filled.
        bucket_size: size limits in bytes, one after the other for each kind of tensor.
        expect_sparse_gradient: per parameter index, whether its gradient will be sparse.
        tensor_indices: the parameter index of each tensor; by default its position. If given, the
            order of `tensors` is the order in which gradients became ready and is kept.
        logger: notes an error before it is raised.

    Returns:
        Indices bucket by bucket, and the limit of each bucket (0 for a sparse gradient).

    Raises:
        RuntimeError: a tensor is sparse, there are no tensors or no limits, or
            `expect_sparse_gradient` has not one entry for each tensor.
    """
    problem = _what_is_wrong(tensors, bucket_size, expect_sparse_gradient, tensor_indices)
    if problem is not None:
        if logger is not None:
            logger.set_error_and_log(problem)
        raise RuntimeError(problem)
    indices = tensor_indices if len(tensor_indices) else range(len(tensors))
    gradients = [
        Gradient(
            index=index,
            nbytes=tensor.numel() * tensor.element_size(),
            kind=(tensor.dtype, tensor.device),
            sparse=bool(len(expect_sparse_gradient)) and expect_sparse_gradient[index],
        )
        for index, tensor in zip(indices, tensors, strict=True)
    ]
    result = assign(gradients, bucket_size, in_ready_order=bool(len(tensor_indices)))
    return result.buckets, result.limits


def _what_is_wrong(
    tensors: Sequence[torch.Tensor],
    limits: Sequence[int],
    expect_sparse_gradient: Sequence[bool],
    tensor_indices: Sequence[int],
) -> str | None:
    if not len(tensors):
        return "compute_bucket_assignment_by_size: expected at least one tensor (!tensors.empty())."
    if not len(limits):
        return "compute_bucket_assignment_by_size: expected at least one bucket size limit."
    if len(expect_sparse_gradient) not in (0, len(tensors)):
        return (
            f"compute_bucket_assignment_by_size: expect_sparse_gradient has "
            f"{len(expect_sparse_gradient)} entries for {len(tensors)} tensors."
        )
    if len(tensor_indices) not in (0, len(tensors)):
        return (
            f"compute_bucket_assignment_by_size: tensor_indices has {len(tensor_indices)} entries "
            f"for {len(tensors)} tensors."
        )
    if any(tensor.is_sparse for tensor in tensors):
        return "No support for sparse tensors."
    return None


@dataclass(frozen=True)
class BucketCaps:
    """The bucket sizes that a user asked for, in bytes."""

    bucket_bytes_cap: int
    per_bucket_bytes_caps: tuple[int, ...]  # empty: one cap for all
    first_bucket_bytes_cap: int

    @classmethod
    def from_megabytes(
        cls, bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None
    ) -> BucketCaps:
        """The caps that `DistributedDataParallel`'s arguments mean.

        With the default cap, the first bucket is small: it is the first whose reduction starts, and
        starting early matters more there than size does.
        """
        if bucket_cap_mb_list:
            caps = tuple(int(cap * BYTES_PER_MB) for cap in bucket_cap_mb_list)
            largest = int(max(bucket_cap_mb_list) * BYTES_PER_MB)
            return cls(largest, caps, first_bucket_bytes_cap=largest)
        if bucket_cap_mb is None:
            return cls(DEFAULT_BUCKET_CAP_MB * BYTES_PER_MB, (), DEFAULT_FIRST_BUCKET_BYTES)
        cap = int(bucket_cap_mb * BYTES_PER_MB)
        return cls(cap, (), first_bucket_bytes_cap=cap)

    def initial_limits(self, *, registration_order_is_final: bool) -> list[int]:
        """Limits for the first assignment, made from the order of registration.

        That order need not be the order in which gradients become ready. Where the buckets will be
        rebuilt from the observed order, the first iteration therefore uses a single bucket: with
        several, a rank could start a reduction between the model's own collectives at a different
        place than its peers. Buckets are never rebuilt while unused parameters are searched for,
        so then the first assignment is final and the limits apply.
        """
        if self.per_bucket_bytes_caps:
            return list(self.per_bucket_bytes_caps)
        if not registration_order_is_final:
            return [sys.maxsize]
        if self.first_bucket_bytes_cap < self.bucket_bytes_cap:
            return [self.first_bucket_bytes_cap, self.bucket_bytes_cap]
        return [self.bucket_bytes_cap]


def assign_in_ready_order(
    params: Sequence[torch.Tensor],
    ready_order: Sequence[int],
    limits: Sequence[int],
    expect_sparse_gradient: Sequence[bool],
) -> Assignment:
    """The buckets for the observed order in which gradients became ready.

    The first limit belongs to the bucket that is filled first. `DDP_SET_LAST_BUCKET_CAP=1` gives it
    to the last bucket instead, the one that nothing is left to overlap with: the order is walked
    backwards and the result turned around.
    """
    small_last = os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1"
    order = list(reversed(ready_order)) if small_last else list(ready_order)
    buckets, chosen_limits = compute_bucket_assignment_by_size(
        [params[index] for index in order], limits, expect_sparse_gradient, order
    )
    if small_last:
        buckets.reverse()
        chosen_limits.reverse()
    return Assignment(buckets, chosen_limits)
