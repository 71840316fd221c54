"""Processes that die, fork or simply end: what the others see. The rest is simulated."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from impl import errors
from impl.transport.base import Communicator
from impl.transport.sockets.tcp import connect_tcp
from tests.impl.gloo.ranks import on_processes
from tests.impl.transport.combines import SUM
from tests.impl.transport.ranks import MODES, SINGLE, Calls, Loopback, connected, soon


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))


@pytest.fixture
def port() -> Any:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port
    del server


def endless_collectives(comm: Communicator) -> None:
    calls = Calls()
    x, whole = torch.ones(30_000), torch.ones(30_000 * comm.world_size)
    while True:
        comm.all_reduce(x, SUM, calls("all_reduce"), soon())
        comm.broadcast(x, 0, calls("broadcast"), soon())
        comm.reduce_scatter(x, whole, SUM, calls("reduce_scatter"), soon())
        comm.all_gather(whole, x, calls("all_gather"), soon())
        comm.barrier(calls("barrier"), soon())


def leave_a_child_and_die(done: str) -> None:
    """As a rank does that is killed while its data loader's workers live on for a while.

    The child, which has inherited all descriptors, stays until the file `done` is there. If nobody
    makes it, because the child hides its parent's death, the child says so in another file.
    """
    if os.fork() == 0:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        patience_ends_s = time.monotonic() + 20
        while not os.path.exists(done):
            time.sleep(0.01)
            if time.monotonic() > patience_ends_s:
                Path(f"{done}-in-vain").touch()
                break
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def lose_one(rank: int, world_size: int, port: int, mode: str, done: str) -> tuple[str, str, float]:
    store = client(port)
    victim = world_size - 1
    with connected(mode, dist.PrefixStore("first", store), rank, world_size) as comm:
        if rank == victim:
            signal.signal(signal.SIGALRM, lambda *_: leave_a_child_and_die(done))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            endless_collectives(comm)
        except errors.PeerLost as error:
            first = str(error)
        with pytest.raises(errors.PeerLost) as again:
            comm.barrier(Calls()("barrier"), soon())
        assert mode == "gloo" or again.value.ranks == (victim,)
    # the same processes go on in a smaller group
    with connected(mode, dist.PrefixStore("second", store), rank, world_size - 1) as comm:
        x = torch.ones(3)
        comm.all_reduce(x, SUM, Calls()("all_reduce"), soon())
    Path(done).touch()
    return first, str(again.value), x[0].item()


@MODES
def test_a_killed_rank_is_named_and_the_others_go_on(mode: str, port: int, tmp_path: Path) -> None:
    # in Gloo's mode only those that have to do with a rank notice: in a world of three, every rank
    world_size = 4 if mode == "tcp" else 3
    done = str(tmp_path / "done")
    results = on_processes(world_size, lose_one, port, mode, done, may_die=(world_size - 1,))
    assert not os.path.exists(f"{done}-in-vain"), "a forked child kept the connections open"
    for first, again, total in results[:-1]:
        assert f"rank {world_size - 1}" in first or mode == "gloo"
        assert "Connection closed by peer" in first
        assert "lost rank" in again
        assert total == world_size - 1


def end_without_closing(rank: int, world_size: int, port: int) -> float:
    """Rank 0 returns at once, without a word; the others still have something to do."""
    comm = connect_tcp(client(port), rank, world_size, "test", Loopback(), soon())
    calls = Calls()
    comm.barrier(calls("barrier"), soon())
    x = torch.full((4,), float(rank))
    if rank == 1:
        time.sleep(0.5)  # not to synchronise: rank 0 must be gone when this message goes
        comm.post_send(x, 2, 0, SINGLE, soon()).wait(None)
    elif rank == 2:
        receive = comm.post_recv(x, 1, 0, SINGLE, soon())
        assert receive.wait(None)
        if receive.error is not None:
            raise receive.error
    return x[0].item()


def test_a_rank_that_ends_without_closing_its_group_is_not_lost(port: int) -> None:
    assert on_processes(3, end_without_closing, port) == [0.0, 1.0, 1.0]


def use_in_a_fork(rank: int, world_size: int, port: int) -> str:
    with connected("tcp", client(port), rank, world_size) as comm:
        calls = Calls()
        comm.barrier(calls("barrier"), soon())
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                comm.barrier(calls("barrier"), soon())
            except errors.Aborted as error:
                os.write(writer, str(error).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        comm.barrier(calls("barrier"), soon())
        return os.read(reader, 1000).decode()


def test_a_forked_child_cannot_use_its_parent_s_group_and_does_not_disturb_it(port: int) -> None:
    for text in on_processes(2, use_in_a_fork, port):
        assert "belongs to the process that created it" in text
