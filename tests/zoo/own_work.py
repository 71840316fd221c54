"""A backend without threads, whose handles progress when polled; its buggy twin ignores strides.

python -m conformance certify --target tests.zoo.own_work:TARGET
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from conformance.capabilities import Capabilities
from conformance.target import Deviation, Target

FOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}


class Pending(dist.Work):
    """An operation: the keys that it needs, and what to do with their values.

    It has no future.
    """

    def __init__(
        self,
        store: dist.Store,
        keys: list[str],
        finish: Callable[[list[torch.Tensor]], None],
        dtype: torch.dtype,
        timeout: timedelta,
    ) -> None:
        super().__init__()
        self.store, self.keys, self.finish, self.dtype = store, keys, finish, dtype
        self.deadline = time.monotonic() + timeout.total_seconds()
        self.over = False
        self.error: Exception | None = None

    def poll(self) -> bool:
        """Finish it if everything is there; whether it is over."""
        if not self.over:
            try:
                if not self.store.check(self.keys):
                    return False
                self.finish([_decoded(self.store.get(k), self.dtype) for k in self.keys])
            except Exception as error:
                self.error = error
            self.over = True
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit = self.deadline
        if timeout > timedelta(0):
            limit = time.monotonic() + timeout.total_seconds()
        pause = itertools.chain([0.0, 1e-4, 1e-3], itertools.repeat(2e-3))
        while not self.poll():
            if time.monotonic() > limit:
                raise RuntimeError("Timed out: not all ranks have joined in")
            time.sleep(next(pause))
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.poll()

    def is_success(self) -> bool:
        return self.poll() and self.error is None

    def exception(self) -> Any:
        return self.error


class PollingGroup(dist.ProcessGroup):
    """Operations wait in a queue, the oldest first."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        if rank not in range(size):
            raise ValueError(f"there is no rank {rank} of {size}")
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self.store, self.me, self.everyone = store, rank, range(size)
        self.timeout = timeout
        self.count = 0
        self.queue: deque[Pending] = deque()
        self.label = self.description = ""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        fold = FOLDS.get(opts.reduceOp.op.name)
        if fold is None:
            raise TypeError(f"no such reduction: {opts.reduceOp.op.name}")
        return self.begin(
            tensor,
            self.everyone,
            lambda values: self.write(tensor, reduce(fold, values)),
        )

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        if len(outputs[0]) != self.size():
            raise ValueError(f"invalid output tensor list of {len(outputs[0])}")
        kinds = {(x.numel(), x.dtype) for x in (*outputs[0], *inputs)}
        if len(kinds) > 1:
            raise ValueError(f"invalid tensor size or dtype: {kinds}")

        def finish(values: list[torch.Tensor]) -> None:
            for output, value in zip(outputs[0], values, strict=True):
                self.write(output, value)

        return self.begin(inputs[0], self.everyone, finish)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        root = opts.rootRank
        if root not in self.everyone:
            raise ValueError(f"invalid root rank: {root}")
        if self.me == root:
            return self.begin(tensor, [root], lambda values: None)
        return self.begin(tensor, [root], lambda values: self.write(tensor, values[0]))

    def barrier(self, opts: Any) -> dist.Work:
        token = torch.zeros(1, dtype=torch.int32, device="cpu")
        return self.begin(token, self.everyone, lambda values: None)

    def begin(
        self, mine: torch.Tensor, sources: Any, finish: Callable[[list[torch.Tensor]], None]
    ) -> Pending:
        if mine.is_sparse or mine.dtype not in DTYPES.values():
            raise TypeError(f"no such dtype: {mine.dtype} ({mine.layout})")
        while self.queue and self.queue[0].poll():
            self.queue.popleft()
        self.count += 1
        if self.me in sources:
            self.store.set(f"{self.count}:{self.me}", _encoded(mine))  # type: ignore[arg-type]
        keys = [f"{self.count}:{source}" for source in sources]
        work = Pending(self.store, keys, finish, mine.dtype, self.timeout)
        self.queue.append(work)
        return work

    def shutdown(self) -> None:
        """Rank 0 often serves the store, and stays until the others have read from it."""
        self.store.set(f"left:{self.me}", "")
        if self.me == 0:
            with contextlib.suppress(RuntimeError):
                others = [f"left:{rank}" for rank in self.everyone]
                self.store.wait(others, timedelta(seconds=5))

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        with torch.no_grad():
            tensor.copy_(value.reshape(tensor.shape))

    def getBackendName(self) -> str:
        return "zoo_own_work"

    def setGroupName(self, name: str) -> None:
        self.label = name

    def getGroupName(self) -> str:
        return self.label

    def setGroupDesc(self, desc: str) -> None:
        self.description = desc

    def getGroupDesc(self) -> str:
        return self.description


def _encoded(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def _decoded(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype)


class WritesDensely(PollingGroup):
    """The bug: a result is written to the memory from a tensor's first element on."""

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        with torch.no_grad():
            tensor.as_strided(value.shape, (1,)).copy_(value)


dist.Backend.register_backend("zoo_own_work", PollingGroup, devices=["cpu"])
dist.Backend.register_backend("zoo_own_work_buggy", WritesDensely, devices=["cpu"])

_CLAIMS = Capabilities(
    ops=frozenset({"all_reduce", "all_gather", "broadcast", "barrier"}),
    # torch hands over complex tensors as pairs of real numbers
    dtypes=frozenset({*DTYPES, "complex64", "complex128"}),
    reduce_ops=frozenset(name.lower() for name in FOLDS),
    features=frozenset({"nonblocking"}),
)
_DEVIATIONS = (
    Deviation(
        requirements=(
            *("work/future", "work/future-at-any-time", "work/future-then"),
            *("work/callback-that-raises", "groups/last-held-by-a-callback"),
            "destroy/in-callbacks",
        ),
        reason="a handle has no future",
        example="dist.all_reduce(x, async_op=True).get_future()   # raises",
    ),
    Deviation(
        ("work/dropped-handles",),
        reason="an operation makes no progress while its handle is not asked",
    ),
    Deviation(
        ("order/larger-than-buffers",),
        reason="the store takes no value of 64 MiB",
    ),
    Deviation(("all_gather/aliased-outputs",), reason="outputs are not compared"),
)
TARGET = Target(
    "zoo-own-work",
    "zoo_own_work",
    imports=(__name__,),
    capabilities=_CLAIMS,
    deviations=_DEVIATIONS,
)
BUGGY = replace(TARGET, name="zoo-own-work-buggy", backend="zoo_own_work_buggy")
