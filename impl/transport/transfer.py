"""Base class of point-to-point transfers: completion, waiting, callbacks, errors."""

from __future__ import annotations

import threading
from collections.abc import Callable


class PostedTransfer:
    """The part of `Transfer` that does not depend on how bytes travel.

    An engine calls `finish` once, from any thread. A transport whose callers can push the bytes
    along themselves overrides `wait`.
    """

    __slots__ = ("_callbacks", "_done", "_error", "_lock", "_source")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: threading.Event | None = None  # made by the first thread that has to wait
        self._callbacks: list[Callable[[], None]] | None = []  # None once done
        self._error: BaseException | None = None
        self._source = -1

    @property
    def error(self) -> BaseException | None:
        return self._error

    @property
    def source(self) -> int:
        return self._source

    def is_done(self) -> bool:
        return self._callbacks is None

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """Complete the transfer; a second call changes nothing."""
        with self._lock:
            callbacks = self._callbacks
            if callbacks is None:
                return
            self._error, self._source = error, source
            self._callbacks = None
            event = self._done
        if event is not None:
            event.set()
        for callback in callbacks:
            callback()

    def on_done(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout_s: float | None) -> bool:
        with self._lock:
            if self._callbacks is None:
                return True
            if self._done is None:
                self._done = threading.Event()
            event = self._done
        return event.wait(timeout_s)
