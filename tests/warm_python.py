"""Runs Python commands in processes that have torch already, so that they begin two seconds sooner.

[Note: warm processes]
To import torch takes two seconds, and most commands under test do it twice: in their process and in
its fork server. `run_python` has both forked from one process that has imported it. Such a command
is as new as any other: nothing but torch is imported, and it has its own arguments, environment,
folder and descriptors. It differs from one that was started in this:

- Options of the interpreter cannot be given. Of the variables that Python reads as it starts,
  PYTHONPATH and PYTHONWARNINGS have an effect.
- /proc shows the command line and the environment of the process that it was forked from.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing.process
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import util
from pathlib import Path
from typing import Any

_BYTES_MAX = 1 << 20
_STANDARD = (1, 2)  # output and error


# ---- In a test


def run_python(
    *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS`: a script, or `-m MODULE`, and what follows. Its input is empty.

    env: by default that of this process.
    Raises subprocess.TimeoutExpired; the process is killed then.
    """
    command = [sys.executable, *arguments]
    request = {
        "arguments": arguments,
        "cwd": str(cwd),
        "env": dict(os.environ if env is None else env),
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        server, _ = _server()
        socket.send_fds(server, [json.dumps(request).encode()], [out.fileno(), err.fileno()])
        pid = int(server.recv(_BYTES_MAX))
        server.settimeout(timeout_s)
        try:
            status = int(server.recv(_BYTES_MAX))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            server.settimeout(None)
            server.recv(_BYTES_MAX)
            raise subprocess.TimeoutExpired(command, timeout_s) from None
        finally:
            server.settimeout(None)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(
            command, status, out.read().decode(), err.read().decode()
        )


@cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The process that all commands are forked from, and the connection to it. It ends with this
    one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        cwd="/",
        env=environment,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    theirs.close()
    return ours, process


# ---- In the process that commands are forked from, and in those processes


def _serve(server: socket.socket) -> None:
    """Fork a process for each command, one after the other. In that process, run the command."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, _BYTES_MAX, len(_STANDARD))
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            server.close()
            _run(json.loads(message), descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        server.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        server.send(str(os.waitstatus_to_exitcode(status)).encode())


def _run(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    _move(descriptors, _STANDARD)
    os.chdir(request["cwd"])
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]  # type: ignore[attr-defined]  # not in the stub
    what, *others = request["arguments"]
    first = request["cwd"] if what == "-m" else os.path.dirname(os.path.realpath(what))
    _take_environment(request["env"], first)
    sys.warnoptions[:] = filter(None, os.environ.get("PYTHONWARNINGS", "").split(","))
    for action in sys.warnoptions:
        warnings.simplefilter(action)
    random.seed()
    _keep_a_fork_server_ready()
    if what == "-m":
        module, *others = others
        sys.argv = ["-m", *others]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [what, *others]
        # Not by runpy: for multiprocessing, classes of the script are those of "__mp_main__".
        script = types.ModuleType("__main__")
        script.__file__ = what
        sys.modules["__main__"] = sys.modules["__mp_main__"] = script
        exec(compile(Path(what).read_bytes(), what, "exec"), vars(script))


def _take_environment(environment: Mapping[str, str], first: str) -> None:
    """first: the folder that the path for imports begins with."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *_PATH]


def _keep_a_fork_server_ready() -> None:
    """Fork a process that becomes the fork server of this one, as soon as it is asked for."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_fork_server(theirs)
        os._exit(0)
    theirs.close()
    start = util.spawnv_passfds

    def start_or_ask(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        program = args[-1]
        if "multiprocessing.forkserver" not in program:
            return start(path, args, passfds)
        util.spawnv_passfds = start  # another one would be started as usual
        request = {"program": program, "numbers": list(passfds), "env": dict(os.environ)}
        socket.send_fds(ours, [json.dumps(request).encode()], passfds)
        ours.close()
        return pid

    util.spawnv_passfds = start_or_ask


def _become_fork_server(asks: socket.socket) -> None:
    message, descriptors, _, _ = socket.recv_fds(asks, _BYTES_MAX, 16)
    asks.close()
    if message:  # and not the end of a process that needs none
        request = json.loads(message)
        _move(descriptors, request["numbers"])
        _take_environment(request["env"], "")
        exec(request["program"], {})


def _move(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Let these descriptors have these numbers, whatever had them before."""
    above = max(*descriptors, *numbers) + 1
    copies = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, above) for one in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number, inheritable=number in _STANDARD)
        os.close(copy)


if __name__ == "__main__":
    _PATH = sys.path[1:]  # without the folder of this file
    sys.path = _PATH
    import torch.distributed  # noqa: F401

    _serve(socket.socket(fileno=int(sys.argv[1])))
