"""`fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from impl.device import handle_for
from impl.fully_shard.build import (
    Choices,
    build_units,
    managed_modules,
    managed_parameters,
    move_to,
    roots_of,
)
from impl.fully_shard.mesh import default_mesh, read_mesh
from impl.fully_shard.module import sharded_class
from impl.fully_shard.state import State, state_of


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen, as torch has it
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # frozen, as torch has it
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Divide the parameters of a module, or of a list of modules, among the ranks of a mesh.

    One call makes one unit of all parameters that no earlier call on a module below has taken, so
    it is called from the inside out: on each layer, then on the model.

    Args:
        module: changed in place and returned; it gains the methods of `FSDPModule`.
        mesh: of one dimension, or of two, replicas by shards. By default all ranks.
        reshard_after_forward: True frees the whole parameters after the forward and gathers them
            again in backward; False keeps them; a number divides them among so many ranks in
            between. By default True, but False for the root.
        shard_placement_fn: called with each parameter; returns the dimension to divide as
            `Shard(dim)`, or None for the first.
        mp_policy: dtypes of computation, reduction and outputs.
        offload_policy: `CPUOffloadPolicy()` keeps shards, gradients and optimizer on the host.
        ignored_params: left alone.

    Raises:
        ValueError: for a container without a forward, a parameter without dimensions, a mesh of
            three dimensions, a number of ranks that does not divide the mesh's.
        NotImplementedError: for parameters that cannot be divided so.
    """
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if is_container and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"fully_shard does not support containers that do not implement forward: {module}"
        )
    mesh = mesh or default_mesh()
    division = read_mesh(mesh)
    device = handle_for(torch.device(mesh.device_type))
    roots = (module,) if isinstance(module, nn.Module) else roots_of(module)
    for root in roots:
        if state_of(root) is not None:
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. "
                f"fully_shard has already been applied to the following module:\n{root}"
            )
    taken = managed_modules(roots)
    ignored = ignored_params or set()
    params = managed_parameters(taken, ignored)
    move_to(device.current_device(), taken, params)
    after_forward = True if reshard_after_forward is None else reshard_after_forward
    choices = Choices(division, after_forward, shard_placement_fn, mp_policy, offload_policy)
    units = build_units(params, roots, choices, device)
    State(roots, units, device, mp_policy, reshard_after_forward is None, ignored)
    for root in roots:
        root.__class__ = sharded_class(type(root))
    return module
