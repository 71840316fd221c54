"""Rank processes that stay up between tests, each call with a fresh group and a deadline.

They are forked from a server that has torch imported, so they are up in milliseconds. If a rank
raises, dies or misses the deadline, the call fails with what every rank did, and the ranks are
replaced.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_S = 60.0
_calls = itertools.count()

# call(rank, world_size, path, function, args): runs a function on a rank, in a group that meets
# through the file `path`; what it returns.
Call = Callable[[int, int, str, Callable[..., Any], tuple[Any, ...]], Any]


@dataclass(frozen=True)
class Raised:
    """What became of a rank that did not return."""

    text: str


class WarmRanks:
    """`world_size` rank processes, which meet through files in `directory`.

    call: importable, since the processes come from a forkserver.
    """

    def __init__(self, world_size: int, directory: Path, call: Call) -> None:
        self._world_size = world_size
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._directory = directory
        self._call = call

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `call` returns for this function on each rank, tensors by value."""
        if not self._processes:
            self._start()
        path = str(self._directory / f"store{next(_calls)}")
        for pipe in self._pipes:
            pipe.send((function, args, path))
        results = self._collect()
        problems = [f"rank {r}: {x.text}" for r, x in enumerate(results) if isinstance(x, Raised)]
        if problems:
            self.stop()
            raise AssertionError("\n".join(problems))
        return results

    def _collect(self) -> list[Any]:
        results: list[Any] = [Raised("missed the deadline")] * self._world_size
        waiting = dict(zip(self._pipes, range(self._world_size), strict=True))
        deadline = monotonic() + DEADLINE_S
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    results[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    results[rank] = Raised("died")
                if isinstance(results[rank], Raised):
                    # The others are likely to wait for this one.
                    deadline = min(deadline, monotonic() + 5.0)
        return results

    def _start(self) -> None:
        context = get_context("forkserver")
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._world_size, theirs, self._call), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        """End the processes; the next call starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=1)
            process.kill()
            process.join()
        self._processes.clear()
        self._pipes.clear()


@contextlib.contextmanager
def default_group(rank: int, world_size: int, path: str) -> Iterator[None]:
    """On torch's gloo; its timeout ends before the call's deadline does."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=DEADLINE_S / 2),
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _serve(rank: int, world_size: int, pipe: Connection, call: Call) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, args, path = pipe.recv()
        except EOFError:
            return
        try:
            result = call(rank, world_size, path, function, args)
        except Exception:
            result = Raised(traceback.format_exc())
        # Plain pickle: tensors travel by value, not as handles to memory that dies with the rank.
        pipe.send_bytes(pickle.dumps(result))
