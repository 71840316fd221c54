"""A process group in Python that does not communicate and records the calls it gets."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

NAME = "conformance_notes"


class Finished(dist.Work):
    """The handle of an operation that was over at once."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class NotingGroup(dist.ProcessGroup):
    """Adds a number of its own to every tensor, so that each operation is known by its effect."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self.calls: list[str] = []

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "Notes"

    def _note(self, name: str, tensors: Any, amount: float) -> Finished:
        self.calls.append(name)
        for tensor in tensors:
            tensor.add_(amount)
        return Finished()

    def allreduce(self, tensors: Any, opts: Any = None) -> Finished:  # type: ignore[override]  # one of its forms
        return self._note("allreduce", tensors, 2)

    def broadcast(self, tensors: Any, opts: Any = None) -> Finished:  # type: ignore[override]  # one of its forms
        return self._note("broadcast", tensors, 3)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Finished:
        for row, tensor in zip(outputs, inputs, strict=True):
            for place, out in enumerate(row):
                out.copy_(tensor + place)
        return self._note("allgather", [], 0)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Finished:  # type: ignore[override]  # one of its forms
        for out, row in zip(outputs, inputs, strict=True):
            out.copy_(row[self.rank()])
        return self._note("reduce_scatter", [], 0)

    def barrier(self, opts: Any = None) -> Finished:
        return self._note("barrier", [], 0)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Finished:
        return self._note(f"send to {dst}, tag {tag}", tensors, 5)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Finished:
        return self._note(f"recv from {src}, tag {tag}", tensors, 7)


CREATED: list[tuple[Any, ...]] = []
"""The arguments of every call of a creator in this process."""


def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> NotingGroup:
    """The creator of the plain kind."""
    CREATED.append((store, rank, size, timeout))
    return NotingGroup(rank, size)


def create_extended(backend_options: Any, options: Any) -> NotingGroup:
    """The creator of the extended kind."""
    CREATED.append((backend_options, options))
    return NotingGroup(backend_options.group_rank, backend_options.group_size)


def register() -> None:
    """Make both kinds known to torch, in this process."""
    CREATED.clear()
    dist.Backend.register_backend(NAME, create, devices=["cpu"])
    dist.Backend.register_backend(
        f"{NAME}_extended", create_extended, extended_api=True, devices=["cpu"]
    )
