"""Records which collectives a wrapper issues, by a process group that notes and forwards each one.

`record` gives a group of the target's own backend, seen through a `RecordingGroup`. A wrapper such
as DDP is given that group. Traces of two implementations can then be compared, and ranks that run
different implementations can sit in one job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from conformance.harness.devices import known_types
from conformance.harness.forwarding import OPERATIONS, ForwardingGroup

_BACKEND = "conformance_recording"


@dataclass(frozen=True, slots=True)
class Issued:
    """One collective as it reached the process group.

    tensors: dtype and number of elements of every tensor argument, outputs and inputs in the order
        of the call.
    """

    operation: str
    tensors: tuple[tuple[str, int], ...]

    @property
    def numel(self) -> int:
        """Elements of all tensors together."""
        return sum(numel for _, numel in self.tensors)

    def __str__(self) -> str:
        return f"{self.operation}({', '.join(f'{dtype}[{n}]' for dtype, n in self.tensors)})"


class RecordingGroup(ForwardingGroup):
    """Hands every operation to `inner` and notes it in `trace`."""

    def __init__(self, rank: int, world_size: int, inner: dist.ProcessGroup) -> None:
        super().__init__(rank, world_size, inner)
        self.trace: list[Issued] = []

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return _BACKEND

    def _get_backend_name(self) -> str:
        # Python code asks so: torch's SyncBatchNorm avoids what gloo lacks, and knows it by name.
        # By the name above, C++ code looks for a backend that this group does not have.
        name: str = self.inner.name()
        return name

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        tensors = tuple(_tensors((*args, *kwargs.values())))
        self.trace.append(Issued(OPERATIONS[method], tensors))
        return super().forward(method, *args, **kwargs)

    def take(self) -> list[Issued]:
        """The trace so far; it starts again empty."""
        taken, self.trace = self.trace, []
        return taken


def record(ranks: Sequence[int] | None = None) -> RecordingGroup:
    """A group of these ranks (all by default) on the default group's backend, recorded.

    Every rank of the default group calls it, as with `new_group`; only members get a group that
    can be used.
    """
    inner = dist.new_group(ranks)
    _Creator.inner = inner
    _register(known_types())
    try:
        group = dist.new_group(ranks, backend=_BACKEND)
    finally:
        _Creator.inner = None
    return group  # type: ignore[no-any-return]  # torch does not say what a plugin returns


def _register(types: Sequence[str]) -> None:
    """Let torch make recorded groups for these types of devices, as the default for none."""
    if _BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(_BACKEND, _Creator.make, devices=list(types))
    for type in types:
        if dist.Backend.default_device_backend_map.get(type) == _BACKEND:
            del dist.Backend.default_device_backend_map[type]


class _Creator:
    """How `new_group` comes by the recorded group: torch calls a registered creator."""

    inner: dist.ProcessGroup | None = None

    @classmethod
    def make(cls, store: Any, rank: int, world_size: int, timeout: Any) -> RecordingGroup:
        assert cls.inner is not None
        return RecordingGroup(rank, world_size, cls.inner)


def _tensors(values: Sequence[Any]) -> list[tuple[str, int]]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append((str(value.dtype).removeprefix("torch."), value.numel()))
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
