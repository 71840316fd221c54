"""Wrappers of torch's private names for DTensors and their meshes.

Checked with torch 2.13.0, 2.11.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def root_mesh_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` is a slice of, itself if it is none.

    A method since torch 2.10 or so; before, a question to a registry.
    """
    method: Any = getattr(mesh, "_get_root_mesh", None)
    if method is None:
        from torch.distributed import device_mesh

        registry: Any = device_mesh
        root: DeviceMesh = registry._mesh_resources.get_root_mesh(mesh)
        return root
    found: DeviceMesh = method()
    return found


def spec_of(
    mesh: DeviceMesh, placements: Sequence[Any], size: torch.Size, dtype: torch.dtype
) -> Any:
    """What a contiguous DTensor of this size is, but for its memory. Takes as long as a kernel."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = torch.empty(size, device="meta").stride()
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(size, stride, dtype))


def dtensor_from_local(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """A DTensor on the memory of `local`, also where that is not on the device of the mesh."""
    from torch.distributed.tensor import DTensor

    # its __init__ does nothing, but keeps compilers out, for longer than a kernel takes
    made: torch.Tensor = DTensor.__new__(DTensor, local, spec, requires_grad=local.requires_grad)
    return made


def replace_local(dtensor: Any, local: torch.Tensor) -> None:
    """Give a DTensor other memory, in place."""
    dtensor._local_tensor = local


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of what is a shard of shards: its rows are not next to each other."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def tensor_parallel_transform(mesh: Any, module: nn.Module) -> None:
    """If `mesh` is one dimension of a larger mesh, let DDP see `module`'s DTensors locally."""
    if mesh._get_root_mesh() != mesh:
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
