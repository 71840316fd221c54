"""How a stand-alone script starts its ranks; the text of this module is copied into every one.

So it uses torch and the standard library alone, and its classes have the attributes that the
harness gives to a rank's function (see `conformance.harness.me`) and no more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

START_WITHIN_S = 120.0  # until every rank has imported torch and made its group
GRACE_S = 3.0  # for the others, once a rank has failed

# Messages of a rank: what to print, and what is wrong with it.
THERE = ("joined", "")


@dataclass(frozen=True)
class Target:
    """The implementation under test. Functions and classes of it are named "module:attribute"."""

    name: str
    backend: str
    imports: tuple[str, ...] = ()
    device: str = "cpu"
    ddp: str = ""
    fsdp: str = ""
    sync_batchnorm: str = ""
    options: str = ""
    activate: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class World:
    """One world of ranks, and what it runs.

    runs: functions, each with its arguments rank by rank; the last one is what this is about.
    want: what each rank should return, where that is known.
    differ: says how a value differs from what is wanted, if it does; None if only returning counts.
    alike: whether all ranks should return the same; then `want` is not looked at.
    unjudged: why this script cannot tell PASS from FAIL, or "".
    """

    target: Target
    world_size: int
    runs: Sequence[tuple[Callable[..., Any], Sequence[Sequence[Any]]]]
    want: Sequence[Any] | None = None
    differ: Callable[[Any, Any], Any] | None = None
    alike: bool = False
    unjudged: str = ""
    device: str = "cpu"
    seed: int = 0
    default_group: bool = True
    group_timeout_s: float = 300.0
    deadline_s: float = 60.0


@dataclass(frozen=True)
class Me:
    """One rank of the world, as its function sees it."""

    rank: int
    world_size: int
    device: torch.device
    target: Target
    store: dist.Store
    seed: int
    group_timeout_s: float
    host: str = "127.0.0.1"

    @cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + 1000 * self.rank)

    @cached_property
    def options(self) -> Any:
        return find_reference(self.target.options)() if self.target.options else None

    def ddp(self, module: torch.nn.Module, **kwargs: Any) -> Any:
        wrapper = find_reference(self.target.ddp)
        return wrapper(module, **taken(wrapper, self.target.arguments.get("ddp"), kwargs))

    def fsdp(self, module: torch.nn.Module, **kwargs: Any) -> Any:
        wrapper = find_reference(self.target.fsdp)
        kwargs.setdefault("device_id", self.device)
        return wrapper(module, **taken(wrapper, self.target.arguments.get("fsdp"), kwargs))

    def sync_batchnorm(self) -> Any:
        return find_reference(self.target.sync_batchnorm)


def taken(
    wrapper: Callable[..., Any], named: Sequence[str] | None, given: dict[str, Any]
) -> dict[str, Any]:
    """Arguments that the wrapper has; the others are torch's defaults."""
    parameters = inspect.signature(wrapper).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if named is None and takes_any:
        return given
    has = parameters if named is None else named
    return {name: value for name, value in given.items() if name in has}


def find_reference(reference: str) -> Any:
    """The object that "module:attribute" names."""
    module, _, attribute = reference.partition(":")
    found: Any = importlib.import_module(module)
    for name in attribute.split("."):
        found = getattr(found, name)
    return found


