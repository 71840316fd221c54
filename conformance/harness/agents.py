"""Rank processes under a launcher, on one host or several: rank 0 tells each what to run.

torchrun and mpirun start one process a rank. The one of rank 0 collects and judges the cases; every
other one becomes an agent: it keeps a warm rank process beside it and passes messages between that
and rank 0. So a rank that dies or hangs is judged and replaced just as on one host.

    rank 0's process                          rank r's process
    pytest -- Pool -- RankProcess 0
                   \\- RemoteRank r  <--->  serve() -- RankProcess r

[Note: ranks in an MPI job]
To MPI, the rank process is the process of its rank: it has the launcher's variables from its
parent, which never starts MPI itself. MPI starts and ends on all ranks of a job together, so under
mpirun all rank processes import the target at the same time, and end as Python ends and not by a
signal, unless one of them hangs or has died. After that a job cannot start MPI again (seen with
Open MPI 5.0), which makes every further case one that nothing is known of. Launched processes that
are ranks themselves would have gained nothing: a job does not outlive any of them either.
"""

from __future__ import annotations

import secrets
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from conformance.harness.frames import wait_for
from conformance.harness.launcher import Place, meeting
from conformance.harness.messages import Answer, Begun, Command
from conformance.harness.outcome import Died
from conformance.harness.rank import HarnessFault, RankProcess
from conformance.harness.recorder import LastCollective

_KEY_BYTES = 32
_ANSWER_WAIT_S = 30.0
_CONNECT_WAIT_S = 60.0
_LOOK_AGAIN_S = 0.1
_START_WAIT_S = 180.0  # an agent's first process imports torch


@dataclass(frozen=True, slots=True)
class _Hello:
    """What an agent says first. sees_files: whether a file that rank 0 made is there for it."""

    rank: int
    sees_files: bool


@dataclass(frozen=True, slots=True)
class _Start:
    """Start the rank process, if there is none, and say so."""


@dataclass(frozen=True, slots=True)
class _Tell:
    """Pass a command on to the rank process, which is started if it has died since."""

    command: Command


@dataclass(frozen=True, slots=True)
class _Ask:
    """Call a method of the rank process and send back what it returns."""

    method: str


@dataclass(frozen=True, slots=True)
class _Reply:
    value: Any


@dataclass(frozen=True, slots=True)
class _Said:
    """What came from the rank process. life: how many of its predecessors had been killed, so that
    an answer that crossed with `_Kill` is known to be stale."""

    life: int
    answer: Answer | Begun | Died


@dataclass(frozen=True, slots=True)
class _Kill:
    """End the rank process."""


@dataclass(frozen=True, slots=True)
class _End:
    """The run is over."""


class RemoteRank:
    """A rank process beside an agent; the same interface as `RankProcess`."""

    def __init__(self, index: int, connection: Connection) -> None:
        self._index = index
        self._connection = connection
        self._came: deque[Answer | Begun | Died] = deque()
        self._life = 0

    @property
    def waitables(self) -> list[Any]:
        return [self._connection]

    @property
    def writable(self) -> list[Any]:
        """Nothing: the agent reads at any time."""
        return []

    def start(self) -> None:
        """Return when there is a process: what a case may take does not begin before."""
        self._send(_Start())
        self._reply("start", _START_WAIT_S)

    def tell(self, command: Command) -> None:
        self._send(_Tell(command))

    def answer_nowait(self) -> Answer | Begun | Died | None:
        if not self._came and self._connection.poll():
            self._take_in(self._receive())
        return self._came.popleft() if self._came else None

    def last_collective(self) -> LastCollective:
        last: LastCollective = self._ask("last_collective")
        return last

    def stacks(self) -> str:
        return str(self._ask("stacks"))

    def output(self) -> str:
        return str(self._ask("output"))

    def forget_output(self) -> None:
        self._ask("forget_output")

    def bound_output(self) -> None:
        self._ask("bound_output")

    def kill(self) -> None:
        self._send(_Kill())
        self._came.clear()
        self._life += 1

    def end(self) -> None:
        """Let the agent go."""
        self._send(_End())
        self._connection.close()

    def _ask(self, method: str) -> Any:
        self._send(_Ask(method))
        return self._reply(method, _ANSWER_WAIT_S)

    def _reply(self, question: str, wait_s: float) -> Any:
        while self._connection.poll(wait_s):
            message = self._receive()
            if isinstance(message, _Reply):
                return message.value
            self._take_in(message)
        raise HarnessFault(
            f"the agent of rank {self._index} did not answer {question!r} within {wait_s:g} s"
        )

    def _take_in(self, said: _Said) -> None:
        if said.life == self._life:
            self._came.append(said.answer)

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise HarnessFault(f"the agent of rank {self._index} is gone: {error}") from error

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise HarnessFault(f"the agent of rank {self._index} is gone: {error}") from error


