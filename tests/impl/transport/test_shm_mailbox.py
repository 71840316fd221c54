"""Point to point over shared memory."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from impl import errors
from impl.transport.base import ANY_SOURCE, Transfer
from impl.transport.shm import ShmCommunicator
from tests.impl.transport.shm_ranks import call, on_ranks, soon

LARGE = 500_000  # float32s: several times the ring
SEND, RECV = call("send"), call("recv")


def finish(*transfers: Transfer) -> None:
    for transfer in transfers:
        assert transfer.wait(30.0)
        assert transfer.error is None


def test_large_sends_to_each_other_before_any_receive() -> None:
    def exchange(comm: ShmCommunicator) -> None:
        peer = 1 - comm.rank
        sent = comm.post_send(torch.full((LARGE,), float(comm.rank)), peer, 0, SEND, soon())
        got = torch.zeros(LARGE)
        finish(comm.post_recv(got, peer, 0, RECV, soon()), sent)
        assert got.eq(peer).all()

    on_ranks(2, exchange)


def test_a_small_send_is_done_at_once() -> None:
    def send(comm: ShmCommunicator) -> None:
        if comm.rank == 0:
            assert comm.post_send(torch.ones(4), 1, 0, SEND, soon()).is_done()
        else:
            got = torch.zeros(4)
            transfer = comm.post_recv(got, 0, 0, RECV, soon())
            finish(transfer)
            assert transfer.source == 0
            assert got.eq(1).all()

    on_ranks(2, send)


@pytest.mark.parametrize("numel", [0, 1, 3, LARGE])
def test_tags_may_be_received_in_any_order(numel: int) -> None:
    def exchange(comm: ShmCommunicator) -> None:
        peer = 1 - comm.rank
        sends = [
            comm.post_send(torch.full((numel,), float(tag)), peer, tag, SEND, soon())
            for tag in range(4)
        ]
        for tag in (3, 0, 2, 1):
            got = torch.full((numel,), -1.0)
            finish(comm.post_recv(got, peer, tag, RECV, soon()))
            assert got.eq(tag).all()
        finish(*sends)

    on_ranks(2, exchange)


def test_one_tag_arrives_in_order() -> None:
    def exchange(comm: ShmCommunicator) -> None:
        if comm.rank == 0:
            finish(*[comm.post_send(torch.tensor([n]), 1, 7, SEND, soon()) for n in range(200)])
            return
        got = [torch.zeros(1, dtype=torch.int64) for _ in range(200)]
        finish(*[comm.post_recv(tensor, 0, 7, RECV, soon()) for tensor in got])
        assert [int(tensor) for tensor in got] == list(range(200))

    on_ranks(2, exchange)


def test_any_source_hears_everybody() -> None:
    def exchange(comm: ShmCommunicator) -> None:
        if comm.rank:
            finish(comm.post_send(torch.tensor([float(comm.rank)]), 0, 1, SEND, soon()))
            return
        heard = set()
        for _ in range(3):
            got = torch.zeros(1)
            transfer = comm.post_recv(got, ANY_SOURCE, 1, RECV, soon())
            finish(transfer)
            assert got.item() == transfer.source
            heard.add(transfer.source)
        assert heard == {1, 2, 3}

    on_ranks(4, exchange)


def test_a_rank_may_write_to_itself() -> None:
    def talk(comm: ShmCommunicator) -> None:
        got = torch.zeros(LARGE)
        receive = comm.post_recv(got, comm.rank, 0, RECV, soon())
        finish(comm.post_send(torch.ones(LARGE), comm.rank, 0, SEND, soon()), receive)
        assert got.eq(1).all()

    on_ranks(1, talk)


def test_transfers_end_without_anybody_waiting() -> None:
    def exchange(comm: ShmCommunicator) -> None:
        peer, done = 1 - comm.rank, threading.Event()
        got = torch.zeros(LARGE)
        comm.post_recv(got, peer, 0, RECV, soon()).on_done(done.set)
        sent = comm.post_send(torch.ones(LARGE), peer, 0, SEND, soon())
        assert done.wait(30.0)
        finish(sent)
        assert got.eq(1).all()
        late = threading.Event()
        sent.on_done(late.set)
        assert late.is_set()

    on_ranks(2, exchange)


def test_messages_cross_collectives() -> None:
    def exchange(comm: ShmCommunicator) -> None:
        peer = 1 - comm.rank
        got = torch.zeros(LARGE)
        receive = comm.post_recv(got, peer, 0, RECV, soon())
        sent = comm.post_send(torch.ones(LARGE), peer, 0, SEND, soon())
        for _ in range(20):
            comm.barrier(call("barrier"), soon())
        finish(receive, sent)

    on_ranks(2, exchange)


@pytest.mark.parametrize("early", [True, False], ids=["posted before", "posted after"])
def test_another_size_fails_that_receive_alone(early: bool) -> None:
    def exchange(comm: ShmCommunicator) -> None:
        if comm.rank == 0:
            if early:
                comm.barrier(call("barrier"), soon())
            comm.post_send(torch.ones(3), 1, 0, SEND, soon())
            comm.post_send(torch.full((2,), 5.0), 1, 0, SEND, soon())
            if not early:
                comm.barrier(call("barrier"), soon())
            return
        if not early:
            comm.barrier(call("barrier"), soon())
        bad, good = torch.zeros(2), torch.zeros(2)
        failed = comm.post_recv(bad, 0, 0, RECV, soon())
        fine = comm.post_recv(good, 0, 0, RECV, soon())
        if early:
            comm.barrier(call("barrier"), soon())
        assert failed.wait(30.0)
        assert isinstance(failed.error, errors.CollectiveMismatch)
        assert "rank 0 sent 12 bytes, but the tensor has 8" in str(failed.error)
        finish(fine)
        assert good.tolist() == [5.0, 5.0]

    on_ranks(2, exchange)


def test_a_wait_may_run_out_and_the_transfer_goes_on() -> None:
    def exchange(comm: ShmCommunicator) -> None:
        peer = 1 - comm.rank
        got = torch.zeros(1)
        receive = comm.post_recv(got, peer, 0, RECV, soon())
        assert not receive.wait(0.001)
        assert not receive.is_done()
        comm.barrier(call("barrier"), soon())
        comm.post_send(torch.ones(1), peer, 0, SEND, soon())
        finish(receive)

    on_ranks(2, exchange)


def test_a_wait_for_a_send_that_nobody_receives_runs_out() -> None:
    def send(comm: ShmCommunicator) -> None:
        if comm.rank == 0:
            sent = comm.post_send(torch.ones(LARGE), 1, 0, SEND, soon())
            assert not sent.wait(0.01)
            comm.barrier(call("barrier"), soon())
            finish(sent)
        else:
            comm.barrier(call("barrier"), soon())
            finish(comm.post_recv(torch.zeros(LARGE), 0, 0, RECV, soon()))

    on_ranks(2, send)


def test_a_transfer_that_times_out_fails_alone() -> None:
    def exchange(comm: ShmCommunicator) -> None:
        peer = 1 - comm.rank
        late = comm.post_recv(torch.zeros(1), peer, 0, RECV, soon(0.01))
        anyone = comm.post_recv(torch.zeros(1), ANY_SOURCE, 9, RECV, soon(0.01))
        for transfer, words in ((late, f"the other side is rank {peer}"), (anyone, "no rank has")):
            assert transfer.wait(30.0)
            assert isinstance(transfer.error, errors.CollectiveTimeout)
            assert "Timed out waiting 10ms for recv operation" in str(transfer.error)
            assert words in str(transfer.error)
        comm.barrier(call("barrier"), soon())
        # what arrives now is for the next receive, not for the one that failed
        comm.post_send(torch.full((1,), 4.0), peer, 0, SEND, soon())
        got = torch.zeros(1)
        finish(comm.post_recv(got, peer, 0, RECV, soon()))
        assert got.item() == 4.0

    on_ranks(2, exchange)


def test_what_a_rank_sent_before_it_left_still_arrives() -> None:
    left = threading.Event()

    def exchange(comm: ShmCommunicator) -> None:
        if comm.rank == 0:
            comm.post_send(torch.full((2,), 3.0), 1, 0, SEND, soon())
            comm.close()
            left.set()
            return
        assert left.wait(30.0)
        got = torch.zeros(2)
        finish(comm.post_recv(got, 0, 0, RECV, soon()))
        assert got.tolist() == [3.0, 3.0]
        nothing = comm.post_recv(got, 0, 0, RECV, soon())
        assert nothing.wait(30.0)
        assert isinstance(nothing.error, errors.PeerLost)

    on_ranks(2, exchange)


def test_a_send_to_a_rank_that_left_fails_though_a_message_of_its_is_unread() -> None:
    def exchange(comm: ShmCommunicator) -> None:
        if comm.rank == 1:
            finish(comm.post_send(torch.ones(1), 0, 5, SEND, soon()))
            comm.close()
            gone.set()
            return
        assert gone.wait(30.0)
        sent = comm.post_send(torch.ones(LARGE), 1, 0, SEND, soon())
        assert sent.wait(20.0)
        assert isinstance(sent.error, errors.PeerLost)
        finish(comm.post_recv(torch.zeros(1), 1, 5, RECV, soon()))

    gone = threading.Event()
    on_ranks(2, exchange)


def test_traffic_does_not_keep_time_from_running_out() -> None:
    def exchange(comm: ShmCommunicator) -> None:
        if comm.rank == 0:
            while not over.is_set():  # there is always something to move
                comm.post_send(torch.ones(9), 1, 0, SEND, soon())
            return
        never = comm.post_recv(torch.zeros(1), 0, 2, RECV, soon(20.0))
        late = comm.post_recv(torch.zeros(1), 0, 1, RECV, soon(0.2))
        try:
            assert not never.wait(0.1)
            assert late.wait(10.0)
            assert isinstance(late.error, errors.CollectiveTimeout)
        finally:
            over.set()

    over = threading.Event()
    on_ranks(2, exchange)


@pytest.mark.parametrize("source", [0, ANY_SOURCE], ids=["one", "any"])
def test_closing_waits_for_a_thread_that_waits_for_a_message(source: int) -> None:
    def exchange(comm: ShmCommunicator) -> None:
        if comm.rank == 0:
            assert closed.wait(30.0)
            return
        for _ in range(3):
            transfer = comm.post_recv(torch.zeros(1), source, 0, RECV, soon())
        waiting = threading.Thread(target=transfer.wait, args=(None,))
        waiting.start()
        while not comm._mailbox._drivers:
            time.sleep(0.001)
        comm.close()
        assert not comm._mailbox._drivers
        waiting.join(30.0)
        assert isinstance(transfer.error, errors.Aborted)
        closed.set()

    closed = threading.Event()
    on_ranks(2, exchange)


def test_a_thread_that_waits_may_close_the_group_itself() -> None:
    """As the handler of a signal does that arrives during the wait."""

    def exchange(comm: ShmCommunicator) -> None:
        if comm.rank == 0:
            finish(comm.post_send(torch.ones(1), 1, 0, SEND, soon()))
            assert closed.wait(30.0)
            return
        second = comm.post_recv(torch.zeros(1), 0, 1, RECV, soon())
        comm.post_recv(torch.zeros(1), 0, 0, RECV, soon()).on_done(comm.close)
        assert second.wait(30.0)
        closed.set()
        assert isinstance(second.error, errors.Aborted)

    closed = threading.Event()
    on_ranks(2, exchange)


def test_closing_fails_what_is_pending_and_stops_the_helper() -> None:
    def close(comm: ShmCommunicator) -> None:
        pending = comm.post_recv(torch.zeros(1), 1 - comm.rank, 0, RECV, soon())
        comm.barrier(call("barrier"), soon())
        comm.close()
        assert pending.is_done()
        assert isinstance(pending.error, errors.CommunicationError)

    on_ranks(2, close)
    assert not [t for t in threading.enumerate() if t.name.startswith("pygloo-p2p")]
