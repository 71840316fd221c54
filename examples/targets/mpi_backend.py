"""A backend on MPI, by mpi4py: registers "mpi4py" for CPU tensors, under mpirun.

Importing this module starts MPI, which all ranks do together; mpi4py ends it with the process. A
group is a communicator of those processes alone that make it, so groups may differ from job to job.
Collectives are over when their call returns. Tensors are copied into arrays that MPI is given.
"""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

OPS = {"SUM": MPI.SUM, "PRODUCT": MPI.PROD, "MIN": MPI.MIN, "MAX": MPI.MAX}
OPS |= {"BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR}
DTYPES = {
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
}
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

    def __init__(self, request: MPI.Request, staged: Any, place: Tensor | None, peer: int) -> None:
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
            _write(self._place, self._staged)
        self._staged = self._place = None
        self._is_over = True

    def is_completed(self) -> bool:
        return self.progress()

    is_success = is_completed

    def _source_rank(self) -> int:
        return self._peer

    source_rank = _source_rank


class Collected(dist.Work):
    """A collective, which was over when the call returned."""

    def __init__(self, outputs: list[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

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

    # -- What torch asks of every group in Python.

    def getBackendName(self) -> str:
        return "mpi4py"

    def setGroupName(self, name: str) -> None:
        self._names["name"] = name

    def getGroupName(self) -> str:
        return self._names["name"]

    def setGroupDesc(self, desc: str) -> None:
        self._names["desc"] = desc

    def getGroupDesc(self) -> str:
        return self._names["desc"]

    # -- Collectives

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        mine = _flat(tensors[0])
        total = np.empty_like(mine)
        self._comm.Allreduce(mine, total, _op(opts))
        return _collected(tensors, [total])

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        mine, root = _flat(tensors[0]), self._root(opts)
        is_root = self.rank() == root
        total = np.empty_like(mine)
        self._comm.Reduce(mine, total if is_root else None, _op(opts), root)
        return _collected(tensors, [total]) if is_root else Collected(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        buffer, root = _flat(tensors[0]), self._root(opts)
        self._comm.Bcast(buffer, root)
        return Collected(tensors) if self.rank() == root else _collected(tensors, [buffer])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        self._check_parts(outputs[0], inputs[0])
        return _collected(outputs[0], list(self._all_gathered(inputs[0])))

    def _allgather_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> dist.Work:
        self._check_whole(output, mine)
        return _collected([output], [self._all_gathered(mine)])

    def _all_gathered(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        mine = _flat(tensor)
        parts = np.empty((self.size(), mine.size), mine.dtype)
        self._comm.Allgather(mine, parts)
        return parts

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        mine, root = _flat(inputs[0]), self._root(opts)
        if self.rank() != root:
            self._comm.Gather(mine, None, root)
            return Collected([])
        self._check_parts(outputs[0], inputs[0])
        parts = np.empty((self.size(), mine.size), mine.dtype)
        self._comm.Gather(mine, parts, root)
        return _collected(outputs[0], list(parts))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        buffer, root = _flat(outputs[0]), self._root(opts)
        parts = None
        if self.rank() == root:
            self._check_parts(inputs[0], outputs[0])
            parts = np.stack([_flat(part) for part in inputs[0]])
        self._comm.Scatter(parts, buffer, root)
        return _collected(outputs, [buffer])

    def _reduce_scatter_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> dist.Work:
        self._check_whole(mine, output)
        total = _flat(output)
        self._comm.Reduce_scatter_block(_flat(mine), total, _op(opts))
        return _collected([output], [total])

    def alltoall_base(
        self, output: Tensor, mine: Tensor, counts_out: Any, counts_in: Any, opts: Any = None
    ) -> dist.Work:
        sent, received = _flat(mine), _flat(output)
        if sent.dtype != received.dtype:
            raise ValueError(f"mpi4py: output of {output.dtype} for input of {mine.dtype}")
        to, of = self._counts(counts_in, mine), self._counts(counts_out, output)
        self._comm.Alltoallv((sent, to), (received, of))
        return _collected([output], [received])

    def barrier(self, opts: Any) -> dist.Work:
        self._comm.Barrier()
        return Collected([])

    # What torch 2.13 calls them. Its stubs name the parameters otherwise.
    all_gather_single = _allgather_base  # type: ignore[assignment]  # names of parameters
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]  # the same
    all_to_all_single = alltoall_base  # type: ignore[assignment]  # the same

    # -- Messages

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        content = _flat(tensors[0])
        request = self._comm.Isend(content, self._peer(peer), _tag(tag))
        return self._started(Message(request, content, None, peer))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        buffer = _flat(tensors[0])
        request = self._comm.Irecv(buffer, self._peer(peer), _tag(tag))
        return self._started(Message(request, buffer, tensors[0], peer))

    def _started(self, message: Message) -> Message:
        self._under_way[:] = [m for m in self._under_way if not m.progress()]
        self._under_way.append(message)
        return message

    # -- What calls are given

    def _peer(self, peer: int) -> int:
        if not 0 <= peer < self.size():
            raise ValueError(f"mpi4py: invalid rank {peer} of {self.size()}")
        return peer

    def _root(self, opts: Any) -> int:
        return self._peer(int(opts.rootRank))

    def _check_parts(self, parts: list[Tensor], mine: Tensor) -> None:
        alike = all(p.shape == mine.shape and p.dtype == mine.dtype for p in parts)
        if len(parts) != self.size() or not alike:
            raise ValueError(
                f"mpi4py: invalid tensor list: {self.size()} like {mine.dtype} {tuple(mine.shape)}"
                " are needed"
            )

    def _check_whole(self, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self.size() or whole.dtype != part.dtype:
            raise ValueError(
                f"mpi4py: {whole.dtype} {tuple(whole.shape)} is not {self.size()} times "
                f"{part.dtype} {tuple(part.shape)}"
            )

    def _counts(self, rows: list[int], tensor: Tensor) -> list[int]:
        """How many elements go to or come from each rank; without `rows`, equally many."""
        length = tensor.shape[0] if tensor.dim() else 0
        if not rows and length % self.size():
            raise ValueError(f"mpi4py: {length} rows cannot be split equally for {self.size()}")
        rows = rows or [length // self.size()] * self.size()
        if len(rows) != self.size() or sum(rows) != length or min(rows) < 0:
            raise ValueError(f"mpi4py: split sizes {rows} do not match {length} rows")
        return [n * (tensor.numel() // length if length else 0) for n in rows]


def _end(comm: MPI.Intracomm, under_way: list[Message]) -> None:
    if not MPI.Is_finalized():
        for message in under_way:
            message.progress()
        comm.Free()


def _op(opts: Any) -> MPI.Op:
    options: Any = opts or dist.ReduceScatterOptions()
    name = options.reduceOp.op.name
    if name not in OPS:
        raise ValueError(f"mpi4py: {name} is not among {', '.join(OPS)}")
    return OPS[name]


def _tag(tag: Any) -> int:
    if not isinstance(tag, int) or tag > TAG_MAX:
        raise TypeError(f"mpi4py: {tag!r} is no tag: an int of 32 bits is")
    if tag < 0:
        raise RuntimeError(f"mpi4py: tag must be nonnegative, not {tag}")
    return tag


def _flat(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A copy of its elements, one after the other."""
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        raise TypeError(f"mpi4py: invalid tensor type: {tensor.dtype}, {tensor.layout}")
    return np.array(tensor.detach().resolve_conj().resolve_neg().numpy()).reshape(-1)


def _write(tensor: Tensor, elements: np.ndarray[Any, Any]) -> None:
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(elements).reshape(tensor.shape))


def _collected(outputs: list[Tensor], parts: list[np.ndarray[Any, Any]]) -> Collected:
    for output, part in zip(outputs, parts, strict=True):
        _write(output, part)
    return Collected(outputs)


dist.Backend.register_backend("mpi4py", MPIGroup, devices=["cpu"])
