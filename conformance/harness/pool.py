"""A pool of reused rank processes: joins worlds, runs calls with a deadline, judges, replaces."""

from __future__ import annotations

import itertools
import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from textwrap import indent

import torch.distributed as dist

from conformance.harness.agents import Crew, RemoteRank
from conformance.harness.frames import wait_for
from conformance.harness.messages import (
    Answer,
    Begun,
    Call,
    Command,
    Done,
    End,
    Failed,
    Garbled,
    Join,
    Leave,
    Left,
    Lost,
    Prepare,
    pack,
)
from conformance.harness.outcome import (
    Died,
    NotTold,
    Outcome,
    Raised,
    Refusal,
    Returned,
    StillRunning,
    message_of,
)
from conformance.harness.process_state import OwnChanges
from conformance.harness.rank import HarnessFault, RankProcess
from conformance.harness.restricted_pickle import unpack_from_rank
from conformance.harness.reuse_check import exchange, is_sound
from conformance.target import Target
from conformance.verdict import Verdict

# How long the others may take once a rank has failed: they may be about to fail by themselves,
# which tells more than that they waited.
GRACE_S = 3.0
_LEAVE_DEADLINE_S = 20.0
_END_DEADLINE_S = 120.0  # of ranks that MPI has started: to kill one would end its job
_SETTLING_S = 10.0  # for a rank that polls until its threads and sockets are gone
# To import what a command needs, and to start on a device that dozens of processes start on.
_BEGIN_DEADLINE_S = 180.0
_LOAD_S = 30.0
_POLL_S = 0.5
_PROOF_DEADLINE_S = 10.0
_LOOPBACK_WAIT_S = 5.0
# Parts of a leak's text that differ from run to run: names of shared memory may be random.
_NUMBERS = re.compile(r"\d+|(?<=/sem\.)\w+|(?<=shared memory )\S+")
_PLURALS = re.compile(r"(?<=descriptor)s| \(\d+ mappings\)")


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
    """Something that a rank still held after its groups were destroyed.

    outcome: what became of the rank, if it did not come back from destroying them.
    is_of_process: whether it is something of the process, such as a thread, and not a group.
    """

    rank: int
    what: str
    outcome: Died | StillRunning | None = None
    is_of_process: bool = False

    @property
    def verdict(self) -> Verdict:
        """What it says of the target."""
        return self.outcome.verdict if self.outcome else Verdict.BROKEN

    @property
    def kind(self) -> str:
        """`what` without numbers and names, to compare the leaks of two worlds."""
        return _NUMBERS.sub("N", _PLURALS.sub("", self.what))

    def __str__(self) -> str:
        text = f"rank {self.rank} left behind: {self.what}"
        stacks = self.outcome.stacks if isinstance(self.outcome, StillRunning) else ""
        return f"{text}\n{indent(stacks.rstrip(), '    ')}" if stacks else text


