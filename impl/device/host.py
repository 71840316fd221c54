"""All uses of devices in impl: streams, events, futures, deferred work, pinning, storage, time.

Everything that is stream-ordered goes through a `DeviceHandle`; no other file calls `torch.cuda`,
resizes a storage or starts a collective of FSDP. So there is one place to read for the ordering
rules, and one thing to replace in order to check them (a handle that records every read and write
and runs the queued work in another legal order, `impl.testing.device`).

[Note: Streams on a device]
`AcceleratorHandle` hands out torch's own streams and events. A kernel that is put on a stream is
asynchronous anyway, so `enqueue` simply calls the function, and a collective runs on the current
stream.

[Note: Streams on the host]
On CPU torch has no streams, and a plain port runs every collective to its end before computation
goes on. `HostHandle` gives a stream a meaning: it is a place where *one* collective may be under
way. The work enqueued behind that collective is held back until the stream is waited for.
Hence the all-gather of the next unit overlaps with the gradient computation of the current one, and
a reduce-scatter with the backward pass that follows it, as they do on an accelerator.

Three rules keep this equal to a stream:
- Collectives *start* in program order, on whatever stream: starting one first completes the stream
  that it starts on. Ranks therefore issue the same sequence, whether or not they overlap.
- Work on one stream runs in order: what is enqueued behind an unfinished collective waits for it.
- A storage is not freed while unfinished work of any stream uses it.
At most one collective per stream also bounds memory: at most one gradient and one parameter are
in transit.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

Work = dist.Work
StartCollective = Callable[[bool], "Work | None"]


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """The host waits for it."""
        ...


class Stream(Protocol):
    """A queue of kernels and copies."""

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self) -> Any: ...
    def synchronize(self) -> None: ...


class TimeMark(Protocol):
    """A point in time of the device's work."""

    def wall_ns(self) -> int:
        """When the host passed it, in nanoseconds since the epoch."""
        ...

    def ns_since(self, earlier: Any) -> int | None:
        """How long the device took from `earlier` to here; None if that is not known (yet)."""
        ...


