"""Broadcast of rank 0's bucket assignment, encoded in two messages, so that all ranks use the same.

Gradients become ready in an order of their own on each rank: it depends on timing and on the
rank's data. Buckets that are rebuilt from that order must still be the same everywhere, or
reductions would add up different parameters. So rank 0 sends:

    1. all parameter indices, bucket after bucket, then the number of buckets: (params + 1,) int32
    2. the size of each bucket: (buckets,) int32

The first has the same length on every rank, and tells the length of the second.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from impl.torch_private import broadcast_options


def encode(buckets: Sequence[Sequence[int]]) -> list[int]:
    """The first message: indices bucket by bucket, then the bucket count."""
    return [index for bucket in buckets for index in bucket] + [len(buckets)]


def decode(indices: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """The buckets that the two messages describe.

    Raises:
        IndexError: the sizes do not divide the indices; the broadcast delivered something else.
    """
    if any(size < 0 for size in sizes) or sum(sizes) != len(indices):
        raise IndexError("received invalid bucket_size, was abort called?")
    buckets = []
    start = 0
    for size in sizes:
        buckets.append(list(indices[start : start + size]))
        start += size
    return buckets


def agree_on_buckets(
    group: dist.ProcessGroup, buckets: Sequence[Sequence[int]], device: torch.device
) -> list[list[int]]:
    """Rank 0's buckets, on every rank. Collective."""
    *indices, bucket_count = _from_rank_0(group, encode(buckets), device)
    own_sizes = [len(bucket) for bucket in buckets]
    # This rank may have fewer buckets than rank 0; only the length of the message matters then.
    sizes = (own_sizes + own_sizes[-1:] * bucket_count)[:bucket_count]
    return decode(indices, _from_rank_0(group, sizes, device))


def _from_rank_0(
    group: dist.ProcessGroup, values: Sequence[int], device: torch.device
) -> list[int]:
    message: Tensor = torch.tensor(values, dtype=torch.int32, device=device)
    group.broadcast([message], broadcast_options(root=0)).wait()
    received: list[int] = message.tolist()
    return received
