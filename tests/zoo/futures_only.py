"""A backend whose handles are futures that threads set; its buggy twin swaps messages of two tags.

python -m conformance certify --target tests.zoo.futures_only:TARGET
"""

from __future__ import annotations

import collections
import contextlib
import functools
import queue
import socket
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from conformance.capabilities import Capabilities
from conformance.target import Deviation, Target

Future = torch.futures.Future

FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
COLLECTIVE = 1 << 40  # collectives use tags above those of messages


class Promise(NamedTuple):
    """A tensor that a peer is going to send, and the future of its being written."""

    place: torch.Tensor
    written: Future[Any]

    def fulfil(self, content: bytearray) -> None:
        if len(content) != self.place.numel() * self.place.element_size():
            got, want = len(content), tuple(self.place.shape)
            self.written.set_exception(RuntimeError(f"{got} bytes came for {want}"))
            return
        if content:
            flat = torch.frombuffer(content, dtype=self.place.dtype)
            _fill(self.place, flat.reshape(self.place.shape))
        self.written.set_result([self.place])


def _fill(place: torch.Tensor, values: torch.Tensor) -> None:
    """From a thread, which has modes of its own."""
    with torch.inference_mode(place.is_inference()), torch.no_grad():
        place.copy_(values)


class Mailbox:
    """What has come from one peer, and what is awaited from it; matched by tag, first to first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._came: dict[int, collections.deque[bytearray]] = {}
        self._awaited: dict[int, collections.deque[Promise]] = {}
        self._end: Exception | None = None

    def deliver(self, tag: int, content: bytearray) -> None:
        with self._lock:
            waiting = self._awaited.get(tag)
            if not waiting:
                self._came.setdefault(tag, collections.deque()).append(content)
                return
            promise = waiting.popleft()
        promise.fulfil(content)

    def expect(self, tag: int, promise: Promise) -> None:
        with self._lock:
            here = self._came.get(tag)
            if not here and self._end is None:
                self._awaited.setdefault(tag, collections.deque()).append(promise)
                return
            content = here.popleft() if here else None
        if content is not None:
            promise.fulfil(content)
        else:
            assert self._end is not None
            promise.written.set_exception(self._end)

    def close(self, reason: Exception) -> None:
        with self._lock:
            self._end = reason
            promises = [promise for waiting in self._awaited.values() for promise in waiting]
            self._awaited.clear()
        for promise in promises:
            promise.written.set_exception(reason)


class Line:
    """The connection to one peer: one thread reads, one writes."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.mailbox = Mailbox()
        self.outbox: queue.SimpleQueue[tuple[int, bytes, Future[Any], Any] | None]
        self.outbox = queue.SimpleQueue()
        ends = threading.Barrier(2)
        for body, args in (
            (_read, (connection, self.mailbox, peer, ends)),
            (
                _write,
                (connection, self.outbox, ends),
            ),
        ):
            threading.Thread(target=body, args=args, name=body.__name__, daemon=True).start()


def _read(link: socket.socket, mailbox: Mailbox, peer: int, ends: threading.Barrier) -> None:
    try:
        while True:
            head = _exactly(link, 16)
            tag, length = int.from_bytes(head[:8], "big"), int.from_bytes(head[8:], "big")
            mailbox.deliver(tag, _exactly(link, length))
    except OSError as error:
        mailbox.close(RuntimeError(f"the connection to rank {peer} has ended: {error}"))
    ends.wait()  # for the writer, which may have something left to send
    link.close()


def _write(
    link: socket.socket,
    outbox: queue.SimpleQueue[tuple[int, bytes, Future[Any], Any] | None],
    ends: threading.Barrier,
) -> None:
    while (letter := outbox.get()) is not None:
        tag, content, sent, value = letter
        try:
            link.sendall(tag.to_bytes(8, "big") + len(content).to_bytes(8, "big") + content)
        except OSError as error:
            sent.set_exception(RuntimeError(f"cannot send: {error}"))
        else:
            sent.set_result(value)
        del letter, content, sent, value
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_WR)
    ends.wait()


