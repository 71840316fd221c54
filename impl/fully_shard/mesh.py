"""Reads a device mesh: among which ranks parameters are divided, and which hold copies."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

_log = logging.getLogger("impl.fully_shard")


@dataclass(frozen=True, eq=False)
class Division:
    """How the ranks of a mesh share a parameter.

    mesh: of one dimension, or of two: replicas by shards.
    shard_group: the ranks among which each parameter is divided.
    replica_group: the ranks that hold the same shard as this one; None without replicas.
    """

    mesh: DeviceMesh
    shard_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup | None

    @property
    def shard_count(self) -> int:
        return self.shard_group.size()

    @property
    def shard_rank(self) -> int:
        return self.shard_group.rank()

    @property
    def rank_count(self) -> int:
        """All ranks that compute gradients of the same parameters."""
        replicas = 1 if self.replica_group is None else self.replica_group.size()
        return self.shard_count * replicas

    def placements(self, shard: Shard) -> tuple[Placement, ...]:
        """Of a DTensor of this mesh that is divided along one of its dimensions."""
        return (shard,) if self.replica_group is None else (Replicate(), shard)


def read_mesh(mesh: DeviceMesh) -> Division:
    """Raises ValueError for a mesh of other than one or two dimensions, as torch does."""
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 1:
        return Division(mesh, mesh.get_group(0), None)
    if mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    return Division(mesh, mesh.get_group(1), mesh.get_group(0))


def default_mesh() -> DeviceMesh:
    """All ranks, on the accelerator if there is one."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(kind, (dist.get_world_size(),))


def division_after_forward(choice: bool | int, division: Division) -> Division | None:
    """How parameters are divided between a forward and its backward; None: not at all.

    choice: `reshard_after_forward`. A number divides them among so many ranks, which lie next to
    each other in the mesh, so that the all-gather of the backward stays among these.

    Raises ValueError for a number that does not divide the number of shards.
    """
    if isinstance(choice, bool):
        return division if choice else None
    if not isinstance(choice, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {choice}"
        )
    if not 1 <= choice <= division.shard_count or division.shard_count % choice:
        raise ValueError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{division.shard_count}, not {choice}"
        )
    if choice == 1:
        _log.warning(
            "reshard_after_forward=1 (int) means resharding parameters to world size 1, instead of "
            "reshard_after_forward=True (bool)"
        )
        return None
    if choice == division.shard_count:
        return division
    smaller = DeviceMesh(division.mesh.device_type, division.mesh.mesh.view(-1, choice))
    return Division(smaller, smaller.get_group(1), smaller.get_group(0))
