"""FSDP over tensor parallelism: flattening of `DTensor` parameters, state dict values on a mesh.

The instance's mesh is then a slice of a larger one, `mesh["dp"]` of ("dp", "tp") say. Flattened is
the local part of a parameter, so that each tensor parallel rank shards its own part further. What
modules show are `DTensor`s again, made of views into the unsharded flat parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from impl.fsdp.flat_param.packing import ParamTransform
from impl.torch_dtensor import root_mesh_of


@dataclass(frozen=True)
class DTensorLayout:
    """How a `DTensor` parameter was laid out before its local part was flattened."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


class TensorParallelTransform(ParamTransform):
    """Takes `DTensor`s apart before flattening and puts them together afterwards."""

    def pre_flatten(self, tensor: Tensor) -> tuple[Tensor, Any]:
        if not isinstance(tensor, DTensor):
            return tensor, None
        layout = DTensorLayout(
            tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride()
        )
        detached: Any = tensor.detach()
        local: Tensor = detached.to_local()
        return local.requires_grad_(tensor.requires_grad), layout

    def post_unflatten(self, tensor: Tensor, extension: Any) -> Tensor:
        if extension is None:
            return tensor
        if tensor.requires_grad:
            # The gradient may be the result of a functional collective that is under way.
            tensor.register_hook(_completed)
        return DTensor.from_local(
            tensor,
            extension.mesh,
            extension.placements,
            run_check=False,
            shape=extension.shape,
            stride=extension.stride,
        )


def _completed(grad: Tensor) -> Tensor:
    return grad.wait() if hasattr(grad, "wait") else grad


def transform_for(mesh: DeviceMesh | None) -> ParamTransform:
    """The transform that parameters of an instance on `mesh` need."""
    if mesh is None or root_mesh_of(mesh) == mesh:
        return ParamTransform()
    return TensorParallelTransform()


# Values of state dicts on a mesh


def shard_on_mesh(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """`tensor`, the same on all ranks of `mesh`, split by rows along the last dimension of `mesh`.

    The result lives on the root mesh. A `DTensor` keeps its placements on the other dimensions; to
    split a dimension that tensor parallelism has split takes communication.
    """
    root = root_mesh_of(mesh)
    placements = _placements_on_root(tensor, root)
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()
    whole = DTensor.from_local(local, root, placements, run_check=False)
    split = list(placements)
    split[_root_dim(root, mesh, mesh.ndim - 1)] = Shard(0)
    return whole.redistribute(placements=split)


def unshard_on_mesh(value: DTensor, mesh: DeviceMesh) -> Tensor:
    """Undo `shard_on_mesh`: the local tensor, whole as far as `mesh` is concerned.

    A full state dict may hold a `DTensor` on the tensor parallel mesh alone; that one is whole.
    """
    root = root_mesh_of(mesh)
    if value.device_mesh != root:
        if root_mesh_of(value.device_mesh) != root:
            raise AssertionError("The device mesh of a tensor should be a root mesh.")
        return value.to_local()
    placements = list(value.placements)
    for dim in range(mesh.ndim):
        placements[_root_dim(root, mesh, dim)] = Replicate()
    local: Tensor = value.redistribute(placements=placements).to_local()
    return _completed(local)


def _placements_on_root(tensor: Tensor, root: DeviceMesh) -> list[Placement]:
    placements: list[Placement] = [Replicate() for _ in range(root.ndim)]
    if isinstance(tensor, DTensor):
        for dim, placement in enumerate(tensor.placements):
            placements[_root_dim(root, tensor.device_mesh, dim)] = placement
    return placements


def _root_dim(root: DeviceMesh, mesh: DeviceMesh, dim: int) -> int:
    """Which dimension of `root` is dimension `dim` of its slice `mesh`."""
    if root == mesh:
        return dim
    assert root.mesh_dim_names is not None
    assert mesh.mesh_dim_names is not None
    return root.mesh_dim_names.index(mesh.mesh_dim_names[dim])
