"""group-cc-hook in every rank: it records each operation, and looks for those that hang."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from group_cc_hook import run_daemon
from group_cc_hook.patch_all_collective_primi import work_queue


@contextlib.contextmanager
def hooked() -> Iterator[None]:
    """Its daemon is started once in a process, and stays, as in a training script.

    Its thread holds the newest Work, and by it the group, until the next one comes: here, none.
    """
    run_daemon()
    try:
        yield
    finally:
        work_queue.put({"work": None, "op_name": "no operation"})
        work_queue.join()