def rank_main(pipe: Connection, world: World, rank: int, port: int) -> None:
    """One rank: makes the group, says that it is there, runs, and says what came of it."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        try:
            me = join_the_world(world, rank, port, stack)
            pipe.send(THERE)
            value: Any = None
            for function, args in world.runs:
                value = function(me, *args[rank])
            difference = None
            if world.differ is not None:
                difference = world.differ(value, wanted_of(world, me, value))
            pipe.send((f"returned {value!r}", str(difference or "")))
        except BaseException:
            pipe.send((f"raised\n{traceback.format_exc()}", "an exception"))
        with contextlib.suppress(EOFError):  # others may still need this rank
            pipe.recv()


def wanted_of(world: World, me: Me, value: Any) -> Any:
    """What this rank should have returned, if not this value."""
    if not world.alike:
        return world.want[me.rank] if world.want else None
    if me.rank == 0:
        me.store.set("alone/value of rank 0", pickle.dumps(value))  # type: ignore[arg-type]  # takes bytes
    return pickle.loads(me.store.get("alone/value of rank 0"))


def join_the_world(world: World, rank: int, port: int, stack: contextlib.ExitStack) -> Me:
    """Make this process one rank of the world."""
    target = world.target
    os.environ.update(target.env)
    for module in target.imports:
        importlib.import_module(module)
    device = torch.device("cpu")
    if world.device != "cpu":
        device = torch.device(world.device, rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False
    random.seed(world.seed)
    np.random.seed(world.seed % 2**32)
    torch.manual_seed(world.seed)
    store = dist.TCPStore("127.0.0.1", port)
    me = Me(rank, world.world_size, device, target, store, world.seed, world.group_timeout_s)
    if target.activate:
        stack.enter_context(find_reference(target.activate)())
    if world.default_group:
        dist.init_process_group(
            target.backend,
            store=dist.PrefixStore("default", store),
            rank=rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=world.group_timeout_s),
            pg_options=find_reference(target.options)() if target.options else None,
        )
    return me


def run_world(world: World, main_of_rank: Callable[..., None]) -> int:
    """Start the ranks, wait for them, and print what came of each; 0 PASS, 1 FAIL, 2 not judged.

    main_of_rank: calls `rank_main` with a pipe, the world, a rank and the store's port.
    """
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    for rank in range(world.world_size):
        ours, theirs = context.Pipe()
        started = context.Process(target=main_of_rank, args=(theirs, rank, store.port), daemon=True)
        started.start()
        theirs.close()
        pipes.append(ours)
        processes.append(started)
    try:
        seen = collect_messages(pipes, processes, START_WITHIN_S)
        if all(message == THERE for message in seen):
            seen = collect_messages(pipes, processes, world.deadline_s)
        return tell_outcomes(world, seen)
    finally:
        for process in processes:
            process.kill()
            process.join()


def collect_messages(
    pipes: Sequence[Connection], processes: Sequence[BaseProcess], deadline_s: float
) -> list[Any]:
    """The next message of each rank; for one that sends none, a pair as ranks send it."""
    seen: list[Any] = [None] * len(pipes)
    give_up_at = time.monotonic() + deadline_s
    while None in seen and time.monotonic() < give_up_at:
        open_pipes = [pipe for pipe, message in zip(pipes, seen, strict=True) if message is None]
        wait(open_pipes, 0.2)
        for rank, pipe in enumerate(pipes):
            if seen[rank] is None and pipe.poll():
                try:
                    seen[rank] = pipe.recv()
                except EOFError:
                    processes[rank].join(5)
                    seen[rank] = (f"died: exit code {processes[rank].exitcode}", "died")
                if seen[rank][1]:
                    give_up_at = min(give_up_at, time.monotonic() + GRACE_S)
    for rank, message in enumerate(seen):
        if message is None:
            print(f"stacks of rank {rank}:", file=sys.stderr, flush=True)
            if (pid := processes[rank].pid) is not None:
                os.kill(pid, signal.SIGUSR1)
            processes[rank].join(0.5)  # time to write them down
            seen[rank] = ("was still running", "still running")
    return seen


def tell_outcomes(world: World, seen: Sequence[Any]) -> int:
    """Print what came of each rank, what was wanted and the verdict; returns the exit code."""
    for rank, (text, difference) in enumerate(seen):
        print(f"rank {rank} {text}")
        if difference and text.startswith("returned"):
            print(f"    differs {difference}")
    for rank, value in enumerate(world.want or ()):
        print(f"rank {rank} should return {value!r}" if world.differ else f"wanted: {value!r}")
    if world.unjudged:
        print(f"CANNOT JUDGE: {world.unjudged}")
        return 2
    wrong = [rank for rank, (_, difference) in enumerate(seen) if difference]
    if wrong:
        print(f"FAIL: {'ranks' if wrong[1:] else 'rank'} {', '.join(map(str, wrong))}")
        return 1
    print(f"PASS: every rank returned {'what it should' if world.differ else 'in time'}")
    return 0
