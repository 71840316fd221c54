"""A backend whose calls take 200 ms, through files; its buggy twin has a barrier that leaves early.

python -m conformance certify --target tests.zoo.slow:TARGET
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from conformance.capabilities import Capabilities
from conformance.target import Deviation, Target

DELAY_S = 0.2
LOOK_AGAIN_S = 0.005
NUMPY = {torch.float32: np.float32, torch.int64: np.int64}


class Link:
    """A folder that all ranks see; what is sent takes its time to be there."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        # Another folder each time, should a group be made again on the same store.
        store = dist.PrefixStore(f"time {store.add(f'made/{rank}', 1)}", store)
        if rank == 0:
            store.set("folder", tempfile.mkdtemp(prefix="zoo-slow-"))
        store.wait(["folder"], timeout)
        self.folder = Path(store.get("folder").decode())
        self.number = 0
        weakref.finalize(self, _leave, self.folder, rank, size)

    def put(self, array: np.ndarray[Any, Any]) -> None:
        """Under the number of this call and this rank's."""
        part = self.folder / f"part-{self.number}-{self.rank}"
        array.tofile(part)
        os.rename(part, self.folder / f"{self.number}-{self.rank}")

    def get(self, rank: int, dtype: Any) -> np.ndarray[Any, Any]:
        path = self.folder / f"{self.number}-{rank}"
        while not path.exists():
            time.sleep(LOOK_AGAIN_S)
        found: np.ndarray[Any, Any] = np.fromfile(path, dtype)
        return found

    def forget(self) -> None:
        """Remove what this rank put two calls ago, which all have read by now."""
        (self.folder / f"{self.number - 2}-{self.rank}").unlink(missing_ok=True)


def _leave(folder: Path, rank: int, size: int) -> None:
    """The last rank removes the folder: until then, others may read what is in it."""
    (folder / f"left-{rank}").touch()
    if sum(1 for _ in folder.glob("left-*")) == size:
        shutil.rmtree(folder, ignore_errors=True)


class Over(dist.Work):
    """The handle of a call that was over when it returned."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class SlowGroup(dist.ProcessGroup):
    """All calls are exchanges: each rank puts an array there and takes what it needs."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._link = Link(store, rank, size, timeout)
        self._name = self._desc = ""

    def getBackendName(self) -> str:
        return "zoo_slow"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    def _exchange(self, array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """What all ranks put there, in their order."""
        link = self._link
        link.number += 1
        link.put(array)
        time.sleep(DELAY_S)
        found = [link.get(rank, array.dtype) for rank in range(link.size)]
        link.forget()
        return found

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        if opts.reduceOp.op.name != "SUM":
            raise NotImplementedError(f"zoo_slow only adds; asked for {opts.reduceOp.op.name}")
        total = np.sum(self._exchange(_array(tensor)), axis=0)
        return _written(tensor, total)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        if not 0 <= opts.rootRank < self._link.size:
            raise ValueError(f"zoo_slow: rank {opts.rootRank} of {self._link.size}")
        return _written(tensor, self._exchange(_array(tensor))[opts.rootRank])

    def barrier(self, opts: Any) -> dist.Work:
        self._exchange(np.zeros(1, np.int64))
        return Over([])


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype not in NUMPY:
        raise NotImplementedError(f"zoo_slow has no {tensor.dtype}")
    return np.array(tensor.detach().numpy()).reshape(-1)


def _written(tensor: torch.Tensor, flat: np.ndarray[Any, Any]) -> dist.Work:
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(flat.astype(NUMPY[tensor.dtype])).reshape(tensor.shape))
    return Over([tensor])


class LeavesTheBarrier(SlowGroup):
    """The bug: with three ranks and more, a barrier waits for its neighbour alone."""

    def barrier(self, opts: Any) -> dist.Work:
        link = self._link
        if link.size < 3:
            return super().barrier(opts)
        link.number += 1
        link.put(np.zeros(1, np.int64))
        time.sleep(DELAY_S)
        link.get((link.rank + 1) % link.size, np.int64)
        return Over([])


dist.Backend.register_backend("zoo_slow", SlowGroup, devices=["cpu"])
dist.Backend.register_backend("zoo_slow_buggy", LeavesTheBarrier, devices=["cpu"])

TARGET = Target(
    name="zoo-slow",
    backend="zoo_slow",
    imports=(__name__,),
    capabilities=Capabilities(
        ops=frozenset({"all_reduce", "broadcast", "barrier"}),
        dtypes=frozenset({"float32", "int64"}),
        reduce_ops=frozenset({"sum"}),
        features=frozenset(),
    ),
    deviations=(Deviation(("arguments/torch-words",), "its errors have words of its own"),),
)
BUGGY = replace(TARGET, name="zoo-slow-buggy", backend="zoo_slow_buggy")
