"""The parent's side of a rank process: fork server, starting, commands, stacks, output, killing."""

from __future__ import annotations

import fcntl
import importlib
import mmap
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from multiprocessing import forkserver, reduction
from multiprocessing.context import ForkServerContext
from pickle import UnpicklingError
from typing import IO, Any

from conformance.harness.frames import BrokenFrame, ParentEnd
from conformance.harness.leaks import children_by_parent
from conformance.harness.messages import Answer, Begun, Command, Garbled, pack
from conformance.harness.outcome import Died
from conformance.harness.recorder import PAGE_BYTES, LastCollective, Page
from conformance.harness.restricted_pickle import unpack_from_rank

_PRELOAD = "conformance.harness.preload"
# What ranks that train models need: it takes as long to import as torch itself.
COMPILER = "torch._dynamo"  # which the first optimizer of a process imports
FOR_TRAINING = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim",
    COMPILER,
)
# The variable of the environment in which the fork server finds names of further modules. Where no
# modules are named to `fork_server_context`, as for a user's own cases, it replaces FOR_TRAINING.
FURTHER = "C10D_CONFORMANCE_PRELOAD"
_OUTPUT_BYTES_KEPT = 64 * 1024
_OUTPUT_BYTES_MAX = 16 * 1024 * 1024
_STACKS_WAIT_S = 2.0
_SHORT_BYTES = 512  # of an answer that is remembered
_FATAL = "Fatal Python error"  # how `faulthandler` begins
_EXIT_CODE_UNKNOWN = 255  # what multiprocessing says of a process whose end it did not see
_PLACE_IN_A_JOB = re.compile(
    r"MASTER_(ADDR|PORT)|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|TORCHELASTIC_\w+"
)

_FILES_GONE = "; has a rank removed the run's temporary files?"  # the fork server's socket


class HarnessFault(Exception):
    """The harness itself failed; nothing can be said of the target."""


def fork_server_context(also: Sequence[str] | None = None) -> ForkServerContext:
    """The context whose fork server this process uses; the server starts here, if it must.

    A process has one fork server, which may have been started for something else.

    also: modules that a server which starts here imports beside those that all ranks need; None
        for what training needs, unless the environment names others.
    Raises HarnessFault if it cannot be started.
    """
    if also is None:
        also = os.environ[FURTHER].split() if FURTHER in os.environ else FOR_TRAINING
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD])
    # The server does not take our sys.path, and its BLAS must not start threads before it forks.
    # Nor do ranks inherit our place in a job of a launcher's: a group that a case makes from the
    # environment or a URL would look for that job's store. And they check by `assert`.
    changes: dict[str, str | None] = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONOPTIMIZE": None,
        FURTHER: " ".join(also),
    }
    with _environment(changes | dict.fromkeys(filter(_PLACE_IN_A_JOB.fullmatch, os.environ))):
        try:
            _wake_fork_server()
            forkserver.ensure_running()
        except OSError as error:  # "AF_UNIX path too long": its socket lies in TMPDIR
            where = tempfile.gettempdir()
            advice = "; set TMPDIR to a shorter folder" if "path too long" in str(error) else ""
            raise HarnessFault(
                f"cannot start the fork server in {where}: {error}{advice}"
            ) from error
    return context


def _wake_fork_server() -> None:
    """Continue it in case a rank has stopped it: starting a process would block for ever."""
    if (pid := _pid_of_fork_server()) is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _pid_of_fork_server() -> int | None:
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # not in the stub
    return pid


@contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """The environment with these variables, and without those that are None."""
    before = {name: os.environ.get(name) for name in changes}
    _change_environment(changes)
    try:
        yield
    finally:
        _change_environment(before)


