"""Process groups to shard and replicate over (hybrid sharding), also from a device mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from impl.device import DeviceHandle
from impl.fsdp.collectives import DivideFactors, divide_factors
from impl.fsdp.common import HYBRID_STRATEGIES

HybridGroups = tuple[dist.ProcessGroup, dist.ProcessGroup]
ProcessGroupType = dist.ProcessGroup | HybridGroups | None


@dataclass(frozen=True)
class Groups:
    """The groups of one instance.

    Attributes:
        shard: the ranks that share the flat parameter.
        replicate: with hybrid sharding, the ranks that hold the same shard; else None.
        factors: how gradients are averaged over the ranks of both.
    """

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup | None
    factors: DivideFactors


def resolve_groups(
    process_group: ProcessGroupType,
    device_mesh: DeviceMesh | None,
    strategy: ShardingStrategy | None,
    device: DeviceHandle,
    *,
    has_policy: bool,
) -> Groups:
    """The groups that the constructor's arguments mean; may create groups (a collective).

    Raises:
        ValueError: for contradictory arguments, or hybrid sharding of a manually wrapped module
            without groups: then each instance would make its own.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass "
            "only one of them."
        )
    if strategy not in HYBRID_STRATEGIES:
        shard = _plain_group(process_group, device_mesh)
        return Groups(shard, None, divide_factors(shard.size()))
    if process_group is None and device_mesh is None and not has_policy:
        raise ValueError(
            f"Manual wrapping with {strategy} requires explicit specification of process group or "
            "device_mesh."
        )
    shard, replicate = _hybrid_groups(process_group, device_mesh, device)
    return Groups(shard, replicate, divide_factors(shard.size() * replicate.size()))


def _plain_group(
    process_group: ProcessGroupType, device_mesh: DeviceMesh | None
) -> dist.ProcessGroup:
    if device_mesh is not None:
        group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
        return group
    if isinstance(process_group, tuple):
        raise ValueError(
            "A tuple of process groups, to shard and to replicate over, is for hybrid sharding "
            "strategies only"
        )
    return process_group if process_group is not None else _default_group()


def _hybrid_groups(
    process_group: ProcessGroupType, device_mesh: DeviceMesh | None, device: DeviceHandle
) -> HybridGroups:
    """The group to shard over (inside a node) and the one to replicate over (between nodes)."""
    if device_mesh is not None:
        if device_mesh.ndim != 2:
            raise ValueError(f"Expected device_mesh to have ndim=2 but got {device_mesh.ndim}")
        return device_mesh.get_group(mesh_dim=1), device_mesh.get_group(mesh_dim=0)
    if process_group is None:
        return _make_hybrid_groups(_default_group(), device.ranks_per_node())
    if not _is_group_pair(process_group):
        raise ValueError(
            "Expected process_group to be passed in as either None or "
            f"Tuple[dist.ProcessGroup, dist.ProcessGroup] but got {type(process_group)}"
        )
    return process_group  # type: ignore[return-value]  # checked just now


def _is_group_pair(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(group, dist.ProcessGroup) for group in value)
    )


def hybrid_rank_lists(
    world_size: int, ranks_per_node: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The ranks of each node, and the ranks with the same place in their nodes.

        4 ranks, 2 a node:  [[0, 1], [2, 3]]  and  [[0, 2], [1, 3]]

    Raises:
        ValueError: if nodes of that size do not divide the world.
    """
    if ranks_per_node > world_size or world_size % ranks_per_node:
        raise ValueError(
            f"Hybrid sharding needs a world size that the ranks of a node divide, but there are "
            f"{world_size} ranks and {ranks_per_node} a node. Pass process groups or a device_mesh."
        )
    nodes = [
        list(range(start, start + ranks_per_node)) for start in range(0, world_size, ranks_per_node)
    ]
    places = [list(range(place, world_size, ranks_per_node)) for place in range(ranks_per_node)]
    return nodes, places


def _make_hybrid_groups(world: dist.ProcessGroup, ranks_per_node: int) -> HybridGroups:
    """Create all groups, in one order on every rank, and return this rank's two."""
    nodes, places = hybrid_rank_lists(world.size(), ranks_per_node)
    backend = dist.get_backend(world)
    me = world.rank()

    def create(rank_lists: list[list[int]]) -> dist.ProcessGroup:
        mine: dist.ProcessGroup | None = None
        for ranks in rank_lists:
            group = dist.new_group(ranks=ranks, backend=backend)
            if me in ranks:
                mine = group
        assert mine is not None
        return mine

    return create(nodes), create(places)


def _default_group() -> dist.ProcessGroup:
    """The default group.

    Raises:
        ValueError: if there is none, as torch words it.
    """
    if not dist.is_initialized():
        raise ValueError(
            "Default process group has not been initialized, please make sure to call "
            "init_process_group."
        )
    group = dist.group.WORLD
    assert group is not None
    return group