class Pool:
    """Rank processes of one parent; started when first needed, replaced together when spoilt.

    crew: where the ranks come from under a launcher; without one they are processes of this host.
    """

    def __init__(self, crew: Crew | None = None) -> None:
        self._crew = crew
        self._ranks: list[RankProcess | RemoteRank] = []
        self._worlds = itertools.count()
        self._store: dist.TCPStore | None = None
        self._owner = os.getpid()
        self._had_ranks = False
        self._cannot_start = ""
        # Whether the processes are of no more use: some could not be started, or did not answer
        # (see `_ask`), or did not make a world.
        self._spoilt = False
        self._is_changed = False  # whether a process is not as it was before its last world
        # How many ranks, from rank 0 on, must be proven sound before the next world.
        self._in_doubt = 0
        self._world_size = 0  # of the newest world
        self._is_new = True  # whether no world of these processes has ended
        self._is_prepared = False  # whether all ranks of the crew have imported the target
        self.case_before = ""  # the last case that these processes ran, as `note_case` was told
        self._own_changes: dict[tuple[str, str], OwnChanges] = {}
        self._target = ("", "")
        self._hung_leaving: set[tuple[str, str]] = set()
        # Kinds of what each world of a target leaves: no need to look twice.
        self._left_by_each: defaultdict[tuple[str, str], set[str]] = defaultdict(set)

    def join(self, spec: WorldSpec, deadline_s: float) -> list[Outcome]:
        """Make the first `world_size` ranks one world; one that does not return spoils the pool.

        deadline_s: from when all of them have imported the target.
        Raises HarnessFault if they cannot be started. If no rank could ever be started, later calls
        raise at once: what this machine lacks, it lacks for the next case too, and finding out may
        take long.
        """
        if self._in_doubt and not self._prove_sound(spec):
            self.close()
        return self._join(spec, deadline_s)

    def _join(self, spec: WorldSpec, deadline_s: float) -> list[Outcome]:
        self._spoilt = True  # until all ranks are there
        self._target = spec.target.name, spec.target.backend
        self._world_size = spec.world_size
        store = self._start(spec)
        self._spoilt = (
            True  # not any more once they have imported the target, but they may not join
        )
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
        self._spoilt = not all(isinstance(o, Returned) for o in outcomes)
        return outcomes

    def _start(self, spec: WorldSpec) -> dist.TCPStore:
        """The store of the ranks, once they are there and have imported what they must together."""
        store = None
        if not self._cannot_start:
            try:
                store = self._ensure(spec.world_size)
            except HarnessFault as fault:
                if self._had_ranks:
                    raise
                self._cannot_start = str(fault)
            else:
                self.prepare(spec.target, spec.search_path)
        if store is None or self._cannot_start:
            # raised in this line alone: Hypothesis tells bugs apart by the line that raises
            raise HarnessFault(self._cannot_start)
        return store

    def prepare(self, target: Target, search_path: tuple[str, ...]) -> str:
        """Under MPI, where ranks must start what they need together: have all import the target.

        Does nothing elsewhere, and nothing the second time.
        Returns what is wrong with the target, in one line, "" for nothing. If a rank hangs or dies,
        no rank can be started from then on: see [Note: ranks in an MPI job].
        """
        if self._crew is None or not self._crew.starts_together or self._is_prepared:
            return ""
        self._ensure(self._crew.world_size)
        command = Prepare(target, search_path)
        answers = self._ask([command] * len(self._ranks), _BEGIN_DEADLINE_S, wait_for_all=True)
        self._is_prepared = not self._spoilt
        lost = [
            f"rank {rank}" for rank, a in enumerate(answers) if isinstance(a, Died | StillRunning)
        ]
        if lost:
            self._cannot_start = (
                f"{', '.join(lost)} did not come back from importing the target on all ranks at "
                "once; MPI cannot start again in a job of which a process was killed"
            )
        return next((f"{a.type_name}: {a.message}" for a in answers if isinstance(a, Failed)), "")

    def _prove_sound(self, spec: WorldSpec) -> bool:
        """Have the ranks in doubt make a group of the target, and use it and the store; whether
        they could."""
        size = min(max(2, self._in_doubt), len(self._ranks))  # one rank alone proves little
        self._in_doubt = 0
        if self._spoilt:
            return False
        if not self._ranks:
            return True
        if any(rank.answer_nowait() is not None for rank in self._ranks[size:]):
            return False  # it has died, although it had no part in what failed
        whole = replace(spec, world_size=size, default_group=True)
        outcomes = self._join(whole, _PROOF_DEADLINE_S)
        if all(isinstance(outcome, Returned) for outcome in outcomes):
            outcomes = self.call(
                [pack((exchange, ()))] * size, _PROOF_DEADLINE_S, wait_for_all=False
            )
        proven = is_sound(outcomes) and not self._leave_once(size, _PROOF_DEADLINE_S)
        return proven and not self._is_changed

    def call(
        self, payloads: Sequence[bytes], deadline_s: float, *, wait_for_all: bool
    ) -> list[Outcome]:
        """Have rank r run payloads[r].

        deadline_s: from when all ranks have imported what they run.
        wait_for_all: give every rank the whole deadline, although another one has failed.
        """
        return self._judge([Call(p) for p in payloads], deadline_s, wait_for_all=wait_for_all)

    def leave(
        self, world_size: int, deadline_s: float, repeat: Callable[[], bool] | None = None
    ) -> list[Leak]:
        """End the world; returns what its ranks left behind. A pool that is spoilt is replaced, and
        so is one of which a process cannot be put back to how it was.

        repeat: makes a world and does once more what was done in the one that ends; says whether
            every rank came back. A backend may have threads and the like that it starts once in a
            process and keeps: what a second world of the same processes leaves again is a leak.

        A target whose ranks once did not come back from destroying their groups is not asked to do
        it again: that would cost a deadline for every world.
        """
        if self._spoilt or self._target in self._hung_leaving:
            self.close()
            return []
        deadline_s = min(max(deadline_s, _SETTLING_S), _LEAVE_DEADLINE_S)
        leaks = self._leave_once(world_size, deadline_s)
        known = self._left_by_each[self._target]
        may_be_kept = all(leak.is_of_process for leak in leaks) and any(
            leak.kind not in known for leak in leaks
        )
        if repeat and may_be_kept and repeat():
            left_again = {leak.kind for leak in self._leave_once(world_size, deadline_s)}
            leaks = [leak for leak in leaks if leak.kind in left_again]
            known.update(leak.kind for leak in leaks)
        if leaks or self._is_changed:
            self.close()
        return leaks

    def excuse(self, target: Target) -> None:
        """Forget what worlds of the target left: a deviation that it declares explains it."""
        self._left_by_each.pop((target.name, target.backend), None)

    def _leave_once(self, world_size: int, deadline_s: float) -> list[Leak]:
        """Have the ranks leave their world; what each of them left behind."""
        answers = self._ask([Leave()] * world_size, deadline_s, wait_for_all=False)
        leaks = []
        changed: set[str] = set()
        for rank, answer in enumerate(answers):
            if isinstance(answer, Left):
                leaks += [Leak(rank, what) for what in answer.leaks]
                leaks += [Leak(rank, what, is_of_process=True) for what in answer.held]
                changed.update(answer.changed)
            else:
                what = f"its groups, which it was destroying ({answer})"
                gone = answer if isinstance(answer, Died | StillRunning) else None
                leaks.append(Leak(rank, what, gone))
                if isinstance(answer, StillRunning) and answer.verdict is Verdict.TIMEOUT:
                    self._hung_leaving.add(self._target)
        own_changes = self._own_changes.setdefault(self._target, OwnChanges())
        if self._is_new:
            own_changes.note_first_world(changed)
        self._is_new = False
        self._is_changed |= not own_changes.explains(changed)
        return leaks

    def outputs(self) -> list[str]:
        """What each rank printed since it joined."""
        return [rank.output() for rank in self._ranks]

    def close(self) -> None:
        """End all rank processes. The pool can be used again: it starts new ones."""
        if os.getpid() != self._owner:  # a copy in a forked process owns nothing
            return
        if self._is_prepared and not self._spoilt:
            self._ask([End()] * len(self._ranks), _END_DEADLINE_S, wait_for_all=True)
        for rank in self._ranks:
            rank.kill()
        self._ranks.clear()
        self._store = None
        self._is_prepared = False
        self._spoilt = self._is_changed = False
        self._in_doubt = self._world_size = 0
        self._is_new = True
        self.case_before = ""

    def doubt(self) -> None:
        """A case failed, whatever its ranks did: they are kept only if they are proven sound."""
        self._in_doubt = max(self._in_doubt, self._world_size)

    def note_case(self, name: str) -> None:
        """A case has ended that the processes ran."""
        if self._ranks:
            self.case_before = name

    @property
    def _host(self) -> str:
        return self._crew.host if self._crew else "127.0.0.1"

    def _ensure(self, world_size: int) -> dist.TCPStore:
        if self._store is None:
            self._store = self._make_store()
        if self._crew is not None and self._crew.starts_together:
            world_size = self._crew.world_size
        while len(self._ranks) < world_size:
            index = len(self._ranks)
            self._ranks.append(self._crew.rank(index) if self._crew else RankProcess(index))
            self._had_ranks = True
        for rank in self._ranks:
            rank.forget_output()
        return self._store

    def _make_store(self) -> dist.TCPStore:
        if self._crew is None:
            _try_loopback(self._host)
        try:
            return dist.TCPStore(
                self._host,
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=60),
            )
        except RuntimeError as error:  # a trace in C++ follows the first line
            why = str(error).partition("\n")[0]
            raise HarnessFault(f"cannot start a store at {self._host}: {why}") from error

    def _judge(
        self, commands: Sequence[Command], deadline_s: float, *, wait_for_all: bool
    ) -> list[Outcome]:
        answers = self._ask(commands, deadline_s, wait_for_all=wait_for_all)
        return [_outcome(answer) for answer in answers]

    def _ask(
        self, commands: Sequence[Command], deadline_s: float, *, wait_for_all: bool
    ) -> list[Answer | Died | StillRunning]:
        self._spoilt = True  # until every answer is in: Ctrl-C may come
        asked = _Round(self._ranks[: len(commands)], commands, deadline_s, wait_for_all)
        answers = asked.answers()
        self._spoilt = any(isinstance(a, Died | StillRunning | Garbled) for a in answers)
        if any(_is_doubtful(answer) for answer in answers):
            self._in_doubt = max(self._in_doubt, len(answers))
        return answers


