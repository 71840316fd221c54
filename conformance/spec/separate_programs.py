"""Runs what ranks do in programs of their own, as torchrun starts them, instead of in forks.

Forks of one process have much in common that ranks of a real run do not: above all the seed of
Python's hashes, and with it the order of each set of names.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance import CheckFailed, Me, Ranks
from conformance.harness import devices
from conformance.spec.groups.starting import start
from conformance.spec.groups.stores import tcp_store
from conformance.spec.waiting import all_are_here
from conformance.target import Target, resolve

LIMIT_S = 60.0
_RIGHT = "exit code 0"
_STILL_RUNNING = "still running"
_PROGRAM = "from conformance.spec.separate_programs import program_of_a_rank; program_of_a_rank()"
# What MPI sets in processes that it has started, which cannot start others that use MPI.
_OF_MPI = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}


@dataclass(frozen=True)
class _Told:
    """What the program of a rank is told."""

    target: Target
    rank: int
    world_size: int
    device_type: str
    seed: int
    host: str
    port: int
    group_timeout_s: float
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    result_file: str


@dataclass(frozen=True)
class _Ended:
    """How the program of a rank has ended, what it has printed, and what the function returned."""

    how: str
    printed: str
    result: Any = None


def run_in_programs(bare_ranks: Ranks, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(me, *arguments)` returns on each rank, in a program with the default group.

    The program then destroys its groups, and is over. Function and arguments are pickled.
    Skips where MPI has started the ranks. Raises CheckFailed if a program ends in another way.
    """
    ended = bare_ranks.run(_run_a_program, function, arguments)
    if ended == [None] * bare_ranks.world_size:
        pytest.skip("a process that MPI has started cannot start others that use MPI")
    wrong = [(rank, program) for rank, program in enumerate(ended) if program.how != _RIGHT]
    if wrong:  # first one that has failed: others may be waiting for it
        rank, program = min(wrong, key=lambda each: each[1].how.startswith(_STILL_RUNNING))
        raise CheckFailed(f"the program of rank {rank}: {program.how}\n{program.printed}", rank)
    return [program.result for program in ended]


def _run_a_program(
    me: Me, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> _Ended | None:
    """None where MPI has started this process."""
    if _OF_MPI & os.environ.keys():
        return None
    store = tcp_store(me, "")
    with tempfile.TemporaryDirectory() as folder:
        told = _Told(
            target=me.target,
            rank=me.rank,
            world_size=me.world_size,
            device_type=me.device.type,
            seed=me.seed,
            host=me.host,
            port=int(me.store.get("port")),
            group_timeout_s=me.group_timeout_s,
            function=function,
            arguments=arguments,
            result_file=str(Path(folder, "result")),
        )
        ended = _start_and_wait(told)
        all_are_here(me, "seen the end of its program")
    del store
    return ended


def _start_and_wait(told: _Told) -> _Ended:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "PYTHONHASHSEED": str(told.rank + 1),
            },
            input=pickle.dumps(told),
            capture_output=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as over:
        printed = (over.stdout or b"").decode(errors="replace")
        return _Ended(f"{_STILL_RUNNING} after {LIMIT_S:.0f} s", printed)
    printed = (done.stdout + done.stderr[-2000:]).decode(errors="replace")
    if done.returncode:
        return _Ended(f"exit code {done.returncode}", printed)
    return _Ended(_RIGHT, printed, pickle.loads(Path(told.result_file).read_bytes()))


def program_of_a_rank() -> None:
    """The program of one rank; what it is told comes on its standard input."""
    told: _Told = pickle.load(sys.stdin.buffer)
    for module in told.target.imports:
        importlib.import_module(module)
    device = devices.place(told.device_type, told.rank)
    if device.type != devices.HOST:
        devices.compute_in_full(device.type)
    store = dist.TCPStore(told.host, told.port, wait_for_workers=False, use_libuv=False)
    me = Me(
        rank=told.rank,
        world_size=told.world_size,
        device=device,
        target=told.target,
        store=store,
        seed=told.seed,
        group_timeout_s=told.group_timeout_s,
        host=told.host,
    )
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        if told.target.activate:
            stack.enter_context(resolve(told.target.activate)())
        start(me, store)
        result = told.function(me, *told.arguments)
        Path(told.result_file).write_bytes(pickle.dumps(result))
        gc.collect()  # a wrapper in a circle must not outlive its group: see the harness, `_leave`
        dist.destroy_process_group()
    print("it has destroyed its groups", flush=True)
