"""The main loop of a rank process: joins a world, runs functions, restores process-wide state.

The process is forked from a server that has torch imported and has no threads. It talks to its
parent over one pipe; its standard output and error go into a file, its last collective into a page,
and its stacks, when asked for by a signal, into another file.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import multiprocessing
import os
import random
import signal
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from conformance.harness import devices
from conformance.harness.device_lacks import watching
from conformance.harness.frames import RankEnd
from conformance.harness.leaks import (
    Holdings,
    adopt_orphans,
    find_leaks_and_census,
    set_apart,
    still_alive,
    take_census,
)
from conformance.harness.me import Me
from conformance.harness.messages import (
    Answer,
    Begun,
    Call,
    Command,
    Done,
    End,
    Failed,
    Join,
    Leave,
    Left,
    Lost,
    Prepare,
    unpack,
)
from conformance.harness.missing_methods import explain_missing_method
from conformance.harness.outcome import message_of, type_name
from conformance.harness.process_state import (
    Switches,
    changed_between,
    stop_timers,
    take_switches,
)
from conformance.harness.recorder import Page, Recorder
from conformance.harness.restricted_pickle import pack_for_parent
from conformance.target import Target, resolve
from conformance.torch_private import (
    empty_lost_meshes,
    forget_group_count,
    forget_group_of_grad_scaler,
    forget_meshes,
    on_new_group,
)

T = TypeVar("T")

DUMP_SIGNAL = signal.SIGUSR1
_F_SETSIG = 10  # Linux; the fcntl module does not name it
_MOST_CHARACTERS = 1 << 18
_STORE_TIMEOUT = timedelta(seconds=300)


def rank_main(connection: Connection, output_fd: int, stacks_fd: int, page_fd: int) -> None:
    """The life of a rank process."""
    _detach()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    stacks = os.fdopen(stacks_fd, "w")
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_SIGNAL, stacks, all_threads=True)
    torch.set_num_threads(1)
    warnings.resetwarnings()  # how the parent was started is none of the target's business
    warnings.simplefilter("default")
    parent = RankEnd(connection)
    worker = Worker(Recorder(Page(page_fd)), lambda: parent.send(pack_for_parent(Begun())))
    while True:
        try:
            command: Command = unpack(parent.receive())
        except (EOFError, OSError):
            os._exit(0)
        if isinstance(command, End):
            _end()
        answer = worker.obey(command)
        try:
            parent.send(pack_for_parent(answer))
        except OSError:  # the parent is gone
            os._exit(0)


def _end() -> None:
    """End as Python ends, although it was forked: libraries may have asked for a last call, as
    mpi4py has for `MPI_Finalize`, without which a job cannot start MPI again."""
    ctypes.pythonapi.Py_Exit(0)


def _detach() -> None:
    """A session of our own, so that Ctrl-C reaches the parent alone; and no life after the parent.
    What a case starts stays below this process, also if its own parent ends, as a daemon's does.

    The kernel sends SIGKILL when the parent's end of a pipe closes: that needs no thread and works
    while this process is blocked in C. It goes to the session's process group, with whatever a case
    has started in it; so does what the parent itself sends.
    """
    os.setsid()
    adopt_orphans()
    # A daemon for its parent, which does not wait for it; but it may start processes of its own, as
    # a DataLoader does.
    multiprocessing.current_process().daemon = False
    parent = multiprocessing.parent_process()
    assert parent is not None
    fd = parent.sentinel
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():  # it died before the lines above
        os._exit(0)


@dataclass(frozen=True, slots=True)
class _State:
    """A process when no world is joined.

    where: target, search path, device and number of stores of the last world, and the number of
        modules that were imported when it ended.
    """

    where: object
    census: Holdings
    switches: Switches


class Worker:
    """Obeys one command at a time; holds the world between `Join` and `Leave`."""

    def __init__(self, recorder: Recorder, begin: Callable[[], None]) -> None:
        """begin: called when a command has what it needs, before the target or the case runs."""
        self._recorder = recorder
        self._begin = begin
        self._search_path: tuple[str, ...] = ()
        self._stores: dict[tuple[str, int], dist.TCPStore] = {}
        self._me: Me | None = None
        self._undo = contextlib.ExitStack()
        self._groups: list[tuple[str, weakref.ref[Any]]] = []
        on_new_group(
            lambda name, group: self._groups.append((f"group {name!r}", weakref.ref(group)))
        )
        self._before: _State | None = None  # None: to be taken when the next world is joined
        self._joined: object = None
        self._place: torch.device | None = None  # of the tensors of the last world
        self._pid = os.getpid()
        self._modules_apart = 0
        self._lacking: tuple[str, tuple[str, ...]] = (devices.HOST, ())  # a type, and what it lacks

    def obey(self, command: Command) -> Answer:
        """Do as told. Whatever the case's code raises becomes an answer."""
        if isinstance(command, Leave):
            return self._leave()
        try:
            if isinstance(command, Prepare):
                outside = _import(command.target, command.search_path)
                _restore_environment(_without_target(outside))
                _check_device(command.target.device)
                return Done(b"")
            if isinstance(command, Join):
                self._join(command)
                return Done(b"")
        except BaseException as error:
            return _failed(error)
        assert isinstance(command, Call)
        return self._call(command)

    def _call(self, call: Call) -> Answer:
        try:
            function, args = unpack(call.payload)
        except Exception as error:
            why = f"{type_name(type(error))}: {message_of(error)}"
            return Lost(f"the rank cannot load its function: {why}")
        self._begin()
        self._recorder.expect_calls()
        try:
            with watching(*self._lacking, self._recorder.note):
                value = function(self._me, *args)
        except BaseException as error:
            self._end_if_forked(error)
            here = error.__traceback__
            error = error.with_traceback(here.tb_next or here if here else None)
            return replace(_failed(error), refused=self._recorder.refused(function_raised=True))
        self._end_if_forked()
        try:
            return Done(pack_for_parent(value), self._recorder.refused(function_raised=False))
        except BaseException as error:  # raised by the value's own code
            return Lost(f"the returned value is of no use: {message_of(error)}")

    def _end_if_forked(self, error: BaseException | None = None) -> None:
        """End a process that the function has forked, as Python would. It is no rank: what comes of
        it must not be taken for the rank's answer.

        error: what the function raised in it.
        """
        if os.getpid() == self._pid:
            return
        code = 0
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            code = 1
            traceback.print_exception(error)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)

    def _join(self, join: Join) -> None:
        outside = _import(join.target, join.search_path)
        self._set_modules_apart()
        # Before the census: both live as long as the process.
        device = self._device(join)
        store = dist.PrefixStore(join.prefix, self._connected(join.host, join.port))
        self._joined = join.target, join.search_path, device, len(self._stores)
        self._place = device
        where = self._joined, len(sys.modules)
        if self._before is None or self._before.where != where:
            self._before = _State(where, take_census(), take_switches())
        self._begin()
        self._recorder.reset()
        self._undo.enter_context(_ProcessState(join, outside))
        self._me = me = Me(
            rank=join.rank,
            world_size=join.world_size,
            device=device,
            target=join.target,
            store=store,
            seed=join.seed,
            group_timeout_s=join.group_timeout_s,
            host=join.host,
        )
        if join.target.activate:
            self._undo.enter_context(resolve(join.target.activate)())
        if join.default_group:
            _make_default_group(me)

    def _device(self, join: Join) -> torch.device:
        device = devices.place(join.device, join.rank)
        if device.type != devices.HOST:
            devices.compute_in_full(device.type)
            devices.warm_up(device)
        if device.type != self._lacking[0]:
            self._lacking = device.type, devices.lacks(device.type)
        return device

    def _set_modules_apart(self) -> None:
        """What has been imported outlives every world: the collector need not look at it again."""
        if len(sys.modules) != self._modules_apart:
            gc.collect()
            if self._modules_apart:
                set_apart()
            else:  # before the first world
                gc.freeze()
            self._modules_apart = len(sys.modules)

    def _connected(self, host: str, port: int) -> dist.TCPStore:
        """The parent's store. One connection serves all worlds: for each new one the server looks
        up the name of its address, which takes seconds where a name server is slow."""
        store = self._stores.get((host, port))
        if store is None:
            store = self._stores[host, port] = dist.TCPStore(host, port)
        store.set_timeout(_STORE_TIMEOUT)  # the case before may have changed it
        return store

    def _leave(self) -> Left:
        leaks: list[str] = []
        stop_timers()
        # A wrapper that a failed case left in a circle must not outlive its group: torch's Reducer
        # would be the last to let go of it, and wait for Gloo's threads with the interpreter's lock
        # held, while one of them waits for that lock to drop a Python object (torch 2.13.0).
        gc.collect()
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
            forget_group_count()
            forget_meshes(self._place)
            forget_group_of_grad_scaler()
            empty_lost_meshes()
            self._undo.close()
        except BaseException as error:
            leaks.append(f"cleaning up raised {type_name(type(error))}: {error}")
        self._undo = contextlib.ExitStack()
        self._me = None
        gc.collect()
        groups = still_alive(self._groups)
        self._groups.clear()
        before = self._before
        assert before is not None, "no world was joined"
        held, census = find_leaks_and_census(before.census)
        switches = take_switches(before.switches)
        changed = changed_between(before.switches, switches)
        # The next world begins with this state, unless a thread goes on or something may yet go.
        is_settled = len(census.threads) == 1 and not (leaks or groups or held or changed)
        where = self._joined, len(sys.modules)
        self._before = _State(where, census, switches) if is_settled else None
        if is_settled:
            set_apart()
        return Left((*leaks, *groups), held, changed)