def _is_doubtful(answer: object) -> bool:
    """Whether the rank that says so, or the target in it, may not be as it was."""
    return isinstance(answer, Failed | Lost) or (isinstance(answer, Done) and bool(answer.refused))


def _try_loopback(host: str) -> None:
    """Raises HarnessFault if this process cannot connect to itself.

    torch's store tries for as long as its timeout, which is long for the sake of hosts whose name
    server is slow. No name is looked up here.
    """
    try:
        with (
            socket.create_server((host, 0)) as server,
            socket.create_connection(server.getsockname(), _LOOPBACK_WAIT_S),
        ):
            pass
    except OSError as error:
        raise HarnessFault(f"the loopback interface does not work here: {error}") from error


class _Round:
    """One command to each rank, until all have answered or the time is over."""

    def __init__(
        self,
        ranks: Sequence[RankProcess | RemoteRank],
        commands: Sequence[Command],
        deadline_s: float,
        wait_for_all: bool,
    ) -> None:
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._wait_for_all = wait_for_all
        self._answers: list[Answer | Died | None] = [None] * len(ranks)
        at_once = (Prepare, Leave, End)
        self._begun = {r for r, c in zip(ranks, commands, strict=True) if isinstance(c, at_once)}
        self._is_timed = self._has_failed = False
        # A call needs no more than the module of its function, so do not wait as long for a rank
        # that is stopped and never begins.
        calls = all(isinstance(command, Call) for command in commands)
        wait_s = min(_BEGIN_DEADLINE_S, deadline_s + _LOAD_S) if calls else _BEGIN_DEADLINE_S
        self._give_up_at = time.monotonic() + wait_s
        for rank, command in zip(ranks, commands, strict=True):
            rank.tell(command)

    def answers(self) -> list[Answer | Died | StillRunning]:
        """Wait for them; what has not come by then is still running."""
        self._set_clock()
        while (left_s := self._give_up_at - time.monotonic()) > 0 and None in self._answers:
            waiting = [r for r, a in zip(self._ranks, self._answers, strict=True) if a is None]
            wait_for(
                [w for rank in waiting for w in rank.waitables],
                [w for rank in waiting for w in rank.writable],
                min(left_s, _POLL_S),
            )
            for index, rank in enumerate(self._ranks):
                rank.bound_output()
                if self._answers[index] is None:
                    self._answers[index] = self._hear(rank)
            self._set_clock()
        hung = partial(_still_running, after_failure=self._has_failed)
        paired = zip(self._ranks, self._answers, strict=True)
        return [hung(rank) if answer is None else answer for rank, answer in paired]

    def _hear(self, rank: RankProcess | RemoteRank) -> Answer | Died | None:
        """What it has answered, if it has."""
        said = rank.answer_nowait()
        if isinstance(said, Begun):
            self._begun.add(rank)
            said = rank.answer_nowait()
            if isinstance(said, Begun):
                said = Garbled("the rank said twice that it had begun")
        if said is not None:
            self._begun.add(rank)
        return said

    def _set_clock(self) -> None:
        """The deadline counts from when all have begun; after a failure there is a short grace."""
        now = time.monotonic()
        if not self._is_timed and len(self._begun) == len(self._ranks):
            self._is_timed = True
            if not self._has_failed:
                self._give_up_at = now + self._deadline_s
        failed = any(isinstance(a, Failed | Lost | Garbled | Died) for a in self._answers)
        if failed and not self._has_failed and not self._wait_for_all:
            self._has_failed = True
            self._give_up_at = min(self._give_up_at, now + GRACE_S)


def _still_running(rank: RankProcess | RemoteRank, *, after_failure: bool) -> StillRunning:
    last = rank.last_collective()
    return StillRunning(rank.stacks(), last.text, last.in_it, after_failure)


def _outcome(answer: Answer | Died | StillRunning) -> Outcome:
    match answer:
        case Done(payload, refused):
            return _returned(payload, refused)
        case Failed(type_name, message, traceback, bases, refused, hint):
            return Raised(type_name, message, traceback, bases, refused, hint)
        case Lost(message) | Garbled(message):
            return NotTold(message)
        case Left():
            return NotTold("the rank answered something that it was not asked")
        case _:
            return answer


def _returned(payload: bytes, refused: Refusal) -> Outcome:
    try:
        return Returned(unpack_from_rank(payload) if payload else None, refused)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # raised by the value's own code; a skip is none of the case's
        return NotTold(f"the parent cannot read what the rank returned: {message_of(error)}")


class SharedPool:
    """The one pool of this process; runs inside a run borrow it, and the outermost closes it.

    crew: set under a launcher, before the pool is first used.
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
