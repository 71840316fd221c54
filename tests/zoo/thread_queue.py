"""A backend with a worker thread and queue per group, over TCP; its buggy twin divides AVG twice.

python -m conformance certify --target tests.zoo.thread_queue:TARGET
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.capabilities import Capabilities
from conformance.target import Deviation, Target

_LENGTH = struct.Struct("!Q")
_DTYPES = {torch.float32, torch.float64, torch.int64, torch.uint8}
_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


class Peers:
    """A TCP connection to every other rank of the group."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        # Another place each time, should a group be made again on the same store.
        store = dist.PrefixStore(f"time {store.add(f'made/{rank}', 1)}", store)
        self._to: dict[int, socket.socket] = {}
        with socket.create_server(("127.0.0.1", 0), backlog=size) as server:
            store.set(f"tq/{rank}", str(server.getsockname()[1]))
            for other in range(rank):
                store.wait([f"tq/{other}"], timeout)
                port = int(store.get(f"tq/{other}"))
                self._add(other, socket.create_connection(("127.0.0.1", port)))
                self._to[other].sendall(_LENGTH.pack(rank))
            server.settimeout(timeout.total_seconds())
            for _ in range(rank + 1, size):
                connection, _ = server.accept()
                connection.settimeout(None)
                [other] = _LENGTH.unpack(_read(connection, _LENGTH.size))
                self._add(other, connection)

    def _add(self, other: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._to[other] = connection

    def send(self, other: int, tensor: torch.Tensor) -> None:
        content = _to_bytes(tensor)
        self._to[other].sendall(_LENGTH.pack(len(content)) + content)

    def receive(self, other: int, like: torch.Tensor) -> torch.Tensor:
        [length] = _LENGTH.unpack(_read(self._to[other], _LENGTH.size))
        content = _read(self._to[other], length)
        if length != like.numel() * like.element_size():
            raise RuntimeError(f"rank {other} sent {length} bytes for {tuple(like.shape)}")
        return _from_bytes(content, like)

    def close(self) -> None:
        for connection in self._to.values():
            connection.close()


class Job(dist.Work):
    """One operation: what the worker is to do, and later what came of it."""

    def __init__(self, todo: Callable[[Peers], None], outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._todo: Callable[[Peers], None] | None = todo
        self._outputs = outputs
        self._over = threading.Event()
        self._error = ""  # no exception: its traceback would keep the caller's frames alive
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def run(self, peers: Peers) -> None:
        assert self._todo is not None
        try:
            with torch.inference_mode():
                self._todo(peers)
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
        self._todo = None
        self._over.set()
        if self._error:
            self._future.set_exception(RuntimeError(self._error))
        else:
            self._future.set_result(self._outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._over.wait(seconds or None):
            raise RuntimeError(f"the operation timed out after {seconds} s")
        if self._error:
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and not self._error

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


def _serve(jobs: queue.SimpleQueue[Job | None], peers: Peers) -> None:
    """The worker. It does not know the group, which may be freed while it waits."""
    while (job := jobs.get()) is not None:
        job.run(peers)
        del job
    peers.close()


class ThreadGroup(dist.ProcessGroup):
    """Rank 0 of the group gathers, folds and sends back; the worker does one job at a time."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        peers = Peers(store, rank, size, timeout)
        worker = threading.Thread(
            target=_serve, args=(self._jobs, peers), name="tq-worker", daemon=True
        )
        worker.start()
        weakref.finalize(self, self._jobs.put, None)
        self._name = ""

    def getBackendName(self) -> str:
        return "zoo_threads"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    def _enqueue(self, todo: Callable[[Peers], None], outputs: list[torch.Tensor]) -> dist.Work:
        job = Job(todo, outputs)
        self._jobs.put(job)
        return job

    def _root(self, opts: Any) -> int:
        root = int(opts.rootRank)
        if not 0 <= root < self.size():
            raise ValueError(f"there is no rank {root} in a group of {self.size()}")
        return root

    def _check_list(self, tensors: list[torch.Tensor], like: torch.Tensor) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"{len(tensors)} tensors for {self.size()} ranks")
        for tensor in tensors:
            _check(tensor)
        mine = tensors[self.rank()]  # those of other ranks may have any size
        if (mine.shape, mine.dtype) != (like.shape, like.dtype):
            raise ValueError(f"{mine.dtype} {mine.shape} with {like.dtype} {like.shape}")

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        how = _name_of(opts.reduceOp)
        _check(tensor)
        divide = self.average

        def todo(peers: Peers) -> None:
            total = _folded(peers, 0, tensor, how)
            if total is not None and how == "AVG":
                total = divide(total, peers.size)
            tensor.copy_(_spread(peers, 0, tensor if total is None else total))

        return self._enqueue(todo, tensors)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        how, root = _name_of(opts.reduceOp), self._root(opts)
        _check(tensor)
        divide = self.average

        def todo(peers: Peers) -> None:
            total = _folded(peers, root, tensor, how)
            if total is not None:
                tensor.copy_(divide(total, peers.size) if how == "AVG" else total)

        return self._enqueue(todo, tensors)

    @staticmethod
    def average(total: torch.Tensor, size: int) -> torch.Tensor:
        whole = None if total.is_floating_point() else "trunc"
        return torch.div(total, size, rounding_mode=whole)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        root = self._root(opts)
        _check(tensor)

        def todo(peers: Peers) -> None:
            found = _spread(peers, root, tensor)
            if peers.rank != root:
                tensor.copy_(found)

        return self._enqueue(todo, tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        [mine], [out] = inputs, outputs
        _check(mine)
        self._check_list(out, mine)

        def todo(peers: Peers) -> None:
            for root in range(peers.size):
                out[root].copy_(_spread(peers, root, mine if root == peers.rank else out[root]))

        return self._enqueue(todo, out)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        [mine], root = inputs, self._root(opts)
        _check(mine)
        if self.rank() == root:
            self._check_list(outputs[0], mine)

        def todo(peers: Peers) -> None:
            if peers.rank != root:
                peers.send(root, mine)
                return
            for other, place in enumerate(outputs[0]):
                place.copy_(mine if other == root else peers.receive(other, place))

        return self._enqueue(todo, outputs[0] if outputs else [])

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> dist.Work:
        [out], root = outputs, self._root(opts)
        _check(out)
        if self.rank() == root:
            self._check_list(inputs[0], out)

        def todo(peers: Peers) -> None:
            if peers.rank != root:
                out.copy_(peers.receive(root, out))
                return
            for other, part in enumerate(inputs[0]):
                if other == root:
                    out.copy_(part)
                else:
                    peers.send(other, part)

        return self._enqueue(todo, outputs)

    def barrier(self, opts: Any) -> dist.Work:
        def todo(peers: Peers) -> None:
            token = torch.zeros(1, dtype=torch.uint8)
            _folded(peers, 0, token, "SUM")
            _spread(peers, 0, token)

        return self._enqueue(todo, [])


def _folded(peers: Peers, root: int, tensor: torch.Tensor, how: str) -> torch.Tensor | None:
    """At the root, all contributions folded in the order of ranks; elsewhere None."""
    if peers.rank != root:
        peers.send(root, tensor)
        return None
    parts = (
        tensor.detach().clone() if other == root else peers.receive(other, tensor)
        for other in range(peers.size)
    )
    total = next(parts)
    for part in parts:
        total = _FOLDS[how](total, part)
    return total


def _spread(peers: Peers, root: int, tensor: torch.Tensor) -> torch.Tensor:
    """The root's tensor."""
    if peers.rank != root:
        return peers.receive(root, tensor)
    for other in range(peers.size):
        if other != root:
            peers.send(other, tensor)
    return tensor


def _name_of(reduce_op: Any) -> str:
    name = str(reduce_op.op.name)
    if name not in _FOLDS:
        raise ValueError(f"zoo_threads has no {name}")
    return name


def _check(tensor: torch.Tensor) -> None:
    if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
        raise TypeError(f"zoo_threads does not send {tensor.dtype}, {tensor.layout}")


def _to_bytes(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def _from_bytes(content: bytearray, like: torch.Tensor) -> torch.Tensor:
    if not content:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(content, dtype=like.dtype).reshape(like.shape)


def _read(connection: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    view = memoryview(content)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("a rank of the group has closed its connection")
        view = view[count:]
    return content


class AveragesTwice(ThreadGroup):
    """The bug: what was divided by the number of ranks is divided once more."""

    @staticmethod
    def average(total: torch.Tensor, size: int) -> torch.Tensor:
        return ThreadGroup.average(ThreadGroup.average(total, size), size)


dist.Backend.register_backend("zoo_threads", ThreadGroup, devices=["cpu"])
dist.Backend.register_backend("zoo_threads_buggy", AveragesTwice, devices=["cpu"])


def _target(name: str, backend: str) -> Target:
    return Target(
        name=name,
        backend=backend,
        imports=(__name__,),
        capabilities=Capabilities(
            ops=frozenset(
                {"all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "barrier"}
            ),
            dtypes=frozenset({"float32", "float64", "int64", "uint8"}),
            reduce_ops=frozenset({"sum", "avg", "min", "max"}),
            features=frozenset({"nonblocking", "gather_v"}),
        ),
        deviations=(
            Deviation(requirements=("arguments/torch-words",), reason="it has words of its own"),
            Deviation(
                requirements=("all_gather/aliased-outputs",),
                reason="the caller is trusted to pass a tensor of its own for each rank",
            ),
        ),
    )


TARGET = _target("zoo-threads", "zoo_threads")
BUGGY = _target("zoo-threads-buggy", "zoo_threads_buggy")
