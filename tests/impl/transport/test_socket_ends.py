"""How groups over real sockets end: abort, timeout, ranks that never come, closing, leftovers."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from impl import errors
from impl.transport.base import Communicator
from tests.impl.transport.ranks import (
    MODES,
    PATIENCE_S,
    SINGLE,
    Calls,
    Loopback,
    connected,
    run_group,
    run_ranks,
    soon,
)


@MODES
def test_an_abort_ends_what_waits_here_and_elsewhere(mode: str) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        comm.barrier(calls("barrier"), soon())
        if comm.rank == 0:
            with pytest.raises(errors.CommunicationError) as caught:
                comm.barrier(calls("barrier"), soon())
            error: BaseException | None = caught.value
        else:
            pending = comm.post_recv(torch.ones(1), 0, 0, SINGLE, soon())
            threading.Timer(0.05, comm.abort, args=("enough is enough",)).start()
            assert pending.wait(None)
            error = pending.error
        assert error is not None
        with pytest.raises(type(error)):
            comm.post_send(torch.ones(1), 1 - comm.rank, 0, SINGLE, soon())
        return error

    first, second = run_group(mode, 2, program)
    assert isinstance(second, errors.Aborted)
    assert "enough is enough" in str(second)
    assert isinstance(first, errors.Aborted if mode == "tcp" else errors.PeerLost)


def test_a_timeout_names_the_ranks_that_have_not_come_and_ends_the_group_everywhere() -> None:
    release = threading.Event()

    def program(comm: Communicator, calls: Calls) -> Any:
        if comm.rank == 2:
            assert release.wait(60)
            with pytest.raises(errors.CollectiveTimeout, match="gave up"):
                comm.barrier(calls("barrier"), soon())
            return None
        try:
            with pytest.raises(errors.CollectiveTimeout) as caught:
                comm.barrier(calls("barrier"), soon(1.0 if comm.rank == 0 else 60))
        finally:
            release.set()
        return str(caught.value)

    first, second, _ = run_group("tcp", 3, program)
    assert "Timed out waiting 1000ms" in first
    assert "rank 2 has not joined" in first
    assert "rank 0 gave up" in second


def test_a_rank_that_never_comes_is_named() -> None:
    store = dist.HashStore()

    def rank_function(rank: int) -> str:
        with (
            pytest.raises(errors.CollectiveTimeout) as caught,
            connected("tcp", store, rank, 3, timeout_s=1.0),
        ):
            pass
        return str(caught.value)

    for text in run_ranks(2, rank_function):
        assert "rank 2 has not come" in text
        assert "Timed out waiting 1000ms" in text


def test_a_rank_that_cannot_join_is_told_to_the_others() -> None:
    store = dist.HashStore()

    def rank_function(rank: int) -> tuple[str, float]:
        began_s = time.monotonic()
        options = Loopback(interface="no such" if rank == 2 else None)
        with (
            pytest.raises(RuntimeError) as caught,
            connected("tcp", store, rank, 3, options),
        ):
            pass
        return str(caught.value), time.monotonic() - began_s

    *others, (its_own, _) = run_ranks(3, rank_function)
    assert "no such" in its_own
    for text, seconds in others:
        assert "another rank could not join: rank 2: " in text
        assert its_own in text
        assert seconds < PATIENCE_S / 2


def test_a_store_that_fails_is_reported() -> None:
    class Broken(dist.HashStore):
        def wait(self, *_: Any) -> None:
            raise ConnectionError("the store is gone")

    with (
        pytest.raises(errors.CommunicationError, match="the store is gone"),
        connected("tcp", Broken(), 0, 2),
    ):
        pass


@MODES
def test_nothing_is_left_behind(mode: str) -> None:
    run_group(mode, 2, lambda comm, calls: comm.barrier(calls("barrier"), soon()))
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        run_group(mode, 3, lambda comm, calls: comm.barrier(calls("barrier"), soon()))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads


@MODES
def test_closing_waits_for_a_thread_that_waits_for_a_message(mode: str) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        comm.barrier(calls("barrier"), soon())
        if comm.rank == 0:
            assert closed.wait(60)
            return
        seen: list[BaseException] = []

        def wait(tag: int) -> None:
            try:
                transfer = comm.post_recv(torch.ones(1), 0, tag, SINGLE, soon())
                posted.release()
                assert transfer.wait(None)
                assert isinstance(transfer.error, errors.Aborted)
            except BaseException as error:
                seen.append(error)

        waiting = [threading.Thread(target=wait, args=(tag,)) for tag in range(3)]
        for thread in waiting:
            thread.start()
        for _ in waiting:
            assert posted.acquire(timeout=60)
        comm.close()
        closed.set()
        for thread in waiting:
            thread.join(60)
        assert not seen, seen

    closed, posted = threading.Event(), threading.Semaphore(0)
    for _ in range(3):
        closed.clear()
        run_group(mode, 2, program)


@MODES
def test_closing_twice_and_using_a_closed_group(mode: str) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        comm.barrier(calls("barrier"), soon())
        comm.close()
        comm.close()
        with pytest.raises(errors.Aborted, match="destroyed"):
            comm.barrier(calls("barrier"), soon())
        comm.abort("too late")

    run_group(mode, 2, program)
