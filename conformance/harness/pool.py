"""A pool of warm rank processes, and the loop that waits for all of them and judges each."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import connection

import torch.distributed as dist

from conformance.harness.messages import (
    Answer,
    Begun,
    Call,
    Command,
    Done,
    Failed,
    Join,
    Leave,
    Left,
    Lost,
    unpack,
)
from conformance.harness.outcome import (
    Died,
    NotTold,
    Outcome,
    Raised,
    Returned,
    StillRunning,
)
from conformance.harness.rank import RankProcess
from conformance.harness.torchrun import Crew, RemoteRank
from conformance.target import Target

# How long the others may take once a rank has failed: they may be about to fail by themselves,
# which tells more than that they waited.
GRACE_S = 3.0
_LEAVE_DEADLINE_S = 20.0
_BEGIN_DEADLINE_S = 60.0  # to import what a command needs
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """What the ranks of one case are told when they join."""

    target: Target
    world_size: int
    device: str
    seed: int
    default_group: bool
    group_timeout_s: float
    search_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leak:
    """Something that a rank still held after its groups were destroyed."""

    rank: int
    what: str

    def __str__(self) -> str:
        return f"rank {self.rank} left behind: {self.what}"


class Pool:
    """Rank processes of one parent; started when first needed, replaced together when spoilt.

    crew: where the ranks come from under torchrun; without one they are processes of this host.
    """

    def __init__(self, crew: Crew | None = None) -> None:
        self._crew = crew
        self._ranks: list[RankProcess | RemoteRank] = []
        self._worlds = itertools.count()
        self._store: dist.TCPStore | None = None
        self._spoilt = False
        self._owner = os.getpid()

    def join(self, spec: WorldSpec, deadline_s: float) -> list[Outcome]:
        """Make the first `world_size` ranks one world; one that does not return spoils the pool.

        deadline_s: from when all of them have imported the target.
        """
        self._spoilt = True  # until all ranks are there
        store = self._ensure(spec.world_size)
        self._spoilt = False
        prefix = f"world{next(self._worlds)}"
        commands = [
            Join(
                target=spec.target,
                rank=rank,
                world_size=spec.world_size,
                host=self._host,
                port=store.port,
                prefix=prefix,
                seed=spec.seed,
                group_timeout_s=spec.group_timeout_s,
                default_group=spec.default_group,
                device=spec.device,
                search_path=spec.search_path,
            )
            for rank in range(spec.world_size)
        ]
        outcomes = self._judge(commands, deadline_s, wait_for_all=False)
        if not all(isinstance(o, Returned) for o in outcomes):
            self._spoilt = True
        return outcomes

    def call(
        self, payloads: Sequence[bytes], deadline_s: float, *, wait_for_all: bool
    ) -> list[Outcome]:
        """Have rank r run payloads[r].

        deadline_s: from when all ranks have imported what they run.
        wait_for_all: give every rank the whole deadline, although another one has failed.
        """
        outcomes = self._judge([Call(p) for p in payloads], deadline_s, wait_for_all=wait_for_all)
        if any(isinstance(o, Died | StillRunning) for o in outcomes):
            self._spoilt = True
        return outcomes

    def leave(self, world_size: int) -> list[Leak]:
        """End the world; returns what its ranks left behind. A pool that is spoilt is replaced."""
        if self._spoilt:
            self.close()
            return []
        answers = self._ask([Leave()] * world_size, _LEAVE_DEADLINE_S, wait_for_all=False)
        leaks = []
        for rank, answer in enumerate(answers):
            if isinstance(answer, Left):
                leaks += [Leak(rank, what) for what in answer.leaks]
            elif isinstance(answer, StillRunning):
                leaks.append(Leak(rank, f"its groups (could not destroy them: {answer})"))
            else:
                leaks.append(Leak(rank, f"its groups ({answer} while they were destroyed)"))
        if leaks:
            self.close()
        return leaks

    def outputs(self) -> list[str]:
        """What each rank printed since it joined."""
        return [rank.output() for rank in self._ranks]

    def close(self) -> None:
        """End all rank processes. The pool can be used again: it starts new ones."""
        if os.getpid() != self._owner:  # a copy in a forked process owns nothing
            return
        for rank in self._ranks:
            rank.kill()
        self._ranks.clear()
        self._store = None
        self._spoilt = False

    @property
    def _host(self) -> str:
        return self._crew.host if self._crew else "127.0.0.1"

    def _ensure(self, world_size: int) -> dist.TCPStore:
        if self._store is None:
            self._store = dist.TCPStore(
                self._host,
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=60),
            )
        while len(self._ranks) < world_size:
            index = len(self._ranks)
            self._ranks.append(self._crew.rank(index) if self._crew else RankProcess(index))
        for rank in self._ranks:
            rank.forget_output()
        return self._store

    def _judge(
        self, commands: Sequence[Command], deadline_s: float, *, wait_for_all: bool
    ) -> list[Outcome]:
        answers = self._ask(commands, deadline_s, wait_for_all=wait_for_all)
        return [_outcome(answer) for answer in answers]

    def _ask(
        self, commands: Sequence[Command], deadline_s: float, *, wait_for_all: bool
    ) -> list[Answer | Died | StillRunning]:
        ranks = self._ranks[: len(commands)]
        was_spoilt, self._spoilt = self._spoilt, True  # until every answer is in: Ctrl-C may come
        for rank, command in zip(ranks, commands, strict=True):
            rank.tell(command)
        answers: list[Answer | Died | StillRunning | None] = [None] * len(ranks)
        have_begun: set[RankProcess | RemoteRank] = {
            rank for rank, c in zip(ranks, commands, strict=True) if isinstance(c, Leave)
        }
        all_have_begun = failed = False
        give_up_at = time.monotonic() + _BEGIN_DEADLINE_S
        while None in answers:
            if not all_have_begun and len(have_begun) == len(ranks):
                all_have_begun = True
                if not failed:
                    give_up_at = time.monotonic() + deadline_s
            waiting = [rank for rank, answer in zip(ranks, answers, strict=True) if answer is None]
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                break
            connection.wait([w for rank in waiting for w in rank.waitables], min(left_s, _POLL_S))
            for index, rank in enumerate(ranks):
                rank.bound_output()
                if answers[index] is None:
                    answers[index] = _hear(rank, have_begun)
            now_failed = any(isinstance(a, Failed | Lost | Died) for a in answers)
            if now_failed and not failed and not wait_for_all:
                failed = True
                give_up_at = min(give_up_at, time.monotonic() + GRACE_S)
        self._spoilt = was_spoilt
        hung = partial(_still_running, after_failure=failed)
        return [hung(rank) if a is None else a for rank, a in zip(ranks, answers, strict=True)]


def _hear(
    rank: RankProcess | RemoteRank, have_begun: set[RankProcess | RemoteRank]
) -> Answer | Died | None:
    said = rank.answer_nowait()
    if isinstance(said, Begun):
        have_begun.add(rank)
        said = rank.answer_nowait()
        assert not isinstance(said, Begun)
    if said is not None:
        have_begun.add(rank)
    return said


def _still_running(rank: RankProcess | RemoteRank, *, after_failure: bool) -> StillRunning:
    last = rank.last_collective()
    return StillRunning(rank.stacks(), last.text, last.in_it, after_failure)


def _outcome(answer: Answer | Died | StillRunning) -> Outcome:
    match answer:
        case Done(payload):
            return _returned(payload)
        case Failed(type_name, message, traceback, bases):
            return Raised(type_name, message, traceback, bases)
        case Lost(message):
            return NotTold(message)
        case Left():
            raise AssertionError("only Leave is answered with Left")
        case _:
            return answer


def _returned(payload: bytes) -> Outcome:
    try:
        return Returned(unpack(payload) if payload else None)
    except Exception as error:
        return NotTold(f"the parent cannot read what the rank returned: {error}")


class SharedPool:
    """The one pool of this process; runs inside a run borrow it, and the outermost closes it.

    crew: set under torchrun, before the pool is first used.
    """

    def __init__(self) -> None:
        self.crew: Crew | None = None
        self._pool: Pool | None = None
        self._owner: object = None

    def acquire(self, owner: object) -> Pool:
        """The pool; whoever asks first owns it."""
        if self._pool is None:
            self._pool, self._owner = Pool(self.crew), owner
        return self._pool

    def release(self, owner: object) -> None:
        """Close the pool if this is its owner."""
        if self._pool is not None and self._owner is owner:
            self._pool.close()
            self._pool = self._owner = None


SHARED_POOL = SharedPool()
