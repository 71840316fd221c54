"""Lookup of the process's `DeviceHandle` of a device or tensor, and its substitution for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from impl.device.accelerator import AcceleratorHandle
from impl.device.handle import DeviceHandle
from impl.device.host import HostHandle

_handles: dict[tuple[str, int | None], DeviceHandle] = {}
_substitute: DeviceHandle | None = None


def handle_for(device: torch.device) -> DeviceHandle:
    """The process's handle for `device`, or for the current device of its type without an index.

    Raises:
        AttributeError: if torch has no module for that device type.
    """
    if _substitute is not None:
        return _substitute
    key = device.type, device.index
    if key not in _handles:
        _handles[key] = HostHandle() if device.type == "cpu" else AcceleratorHandle(device)
    return _handles[key]


_HOST = torch.device("cpu")


def handle_of(tensor: torch.Tensor) -> DeviceHandle:
    """The handle of the device that a tensor is on; the host's for a device without streams."""
    if tensor.is_cpu:
        return handle_for(_HOST)
    module = getattr(torch, tensor.device.type, None)  # none for the meta device
    return handle_for(tensor.device if hasattr(module, "Stream") else _HOST)


@contextlib.contextmanager
def substituted_handle(handle: DeviceHandle) -> Iterator[None]:
    """Inside, every device's handle is `handle`: for checking the order of accesses.

    What was built inside keeps it afterwards.
    """
    global _substitute
    before, _substitute = _substitute, handle
    try:
        yield
    finally:
        _substitute = before
