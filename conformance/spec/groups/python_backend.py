"""A backend in Python, as torch 2.14 takes them: it records its calls and does not communicate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Me
from conformance.torch_private import BackendOfAGroup

NAME = "conformance_records"

# Methods of a backend, by the name of the collective that calls them.
METHODS = {
    "all_reduce": "allreduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "all_gather": "allgather",
    "all_gather_into_tensor": "all_gather_single",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "all_to_all": "alltoall",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
}

# What a backend may say of itself.
PROPERTIES = (
    *("supports_splitting", "supports_coalescing", "supports_shrinking"),
    *("supports_reconfigure", "supports_window"),
)


class Handle(dist.Work):
    """Of a call that was over at once. Records each wait, and raises then what the backend says."""

    def __init__(self, backend: RecordingBackend, tensors: list[Tensor]) -> None:
        super().__init__()
        self._backend = backend
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result(tensors)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._backend.calls.append(("wait", timeout.total_seconds()))
        if self._backend.fails_in_wait:
            raise self._backend.fails_in_wait
        return True


class RecordingBackend(BackendOfAGroup):
    """Has no operation; subclasses have some."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.calls: list[tuple[Any, ...]] = []
        self.fails: Exception | None = None
        self.fails_in_wait: Exception | None = None

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "Records"

    def record(self, *call: Any, outputs: Sequence[Tensor] = ()) -> Handle:
        self.calls.append(call)
        if self.fails:
            raise self.fails
        return Handle(self, list(outputs))


def _tensors(arguments: Any) -> list[Tensor]:
    """All that there are, in order, out of any nesting of lists."""
    if isinstance(arguments, Tensor):
        return [arguments]
    if not isinstance(arguments, list | tuple):
        return []
    return [tensor for argument in arguments for tensor in _tensors(argument)]


def _method(name: str) -> Callable[..., Handle]:
    def method(self: RecordingBackend, *arguments: Any) -> Handle:
        *rest, options = arguments
        tensors = _tensors(rest)
        for tensor in tensors:
            tensor.add_(1)
        splits = [list(x) for x in rest if isinstance(x, list) and not _tensors(x)]
        return self.record(
            name,
            [tensor.data_ptr() for tensor in tensors],
            splits if name == "all_to_all_single" else [],
            getattr(options, "rootRank", None),
            str(options.reduceOp.op) if hasattr(options, "reduceOp") else None,
            options.asyncOp,
        )

    return method


class FullBackend(RecordingBackend):
    """Each collective records its method, the addresses of its tensors, numbers of rows to send and
    receive, its root, its reduction and whether it is asynchronous; it adds 1 to each tensor."""

    def send(self, tensors: Any, dst: int, tag: int) -> Handle:
        return self.record("send", tensors[0].data_ptr(), dst, tag)

    def recv(self, tensors: Any, src: int, tag: int) -> Handle:
        return self.record("recv", tensors[0].data_ptr(), src, tag)

    def recv_anysource(self, tensors: Any, tag: int) -> Handle:
        return self.record("recv_anysource", tensors[0].data_ptr(), tag)

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))

    def abort(self) -> None:
        self.calls.append(("abort",))


for _name in METHODS.values():
    setattr(FullBackend, _name, _method(_name))


class CoalescingBackend(FullBackend):
    """Joins calls, too."""

    supports_coalescing = True

    def start_coalescing(self) -> None:
        self.calls.append(("start",))

    def end_coalescing(self) -> Handle:
        return self.record("end")


def start(
    me: Me, kind: type[RecordingBackend] = FullBackend, members: Iterable[int] = ()
) -> tuple[Any, Any]:
    """A group of all ranks, or one of these members beside it, and its backend, which torch holds.

    Two times None on a rank that is no member.
    """
    made: list[RecordingBackend] = []

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> RecordingBackend:
        made.append(kind(rank, size))
        return made[-1]

    dist.Backend.register_backend(NAME, create, devices=["cpu"])
    dist.init_process_group(NAME, store=me.store, rank=me.rank, world_size=me.world_size)
    members = list(members)
    if not members:
        return dist.group.WORLD, made.pop()
    group = dist.new_group(members)
    return (group, made.pop()) if me.rank in members else (None, None)
