"""Streams and events of the device "queued": what is put on a stream runs later, on its own thread.

Nothing runs before it is waited for, or before `PATIENCE_S` have passed without a wait. Then
only what was waited for runs, with all that it has to follow: the work before it on its stream, and
the events that this stream was told to wait for. So a wait that is missing shows every time, and
not only when the device happens to be slow.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import torch

NAME = "queued"
PATIENCE_S = 1.0

Kernel = Callable[[], object]

_PRIVATE_USE: Any = torch._C._autograd.DeviceType.PrivateUse1
_TYPE = int(_PRIVATE_USE)


class Stream(torch.Stream):
    """A queue of kernels and of events to wait for, in the order in which they run."""

    _ids = itertools.count(1)

    def __new__(cls, device: Any = None, priority: int = 0, *, id: int | None = None) -> Stream:
        number = next(cls._ids) if id is None else id
        made = super().__new__(cls, stream_id=number, device_index=0, device_type=_TYPE)
        made.put, made.done = 0, 0
        made.waiting = deque()
        return made

    put: int  # how many kernels and waits were put on it so far
    done: int  # how many of them are done
    waiting: deque[Kernel | Event]  # the others

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """`__new__` did it all."""

    def enqueue(self, item: Kernel | Event) -> None:
        with _lock:
            self.put += 1
            self.waiting.append(item)
            _busy.add(self)

    def run_to(self, count: int) -> None:
        """On the device's thread: run all that is needed for `done` to be `count`."""
        while self.done < count:
            item = self.waiting.popleft()
            if isinstance(item, Event):
                item.run()
            else:
                _run(item)
            self.done += 1
        with _lock:
            if not self.waiting:
                _busy.discard(self)

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        self.enqueue(event.snapshot())

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other.record_event())

    def query(self) -> bool:
        return self.done == self.put

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    """A point in a stream: it is reached when the first `_count` items of the stream are done."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._stream: Stream | None = None
        self._count = 0
        self._timing = enable_timing
        self._reached_s = [0.0]

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current_stream()
        if self._timing:
            self._reached_s = reached_s = [0.0]
            self._stream.enqueue(lambda: reached_s.__setitem__(0, time.perf_counter()))
        self._count = self._stream.put

    def snapshot(self) -> Event:
        """The same point, whatever is recorded in this event later."""
        same = Event()
        same._stream, same._count = self._stream, self._count
        return same

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return self._stream is None or self._stream.done >= self._count

    def run(self) -> None:
        """On the device's thread: run all that is before this point."""
        if self._stream is not None:
            self._stream.run_to(self._count)

    def synchronize(self) -> None:
        """Block the host until the point is reached; raise what a kernel has raised."""
        if not self.query():
            reached = threading.Event()
            _demand(self.snapshot(), reached)
            reached.wait()
        if _errors:
            raise _errors.pop(0)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        return (end._reached_s[0] - self._reached_s[0]) * 1000


# ---- The current stream

_local = threading.local()


def current_stream(device: Any = None) -> Stream:
    found: Stream = getattr(_local, "stream", default)
    return found


def default_stream(device: Any = None) -> Stream:
    return default


def set_stream(stream: Stream) -> None:
    _local.stream = stream


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Inside, this thread puts its work on `stream`."""
    before = current_stream()
    set_stream(stream or before)
    try:
        yield
    finally:
        set_stream(before)


def synchronize(device: Any = None) -> None:
    """Block the host until all streams are done."""
    for stream in _busy_streams():
        stream.synchronize()


# ---- The device's thread

_lock = threading.Lock()
_busy: set[Stream] = set()  # those with work that waits; so it runs also if they are dropped
_errors: list[BaseException] = []
_demands: SimpleQueue[tuple[Event, threading.Event]] = SimpleQueue()
_thread: threading.Thread | None = None


def _busy_streams() -> list[Stream]:
    with _lock:
        return list(_busy)


def _demand(event: Event, reached: threading.Event) -> None:
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_serve, name=NAME, daemon=True)
            _thread.start()
    _demands.put((event, reached))


def _serve() -> None:
    torch.set_num_threads(1)
    with torch.inference_mode():  # or it could not write to tensors made in that mode
        while True:
            try:
                event, reached = _demands.get(timeout=PATIENCE_S)
            except Empty:
                for stream in _busy_streams():
                    stream.run_to(stream.put)
            else:
                event.run()
                reached.set()


def _run(kernel: Kernel) -> None:
    try:
        kernel()
    except Exception as error:
        _errors.append(error)


def _forget() -> None:
    """In a child that was forked there is no thread, and what was queued is the parent's."""
    global _thread, _demands, _lock
    _thread, _demands, _lock = None, SimpleQueue(), threading.Lock()


os.register_at_fork(after_in_child=_forget)

default = Stream(id=0)