class Crew:
    """Rank 0's side: the agents of all other ranks, once they have reported.

    world_size: how many ranks there are.
    starts_together: whether the ranks have to import the target, and to end, at the same time.
    shares_files: whether files that rank 0 makes in `folder` are there on all hosts.
    """

    def __init__(self, at: Place, folder: Path) -> None:
        self.host = at.host
        self.world_size = at.world_size
        self.starts_together = at.starts_together
        self.shares_files = True
        key = secrets.token_bytes(_KEY_BYTES)
        with (
            Listener((at.host, 0), authkey=key) as listener,
            tempfile.NamedTemporaryFile(dir=folder) as seen_by_all,
        ):
            port = listener.address[1]
            place_to_meet = meeting(at)
            place_to_meet.publish(f"{port} {key.hex()} {seen_by_all.name}")
            self._agents: dict[int, RemoteRank] = {}
            while len(self._agents) < at.world_size - 1:
                connection = listener.accept()
                hello: _Hello = connection.recv()
                self._agents[hello.rank] = RemoteRank(hello.rank, connection)
                self.shares_files &= hello.sees_files
        place_to_meet.close()

    def rank(self, index: int) -> RankProcess | RemoteRank:
        """Rank `index`, warm: rank 0 in a process of ours, every other one beside its agent."""
        if index == 0:
            return RankProcess(0)
        agent = self._agents[index]
        agent.start()
        return agent

    def end(self) -> None:
        """Let all agents go."""
        for agent in self._agents.values():
            agent.end()


def serve(at: Place) -> None:
    """An agent's whole life: pass messages on until rank 0 ends the run or is gone.

    A launcher that is told to end tells all processes. Rank 0 then writes what was found so far,
    and ends the others itself.
    """
    connection = _connect(at)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # rank processes do not inherit it, as SIG_IGN
    rank: RankProcess | None = RankProcess(at.rank)  # on all hosts at the same time
    life = 0
    try:
        while True:
            ready = wait_for(
                [connection, *(rank.waitables if rank else [])], rank.writable if rank else [], None
            )
            if connection in ready:
                message = connection.recv()
                if isinstance(message, _End):
                    return
                rank = _obey(message, rank, at.rank, connection.send)
                life += isinstance(message, _Kill)
                continue
            while rank is not None and (answer := rank.answer_nowait()) is not None:
                connection.send(_Said(life, answer))
                if isinstance(answer, Died):
                    rank.kill()
                    rank = None
    except (EOFError, OSError):
        return
    finally:
        if rank is not None:
            rank.kill()


def _connect(at: Place) -> Connection:
    """To rank 0, which knows then that this agent is there."""
    place_to_meet = meeting(at)
    give_up_at = time.monotonic() + _CONNECT_WAIT_S
    while True:
        port, key, file = place_to_meet.read().split(maxsplit=2)
        try:
            connection = Client((at.host, int(port)), authkey=bytes.fromhex(key))
            break
        except (OSError, EOFError, AuthenticationError) as error:
            # A job of the same name may have left its word behind when it was killed.
            if time.monotonic() > give_up_at:
                raise HarnessFault(f"rank {at.rank} cannot reach rank 0: {error}") from error
            time.sleep(_LOOK_AGAIN_S)
    connection.send(_Hello(at.rank, sees_files=Path(file).exists()))
    return connection


def _obey(
    message: object, rank: RankProcess | None, index: int, send: Callable[[object], None]
) -> RankProcess | None:
    if isinstance(message, _Start):
        rank = rank or RankProcess(index)
        send(_Reply(None))
    elif isinstance(message, _Tell):
        rank = rank or RankProcess(index)
        rank.tell(message.command)
    elif isinstance(message, _Ask):
        send(_Reply(getattr(rank, message.method)() if rank else _WITHOUT_PROCESS[message.method]))
    elif isinstance(message, _Kill) and rank is not None:
        rank.kill()
        rank = None
    return rank


# What each method is answered with where there is no rank process, or none any more.
_WITHOUT_PROCESS: dict[str, object] = {
    "bound_output": None,
    "forget_output": None,
    "last_collective": LastCollective("", in_it=False),
    "output": "",
    "stacks": "(the process is gone)",
}
