"""The three collectives of a unit: gather its parameters, reduce its gradients, add up replicas.

All parameters of a unit travel together. Each rank puts its shards one behind the other into one
tensor (*row*); an all-gather gives every rank the rows of all ranks, (count, numel of a row):

    parameters of 5 and 3 elements on two ranks       row of rank 0:  a0 a1 a2 | b0 b1
                                                      row of rank 1:  a3 a4 0  | b2 0

A gradient goes the same way back: it is laid out in as many rows as there are ranks, and a
reduce-scatter gives rank r the sum of all ranks' row r.

Each function puts its work on the current stream of the device, see `impl.device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.device import DeviceHandle
from impl.fully_shard.comm import AllGather, ReduceScatter
from impl.fully_shard.mesh import Division
from impl.fully_shard.parameter import ShardedParameter
from impl.torch_private import chunk_and_cat, premul_sum, preserve_version_counters


def gather(
    device: DeviceHandle,
    parameters: Sequence[ShardedParameter],
    group: dist.ProcessGroup,
    comm: AllGather,
) -> Tensor:
    """Start the all-gather of a unit. (count, numel of a row), of one dtype, or of bytes."""
    parts = [parameter.to_be_gathered() for parameter in parameters]
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        parts = [part.view(torch.uint8) for part in parts]
    row_numel, count = sum(part.numel() for part in parts), group.size()
    gathered = comm.allocate(
        (row_numel * count,), dtype=parts[0].dtype, device=device.current_device()
    )
    row = gathered.view(count, row_numel)[group.rank()]  # this rank's place in the result
    device.enqueue(lambda: torch.cat(parts, out=row), reads=parts, writes=(row,))
    device.start_collective(
        lambda is_async: comm(gathered, row, group, is_async), reads=(row,), writes=(gathered,)
    )
    return gathered.view(count, row_numel)


def spread(parameters: Sequence[ShardedParameter], rows: Tensor) -> None:
    """Fill the whole parameters, which have memory, from what `gather` brought."""
    memory = [parameter.gathered for parameter in parameters if parameter.gathered is not None]
    numels = [parameter.part_numel for parameter in parameters]
    with preserve_version_counters(memory):
        are_alike = all(parameter.part_dtype == rows.dtype for parameter in parameters)
        if are_alike and all(parameter.is_in_rows for parameter in parameters):
            places = [parameter.in_rows(rows.size(0)) for parameter in parameters]
            torch.split_with_sizes_copy(rows, numels, 1, out=places)
            return
        if not are_alike:  # the rows are bytes
            pairs = zip(numels, parameters, strict=True)
            numels = [n * p.part_dtype.itemsize // rows.itemsize for n, p in pairs]
        for parameter, part in zip(parameters, rows.split(numels, 1), strict=True):
            dtype = parameter.part_dtype
            parameter.take_gathered(part if dtype == rows.dtype else part.contiguous().view(dtype))


@dataclass(frozen=True)
class Averaging:
    """How a sum over ranks becomes an average: which operations, and what is divided when."""

    scatter_op: Any
    replica_op: Any
    before: float = 1.0
    after: float = 1.0


def averaging(
    division: Division, dtype: torch.dtype, factor: float | None, only_sums: bool
) -> Averaging:
    """As torch chooses: the backend averages float32 and bfloat16, which have range enough.

    In other dtypes about the root of the factor is divided before the sum, so that the sum does not
    overflow, and the rest after it, so that small values do not vanish.
    """
    has_range = dtype in (torch.float32, torch.bfloat16)
    ops, sums = dist.ReduceOp, (dist.ReduceOp.SUM, dist.ReduceOp.SUM)
    if has_range and not only_sums:
        if factor is None:
            alone = division.rank_count == 1
            return Averaging(*(sums if alone else (ops.AVG, ops.AVG)))
        if division.shard_count == 1:  # nothing is scattered that could be multiplied
            return Averaging(*sums, after=factor)
        is_count = factor == division.shard_count
        return Averaging(ops.AVG if is_count else premul_sum(1 / factor), ops.SUM)
    factor = float(division.rank_count) if factor is None else factor
    if has_range:
        return Averaging(*sums, after=factor)
    before = 1
    while factor % before == 0 and factor / before > before:
        before *= 2
    return Averaging(*sums, before=float(before), after=factor / before)


def lay_out(
    gradients: Sequence[Tensor], parameters: Sequence[ShardedParameter], into: Tensor
) -> None:
    """Copy gradients, each (size of the parameter), into rows: (count, numel of a row).

    They are cast to the dtype of the rows, and padded with zeros.
    """
    count = into.size(0)
    in_order = [
        torch.cat(gradient.chunk(count, parameter.shard_dim)) if parameter.shard_dim else gradient
        for gradient, parameter in zip(gradients, parameters, strict=True)
    ]
    chunk_and_cat([gradient for gradient in in_order if gradient.numel()], into)


def scatter(
    device: DeviceHandle, rows: Tensor, group: dist.ProcessGroup, op: Any, comm: ReduceScatter
) -> Tensor:
    """Start the reduce-scatter of rows, (count, numel of a row): (numel of a row,)."""
    row = comm.allocate((rows.size(1),), dtype=rows.dtype, device=rows.device)
    if group.size() == 1:
        device.enqueue(lambda: row.copy_(rows[0]), reads=(rows,), writes=(row,))
    else:
        device.start_collective(
            lambda is_async: comm(row, rows.view(-1), group, op, is_async),
            reads=(rows,),
            writes=(row,),
        )
    return row


def add_replicas(device: DeviceHandle, row: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    """Start the all-reduce of a row over the ranks that hold the same shards."""
    device.start_collective(
        lambda is_async: dist.all_reduce(row, op=op, group=group, async_op=is_async),
        reads=(row,),
        writes=(row,),
    )


def divide(device: DeviceHandle, tensor: Tensor, factor: float) -> None:
    if factor != 1:
        device.enqueue(lambda: tensor.div_(factor), reads=(tensor,), writes=(tensor,))
