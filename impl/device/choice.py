"""Lookup of the process's `DeviceHandle` of a device or tensor, and its substitution for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from impl.device.accelerator import AcceleratorHandle, QueueHandle
from impl.device.handle import DeviceHandle
from impl.device.host import HostHandle

_handles: dict[tuple[str, int | None], DeviceHandle] = {}
_substitutes: tuple[DeviceHandle, ...] = ()


def handle_for(device: torch.device) -> DeviceHandle:
    """The process's handle for `device`, or for the current device of its type without an index.

    Raises:
        AttributeError: if torch has no module for that device type.
    """
    if _substitutes:
        return _substitutes[min(device.index or 0, len(_substitutes) - 1)]
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
    if _substitutes:
        return handle_for(tensor.device)
    is_hosts = tensor.is_cpu or not hasattr(torch, tensor.device.type)
    return handle_for(_HOST if is_hosts else tensor.device)


def types_served() -> tuple[str, ...]:
    """Types of device whose tensors a group takes: those of torch's gloo, and the accelerator that
    torch has in this process.
    """
    current = torch.accelerator.current_accelerator()
    return tuple(dict.fromkeys(("cpu", "cuda", *([current.type] if current else []))))


@contextlib.contextmanager
def substituted_handle(*handles: DeviceHandle) -> Iterator[None]:
    """Inside, device 0 has the first of `handles`, and so on: for checking the order of accesses.

    Further devices have the last one. What was built inside keeps its handle afterwards.
    """
    global _substitutes
    before, _substitutes = _substitutes, handles
    try:
        yield
    finally:
        _substitutes = before
