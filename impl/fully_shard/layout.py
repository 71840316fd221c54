"""What a parameter is for the rest of the program, as a whole and as a shard.

    before fully_shard     whole, in a module                  shard, in a module
    Tensor                 Tensor                              DTensor on the mesh of fully_shard
    DTensor on a mesh of   DTensor on that mesh                DTensor on both meshes
    tensor parallelism

`fully_shard` works on local tensors alone; a `Layout` translates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from impl.fully_shard.mesh import Division
from impl.torch_dtensor import dtensor_from_local, root_mesh_of, spec_of, strided_shard


class Layout:
    """Translates between one parameter's local tensors and what modules have.

    param: the whole one, a DTensor if another parallelism has divided it.
    shard_dim: along which its local tensor is divided.
    """

    def __init__(self, param: Tensor, division: Division, shard_dim: int) -> None:
        self._size = param.size()
        self._outer = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
        self._specs: dict[torch.dtype, Any] = {}  # of shards; each step makes a gradient of each
        self._mesh, self._placements = division.mesh, division.placements(Shard(shard_dim))
        if self._outer is not None:
            outer_mesh, outer_placements = self._outer
            names = (*(division.mesh.mesh_dim_names or ()), *(outer_mesh.mesh_dim_names or ()))
            self._mesh = root_mesh_of(division.mesh)[names]
            times = _times_divided(outer_placements, outer_mesh, shard_dim)
            mine = self._placements[-1] if times == 1 else strided_shard(shard_dim, times)
            self._placements = (*self._placements[:-1], mine, *outer_placements)

    @property
    def is_of_two_meshes(self) -> bool:
        return self._outer is not None

    def shard(self, local: Tensor) -> Tensor:
        """A shard, or the gradient of one."""
        spec = self._specs.get(local.dtype)
        if spec is None:
            spec = spec_of(self._mesh, self._placements, self._size, local.dtype)
            self._specs[local.dtype] = spec
        return dtensor_from_local(local, spec)

    def whole(self, local: Tensor) -> Tensor:
        return local if self._outer is None else dtensor_of(local, *self._outer, self._size)

    def local_gradient(self, gradient: Tensor) -> Tensor:
        """Of the whole parameter: laid out as the parameter is, the local tensor of it."""
        if self._outer is None:
            return gradient
        found: Any = gradient
        if hasattr(found, "wait"):  # a functional collective may be at work on it
            found = found.wait()
        local: Tensor = found.redistribute(placements=self._outer[1]).to_local()
        return local


def local_of(param: Tensor) -> Tensor:
    with torch.no_grad():
        return param.to_local() if isinstance(param, DTensor) else param.detach()


def dtensor_of(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], size: torch.Size
) -> Tensor:
    """A DTensor of this size, on the memory of `local`, which may lie on the host."""
    return dtensor_from_local(local.detach(), spec_of(mesh, placements, size, local.dtype))


def _times_divided(placements: tuple[Placement, ...], mesh: Any, dim: int) -> int:
    times = 1
    for index, placement in enumerate(placements):
        if placement.is_shard(dim):
            times *= mesh.size(index)
    return times