def _change_environment(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class RankProcess:
    """One warm process. Whoever makes it ends it with `kill`."""

    def __init__(self, index: int) -> None:
        context = fork_server_context()
        ours, theirs = context.Pipe()
        self._connection = ParentEnd(ours)
        self._output = _file_to_append_to()
        self._freed_bytes = 0  # of the output, from its beginning on
        self._stacks = _file_to_append_to()
        self._page_fd = _file_of_fixed_size(f"rank-{index}", PAGE_BYTES)
        self._page = Page(self._page_fd)
        self._process = context.Process(
            target=_enter,
            args=(
                theirs,
                _Descriptor(self._output.fileno()),
                _Descriptor(self._stacks.fileno()),
                _Descriptor(self._page_fd),
            ),
            name=f"rank-{index}",
            daemon=True,
        )
        try:
            self._process.start()
        except (OSError, EOFError) as error:
            self._close()
            hint = _FILES_GONE if isinstance(error, FileNotFoundError) else ""
            raise HarnessFault(f"cannot start rank process {index}: {error}{hint}") from error
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def waitables(self) -> list[Any]:
        """What `multiprocessing.connection.wait` can wait for: an answer, or its end."""
        return [self._connection, self._process.sentinel]

    @property
    def writable(self) -> list[Any]:
        """What to wait for, too, before a command is sent whole."""
        return [self._connection] if self._connection.has_more_to_write else []

    def tell(self, command: Command) -> None:
        """Begin to send a command; `answer_nowait` goes on. A process that has died is noticed by
        whoever waits for the answer."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(pack(command))

    def answer_nowait(self) -> Answer | Begun | Died | None:
        """What has come by now: that it has begun, an answer, the news of its death, or nothing."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.write()
        with suppress(EOFError, ConnectionResetError):
            try:
                data = self._connection.receive()
                if data is not None:
                    return _read_short(data) if len(data) <= _SHORT_BYTES else _read_answer(data)
            except (BrokenFrame, UnpicklingError) as error:
                return Garbled(f"the rank's code wrote where only the harness writes: {error}")
            if self._process.is_alive():
                return None
        self._process.join(5)
        code = self._process.exitcode
        last = self._page.read()
        return Died(
            code if code is not None else _EXIT_CODE_UNKNOWN,
            self._last_stacks(),
            last.text,
            last.in_it,
        )

    def last_collective(self) -> LastCollective:
        """The newest operation of `torch.distributed` that it issued."""
        return self._page.read()

    def stacks(self) -> str:
        """The Python stacks of all its threads, now; works while it is blocked in C."""
        self._stacks.truncate(0)
        try:
            os.kill(self.pid, signal.SIGUSR1)
        except ProcessLookupError:
            return "(the process is gone)"
        give_up_at = time.monotonic() + _STACKS_WAIT_S
        seen = b""
        while time.monotonic() < give_up_at:
            time.sleep(0.02)
            text = os.pread(self._stacks.fileno(), 1 << 16, 0)
            if text and text == seen:
                return text.decode(errors="replace")
            seen = text
        return seen.decode(errors="replace") or "(no answer to the request for stacks)"

    def _last_stacks(self) -> str:
        """What `faulthandler` wrote when a signal ended the process, or ""."""
        text = os.pread(self._stacks.fileno(), 1 << 16, 0).decode(errors="replace")
        return text if text.startswith(_FATAL) else ""

    def output(self) -> str:
        """The end of what it printed since `forget_output`."""
        before = max(0, self._output_bytes() - _OUTPUT_BYTES_KEPT)
        kept = os.pread(self._output.fileno(), _OUTPUT_BYTES_KEPT, before)
        text = kept.decode(errors="replace")
        return f"({before} bytes before this)\n{text}" if before > 0 else text

    def forget_output(self) -> None:
        """Drop what it has printed so far."""
        self._freed_bytes = 0
        os.ftruncate(self._output.fileno(), 0)

    def bound_output(self) -> None:
        """Keep a rank that prints without end from filling the memory.

        What is old becomes a hole in the file. The file is not cut short, as that would lose what
        the rank prints at that moment.
        """
        size = self._output_bytes()
        if size - self._freed_bytes <= _OUTPUT_BYTES_MAX:
            return
        old_bytes = size - _OUTPUT_BYTES_KEPT - self._freed_bytes
        old_bytes -= old_bytes % mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(self._output.fileno(), old_bytes, offset=self._freed_bytes) as old:
            old.madvise(mmap.MADV_REMOVE)
        self._freed_bytes += old_bytes

    def _output_bytes(self) -> int:
        return os.fstat(self._output.fileno()).st_size

    def kill(self) -> None:
        """End the process, its descendants and everything that it started in its session."""
        children = children_by_parent()
        # Some may have sessions of their own.
        descendants = [*_descendants(self.pid, children), *_orphans(children)]
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for pid in (self.pid, *descendants):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _wake_fork_server()  # which reports the exit code
        self._process.join(10)
        self._close()
        with suppress(ValueError):  # the kernel has not ended it yet; it will
            self._process.close()

    def _close(self) -> None:
        self._connection.close()
        self._page.close()
        os.close(self._page_fd)
        self._output.close()
        self._stacks.close()


def _orphans(children: Mapping[int, Sequence[int]]) -> list[int]:
    """Processes that dead ranks left behind; the fork server has adopted them."""
    ours = {process.pid for process in multiprocessing.active_children()}
    return [pid for pid in children.get(_pid_of_fork_server() or 0, ()) if pid not in ours]


def _descendants(pid: int, children: Mapping[int, Sequence[int]]) -> list[int]:
    """The process's children, their children and so on; not those that have lost their parent."""
    found = [*children.get(pid, ())]
    for child in found:  # which grows meanwhile
        found += children.get(child, ())
    return found


def _read_answer(data: bytes) -> Answer | Begun:
    said = unpack_from_rank(data)
    if not isinstance(said, Answer | Begun):
        raise UnpicklingError(f"{said!r} is no answer")
    return said


# Most answers only say that something is begun, done or left, always in the same bytes. They are
# immutable.
_read_short = lru_cache(maxsize=64)(_read_answer)


def _file_of_fixed_size(name: str, size: int) -> int:
    """A sealed file in memory: were it truncated, reading its mapping would raise SIGBUS."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def _file_to_append_to() -> IO[bytes]:
    """A file in memory. Whoever writes goes on at its end, also after it was cut short."""
    file = os.fdopen(os.memfd_create("of-a-rank"), "r+b")
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


class _Descriptor:
    """A file descriptor that becomes the new process's own on the way there."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self._fd),)


def _received(passed: Any) -> int:
    fd: int = passed.detach()
    return fd


def _enter(theirs: Any, output_fd: int, stacks_fd: int, page_fd: int) -> None:
    importlib.import_module(_PRELOAD)  # unless the fork server was started for something else
    # Imported here: what a rank runs is none of its parent's business.
    from conformance.harness.worker import rank_main

    rank_main(theirs, output_fd, stacks_fd, page_fd)
