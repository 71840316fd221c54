"""Runs under torchrun, mpirun or srun: detects rank and world size, starts the launcher, and lets
ranks find rank 0 (rendezvous).

Each launcher says so in the environment. How rank 0 is found differs too: torchrun has a store;
under the others rank 0 makes one at MASTER_ADDR and MASTER_PORT if they are set, and otherwise
leaves a note in a folder of this user's, as all ranks are on one host.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Protocol

import torch.distributed as dist

from conformance.harness.rank import HarnessFault

LAUNCHERS = ("auto", "slurm", "none")
_LOOPBACK = "127.0.0.1"
_MEETING_S = 300.0
_LOOK_AGAIN_S = 0.1
_KEY = "conformance/agents"
# Set in what `launch` starts: a file for the number of rank 0's process.
_LAUNCHED = "CONFORMANCE_LAUNCHED"
_PASSED_ON = (signal.SIGINT, signal.SIGTERM)

NO_WORKERS = "-n cannot be used under a launcher, which has one set of ranks"


class LauncherError(ValueError):
    """The launcher's environment does not do; the message is one line for the user."""


class NotLaunched(LauncherError):
    """The launcher that was named has not started this process."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a launcher put this process.

    host: where all ranks can reach a server of rank 0.
    port: of the store that rank 0 makes there, 0 if the ranks meet in another way.
    job: tells this job from others on the same host; "" under torchrun.
    """

    rank: int
    world_size: int
    host: str
    port: int = 0
    job: str = ""

    @property
    def starts_together(self) -> bool:
        """Whether what the target starts may have to start on all ranks at once, as MPI has to."""
        return bool(self.job)


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The names of the variables in which a launcher says where it put a process.

    local_size: how many ranks are on this host.
    host_count: how many hosts there are; a launcher tells one of the two at most.
    job: variables that together name the job. Where there are none, the process that started this
        one does.
    """

    rank: str
    world_size: str
    local_size: str = ""
    host_count: str = ""
    job: tuple[str, ...] = ()


_OPEN_MPI = _Launcher(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    job=("PMIX_NAMESPACE",),
)
_PMI = _Launcher("PMI_RANK", "PMI_SIZE", local_size="MPI_LOCALNRANKS")  # MPICH, Intel MPI, MVAPICH
_SLURM = _Launcher(
    "SLURM_PROCID",
    "SLURM_NTASKS",
    host_count="SLURM_STEP_NUM_NODES",
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
)


def place(launcher: str = "auto", environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place among the ranks that were launched, or None if it stands alone.

    launcher: "auto" for torchrun and MPI, "none" for neither. Slurm's variables are also set in
        steps that no rank was launched in, so that one is recognized only as "slurm".
    Raises LauncherError if the launcher said too little.
    """
    if launcher == "none":
        return None
    if launcher == "slurm":
        found = _place_by(_SLURM, environment)
        if found is None:
            raise NotLaunched("--launcher slurm: srun has not started several tasks")
        return found
    if "TORCHELASTIC_RUN_ID" in environment:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        return Place(rank, size, environment["MASTER_ADDR"])
    return _place_by(_OPEN_MPI, environment) or _place_by(_PMI, environment)


def _place_by(launcher: _Launcher, environment: Mapping[str, str]) -> Place | None:
    """None also for a single process: MPI's variables may be those of a shell that it runs in."""
    if launcher.rank not in environment or launcher.world_size not in environment:
        return None
    rank, size = int(environment[launcher.rank]), int(environment[launcher.world_size])
    if size < 2:
        return None
    job = "-".join(environment.get(name, "") for name in launcher.job).strip("-")
    job = job or _parent()
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if host and port:
        return Place(rank, size, host, int(port), job)
    local_size = int(environment.get(launcher.local_size, size))
    if local_size < size or int(environment.get(launcher.host_count, 1)) > 1:
        raise LauncherError(
            f"{size} ranks on several hosts: set MASTER_ADDR to rank 0's host and MASTER_PORT to a "
            "free port there, for all ranks"
        )
    return Place(rank, size, _LOOPBACK, 0, job)


