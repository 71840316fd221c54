"""Construction of buckets from an assignment: checks, flat buffers, empty sparse gradients."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor

from impl.ddp.buckets.bucket import Bucket, GradientSlots, is_large
from impl.ddp.buckets.layout import BucketLayout, lay_out, view_gradients
from impl.device import handle_of
from impl.torch_private import backend_memory

logger = logging.getLogger(__name__)


def build_buckets(
    params: Sequence[Tensor],
    assignment: Sequence[Sequence[int]],
    *,
    expect_sparse: Sequence[bool],
    group: dist.ProcessGroup,
    dtype: torch.dtype | None,
    large_at_once: bool,
) -> list[Bucket]:
    """Buckets with zeroed memory.

    Args:
        params: all parameters of the reducer.
        assignment: parameter indices, bucket by bucket.
        expect_sparse: by parameter index, whether its gradient is sparse.
        group: may have memory that it communicates from faster.
        dtype: of the buckets of real parameters, if not that of the parameters (mixed precision).
        large_at_once: whether large gradients are copied without waiting for the small ones.

    Raises:
        RuntimeError: a bucket is empty, mixes dtypes or devices, holds a sparse gradient beside
            others, or names a parameter that does not exist; or a parameter is not in one bucket.
    """
    buckets: list[Bucket] = []
    for index, indices in enumerate(assignment):
        _check(indices, len(params), expect_sparse)
        members = [params[i] for i in indices]
        bucket = Bucket(index, tuple(indices), members, handle_of(members[0]))
        if not expect_sparse[indices[0]]:
            _give_memory(bucket, group, dtype, large_at_once=large_at_once)
        buckets.append(bucket)
    times = Counter(index for indices in assignment for index in indices)
    for index in range(len(params)):
        if times[index] != 1:
            raise RuntimeError(f"Variable {index} is in {times[index]} buckets instead of one.")
    return buckets


def _check(indices: Sequence[int], param_count: int, expect_sparse: Sequence[bool]) -> None:
    if not indices:
        raise RuntimeError("Empty bucket specified.")
    for index in indices:
        if not 0 <= index < param_count:
            raise RuntimeError(
                f"Out of range variable index specified: {index}, of {param_count} parameters."
            )
    if len(indices) > 1 and any(expect_sparse[index] for index in indices):
        raise RuntimeError(
            "Buckets with more than one variable cannot include variables that expect a sparse "
            "gradient."
        )


def _give_memory(
    bucket: Bucket, group: dist.ProcessGroup, dtype: torch.dtype | None, *, large_at_once: bool
) -> None:
    layout = lay_out(bucket.params)
    if dtype is None or layout.is_complex:
        dtype = layout.buffer_dtype
    buffer = _allocate(layout, dtype, group)
    views = view_gradients(buffer, layout)
    bucket.layout = layout
    bucket.buffer = buffer
    bucket.all_slots = bucket.small_slots = GradientSlots.of(bucket.params, views, buffer)
    small = [not (large_at_once and is_large(param)) for param in bucket.params]
    if not all(small):
        bucket.small_slots = GradientSlots.of(
            list(compress(bucket.params, small)), list(compress(views, small)), None
        )


def _allocate(layout: BucketLayout, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    """Memory for a bucket: on the CPU the group's own, from which it communicates faster.

    `DDP_DISABLE_COMM_MEM=0` asks for it on all devices, and 1 on none.
    """
    disabled = os.environ.get("DDP_DISABLE_COMM_MEM", "0" if layout.device.type == "cpu" else "1")
    if disabled != "1":
        buffer = backend_memory(group, layout.buffer_numel, dtype, layout.device)
        if buffer is not None:
            logger.info("Bucket of %d elements in the backend's own memory", layout.numel)
            return buffer.zero_()
    return torch.zeros(layout.buffer_numel, dtype=dtype, device=layout.device)


def empty_sparse_gradient(param: Tensor) -> Tensor:
    """The sparse gradient of a parameter that was not used: (param.shape), without any row."""
    rows = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(
        rows, values, param.shape, device=param.device, check_invariants=False
    )
