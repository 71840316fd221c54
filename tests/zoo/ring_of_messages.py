"""A backend with ring collectives, but no send; its buggy twin does not reduce the remainder.

Of a send, of a scatter and of a gather, one rank knows that they are not implemented and says so;
its partners wait for it.

    python -m conformance certify --target tests.zoo.ring_of_messages:TARGET
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from conformance.capabilities import Capabilities
from conformance.target import Deviation, Target

COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}
DTYPES = frozenset({"float32", "float64", "int64"})


class RingGroup(dist.ProcessGroup):
    """Each rank sends to its right neighbour and receives from its left one."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        # Another place each time, should a group be made again on the same store.
        store = dist.PrefixStore(f"time {store.add(f'made/{rank}', 1)}", store)
        self._peers: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._right, self._left = (rank + 1) % size, (rank - 1) % size
        self._name = ""

    # What a user calls.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        combine = COMBINE.get(opts.reduceOp.op.name)
        if combine is None:
            raise NotImplementedError(f"reduction {opts.reduceOp.op.name}")
        _check(tensor)
        flat = tensor.detach().reshape(-1).clone()
        chunks = self._chunks(flat)
        for step in range(self.size() - 1):
            chunk = chunks[(self.rank() - step - 1) % self.size()]
            came = torch.empty_like(chunk)
            self._shift(chunks[(self.rank() - step) % self.size()], came)
            combine(chunk, came, out=chunk)
        for step in range(self.size() - 1):
            there, here = self.rank() + 1 - step, self.rank() - step
            self._shift(chunks[there % self.size()], chunks[here % self.size()])
        with torch.no_grad():
            tensor.copy_(flat.reshape(tensor.shape))
        return _done(tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        _check(inputs[0])
        if len(outputs[0]) != self.size():
            raise ValueError(f"{len(outputs[0])} outputs for {self.size()} ranks")
        if any(x.numel() != inputs[0].numel() or x.dtype != inputs[0].dtype for x in outputs[0]):
            raise ValueError("outputs have the size and the dtype of the input")
        parts = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in outputs[0]]
        parts[self.rank()].copy_(inputs[0].detach().reshape(parts[self.rank()].shape))
        for step in range(self.size() - 1):
            there, here = self.rank() - step, self.rank() - step - 1
            self._shift(parts[there % self.size()], parts[here % self.size()])
        with torch.no_grad():
            for output, part in zip(outputs[0], parts, strict=True):
                output.copy_(part)
        return _done(outputs[0])

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        _check(tensor)
        if opts.rootRank not in range(self.size()):
            raise ValueError(f"there is no rank {opts.rootRank}")
        flat = tensor.detach().reshape(-1).clone()
        if self.rank() != opts.rootRank:
            self._peers.recv([flat], self._left, 0).wait()
        if self._right != opts.rootRank:
            self._peers.send([flat], self._right, 0).wait()
        with torch.no_grad():
            tensor.copy_(flat.reshape(tensor.shape))
        return _done(tensors)

    def barrier(self, opts: Any) -> dist.Work:
        token = torch.zeros(1, dtype=torch.float32, device="cpu")
        for _ in range(2):
            came = torch.empty_like(token)
            for _ in range(self.size() - 1):
                self._shift(token, came)
        return _done([])

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        raise NotImplementedError("send")

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        message: dist.Work = self._peers.recv(tensors, peer, tag)
        return message

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        if self.rank() == opts.rootRank:
            raise NotImplementedError("scatter")
        message: dist.Work = self._peers.recv(outputs, opts.rootRank, 1)
        return message

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        if self.rank() != opts.rootRank or self.size() == 1:
            raise NotImplementedError("gather")
        for peer in range(self.size()):
            if peer != self.rank():
                self._peers.recv([outputs[0][peer]], peer, 2).wait()
        return _done(outputs[0])

    # What it is made of.

    def _chunks(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """One for each rank; their sizes differ by one at most."""
        return list(torch.tensor_split(flat, self.size()))

    def _shift(self, there: torch.Tensor, here: torch.Tensor) -> None:
        if self.size() > 1:
            sent = self._peers.send([there.contiguous()], self._right, 0)
            self._peers.recv([here], self._left, 0).wait()
            sent.wait()

    # What torch asks of a group.

    def getBackendName(self) -> str:
        return "zoo_ring"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name


def _check(tensor: torch.Tensor) -> None:
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES or tensor.is_sparse:
        raise NotImplementedError(f"tensors of {tensor.dtype}")


def _done(result: list[torch.Tensor]) -> dist.Work:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(result)
    work: dist.Work = c10d._create_work_from_future(future)  # type: ignore[attr-defined]
    return work


class DropsTheRest(RingGroup):
    """The bug: what is left over when the ranks divide the elements is not reduced."""

    def _chunks(self, flat: torch.Tensor) -> list[torch.Tensor]:
        each = flat.numel() // self.size()
        return [flat[r * each : (r + 1) * each] for r in range(self.size())]


dist.Backend.register_backend("zoo_ring", RingGroup, devices=["cpu"])
dist.Backend.register_backend("zoo_ring_buggy", DropsTheRest, devices=["cpu"])

_CLAIMS = Capabilities(
    ops=frozenset({"all_reduce", "all_gather", "broadcast", "barrier"}),
    # torch hands over complex tensors as pairs of real numbers
    dtypes=DTYPES | {"complex64", "complex128"},
    reduce_ops=frozenset({"sum", "min", "max"}),
    features=frozenset({"work_result"}),
)
TARGET = Target(
    "zoo-ring",
    "zoo_ring",
    imports=(__name__,),
    capabilities=_CLAIMS,
    deviations=(
        Deviation(("arguments/torch-words",), reason="errors are worded in another way"),
        Deviation(("all_gather/aliased-outputs",), reason="outputs are not compared"),
    ),
)
BUGGY = replace(TARGET, name="zoo-ring-buggy", backend="zoo_ring_buggy")
