"""Messages over real sockets: their order, threads, receives from anyone, messages to oneself."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from impl import errors
from impl.transport.base import ANY_SOURCE, Communicator
from tests.impl.transport.combines import SUM
from tests.impl.transport.ranks import MODES, SINGLE, Calls, run_group, soon


@MODES
@pytest.mark.parametrize("size", [0, 3, 500_000])
def test_messages_between_all_pairs_in_all_orders(mode: str, size: int) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        n, rank = comm.world_size, comm.rank
        others = [r for r in range(n) if r != rank]
        outgoing = [
            (to, tag, torch.full((size,), float(100 * rank + tag)))
            for to in others
            for tag in (0, 5, 1 << 31)
        ]
        incoming = {(src, tag): torch.empty(size) for src in others for tag in (0, 5, 1 << 31)}
        order = random.Random(rank)
        order.shuffle(outgoing)
        sends = [comm.post_send(x, to, tag, SINGLE, soon()) for to, tag, x in outgoing]
        keys = sorted(incoming)
        order.shuffle(keys)
        receives = {
            key: comm.post_recv(incoming[key], key[0], key[1], SINGLE, soon()) for key in keys
        }
        for (source, tag), transfer in receives.items():
            assert transfer.wait(None)
            assert transfer.error is None
            assert transfer.source == source
            expected = torch.full((size,), float(100 * source + tag))
            assert torch.equal(incoming[source, tag], expected)
        for send in sends:
            assert send.wait(None)
            assert send.error is None
        comm.barrier(calls("barrier"), soon())

    run_group(mode, 3, program)


@MODES
def test_a_transfer_progresses_while_nobody_waits(mode: str) -> None:
    """Large messages both ways, completed by the helper alone; callbacks come once."""

    def program(comm: Communicator, calls: Calls) -> Any:
        other = 1 - comm.rank
        x, y = torch.full((2_000_000,), float(comm.rank)), torch.empty(2_000_000)
        ended: list[str] = []
        both = threading.Semaphore(0)

        def note(name: str) -> None:
            ended.append(name)
            both.release()

        comm.post_send(x, other, 1, SINGLE, soon()).on_done(lambda: note("sent"))
        comm.post_recv(y, other, 1, SINGLE, soon()).on_done(lambda: note("received"))
        for _ in range(2):
            assert both.acquire(timeout=60)
        assert sorted(ended) == ["received", "sent"]
        assert y.unique().tolist() == [float(other)]
        comm.barrier(calls("barrier"), soon())

    run_group(mode, 2, program)


@MODES
def test_messages_from_several_threads_during_collectives(mode: str) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        other = 1 - comm.rank
        errors_seen: list[BaseException] = []

        def chat(tag: int) -> None:
            try:
                for i in range(30):
                    y = torch.empty(100 * tag + 1)
                    send = comm.post_send(torch.full_like(y, i), other, tag, SINGLE, soon())
                    receive = comm.post_recv(y, other, tag, SINGLE, soon())
                    assert receive.wait(None)
                    assert receive.error is None
                    assert y.unique().tolist() == [float(i)]
                    assert send.wait(None)
            except BaseException as error:
                errors_seen.append(error)

        threads = [threading.Thread(target=chat, args=(tag,)) for tag in (1, 2, 700)]
        for thread in threads:
            thread.start()
        for i in range(60):
            x = torch.full(((1, 40_000)[i % 2],), 1.0)
            comm.all_reduce(x, SUM, calls("all_reduce"), soon())
            assert x.unique().tolist() == [2.0]
        for thread in threads:
            thread.join()
        assert not errors_seen, errors_seen
        comm.barrier(calls("barrier"), soon())

    run_group(mode, 2, program)


@MODES
def test_a_receive_from_anyone(mode: str) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        seen = []
        if comm.rank == 0:
            for _ in range(4):
                x = torch.empty(1)
                transfer = comm.post_recv(x, ANY_SOURCE, 3, SINGLE, soon())
                assert transfer.wait(None)
                assert transfer.source == int(x)
                seen.append(transfer.source)
        else:
            for _ in range(2):
                send = comm.post_send(torch.tensor([float(comm.rank)]), 0, 3, SINGLE, soon())
                assert send.wait(None)
        comm.barrier(calls("barrier"), soon())
        return sorted(seen)

    assert run_group(mode, 3, program)[0] == [1, 1, 2, 2]


@MODES
def test_a_transfer_that_runs_out_of_time_fails_alone(mode: str) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        if comm.rank == 0:
            late = comm.post_recv(torch.empty(3), 1, 9, SINGLE, soon(0.5))
            assert not late.wait(0.001)
            assert late.wait(None)
            assert isinstance(late.error, errors.CollectiveTimeout)
            assert "Timed out waiting 500ms" in str(late.error)
        x = torch.ones(1)
        comm.all_reduce(x, SUM, calls("all_reduce"), soon())
        return x.item()

    assert run_group(mode, 2, program) == [2.0, 2.0]


def test_gloo_has_no_messages_to_oneself() -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        with pytest.raises(ValueError, match="itself"):
            comm.post_send(torch.ones(1), comm.rank, 0, SINGLE, soon())

    run_group("gloo", 2, program)


def test_messages_to_oneself_keep_their_order_by_tag() -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        me = comm.rank
        early = torch.zeros(1)
        first = comm.post_recv(early, me, 0, SINGLE, soon())
        for value, tag in ((1.0, 0), (2.0, 1), (3.0, 0), (4.0, 0)):
            assert comm.post_send(torch.tensor([value]), me, tag, SINGLE, soon()).wait(None)
        assert first.wait(None) and first.source == me
        late = torch.zeros(3)
        for into, tag in ((late[0:1], 0), (late[1:2], 1), (late[2:3], 0)):
            assert comm.post_recv(into, me, tag, SINGLE, soon()).wait(None)
        return [*early.tolist(), *late.tolist()]

    assert run_group("tcp", 2, program) == [[1.0, 3.0, 2.0, 4.0]] * 2


def test_messages_to_oneself_that_cannot_end_well() -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        me = comm.rank
        late = comm.post_recv(torch.zeros(1), me, 0, SINGLE, soon(0.05))
        assert late.wait(None) and isinstance(late.error, errors.CollectiveTimeout)
        short = comm.post_recv(torch.zeros(1), me, 0, SINGLE, soon())
        comm.post_send(torch.zeros(2), me, 0, SINGLE, soon())
        assert short.wait(None) and isinstance(short.error, errors.CollectiveMismatch)
        waiting = comm.post_recv(torch.zeros(1), me, 0, SINGLE, soon())
        comm.abort("enough")
        assert waiting.wait(None) and isinstance(waiting.error, errors.Aborted)

    run_group("tcp", 1, program)
