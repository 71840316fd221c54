"""A device of type "pydev", in Python alone: its memory is the host's, kept beside each tensor.

torch 2.13 lets Python register the hooks and the module of the type that it reserves for others
(PrivateUse1), and operators for it. Its tensors have no storage, so each carries a tensor of the
host with its values; views of them are left out. The backend "hosted" carries out collectives of
such tensors with Gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration

from conformance.harness.forwarding import ForwardingGroup

NAME = "pydev"
_COUNT = 2
_KEY = "privateuseone"


class Module:
    """`torch.pydev`: no streams, no events, no memory statistics."""

    def __init__(self) -> None:
        self.current = 0
        self.seed = 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return _COUNT

    def get_device_name(self, index: int) -> str:
        return f"Python device {index}"

    def current_device(self) -> int:
        return self.current

    def set_device(self, device: torch.device) -> None:
        self.current = device.index

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.seed = seed


class OnDevice(torch.Tensor):
    """A tensor of the device. on_host: its values, of the same shape."""

    on_host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _on_device(values: torch.Tensor) -> OnDevice:
    made: Any = torch._C._acc.create_empty_tensor(tuple(values.shape), values.dtype)
    made.__class__ = OnDevice
    made.on_host = values
    return made  # type: ignore[no-any-return]  # its class was changed


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.on_host if isinstance(tensor, OnDevice) else tensor


def _empty(size: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> OnDevice:
    return _on_device(torch.empty(size, dtype=dtype))


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: Any, **_: Any) -> OnDevice:
    return _on_device(torch.empty(size, dtype=dtype))


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _values(target).copy_(_values(source))
    return target


def _fill(tensor: OnDevice, value: Any) -> OnDevice:
    tensor.on_host.fill_(value)
    return tensor


def _add(out: OnDevice, other: torch.Tensor, alpha: Any = 1) -> OnDevice:
    out.on_host.add_(_values(other), alpha=alpha)
    return out


def _detach(tensor: OnDevice) -> OnDevice:
    return _on_device(tensor.on_host)


class HostedGroup(ForwardingGroup):
    """Gloo, on what the tensors hold on the host."""

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "hosted"

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return super().forward(method, *map(_hosted, args), **kwargs)


def _hosted(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_hosted(v) for v in value]
    return _values(value) if isinstance(value, torch.Tensor) else value


def _make(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> HostedGroup:
    inner = dist.ProcessGroupGloo(store, rank, world_size, timeout)
    return HostedGroup(rank, world_size, inner)


def _register() -> None:
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    for name, operator in (
        ("empty.memory_format", _empty),
        ("empty_strided", _empty_strided),
        ("_copy_from", _copy),
        ("fill_.Scalar", _fill),
        ("add_.Tensor", _add),
        ("detach", _detach),
    ):
        torch.library.impl(f"aten::{name}", _KEY)(operator)
    dist.Backend.register_backend("hosted", _make, devices=["cpu", NAME])


_register()
