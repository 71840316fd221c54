"""`DeviceHandle` of the CPU: emulated streams and events, so that collectives run asynchronously.

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
from typing import Any

import torch
import torch.distributed as dist

from impl.device.handle import Event, StartCollective, Stream, TimeMark, Work
from impl.device.storage import check_freed, check_sole_occupant, resize_storage, storage_numel


class HostMark:
    """A point in time of work that is done when the call returns."""

    def __init__(self) -> None:
        self._wall_ns = time.time_ns()

    def wall_ns(self) -> int:
        return self._wall_ns

    def ns_since(self, earlier: HostMark) -> int | None:
        elapsed = self._wall_ns - earlier._wall_ns
        return elapsed if elapsed >= 0 else None


def _ranks_per_node_from_environment() -> int | None:
    """`LOCAL_WORLD_SIZE`, which torchrun sets."""
    value = os.environ.get("LOCAL_WORLD_SIZE")
    return int(value) if value else None


class HostStream:
    """A place for one unfinished collective and the work behind it ([Note: Streams on the host]).

    The default stream of the host is a `HostStream` too; nothing is ever unfinished on it, because
    computation on the host is done when the call returns.
    """

    def __init__(self, busy: BusyStreams | None = None) -> None:
        """busy: where it is as long as something is unfinished on it."""
        self._busy: BusyStreams = {} if busy is None else busy
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
        key, busy = id(self), self._busy
        busy[key] = weakref.ref(self, lambda _: busy.pop(key, None))

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
        self._busy.pop(id(self), None)
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


# By the stream's id. Threads share it, and no other one runs while the values of a dict are copied.
BusyStreams = dict[int, weakref.ref[HostStream]]


class HostEvent:
    """The moment when the first `ordinal` collectives of a stream are done."""

    def __init__(self, stream: HostStream, ordinal: int) -> None:
        self._stream = stream
        self._ordinal = ordinal

    def synchronize(self) -> None:
        if not self.query():
            self._stream.complete()

    def query(self) -> bool:
        return self._stream._completed >= self._ordinal


class HostHandle:
    """CPU: collectives of side streams run in the background, everything else at once."""

    type = "cpu"
    has_streams = False

    def __init__(self) -> None:
        self._default = HostStream()
        self._local = threading.local()
        self._busy: BusyStreams = {}

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
        return HostStream(self._busy)

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
            check_freed(tensor)
            resize_storage(tensor, numel)

    def free_storage(self, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().size() == 0:
            return
        check_sole_occupant(tensor)
        for reference in list(self._busy.values()):
            stream = reference()
            if stream is not None and stream.uses(tensor):
                stream.complete()
        resize_storage(tensor, 0)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pageable memory is as good: there is no device to copy to."""
        return tensor

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")

    def copy_from_host(self, host: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(host)