class DeviceHandle(Protocol):
    """What impl may ask of a device; `reads` and `writes` name the tensors of an operation.

    A handle that executes eagerly may ignore `reads` and `writes`. They are there for handles that
    defer (to keep storages alive) and for handles that check the order of accesses.

    has_streams: whether what was put on the device may be still to come when the call returns.
    """

    type: str
    has_streams: bool

    def is_available(self) -> bool: ...
    def current_device(self) -> torch.device: ...
    def ranks_per_node(self) -> int: ...
    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in this kind of memory, and not on the host of a device."""
        ...

    # Streams

    def new_stream(self, priority: int = 0) -> Stream: ...
    def current_stream(self) -> Stream: ...
    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Inside, this thread puts its work on `stream`, and on the stream's device."""
        ...

    def record_event(self) -> Event:
        """A point in the current stream."""
        ...

    def new_future(self) -> torch.futures.Future[Any]:
        """One whose `wait` and callbacks are ordered after the stream that sets its result."""
        ...

    def mark(self) -> TimeMark:
        """Note this point in time."""
        ...

    # Work

    def enqueue(
        self,
        kernel: Callable[[], object],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """Run `kernel` on the current stream, behind what is there."""
        ...

    def start_collective(
        self,
        start: StartCollective,
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """Start a collective on the current stream. `start` receives `async_op`."""
        ...

    def flush(self) -> None:
        """Hand everything enqueued on the current stream to the device.

        Needed before foreign code (a communication hook, an optimizer) works with the results on
        the same stream.
        """
        ...

    # Memory

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell the allocator that `stream` uses `tensor`, which another stream allocated."""
        ...

    def alloc_storage(self, tensor: torch.Tensor, numel: int) -> None: ...
    def free_storage(self, tensor: torch.Tensor) -> None: ...
    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, or a copy of it in pinned memory of the host."""
        ...

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,): host memory that copies need not wait for. Kept and given out again."""
        ...

    def copy_from_host(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `host` to `target`; `host` may be overwritten as soon as this returns."""
        ...


class HostMark:
    """A point in time of work that is done when the call returns."""

    def __init__(self) -> None:
        self._wall_ns = time.time_ns()

    def wall_ns(self) -> int:
        return self._wall_ns

    def ns_since(self, earlier: HostMark) -> int | None:
        elapsed = self._wall_ns - earlier._wall_ns
        return elapsed if elapsed >= 0 else None


class StreamMark:
    """A point in a CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._wall_ns = time.time_ns()
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    def wall_ns(self) -> int:
        return self._wall_ns

    def ns_since(self, earlier: StreamMark) -> int | None:
        # Torch waits for the two events here as well; they belong to the previous iteration. They
        # may be on two streams, so the later one says nothing of the earlier one.
        earlier._event.synchronize()
        self._event.synchronize()
        elapsed_ms = earlier._event.elapsed_time(self._event)
        return int(elapsed_ms * 1e6) if elapsed_ms >= 0 else None


def _ranks_per_node_from_environment() -> int | None:
    """`LOCAL_WORLD_SIZE`, which torchrun sets."""
    value = os.environ.get("LOCAL_WORLD_SIZE")
    return int(value) if value else None


def resize_storage(tensor: torch.Tensor, numel: int) -> None:
    """Give the storage of `tensor` room for exactly `numel` elements (0 frees it)."""
    tensor.untyped_storage().resize_(numel * tensor.element_size())


def storage_numel(tensor: torch.Tensor) -> int:
    """Elements that the storage of `tensor` has room for at present."""
    return tensor.untyped_storage().size() // tensor.element_size()


def _check_freed(tensor: torch.Tensor) -> None:
    if tensor.untyped_storage().size() != 0:
        raise AssertionError(
            "Tensor storage should have been resized to be 0 but got "
            f"{storage_numel(tensor)} elements"
        )


def _check_sole_occupant(tensor: torch.Tensor) -> None:
    if tensor.storage_offset() != 0:
        raise AssertionError(
            "Freeing a tensor's storage is unsafe when it is not the sole occupant: "
            f"storage offset {tensor.storage_offset()}, storage size {storage_numel(tensor)}, "
            f"tensor shape {tuple(tensor.shape)}"
        )


class AcceleratorHandle:
    """CUDA and devices with CUDA-like streams, reached as `torch.<type>`.

    device: without an index, the handle is for whichever device is current.
    """

    has_streams = True

    def __init__(self, device: torch.device) -> None:
        self.type = device.type
        has_index = device != torch.device(device.type)
        self._where: tuple[torch.device, ...] = (device,) if has_index else ()
        self._module: Any = getattr(torch, device.type, None)
        if self._module is None:
            raise AttributeError(
                f"Device '{device}' does not have a corresponding backend registered as "
                f"'torch.{device.type}'."
            )

    def is_available(self) -> bool:
        return bool(self._module.is_available())

    def current_device(self) -> torch.device:
        current = self._module.current_device()
        return (
            torch.device(self.type, current) if isinstance(current, int) else torch.device(current)
        )

    def ranks_per_node(self) -> int:
        return int(self._module.device_count())

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.type

    def new_stream(self, priority: int = 0) -> Stream:
        stream: Stream = self._module.Stream(*self._where, priority=priority)
        return stream

    def current_stream(self) -> Stream:
        stream: Stream = self._module.current_stream(*self._where)
        return stream

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def record_event(self) -> Event:
        event: Event = self.current_stream().record_event()
        return event

    def new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=list(self._where or (self.current_device(),)))

    def mark(self) -> TimeMark:
        if self.type != "cuda":
            return HostMark()
        return StreamMark(*(self._where or (self.current_device(),)))

    def enqueue(
        self,
        kernel: Callable[[], object],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        kernel()

    def start_collective(
        self,
        start: StartCollective,
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        start(False)

    def flush(self) -> None:
        return None

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        if not self.holds(tensor):
            return
        if tensor.is_sparse:
            tensor._indices().record_stream(stream)
            tensor._values().record_stream(stream)
        else:
            tensor.record_stream(stream)

    def alloc_storage(self, tensor: torch.Tensor, numel: int) -> None:
        if storage_numel(tensor) != numel:
            _check_freed(tensor)
            resize_storage(tensor, numel)

    def free_storage(self, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().size() != 0:
            _check_sole_occupant(tensor)
            resize_storage(tensor, 0)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # From torch's caching host allocator: no system call once the sizes repeat, and a block is
        # given out again only after the copies that use it, which the allocator notes itself.
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)

    def copy_from_host(self, host: torch.Tensor, target: torch.Tensor) -> None:
        # The copy may run long after the host has gone on and cleared `host`. So it reads a pinned
        # copy, which the caching allocator keeps until it is done.
        pinned = self.pinned(host.numel(), host.dtype).view(host.shape)
        pinned.copy_(host)
        target.copy_(pinned, non_blocking=True)


class HostStream:
    """A place for one unfinished collective and the work behind it ([Note: Streams on the host]).

    The default stream of the host is a `HostStream` too; nothing is ever unfinished on it, because
    computation on the host is done when the call returns.
    """

    def __init__(self) -> None:
        self._work: Work | None = None
        self._behind: list[Callable[[], object]] = []
        self._in_use: list[torch.Tensor] = []
        self._started = 0
        self._completed = 0

    @property
    def is_busy(self) -> bool:
        return self._completed != self._started

    def __repr__(self) -> str:
        state = f"busy, {len(self._behind)} behind" if self.is_busy else "idle"
        return f"HostStream({state}, {self._completed} of {self._started} collectives done)"

    def begin(self, work: Work, in_use: Sequence[torch.Tensor]) -> None:
        self._work = work
        self._in_use.extend(in_use)
        self._started += 1

    def hold_back(self, kernel: Callable[[], object], in_use: Sequence[torch.Tensor]) -> None:
        self._behind.append(kernel)
        self._in_use.extend(in_use)

    def complete(self) -> None:
        """Wait for the collective, then run what was held back, in order."""
        if self._work is None:
            return
        work, behind, self._behind = self._work, self._behind, []
        # Marked done before the wait: after a failed collective the stream must not wait for it
        # again, and what was enqueued behind it must not run on wrong data.
        self._work, self._in_use, self._completed = None, [], self._started
        work.wait()
        with torch.no_grad():
            for kernel in behind:
                kernel()

    def uses(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()._cdata
        return any(t.untyped_storage()._cdata == storage for t in self._in_use)

    def wait_stream(self, other: HostStream) -> None:
        if other is not self:
            other.complete()

    def wait_event(self, event: HostEvent) -> None:
        event.synchronize()

    def record_event(self) -> HostEvent:
        return HostEvent(self, self._started)

    def synchronize(self) -> None:
        self.complete()


class HostEvent:
    """The moment when the first `ordinal` collectives of a stream are done."""

    def __init__(self, stream: HostStream, ordinal: int) -> None:
        self._stream = stream
        self._ordinal = ordinal

    def synchronize(self) -> None:
        if self._stream._completed < self._ordinal:
            self._stream.complete()


class HostHandle:
    """CPU: collectives of side streams run in the background, everything else at once."""

    type = "cpu"
    has_streams = False

    def __init__(self) -> None:
        self._default = HostStream()
        self._local = threading.local()
        self._side_streams: weakref.WeakSet[HostStream] = weakref.WeakSet()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def ranks_per_node(self) -> int:
        """`LOCAL_WORLD_SIZE` when a launcher set it, else all ranks: one host is assumed.

        torch answers 1 here (`torch.cpu.device_count()`), which would make every rank a node.
        """
        from_launcher = _ranks_per_node_from_environment()
        if from_launcher is not None:
            return from_launcher
        return dist.get_world_size() if dist.is_initialized() else 1

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def new_stream(self, priority: int = 0) -> Stream:
        stream = HostStream()
        self._side_streams.add(stream)
        return stream

    @property
    def _current(self) -> HostStream:
        stream: HostStream = getattr(self._local, "stream", self._default)
        return stream

    def current_stream(self) -> Stream:
        return self._current

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        previous, self._local.stream = self._current, stream
        try:
            yield
        finally:
            self._local.stream = previous

    def record_event(self) -> Event:
        return self._current.record_event()

    def new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def mark(self) -> TimeMark:
        return HostMark()

    def enqueue(
        self,
        kernel: Callable[[], object],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        stream = self._current
        if stream.is_busy:
            stream.hold_back(kernel, (*reads, *writes))
        else:
            kernel()

    def start_collective(
        self,
        start: StartCollective,
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        stream = self._current
        stream.complete()
        if stream is self._default:
            start(False)
            return
        work = start(True)
        if work is not None:
            stream.begin(work, (*reads, *writes))

    def flush(self) -> None:
        self._current.complete()

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Nothing to tell: `enqueue` and `start_collective` keep their tensors alive."""

    def alloc_storage(self, tensor: torch.Tensor, numel: int) -> None:
        if storage_numel(tensor) != numel:
            _check_freed(tensor)
            resize_storage(tensor, numel)

    def free_storage(self, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().size() == 0:
            return
        _check_sole_occupant(tensor)
        for stream in list(self._side_streams):
            if stream.is_busy and stream.uses(tensor):
                stream.complete()
        resize_storage(tensor, 0)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pageable memory is as good: there is no device to copy to."""
        return tensor

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")

    def copy_from_host(self, host: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(host)


_handles: dict[tuple[str, int | None], DeviceHandle] = {}
_substitute: DeviceHandle | None = None


def handle_for(device: torch.device) -> DeviceHandle:
    """The process's handle for `device`, or for the current device of its type without an index.

    Raises:
        AttributeError: if torch has no module for that device type.
    """
    if _substitute is not None:
        return _substitute
    key = device.type, device.index
    if key not in _handles:
        _handles[key] = HostHandle() if device.type == "cpu" else AcceleratorHandle(device)
    return _handles[key]


_HOST = torch.device("cpu")


def handle_of(tensor: torch.Tensor) -> DeviceHandle:
    """The handle of the device that a tensor is on; the host's for a device without streams."""
    if tensor.is_cpu:
        return handle_for(_HOST)
    module = getattr(torch, tensor.device.type, None)  # none for the meta device
    return handle_for(tensor.device if hasattr(module, "Stream") else _HOST)


@contextlib.contextmanager
def substituted_handle(handle: DeviceHandle) -> Iterator[None]:
    """Inside, every device's handle is `handle`: for checking the order of accesses.

    What was built inside keeps it afterwards.
    """
    global _substitute
    before, _substitute = _substitute, handle
    try:
        yield
    finally:
        _substitute = before
