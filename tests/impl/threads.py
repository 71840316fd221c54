"""Runs a function on ranks that are threads of this process, with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

DEADLINE_S = 60.0


def on_threads(
    world_size: int, rank_function: Callable[[int], _T], deadline_s: float = DEADLINE_S
) -> list[_T]:
    """Call `rank_function(rank)` on one thread a rank; the results by rank.

    The first rank's exception is raised here. A rank that does not end by the deadline is an error;
    its thread is a daemon, so it does not keep the process.
    """
    results: dict[int, _T] = {}
    failures: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = rank_function(rank)
        except BaseException as error:
            failures[rank] = error

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s)
    for rank in sorted(failures):
        raise failures[rank]
    running = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not running, f"ranks {running} did not end"
    return [results[rank] for rank in range(world_size)]
