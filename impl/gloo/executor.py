"""In which order do a group's collectives run, and on which thread?

In the order in which they were issued, one at a time. A synchronous collective runs on its caller's
thread when nothing is queued or running, which saves two thread switches; everything else runs on a
worker thread of the group.

[Note: callbacks that wait] A future's callbacks may issue a collective and wait for it (torch's
PowerSGD hook does). A worker that resolves a future therefore gives up its turn first, and if no
other worker is idle while something could run, one is started. Usually there is one worker, or two
with callbacks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from impl import errors
from impl.gloo.work import CollectiveWork
from impl.transport.background import work_in_background

Job = Callable[[], object]

_IDLE_WORKERS_MAX = 2


class Executor:
    """The queue of one group. Any thread may call it."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._lock = threading.RLock()  # a signal's handler may end the group at any moment
        self._changed = threading.Condition(self._lock)
        self._queue: deque[tuple[CollectiveWork, Job]] = deque()
        self._callbacks: deque[Job] = deque()
        self._busy = False  # a collective runs
        self._busy_thread = 0  # the thread that it runs on, or the last one ran on
        self._closed = False
        self._at_end: Job | None = None
        self._workers: set[threading.Thread] = set()
        self._idle_count = 0

    def enter(self) -> bool:
        """Whether the caller may run a collective itself, now; if so it must call `leave`."""
        with self._lock:
            if self._busy or self._queue or self._closed:
                return False
            self._take_turn()
            return True

    def leave(self) -> None:
        """The collective that ran has ended."""
        with self._lock:
            self._busy = False
            if self._queue or self._closed:
                self._see_to_it()
            at_end, self._at_end = self._at_end, None
        if at_end is not None:
            at_end()

    def _take_turn(self) -> None:
        """Under the lock: the collective that comes next runs on this thread."""
        self._busy = True
        self._busy_thread = threading.get_ident()

    def is_running(self) -> bool:
        """Whether a collective runs or waits for its turn."""
        with self._lock:
            return self._busy or bool(self._queue)

    def submit(self, work: CollectiveWork, job: Job) -> None:
        """Queue a collective. Raises Aborted once the group is closed."""
        with self._lock:
            if self._closed:
                raise errors.Aborted(f"group {self._group!r} was destroyed.")
            self._queue.append((work, job))
            self._see_to_it()

    def help_with(self, work: CollectiveWork) -> None:
        """For a thread that waits for `work` anyway: run what is queued up to it, if it is queued.

        Saves two thread switches if no worker has got to it yet.
        """
        while not work.is_completed():
            with self._lock:
                if self._busy or all(queued is not work for queued, _ in self._queue):
                    return
                taken, job = self._queue.popleft()
                self._take_turn()
            interruption = None
            try:
                job()
                error = None
            except Exception as raised:
                error = raised
            except BaseException as raised:  # such as Ctrl-C: this thread's, whosever the job is
                interruption = raised
                error = errors.Aborted(f"{taken!r} was interrupted: {raised!r}")
            resolve_future = taken.complete(error)
            self.leave()
            if resolve_future is not None:
                self.call_soon(resolve_future)
            if interruption is not None:
                raise interruption

    def call_soon(self, callback: Job) -> None:
        """Run something that may block on the group's operations, such as a future's callbacks."""
        with self._lock:
            self._callbacks.append(callback)
            self._see_to_it()

    def runs_here(self) -> bool:
        """Whether the caller was interrupted (by a signal) in a collective that it runs itself."""
        with self._lock:
            return self._busy and self._busy_thread == threading.get_ident()

    def finish_later(self, and_then: Job) -> None:
        """Take nothing more; call `and_then` when the collective that runs now has ended."""
        with self._lock:
            self._closed = True
            self._at_end = and_then

    def finish(self) -> None:
        """Take nothing more, finish what is queued, stop the workers. Safe to call twice.

        Not while the caller runs a collective: see `runs_here`.
        """
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        while True:
            with self._lock:
                others = self._workers - {threading.current_thread()}
            if not others:
                break
            for worker in others:
                worker.join()
        with self._lock:
            # a synchronous collective of another thread; never this one's own
            while self._busy and threading.current_thread() not in self._workers:
                self._changed.wait()

    def _see_to_it(self) -> None:
        """Under the lock: somebody takes what can run now."""
        if self._idle_count:
            self._changed.notify_all()
        elif self._callbacks or (self._queue and not self._busy):
            worker = threading.Thread(target=self._run, name=f"pygloo-{self._group}", daemon=True)
            self._workers.add(worker)
            worker.start()
        elif self._closed:
            self._changed.notify_all()

    def _run(self) -> None:
        # grad mode belongs to a thread, and nothing that runs here is to be recorded
        torch.set_grad_enabled(False)
        work_in_background()
        while True:
            with self._lock:
                if not self._wait_for_something():
                    self._workers.discard(threading.current_thread())
                    self._changed.notify_all()
                    return
                if self._callbacks:
                    callback, taken = self._callbacks.popleft(), None
                else:
                    taken = self._queue.popleft()
                    self._take_turn()
                self._see_to_it()
            if taken is not None:
                self._run_collective(*taken)
                del taken
            else:
                callback()
                del callback

    def _wait_for_something(self) -> bool:
        """Under the lock: whether there is something to take; False ends the worker."""
        while not self._callbacks and (self._busy or not self._queue):
            if self._closed and not self._queue:
                return False
            if self._idle_count >= _IDLE_WORKERS_MAX:
                return False
            self._idle_count += 1
            self._changed.wait()
            self._idle_count -= 1
        return True

    def _run_collective(self, work: CollectiveWork, job: Job) -> None:
        resolve_future = self._run_job(work, job)
        if resolve_future is None:
            with self._lock:
                self._busy = False  # this worker itself takes what comes next
        else:
            self.leave()
            resolve_future()

    def _run_job(self, work: CollectiveWork, job: Job) -> Job | None:
        error: BaseException | None = None
        try:
            job()
        except BaseException as raised:
            error = raised
        return work.complete(error)
