"""Rank processes that stay up between tests, each call with a fresh group and a deadline.

They are forked from a server that has torch imported. If a rank raises, dies or misses the
deadline, the call fails with what every rank did, and the ranks are replaced.
"""

from __future__ import annotations

import itertools
import pickle
import traceback
import warnings
from collections.abc import Callable
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


@dataclass(frozen=True)
class Raised:
    """What became of a rank that did not return."""

    text: str


class Ranks:
    """`world_size` rank processes on torch's gloo, which meet through files in `directory`."""

    def __init__(self, world_size: int, directory: Path) -> None:
        self._world_size = world_size
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._directory = directory

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(rank, world_size, *args)` returns on each rank, tensors by value."""
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
                target=_serve, args=(rank, self._world_size, theirs), daemon=True
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


def _serve(rank: int, world_size: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, args, path = pipe.recv()
        except EOFError:
            return
        # Plain pickle: tensors travel by value, not as handles to memory that dies with the rank.
        pipe.send_bytes(pickle.dumps(_call(rank, world_size, path, function, args)))


def _call(
    rank: int, world_size: int, path: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    torch.manual_seed(0)
    store = dist.FileStore(path, world_size)
    try:
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=DEADLINE_S / 2),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = function(rank, world_size, *args)
        dist.barrier()  # nobody leaves while another rank still talks to it
        return result
    except Exception:
        return Raised(traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
