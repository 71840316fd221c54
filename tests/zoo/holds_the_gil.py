"""A backend that holds the GIL while it waits for data; its buggy twin adds up float16 in bfloat16.

python -m conformance certify --target tests.zoo.holds_the_gil:TARGET
"""

from __future__ import annotations

import ctypes
import socket
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.capabilities import Capabilities
from conformance.target import Deviation, Target

_libc = ctypes.PyDLL(None, use_errno=True)  # unlike CDLL, its calls do not release the lock
_EINTR = 4
_MSG_NOSIGNAL = 0x4000

DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.int32, torch.int64})


def _send(fd: int, address: int, length: int) -> None:
    _all("send", fd, address, length, _MSG_NOSIGNAL)


def _receive(fd: int, address: int, length: int) -> None:
    _all("recv", fd, address, length, 0)


def _all(function: str, fd: int, address: int, length: int, flags: int) -> None:
    while length:
        count = getattr(_libc, function)(
            fd, ctypes.c_void_p(address), ctypes.c_size_t(length), flags
        )
        if count < 0 and ctypes.get_errno() == _EINTR:
            continue
        if count <= 0:
            raise RuntimeError(f"{function} failed: the peer is gone ({ctypes.get_errno()})")
        address, length = address + count, length - count


class Finished(dist.Work):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class LockedGroup(dist.ProcessGroup):
    """A star: everything goes through rank 0 of the group, in blocking calls."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._name = self._desc = ""
        # Another place each time, should a group be made again on the same store.
        store = dist.PrefixStore(f"time {store.add(f'made/{rank}', 1)}", store)
        self._links: dict[int, socket.socket] = {}
        if rank == 0:
            with socket.create_server(("127.0.0.1", 0), backlog=size) as server:
                server.settimeout(timeout.total_seconds())
                store.set("center", str(server.getsockname()[1]))
                for _ in range(1, size):
                    link, _ = server.accept()
                    link.setblocking(True)
                    self._links[int.from_bytes(link.recv(4, socket.MSG_WAITALL), "big")] = link
        else:
            store.wait(["center"], timeout)
            link = socket.create_connection(("127.0.0.1", int(store.get("center"))))
            link.sendall(rank.to_bytes(4, "big"))
            self._links[0] = link
        for link in self._links.values():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def getBackendName(self) -> str:
        return "zoo_gil"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    def _put(self, rank: int, dense: torch.Tensor) -> None:
        _send(self._links[rank].fileno(), dense.data_ptr(), dense.nbytes)

    def _take(self, rank: int, like: torch.Tensor) -> torch.Tensor:
        dense = torch.empty(like.numel(), dtype=like.dtype, device="cpu")
        _receive(self._links[rank].fileno(), dense.data_ptr(), dense.nbytes)
        return dense

    def _collect(self, dense: torch.Tensor) -> list[torch.Tensor]:
        """At rank 0, what all ranks have; elsewhere nothing."""
        if self.rank() > 0:
            self._put(0, dense)
            return []
        return [dense, *(self._take(rank, dense) for rank in range(1, self.size()))]

    def _hand_out(self, dense: torch.Tensor) -> torch.Tensor:
        """What rank 0 has."""
        if self.rank() > 0:
            return self._take(0, dense)
        for rank in range(1, self.size()):
            self._put(rank, dense)
        return dense

    def _from(self, root: int, dense: torch.Tensor) -> torch.Tensor:
        """What the root has, which rank 0 passes on."""
        if root and self.rank() == root:
            self._put(0, dense)
        if root and self.rank() == 0:
            dense = self._take(root, dense)
        return self._hand_out(dense)

    def _reduced(self, tensor: torch.Tensor, opts: Any) -> torch.Tensor:
        name = opts.reduceOp.op.name
        if name not in ("SUM", "PRODUCT"):
            raise ValueError(f"zoo_gil has no reduction {name}")
        parts = self._collect(_dense(tensor))
        for part in parts[1:]:
            parts[0] = self._add(parts[0], part) if name == "SUM" else parts[0] * part
        return self._hand_out(parts[0] if parts else _dense(tensor))

    def _add(self, total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return total + part

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        _write(tensors[0], self._reduced(tensors[0], opts))
        return Finished(tensors)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        if not 0 <= opts.rootRank < self.size():
            raise ValueError(f"zoo_gil: no rank {opts.rootRank} among {self.size()}")
        total = self._reduced(tensors[0], opts)
        if self.rank() == opts.rootRank:
            _write(tensors[0], total)
        return Finished(tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        root = opts.rootRank
        if not 0 <= root < self.size():
            raise ValueError(f"zoo_gil: no rank {root} among {self.size()}")
        dense = self._from(root, _dense(tensors[0]))
        if self.rank() != root:
            _write(tensors[0], dense)
        return Finished(tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        mine = _dense(inputs[0])
        if len(outputs[0]) != self.size():
            raise ValueError(f"zoo_gil: {len(outputs[0])} tensors for {self.size()} ranks")
        for place in outputs[0]:
            if place.numel() != mine.numel() or place.dtype != mine.dtype:
                raise ValueError("zoo_gil gathers tensors of one size and dtype only")
        for rank, part in enumerate(outputs[0]):
            _write(part, self._from(rank, mine))
        return Finished(outputs[0])

    def barrier(self, opts: Any) -> dist.Work:
        token = torch.zeros(1, device="cpu")
        self._collect(token)
        self._hand_out(token)
        return Finished([])


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        raise TypeError(f"zoo_gil cannot take {tensor.dtype} ({tensor.layout})")
    with torch.no_grad():
        dense = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
        return dense.copy_(tensor.reshape(-1))


def _write(tensor: torch.Tensor, dense: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(dense.reshape(tensor.shape))


class AddsCoarsely(LockedGroup):
    """The bug: float16 is added up in bfloat16, which has three bits less."""

    def _add(self, total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        if total.dtype is not torch.float16:
            return super()._add(total, part)
        return (total.bfloat16() + part.bfloat16()).half()


dist.Backend.register_backend("zoo_gil", LockedGroup, devices=["cpu"])
dist.Backend.register_backend("zoo_gil_buggy", AddsCoarsely, devices=["cpu"])

TARGET = Target(
    name="zoo-gil",
    backend="zoo_gil",
    imports=(__name__,),
    capabilities=Capabilities(
        ops=frozenset({"all_reduce", "reduce", "broadcast", "all_gather", "barrier"}),
        dtypes=frozenset({"float32", "float64", "float16", "int32", "int64"}),
        reduce_ops=frozenset({"sum", "product"}),
        features=frozenset({"work_result"}),
    ),
    deviations=(
        Deviation(("arguments/torch-words",), "errors name this backend"),
        Deviation(("all_gather/aliased-outputs",), "outputs are not compared with each other"),
    ),
)
BUGGY = replace(TARGET, name="zoo-gil-buggy", backend="zoo_gil_buggy")
