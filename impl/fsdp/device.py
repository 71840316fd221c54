"""How the runtime touches the device: streams, events, deferred work, pinning, storage.

Everything that is stream-ordered goes through a `DeviceHandle`; no other file of this package calls
`torch.cuda`, resizes a storage or starts a collective. So there is one place to read for the
ordering rules, and one thing to replace in order to check them (a handle that records every read
and write and runs the queued work in another legal order).

[Note: Streams on a device]
`AcceleratorHandle` hands out torch's own streams and events. A kernel that is put on a stream is
asynchronous anyway, so `enqueue` simply calls the function, and a collective runs on the current
stream.

[Note: Streams on the host]
On CPU torch has no streams, and a plain port runs every collective to its end before computation
goes on. `HostHandle` gives a stream a meaning: it is a place where *one* collective may be under
way. The work enqueued behind that collective is held back until somebody waits for the stream.
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
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

Work = dist.Work
StartCollective = Callable[[bool], "Work | None"]


class Event(Protocol):
    def synchronize(self) -> None: ...


class Stream(Protocol):
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self) -> Any: ...
    def synchronize(self) -> None: ...


class DeviceHandle(Protocol):
    """What the runtime may ask of a device; `reads` and `writes` name the tensors of an operation.

    A handle that executes eagerly may ignore `reads` and `writes`. They are there for handles that
    defer (to keep storages alive) and for handles that check the order of accesses.
    """

    type: str

    def is_available(self) -> bool: ...
    def current_device(self) -> torch.device: ...
    def ranks_per_node(self) -> int: ...
    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in this kind of memory, and not on the host of a device."""
        ...

    def new_stream(self, priority: int = 0) -> Stream: ...
    def current_stream(self) -> Stream: ...
    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[None]: ...
    def record_event(self) -> Event: ...

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

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell the allocator that `stream` uses `tensor`, which another stream allocated."""
        ...

    def alloc_storage(self, tensor: torch.Tensor, numel: int) -> None: ...
    def free_storage(self, tensor: torch.Tensor) -> None: ...
    def pin(self, tensor: torch.Tensor) -> torch.Tensor: ...


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
    """CUDA and devices with CUDA-like streams, reached as `torch.<type>`."""

    def __init__(self, device: torch.device) -> None:
        self.type = device.type
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
        stream: Stream = self._module.Stream(priority=priority)
        return stream

    def current_stream(self) -> Stream:
        stream: Stream = self._module.current_stream()
        return stream

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        context: contextlib.AbstractContextManager[None] = self._module.stream(stream)
        return context

    def record_event(self) -> Event:
        event: Event = self.current_stream().record_event()
        return event

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
        if self.holds(tensor):
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


_handles: dict[str, DeviceHandle] = {}


def handle_for(device: torch.device) -> DeviceHandle:
    """The process's handle for the type of `device`; FSDP instances of one type share it.

    Raises:
        AttributeError: if torch has no module for that device type.
    """
    if device.type not in _handles:
        _handles[device.type] = HostHandle() if device.type == "cpu" else AcceleratorHandle(device)
    return _handles[device.type]


@contextlib.contextmanager
def substituted_handle(handle: DeviceHandle) -> Iterator[None]:
    """Let `handle_for` answer `handle` for its device type, for checking the order of accesses.

    Instances built inside keep it afterwards.
    """
    previous = _handles.get(handle.type)
    _handles[handle.type] = handle
    try:
        yield
    finally:
        if previous is None:
            del _handles[handle.type]
        else:
            _handles[handle.type] = previous
