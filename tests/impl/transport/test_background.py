"""Background threads start, whatever the handlers of signals raise meanwhile."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest

from impl.transport.background import BackgroundThread

STARTS = 1000
PATIENCE_S = 30.0


class Interrupted(Exception):
    """What a handler raises."""


def interrupt(*_: object) -> None:
    raise Interrupted


# Python ignores, and tells, what a handler raises inside the callback of a weak reference.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_thread_is_lost_if_a_handler_raises_while_it_starts() -> None:
    draw = random.Random(0)
    interrupted = 0
    usual = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(STARTS):
            has_run = threading.Event()
            thread = BackgroundThread(has_run.set)
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 3e-4))
                thread.start()
                time.sleep(0.01)
            except Interrupted:
                interrupted += 1
            if thread.ident is not None:
                assert has_run.wait(PATIENCE_S), f"it ended before it ran, after {interrupted}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
    assert interrupted > STARTS / 2


def test_a_thread_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        BackgroundThread(print).start()
