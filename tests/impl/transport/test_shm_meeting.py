"""Which ranks share memory: found out by trying."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from impl import errors
from impl.transport.meeting.store import StoreMeeting
from impl.transport.shm import Meeting, meeting
from impl.transport.shm.mapping import SharedFile, SharingRefused
from tests.impl.threads import on_threads
from tests.impl.transport.shm_ranks import soon


def test_islands_are_listed_by_their_lowest_rank() -> None:
    assert meeting.islands_of([0, 0, 2, 0]) == ((0, 1, 3), (2,))
    assert meeting.islands_of([0]) == ((0,),)
    assert meeting.islands_of([0, 1, 1]) == ((0,), (1, 2))


def meet_all(world_size: int) -> list[Meeting]:
    store = dist.HashStore()
    return on_threads(
        world_size,
        lambda rank: meeting.meet(
            store, rank, world_size, group="g", segment_nbytes=4096, until=soon()
        ),
    )


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_of_one_machine_form_one_island(world_size: int) -> None:
    for result in meet_all(world_size):
        assert result.islands == (tuple(range(world_size)),)
        assert result.why_apart == ""
        assert result.mapping is not None
        result.mapping.close()


def test_ranks_that_cannot_open_each_others_files_stay_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = meeting._join

    def apart(offer: str, rank: int, nbytes: int) -> Any:
        # as if odd and even ranks ran in different containers
        if rank % 2 != numbers[offer] % 2:
            raise SharingRefused("another container")
        return real(offer, rank, nbytes)

    numbers: dict[str, int] = {}

    class Numbered(SharedFile):
        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            numbers[self.offer] = int(threading.current_thread().name)

    monkeypatch.setattr(meeting, "_join", apart)
    monkeypatch.setattr(meeting, "SharedFile", Numbered)
    store = dist.HashStore()
    found: dict[int, Meeting] = {}

    def run(rank: int) -> None:
        found[rank] = meeting.meet(store, rank, 3, group="g", segment_nbytes=4096, until=soon())

    threads = [threading.Thread(target=run, args=(r,), name=str(r)) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {found[rank].islands for rank in range(3)} == {((0, 2), (1,))}
    assert found[1].mapping is None
    assert found[1].why_apart == "another container"
    for rank in (0, 2):
        mapping = found[rank].mapping
        assert mapping is not None
        mapping.close()


def test_a_rank_without_shared_memory_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> Any:
        raise SharingRefused("needs Linux")

    monkeypatch.setattr(meeting, "SharedFile", refuse)
    for rank, result in enumerate(meet_all(2)):
        assert result.islands == ((0,), (1,))
        assert result.mapping is None
        assert result.why_apart == "needs Linux", rank


def test_a_rank_that_never_comes_is_named() -> None:
    store = dist.HashStore()
    with pytest.raises(errors.CollectiveTimeout, match="ranks 1, 2 have not come"):
        meeting.meet(store, 0, 3, group="g", segment_nbytes=4096, until=soon(0.2))
    # nothing is left for a later attempt to stumble over
    assert not store.check(["offer/0"])
    assert not store.check(["host/0"])


def test_a_rank_that_fails_is_told_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(offer: str, rank: int, nbytes: int) -> Any:
        raise MemoryError("nothing left")

    monkeypatch.setattr(meeting, "_join", join)
    store = dist.HashStore()
    with pytest.raises(MemoryError):
        meeting.meet(store, 0, 3, group="g", segment_nbytes=4096, until=soon())
    with pytest.raises(errors.CommunicationError, match="rank 0: MemoryError: nothing left"):
        StoreMeeting(store, 1, 3, "g", soon()).check_others()
