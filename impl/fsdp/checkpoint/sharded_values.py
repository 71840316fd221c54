"""Sharding and unsharding of state dict values by rows, as `ShardedTensor` or `DTensor`.

The split is by rows of the original parameter, not by the flat parameter's chunks: that is what
other parallelisms and other world sizes understand.

    10 rows, 4 ranks:  rows 0-2 | 3-5 | 6-8 | 9
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from impl.fsdp.checkpoint.tensor_parallel import shard_on_mesh, unshard_on_mesh
from impl.fsdp.flat_param.layout import chunk_bounds, chunk_numel
from impl.fsdp.step.state import FSDPState
from impl.torch_private import ShardedTensor, all_gather_single, sharded_tensor_from_rows


def shard_rows(tensor: Tensor, state: FSDPState, *, as_dtensor: bool) -> Tensor:
    """This rank's rows of `tensor`, which is the same on all ranks that share the parameter."""
    tensor = tensor.detach()
    if as_dtensor:
        assert state.device_mesh is not None
        return shard_on_mesh(tensor, state.device_mesh)
    return _to_sharded_tensor(tensor, state)


def unshard_rows(value: Any, state: FSDPState) -> Tensor:
    """All rows of a `ShardedTensor` or `DTensor`. A collective.

    Raises:
        AssertionError: if `value` is neither, or has more than one shard here.
    """
    if isinstance(value, DTensor):
        mesh_type = value.device_mesh.device_type
        moved: Any = value if value.device.type == mesh_type else value.to(mesh_type)
        return unshard_on_mesh(moved, state.device_mesh or moved.device_mesh)
    if not isinstance(value, ShardedTensor):
        raise AssertionError(f"Expected ShardedTensor, got {type(value)}")
    return _from_sharded_tensor(value, state.process_group, state.compute_device)


def unshard_nested(value: Any, state: FSDPState) -> Any:
    """`value`, a dict of optimizer state say, with everything sharded in it unsharded."""
    if isinstance(value, (ShardedTensor, DTensor)):
        return _on_device_of(unshard_rows(value, state), value)
    if isinstance(value, dict):
        return {key: unshard_nested(entry, state) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(unshard_nested(entry, state) for entry in value)
    return value


def _to_sharded_tensor(tensor: Tensor, state: FSDPState) -> Tensor:
    group, world_size = state.process_group, state.world_size
    bounds = [chunk_bounds(tensor.shape[0], rank, world_size) for rank in range(world_size)]
    holders = [rank for rank, (start, end) in enumerate(bounds) if start < end or rank == 0]
    local = None
    if state.rank in holders:
        start, end = bounds[state.rank]
        # Contiguous also for a channels-last parameter: ShardedTensor takes nothing else.
        local = tensor[start:end].contiguous()
        if local.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            local = local.clone()
    return sharded_tensor_from_rows(
        local,
        tensor,
        [bounds[rank][1] - bounds[rank][0] for rank in holders],
        [_placement(state, rank) for rank in holders],
        group,
    )


def _placement(state: FSDPState, rank: int) -> str:
    global_rank = dist.get_global_rank(state.process_group, rank)
    device = state.compute_device.type
    if device != "cpu":
        device = f"{device}:{global_rank % state.device_handle.ranks_per_node()}"
    return f"rank:{global_rank}/{device}"


def _from_sharded_tensor(
    value: ShardedTensor, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    shards = value.local_shards()
    if len(shards) > 1:
        raise AssertionError(
            f"Expects 0 or 1 shard per rank but got {len(shards)} shards on rank {group.rank()}."
        )
    metadata = value.metadata()  # other than `size()`, which warns
    size = torch.Size(metadata.size)
    row_numel = size[1:].numel()
    padded_numel = chunk_numel(size[0], group.size()) * row_numel
    local = torch.zeros(padded_numel, dtype=metadata.tensor_properties.dtype, device=device)
    if shards:
        rows = shards[0].tensor.reshape(-1)
        local[: rows.numel()].copy_(rows)
    full = local.new_empty(padded_numel * group.size())
    all_gather_single(full, local, group, False)
    return full[: size.numel()].reshape(size)


def _on_device_of(tensor: Tensor, value: Any) -> Tensor:
    if isinstance(value, DTensor):
        return tensor
    shards = value.local_shards()
    return tensor.to(shards[0].tensor.device if shards else "cpu")