def _exactly(link: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    view, done = memoryview(content), 0
    while done < length:
        count = link.recv_into(view[done:])
        if count == 0:
            raise ConnectionResetError("it was closed")
        done += count
    return content


def _work_of(future: Future[Any]) -> dist.Work:
    """The handle that torch makes of a future; its methods ask the future."""
    make: Callable[[Future[Any]], dist.Work] = _distributed_c10d._create_work_from_future  # type: ignore[attr-defined]  # torch's stub lacks it
    return make(future)


def _content(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
    with torch.no_grad():
        flat.copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


class FuturesGroup(dist.ProcessGroup):
    """Nothing here waits but the constructor."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"there is no rank {rank} among {size}")
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._name = self._desc = ""
        # Another place each time, should a group be made again on the same store.
        store = dist.PrefixStore(f"time {store.add(f'made/{rank}', 1)}", store)
        self._round = 0
        self._lines: dict[int, Line] = {}
        with socket.create_server(("127.0.0.1", 0), backlog=size) as server:
            server.settimeout(timeout.total_seconds())
            store.set(f"line{rank}", f"{server.getsockname()[1]}")
            for peer in range(rank + 1, size):
                store.wait([f"line{peer}"], timeout)
                link = socket.create_connection(("127.0.0.1", int(store.get(f"line{peer}"))))
                link.sendall(rank.to_bytes(4, "big"))
                self._lines[peer] = Line(link, peer)
            for _ in range(rank):
                link, _ = server.accept()
                link.settimeout(None)
                peer = int.from_bytes(_exactly(link, 4), "big")
                self._lines[peer] = Line(link, peer)
        for line in self._lines.values():
            weakref.finalize(self, line.outbox.put, None)

    def getBackendName(self) -> str:
        return "zoo_futures"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    def _post(self, peer: int, tag: int, tensor: torch.Tensor) -> Future[Any]:
        sent: Future[Any] = Future()
        self._line(peer).outbox.put((tag, _content(tensor), sent, [tensor]))
        return sent

    def _line(self, peer: int) -> Line:
        if peer not in self._lines:
            raise ValueError(f"rank {self.rank()} has no line to rank {peer}")
        return self._lines[peer]

    def _expect(self, peer: int, tag: int, place: torch.Tensor) -> Future[Any]:
        written: Future[Any] = Future()
        self._line(peer).mailbox.expect(tag, Promise(place, written))
        return written

    def _all_to_everyone(
        self, tensor: torch.Tensor, places: list[torch.Tensor] | None = None
    ) -> Future[list[torch.Tensor]]:
        """Of copies of all ranks' tensors, in the order of ranks; they are shaped like `places`."""
        self._round += 1
        tag = COLLECTIVE + self._round
        shapes = [place.shape for place in places or [tensor] * self.size()]
        copies = [torch.empty(shape, dtype=tensor.dtype, device="cpu") for shape in shapes]
        with torch.no_grad():
            copies[self.rank()].copy_(tensor)
        parts = [self._post(peer, tag, tensor) for peer in self._lines]
        parts += [self._expect(peer, tag, copies[peer]) for peer in self._lines]
        return torch.futures.collect_all(parts).then(lambda done: _after(done, copies))

    # The operations of torch.distributed.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        self._check(tensor)
        if opts.reduceOp.op.name not in FOLDS:
            raise ValueError(f"zoo_futures cannot reduce by {opts.reduceOp.op.name}")
        op = FOLDS[opts.reduceOp.op.name]

        def write(copies: Future[list[torch.Tensor]]) -> list[torch.Tensor]:
            _fill(tensor, functools.reduce(op, copies.value()))
            return tensors

        return self._handle(self._all_to_everyone(tensor), write)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        self._check(inputs[0])
        if len(outputs[0]) != self.size() or outputs[0][self.rank()].shape != inputs[0].shape:
            raise ValueError("all_gather needs a tensor for each rank, this rank's as its input")

        def write(copies: Future[list[torch.Tensor]]) -> list[torch.Tensor]:
            for place, copy in zip(outputs[0], copies.value(), strict=True):
                _fill(place, copy)
            return outputs[0]

        return self._handle(self._all_to_everyone(inputs[0], outputs[0]), write)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        self._check(tensor)
        if not 0 <= opts.rootRank < self.size():
            raise ValueError(f"rank {opts.rootRank} is none of the group's {self.size()}")
        self._round += 1
        tag = COLLECTIVE + self._round
        if self.rank() == opts.rootRank:
            parts = [self._post(peer, tag, tensor) for peer in self._lines]
        else:
            parts = [self._expect(opts.rootRank, tag, tensor)]
        return _work_of(torch.futures.collect_all(parts).then(lambda done: _after(done, tensors)))

    def barrier(self, opts: Any) -> dist.Work:
        token = torch.zeros(1, dtype=torch.int32, device="cpu")
        return self._handle(self._all_to_everyone(token), lambda copies: copies.value()[:0])

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        self._check(tensors[0], tag)
        return _work_of(self._post(peer, tag, tensors[0]))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        self._check(tensors[0], tag)
        return _work_of(self._expect(peer, tag, tensors[0]))

    def _check(self, tensor: torch.Tensor, tag: Any = 0) -> None:
        if not isinstance(tag, int) or tag >= 1 << 31:
            raise TypeError(f"a tag is an int of 32 bits, and not {tag!r}")
        if tag < 0:
            raise RuntimeError(f"Tag must be nonnegative, and {tag} is not")
        if tensor.dtype not in DTYPES or tensor.is_sparse:
            raise TypeError(f"zoo_futures does not know {tensor.dtype} ({tensor.layout})")

    def _handle(self, copies: Future[Any], write: Any) -> dist.Work:
        return _work_of(copies.then(write))


def _after(done: Future[list[Future[Any]]], value: Any) -> Any:
    """The value, unless one of these futures holds an error, which is raised."""
    for one in done.value():
        one.wait()
    return value


class LosesTags(FuturesGroup):
    """The bug: messages are matched by their order alone, so those of two tags may be swapped."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        self._check(tensors[0], tag)
        return super().send(tensors, peer, 0)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        self._check(tensors[0], tag)
        return super().recv(tensors, peer, 0)


dist.Backend.register_backend("zoo_futures", FuturesGroup, devices=["cpu"])
dist.Backend.register_backend("zoo_futures_buggy", LosesTags, devices=["cpu"])

CLAIMS = Capabilities(
    ops=frozenset({"all_reduce", "all_gather", "broadcast", "barrier", "send"}),
    dtypes=frozenset({"float32", "float64", "int32", "int64"}),
    reduce_ops=frozenset({"sum", "product", "min", "max"}),
    features=frozenset({"nonblocking", "gather_v", "work_result"}),
)
TARGET = Target(
    name="zoo-futures",
    backend="zoo_futures",
    imports=(__name__,),
    capabilities=CLAIMS,
    deviations=(
        Deviation(("arguments/torch-words",), "its errors are its own"),
        Deviation(("p2p/source-rank",), "torch's handle of a future knows no source"),
        Deviation(("p2p/to-oneself",), "there is no line from a rank to itself"),
        Deviation(("all_gather/aliased-outputs",), "outputs are not compared with each other"),
    ),
)
BUGGY = replace(TARGET, name="zoo-futures-buggy", backend="zoo_futures_buggy")
