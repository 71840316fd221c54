"""The ranks of a group agree on keys that are new to all of them, whatever the store holds."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from impl import errors
from impl.gloo.connect.fresh_prefix import PrefixMeeting
from impl.transport.base import Deadline
from tests.impl.threads import on_threads


def soon(timeout_s: float = 30.0) -> Deadline:
    return Deadline.after(timeout_s)


def agree(store: dist.Store, world_size: int) -> str:
    prefixes = on_threads(
        world_size, lambda rank: PrefixMeeting(store, rank, world_size, "g", soon()).agree()
    )
    assert len(set(prefixes)) == 1
    return prefixes[0]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_attempt_gets_a_prefix_of_its_own(world_size: int) -> None:
    store = dist.HashStore()
    assert len({agree(store, world_size) for _ in range(4)}) == 4


def test_leftovers_of_other_attempts_do_no_harm() -> None:
    store = dist.HashStore()
    # rank 1 died after it had come; another roll was called and half answered
    store.set("here/1", "dead")
    store.set("here/2", "dead too")
    store.set("roll", '["old", ["a", "dead", "dead too"]]')
    store.set("old/heard/1", "")
    store.set("old/go", "")
    assert agree(store, 3) != "old"


def test_ranks_that_do_not_come_are_named() -> None:
    store = dist.HashStore()
    begun = threading.Barrier(2)

    def run(rank: int) -> str:
        if rank in (1, 3):
            return ""
        begun.wait(30)
        with pytest.raises(errors.CollectiveTimeout) as caught:
            PrefixMeeting(store, rank, 4, "g", soon(0.5)).agree()
        return str(caught.value)

    for message in on_threads(4, run)[::2]:
        assert "ranks 1, 3 have not come" in message
        assert "Timed out waiting 500ms for rendezvous operation to complete" in message


@pytest.mark.parametrize("roll", ["", "{}", '["a"]', "[1, []]", '["a", "bc"]', "[" * 9000])
def test_a_malformed_roll_is_told(roll: str) -> None:
    store = dist.HashStore()
    store.set("roll", roll)
    with pytest.raises(errors.CommunicationError, match="what rank 0 has published as 'roll' is"):
        PrefixMeeting(store, 1, 2, "g", soon(30)).agree()


def test_a_rank_that_came_to_an_earlier_attempt_only_is_named() -> None:
    store = dist.HashStore()
    store.set("here/1", "dead")
    with pytest.raises(errors.CollectiveTimeout, match="rank 1 has not come"):
        PrefixMeeting(store, 0, 2, "g", soon(0.1)).agree()


def test_attempts_after_a_failed_one_succeed() -> None:
    store = dist.HashStore()
    with pytest.raises(errors.CollectiveTimeout):
        PrefixMeeting(store, 0, 2, "g", soon(0.05)).agree()
    with pytest.raises(errors.CollectiveTimeout):
        PrefixMeeting(store, 1, 2, "g", soon(0.05)).agree()
    agree(store, 2)


def test_a_second_process_with_a_rank_is_told_that_the_group_formed() -> None:
    store = dist.HashStore()
    came = [threading.Event() for _ in range(3)]

    class Process(PrefixMeeting):
        def __init__(self, number: int, rank: int) -> None:
            super().__init__(store, rank, 2, "g", soon())
            self.number = number

        def publish(self, key: str, value: str | bytes) -> None:
            super().publish(key, value)
            came[self.number].set()

    processes = [Process(number, rank) for number, rank in enumerate((0, 1, 1))]

    def run(number: int) -> str:
        """Process 2 comes first, as rank 1; process 1 takes its place; then rank 0 comes."""
        if number == 2:
            with pytest.raises(errors.CollectiveTimeout) as caught:
                processes[2].agree()
            return str(caught.value)
        came[number + 1].wait(30)
        prefix = processes[number].agree()
        processes[2].until = soon(0)  # its time is over, now that there is a group
        return prefix

    prefix, same, message = on_threads(3, run)
    assert prefix == same
    assert "the group formed with another process as rank 1" in message


def test_a_group_that_formed_before_says_nothing_of_this_one() -> None:
    store = dist.HashStore()
    agree(store, 2)
    with pytest.raises(errors.CollectiveTimeout, match=r"rank 0 has not come"):
        PrefixMeeting(store, 1, 2, "g", soon(0.2)).agree()


def test_a_token_that_was_tidied_away_is_renewed() -> None:
    """As when rank 0 is late in tidying up after an earlier attempt."""
    store = dist.HashStore()
    store.set("roll", '["old", ["a", "b"]]')  # so that rank 1 does not wait for a roll
    rank_1 = threading.Thread(target=lambda: PrefixMeeting(store, 1, 2, "g", soon()).agree())
    rank_1.start()
    store.wait(["here/1"])
    store.delete_key("here/1")
    PrefixMeeting(store, 0, 2, "g", soon()).agree()
    rank_1.join()


def test_a_store_that_fails_is_not_a_timeout() -> None:
    class Broken:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Connection reset by peer")

    broken: Any = Broken()
    with pytest.raises(RuntimeError, match="Connection reset"):
        PrefixMeeting(broken, 0, 2, "g", soon()).agree()
