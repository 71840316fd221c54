"""Processes that judge mutants, or see what cases reach, each with ranks of its own."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from conformance.catalogue.chapters import chapter_files
from conformance.harness.launcher import end_with_parent
from conformance.harness.pool import SHARED_POOL
from conformance.power.judging import (
    Judged,
    Rules,
    Run,
    Task,
    begin_in_this_process,
    cases_reaching,
    judge,
)
from conformance.power.reach import REACHED, Case, Marks
from conformance.rule import profiles_named

_ASK_AGAIN_S = 1.0

T = TypeVar("T")
_Do = Callable[[Any, Run], Iterator[Any]]


@dataclass(frozen=True, slots=True)
class Workers:
    """How many processes there are, and what each is told of how to run the suite."""

    count: int
    rules: Rules
    deadline_s: float

    def judged(self, tasks: Sequence[Task]) -> Iterator[Judged]:
        """The mutants as they come, until each worker has ended."""
        yield from self._all(_judge, list(shares(tasks, self.count)))

    def reach(self, spec: str, count: int) -> dict[str, Case]:
        """What each case reaches of a target that sets marks in the file $CONFORMANCE_REACHED.

        count: of the marks.
        """
        profiles = profiles_named(self.rules.profiles)
        files = [f for f in chapter_files() if f.parent.name in profiles]
        work = [(spec, count, share) for share in shares(files, self.count)]
        return {name: case for cases in self._all(_reach, work) for name, case in cases.items()}

    def _all(self, do: _Do, work: Sequence[Any]) -> Iterator[Any]:
        """What workers make of their shares of the work."""
        context = multiprocessing.get_context("spawn")
        done = context.Queue()
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            workers = []
            for number, share in enumerate(work):
                run = Run(self.rules, self.deadline_s, os.path.join(folder, str(number)))
                os.mkdir(run.folder)
                arguments = do, share, run, done
                workers.append(context.Process(target=_work, args=arguments))
            for worker in workers:
                worker.start()
            try:
                yield from _until_all_end(workers, done)
            finally:
                for worker in workers:
                    worker.terminate()
                    worker.join()


def _until_all_end(workers: Sequence[Any], done: Any) -> Iterator[Any]:
    while any(worker.is_alive() for worker in workers):
        try:
            yield done.get(timeout=_ASK_AGAIN_S)
        except queue.Empty:
            continue
    while not done.empty():
        yield done.get()


def _work(do: _Do, share: Any, run: Run, done: Any) -> None:
    """In a process of its own, with one pool of ranks for all."""
    end_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        return  # it was killed before the line above
    begin_in_this_process()
    owner = object()
    SHARED_POOL.acquire(owner)
    try:
        for made in do(share, run):
            if os.getppid() != parent.pid:  # its SIGTERM has ended one mutant's run alone
                return
            done.put(made)
    finally:
        SHARED_POOL.release(owner)


def _judge(tasks: Sequence[Task], run: Run) -> Iterator[Judged]:
    for task in tasks:
        if task.mutant.is_loaded_once:
            SHARED_POOL.acquire(None).close()
        yield judge(task, run)


def _reach(share: tuple[str, int, Sequence[Path]], run: Run) -> Iterator[dict[str, Case]]:
    spec, count, files = share
    os.environ[REACHED] = os.path.join(run.folder, "marks")
    marks = Marks.made(os.environ[REACHED], count)
    yield cases_reaching(spec, files, marks, run)


def shares(whole: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """What each of so many takes: every so many-th one."""
    yield from (whole[i::count] for i in range(min(count, len(whole))))
