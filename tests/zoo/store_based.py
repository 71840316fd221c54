"""A backend on the store: all_reduce, broadcast, barrier; its buggy twin reduces int64 as floats.

python -m conformance certify --target tests.zoo.store_based:TARGET
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from conformance.capabilities import Capabilities
from conformance.target import Target

_REDUCTIONS = {"SUM": np.add, "MAX": np.maximum}


class Done(dist.Work):
    """An operation that was over when it was issued."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class StoreGroup(dist.ProcessGroup):
    """Each operation has a number; each rank puts its array under that number."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        if rank not in range(size):
            raise ValueError(f"there is no rank {rank} of {size}")
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._store = store
        self._timeout = timeout
        self._number = 0
        self._name = self._desc = ""

    def getBackendName(self) -> str:
        return "zoo_store"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    def _put(self, array: np.ndarray[Any, Any]) -> None:
        buffer = io.BytesIO()
        np.save(buffer, array)
        self._store.set(f"{self._number}/{self.rank()}", buffer.getvalue())  # type: ignore[arg-type]

    def _get(self, rank: int) -> np.ndarray[Any, Any]:
        key = f"{self._number}/{rank}"
        self._store.wait([key], self._timeout)
        found: np.ndarray[Any, Any] = np.load(io.BytesIO(self._store.get(key)))
        return found

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        reduction = _REDUCTIONS.get(opts.reduceOp.op.name)
        if reduction is None:
            raise ValueError(f"zoo_store cannot reduce by {opts.reduceOp}")
        self._check(tensor)
        self._number += 1
        self._put(tensor.detach().resolve_neg().numpy())
        total = self._get(0)
        for rank in range(1, self.size()):
            total = self._both(reduction, total, self._get(rank))
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.asarray(total).reshape(tensor.shape)))
        return Done(tensors)

    def _both(self, reduction: np.ufunc, one: Any, other: Any) -> Any:
        return reduction(one, other)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        self._check(tensor)
        if opts.rootRank not in range(self.size()):
            raise ValueError(f"invalid root rank: {opts.rootRank}")
        self._number += 1
        if self.rank() == opts.rootRank:
            self._put(tensor.detach().resolve_neg().numpy())
        else:
            with torch.no_grad():
                tensor.copy_(torch.from_numpy(self._get(opts.rootRank).reshape(tensor.shape)))
        return Done(tensors)

    def barrier(self, opts: Any) -> dist.Work:
        self._number += 1
        self._put(np.zeros(1))
        for rank in range(self.size()):
            self._get(rank)
        return Done([])

    def shutdown(self) -> None:
        """Rank 0 often serves the store, and stays until the others have read from it."""
        self._store.set(f"left/{self.rank()}", "")
        if self.rank() == 0:
            with contextlib.suppress(RuntimeError):
                others = [f"left/{rank}" for rank in range(self.size())]
                self._store.wait(others, timedelta(seconds=5))

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.dtype not in (torch.float32, torch.float64, torch.int64):
            raise TypeError(f"zoo_store cannot send {tensor.dtype}")


class ReducesInFloats(StoreGroup):
    """The bug: large int64 values lose their last bits."""

    def _both(self, reduction: np.ufunc, one: Any, other: Any) -> Any:
        total = reduction(np.asarray(one, np.float64), np.asarray(other, np.float64))
        return total.astype(one.dtype)


dist.Backend.register_backend("zoo_store", StoreGroup, devices=["cpu"])
dist.Backend.register_backend("zoo_store_buggy", ReducesInFloats, devices=["cpu"])

TARGET = Target(
    name="zoo-store",
    backend="zoo_store",
    imports=(__name__,),
    capabilities=Capabilities(
        ops=frozenset({"all_reduce", "broadcast", "barrier"}),
        # torch hands over complex tensors as pairs of real numbers
        dtypes=frozenset({"float32", "float64", "int64", "complex64", "complex128"}),
        reduce_ops=frozenset({"sum", "max"}),
        features=frozenset(),
    ),
)
BUGGY = replace(TARGET, name="zoo-store-buggy", backend="zoo_store_buggy")
