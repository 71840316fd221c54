"""A group's queue: runs collectives on the caller's thread or on workers, and callbacks of futures.

Collectives run one at a time, in the order in which they were issued. A synchronous one runs on its
caller's thread when nothing is queued or running, which saves two thread switches; everything else
runs on a worker thread of the group.

[Note: callbacks that wait] A future's callbacks may issue a collective and wait for it (torch's
PowerSGD hook does). A worker that resolves a future therefore gives up its turn first, and if no
other worker is idle while something could run, one is started. Usually there is one worker, or two
with callbacks.

[Note: callbacks that end groups] A callback may also end its group, or others, and so may
callbacks on other workers at the same time. Ending a group waits for its workers; but a
worker that does so does not wait for one that does so as well: that one may wait for it.

[Note: signals] A signal's handler runs on the main thread between any two steps of what is here. If
it raises (Ctrl-C), a turn may have been taken that is never given back; so a turn belongs to a
frame of its thread, and is over when that frame is. If it calls the group, it must
not wait: what it interrupted goes on only when it has returned. So waiting raises an error then,
and another thread ends the group.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType

import torch

from impl import errors
from impl.gloo.queue.work import CollectiveWork
from impl.transport.background import BackgroundThread, work_in_background

Job = Callable[[], object]

_IDLE_WORKERS_MAX = 2
_ENDING_LOOK_S = 0.01  # how often a worker that ends a group looks what the others do


class _Worker(BackgroundThread):
    ends_a_group = False  # see [Note: callbacks that end groups]


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
        self._busy_frame: FrameType | None = None  # where in that thread, unless it is a worker
        self._closed = False
        self._workers: set[_Worker] = set()
        self._idle_count = 0
        _executors.add(self)

    def forget_threads(self) -> None:
        """In a forked child: the threads are the parent's, with what they hold and what they do."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue.clear()
        self._callbacks.clear()
        self._busy = False
        self._workers.clear()
        self._idle_count = 0

    def enter(self) -> bool:
        """Whether the caller may run a collective itself, now; if so it must call `leave`.

        The turn is that of the caller's frame: to be called where the collective then runs.
        """
        with self._lock:
            if self._queue or self._closed or (self._busy and self._is_busy()):
                return False
            self._take_turn(sys._getframe(1))
            return True

    def leave(self) -> None:
        """The collective that ran has ended."""
        with self._lock:
            self._end_turn()

    def _take_turn(self, frame: FrameType | None) -> None:
        """Under the lock: make this thread run the next collective, within `frame`."""
        self._busy_thread = threading.get_ident()
        self._busy_frame = frame
        self._busy = True

    def _end_turn(self) -> None:
        """Under the lock."""
        self._busy = False
        self._busy_frame = None
        if self._queue or self._closed:
            self._wake_or_start_worker()

    def _is_busy(self) -> bool:
        """Under the lock: whether a collective runs. Ends this thread's turn if it was broken off.

        See [Note: signals].
        """
        if self._busy and self._busy_frame is not None and self._is_this_threads():
            frame: FrameType | None = sys._getframe()
            while frame is not None and frame is not self._busy_frame:
                frame = frame.f_back
            if frame is None:
                self._end_turn()
        return self._busy

    def _is_this_threads(self) -> bool:
        return self._busy_thread == threading.get_ident()

    def is_running(self) -> bool:
        """Whether a collective runs or waits for its turn."""
        with self._lock:
            return self._is_busy() or bool(self._queue)

    def submit(self, work: CollectiveWork, job: Job) -> None:
        """Queue a collective. Raises Aborted once the group is closed."""
        with self._lock:
            if self._closed:
                raise errors.Aborted(f"{work.where()}: the group was destroyed.")
            self._queue.append((work, job))
            self._is_busy()  # if only by a turn that was broken off, that ends here
            self._wake_or_start_worker()

    def help_with(self, work: CollectiveWork) -> None:
        """For a thread that waits for `work`: run queued operations up to it, if it is queued too.

        Saves two thread switches if no worker has got to it yet.

        Raises:
            RuntimeError: the thread is in the middle of a collective that comes before it.
        """
        while not work.is_over():
            with self._lock:
                if self._is_busy():
                    if self._is_this_threads():
                        raise RuntimeError(
                            f"{work!r} cannot be waited for here: this thread is in the middle of "
                            f"another collective of the group, and a signal's handler must return "
                            f"before that can go on."
                        )
                    return
                if all(queued is not work for queued, _ in self._queue):
                    return
                taken, job = self._queue.popleft()
                self._take_turn(sys._getframe())
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
            self._wake_or_start_worker()

    def runs_here(self) -> bool:
        """Whether the caller was interrupted (by a signal) in a collective that it runs itself."""
        with self._lock:
            return self._is_busy() and self._is_this_threads()

    def runs_in_another_thread(self) -> bool:
        """Whether a thread of the program, other than the caller's, is inside of a collective."""
        with self._lock:
            return self._is_busy() and self._busy_frame is not None and not self._is_this_threads()

    def refuse_more(self) -> None:
        """From now on `submit` raises."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def finish(self) -> None:
        """Accept no more operations, finish the queue, stop the workers. Safe to call twice.

        Not while the caller runs a collective: see `runs_here`.
        """
        self.refuse_more()
        me = threading.current_thread()
        if not isinstance(me, _Worker):
            self._wait_for_others(me)
            return
        me.ends_a_group = True
        try:
            self._wait_for_others(me)
        finally:
            me.ends_a_group = False

    def _wait_for_others(self, me: threading.Thread) -> None:
        is_worker = isinstance(me, _Worker)
        while True:
            with self._lock:
                others = self._workers - {me}
            if all(is_worker and worker.ends_a_group for worker in others):
                break
            for worker in others:
                worker.join(_ENDING_LOOK_S if is_worker else None)
        with self._lock:
            # a synchronous collective of another thread; never this one's own
            while self._is_busy() and not self._is_this_threads():
                self._changed.wait()

    def _wake_or_start_worker(self) -> None:
        """Under the lock: have what can run now taken."""
        if self._idle_count:
            self._changed.notify_all()
        elif self._callbacks or (self._queue and not self._busy):
            self._start_worker()
        elif self._closed:
            self._changed.notify_all()

    def _start_worker(self) -> None:
        worker = _Worker(self._run, name=f"pygloo-{self._group}")
        try:
            self._workers.add(worker)
            worker.start()
        except BaseException:
            if not worker.is_alive():
                self._workers.discard(worker)  # `finish` could not wait for it
            raise

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
                    self._take_turn(None)
                self._wake_or_start_worker()
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


_executors: weakref.WeakSet[Executor] = weakref.WeakSet()


def _forget_threads_of_all() -> None:
    for executor in list(_executors):
        executor.forget_threads()


os.register_at_fork(after_in_child=_forget_threads_of_all)


@atexit.register
def _finish_all() -> None:
    # A callback that has ended its group may still be running, from torch's C++ code, through which
    # Python cannot end its thread: the process would abort.
    for executor in list(_executors):
        executor.finish()
