"""Runs Python commands in processes that have torch already, so that they begin two seconds sooner.

[Note: warm processes]
To import torch takes two seconds, and most commands under test do it twice: in their process and in
its fork server. `run_python` forks both from one process that has imported torch, and little else.
Such a command has its own arguments, environment, folder and descriptors. It differs from one that
was started in a new interpreter in this:

- Options of the interpreter cannot be given. Of the variables that Python reads as it starts,
  PYTHONPATH and PYTHONWARNINGS have an effect, the latter not on warnings of torch's import.
  Variables that torch and its libraries read while they are imported (OMP_NUM_THREADS,
  OPENBLAS_NUM_THREADS) are those of this process.
- What torch imports is there, also for a module that forgets to import it.
- /proc shows the command line and the environment of the process that it was forked from.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import multiprocessing.process
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import util
from pathlib import Path
from typing import Any

_BYTES_MAX = 1 << 20
_OUTPUT_AND_ERROR = (1, 2)
# Before any test changes it.
_ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}


# ---- In a test


def run_python(
    *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS`: a script, or `-m MODULE`, and what follows. Its input is empty.

    It is over when its process has ended, and no other has its output open.

    env: by default that of this process.
    Raises subprocess.TimeoutExpired; the process, but none that it started, is killed then.
    Raises RuntimeError if it could not be forked.
    """
    command = [sys.executable, *arguments]
    environment = dict(os.environ if env is None else env)
    request = {"arguments": arguments, "cwd": str(cwd), "env": environment}
    server = _server()
    reading, writing = zip(os.pipe(), os.pipe(), strict=True)
    try:
        try:
            server.begin(request, writing)
        finally:
            _close(writing)
        status, out, err = server.end(reading, timeout_s)
    except BaseException:  # the next answer would be that to this command
        server.close()
        _server.cache_clear()
        raise
    finally:
        _close(reading)
    if status is None:
        raise subprocess.TimeoutExpired(command, timeout_s, out, err)
    return subprocess.CompletedProcess(command, status, out, err)


@cache
def _server() -> _Server:
    return _Server()


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Server:
    """The process that all commands are forked from, one after the other.

    It ends after this process and the last command. For each command it sends the process id, and
    then the exit status.
    """

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            cwd="/",
            env=_ENVIRONMENT,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()

    def begin(self, request: Mapping[str, Any], writing: Sequence[int]) -> None:
        """Fork the command, with these descriptors for its output and errors."""
        with contextlib.suppress(BrokenPipeError):  # told where the answer is missing
            socket.send_fds(self._connection, [json.dumps(request).encode()], writing)
        self._pid = self._receive_number()

    def end(self, reading: Sequence[int], timeout_s: float) -> tuple[int | None, str, str]:
        """The exit status, None if it did not end in time; what it wrote to both pipes."""
        until_s = time.monotonic() + timeout_s
        status = None
        written: dict[int, bytearray] = {end: bytearray() for end in reading}
        with selectors.DefaultSelector() as selector:
            for source in (self._connection.fileno(), *reading):
                selector.register(source, selectors.EVENT_READ)
            while selector.get_map() and time.monotonic() < until_s:
                for key, _ in selector.select(until_s - time.monotonic()):
                    if key.fd == self._connection.fileno():
                        status = self._receive_number()
                        selector.unregister(key.fd)
                    elif data := os.read(key.fd, _BYTES_MAX):
                        written[key.fd] += data
                    else:
                        selector.unregister(key.fd)
            is_over = not selector.get_map()
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._receive_number()
        out, err = (bytes(text).decode(errors="replace") for text in written.values())
        return (status if is_over else None), out, err

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _receive_number(self) -> int:
        try:
            message = self._connection.recv(_BYTES_MAX)
        except ConnectionError:
            message = b""
        if not message:
            raise RuntimeError(f"{__file__} ended, exit code {self._process.wait()}")
        return int(message)


# ---- In the process that commands are forked from, and in those processes


def _serve(connection: socket.socket) -> None:
    """Fork a process for each command, one after the other. In that process, run the command."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _BYTES_MAX, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            _run(json.loads(message), descriptors)
            return
        _close(descriptors)
        connection.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _run(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    _move(descriptors, _OUTPUT_AND_ERROR)
    os.chdir(request["cwd"])
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]  # type: ignore[attr-defined]  # not in the stub
    what, *others = request["arguments"]
    first_folder = request["cwd"] if what == "-m" else os.path.dirname(os.path.realpath(what))
    _take_environment(request["env"], first_folder)
    sys.warnoptions[:] = filter(None, os.environ.get("PYTHONWARNINGS", "").split(","))
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]  # not in the stub
    _prefork_fork_server()
    if what == "-m":
        module, *others = others
        sys.argv = ["-m", *others]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [what, *others]
        script = types.ModuleType("__main__")
        script.__file__ = os.path.abspath(what)
        # Both names, as `import multiprocessing` does it: so objects from other processes unpickle.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = script
        text = Path(what).read_bytes()
        exec(compile(text, script.__file__, "exec", dont_inherit=True), vars(script))


def _take_environment(environment: Mapping[str, str], first_folder: str) -> None:
    """first_folder: what the path for imports begins with."""
    os.environ.clear()
    os.environ.update(environment)
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path = [first_folder, *named, *_PATH]


def _prefork_fork_server() -> None:
    """Fork a process that becomes multiprocessing's fork server when this one starts it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_fork_server(theirs)
        os._exit(0)
    theirs.close()
    start = util.spawnv_passfds

    def start_or_use_preforked(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        program = args[-1]
        if "multiprocessing.forkserver" not in program:
            return start(path, args, passfds)
        util.spawnv_passfds = start  # another one is started as usual
        passed = [*_OUTPUT_AND_ERROR, *passfds]
        request = {"program": program, "numbers": passed}
        request |= {"cwd": os.getcwd(), "env": dict(os.environ)}
        socket.send_fds(ours, [json.dumps(request).encode()], passed)
        ours.close()
        return pid

    util.spawnv_passfds = start_or_use_preforked


def _become_fork_server(connection: socket.socket) -> None:
    message, descriptors, _, _ = socket.recv_fds(connection, _BYTES_MAX, 16)
    connection.close()
    if message:  # not so if the command has ended without a fork server
        request = json.loads(message)
        _move(descriptors, request["numbers"])
        os.chdir(request["cwd"])
        _take_environment(request["env"], "")
        exec(compile(request["program"], "<string>", "exec", dont_inherit=True), {})


def _move(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Let these descriptors have these numbers, whatever had them before."""
    above = max(*descriptors, *numbers) + 1
    copies = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, above) for one in descriptors]
    _close(descriptors)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number, inheritable=number in _OUTPUT_AND_ERROR)
        os.close(copy)


if __name__ == "__main__":
    _PATH = sys.path[1:]  # without the folder of this file
    sys.path = _PATH
    import torch.distributed  # noqa: F401  # so that no command needs to

    gc.freeze()  # or each command collects all of torch as it ends, and copies its memory for that
    _serve(socket.socket(fileno=int(sys.argv[1])))
