"""Constructor arguments of DDP: process group or mesh, devices, buffer policy, and their errors.

Nothing here communicates. A wrong argument raises torch's exception with torch's words.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from impl.torch_dtensor import tensor_parallel_transform
from impl.torch_private import default_group, device_index


@dataclass(frozen=True)
class DeviceChoice:
    """Where the module is, and where its inputs go."""

    device: torch.device  # of the first parameter
    device_ids: list[int] | None  # None: inputs are where they must be already
    output_device: int | None
    is_multi_device_module: bool


@dataclass(frozen=True)
class BufferPolicy:
    """Whether buffers are kept in step, at construction and before forward."""

    at_init: bool
    before_forward: bool


def choose_group(
    module: nn.Module, group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> dist.ProcessGroup:
    """The group to average over: the one given, or that of a one-dimensional mesh.

    Raises:
        RuntimeError: both are given, or the mesh has several dimensions.
    """
    if group and mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh is None:
        return group if group is not None else default_group()
    if mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}.")
    tensor_parallel_transform(mesh, module)
    return mesh.get_group(mesh_dim=0)


def choose_devices(
    params: Sequence[Tensor], device_ids: Sequence[Any] | None, output_device: Any
) -> DeviceChoice:
    """Check `device_ids` and `output_device` against where the parameters are.

    Raises:
        ValueError: parameters on devices of several types; or device arguments that a CPU module or
            one on several GPUs cannot have.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    devices = {param.device for param in params}
    types = {device.type for device in devices}
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input "
            f"module parameters locate in {types}."
        )
    device = params[0].device
    several = len(devices) > 1
    if device_ids and device.type != "cpu" and not several:
        first = device_ids[0] if output_device is None else output_device
        return DeviceChoice(
            device, [device_index(d) for d in device_ids], device_index(first), several
        )
    if device_ids or output_device:
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with "
            "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
            f"{device_ids}, output_device {output_device}, and module parameters {devices}."
        )
    return DeviceChoice(device, None, None, several)


def buffer_policy(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None, stacklevel: int
) -> BufferPolicy:
    """What the two arguments mean; the first is the deprecated name of the second.

    They differ at construction: `broadcast_buffers=False` leaves buffers alone there too.
    """
    if broadcast_buffers is not None and forward_sync_buffers is not None:
        warnings.warn(
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. "
            "`broadcast_buffers` is deprecated and its value is ignored when "
            "`forward_sync_buffers` is provided.",
            FutureWarning,
            stacklevel=stacklevel,
        )
    elif broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. IMPORTANT: "
            "unlike `broadcast_buffers=False`, `forward_sync_buffers=False` still syncs buffers at "
            "init. If you rely on buffers NOT being synced at init (e.g. rank-local buffers), keep "
            "using `broadcast_buffers=False` until `init_sync_buffers` is available.",
            FutureWarning,
            stacklevel=stacklevel,
        )
    if forward_sync_buffers is not None:
        return BufferPolicy(at_init=True, before_forward=forward_sync_buffers)
    both = True if broadcast_buffers is None else broadcast_buffers
    return BufferPolicy(at_init=both, before_forward=both)
