"""Two rank processes that stay up between tests, and a deadline for everything they do.

A rank is forked from a server that has torch imported, so it is up in milliseconds. Each call gets
a fresh group. If a rank raises, dies or misses the deadline, the call fails with what every rank
did, and the ranks are replaced.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_S = 60
_groups = itertools.count()


@dataclass(frozen=True)
class Raised:
    """A rank's function raised."""

    text: str


def _serve(rank: int, world_size: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, args, path = pipe.recv()
        except EOFError:
            return
        # Plain pickle: tensors travel by value, not as handles to memory that dies with the rank.
        pipe.send_bytes(pickle.dumps(_call(rank, world_size, function, args, path)))


def _call(
    rank: int, world_size: int, function: Callable[..., Any], args: tuple[Any, ...], path: str
) -> Any:
    torch.manual_seed(rank)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(path, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=DEADLINE_S / 2),
        )
        return function(rank, *args)
    except Exception:
        return Raised(traceback.format_exc())
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


class Ranks:
    """Some rank processes."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._directory = tempfile.TemporaryDirectory()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(rank, *args)` returns on each rank. Results must not be on a device."""
        if not self._processes:
            self._start()
        path = os.path.join(self._directory.name, f"group{next(_groups)}")
        for pipe in self._pipes:
            pipe.send((function, args, path))
        results = self._collect()
        problems = [
            f"rank {rank}: {result.text}"
            for rank, result in enumerate(results)
            if isinstance(result, Raised)
        ]
        if problems:
            self.stop()
            raise AssertionError("\n".join(problems))
        return results

    def _collect(self) -> list[Any]:
        results: list[Any] = [Raised("missed the deadline")] * self._world_size
        waiting = dict(zip(self._pipes, range(self._world_size), strict=True))
        while waiting:
            ready = connection.wait(list(waiting), timeout=DEADLINE_S)
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    results[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    results[rank] = Raised("died")
        return results

    def _start(self) -> None:
        context = get_context("forkserver")
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._world_size, theirs))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        """End everything."""
        self.stop()
        self._directory.cleanup()

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
