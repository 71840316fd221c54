"""send, recv and monitored_barrier of the process group; ranks are threads."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

from impl import errors
from impl.gloo import ProcessGroupGloo
from impl.gloo.operations import monitored_barrier
from impl.transport.base import Transfer
from impl.transport.end_cause import EndCause, Fate
from impl.transport.transfer import PostedTransfer
from tests.impl.gloo.ranks import in_groups


def test_send_and_receive() -> None:
    def run(group: ProcessGroupGloo) -> None:
        peer = 1 - group.rank()
        sent = group.send([torch.full((3,), float(group.rank()))], peer, 4)
        got = torch.zeros(3)
        work = group.recv([got], peer, 4)
        assert work.wait()
        assert sent.wait()
        assert got.eq(peer).all()
        assert work.source_rank() == work._source_rank() == peer
        assert work.result()[0] is got
        with pytest.raises(RuntimeError, match="sourceRank"):
            sent.source_rank()

    in_groups(2, run)


def test_futures_of_transfers_may_wait_for_other_transfers() -> None:
    def run(group: ProcessGroupGloo) -> None:
        peer = 1 - group.rank()
        first, second = torch.zeros(1), torch.zeros(1)

        def receive_another(_: torch.futures.Future[list[torch.Tensor]]) -> float:
            group.recv([second], peer, 2).wait()
            return float(second)

        chained = group.recv([first], peer, 1).get_future().then(receive_another)
        group.send([torch.ones(1)], peer, 1)
        group.send([torch.full((1,), 2.0)], peer, 2)
        assert chained.wait() == 2.0

    in_groups(2, run)


def test_waits_and_timeouts() -> None:
    def run(group: ProcessGroupGloo) -> None:
        if group.rank() == 0:
            work = group.recv([torch.zeros(1)], 1, 0)
            with pytest.raises(
                RuntimeError, match="Timed out waiting 5ms for recv operation to complete"
            ):
                work.wait(timedelta(milliseconds=5))
            assert not work.is_completed()
            waited.set()
            work.wait()
            group.set_timeout(timedelta(milliseconds=5))
            with pytest.raises(errors.CollectiveTimeout, match="Timed out waiting 5ms"):
                group.recv([torch.zeros(1)], 1, 3).wait()
            over.set()
        else:
            assert waited.wait(30)
            group.send([torch.ones(1)], 0, 0).wait()
            assert over.wait(30)

    waited, over = threading.Event(), threading.Event()
    in_groups(2, run)


def test_refusals_keep_torchs_words() -> None:
    def run(group: ProcessGroupGloo) -> None:
        one = torch.ones(1)
        with pytest.raises(RuntimeError, match="ProcessGroupGloo::send takes a single tensor"):
            group.send([one, one], 0, 0)
        with pytest.raises(RuntimeError, match="Tag must be nonnegative"):
            group.recv([one], 0, -1)
        with pytest.raises(RuntimeError, match="Tag must be nonnegative"):
            group.recv_anysource([one], -1)
        with pytest.raises(RuntimeError, match="invalid rank: 5"):
            group.send([one], 5, 0)
        with pytest.raises(RuntimeError, match="has to be dense"):
            group.send([torch.eye(2).to_mkldnn()], 0, 0)

    in_groups(1, run)


@pytest.mark.parametrize("tag", [1.0, "1", 2**31])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_is_no_tag_is_refused_and_nothing_else(transport: str, tag: Any) -> None:
    def run(group: ProcessGroupGloo) -> None:
        one = torch.ones(1)
        peer: Any = torch.tensor(1 - group.rank())
        for post in (group.send, group.recv):
            with pytest.raises(TypeError):
                post([one], peer, tag)
        with pytest.raises(TypeError):
            group.recv_anysource([one], tag)
        sent = group.send([one], peer, 2**31 - 1)
        group.recv([one], peer, 2**31 - 1).wait()
        sent.wait()

    in_groups(2, run, transport=transport)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_monitored_barrier_passes(world_size: int) -> None:
    def run(group: ProcessGroupGloo) -> None:
        # a user's message with tag 0 is none of the barrier's business
        if group.rank() == 0:
            sent = group.send([torch.ones(1)], world_size - 1, 0)
        group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
        group.monitored_barrier()
        if group.rank() == world_size - 1:
            group.recv([torch.zeros(1)], 0, 0).wait()
        if group.rank() == 0:
            sent.wait()

    in_groups(world_size, run)


@pytest.mark.parametrize("wait_all_ranks", [True, False])
def test_monitored_barrier_names_the_missing_in_torchs_words(wait_all_ranks: bool) -> None:
    def run(group: ProcessGroupGloo) -> None:
        if group.rank() == 0:
            named = "Ranks 1, 3" if wait_all_ranks else "Rank 1"
            with pytest.raises(
                RuntimeError,
                match=rf"\[Rank 0\]: {named} failed to pass monitoredBarrier in 500 ms",
            ):
                group.monitored_barrier(timedelta(milliseconds=500), wait_all_ranks)
            over.set()
        elif group.rank() == 2:
            with pytest.raises(
                RuntimeError,
                match=r"Rank 2 successfully reached monitoredBarrier, but received errors while "
                r"waiting for send/recv from rank 0\. Please check rank 0 logs for faulty rank",
            ):
                group.monitored_barrier(timedelta(milliseconds=500), wait_all_ranks)
        assert over.wait(30)
        # the group is as good as before
        group.barrier().wait()

    over = threading.Event()
    in_groups(4, run)


def test_monitored_barrier_without_time_fails_at_once() -> None:
    def run(group: ProcessGroupGloo) -> None:
        if group.rank() == 0:
            with pytest.raises(
                RuntimeError,
                match=r"Rank 1 failed to pass monitoredBarrier in 0 ms\n.*\n"
                r"Rank 0 timed out in monitoredBarrier after 0 ms\.\n"
                "No ranks successfully processed in monitoredBarrier",
            ):
                group.monitored_barrier(timedelta(0))
            over.set()
        assert over.wait(30)

    over = threading.Event()
    in_groups(2, run)


def test_monitored_barrier_says_who_came_in_time() -> None:
    heard: dict[int, Transfer] = {}
    for rank in (1, 2, 3):
        transfer = PostedTransfer()
        transfer.finish(errors.CollectiveTimeout("rank 3 is late") if rank == 3 else None)
        heard[rank] = transfer
    with pytest.raises(errors.CommunicationError, match=r"Successfully processed ranks: 1, 2\n"):
        monitored_barrier._await_each(heard, 0.2, wait_all_ranks=False)


@pytest.mark.parametrize("noticed_by", [0, 3])
@pytest.mark.parametrize("wait_all_ranks", [True, False])
def test_monitored_barrier_blames_the_dead_alone(noticed_by: int, wait_all_ranks: bool) -> None:
    """A rank that dies ends the group, and so what the slow ones were about to send."""
    text = errors.peer_lost_message("recv on group 'g'", [2], 4, "its process ended")
    fate = Fate(EndCause.LOST, noticed_by, text, lost=(2,))
    heard: dict[int, Transfer] = {}
    for rank in (1, 2, 3):
        transfer = PostedTransfer()
        transfer.finish(fate.error("recv on group 'g'", 0, 4))
        heard[rank] = transfer
    named = "Ranks 2" if wait_all_ranks else "Rank 2"
    with pytest.raises(errors.CommunicationError, match=rf"\[Rank 0\]: {named} failed to pass"):
        monitored_barrier._await_each(heard, 0.2, wait_all_ranks)
