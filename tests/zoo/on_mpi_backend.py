"""A backend on MPI (mpi4py), and its buggy twin, for which uint8 is signed. Importing this module
starts MPI; mpi4py ends it with the process."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

OPS = {"SUM": MPI.SUM, "PRODUCT": MPI.PROD, "MIN": MPI.MIN, "MAX": MPI.MAX}
DTYPES = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8}
TAG_MAX = (1 << 31) - 1


def communicator(store: dist.Store, rank: int, size: int, timeout: timedelta) -> MPI.Intracomm:
    """Of those processes alone that make the group, in the order of its ranks."""
    store.set(f"world rank of {rank}", str(MPI.COMM_WORLD.rank))
    keys = [f"world rank of {r}" for r in range(size)]
    store.wait(keys, timeout)
    members = MPI.COMM_WORLD.group.Incl([int(store.get(key)) for key in keys])
    comm = MPI.COMM_WORLD.Create_group(members)
    members.Free()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


class Message(dist.Work):
    """A message on its way. It may be dropped: the group keeps it until it is over."""

    def __init__(self, request: MPI.Request, staged: Any, place: Any, peer: int) -> None:
        super().__init__()
        self._request, self._staged, self._place, self._peer = request, staged, place, peer
        self._lock = threading.Lock()
        self._is_over = False

    def progress(self) -> bool:
        with self._lock:
            if not self._is_over and self._request.Test():
                self._finish()
            return self._is_over

    def wait(self, timeout: timedelta | None = None) -> bool:
        while not self.progress():
            pass  # each look moves MPI on, and lets other threads run
        return True

    def _finish(self) -> None:
        if self._place is not None:
            with torch.no_grad():
                self._place.copy_(torch.from_numpy(self._staged).reshape(self._place.shape))
        self._staged = self._place = None
        self._is_over = True

    def is_completed(self) -> bool:
        return self.progress()

    def is_success(self) -> bool:
        return self.progress()

    def source_rank(self) -> int:
        return self._peer

    _source_rank = source_rank


class Collected(dist.Work):
    """A collective, which was over when the call returned."""

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class MPIGroup(dist.ProcessGroup):
    """A communicator. Collectives block; messages do not."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._names = {"name": "", "desc": ""}
        self._comm = communicator(store, rank, size, timeout)
        self._under_way: list[Message] = []
        weakref.finalize(self, _end, self._comm, self._under_way)

    def getBackendName(self) -> str:
        return "zoo_mpi"

    def setGroupName(self, name: str) -> None:
        self._names["name"] = name

    def getGroupName(self) -> str:
        return self._names["name"]

    def setGroupDesc(self, desc: str) -> None:
        self._names["desc"] = desc

    def getGroupDesc(self) -> str:
        return self._names["desc"]

    def flat(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        """What MPI is given to reduce."""
        return _flat(tensor)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        mine = self.flat(tensors[0])
        total = np.empty_like(mine)
        self._comm.Allreduce(mine, total, _op(opts))
        return _collected([tensors[0]], [total])

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        buffer = _flat(tensors[0])
        self._comm.Bcast(buffer, root=self._root(opts))
        is_root = self.rank() == opts.rootRank
        return Collected(tensors) if is_root else _collected([tensors[0]], [buffer])

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        mine = _flat(inputs[0])
        _check_parts(outputs[0], inputs[0], self.size())
        parts = np.empty((self.size(), mine.size), mine.dtype)
        self._comm.Allgather(mine, parts)
        return _collected(outputs[0], list(parts))

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        mine, root = _flat(inputs[0]), self._root(opts)
        if self.rank() != root:
            self._comm.Gather(mine, None, root)
            return Collected([])
        _check_parts(outputs[0], inputs[0], self.size())
        parts = np.empty((self.size(), mine.size), mine.dtype)
        self._comm.Gather(mine, parts, root)
        return _collected(outputs[0], list(parts))

    def barrier(self, opts: Any) -> dist.Work:
        self._comm.Barrier()
        return Collected([])

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        content = _flat(tensors[0])
        request = self._comm.Isend(content, self._peer(peer), self._tag(tag))
        return self._started(Message(request, content, None, peer))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        buffer = _flat(tensors[0])
        request = self._comm.Irecv(buffer, self._peer(peer), self._tag(tag))
        return self._started(Message(request, buffer, tensors[0], peer))

    def _tag(self, tag: Any) -> int:
        if not isinstance(tag, int) or tag > TAG_MAX:
            raise TypeError(f"{tag!r} is no tag: an int of 32 bits is")
        if tag < 0:
            raise RuntimeError(f"Tag must be nonnegative, not {tag}")
        return tag

    def _peer(self, peer: int) -> int:
        if not 0 <= peer < self.size():
            raise ValueError(f"peer {peer} of {self.size()}")
        return peer

    def _root(self, opts: Any) -> int:
        return self._peer(int(opts.rootRank))

    def _started(self, message: Message) -> Message:
        self._under_way[:] = [m for m in self._under_way if not m.progress()]
        self._under_way.append(message)
        return message


def _end(comm: MPI.Intracomm, under_way: list[Message]) -> None:
    if not MPI.Is_finalized():
        for message in under_way:
            message.progress()
        comm.Free()


def _op(opts: Any) -> MPI.Op:
    name = opts.reduceOp.op.name
    if name not in OPS:
        raise ValueError(f"zoo_mpi: {name} is not among {', '.join(OPS)}")
    return OPS[name]


def _flat(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A copy of its elements, one after the other."""
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        raise TypeError(f"zoo_mpi: cannot send {tensor.dtype}, {tensor.layout}")
    return np.array(tensor.detach().numpy()).reshape(-1)


def _collected(outputs: list[torch.Tensor], parts: list[np.ndarray[Any, Any]]) -> Collected:
    with torch.no_grad():
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(torch.from_numpy(part).view(output.dtype).reshape(output.shape))
    return Collected(outputs)


def _check_parts(parts: list[torch.Tensor], mine: torch.Tensor, size: int) -> None:
    alike = all(p.numel() == mine.numel() and p.dtype == mine.dtype for p in parts)
    if len(parts) != size or not alike:
        raise ValueError(f"zoo_mpi: needs {size} outputs like {mine.dtype} {tuple(mine.shape)}")


class TakesBytesForSigned(MPIGroup):
    """The bug: to MPI, uint8 is a signed number, so 200 is less than 100."""

    def flat(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        elements = super().flat(tensor)
        return elements.view(np.int8) if elements.dtype == np.uint8 else elements


dist.Backend.register_backend("zoo_mpi", MPIGroup, devices=["cpu"])
dist.Backend.register_backend("zoo_mpi_buggy", TakesBytesForSigned, devices=["cpu"])
