"""A backend that wraps gloo and waits in each collective's call; its buggy twin never waits.

python -m conformance certify --target tests.zoo.wraps_gloo:TARGET
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.target import load_target


class WaitingGroup(dist.ProcessGroup):
    """torch's gloo without asynchronous collectives."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        make: Callable[..., Any] = dist.ProcessGroup
        self.inner = make(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.inner._register_backend(torch.device("cpu"), kind, gloo)
        self._name = ""

    def getBackendName(self) -> str:
        return "zoo_waits"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    def _run(self, method: str, *args: Any, **kwargs: Any) -> dist.Work:
        work: dist.Work = getattr(self.inner, method)(*args, **kwargs)
        if method not in ("send", "recv"):
            work.wait()
        return work


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self._run(name, *args, **kwargs)


for _name in (
    *("allreduce", "broadcast", "reduce", "allgather", "gather", "scatter", "reduce_scatter"),
    *("alltoall", "barrier", "all_gather_single", "reduce_scatter_single", "all_to_all_single"),
    *("_allgather_base", "_reduce_scatter_base", "alltoall_base", "send", "recv"),
):
    setattr(WaitingGroup, _name, _method(_name))


class HandsBackAtOnce(WaitingGroup):
    """The bug: collectives are no longer waited for, neither in the call nor in `wait`."""

    def _run(self, method: str, *args: Any, **kwargs: Any) -> dist.Work:
        work: dist.Work = getattr(self.inner, method)(*args, **kwargs)
        return work if method in ("send", "recv") else Impatient(work)


class Impatient(dist.Work):
    """An operation that goes on for a while after its `wait`."""

    def __init__(self, inner: dist.Work) -> None:
        super().__init__()
        self._inner = inner

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._inner.get_future()


dist.Backend.register_backend("zoo_waits", WaitingGroup, devices=["cpu"])
dist.Backend.register_backend("zoo_waits_buggy", HandsBackAtOnce, devices=["cpu"])

_GLOO = load_target("torch")
TARGET = replace(
    _GLOO,
    name="zoo-waits",
    backend="zoo_waits",
    imports=(__name__,),
    ddp="",
    fsdp="",
    sync_batchnorm="",
    capabilities=replace(
        _GLOO.capabilities,
        ops=_GLOO.capabilities.ops - {"monitored_barrier"},
        features=frozenset({"reduce_scatter_v"}),
    ),
)
BUGGY = replace(TARGET, name="zoo-waits-buggy", backend="zoo_waits_buggy")
