"""The backend "staged" of the device "queued": torch's gloo, on copies of the tensors on the host.

An operation waits for the stream that fills its tensors, copies them to the host, is carried out
there by gloo, and copies its outputs back. That is all that it has to get right; what happens when
one of the waits is left out, early.py shows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import queued_device  # noqa: F401  # registers the device
import queued_streams as streams
import torch
import torch.distributed as dist
from queued_streams import NAME
from torch import Tensor

# Methods of a process group, by the names that torch calls, and gloo's names for them. The first
# argument of each holds the outputs, but for those that have none.
METHODS = {
    **{
        name: name
        for name in (
            *("allreduce", "broadcast", "reduce", "allgather", "gather", "scatter", "barrier"),
            *("reduce_scatter", "alltoall", "send", "recv", "recv_anysource"),
            *("_allgather_base", "_reduce_scatter_base", "alltoall_base"),
        )
    },
    # torch 2.13 calls the last three by new names.
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
WITHOUT_OUTPUTS = ("send", "barrier")
# Gloo has no futures for these.
WITHOUT_FUTURE = ("send", "recv", "recv_anysource", "reduce_scatter", "_reduce_scatter_base")


class StagedWork(dist.Work):
    """The handle of an operation: it is done when the outputs are on the device.

    pairs: each output, with its copy on the host.
    """

    def __init__(self, inner: Any, pairs: list[tuple[Tensor, Tensor]], result: Any) -> None:
        super().__init__()
        self._inner = inner
        self._pairs = pairs
        self._result = result
        self._lock = threading.Lock()
        self._future: Any = None

    def follow(self) -> StagedWork:
        """Have gloo's thread copy the outputs when they are there, whether or not anyone waits."""
        self._future = self._inner.get_future().then(self._finished)
        return self

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._inner.wait(timeout or timedelta(0))
        self._copy_up()
        return True

    def is_completed(self) -> bool:
        if not self._inner.is_completed():
            return False
        if self._inner.is_success():
            self._copy_up()
        return True

    def is_success(self) -> bool:
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        return self._inner.exception()

    def source_rank(self) -> int:
        return int(self._inner._source_rank())

    def _source_rank(self) -> int:
        return self.source_rank()

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        if self._future is None:
            raise RuntimeError(f"{StagedGroup.backend_name} has no future for this operation")
        return self._future

    def _finished(self, future: Any) -> Any:
        future.value()  # raises what gloo has raised
        self._copy_up()
        return self._result

    def _copy_up(self) -> None:
        """Copy the outputs, once; they are there when this returns."""
        with self._lock, torch.inference_mode():
            if self._pairs:
                with streams.stream(streams.Stream()):
                    for output, copy in self._pairs:
                        output.copy_(copy, non_blocking=True)
                    streams.current_stream().synchronize()
            self._pairs = []


class StagedGroup(dist.ProcessGroup):
    """Gloo, for tensors of the device."""

    backend_name = "staged"

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._group_name = self._group_desc = ""

    def getBackendName(self) -> str:
        return self.backend_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupDesc(self, desc: str) -> None:
        self._group_desc = desc

    def getGroupDesc(self) -> str:
        return self._group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        # Of a new group, torch 2.15 asks these for a backend in C++, and there is none.
        is_new = self not in dist.distributed_c10d._world.pg_map
        return [] if is_new else [torch.device(NAME)]

    def _get_sequence_number_for_group(self) -> int:
        gloo: Any = self._gloo  # torch's stub lacks the method
        return int(gloo._get_sequence_number_for_group())

    def shutdown(self) -> None:
        self._gloo.shutdown()

    def abort(self) -> None:
        self._gloo.abort()

    def wait_for_inputs(self) -> None:
        """The copies on the host have arrived, of all that was put on the stream before."""
        streams.current_stream().synchronize()

    def issue(self, method: str, *args: Any, **options: Any) -> StagedWork:
        """Start an operation of gloo on copies."""
        copies: dict[Tensor, Tensor] = {}
        staged = [_staged(arg, copies) for arg in args]
        self.wait_for_inputs()
        inner = getattr(self._gloo, method)(*staged, **options)
        outputs = [] if method in WITHOUT_OUTPUTS else _tensors(args[0])
        pairs = [(output, copies[output]) for output in outputs if output in copies]
        work = StagedWork(inner, pairs, outputs)
        return work if method in WITHOUT_FUTURE else work.follow()


def _staged(value: Any, copies: dict[Tensor, Tensor]) -> Any:
    """The same with copies on the host for tensors of the device; these copies are noted."""
    if isinstance(value, list | tuple):
        return [_staged(v, copies) for v in value]
    if not isinstance(value, Tensor):
        return value
    if value.device.type != NAME:
        raise RuntimeError(f"tensors must be on {NAME}, and one is on {value.device}")
    if value not in copies:
        host = torch.empty_like(value, device="cpu", requires_grad=False)
        copies[value] = host.copy_(value.detach(), non_blocking=True)
    return copies[value]


def _tensors(value: Any) -> list[Tensor]:
    """All tensors of a list, or of a list of lists."""
    return [value] if isinstance(value, Tensor) else [t for v in value for t in _tensors(v)]


def _method(name: str) -> Callable[..., StagedWork]:
    def operation(self: StagedGroup, *args: Any, **options: Any) -> StagedWork:
        return self.issue(name, *args, **options)

    operation.__name__ = name
    # Compiled code, such as torch's DDP, calls the group and is not to be compiled into it.
    called: Callable[..., StagedWork] = torch.compiler.disable(operation)
    return called


for _name, _of_gloo in METHODS.items():
    setattr(StagedGroup, _name, _method(_of_gloo))

dist.Backend.register_backend("staged", StagedGroup, devices=[NAME])