def _import(target: Target, search_path: Sequence[str]) -> Mapping[str, str | None]:
    """Import the target's modules; what its environment variables were before, None if they were
    not."""
    for path in search_path:
        if path not in sys.path:
            sys.path.append(path)
    outside = {name: os.environ.get(name) for name in target.env}
    os.environ.update(target.env)  # modules may read it when they are imported
    for module in target.imports:
        importlib.import_module(module)
    return outside


def _without_target(outside: Mapping[str, str | None]) -> dict[str, str]:
    """The environment without the target's variables.

    outside: what they were before, None if they were not.
    """
    return {name: v for name, v in {**os.environ, **outside}.items() if v is not None}


class _ProcessState(contextlib.ExitStack):
    """Everything process-wide that a case may change, put back at the end."""

    def __init__(self, join: Join, outside: Mapping[str, str | None]) -> None:
        """outside: what the target's environment variables were before, None if they were not."""
        super().__init__()
        self.callback(_restore_environment, _without_target(outside))
        self.callback(os.chdir, os.getcwd())
        # torch puts one more around it for each default group.
        self.callback(setattr, sys, "excepthook", sys.excepthook)
        self.callback(torch.set_num_threads, torch.get_num_threads())
        self.callback(torch.set_default_dtype, torch.get_default_dtype())
        self.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        self.callback(_restore_determinism, torch.are_deterministic_algorithms_enabled())
        self.callback(dist.set_debug_level, dist.get_debug_level())
        self.enter_context(warnings.catch_warnings())
        random.seed(join.seed)
        np.random.seed(join.seed % 2**32)
        devices.seed(join.device, join.seed)


