"""Lookup of the process's `DeviceHandle` of a device or tensor, and its substitution for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from impl.device.accelerator import AcceleratorHandle, QueueHandle
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
        _handles[key] = _made_for(device)
    return _handles[key]


def _made_for(device: torch.device) -> DeviceHandle:
    if device.type == "cpu":
        return HostHandle()
    has_streams = hasattr(getattr(torch, device.type, None), "Stream")
    return AcceleratorHandle(device) if has_streams else QueueHandle(device)


_HOST = torch.device("cpu")


def handle_of(tensor: torch.Tensor) -> DeviceHandle:
    """The handle of the device that a tensor is on; the host's for one without a module, "meta"."""
    is_hosts = tensor.is_cpu or not hasattr(torch, tensor.device.type)
    return handle_for(_HOST if is_hosts else tensor.device)


def types_served() -> tuple[str, ...]:
    """Types of device whose tensors a group takes: those of torch's gloo, and the accelerator that
    torch has in this process.
    """
    current = torch.accelerator.current_accelerator()
    return tuple(dict.fromkeys(("cpu", "cuda", *([current.type] if current else []))))


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
