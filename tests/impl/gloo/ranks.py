"""Ranks for the tests of `impl.gloo`: threads of this process, or processes, each with a deadline.

Most tests use threads: shared memory does not care, and a failure shows where it happened.
Processes are for what only they have: death, forks, torch's global default group.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from impl.gloo import Options, ProcessGroupGloo
from tests.impl.threads import on_threads

_T = TypeVar("_T")

DEADLINE_S = 60.0


def in_groups(
    world_size: int,
    rank_function: Callable[[ProcessGroupGloo], _T],
    *,
    timeout_s: float = 30.0,
    transport: str = "shm",
) -> list[_T]:
    """`on_threads`, with a fresh group of thread ranks; shut down afterwards."""
    store = dist.HashStore()
    timeout = timedelta(seconds=timeout_s)

    def run(rank: int) -> _T:
        options = Options(timeout, transport, hostname="127.0.0.1")
        group = ProcessGroupGloo(store, rank, world_size, options=options, name="g")
        try:
            return rank_function(group)
        finally:
            group.shutdown()

    return on_threads(world_size, run)


class RankFailed(AssertionError):
    """A rank process raised, died or did not end; the message says which and how."""


def on_processes(
    world_size: int,
    rank_function: Callable[..., Any],
    *args: Any,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """Call `rank_function(rank, world_size, *args)` in one process a rank; the results by rank.

    rank_function: importable, since processes come from a forkserver. Ranks in `may_die` give None
    if their process ends without a result.
    """
    context = multiprocessing.get_context("forkserver")
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(theirs, rank_function, rank, world_size, args), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        return [
            _result_of(rank, process, pipe, rank in may_die)
            for rank, (process, pipe) in enumerate(zip(processes, pipes, strict=True))
        ]
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
            process.close()


def _result_of(rank: int, process: Any, pipe: Connection, may_die: bool) -> Any:
    try:
        if not pipe.poll(DEADLINE_S):
            raise RankFailed(f"rank {rank} did not end within {DEADLINE_S:.0f} s")
        ok, value = pipe.recv()
    except EOFError:
        if may_die:
            return None
        process.join()
        raise RankFailed(f"rank {rank} died with exit code {process.exitcode}") from None
    if not ok:
        raise RankFailed(f"rank {rank} raised:\n{value}")
    return value


def _rank_main(
    pipe: Connection, rank_function: Callable[..., Any], rank: int, world_size: int, args: Any
) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send((True, rank_function(rank, world_size, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
