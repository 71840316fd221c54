"""Ranks as processes over a real backend, with a deadline and no leftovers."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

import impl.gloo  # noqa: F401  # registers pygloo

DEADLINE_S = 60.0


def run_processes(
    world_size: int, store: Path, body: Callable[[int], Any], backend: str = "gloo"
) -> list[Any]:
    """What body(rank) returns on each rank, with a world of that backend set up.

    body is a function of a module, and returns what pickles by value: numbers, strings, lists.
    store is the path of a file that does not exist yet. Raises AssertionError that says what each
    rank did, unless all ranks return before the deadline.
    """
    # A fork server starts a rank in milliseconds, because it has torch imported; and it has no
    # threads, as this process may have, that a plain fork would leave in an unknown state.
    context = multiprocessing.get_context("forkserver")
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(rank, world_size, str(store), body, backend, theirs), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        outcomes = _collect(pipes, monotonic() + DEADLINE_S)
    finally:
        for process in processes:
            process.join(timeout=1.0)
            process.kill()
            process.join()
    problems = [
        f"rank {rank}: {outcome}"
        for rank, (returned, outcome) in enumerate(outcomes)
        if not returned
    ]
    assert not problems, "\n".join(problems)
    return [outcome for _, outcome in outcomes]


def _collect(pipes: list[Connection], deadline: float) -> list[tuple[bool, Any]]:
    """(whether it returned, what it returned or what happened) of each rank."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    while len(outcomes) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in outcomes]
        ready = wait(waiting, timeout=max(0.0, deadline - monotonic()))
        if not ready:
            break
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:
                    outcomes[rank] = (False, "died without a word")
        if not all(returned for returned, _ in outcomes.values()):
            deadline = min(deadline, monotonic() + 5.0)  # the others are likely to be stuck
    late = (False, "did not return in time")
    return [outcomes.get(rank, late) for rank in range(len(pipes))]


def _rank(
    rank: int,
    world_size: int,
    store: str,
    body: Callable[[int], Any],
    backend: str,
    pipe: Connection,
) -> None:
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=DEADLINE_S / 2),
        )
        value = body(rank)
        dist.destroy_process_group()
        pipe.send((True, value))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
