"""A backend with one daemon thread for all groups; its buggy twin misorders all_gather.

python -m conformance certify --target tests.zoo.progress_engine:TARGET
"""

from __future__ import annotations

import collections
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.capabilities import Capabilities
from conformance.target import Deviation, Target

HEADER = 8
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)
OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
}


class Engine:
    """Moves bytes between sockets and channels. It is started with its first channel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._todo: collections.deque[Callable[[], None]] = collections.deque()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="progress-engine", daemon=True).start()

    def call(self, action: Callable[[], None]) -> None:
        """Have the thread do this soon."""
        self._todo.append(action)
        os.write(self._wake_w, b"!")

    def watch(self, channel: Channel) -> None:
        self._selector.register(channel.socket, selectors.EVENT_READ, channel)

    def watch_for(self, channel: Channel, *, writing: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        self._selector.modify(channel.socket, events, channel)

    def drop(self, channel: Channel) -> None:
        self._selector.unregister(channel.socket)
        channel.socket.close()

    def _run(self) -> None:
        while True:
            for key, events in self._selector.select():
                channel = key.data
                if channel is None:
                    os.read(self._wake_r, 4096)
                    continue
                if events & selectors.EVENT_READ:
                    channel.read()
                if events & selectors.EVENT_WRITE and not channel.is_closed:
                    channel.write()
                del channel
            while self._todo:
                self._todo.popleft()()


_engine: Engine | None = None
_engine_lock = threading.Lock()


def engine() -> Engine:
    """The one of this process."""
    global _engine
    with _engine_lock:
        if _engine is None:
            _engine = Engine()
        return _engine


@dataclass
class Channel:
    """A connection to a rank. Only the engine's thread reads and writes.

    Messages come in the order in which they are sent, so receives take them one by one.
    """

    socket: socket.socket
    peer: int
    is_closed: bool = False
    is_ending: bool = False
    reason: Exception | None = None
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: collections.deque[memoryview] = field(default_factory=collections.deque)
    messages: collections.deque[bytes] = field(default_factory=collections.deque)
    receives: collections.deque[Operation] = field(default_factory=collections.deque)

    def read(self) -> None:
        try:
            content = self.socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(error)
            return
        if not content:
            self.close(ConnectionError(f"rank {self.peer} is gone"))
            return
        self.incoming += content
        while len(self.incoming) >= HEADER:
            end = HEADER + int.from_bytes(self.incoming[:HEADER], "little")
            if len(self.incoming) < end:
                return
            self.messages.append(bytes(self.incoming[HEADER:end]))
            del self.incoming[:end]
            self.match()

    def write(self) -> None:
        while self.outgoing:
            try:
                count = self.socket.send(self.outgoing[0])
            except BlockingIOError:
                break
            except OSError as error:
                self.close(error)
                return
            self.outgoing[0] = self.outgoing[0][count:]
            if not self.outgoing[0]:
                self.outgoing.popleft()
        if self.is_ending and not self.outgoing:
            self.close(ConnectionError("the group was destroyed"))
        else:
            engine().watch_for(self, writing=bool(self.outgoing))

    def send(self, content: bytes) -> None:
        if not self.is_closed:
            message = len(content).to_bytes(HEADER, "little") + content
            self.outgoing.append(memoryview(message))
            self.write()

    def receive(self, operation: Operation) -> None:
        self.receives.append(operation)
        self.match()

    def match(self) -> None:
        while self.receives and self.messages:
            self.receives.popleft().take(self.peer, self.messages.popleft())
        while self.is_closed and self.receives:
            self.receives.popleft().fail(self.reason)

    def end(self) -> None:
        self.is_ending = True
        if not self.is_closed:
            self.write()

    def close(self, reason: Exception) -> None:
        self.is_closed, self.reason = True, reason
        engine().drop(self)
        self.match()


class Operation(dist.Work):
    """Waits for one message from each of some ranks, and then does something with all of them."""

    def __init__(
        self,
        expected: list[int],
        finish: Callable[[dict[int, bytes]], None],
        outputs: list[torch.Tensor],
    ) -> None:
        super().__init__()
        self._missing = set(expected)
        self._came: dict[int, bytes] = {}
        self._finish: Callable[[dict[int, bytes]], None] | None = finish
        self._outputs = outputs
        self._ended = threading.Event()
        self._error = ""
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def take(self, peer: int, content: bytes) -> None:
        self._came[peer] = content
        self._missing.discard(peer)
        self.check()

    def check(self) -> None:
        if self._missing or self._ended.is_set():
            return
        assert self._finish is not None
        try:
            with torch.inference_mode():
                self._finish(self._came)
        except Exception as error:
            self.fail(error)
            return
        self._finish = None
        self._came.clear()
        self._ended.set()
        self._future.set_result(self._outputs)

    def fail(self, error: Exception | None) -> None:
        if not self._ended.is_set():
            self._error = f"the operation failed: {error}"
            self._finish = None
            self._ended.set()
            self._future.set_exception(RuntimeError(self._error))

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._ended.wait(timeout.total_seconds() if timeout else None)
        if not self._ended.is_set():
            raise RuntimeError("timed out")
        if self._error:
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and not self._error

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def result(self) -> list[torch.Tensor]:
        return self._outputs


class EngineGroup(dist.ProcessGroup):
    """Every rank sends what it has to the ranks that need it; the engine does the rest."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._names = ["", ""]
        # Another place each time, should a group be made again on the same store.
        store = dist.PrefixStore(f"time {store.add(f'made/{rank}', 1)}", store)
        self._channels = _connect(store, rank, size, timeout)
        channels = list(self._channels.values())
        for channel in channels:
            channel.socket.setblocking(False)
            engine().call(lambda channel=channel: engine().watch(channel))  # type: ignore[misc]
        weakref.finalize(self, _end, channels)

    def getBackendName(self) -> str:
        return "zoo_engine"

    def setGroupName(self, name: str) -> None:
        self._names[0] = name

    def getGroupName(self) -> str:
        return self._names[0]

    def setGroupDesc(self, desc: str) -> None:
        self._names[1] = desc

    def getGroupDesc(self) -> str:
        return self._names[1]

    def _begin(
        self,
        sent: dict[int, torch.Tensor],
        sources: list[int],
        finish: Callable[[dict[int, bytes]], None],
        outputs: list[torch.Tensor],
    ) -> dist.Work:
        me = self.rank()
        operation = Operation([r for r in sources if r != me], finish, outputs)
        channels = self._channels
        contents = {peer: _pack(tensor) for peer, tensor in sent.items() if peer != me}

        def begin() -> None:
            for peer, content in contents.items():
                channels[peer].send(content)
            for source in sources:
                if source != me:
                    channels[source].receive(operation)
            operation.check()

        engine().call(begin)
        return operation

    def _everyone(self, value: torch.Tensor) -> dict[int, torch.Tensor]:
        return dict.fromkeys(range(self.size()), value)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        [tensor], me, size = tensors, self.rank(), self.size()
        name = opts.reduceOp.op.name
        if name not in OPS:
            raise NotImplementedError(f"reductions are {', '.join(OPS)}; {name} is none of them")
        _known(tensor)
        mine = tensor.detach().clone()

        def finish(came: dict[int, bytes]) -> None:
            parts = [mine if r == me else _unpack(came[r], tensor) for r in range(size)]
            total = parts[0]
            for part in parts[1:]:
                total = OPS[name](total, part)
            tensor.copy_(total)

        return self._begin(self._everyone(tensor), list(range(size)), finish, tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        [tensor], me, root = tensors, self.rank(), opts.rootRank
        if not 0 <= root < self.size():
            raise ValueError(f"rank {root} is not one of {self.size()}")
        _known(tensor)

        def finish(came: dict[int, bytes]) -> None:
            if me != root:
                tensor.copy_(_unpack(came[root], tensor))

        sent = self._everyone(tensor) if me == root else {}
        return self._begin(sent, [root], finish, tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        [mine], [places], me = inputs, outputs, self.rank()
        _known(mine)
        copy = mine.detach().clone()
        order = self.order()

        def finish(came: dict[int, bytes]) -> None:
            for rank, place in zip(order, places, strict=True):
                place.copy_(copy if rank == me else _unpack(came[rank], place))

        return self._begin(self._everyone(mine), order, finish, places)

    def order(self) -> list[int]:
        """Of the ranks in what all_gather gives."""
        return list(range(self.size()))

    def barrier(self, opts: Any) -> dist.Work:
        token = torch.zeros(1, dtype=torch.bool, device="cpu")
        return self._begin(self._everyone(token), list(range(self.size())), lambda came: None, [])


def _connect(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dict[int, Channel]:
    found = {}
    with socket.create_server(("127.0.0.1", 0), backlog=size) as server:
        server.settimeout(timeout.total_seconds())
        store.set(f"port of {rank}", str(server.getsockname()[1]))
        for peer in range(rank):
            store.wait([f"port of {peer}"], timeout)
            port = int(store.get(f"port of {peer}"))
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(bytes([rank]))
            found[peer] = Channel(connection, peer)
        for _ in range(rank + 1, size):
            connection, _ = server.accept()
            connection.settimeout(timeout.total_seconds())
            peer = connection.recv(1)[0]
            found[peer] = Channel(connection, peer)
    return found


def _end(channels: list[Channel]) -> None:
    for channel in channels:
        engine().call(channel.end)


def _known(tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES or tensor.is_sparse:
        raise NotImplementedError(f"{tensor.dtype} tensors ({tensor.layout}) are not supported")


def _pack(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
    flat.copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def _unpack(content: bytes, like: torch.Tensor) -> torch.Tensor:
    if len(content) != like.numel() * like.element_size():
        raise ValueError(f"{len(content)} bytes came for a tensor of shape {tuple(like.shape)}")
    if not content:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=like.dtype).reshape(like.shape)


class CountsDownwards(EngineGroup):
    """The bug: with an odd number of ranks, all_gather gives their tensors in the other order."""

    def order(self) -> list[int]:
        return super().order()[:: -1 if self.size() % 2 else 1]


dist.Backend.register_backend("zoo_engine", EngineGroup, devices=["cpu"])
dist.Backend.register_backend("zoo_engine_buggy", CountsDownwards, devices=["cpu"])

TARGET = Target(
    name="zoo-engine",
    backend="zoo_engine",
    imports=(__name__,),
    capabilities=Capabilities(
        ops=frozenset({"all_reduce", "broadcast", "all_gather", "barrier"}),
        dtypes=frozenset({"float32", "float64", "bfloat16", "int64", "bool"}),
        reduce_ops=frozenset({"sum", "min", "max"}),
        features=frozenset({"nonblocking", "gather_v", "work_result"}),
    ),
    deviations=(
        Deviation(("arguments/torch-words",), "its errors are worded otherwise"),
        Deviation(("all_gather/aliased-outputs",), "outputs are not compared with each other"),
    ),
)
BUGGY = replace(TARGET, name="zoo-engine-buggy", backend="zoo_engine_buggy")
