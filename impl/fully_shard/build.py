"""Which modules and parameters one call of `fully_shard` takes, and in which units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from impl.device import DeviceHandle
from impl.fully_shard.mesh import Division, division_after_forward, read_mesh
from impl.fully_shard.parameter import Place, ShardedParameter
from impl.fully_shard.state import state_of
from impl.fully_shard.unit import Unit
from impl.torch_private import composed_apis

ShardPlacement = Callable[[nn.Parameter], Any]


def roots_of(modules: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """Those that are not within another one."""
    below = {id(child) for module in modules for child in module.modules() if child is not module}
    return tuple(module for module in modules if id(module) not in below)


def managed_modules(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """All modules below, without those that another call, or `replicate`, has taken."""
    taken: dict[nn.Module, None] = {}

    def visit(module: nn.Module, is_root: bool) -> None:
        is_taken = not is_root and state_of(module) is not None
        if module in taken or is_taken or "replicate" in composed_apis(module):
            return
        for child in module.children():
            visit(child, False)
        taken[module] = None

    for root in roots:
        visit(root, True)
    return list(taken)


def managed_parameters(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> list[nn.Parameter]:
    """Each once. Raises ValueError for one without dimensions: it cannot be divided."""
    found: dict[nn.Parameter, None] = {}
    for module in modules:
        for name, param in module.named_parameters(recurse=False):
            if param in ignored:
                continue
            if param.ndim == 0:
                raise ValueError(
                    "fully_shard doesn't support scalar parameters. Change "
                    f"{name} to a 1D tensor with numel equal to 1."
                )
            found[param] = None
    return list(found)


@torch.no_grad()
def move_to(device: torch.device, modules: Sequence[nn.Module], params: list[nn.Parameter]) -> None:
    """Parameters and buffers; what is on the meta device stays there."""
    buffers = (buffer for module in modules for buffer in module.buffers(recurse=False))
    for tensor in (*params, *buffers):
        if tensor.device != device and not tensor.is_meta:
            tensor.data = tensor.to(device)


def places_of(params: Iterable[nn.Parameter], roots: Iterable[nn.Module]) -> list[list[Place]]:
    """Where modules have each parameter; a tied one, or one of a tied module, in several places."""
    places: dict[nn.Parameter, list[Place]] = {param: [] for param in params}
    for module, name, param in _every_place(roots):
        if param in places:
            places[param].append(Place(module, name))
    return list(places.values())


def _every_place(roots: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for root in roots:
        for _, module in root.named_modules(remove_duplicate=False):
            for name, param in module._parameters.items():
                if param is not None:
                    yield module, name, param


@dataclass(frozen=True)
class Choices:
    """What the user chose, for all units of a call."""

    division: Division
    after_forward: bool | int
    placement: ShardPlacement | None
    policy: MixedPrecisionPolicy
    offload: OffloadPolicy


def build_units(
    params: Sequence[nn.Parameter],
    modules: tuple[nn.Module, ...],
    choices: Choices,
    device: DeviceHandle,
) -> list[Unit]:
    """One for each division of parameters; usually there is one."""
    by_division: dict[Any, tuple[Division, list[tuple[nn.Parameter, list[Place], Shard]]]] = {}
    for param, places in zip(params, places_of(params, modules), strict=True):
        shard, mesh_info = _placement(choices.placement, param)
        key = None if mesh_info is None else id(mesh_info)
        if key not in by_division:
            division = choices.division if mesh_info is None else read_mesh(mesh_info.mesh)
            by_division[key] = division, []
        by_division[key][1].append((param, places, shard))
    offloads = isinstance(choices.offload, CPUOffloadPolicy)
    pin = offloads and choices.offload.pin_memory  # type: ignore[attr-defined]  # just checked
    return [
        Unit(
            [
                ShardedParameter(param, places, division, shard, device, offloads, pin)
                for param, places, shard in members
            ],
            modules,
            division,
            division_after_forward(choices.after_forward, division),
            device,
            choices.policy,
        )
        for division, members in by_division.values()
    ]


def _placement(choose: ShardPlacement | None, param: nn.Parameter) -> tuple[Shard, Any]:
    """The dimension, and torch's `FSDPMeshInfo` if the user chose another mesh."""
    chosen = None if choose is None else choose(param)
    if chosen is None or isinstance(chosen, Shard):
        return chosen or Shard(0), None
    if hasattr(chosen, "placement") and hasattr(chosen, "mesh_info"):
        return chosen.placement or Shard(0), chosen.mesh_info
    raise ValueError(f"Invalid shard_placement_fn result: {chosen}")