def launch(launcher: str, command: Sequence[str]) -> int:
    """Have a launcher run the command on all ranks; its exit code.

    SIGINT and SIGTERM go to rank 0, which then ends the run as without a launcher: a launcher would
    kill all ranks at once. If rank 0 is on another host, or at the second signal, the launcher
    gets them.

    launcher: a command, such as "mpirun -n 4".
    Raises LauncherError if it cannot be started, or has been and its ranks know no place.
    """
    if _LAUNCHED in os.environ:
        raise LauncherError(
            f"launch: {launcher} has started this, and not as one of several ranks; srun's are "
            "recognized with --launcher slurm"
        )
    words = shlex.split(launcher)
    with tempfile.NamedTemporaryFile("r", prefix="conformance-rank-0-") as told:
        try:
            process = subprocess.Popen(
                [*words, *command],
                env={**os.environ, _LAUNCHED: told.name},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C does not reach it
                preexec_fn=end_with_parent,
            )
        except OSError as error:
            raise LauncherError(f"launch: {words[0]}: {error.strerror}") from error
        with _passing_on(process, told):
            code = process.wait()
    return 128 - code if code < 0 else code


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel send SIGTERM when the process that has started this one is killed."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _passing_on(process: subprocess.Popen[bytes], told: IO[str]) -> Iterator[None]:
    """Inside, this process's signals go to rank 0, or to the launcher.

    told: where rank 0 leaves the number of its process.
    """
    pids: list[int] = []

    def pass_on(number: int, _: object) -> None:
        rank_0 = told.read()
        if rank_0 and not pids:
            pids.append(int(rank_0))
            with suppress(ProcessLookupError):
                return os.kill(pids[0], number)
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tell_launcher() -> None:
    """Rank 0: say to `launch` which process this is, where it can see that."""
    with suppress(KeyError, FileNotFoundError), open(os.environ[_LAUNCHED], "r+") as told:
        told.write(str(os.getpid()))


def _parent() -> str:
    """The process that started this one; its start tells it from an earlier one of its number."""
    pid = os.getppid()
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{pid}-{fields[19]}"
    return str(pid)


class Meeting(Protocol):
    """Where rank 0 leaves word for the others."""

    def publish(self, word: str) -> None:
        """Rank 0: leave it there."""

    def read(self) -> str:
        """The others: wait until it is there. Raises HarnessFault if it never is."""

    def close(self) -> None:
        """Rank 0: all have read it."""


def meeting(at: Place) -> Meeting:
    """How the ranks of this launcher find rank 0."""
    if at.job and not at.port:
        return _Note(at.job)
    if at.job:
        wait = timedelta(seconds=_MEETING_S)
        is_first = at.rank == 0
        return _InStore(
            lambda: dist.TCPStore(
                at.host, at.port, is_master=is_first, timeout=wait, wait_for_workers=False
            )
        )
    return _InStore(lambda: _store_of_torchrun(at))


def _store_of_torchrun(at: Place) -> dist.Store:
    timeout = timedelta(seconds=_MEETING_S)
    found = dist.rendezvous("env://", at.rank, at.world_size, timeout=timeout)
    store: dist.Store = next(found)[0]
    return store


class _InStore:
    def __init__(self, open_store: Callable[[], dist.Store]) -> None:
        self._store = open_store()

    def publish(self, word: str) -> None:
        self._store.set(_KEY, word)

    def read(self) -> str:
        return self._store.get(_KEY).decode()

    def close(self) -> None:
        pass  # others may not have asked yet whether they may go


class _Note:
    """A file that only this user can read. It holds a key: to see it is to be allowed to join."""

    def __init__(self, job: str) -> None:
        folder = Path(tempfile.gettempdir()) / f"conformance-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if not is_ours or stat.S_IMODE(found.st_mode) & 0o077:
            raise LauncherError(f"{folder} must be a folder that only you can enter")
        self._path = folder / re.sub(r"[^\w.-]", "_", job)

    def publish(self, word: str) -> None:
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
            file.write(word)
        os.replace(file.name, self._path)

    def read(self) -> str:
        give_up_at = time.monotonic() + _MEETING_S
        while time.monotonic() < give_up_at:
            with suppress(FileNotFoundError):
                return self._path.read_text()
            time.sleep(_LOOK_AGAIN_S)
        raise HarnessFault(
            f"no word from rank 0 in {self._path} within {_MEETING_S:g} s; if the ranks are on "
            "several hosts, set MASTER_ADDR and MASTER_PORT"
        )

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