def _restore_determinism(wanted: bool) -> None:
    # Only when it changed: the setter imports a compiler, which takes more than a second.
    if torch.are_deterministic_algorithms_enabled() != wanted:
        torch.use_deterministic_algorithms(wanted)


def _restore_environment(wanted: dict[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _check_device(type: str) -> None:
    why = devices.why_unusable(type)
    if why:
        raise RuntimeError(why)


def _failed(error: BaseException) -> Failed:
    kind = type(error)
    message = message_of(error)
    return Failed(
        _tried(lambda: type_name(kind), "an exception that has no name"),
        _cut(message),
        _cut(_tried(lambda: "".join(traceback.format_exception(error)), "")),
        _tried(lambda: tuple(map(type_name, kind.__mro__)), ()),
        hint=explain_missing_method(error, message),
    )


def _cut(text: str) -> str:
    """Beginning and end of a text that is too long for a report."""
    left_out = len(text) - _MOST_CHARACTERS
    if left_out <= 0:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]}\n({left_out} characters left out)\n{text[-half:]}"


def _tried(tell: Callable[[], T], otherwise: T) -> T:
    """What an exception tells of itself, where its own code does not fail."""
    try:
        return tell()
    except Exception:
        return otherwise


def _make_default_group(me: Me) -> None:
    backend = me.target.backend
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default", me.store),
            rank=me.rank,
            world_size=me.world_size,
            timeout=timedelta(seconds=me.group_timeout_s),
            pg_options=me.options,
        )
    except TypeError as error:
        if "_register_backend" not in str(error):
            raise
        raise TypeError(
            f"the function that the backend {backend!r} is registered with returned neither a "
            "ProcessGroup nor a Backend of torch.distributed"
        ) from error
